"""The benchmark of this machine: both sides are given the same work, it is counted as the paper's shapes say, and told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertForPreTraining

from bothways.commands.bench import bench
from bothways.core.errors import ResourceError
from bothways.interop.folder import save_model
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.heads import Masked, Model, Pair, Pooled
from bothways.objectives.pretraining import Pretraining
from bothways.recipes import bench as recipe
from bothways.recipes.bench import WORKLOADS, Workload, contenders, make_batch

CPU = torch.device("cpu")
TINY = Workload("tiny", EncoderConfig(60, 16, 2, 2, 32), 3, 20)


def test_both_sides_read_the_same_tokens_and_labels(tmp_path: Path) -> None:
    config = EncoderConfig(60, 16, 2, 2, 32, dropout=Dropouts(0.0, 0.0))
    model, batch = Model(config, (Masked(), Pooled(), Pair())).eval(), make_batch(TINY)
    save_model(tmp_path, model)
    theirs = BertForPreTraining.from_pretrained(tmp_path).eval()
    losses = Pretraining(model, recipe.Masking(), recipe._no_vocabulary())(batch)
    weights = {"masked": 3 * recipe.Masking().count(20), "pair": 3}
    expected = sum(loss.total / weights[name] for name, loss in losses.items())
    assert losses.keys() == weights.keys()
    torch.testing.assert_close(theirs(**recipe._padded(batch)).loss, expected, rtol=0, atol=1e-5)


def test_operations_are_those_of_the_matrices() -> None:
    work = WORKLOADS["base"]
    h, n, masked, vocab = 768, 128, 19, 30522
    asked = masked + 1  # of the last block after its attention: masked tokens and [CLS]
    block = 3 * h * h * 2 + 2 * 2 * n * h
    rest = (h * h + 2 * 4 * h * h) * 2
    heads = masked * 2 * (h * h + h * vocab) + 2 * (h * h + 2 * h)
    forward = n * 12 * block + (n * 11 + asked) * rest + heads
    assert work.operations == pytest.approx(3 * work.rows * forward, rel=1e-3)


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    for name in recipe.CONTENDERS:
        monkeypatch.setitem(recipe.CONTENDERS, name, lambda *_, name=name: lambda: turns.append(name))
    timings = recipe.race(TINY, 2, CPU)
    assert set(contenders(CPU)) == {"bothways", "transformers"}
    assert len(turns) == 3 * len(timings)
    assert turns == turns[: len(timings)] * 3
    assert all(len(timing.rounds) == 2 for timing in timings)
    assert len(contenders(torch.device("cuda"))) == 4


@pytest.mark.parametrize("contender", ["bothways", "transformers"])
def test_an_update_changes_the_weights(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.nn.Module] = []
    usual = torch.nn.Module.to

    def note(module: torch.nn.Module, *given: object) -> torch.nn.Module:
        made.append(module)
        return usual(module, *given)

    monkeypatch.setattr(torch.nn.Module, "to", note)
    update = recipe.CONTENDERS[contender](TINY, make_batch(TINY), "fp32", CPU)
    before = [parameter.detach().clone() for parameter in made[0].parameters()]
    update()
    assert all(not torch.equal(one, other) for one, other in zip(made[0].parameters(), before, strict=True))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(WORKLOADS, "small", TINY)
    monkeypatch.setattr(recipe, "gemm_rate", lambda *_: 1e12)
    monkeypatch.setenv("COLUMNS", "150")
    bench(rounds=1, device="cpu")
    said = capsys.readouterr().out
    assert "Pre-training step, tiny, 3 × 20 tokens" in said
    assert all(f"{name} fp32" in said for name in contenders(CPU))
    assert "MiB" in said
    assert f"torch {torch.__version__}" in said


def test_a_process_that_does_not_come_to_its_end_has_no_peak() -> None:
    assert recipe.peak_memory("nobody", TINY, "fp32", CPU) is None


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(recipe, "race", full)
    with pytest.raises(ResourceError, match=r"(?s)has not the memory for 3 × 20 tokens of tiny.*bothways bench small"):
        recipe.measure(TINY, 1, CPU)
