"""Values of all routes: a request, and its answer before it is written.

A route reads the fields that it declares (`serving.requests`) into a `Query`: which model, which
inputs, and how the predictions are written. It computes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence as Many
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from bothways.core.errors import ConfigError
from bothways.serving import requests
from bothways.serving.batcher import ModelJob
from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.tasks.base import EncodedExample
from bothways.tasks.catalogue import ALL_TASKS
from bothways.tasks.metrics import sigmoid
from bothways.tasks.predictions import (
    ClassPrediction,
    MultilabelPrediction,
    RankPrediction,
    ScorePrediction,
    json_schema,
    prediction_type,
)
from bothways.tasks.sentence_embedding.task import PromptedText, SentenceEmbeddingTask
from bothways.tasks.sentence_embedding.vectors import quantize

PREDICTIONS: dict[str, requests.Schema] = {
    kind: json_schema(prediction_type(task))
    for kind, task in ALL_TASKS.items()
    if kind not in ("embed", "rerank")
}
"""The lines of `bothways predict` by task; other routes answer vectors and rankings."""
Vectors = Float32[np.ndarray, "texts width"]


@dataclass(frozen=True)
class Answer:
    """The predictions for a request.

    Attributes:
        model: by which they were made.
        examples, encoded, predictions: one for each input, in order.
    """

    model: ServedModel
    examples: Many[Any]
    encoded: Many[EncodedExample]
    predictions: Many[Any]

    @property
    def tokens(self) -> int:
        """The tokens that the model read, special ones included."""
        return sum(len(sequence) for item in self.encoded for sequence in item.sequences)

    @property
    def cut(self) -> int:
        """The number of inputs that were longer than the model reads."""
        return sum(item.cut > 0 for item in self.encoded)

    @property
    def vectors(self) -> Vectors:
        """The vector of each input, which is a single text."""
        return np.stack([prediction.vectors[0] for prediction in self.predictions])


@dataclass(frozen=True)
class Query:
    """A request that has been read.

    Attributes:
        model: that answers.
        inputs: each a text, a pair of texts or a row, as `Predictor` takes them.
        write: returns what the client receives, to be written as JSON.
        truncate: whether texts may be longer than the model reads, which are then cut.
        jobs: from examples and their encoded forms, what is computed in place of predictions.
        searches: whether `write` searches an index: it is called in a thread, and may return
            another query, whose answer the request gets.
    """

    model: ServedModel
    inputs: Many[Any]
    write: Callable[[Answer], Any]
    truncate: bool = True
    jobs: Callable[[Many[Any], Many[EncodedExample]], Many[ModelJob]] | None = None
    searches: bool = False


def query_each(
    model: ServedModel, value: Any, write: Callable[[Answer], list[Any]], truncate: bool
) -> Query:
    """Return the query for one input or for a list; the answer to a list alone is a list."""
    if isinstance(value, list):
        return Query(model, value, write, truncate)
    return Query(model, [value], lambda answer: write(answer)[0], truncate)


@dataclass(frozen=True)
class Route:
    """A POST route: its request, its answer, and what the OpenAPI document says of them.

    Attributes:
        request: fields of a request; None if another route reads it, which `read` returns for the
            models and the body.
        read: builds the query, or an answer that needs no model; raises a RequestError for what the
            fields alone do not exclude.
        answer: type of an answer.
        summary: one line.
        kinds: tasks of models that answer; empty for all.
        example: a request; None as `inputs` is an input of the task.
    """

    request: type[requests.RequestBody] | None
    read: Callable[[Models, Any], Any]
    answer: Any
    summary: str = ""
    kinds: tuple[str, ...] = ()
    example: Mapping[str, Any] = field(default_factory=lambda: {"inputs": None})

    def query(self, models: Models, body: Mapping[str, Any]) -> Any:
        """Read the body of a request; errors as `requests.parse` and `read`."""
        if self.request is None:
            return self.read(models, body).query(models, body)
        return self.read(models, requests.parse(self.request, body, models.limits))


def prompted(model: ServedModel, texts: Many[str], name: str | None) -> list[PromptedText]:
    """Return texts with the prompt of a name, else with the default one.

    Raises:
        RequestError: the model has no such prompt.
    """
    task = model.task_model.task
    if not isinstance(task, SentenceEmbeddingTask):
        if name is None:
            return [PromptedText(text) for text in texts]
        raise RequestError("invalid", "the model has no prompts", param="prompt_name")
    try:
        prompt = task.prompt_text(name)
    except ConfigError as error:
        raise RequestError("invalid", error.message("json"), param="prompt_name") from error
    return [PromptedText(text, prompt=prompt) for text in texts]


def vector_width(model: ServedModel) -> int:
    """Return the number of components of a model's vectors."""
    task = model.task_model.task
    assert isinstance(task, SentenceEmbeddingTask)
    return task.width(model.task_model.model)


