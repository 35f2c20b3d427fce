"""Why a model answers as it does, over HTTP: `POST /explain`, see `prediction.explanation`.

    {"method": "leave_one_out", "inputs": "what a lovely film", "label": "positive"}

Words left out are texts like any others: they share batches with other requests. Attentions are
computed by the model as it is saved, in a job by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as Many
from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from bothways.core.source import rng
from bothways.data import masking
from bothways.hub.static_embedding import StaticEncoder
from bothways.prediction import explanation
from bothways.serving.batcher import ModelJob
from bothways.serving.errors import RequestError, check_limit
from bothways.serving.models import Models, ServedModel, request_errors
from bothways.serving.shapes import Answer, Count, Input, Query, RequestBody, Route, Text, Whole
from bothways.tasks.base import EncodedExample
from bothways.tasks.catalogue import ALL_TASKS
from bothways.tasks.predictions import brief
from bothways.text.template import assemble

MAX_ATTENTION_TOKENS = 128
"""The longest sequence whose attentions are answered: n² numbers for each head."""
KINDS = tuple(kind for kind in ALL_TASKS if kind != "choice")
"""The tasks for which there is a method."""
FIELDS = {
    "leave_one_out": {"label", "word"}, "attention": {"layer"},
    "masked_lm": {"rate", "unit", "draw"},
}  # fmt: skip
"""The fields that belong to one method."""
MAX_CHARACTERS, MAX_WORDS = 20_000, 512
"""The longest text that is explained, and its maximum number of words."""


class ExplainRequest(RequestBody):
    """An input, and what of its answer is to be explained how."""

    method: Literal["leave_one_out", "attention", "masked_lm"]
    inputs: Input
    label: Text | None = Field(default=None, description="the class or the tag")
    word: Whole = Field(default=0, description="whose tag, from 0")
    layer: Count | None = Field(default=None, description="absent: the last")
    rate: float = Field(default=0.15, description="share of masked tokens", strict=True, gt=0, le=1)
    unit: Literal["tokens", "whole_words", "ngrams", "spans"] = "tokens"
    draw: Whole = Field(default=0, description="number of the draw of the masks")


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


class TrainedToken(SequenceToken):
    """A token of an input in training: the token of the text, and how it was changed."""

    position: int
    segment: int
    original: str
    change: Literal["", "masked", "random", "kept"]


class TrainedInput(TypedDict):
    """A text as masked language models read it in training."""

    method: Literal["masked_lm"]
    tokens: list[TrainedToken]


def explain(models: Models, request: ExplainRequest) -> Query | TrainedInput:
    """Read a request of `/explain`: `method`, `inputs`, and what the method needs.

    | method | needs | answers |
    |---|---|---|
    | leave_one_out | `label`; for tags `word` | the fall of the output without each word |
    | attention | `layer`, by default the last | the heads of a layer, the rollout of all |
    | masked_lm | `rate`, `unit`, `draw` | a text or two as in training, see `bothways show` |

    Raises:
        RequestError: the method is not for this task, or another one's field is given; the input is
            too long; no such layer.
    """
    model = models.choose(request.model, KINDS)
    excluded = set[str]().union(*FIELDS.values()) - FIELDS[request.method]
    for name in sorted(request.model_fields_set & excluded):
        raise RequestError("invalid", f"{name} is not of method {request.method}", param=name)
    depth = model.task_model.model.config.depth
    layer = request.layer or depth
    if layer > depth:
        message = f"layer must be at most {depth}, not {layer}"
        raise RequestError("invalid", message, param="layer")
    value = request.inputs
    limit = ("explained_characters", MAX_CHARACTERS)
    check_limit("text_too_long", "characters to explain", len(str(value)), *limit)
    is_static = isinstance(model.task_model.model.encoder, StaticEncoder)
    if is_static and request.method != "leave_one_out":
        message = "a static model has no attention, and is not trained on masked tokens"
        raise RequestError("invalid", message, param="method")
    if request.method == "masked_lm":
        return _mask(model, request)
    if request.method == "attention":
        return _attention(model, value, layer)
    return _leave_one_out(model, value, explanation.ExplainedOutput(request.label, request.word))


_UNITS: dict[str, masking.Unit] = {
    unit.kind: unit
    for unit in (masking.SingleTokens(), masking.WholeWords(), masking.NGrams(), masking.Spans())
}


def _mask(model: ServedModel, request: ExplainRequest) -> TrainedInput:
    from bothways.pretraining.training_inputs import describe_sequence

    texts = (request.inputs,) if isinstance(request.inputs, str) else request.inputs
    if not isinstance(texts, tuple):
        raise RequestError("invalid", "inputs must be a text or a list of two", param="inputs")
    tokenizer, length = model.task_model.tokenizer, model.task_model.length
    with request_errors():
        ids = tokenizer.encode(texts)
    original = assemble(ids[0], ids[1] if len(ids) == 2 else None, tokenizer.template)
    if not all(map(len, ids)) or len(original) > length:
        message = f"inputs has {len(original)} tokens, and must have text and at most {length}"
        raise RequestError("invalid", message, param="inputs")
    rule, draw = masking.Masking(request.rate, _UNITS[request.unit]), request.draw
    vocabulary = masking.Vocabulary.of(tokenizer)
    masked = masking.mask_tokens(original, rule, vocabulary, rng(0, "prepare", epoch=draw))
    tokens: list[TrainedToken] = [
        {
            "id": token.id,
            "text": token.token,
            "special": bool(tokenizer.special[id]),
            "position": token.position,
            "segment": token.segment,
            "original": token.original,
            "change": token.change,  # type: ignore[typeddict-item]
        }
        for id, token in zip(
            original.ids, describe_sequence("", original, masked, tokenizer).tokens, strict=True
        )
    ]
    return {"method": "masked_lm", "tokens": tokens}


def _leave_one_out(model: ServedModel, item: Any, target: explanation.ExplainedOutput) -> Query:
    task_model = model.task_model
    with request_errors():
        example = model.example(item)
        words = explanation.example_words(task_model.tokenizer, example)
        limit = ("explained_words", MAX_WORDS)
        check_limit("too_many_texts", "words to leave out", len(words), *limit)
        shorter = [explanation.without(example, words, n) for n in range(len(words))]

    def write(answer: Answer) -> WordEffects:
        full, *shortened_predictions = answer.predictions
        with request_errors():
            value = explanation.value_of(full, target, task_model.classes)
            effects = [
                value - explanation.effect_without(other, n, target, task_model.classes)
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
        if not encoded[0].sequences:  # of no document, or of a text to score without a token
            raise RequestError("invalid", "the input has no text to show", param="inputs")
        sequence, read = encoded[0].sequences[0], encoded[0].tokens - encoded[0].cut
        if read > len(sequence) - tokenizer.template.single:
            message = f"the input has {read} tokens in several sequences, and one is shown"
            raise RequestError("invalid", f"{message}: give a shorter input", param="inputs")
        limit = ("attention_tokens", MAX_ATTENTION_TOKENS)
        check_limit("too_many_tokens", "tokens", len(sequence), *limit)
        with request_errors("method"):
            task_model = model.predictor.unprepared()
        compute = functools.partial(explanation.attentions, task_model, sequence)
        return [ModelJob(len(sequence), compute)]

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
            "rollout": explanation.rollout(layers).round(4),
        }

    return Query(model, [item], write, jobs=jobs)


EXPLAIN = Route(
    ExplainRequest,
    explain,
    WordEffects | Attentions | TrainedInput,
    "Why the model answers so: words left out, attention; the input as in training",
    KINDS,
    {"method": "attention", "inputs": None},
)
"""The route `/explain` of the playground."""
