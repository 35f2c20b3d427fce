"""Fine-tuning on rows: the result predicts, and its folder predicts the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bothways
from bothways.core.errors import BothwaysError, ConfigError
from bothways.prediction.predictor import open_task
from toy_folder import make_examples, make_folder, write_tsv


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert")


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    return [
        {"text": example.text, "label": example.label} for example in make_examples(count, seed)
    ]


def test_rows_become_a_predictor_and_a_folder(model: Path, tmp_path: Path) -> None:
    settings = {"lr": 3e-3, "epochs": 8, "batch": 16, "max_length": 16}
    result = bothways.finetune(
        model, rows(160, 0), rows(60, 1), "sentiment", device="cpu", **settings
    )
    assert result.metrics["accuracy"] > 0.8
    assert len(result.history) == 8
    texts = [row["text"] for row in rows(8, 2)]
    found = result.predictor()(texts)
    opened = open_task(result.save(tmp_path / "saved"), "text-classification", device="cpu")
    assert [p.label for p in opened(texts)] == [p.label for p in found]
    assert opened.task.length == 16
    assert opened.evaluate(rows(60, 1))["accuracy"] == result.metrics["accuracy"]


def test_files_frames_and_rows_are_the_same_run(model: Path, tmp_path: Path) -> None:
    import pandas

    settings = {"epochs": 0.5, "max_length": 16, "device": "cpu"}
    file = write_tsv(tmp_path / "train.tsv", make_examples(64, 0))
    dev = rows(30, 1)
    runs = [
        bothways.finetune(model, data, dev, **settings)  # type: ignore[arg-type]
        for data in (rows(64, 0), file, str(file), pandas.DataFrame(rows(64, 0)))
    ]
    assert all(run.metrics == runs[0].metrics for run in runs)


def test_what_cannot_be_learned_is_one_message(model: Path) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        bothways.finetune(model, rows(8, 0), lrr=1)
    with pytest.raises(ConfigError, match="is not a task"):
        bothways.finetune(model, rows(8, 0), task="paint")
    with pytest.raises(BothwaysError, match="train row 1"):
        bothways.finetune(model, [{"text": 5, "label": "a"}])


def test_rows_have_a_run_folder_that_is_resumed(model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_length": 16, "device": "cpu", "epochs": 1}
    alone = bothways.finetune(model, rows(64, 0), rows(30, 1), **settings)
    done = bothways.finetune(model, rows(64, 0), rows(30, 1), out=tmp_path / "run", **settings)
    assert done.metrics == alone.metrics
    assert (done.folder, alone.folder) == (tmp_path / "run" / "model", None)
    for name in ("metrics.jsonl", "report.html", "config.toml"):
        assert (tmp_path / "run" / name).exists()
    again = bothways.finetune(
        model, rows(64, 0), rows(30, 1), out=tmp_path / "run", resume=True, **settings
    )
    assert again.metrics == done.metrics
    with pytest.raises(BothwaysError, match=r"is of another run: data\.train is not the same"):
        bothways.finetune(
            model, rows(65, 0), rows(30, 1), out=tmp_path / "run", resume=True, **settings
        )
    saved = alone.save(tmp_path / "saved")
    record = bothways.load(saved).task
    assert record.length == 16
    assert "fine-tuned on train rows" in (saved / "README.md").read_text()
