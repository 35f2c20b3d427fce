"""Suites of minimal pairs: every pair as transformers in float64 scores it, counted by phenomenon and its columns."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from bothways.core.errors import ConfigError, DataError, FolderError
from bothways.prediction.analysis.evaluation import evaluate_suite, open_pairs
from bothways.prediction.predictor import Predictor
from bothways.text.tokenizer import Tokenizer
from commands import run_line
from toy_masked import log_probabilities, make_causal, make_masked, make_masked_text
from toy_task import VOCABULARY

MASK = VOCABULARY.index("[MASK]")


def write_suite(folder: Path, seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Two phenomena, one of them compressed, of random pairs; returns these."""
    draw, suite = random.Random(seed), {}
    folder.mkdir()
    for name, term, count, opened in (("agreement", "a", 9, open), ("binding", "b", 7, gzip.open)):
        texts = [make_masked_text(draw, 7, 0) for _ in range(2 * count)]
        suite[name] = [*zip(texts[::2], texts[1::2], strict=True)]
        ending = ".jsonl.gz" if opened is gzip.open else ".JSONL"
        with opened(folder / f"{name}{ending}", "wt") as file:
            for good, bad in suite[name]:
                row = {"sentence_good": good, "sentence_bad": bad, "linguistics_term": term}
                file.write(json.dumps(row | {"field": "syntax", "UID": name}) + "\n")
    return suite


def pieces(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    return [tokenizer.encode([word])[0].tolist() for word in text.split()]


def masked_likelihood(theirs: object, words: list[list[int]]) -> float:
    """Each token hidden with the later pieces of its word."""
    ids, total, at = [id for word in words for id in word], 0.0, 0
    for word in words:
        for place in range(at, at + len(word)):
            hidden = [*ids[:place], *[MASK] * (at + len(word) - place), *ids[at + len(word) :]]
            total += log_probabilities(theirs, [2, *hidden, 3])[place + 1][ids[place]]
        at += len(word)
    return float(total)


@torch.no_grad()
def causal_likelihood(theirs: object, words: list[list[int]]) -> float:
    ids = [2, *(id for word in words for id in word), 3]
    logs = theirs(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    return float(sum(logs[at][id] for at, id in enumerate(ids[1:])))


@pytest.fixture(scope="module", params=["masked", "causal"])
def scored(request, tmp_path_factory) -> tuple:
    """A model folder, its reference, and the likelihood by the reference."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "masked":
        _, tokenizer, theirs = make_masked(folder)
        return folder / "model", tokenizer, theirs, masked_likelihood
    return folder / "model", *make_causal(folder), causal_likelihood


def test_every_pair_is_scored_as_by_transformers(scored, tmp_path):
    folder, tokenizer, theirs, likelihood = scored
    suite = write_suite(tmp_path / "suite")
    predictor, right = Predictor(open_pairs(folder, device="cpu")), dict[str, list[bool]]()
    for name, pairs in suite.items():
        for pair, found in zip(pairs, predictor(pairs), strict=True):
            expected = [likelihood(theirs, pieces(tokenizer, text)) for text in pair]
            np.testing.assert_allclose([found.first, found.second], expected, rtol=1e-5, atol=1e-4)
            right.setdefault(name, []).append(expected[0] > expected[1])
    found = evaluate_suite(predictor, tmp_path / "suite")
    values = found.to_json()
    accuracies = {name: sum(each) / len(each) for name, each in right.items()}
    assert values["phenomenon"] == accuracies
    assert len(set(accuracies.values())) == 2, "the phenomena differ"
    assert values["linguistics_term"] == dict(zip("ab", accuracies.values(), strict=True))
    assert values["field"] == {"syntax": values["accuracy"]}
    assert values["accuracy"] == sum(map(sum, right.values())) / 16
    assert values["mean"] == pytest.approx(np.mean([*accuracies.values()]))
    assert values["pairs"] == 16
    found.groups["field"].clear()  # as of files without the column
    assert found.to_json().keys() == values.keys() - {"field"}


def test_the_command_prints_phenomena_and_the_overall_accuracy(scored, tmp_path, capsys):
    folder, *_ = scored
    write_suite(tmp_path / "suite")

    def run(*more: str) -> str:
        run_line("evaluate", folder, *more, "--blimp", tmp_path / "suite")
        return capsys.readouterr().out

    values = json.loads(run("--json"))
    shown = run()
    for words in ("agreement", "linguistics_term", "syntax", f"{100 * values['accuracy']:.1f}"):
        assert words in shown
    masked = values["variant"] == "word_l2r"
    assert masked or values["variant"] == "causal"
    if masked:
        assert json.loads(run("variant=original", "--json"))["variant"] == "original"
    else:
        with pytest.raises(FolderError, match="needs the head 'masked'"):
            run("variant=word_l2r")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["new.tsv"], r"^new\.tsv: is given in addition to suite\n  Leave one of the two"),
        (["--report", "page.html"], r"^report: does nothing with minimal pairs\n  Leave it out"),
        (["variant=original", "--text", "body"], "^text: does nothing with minimal pairs"),
    ],
)
def test_what_a_suite_does_not_use_is_refused(scored, more, message):
    words = ["evaluate", str(scored[0]), *more, "--blimp", "suite"]
    with pytest.raises(ConfigError, match=message):
        run_line(*words)


def test_wrong_suites_are_refused(scored, tmp_path):
    predictor = Predictor(open_pairs(scored[0], device="cpu"))
    with pytest.raises(DataError, match="is not a folder"):
        evaluate_suite(predictor, tmp_path / "none")
    with pytest.raises(DataError, match=r"has no \.jsonl file"):
        evaluate_suite(predictor, tmp_path)
    (tmp_path / "a.jsonl").write_text('{"sentence_good": "ape"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*sentence_bad"):
        evaluate_suite(predictor, tmp_path)
    (tmp_path / "a.jsonl.gz").touch()
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: is a second file of one name, beside a\.j"):
        evaluate_suite(predictor, tmp_path)
    with pytest.raises(ConfigError, match=r"^data: there is no labelled"):
        run_line("evaluate", scored[0])
