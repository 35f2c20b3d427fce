"""Pseudo-log-likelihood: token by token as a plain loop over transformers in float64 has it, in both variants."""

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from bothways.core.errors import DataError
from bothways.prediction.engine import evaluate_task, predict
from bothways.prediction.opening import open_task
from bothways.tasks.masked_lm import task as likelihood
from bothways.tasks.masked_lm.task import LikelihoodTask, MaskFillingTask
from bothways.tasks.text_task import TextColumns, TextExample
from commands import run_line
from toy_masked import likelihoods, make_masked, make_masked_text
from toy_task import VOCABULARY


@pytest.mark.parametrize(("variant", "training"), [("original", False), ("word_l2r", True)])
def test_it_is_that_of_a_plain_loop(made, variant, training):
    model, tokenizer, theirs = made
    draw = random.Random(0)
    texts = [make_masked_text(draw, longest, 0) for longest in (1, 4, 9, 9, 30)]
    texts += ["apesss bees", ""]
    task = LikelihoodTask(variant=variant).bind(model, tokenizer, (), 12).train(training)
    results = predict(task, map(TextExample, texts), window=3)
    found = [prediction for _, prediction in results]
    assert task.training is training
    model.eval()
    for text, prediction in zip(texts, found, strict=True):
        expected = likelihoods(text, variant, tokenizer, theirs)
        assert prediction.tokens == tuple(VOCABULARY[id] for id in tokenizer.encode([text])[0])
        np.testing.assert_allclose(prediction.log_likelihoods, expected, atol=1e-4)
        assert prediction.log_likelihood == pytest.approx(math.fsum(expected), abs=1e-3)


def test_many_tokens_are_read_in_parts(made, monkeypatch):
    """Logits over a vocabulary are held of some positions at once, which is not to be seen."""
    model, tokenizer, _ = made
    score = LikelihoodTask(variant="word_l2r").bind(model, tokenizer, (), 24)
    fill = MaskFillingTask().bind(model, tokenizer, (), 24)

    def numbers() -> list[float]:
        ((_, scored),) = predict(score, [TextExample("ape bees cats dog")])
        ((_, filled),) = predict(fill, [TextExample("[MASK] ape [MASK] [MASK] bees")])
        guesses = itertools.chain.from_iterable(filled.masks)
        return [*scored.log_likelihoods, *(guess.probability for guess in guesses)]

    whole = numbers()
    monkeypatch.setattr(likelihood, "ROWS", 2)
    assert numbers() == pytest.approx(whole, rel=1e-4)


def test_pseudo_perplexity_is_of_all_tokens_together(made):
    model, tokenizer, theirs = made
    task = LikelihoodTask().bind(model, tokenizer, (), 24)
    texts = ["ape bee", "cat dog elk fox", "", "gnus"]
    total = sum(sum(likelihoods(text, "original", tokenizer, theirs)) for text in texts)
    found = evaluate_task(task, (TextExample(text) for text in texts))
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(-total / 8), rel=1e-4)
    assert found["pll"] == pytest.approx(total, rel=1e-5)
    assert (found["tokens"], found["texts"]) == (8, 4)
    (_, prediction), *_ = predict(task, [TextExample(texts[1])])
    assert prediction.pseudo_perplexity == pytest.approx(math.exp(-prediction.log_likelihood / 4))
    mean = prediction.log_likelihood / 4
    assert task.grade(TextExample(texts[1]), prediction) == pytest.approx(mean)


def test_what_has_no_likelihood_is_refused(made, tmp_path):
    model, tokenizer, _ = made
    task = LikelihoodTask().bind(model, tokenizer, (), 24)
    message = r"^t\.txt:2: the text has a \[MASK\], whose token is unknown\n  .*task=\"fill\""
    with pytest.raises(DataError, match=message):
        list(predict(task, [TextExample("ape [MASK]", where="t.txt:2")]))
    with pytest.raises(DataError, match="there is no token to score"):
        evaluate_task(task, [TextExample("")])
    (tmp_path / "pairs.tsv").write_text("sentence1\tsentence2\nape\tbee\n")
    with pytest.raises(
        DataError, match=r"two texts a row, 'sentence1' and 'sentence2'.*\n  Name one"
    ):
        task.task.read(str(tmp_path / "pairs.tsv"))
    reading = task.task.read(str(tmp_path / "pairs.tsv"), TextColumns("sentence2"))
    assert [example.text for example in reading.examples] == ["bee"]


def test_sequences_of_a_text_share_their_ids(made):
    """A text of n tokens is n sequences, and must not take n² numbers."""
    _, tokenizer, _ = made
    (made_of,) = LikelihoodTask().encode([TextExample("ape bee cats")], tokenizer, (), 24)
    assert len(made_of.sequences) == 4
    assert len({id(sequence.ids) for sequence in made_of.sequences}) == 1


PAIRS = [("ape bees dog", "ape bees"), ("cat", "cat dog elk"), ("gnus", "hens ibis"), ("", "ape")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("masked")
    make_masked(place)
    return place / "model"


def test_pairs_are_evaluated_and_predicted_by_the_commands(folder, tmp_path, capsys):
    file = tmp_path / "agreement.jsonl"
    rows = [{"sentence_good": a, "sentence_bad": b, "UID": "agreement"} for a, b in PAIRS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_line("evaluate", folder, file, "--task", "prefer", "--json")
    shown = capsys.readouterr()
    metrics, note = json.loads(shown.out), "agreement.jsonl: the columns are guessed: text = 'sent"
    assert note in shown.err
    run_line("predict", folder, file, "--task", "prefer")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(line["preferred"] == "first" for line in lines) == 4 * metrics["accuracy"]
    run_line("evaluate", folder, file, "--task", "prefer", "--text", "sentence_bad", "--text-b", "sentence_good", "--json")  # fmt: skip
    shown = capsys.readouterr()
    assert json.loads(shown.out)["accuracy"] == 1 - metrics["accuracy"]
    assert "guessed" not in shown.err


def test_rows_and_files_have_no_labels(folder, tmp_path):
    scorer = open_task(folder, "prefer", device="cpu")
    rows = [{"text": a, "text_b": b} for a, b in PAIRS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (rows, tmp_path / "a.jsonl"):
        assert scorer.evaluate(data)["pairs"] == len(PAIRS)
        with pytest.raises(DataError, match="has no column 'quality'; it has text, text_b"):
            scorer.evaluate(data, label="quality")
    with pytest.raises(DataError, match="needs no answers") as refused:
        scorer.evaluate(PAIRS, ["first"] * len(PAIRS))
    assert refused.value.where == "answers"


def test_one_text_is_no_pair(folder, tmp_path):
    task = open_task(folder, "prefer", device="cpu")
    with pytest.raises(DataError, match="two are compared, the right one first"):
        task("ape bees")
    with pytest.raises(DataError, match="there is no pair to score"):
        evaluate_task(task.task_model, [])
    (tmp_path / "a.tsv").write_text("text\nape\n")
    with pytest.raises(DataError, match="has one text a row, 'text'"):
        task.read(tmp_path / "a.tsv", labelled=False)
