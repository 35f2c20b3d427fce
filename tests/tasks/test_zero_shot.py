"""Labels that a model was not trained on: equal to the pipeline of transformers, in every interface."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient, close_session

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.serving.app import app
from bothways.tasks.classification.task import ZeroShotTask
from bothways.tasks.text_task import TextExample
from running_server import running
from toy_folder import make_examples, make_folder, save_classifier

TEXTS = [example.text for example in make_examples(12, 3, longest=9)] + ["film " * 60]
CANDIDATES = ["good", "a bad play", "rain"]
STANDARD = ("contradiction", "neutral", "ENTAILMENT")


def nli_folder(folder: Path, labels: tuple[str, ...]) -> Path:
    """A classifier with random weights, whose outputs have these names."""
    bert = make_folder(folder.with_name(f"{folder.name} encoder"), initializer_range=0.2)
    return save_classifier(folder, bert, labels)


@pytest.fixture(scope="module")
def nli(tmp_path_factory) -> Path:
    return nli_folder(tmp_path_factory.mktemp("nli") / "bert", STANDARD)


def pipeline_scores(folder: Path, labels: list[str], **options: Any) -> np.ndarray:
    from transformers import pipeline

    found = pipeline("zero-shot-classification", str(folder))(TEXTS, labels, **options)
    scores = [dict(zip(row["labels"], row["scores"], strict=True)) for row in found]
    return np.array([[row[label] for label in labels] for row in scores])


@pytest.mark.parametrize(
    ("options", "candidates"),
    [
        ({}, CANDIDATES),
        ({"multi_label": True}, CANDIDATES[:1]),
        ({"hypothesis_template": "it was {} in the rain"}, CANDIDATES),
    ],
)
def test_probabilities_are_those_of_transformers(nli, options, candidates):
    expected = pipeline_scores(nli, candidates, **options)
    classify = bothways.load(nli, labels=candidates, **options)
    assert classify.predict_proba(TEXTS) == pytest.approx(expected, abs=1e-6)
    assert classify.classes_.tolist() == candidates
    best = np.array(candidates)[expected.argmax(1)]
    assert classify.predict(TEXTS).tolist() == best.tolist()
    alone = [[*classify(text).probabilities.values()] for text in TEXTS[:3]]
    assert alone == pytest.approx(expected[:3], abs=1e-6)
    (encoded,) = classify.task_model.encode([TextExample(TEXTS[0])])
    assert {tuple(x.global_attention_mask.nonzero()[0]) for x in encoded.sequences} == {(0,)}


@pytest.mark.parametrize(
    "labels", [("entailment", "not_entailment"), ("neutral", "entailment", "contradiction")]
)
def test_contradiction_is_found_by_its_name(tmp_path, labels):
    """The pipeline takes the first output, or the last: in the second of these orders, neutral."""
    folder = nli_folder(tmp_path / "bert", labels)
    opposite = next(label for label in labels if label[:3] in ("con", "not"))
    pairs = [(text, f"This example is {name}.") for text in TEXTS[:-1] for name in CANDIDATES]
    chances = bothways.load(folder).predict_proba(pairs)
    yes, no = chances[:, labels.index("entailment")], chances[:, labels.index(opposite)]
    found = bothways.load(folder, labels=CANDIDATES, multi_label=True).predict_proba(TEXTS[:-1])
    assert found.reshape(-1) == pytest.approx(yes / (yes + no), abs=1e-6)
    if labels[0] == "entailment":
        theirs = pipeline_scores(folder, CANDIDATES, multi_label=True)
        assert found == pytest.approx(theirs[:-1], abs=1e-6)


def test_commands_and_rows_have_the_same_labels(nli, tmp_path, capsys):
    from bothways.cli.main import app as command

    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    expected = [item.to_json() for item in bothways.load(nli, labels=CANDIDATES)(TEXTS)]
    words = ["predict", str(nli), str(file), "--labels", "good, a bad play\uff0crain"]
    command(words, result_action="return_value")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["label"] for line in lines] == [line["label"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)
    bothways.predict(nli, file, tmp_path / "out.jsonl", labels=CANDIDATES, progress=False)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(TEXTS)
    pairs = zip(TEXTS, expected, strict=True)
    rows = [{"text": text, "label": row["label"]} for text, row in pairs]
    settings = {"labels": CANDIDATES, "abstain": 0.99, "report": tmp_path / "r.html"}
    metrics = bothways.evaluate(nli, rows, **settings, progress=False).metrics
    assert metrics["accuracy"] == 1.0
    assert 0 <= metrics["coverage"] < 1


def test_server_answers_the_client_of_hugging_face(nli, tmp_path):
    other = nli_folder(tmp_path / "other", ("x", "y", "z"))
    models = {"nli": bothways.load(nli, batch_invariant=True), "other": bothways.load(other)}
    film = {"template": "the film was {}"}
    models["film"] = bothways.load(nli, labels=CANDIDATES[1:], **film)
    expected = bothways.load(nli, labels=CANDIDATES)(TEXTS[0]).probabilities
    with running(app(models)) as url:
        client = InferenceClient(model=f"{url}/models/nli")
        found = client.zero_shot_classification(TEXTS[0], CANDIDATES)
        scores = {item.label: item.score for item in found}
        assert [item.score for item in found] == sorted(scores.values(), reverse=True)
        assert scores == pytest.approx(expected, abs=1e-6)
        judged = client.zero_shot_classification(
            TEXTS[0], CANDIDATES[:2], multi_label=True, hypothesis_template="the film was {}"
        )
        own = bothways.load(nli, labels=CANDIDATES[:2], multi_label=True, **film)(TEXTS[0])
        assert {i.label: i.score for i in judged} == pytest.approx(own.probabilities, abs=1e-6)
        served = InferenceClient(model=f"{url}/models/film")  # with a template of its own
        answer = served.zero_shot_classification(TEXTS[0], CANDIDATES[:2])
        own = bothways.load(nli, labels=CANDIDATES[:2], **film)(TEXTS[0])
        assert {i.label: i.score for i in answer} == pytest.approx(own.probabilities, abs=1e-6)
        ask = {"inputs": TEXTS[:2], "parameters": {"candidate_labels": "good, rain"}}
        import httpx

        answers = httpx.post(f"{url}/models/nli", json=ask).json()
        rows = [row.probabilities for row in bothways.load(nli, labels="good, rain")(TEXTS[:2])]
        expected = [sorted(row, key=lambda name: -row[name]) for row in rows]
        assert [[item["label"] for item in row] for row in answers] == expected
        for model, parameters, param in (
            ("other", {"candidate_labels": ["good"]}, "parameters.candidate_labels"),
            ("nli", {"candidate_labels": []}, "parameters.candidate_labels"),
            ("nli", {"candidate_labels": ["a", "a"]}, "parameters.candidate_labels"),
            ("nli", {"candidate_labels": 3}, "parameters.candidate_labels"),
            ("nli", {"candidate_labels": ["a"] * 100_000}, "texts"),
            (
                "nli",
                {"candidate_labels": ["a"], "hypothesis_template": "no place"},
                "parameters.hypothesis_template",
            ),
            ("nli", {"candidate_labels": ["good " * 60]}, "inputs"),
        ):
            body = {"inputs": TEXTS[0], "parameters": parameters}
            refused = httpx.post(f"{url}/models/{model}", json=body)
            assert 400 <= refused.status_code < 500, parameters
            assert refused.json()["error"]["param"] == param
        many = {"inputs": ["a"] * 600, "parameters": {"candidate_labels": ["a", "b", "c", "d"]}}
        assert httpx.post(f"{url}/models/nli", json=many).status_code in (413, 422)
        close_session()


def test_what_cannot_be_compared_is_refused(nli, tmp_path):
    other = nli_folder(tmp_path / "other", ("negative", "neutral", "positive"))
    half = nli_folder(tmp_path / "half", ("neutral", "entailment"))
    for folder, options in (
        (other, {"labels": CANDIDATES}),
        (half, {"labels": CANDIDATES, "multi_label": True}),
        (nli, {"labels": []}),
        (nli, {"task": "zero-shot"}),
        (nli, {"labels": ["a", "a"]}),
        (nli, {"labels": ["a", " "]}),
    ):
        with pytest.raises(ConfigError) as refused:
            bothways.load(folder, **options)
        assert refused.value.where == "labels"
    assert len(bothways.load(half, labels=CANDIDATES)("good").probabilities) == 3
    for value in ("no place", ""):
        with pytest.raises(ConfigError):
            ZeroShotTask(candidates=("a",), template=value)
    with pytest.raises(ConfigError, match="leaves no room for a text"):
        bothways.load(nli, labels=["film " * 40])("good")
    with pytest.raises(DataError):
        bothways.load(nli, labels=CANDIDATES)(("good", "bad"))
    with pytest.raises(BothwaysError):
        bothways.load(nli, task="classify", labels=CANDIDATES)
    with pytest.raises(DataError, match="label 'bad' is not among the 3 labels") as unknown:
        bothways.load(nli, labels=CANDIDATES).evaluate(["good"], ["bad"])
    assert "training" not in str(unknown.value)  # which has other labels
