"""Explanations of predictions: each word left out in turn, and attention with its rollout.

    predictor = bothways.load("runs/sst")
    example = predictor.task_model.task.from_texts(("what a lovely film",))
    leave_one_out(predictor, example, ExplainedOutput("positive"))

Neither is a proof. What a model computes without a word is a fact about another text; attention
shows which vectors are mixed, not what they are used for (Jain and Wallace 2019, "Attention is not
explanation"; Wiegreffe and Pinter 2019 reply).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64

from bothways.core.batch import pack
from bothways.core.errors import ConfigError, DataError
from bothways.core.source import Sequence
from bothways.core.terminal import listed
from bothways.model.model import Encoder, recorded_attentions
from bothways.prediction.predictor import Predictor
from bothways.tasks import predictions
from bothways.tasks.base import TaskModel
from bothways.tasks.question_answering.task import characters
from bothways.tasks.tagging.examples import TagExample
from bothways.text.tokenizer import Tokenizer


class ExplainedOutput(NamedTuple):
    """The output that is explained.

    Attributes:
        label: of a class or a tag; None for a score or a cosine.
        word: whose tag, from 0.
    """

    label: str | None = None
    word: int = 0


class Word(NamedTuple):
    """A word of an example, as its tokenizer cuts words.

    Attributes:
        text: a slice of its text.
        start, stop: its characters there.
        part: 0 in the first text, 1 in the second.
    """

    text: str
    start: int
    stop: int
    part: int


def example_words(tokenizer: Tokenizer, example: Any) -> list[Word]:
    """Return the words of an example; DataError if its task is not for one text or two."""
    if isinstance(example, TagExample):
        return [Word(example.whole[start:stop], start, stop, 0) for start, stop in example.spans]
    texts = [getattr(example, name, None) for name in ("text", "text_b")]
    if not isinstance(texts[0], str):
        raise DataError("only texts and pairs of texts can be explained", where="method")
    words = []
    for number, text in enumerate(text for text in texts if isinstance(text, str)):
        (encoded,) = tokenizer.encode_with_offsets([text])
        tokens = enumerate(encoded.words.tolist())
        for _, group in itertools.groupby(tokens, key=lambda token: token[1]):
            positions = [position for position, _ in group]
            # Without the blank that a token of a byte-level vocabulary includes.
            start, stop = characters(text, encoded.offsets, positions[0], positions[-1])
            words.append(Word(text[start:stop], start, stop, number))
    return words


def without(example: Any, words: Many[Word], index: int) -> Any:
    """Return an example without one of its words, and without the space before or after it."""
    word = words[index]
    if isinstance(example, TagExample):
        words_left = (*example.words[:index], *example.words[index + 1 :])
        return TagExample(
            words_left, where=example.where, before=example.before, after=example.after
        )
    name = "text_b" if word.part else "text"
    text = getattr(example, name)
    left, right = text[: word.start], text[word.stop :]
    # One of the two spaces around the word goes with it: "a big dog" → "a dog".
    if right[:1].isspace() and (not left or left[-1].isspace()):
        right = right[1:]
    elif not right and left[-1:].isspace():
        left = left[:-1]
    return dataclasses.replace(example, **{name: left + right})


def value_of(prediction: Any, target: ExplainedOutput, labels: Many[str]) -> float:
    """Return the value of a target in a prediction: a probability, a score or a cosine.

    Raises:
        DataError: the prediction is of another kind, or has no such label or word.
    """
    match prediction:
        case predictions.ClassPrediction() | predictions.MultilabelPrediction():
            return prediction.probabilities[_known(target.label, labels)]
        case predictions.ScorePrediction():
            return prediction.score
        case predictions.TagPrediction():
            index = [*labels].index(_known(target.label, labels))
            if not 0 <= target.word < len(prediction.words):
                fault = f"there is no word {target.word}: there are {len(prediction.words)}, from 0"
                raise DataError(fault, where="word")
            return float(prediction.probabilities[target.word, index])
        case predictions.VectorPrediction() if prediction.cosine is not None:
            return prediction.cosine
        case predictions.VectorPrediction():
            raise DataError("give two texts: their cosine is explained", where="inputs")
        case _:
            message = f"a {type(prediction).__name__} has no number that a word could change"
            raise DataError(message, where="method")


def effect_without(
    prediction: Any, index: int, target: ExplainedOutput, labels: Many[str]
) -> float:
    """Return `value_of` for a prediction that was made without a word.

    NaN for the word whose own tag is the target.
    """
    if isinstance(prediction, predictions.TagPrediction):
        if index == target.word:
            return float("nan")
        target = target._replace(word=target.word - (index < target.word))
    return value_of(prediction, target, labels)


def leave_one_out(
    predictor: Predictor, example: Any, target: ExplainedOutput
) -> list[tuple[Word, float]]:
    """Return each word of an example with how much the output falls without it.

    Raises:
        DataError: the example has no words to leave out, or the target does not exist.
    """
    words = example_words(predictor.task_model.tokenizer, example)
    shorter = [without(example, words, index) for index in range(len(words))]
    full, *predicted = predictor.stream([example, *shorter])
    labels = predictor.task_model.classes
    value = value_of(full, target, labels)
    effects = [value - effect_without(item, n, target, labels) for n, item in enumerate(predicted)]
    return list(zip(words, effects, strict=True))


def _known(label: str | None, labels: Many[str]) -> str:
    if label is None or label not in labels:
        fault = "is missing" if label is None else f"{label[:100]!r} is not one of the model's"
        message = f"the label {fault}; there are {listed(labels, 30)}"
        raise DataError(message, where="label", fix="Give one of them.")
    return label


HeadWeights = Many[Float32[np.ndarray, "heads n n"]]
"""For each layer, the share of each token (second axis) that reads each token (third axis)."""


def attentions(task_model: TaskModel[Any, Any], sequence: Sequence) -> HeadWeights:
    """Return the attention probabilities of each layer for a sequence; ConfigError without any."""
    encoder = task_model.model.encoder
    if not isinstance(encoder, Encoder):
        raise ConfigError("this encoder has no attention", where="method")
    bare = Sequence(
        sequence.ids, sequence.segments, {}, sequence.parts, sequence.global_attention_mask
    )
    batch = pack([bare]).to(encoder.embedding.token.weight.device)
    with torch.no_grad(), recorded_attentions(encoder) as layers:
        encoder(batch)
    return [layer[0].float().cpu().numpy() for layer in layers]


def rollout(layers: HeadWeights) -> Float64[np.ndarray, "n n"]:
    """Compute the flow of each input token (second axis) into each output token, by attention.

    Each layer mixes the mean of its heads and its residual path in equal shares; the layers are
    multiplied.

    Source: Abnar and Zuidema 2020, "Quantifying attention flow in transformers", equation 1.
    """
    result = np.eye(layers[0].shape[-1])
    for heads in layers:
        mixed = 0.5 * heads.astype(np.float64).mean(0) + 0.5 * np.eye(len(result))
        result = mixed / mixed.sum(1, keepdims=True) @ result
    return result
