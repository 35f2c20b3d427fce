"""Settings and data that are refused where they are declared: one error with its place, for each."""

from dataclasses import replace

import pytest

import bothways
from bothways.core.errors import BothwaysError
from bothways.data.corpus_source import Corpora
from bothways.indexes import read_texts
from bothways.sklearn import Classifier
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.text.tokenizer import Tokenizer
from toy_task import make_tokenizer
from toy_training import TRAINING

EMBED = SentenceEmbeddingTask


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


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
    ],
)
def test_it_is_refused_with_its_place(call, where):
    with pytest.raises(BothwaysError) as caught:
        call()
    assert caught.value.where == where


def test_a_tokenizer_needs_a_text_and_room_for_a_token(tokenizer):
    with pytest.raises(BothwaysError, match="there is no text"):
        tokenizer.batch([])
    with pytest.raises(BothwaysError) as caught:
        tokenizer.batch("a cat", length=2)
    assert caught.value.where == "length"


def test_an_estimator_needs_labels():
    with pytest.raises(ValueError, match="requires y"):
        Classifier("model").fit(["a text"], None)
