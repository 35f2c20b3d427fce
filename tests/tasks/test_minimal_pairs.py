"""Minimal pairs: the more likely of two texts, by the likelihoods of single texts."""

import json
from pathlib import Path

import pytest

from bothways.cli.main import app
from bothways.core.errors import DataError
from bothways.prediction.engine import evaluate_task, predict
from bothways.prediction.predictor import open_task
from bothways.tasks.likelihood.task import LikelihoodTask, MinimalPairTask
from bothways.tasks.text_task import TextExample
from toy_masked import make_masked

PAIRS = [("ape bees dog", "ape bees"), ("cat", "cat dog elk"), ("gnus", "hens ibis"), ("", "ape")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("masked")
    make_masked(place)
    return place / "model"


@pytest.mark.parametrize("variant", ["original", "word_l2r"])
def test_the_text_of_the_higher_likelihood_is_preferred(folder, variant):
    single = open_task(folder, "likelihood", device="cpu", settings={"variant": variant})
    pairs = open_task(folder, "prefer", device="cpu", settings={"variant": variant})
    right = []
    for (a, b), found in zip(PAIRS, pairs(PAIRS), strict=True):
        expected = [single(text).log_likelihood for text in (a, b)]
        assert [found.first, found.second] == pytest.approx(expected, abs=1e-4)
        right.append(expected[0] > expected[1])
    assert len(set(right)) == 2, "the toy has both answers"
    metrics = pairs.evaluate([{"sentence_good": a, "sentence_bad": b} for a, b in PAIRS])
    assert metrics == {"accuracy": sum(right) / 4, "pairs": 4}
    swapped = pairs.evaluate([{"sentence_good": b, "sentence_bad": a} for a, b in PAIRS])
    assert swapped["accuracy"] == 1 - metrics["accuracy"]


def test_pairs_are_evaluated_and_predicted_by_the_commands(folder, tmp_path, capsys):
    file = tmp_path / "agreement.jsonl"
    rows = [{"sentence_good": a, "sentence_bad": b, "UID": "agreement"} for a, b in PAIRS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    app(
        ["evaluate", str(folder), str(file), "--task", "prefer", "--json"],
        result_action="return_value",
    )
    metrics = json.loads(capsys.readouterr().out)
    app(["predict", str(folder), str(file), "--task", "prefer"], result_action="return_value")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(line["preferred"] == "first" for line in lines) == 4 * metrics["accuracy"]
    app(["evaluate", str(folder), str(file), "--task", "prefer", "--text", "sentence_bad",
         "--text-b", "sentence_good", "--json"], result_action="return_value")  # fmt: skip
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1 - metrics["accuracy"]


def test_one_text_is_no_pair(folder, tmp_path):
    task = open_task(folder, "prefer", device="cpu")
    with pytest.raises(DataError, match="two are compared, the right one first"):
        task("ape bees")
    with pytest.raises(DataError, match="there is no pair to score"):
        evaluate_task(task.task_model, [])
    (tmp_path / "a.tsv").write_text("text\nape\n")
    with pytest.raises(DataError, match="has one text a row, 'text'"):
        task.read(tmp_path / "a.tsv", labelled=False)


def test_models_can_be_compared_by_it(folder):
    task = open_task(folder, "prefer", device="cpu").task_model
    single = LikelihoodTask().bind(task.model, task.tokenizer, (), 24)
    ((example, found),) = predict(task, [TextExample(*PAIRS[0])])
    ((_, first),) = predict(single, [TextExample(PAIRS[0][0])])
    assert found.first == pytest.approx(first.log_likelihood, abs=1e-4)
    assert MinimalPairTask().grade(example, found, ()) == float(found.first > found.second)
