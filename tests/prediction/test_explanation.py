"""Explanations: words left out, and attentions as those of transformers."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import bothways
from bothways.core.errors import ConfigError, DataError
from bothways.prediction.explanation import (
    ExplainedOutput,
    attentions,
    effect_without,
    example_words,
    leave_one_out,
    rollout,
    value_of,
    without,
)
from bothways.prediction.predictor import Predictor
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from toy_text import bert_tokens, write_vocabulary

TEXT, SECOND = "Hello world, you play 中文 well", "the naïve don"
CLASSES = {
    "classify": ("SequenceClassification", "single_label_classification"),
    "tag": ("TokenClassification", None),
}
LABELS = ["no", "maybe", "yes"]


@functools.cache
def peer(task: str) -> Any:
    """A small model of transformers whose weights are large enough to be far from linear."""
    torch.manual_seed(3)
    name, problem = CLASSES[task]
    labels = ["O", "B-X", "I-X"] if task == "tag" else LABELS
    config = transformers.BertConfig(
        vocab_size=len(bert_tokens()), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=32, max_position_embeddings=40, initializer_range=0.3,
        problem_type=problem, id2label=dict(enumerate(labels)),
        label2id={label: n for n, label in enumerate(labels)}, attn_implementation="eager",
    )  # fmt: skip
    return getattr(transformers, f"BertFor{name}")(config).eval()


@functools.cache
def opened(task: str, place: Path) -> Predictor:
    peer(task).save_pretrained(place)
    Tokenizer.load(write_vocabulary(place / "words", do_lower_case=False)).save(place)
    return bothways.load(place, task=task)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("explained")


@pytest.mark.parametrize("text", [TEXT, "Hello"])
def test_attentions_and_rollout_are_those_of_transformers(text, place):
    predict = opened("classify", place / "classify")
    (encoded,) = predict.task_model.encode([predict.task_model.task.from_texts((text, SECOND))])
    (sequence,) = encoded.sequences
    found = attentions(predict.unprepared(), sequence)
    with torch.no_grad():
        theirs = peer("classify")(
            input_ids=torch.from_numpy(sequence.ids).long()[None],
            token_type_ids=torch.from_numpy(sequence.segments).long()[None],
            output_attentions=True,
        ).attentions
    assert len(found) == len(theirs) == 2
    for ours, other in zip(found, theirs, strict=True):
        np.testing.assert_allclose(ours, other[0].numpy(), atol=1e-6)
    # Abnar and Zuidema 2020, in their order of words: Ã = A(l) Ã(l − 1), A = 0.5 W + 0.5 I.
    flow = None
    for layer in theirs:
        mean = layer[0].double().mean(0)
        mixed = 0.5 * mean + 0.5 * torch.eye(len(mean), dtype=torch.float64)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        flow = mixed if flow is None else mixed @ flow
    np.testing.assert_allclose(rollout(found), flow, atol=1e-6)
    np.testing.assert_allclose(rollout(found).sum(1), 1, atol=1e-9)


def test_words_are_slices_of_the_text_and_can_be_left_out(place):
    predict = opened("classify", place / "classify")
    tokenizer = predict.task_model.tokenizer
    text = " play  the 😀中 unable, world\u200b"
    example = TextExample(text, SECOND)
    words = example_words(tokenizer, example)
    assert [word.text for word in words][:5] == ["play", "the", "😀", "中", "unable"]
    for word in words:
        assert (SECOND if word.part else text)[word.start : word.stop] == word.text
    assert without(example, words, 0).text == "  the 😀中 unable, world\u200b"
    assert without(example, words, 4).text == " play  the 😀中 , world\u200b"
    short = TextExample("play the")
    assert without(short, example_words(tokenizer, short), 1).text == "play"
    short = TextExample("😀中")
    assert without(short, example_words(tokenizer, short), 1).text == "😀"
    last = without(example, words, len(words) - 1)
    assert (last.text, last.text_b) == (text, "the naïve")


def test_words_keep_the_marks_that_the_tokenizer_drops(tokenizer):
    words = example_words(tokenizer, TextExample("the\u0301, a"))
    assert [word.text for word in words] == ["the\u0301", ",", "a"]


def test_words_of_tags_keep_their_numbers(place):
    predict = opened("tag", place / "tag")
    labels = predict.task_model.labels
    example = predict.task_model.task.from_texts(("the play you hello",))
    words = example_words(predict.task_model.tokenizer, example)
    target = ExplainedOutput("B-X", 2)
    for place_ in range(len(words)):
        shorter = without(example, words, place_)
        rest = [word for n, word in enumerate(example.words) if n != place_]
        assert list(shorter.words) == rest
        prediction = predict(shorter)
        found = effect_without(prediction, place_, target, labels)
        if place_ == 2:
            assert np.isnan(found)
        else:
            assert found == prediction.probabilities[rest.index("you"), labels.index("B-X")]
    assert value_of(predict(example), target, labels) == predict(example).probabilities[2, 1]


def test_what_cannot_be_explained_says_why(place, predictors):
    predict = opened("classify", place / "classify")
    example = predict.task_model.task.from_texts((TEXT,))
    with pytest.raises(DataError, match="'other' is not one of the model's; there are no, maybe"):
        leave_one_out(predict, example, ExplainedOutput("other"))
    with pytest.raises(DataError, match="the label is missing"):
        leave_one_out(predict, example, ExplainedOutput())
    tags = opened("tag", place / "tag")
    with pytest.raises(DataError, match="there is no word 9"):
        leave_one_out(tags, tags.task_model.task.from_texts((TEXT,)), ExplainedOutput("O", 9))
    embed = predictors["embed"]
    with pytest.raises(DataError, match="give two texts"):
        value_of(embed("a"), ExplainedOutput(), ())
    alone = Predictor(predict.task_model)
    with pytest.raises(ConfigError, match="no model folder"):
        alone.unprepared()
    before = predict.unprepared()
    assert predict.unprepared() is before


def test_effects_are_falls_of_the_probability(place):
    predict = opened("classify", place / "classify")
    example = predict.task_model.task.from_texts(("play the world",))
    effects = leave_one_out(predict, example, ExplainedOutput("yes"))
    assert [word.text for word, _ in effects] == ["play", "the", "world"]
    whole, rest = (predict(text).probabilities["yes"] for text in ("play the world", "play world"))
    assert effects[1][1] == pytest.approx(whole - rest, abs=1e-6)
