"""Why a model answers as it does, over HTTP: `POST /explain`, see `prediction.explanation`.

    {"method": "leave_one_out", "inputs": "what a lovely film", "label": "positive"}

Words left out are texts like any others: they share batches with other requests. Attentions are
computed by the model as it is saved, in a job by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as Many
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from bothways.prediction.explanation import (
    ExplainedOutput,
    attentions,
    effect_without,
    rollout,
    value_of,
    without,
    words_of,
)
from bothways.serving.batcher import ModelJob
from bothways.serving.errors import RequestError, check_limit
from bothways.serving.models import Models, ServedModel, request_errors
from bothways.serving.requests import Count, Input, RequestBody, Text, Whole
from bothways.serving.shapes import Answer, Query
from bothways.tasks.base import EncodedExample
from bothways.tasks.catalogue import ALL_TASKS
from bothways.tasks.predictions import brief

MOST_ATTENTION_TOKENS = 128
"""The longest sequence whose attentions are answered: n² numbers for each head."""
KINDS = tuple(kind for kind in ALL_TASKS if kind != "choice")
"""The tasks for which there is a method."""
MOST_CHARACTERS, MOST_WORDS = 20_000, 512
"""The longest text that is explained, and its maximum number of words."""


class ExplainRequest(RequestBody):
    """An input, and what of its answer is to be explained how."""

    method: Literal["leave_one_out", "attention"]
    inputs: Input
    label: Annotated[Text, Field(description="the class or the tag")] | None = None
    word: Annotated[Whole, Field(description="whose tag, from 0")] = 0
    layer: Annotated[Count, Field(description="absent: the last")] | None = None


class WordEffect(TypedDict):
    """A word with its effect; null where it cannot be left out."""

    text: str
    start: int
    stop: int
    part: int
    effect: float | None


class WordEffects(TypedDict):
    """Effects of words that are dropped."""

    method: Literal["leave_one_out"]
    label: str | None
    value: float
    words: list[WordEffect]


class SequenceToken(TypedDict):
    """A token of a sequence."""

    id: int
    text: str
    special: bool


class Attentions(TypedDict):
    """The attentions of a layer's heads, and the rollout of all layers."""

    method: Literal["attention"]
    tokens: list[SequenceToken]
    layer: int
    layers: int
    heads: list[list[list[float]]]
    rollout: list[list[float]]


def explain(models: Models, request: ExplainRequest) -> Query:
    """Read a request of `/explain`: `method`, `inputs`, and what the method needs.

    | method | needs | answers |
    |---|---|---|
    | leave_one_out | `label`; for tags `word` | the fall of the output without each word |
    | attention | `layer`, by default the last | the heads of a layer, the rollout of all |

    Raises:
        RequestError: the method is not for this task; the input is too long; no such layer.
    """
    model = models.choose(request.model, KINDS)
    depth = model.task_model.model.config.depth
    layer = request.layer or depth
    if layer > depth:
        message = f"layer must be at most {depth}, not {layer}"
        raise RequestError("invalid", message, param="layer")
    value = request.inputs
    limit = ("explained_characters", MOST_CHARACTERS)
    check_limit("text_too_long", "characters to explain", len(str(value)), *limit)
    if request.method == "attention":
        return _attention(model, value, layer)
    return _leave_one_out(model, value, ExplainedOutput(request.label, request.word))


def _leave_one_out(model: ServedModel, item: Any, target: ExplainedOutput) -> Query:
    task_model = model.task_model
    with request_errors():
        example = model.example(item)
        words = words_of(task_model.tokenizer, example)
        limit = ("explained_words", MOST_WORDS)
        check_limit("too_many_texts", "words to leave out", len(words), *limit)
        shorter = [without(example, words, n) for n in range(len(words))]

    def write(answer: Answer) -> WordEffects:
        full, *shortened_predictions = answer.predictions
        with request_errors():
            value = value_of(full, target, task_model.classes)
            effects = [
                value - effect_without(other, n, target, task_model.classes)
                for n, other in enumerate(shortened_predictions)
            ]
        return {
            "method": "leave_one_out",
            "label": target.label,
            "value": brief(value),
            "words": [
                {
                    **word._asdict(),  # type: ignore[typeddict-item]
                    "effect": None if math.isnan(effect) else brief(effect),
                }
                for word, effect in zip(words, effects, strict=True)
            ],
        }

    return Query(model, [example, *shorter], write)


def _attention(model: ServedModel, item: Any, layer: int) -> Query:
    tokenizer = model.task_model.tokenizer

    def jobs(examples: Many[Any], encoded: Many[EncodedExample]) -> list[ModelJob]:
        sequence = encoded[0].sequences[0] if encoded[0].sequences else None
        if sequence is None or sequence.parts:
            message = f"attentions are not shown for the task {model.kind!r}"
            raise RequestError("invalid", message, param="method")
        limit = ("attention_tokens", MOST_ATTENTION_TOKENS)
        check_limit("too_many_tokens", "tokens", len(sequence), *limit)
        with request_errors():
            task_model = model.predictor.unprepared()
        return [ModelJob(len(sequence), functools.partial(attentions, task_model, sequence))]

    def write(answer: Answer) -> Any:
        (layers,) = answer.predictions
        ids = answer.encoded[0].sequences[0].ids.tolist()
        return {
            "method": "attention",
            "tokens": [
                {"id": id, "text": tokenizer.token(id), "special": bool(tokenizer.special[id])}
                for id in ids
            ],
            "layer": layer,
            "layers": len(layers),
            "heads": layers[min(layer, len(layers)) - 1].round(4),
            "rollout": rollout(layers).round(4),
        }

    return Query(model, [item], write, jobs=jobs)
