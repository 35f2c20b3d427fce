"""A stopped and resumed run ends in the weights of one without a break, whatever it trains."""

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest

import bothways
from bothways.finetuning.lora import LoRALinear
from toy_folder import make_rows
from toy_training import equal, signal_at


def scores(count: int, seed: int) -> list[dict[str, Any]]:
    """Scores far from 0, which the head learns in their own units."""
    rows = make_rows(count, seed)
    return [{"text": row["text"], "score": 10_000 + 3000 * (row["label"] == "pos")} for row in rows]


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    texts = [row["text"] for row in make_rows(count, seed)]
    return [{"anchor": one, "positive": other} for one, other in itertools.pairwise(texts)]


EVERYTHING = {"layer_decay": 0.9, "reinitialise": 1, "frozen": 1, "pull": 1.0}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "low-rank": (make_rows, {"lora": {"rank": 2, "alpha": 4.0}}),
    "stability": (make_rows, {"stability": EVERYTHING, "seed": 4, "order_seed": 7}),
    "patience": (make_rows, {"early_stopping": 1, "evaluate": "2 steps"}),
    "scores": (scores, {"task": "regress"}),
    "few-shot": (make_rows, {"recipe": "few-shot", "few_shot": {"pairs": 4}}),
    "vectors": (pairs, {"task": "embed"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_one_without_a_break(case, folder, tmp_path):
    make, settings = CASES[case]

    def run(name: str, **more: Any) -> Any:
        return bothways.finetune(
            folder, make(64, 0), make(20, 1), out=tmp_path / name, until="8 steps", lr=3e-3,
            length=16, device="cpu", progress=False, training={"save": "3 steps"},
            **settings, **more,
        )  # fmt: skip

    whole, stopped = run("whole"), run("run", on_event=signal_at(2, signal.SIGTERM))
    assert (stopped.folder, stopped.finished, stopped.progress.steps) == (None, False, 2)
    assert not any(isinstance(part, LoRALinear) for part in stopped.task_model.modules())
    again = run("run", resume=True)
    assert again.metrics == whole.metrics
    ends = [(done.progress.steps, done.progress.early) for done in (again, whole)]
    assert ends[0] == ends[1]
    assert equal(again.task_model, whole.task_model)
    files = [Path(tmp_path, name, "model/model.safetensors") for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    if case == "stability":
        card = (tmp_path / "whole/model/README.md").read_text()
        assert "| pull | 1.0 |" in card
        assert "| seed of the order | 7 |" in card
