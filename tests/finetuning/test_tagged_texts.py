"""Taggers from texts with character spans, and from single characters: trained, saved, predicted."""

import json
from pathlib import Path
from typing import Any

import pytest

import bothways
from bothways.cli.main import app
from bothways.core.errors import ConfigError
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.task import TaggingTask
from toy_folder import make_folder

TEXT = "a good film."
ROWS = [{"text": TEXT, "label": [[2, 6, "X"]]}, {"text": f"{TEXT} bad", "label": [[13, 16, "X"]]}]


def tune(folder: Path, out: Path | None, train: Any, dev: Any) -> Any:
    make_folder(folder)
    return bothways.finetune(
        folder, train, dev, "ner", out=out, progress=False, **{"training.until": "1 epochs"}
    )


def test_predicted_spans_can_be_trained_on(tmp_path, capsys):
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 8), encoding="utf8")
    out = tmp_path / "run"
    done = tune(tmp_path / "bert", out, train, ROWS)
    assert done.task_model.labels == ("O", "B-X", "I-X")
    predictor = bothways.load(out)
    assert predictor.evaluate(ROWS)["f1"] == predictor.evaluate(train)["f1"]
    texts = tmp_path / "new.txt"
    texts.write_text(f"{TEXT}\nbad\n\n", encoding="utf8")
    capsys.readouterr()
    app(["predict", str(out), str(texts), "--format", "spans"], result_action="return_value")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [TEXT, "bad", ""]
    assert lines == [prediction.to_spans() for prediction in predictor([TEXT, "bad", ""])]
    app(
        ["predict", str(out), str(texts), "--format", "spans", "--out", str(tmp_path / "parts")],
        result_action="return_value",
    )
    (part,) = (tmp_path / "parts").glob("part-*")
    assert [json.loads(line) for line in part.read_text("utf8").splitlines()] == lines
    examples = list(TaggingTask().read(str(part)).examples)
    tags = [prediction.tags for prediction in predictor([TEXT, "bad", ""])]
    assert [len(example.tags or ()) for example in examples] == [*map(len, tags)]


def test_spans_are_of_entities():
    with pytest.raises(ConfigError):
        TagPrediction(("a",), ("NN",), None).to_spans()


def test_a_model_of_characters_splits_texts_into_characters(tmp_path):
    row = {"tokens": [*"我有10年"], "ner_tags": ["O", "O", "B-N", "I-N", "O"]}
    out = tmp_path / "run"
    tune(tmp_path / "bert", out, [row] * 8, [row])
    saved = bothways.load(out)
    assert saved.task_model.task.splitter == "characters"
    assert saved("我 有10年").words == ("我", "有", "1", "0", "年")
