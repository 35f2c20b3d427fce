"""Models from elsewhere, whose labels spell other schemes than IOB2: what is right counts as right, however it is spelled."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bothways.core.errors import DataError
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.base import EncodedExample
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import Spelling, chunks, flaws, respell
from bothways.tasks.tagging.task import Tagger, TaggingTask
from bothways.text.tokenizer import Tokenizer
from toy_task import VOCABULARY, WORDS, make_tokenizer

SCHEMES: dict[str, tuple[Spelling, tuple[str, ...]]] = {
    "bioes": (
        "bioes",
        ("O", *(f"{prefix}-{kind}" for kind in ("LOC", "PER") for prefix in "BIES")),
    ),
    "bilou": (
        "bioes",
        ("U-PER", "L-PER", "I-PER", "B-PER", "O", "B-LOC", "I-LOC", "L-LOC", "U-LOC"),
    ),
    "iob1": ("iob1", ("O", "I-PER", "B-PER", "I-LOC", "B-LOC")),
    "never side by side": ("iob1", ("O", "I-PER", "I-LOC")),
    "iob2": ("iob2", ("I-PER", "B-PER", "B-LOC", "I-LOC", "O")),
    "bare": ("iob2", ("O", "B", "I")),
}
WAYS: tuple[Spelling, ...] = ("iob1", "iob2", "bioes")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make_task(tokenizer: Tokenizer, labels: tuple[str, ...]) -> Tagger:
    torch.manual_seed(5)
    config, definition = (
        EncoderConfig(len(VOCABULARY), 16, 1, 2, 32, position=Learned(24), initial_range=0.5),
        TaggingTask(),
    )
    return definition.bind(Model(config, definition.heads(labels, None)), tokenizer, labels, 24)


@pytest.mark.parametrize("name", SCHEMES)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=12))
def test_what_a_model_says_in_its_own_scheme_is_right_in_every_spelling(tokenizer, name, places):
    scheme, labels = SCHEMES[name]
    own = tuple(labels[place % len(labels)] for place in places)
    if flaws(own, scheme) or not chunks(own):
        return
    task, words = make_task(tokenizer, labels), tuple(random.Random(0).choices(WORDS, k=len(own)))
    logits = np.full((len(own), len(labels)), -99, dtype=np.float32)
    logits[range(len(own)), [labels.index(tag) for tag in own]] = 99
    for spelling in WAYS:
        example = TagExample(words, respell(own, spelling))
        prediction = task.decode(example, EncodedExample((), 0, 0), [logits])
        assert prediction.tags == own == task.task.gold_tags(example, labels)
        metrics = dict(task.score([(example, prediction)]))
        kinds = {chunk.type for chunk in chunks(own)}
        found = {
            key: value
            for key, value in metrics.items()
            if "/" not in key or key.rsplit("/")[1] in kinds
        }
        assert found == pytest.approx({key: float(key != "loss") for key in found})
        assert metrics.keys() == task.task.directions(labels).keys()
        assert task.grade(example, prediction) == 1


@pytest.mark.parametrize("name", SCHEMES)
def test_a_models_own_sound_answers_are_right(tokenizer, name):
    scheme, labels = SCHEMES[name]
    task, draw = make_task(tokenizer, labels), random.Random(1)
    bare = [TagExample(tuple(draw.choices(WORDS, k=draw.randint(1, 6)))) for _ in range(200)]
    sound = [
        dataclasses.replace(e, tags=p.tags)
        for e, p in predict(task, bare)
        if not flaws(p.tags, scheme)
    ]
    assert any(chunks(example.tags or ()) for example in sound)
    metrics = evaluate_task(task, sound)
    names = (
        "f1",
        "precision",
        "recall",
        "f1_strict",
        "precision_strict",
        "recall_strict",
        "accuracy",
    )
    assert [metrics[name] for name in names] == [1.0] * 7


def test_the_targets_of_training_are_those_of_scores(tokenizer):
    _, labels = SCHEMES["bioes"]
    (made,) = make_task(tokenizer, labels).encode(
        [TagExample(("ape", "bee", "cat"), ("B-PER", "I-PER", "B-LOC"))]
    )
    targets = made.sequences[0].targets["tag"].ids.tolist()
    assert [labels[place] for place in targets] == ["B-PER", "E-PER", "S-LOC"]


def test_entities_that_the_labels_cannot_spell_are_refused(tokenizer):
    task = make_task(tokenizer, ("O", "I-PER", "I-LOC"))
    message = r"^a:6: tag 'S-PER' of word 2 \(in the model's scheme 'B-PER'\) is not among the model's 3 labels; did you mean 'I-PER'"
    with pytest.raises(DataError, match=message):
        evaluate_task(task, [TagExample(("ape", "bee"), ("S-PER", "S-PER"), "a:6")])
    with pytest.raises(DataError, match=r"^a:7: tag 'NN' of word 2 is not among the model's 3"):
        evaluate_task(task, [TagExample(("ape", "bee"), ("O", "NN"), "a:7")])
