"""The paired comparison against enumeration, and two folders on one file."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from bothways.core.errors import BothwaysError, ConfigError, DataError, FolderError
from bothways.hub.model_folder import save_model
from bothways.lab.sweeps import significance
from bothways.lab.sweeps.significance import Side, compare_runs, contrast, folders
from bothways.model.config import EncoderConfig
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction.opening import open_task
from bothways.tasks.text_task import TextColumns
from commands import run_line
from toy_folder import VOCABULARY, make_examples, make_folder, make_tokenizer, write_tsv

A, B = Side("a", (0.5,)), Side("b", (0.5,))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=10))
def test_p_value_matches_exact_permutation(pairs):
    left, right = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    found = contrast(A, B, left, right)
    difference = right - left
    means = [np.mean(difference * signs) for signs in itertools.product((1, -1), repeat=len(pairs))]
    # scipy doubles the smaller tail; the distribution is symmetric, so it is the share beyond, on both sides.
    beyond = np.abs(means) >= abs(difference.mean()) - 1e-12
    assert found.p_value == pytest.approx(np.mean(beyond), abs=1e-9)
    assert found.difference == pytest.approx(float(difference.mean()))


def test_interval_matches_manual_bootstrap():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 300))
    means = (right - left)[rng.integers(300, size=(10_000, 300))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    # Of 10,000 draws a quantile has a standard deviation of about 1 % of the interval.
    assert contrast(A, B, left, right).interval == pytest.approx(
        (low, high), abs=0.06 * (high - low)
    )


@pytest.mark.parametrize(
    ("examples", "said"), [(5, "No difference is shown"), (6, "b is better than a")]
)
def test_chance_difference_is_not_significant(examples, said):
    """Where all speak for one, all signs are alike in two of 2ⁿ flips: 1 in 16, and 1 in 32."""
    found = contrast(A, B, np.zeros(examples), np.ones(examples))
    assert found.p_value == 2 / 2**examples
    assert str(found).startswith(said)


def test_errors_are_those_of_fractions_alone():
    """A log probability of −1 for −2 is no half of the errors."""
    right = np.linspace(0.8, 1.0, 9)
    assert "50 % fewer errors" in str(contrast(A, B, 2 * right - 1, right))
    found = contrast(A, B, 2 * right - 4, right - 2)
    assert found.error_reduction is None
    assert "errors" not in str(found)


def make_model(
    folder: Path, seed: int, labels: Sequence[str] = ("neg", "pos"), **options: str
) -> str:
    torch.manual_seed(seed)
    encoder = EncoderConfig(len(VOCABULARY), 16, 1, 2, 32, position=Learned(32), initial_range=0.5)
    model = Model(encoder, (PoolerHead(), LabelHead(len(labels))))
    tokenizer = make_tokenizer(folder.parent / "tokenizer")
    save_model(folder, model, tokenizer, labels=labels, **options)
    return str(folder)


def test_folders_are_paired_by_seed(tmp_path):
    file = str(write_tsv(tmp_path / "test.tsv", make_examples(50, 2)))
    one = make_model(tmp_path / "one", 0)
    for seed in (1, 2):
        make_model(tmp_path / "many" / f"seed-{seed}" / "model", seed)
    (tmp_path / "many" / "seed-9").mkdir()  # one that has not come to its end
    many = str(tmp_path / "many")
    assert folders(many) == [str(tmp_path / "many" / f"seed-{seed}") for seed in (1, 2)]
    found = compare_runs(one, many, file, device="cpu")
    for side in (found.a, found.b):
        expected = []
        for folder in folders(side.name):
            opened = open_task(folder, device="cpu")
            expected.append(opened.evaluate(opened.read(file, labelled=True))["accuracy"])
        assert side.grades == pytest.approx(expected)
    assert found.examples == 50
    assert found.difference == pytest.approx(found.b.mean - found.a.mean)
    other = compare_runs(many, one, file, device="cpu")
    assert other.difference == pytest.approx(-found.difference)
    same = compare_runs(one, one, file, TextColumns("sentence", None, "label"), device="cpu")
    assert (same.difference, same.error_reduction, same.p_value) == (0.0, 0.0, 1.0)
    assert found.a.deviation is None
    assert found.b.deviation == pytest.approx(statistics.stdev(found.b.grades))


def test_incomparable_models_are_refused(tmp_path, monkeypatch):
    one = make_model(tmp_path / "one", 0)
    with pytest.raises(BothwaysError, match="nothere"):  # before the data is read
        compare_runs(one, str(tmp_path / "nothere"), str(tmp_path / "no.tsv"), device="cpu")
    alike = make_model(tmp_path / "alike", 0, ("pos", "pos"))
    with pytest.raises(FolderError, match="the name 'pos' to 2 outputs"):
        compare_runs(alike, alike, str(tmp_path / "no.tsv"), device="cpu")
    (tmp_path / "empty.tsv").write_text("sentence\tlabel\n")
    with pytest.raises(DataError, match=r"empty\.tsv: "):
        compare_runs(one, one, str(tmp_path / "empty.tsv"), device="cpu")
    (tmp_path / "bare.jsonl").write_text(
        '{"sentence": "good", "label": "pos"}\n{"sentence": "bad", "label": null}\n'
    )
    with pytest.raises(DataError, match="has no label"):
        compare_runs(one, one, str(tmp_path / "bare.jsonl"), device="cpu")
    (tmp_path / "single.tsv").write_text("sentence\tlabel\ngood\tpos\n")
    with pytest.raises(DataError, match=r"single\.tsv: there are too few examples to compare"):
        compare_runs(one, one, str(tmp_path / "single.tsv"), device="cpu")
    file, prints = str(write_tsv(tmp_path / "test.tsv", make_examples(5, 2))), iter(("x", "y"))
    monkeypatch.setattr(significance, "examples_fingerprint", lambda examples: next(prints))
    with pytest.raises(DataError, match="read different examples from it"):
        compare_runs(one, one, file, device="cpu")


def test_models_of_two_tasks_are_refused(tmp_path):
    one = make_model(tmp_path / "one", 0)
    scores = make_model(tmp_path / "scores", 0, ("score",), problem="regression")
    file = str(write_tsv(tmp_path / "test.tsv", make_examples(5, 2)))
    with pytest.raises(FolderError, match="is for regression, not for single_label_classification"):
        compare_runs(one, scores, file, device="cpu")
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("sentence1\tsentence2\tscore\nape\tbee\t1\ncat\tdog\t2\n")
    with pytest.raises(ConfigError, match="no grade for each example"):
        compare_runs(one, one, str(pairs), task="embed", device="cpu")


def test_pre_trained_models_are_compared_by_likelihood(tmp_path, capsys):
    for seed, name in enumerate(("one", "two")):
        make_folder(tmp_path / name, seed=seed)
    (tmp_path / "texts.txt").write_text("the film was good\nthe play was bad\nit ends\n")
    words = [str(tmp_path / name) for name in ("one", "two", "texts.txt")]
    run_line("compare", *words, "--device", "cpu")
    said = capsys.readouterr()
    assert "a grade is the mean log probability of a token" in " ".join(said.out.split())
    (tmp_path / "blank.txt").write_text("the film was good\n\nthe play was bad\n\nit ends\n")
    run_line("compare", *words[:2], tmp_path / "blank.txt", "--device", "cpu")
    blank = capsys.readouterr()
    assert blank.out == said.out.replace("texts.txt", "blank.txt")
    assert "blank.txt: 2 of 5 examples left out" in " ".join(blank.err.split())
    (tmp_path / "blank.txt").write_text("it ends\n\n\n")
    with pytest.raises(DataError, match="too few examples to compare on: 1"):
        run_line("compare", *words[:2], tmp_path / "blank.txt", "--device", "cpu")
    (tmp_path / "reviews.tsv").write_text("review\nthe film was good\nthe play was bad\n")
    run_line("compare", *words[:2], tmp_path / "reviews.tsv", "--device", "cpu")
    said = capsys.readouterr().err
    assert said.count("reviews.tsv: the columns are guessed: text = 'review'") == 1
