"""Classification: cut as Google cuts, packed as alone, equal to transformers, streamed in order."""

import math
import random

import numpy as np
import pytest

from bothways.core.errors import ConfigError
from bothways.prediction.engine import predict
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.text_task import TextExample
from toy_task import VOCABULARY, make_examples, make_task, make_tokenizer


def ids_of(text: str) -> list[int]:
    return [VOCABULARY.index(word) if word in VOCABULARY else 1 for word in text.split()]


def test_examples_become_what_google_feeds(tmp_path):
    tokenizer, draw = make_tokenizer(tmp_path), random.Random(1)
    labels, length = ("x", "y", "z"), 12
    examples = [*make_examples(60), TextExample("", "", "x"), TextExample("ape", None, None)]
    examples.append(TextExample("APE yak", "zebu bee", "y"))
    draw.shuffle(examples)
    inputs = ClassificationTask().encode(examples, tokenizer, labels, length)
    for example, made in zip(examples, inputs, strict=True):
        a = ids_of(example.text.lower())
        b = None if example.text_b is None else ids_of(example.text_b.lower())
        tokens = len(a) + len(b or [])
        if b is None:
            a = a[: length - 2]
        while b is not None and len(a) + len(b) > length - 3:
            (a if len(a) > len(b) else b).pop()
        ids = [2, *a, 3] + ([] if b is None else [*b, 3])
        (sequence,) = made.sequences
        assert sequence.ids.tolist() == ids
        assert sequence.segments.tolist() == [0] * (len(a) + 2) + [1] * (len(ids) - len(a) - 2)
        assert (made.tokens, made.cut) == (tokens, tokens - len(a) - len(b or []))
        target = -100 if example.label is None else labels.index(example.label)
        assert np.asarray(sequence.targets["label"].labels).tolist() == [target]


@pytest.mark.parametrize("length", [4, 25])
def test_lengths_that_the_model_cannot_have_are_refused(tmp_path, length):
    message = rf"^length: must be from 5 to the encoder's 24 positions, not {length}"
    with pytest.raises(ConfigError, match=message):
        make_task(tmp_path, length=length)


def test_scores_are_of_all_predictions_in_one_pass(tmp_path):
    task, examples = make_task(tmp_path), make_examples(100, seed=4)
    results = list(predict(task, examples))
    metrics = task.score(predict(task, iter(examples), window=64))
    right = [example.label == prediction.label for example, prediction in results]
    losses = [-math.log(made.probabilities[str(example.label)]) for example, made in results]
    assert metrics["accuracy"] == pytest.approx(np.mean(right))
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert metrics.keys() == {"accuracy", "f1_macro", "mcc", "loss"}
    impossible = ClassPrediction("x", 0, {"x": 1.0, "y": 0.0})
    of_two = make_task(tmp_path, ("x", "y")).score([(TextExample("t", None, "y"), impossible)])
    assert "f1" in of_two
    assert 100 < of_two["loss"] < math.inf