class VectorRequest(requests.TruncatedRequest):
    """Fields of a request for vectors."""

    dimensions: requests.Count | None = None
    output_dtype: Annotated[
        Literal["float", "int8", "uint8", "binary", "ubinary"],
        Field(description="as `precision` of sentence-transformers"),
    ] = "float"
    ranges: (
        Annotated[
            list[list[float]],
            Field(
                description="for int8, uint8: the lowest and the highest value of each component"
            ),
        ]
        | None
    ) = None
    prompt_name: requests.Prompt | None = None


def vector_writer(
    model: ServedModel, request: VectorRequest, *, normalise: bool
) -> Callable[[Answer], Many[NDArray[np.generic]]]:
    """Return a function that makes vectors as requested: cut, with length 1, in another type.

    Raises:
        RequestError: a vector of the model has fewer components, or the ranges do not fit: a
            request has too few vectors to take them from.
    """
    task, dtype, ranges = model.task_model.task, request.output_dtype, request.ranges
    assert isinstance(task, SentenceEmbeddingTask)
    width = vector_width(model)
    count = request.dimensions or width
    if count > width:
        message = f"dimensions must be at most {width}, the width of {model.name!r}, not {count}"
        raise RequestError("invalid", message, param="dimensions")
    if (dtype in ("int8", "uint8")) != (ranges is not None):
        message = f"output_dtype {dtype} takes no ranges"
        if ranges is None:
            message = (
                f"output_dtype {dtype} needs ranges, the lowest and the highest value of each "
                "component among many vectors; binary and ubinary need none"
            )
        raise RequestError("invalid", message, param="ranges")
    if ranges is not None and (
        [*map(len, ranges)] != [count, count] or any(map(operator.gt, *ranges))
    ):
        message = f"ranges must be two lists of {count} numbers, the lowest values first"
        raise RequestError("invalid", message, param="ranges")
    # Vectors that have length 1 already stay as they are, to the bit.
    normalise = normalise and not (task.normalised and task.components is None and count == width)

    def write(answer: Answer) -> Many[NDArray[np.generic]]:
        vectors = answer.vectors[:, :count]
        if normalise:
            norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
            vectors = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
        return [*quantize(vectors, "float32" if dtype == "float" else dtype, ranges)]

    return write


def cosines(vector: Float32[np.ndarray, " width"], vectors: Vectors) -> list[float]:
    """Return the cosine of a vector with each of others."""
    a, b = vector.astype(np.float64), vectors.astype(np.float64)
    lengths = np.linalg.norm(a) * np.linalg.norm(b, axis=1)
    result: list[float] = (b @ a / np.maximum(lengths, 1e-24)).tolist()
    return result


class OwnRequest(requests.TruncatedRequest):
    """Inputs as `bothways predict` reads them: texts, pairs, objects with columns."""

    inputs: Annotated[
        requests.Items,
        requests.per_item(requests.check_input),
        WithJsonSchema(
            requests.either(requests.TEXT, {"type": "object"}, requests.list_of(requests.ROW))
        ),
    ]


def own(kind: str) -> Route:
    """Return the route of the library itself: each answer is as a line of `bothways predict`.

    `inputs` holds a text, an object with the columns of the task, or a list of texts, pairs
    (lists of two texts) and objects; the answer to a list is a list.
    """

    def read(models: Models, request: OwnRequest) -> Query:
        model = models.choose(request.model, (kind,))

        def write(answer: Answer) -> list[Any]:
            return [prediction.to_json() for prediction in answer.predictions]

        return query_each(model, request.inputs, write, request.truncate)

    answers = requests.either(PREDICTIONS[kind], requests.list_of(PREDICTIONS[kind]))
    summary = f"Task {kind}: lines of `bothways predict`"
    return Route(OwnRequest, read, Annotated[Any, WithJsonSchema(answers)], summary, (kind,))


CLASSIFIERS = tuple(
    kind
    for kind, task in ALL_TASKS.items()
    if issubclass(
        prediction_type(task),
        ClassPrediction | MultilabelPrediction | ScorePrediction | RankPrediction,
    )
)
"""The tasks whose predictions `label_scores` writes."""


class LabelScore(TypedDict):
    """A label with its score."""

    label: str
    score: float


def label_scores(answer: Answer, *, raw: bool = False) -> list[list[LabelScore]]:
    """Return labels with scores, the highest first; a score by itself has its one label."""
    (name, *_) = answer.model.task_model.labels or ("score",)
    results = list[list[LabelScore]]()
    for prediction in answer.predictions:
        match prediction:
            case RankPrediction(logits=(logit,)):
                scores = {name: logit if raw else float(sigmoid(np.array([logit]))[0])}
            case ScorePrediction(score=score):
                scores = {name: score}
            case _:
                scores = prediction.probabilities
        ranked = sorted(scores.items(), key=lambda item: -item[1])
        results.append([{"label": label, "score": score} for label, score in ranked])
    return results
