"""Settings, data and places that no run can have: one error with its place, or a run that works."""

import subprocess
import sys
from dataclasses import replace

import pytest

import bothways
from bothways.core.errors import BothwaysError, ResourceError
from bothways.core.files import lock_folder
from bothways.core.training_module import perplexity
from bothways.data.corpus_source import Corpora
from bothways.indexes import read_texts
from bothways.lab.features.run import FeatureConfig
from bothways.sklearn import Classifier
from bothways.tasks.predictions import LikelihoodPrediction
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from spread import first_of
from toy_folder import make_folder
from toy_training import TRAINING

EMBED = SentenceEmbeddingTask


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: EMBED(pooling=()), "pooling"),
        (lambda: EMBED(widths=(4, 0)), "widths"),
        (lambda: EMBED(widths=(4,), width_weights=(1.0, 2.0)), "width_weights"),
        (lambda: EMBED(widths=(4,), width_weights=(0.0,)), "width_weights"),
        (lambda: EMBED().example({"anchor": "a", "positive": ["b", 5]}), "an example"),
        (lambda: replace(TRAINING, step_limit=0.0), "training.step_limit"),
        (lambda: next(read_texts([5])), "text 1"),
        (lambda: bothways.calibrate("model", "data.csv", out=""), "out"),
        (lambda: Corpora.of({}, None), None),
        (lambda: FeatureConfig(model="m", train="a.conll", dev="b.conll", seed=10**19), "seed"),
    ],
)
def test_it_is_refused_with_its_place(call, where):
    with pytest.raises(BothwaysError) as caught:
        call()
    assert caught.value.where == where


def test_a_tokenizer_needs_a_text_and_room_for_a_token(tokenizer):
    with pytest.raises(BothwaysError, match="there is no text"):
        tokenizer.batch([])
    for texts, shortest in (("a cat", 3), (("a", "cat"), 4)):
        assert tokenizer.batch(texts, length=shortest).layout.lengths == [shortest]
        with pytest.raises(BothwaysError, match=f"{shortest}, not {shortest - 1}") as caught:
            tokenizer.batch(texts, length=shortest - 1)
        assert caught.value.where == "length"


def test_an_estimator_needs_labels():
    with pytest.raises(ValueError, match="requires y"):
        Classifier("model").fit(["a text"], None)


def test_a_folder_that_nobody_may_change_is_one_message(tmp_path, monkeypatch):
    """As after `chattr +i`: the folder exists, and no file can be created in it."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("filelock.FileLock.acquire", refused)
    message = "cannot be written: Operation not permitted"
    with pytest.raises(ResourceError, match=message), lock_folder(tmp_path):
        pass


def test_a_perplexity_beyond_all_numbers_is_finite():
    assert perplexity(1e4) == perplexity(700.0) < float("inf")
    assert LikelihoodPrediction(("ape",), (-1e5,)).to_json()["pseudo_perplexity"] > 1e300


@pytest.mark.parametrize(
    ("redirection", "status"),
    first_of(
        [("<&- >&- 2>&-", 0), ("<&-", 2), (">&-", 0), ("2>&-", 0), ("--no-option 2>/dev/full", 2)],
        ["closed"] * 5, ["all", "input", "output", "errors", "full"],
    ),
)  # fmt: skip
def test_closed_streams_end_no_command_with_a_traceback(redirection, status, tmp_path):
    make_folder(tmp_path / "bert")
    words = "describe bert" if "<" not in redirection or ">" in redirection else "predict bert"
    line = ["sh", "-c", f"{sys.executable} -m bothways {words} {redirection}"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert done.returncode == status
