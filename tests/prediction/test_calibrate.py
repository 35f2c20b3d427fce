"""Calibrated folders: the same answers, other probabilities, in every way to open them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError, FolderError
from bothways.tasks.base import softmax
from bothways.tasks.metrics import sigmoid
from heard_progress import Heard
from toy_folder import make_examples, make_folder, save_classifier

LABELS = ("neg", "odd", "pos")
TEXTS = [example.text for example in make_examples(200, 5)]


def classifier(folder: Path, problem: Any, **extra: Any) -> Path:
    """A folder with a random head that is too sure."""

    def sharpen(model):
        model.heads["labels"].dense.weight.data.mul_(40)
        model.heads["labels"].dense.bias.data = torch.tensor([0.5, -0.5, 1.0])

    bert, record = make_folder(folder / "bert"), {"problem": problem, "extra": extra}
    return save_classifier(folder / "own", bert, LABELS, change=sharpen, **record)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("classes"), "single_label_classification")


@pytest.fixture(scope="module")
def rows(model) -> list[dict[str, Any]]:
    """Labels drawn with the probabilities softmax(z / 3)."""
    draw = np.random.default_rng(0)
    logits = np.log(bothways.load(model).predict_proba(TEXTS))
    return [
        {"text": text, "label": draw.choice(LABELS, p=chances)}
        for text, chances in zip(TEXTS, softmax(logits / 3), strict=True)
    ]


@pytest.fixture(scope="module")
def done(model, rows, tmp_path_factory) -> Any:
    out = tmp_path_factory.mktemp("calibrated") / "model"
    return bothways.calibrate(model, rows, out, error=0.1, progress=False)


def test_temperature_is_part_of_the_weights(model, done):
    before, after = bothways.load(model), bothways.load(done.folder)
    assert done.temperature == pytest.approx(3, rel=0.3)
    assert done.after["loss"] < done.before["loss"]
    assert done.after["calibration_error"] < done.before["calibration_error"]
    expected = softmax(np.log(before.predict_proba(TEXTS)) / done.temperature)
    assert after.predict_proba(TEXTS) == pytest.approx(expected, abs=1e-6)
    assert (after.predict(TEXTS) == before.predict(TEXTS)).all()


def test_transformers_and_an_export_have_the_same_probabilities(done, tmp_path):
    from transformers import pipeline

    expected = bothways.load(done.folder)(TEXTS[:8])
    theirs = pipeline("text-classification", str(done.folder), top_k=None)(TEXTS[:8])
    for prediction, scores in zip(expected, theirs, strict=True):
        for item in scores:
            assert item["score"] == pytest.approx(prediction.probabilities[item["label"]], abs=1e-5)
    bothways.export_model(done.folder, tmp_path / "graph", progress=False)
    exported = bothways.load(tmp_path / "graph", runtime="onnxruntime")(TEXTS[:8])
    assert [item.label_set for item in exported] == [item.label_set for item in expected]
    for ours, graph in zip(expected, exported, strict=True):
        assert graph.probabilities == pytest.approx(dict(ours.probabilities), abs=1e-5)


def test_sets_hold_the_right_label_as_often_as_asked(model, rows, done):
    metrics = bothways.evaluate(done.folder, rows, progress=False).metrics
    assert 0.85 <= metrics["set_coverage"] <= 0.96
    assert 1 < metrics["set_size"] < 3
    prediction = bothways.load(done.folder)(TEXTS[0])
    chances = prediction.probabilities
    likely = (name for name in LABELS if chances[name] >= done.set_threshold)
    expected = sorted(likely, key=lambda name: -chances[name])
    assert prediction.label_set == tuple(expected)
    assert prediction.to_json()["label_set"] == expected
    assert "label_set" not in bothways.load(model)(TEXTS[0]).to_json()


def test_a_calibration_that_does_not_help_is_reported(done, rows, tmp_path):
    """Of a model that is calibrated, parts of the same data lower the loss or do not."""
    outcomes = set()
    for number in range(4):
        heard, part = Heard(), rows[20 * number :][:20]
        again = bothways.calibrate(done.folder, part, tmp_path / str(number), progress=heard)
        helps = again.after["loss"] < again.before["loss"]
        assert any("does not lower" in line for line in heard.messages) is not helps
        [note] = [line for line in heard.messages if "sets of the calibrated model" in line]
        assert note.endswith("add error=0.1 for new ones")
        outcomes.add(helps)
    assert outcomes == {True, False}


def test_data_that_calibrated_is_named_when_it_is_scored(done, rows, tmp_path):
    for data, expected in ((rows, True), (rows[1:], False)):
        heard = Heard()
        bothways.evaluate(done.folder, data, progress=heard)
        assert any("calibrated" in line for line in heard.messages) is expected
    record = json.loads((done.folder / "bothways.json").read_text())["calibration"]
    assert record["data"]["examples"] == len(rows)
    again = bothways.calibrate(done.folder, rows[1:], tmp_path / "again", progress=False)
    assert again.temperature == pytest.approx(1, abs=0.1)
    assert again.set_threshold is None
    assert bothways.load(again.folder)(TEXTS[0]).label_set is None


def test_unsure_predictions_have_no_label(model, rows):
    chances = bothways.load(model).predict_proba(TEXTS).max(1)
    least = float(np.median(chances)) + 1e-6
    sure = bothways.load(model, abstain=least)
    labels = sure.predict(TEXTS)
    assert 0 < sum(label is None for label in labels) < len(TEXTS)
    assert [label is not None for label in labels] == (chances >= least).tolist()
    assert sure(TEXTS[int(chances.argmin())]).to_json()["label"] is None
    metrics = bothways.evaluate(model, rows, abstain=least, progress=False).metrics
    plain = bothways.evaluate(model, rows, progress=False).metrics
    assert metrics["coverage"] == (chances >= least).mean()
    right = [label == row["label"] for label, row in zip(labels, rows, strict=True) if label]
    assert metrics["accuracy_covered"] == pytest.approx(np.mean(right))
    assert {name: metrics[name] for name in plain} == plain
    nothing = bothways.evaluate(model, rows[:5], abstain=1.0, progress=False).metrics
    assert nothing["coverage"] == 0
    assert "accuracy_covered" not in nothing
    heard = Heard()
    printed = [*bothways.predict(model, TEXTS and rows, abstain=least, progress=heard)]
    assert [row["label"] for row in printed] == labels.tolist()
    assert any(f"{sum(map(bool, labels))} of 200 texts" in line for line in heard.messages)


def test_labels_that_each_apply_have_scales_and_keep_their_answers(tmp_path):
    draw = np.random.default_rng(1)
    task = {"kind": "multilabel", "thresholds": [0.2, 0.5, 0.9]}
    folder = classifier(tmp_path, "multi_label_classification", task=task)
    before = bothways.load(folder)
    chances = before.predict_proba(TEXTS).clip(1e-12, 1 - 1e-12)
    logits = np.log(chances) - np.log1p(-chances)
    held = sigmoid(logits * np.array([0.1, 0.3, 0.2]) + 1) > draw.random(chances.shape)
    rows = [
        {"text": text, "label": [name for name, y in zip(LABELS, row, strict=True) if y]}
        for text, row in zip(TEXTS, held, strict=True)
    ]
    done = bothways.calibrate(folder, rows, tmp_path / "out", progress=False)
    after = bothways.load(done.folder)
    assert done.temperature is None
    assert done.after["loss"] < done.before["loss"]
    factor, offset = (np.array(done.record[name]) for name in ("factor", "offset"))
    assert after.predict_proba(TEXTS) == pytest.approx(sigmoid(logits * factor + offset), abs=1e-5)
    assert after.predict(TEXTS) == before.predict(TEXTS)
    with pytest.raises(ConfigError):
        bothways.calibrate(folder, rows, tmp_path / "sets", error=0.1, progress=False)
    for labels in ([], LABELS):
        same = [{**row, "label": labels} for row in rows]
        with pytest.raises(DataError, match="input 1: every example has all labels, or none"):
            bothways.calibrate(folder, same, tmp_path / "same", progress=False)


def test_data_that_cannot_calibrate_is_refused(folder, model, rows, done, tmp_path):
    def refused(data: Any, kind: type[BothwaysError], source: Path = model, **options: Any) -> None:
        with pytest.raises(kind):
            bothways.calibrate(source, data, tmp_path / "new", progress=False, **options)
        assert not (tmp_path / "new").exists()

    enough = rows[:40]
    refused([{**row, "label": "pos"} for row in enough], DataError)
    refused(rows[:9], DataError)
    refused([{**row, "label": "new"} for row in enough], DataError)
    refused([{"text": row["text"]} for row in enough], DataError)
    unlabelled = [*rows[:12], {**rows[12], "label": None}]
    with pytest.raises(DataError) as missing:
        bothways.calibrate(model, unlabelled, tmp_path / "new", progress=False)
    assert missing.value.where == "input 13"
    refused(enough, ConfigError, error=1.5)
    refused(enough, ConfigError, error=0.001)
    with pytest.raises(FolderError, match="is not fine-tuned for a task") as untrained:
        bothways.calibrate(folder, enough, tmp_path / "new")
    assert "Or name a task" not in str(untrained.value)  # calibrate has no argument task
    with pytest.raises(BothwaysError):
        bothways.calibrate(model, enough, model, progress=False)
    sha = done.record["data"]["sha256"]
    source = {"train": {"sha256": sha}}
    trained = classifier(tmp_path / "trained", "single_label_classification", data=source)
    refused(rows, DataError, source=trained)
    for data_rows, expected in ((rows, True), (rows[1:], False)):
        heard = Heard()
        bothways.evaluate(trained, data_rows, progress=heard)
        assert any("trained the model" in line for line in heard.messages) is expected
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError) as error:
            bothways.load(model, abstain=value)
        assert error.value.where == "abstain"
