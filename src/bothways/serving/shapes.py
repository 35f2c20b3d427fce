"""What routes share: a request read from JSON, and its answer before it is written.

A shape is a function from the fields of a request to a `Query`: which model, which inputs, and how
the predictions are written. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from bothways.core.errors import ConfigError
from bothways.serving.batcher import ModelJob
from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.tasks.base import EncodedExample
from bothways.tasks.metrics import sigmoid
from bothways.tasks.predictions import RankPrediction
from bothways.tasks.sentence_embedding.task import PromptedText, SentenceEmbeddingTask

Vectors = Float32[np.ndarray, "texts width"]
_MISSING = object()


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
    """

    model: ServedModel
    inputs: Many[Any]
    write: Callable[[Answer], Any]
    truncate: bool = True
    jobs: Callable[[Many[Any], Many[EncodedExample]], Many[ModelJob]] | None = None


Shape = Callable[[Models, Mapping[str, Any]], Query]


def field(body: Mapping[str, Any], name: str, kind: type, default: Any = _MISSING) -> Any:
    """Return a field of a request; null is as good as absent.

    Raises:
        RequestError: it is missing without a default, or of another type. A truth value is no
            number.
    """
    value = body.get(name)
    if value is None:
        if default is _MISSING:
            raise RequestError("invalid", f"{name} is missing", param=name)
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        wanted = names.get(kind, "a list" if kind is list else "an object")
        given = {bool: "a truth value", dict: "an object", list: "a list", str: "a text"}
        message = f"{name} must be {wanted}, not {given.get(type(value), 'a number')}"
        raise RequestError("invalid", message, param=name)
    return value


def whole_number(body: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """Return a field that is a whole number from 1 on; errors as `field`."""
    value: int | None = field(body, name, int, default)
    if value is not None and value < 1:
        raise RequestError("invalid", f"{name} must be at least 1, not {value}", param=name)
    return value


def texts_in(value: Any, name: str) -> tuple[list[str], bool]:
    """Return the texts in a field that holds one or a list, and whether it holds a list.

    Raises:
        RequestError: it holds something else.
    """
    if isinstance(value, str):
        return [value], False
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value, True
    message = f"{name} must be a text or a list of texts"
    raise RequestError("invalid", message, param=name)


def truncates(*bodies: Mapping[str, Any]) -> bool:
    """Return whether a request allows texts to be cut; errors as `field`."""
    return all([field(body, "truncate", bool, True) for body in bodies])  # each is checked


def prompted(
    model: ServedModel, texts: Many[str], *bodies: Mapping[str, Any]
) -> list[PromptedText]:
    """Return texts with the prompt that `prompt_name` in a request names, else the default one.

    Raises:
        RequestError: the model has no such prompt.
    """
    names = [field(body, "prompt_name", str, None) for body in bodies]
    name, task = next((name for name in names if name is not None), None), model.learner.task
    if not isinstance(task, SentenceEmbeddingTask):
        if name is None:
            return [PromptedText(text) for text in texts]
        raise RequestError("invalid", "the model has no prompts", param="prompt_name")
    try:
        prompt = task.prompt_text(name)
    except ConfigError as error:
        raise RequestError("invalid", error.message("json"), param="prompt_name") from error
    return [PromptedText(text, prompt=prompt) for text in texts]


def component_count(body: Mapping[str, Any], name: str, model: ServedModel) -> int | None:
    """Return how many components of a vector a request asks for; None for all.

    Raises:
        RequestError: as `field`; there are fewer.
    """
    count, task = whole_number(body, name), model.learner.task
    assert isinstance(task, SentenceEmbeddingTask)
    if count is not None and count > (width := task.width(model.learner.model)):
        message = f"{name} must be at most {width}, the width of {model.name!r}, not {count}"
        raise RequestError("invalid", message, param=name)
    return count


def shortened(answer: Answer, count: int | None, *, normalise: bool) -> Vectors:
    """Return vectors cut to `count` components; then, if asked for, of length 1."""
    task, vectors = answer.model.learner.task, answer.vectors
    assert isinstance(task, SentenceEmbeddingTask)
    whole_vectors = count is None or count == vectors.shape[1]
    vectors = vectors[:, :count]
    # Vectors that have length 1 already stay as they are, to the bit.
    if not normalise or (task.normalised and task.components is None and whole_vectors):
        return vectors
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    result: Vectors = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
    return result


def cosines(one: Float32[np.ndarray, " width"], others: Vectors) -> list[float]:
    """Return the cosine of a vector with each of others."""
    a, b = one.astype(np.float64), others.astype(np.float64)
    lengths = np.linalg.norm(a) * np.linalg.norm(b, axis=1)
    result: list[float] = (b @ a / np.maximum(lengths, 1e-24)).tolist()
    return result


def own(kind: str) -> Shape:
    """Return the shape of the library itself: each answer is as a line of `bothways predict`.

    `inputs` holds a text, an object with the columns of the task, or a list of texts, pairs
    (lists of two texts) and objects; the answer to a list is a list.
    """

    def read(models: Models, body: Mapping[str, Any]) -> Query:
        """Read a request for models of this task."""
        model = models.choose(body.get("model"), (kind,))
        if "inputs" not in body:
            raise RequestError("invalid", "inputs is missing", param="inputs")
        value = body["inputs"]
        several = isinstance(value, list)
        inputs = [as_input(item) for item in (value if several else [value])]

        def write(answer: Answer) -> Any:
            """Return each prediction as `bothways predict` writes it."""
            lines = [prediction.to_json() for prediction in answer.predictions]
            return lines if several else lines[0]

        return Query(model, inputs, write, truncates(body))

    return read


def as_input(value: Any) -> Any:
    """Return an input of a predictor: a pair is a tuple.

    Raises:
        RequestError: it is none.
    """
    if isinstance(value, str | dict):
        return value
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value):
        return tuple(value)
    message = "each input must be a text, a list of two texts, or an object with columns"
    raise RequestError("invalid", message, param="inputs")


def class_scores(prediction: Any, labels: Many[str]) -> list[dict[str, Any]]:
    """Return labels with scores, the highest first; a score by itself has its one label."""
    if isinstance(prediction, RankPrediction):
        return [{"label": labels[0], "score": float(sigmoid(np.array(prediction.logits))[0])}]
    probabilities = getattr(prediction, "probabilities", None)
    if probabilities is None:
        return [{"label": labels[0] if labels else "score", "score": prediction.score}]
    ranked = sorted(probabilities.items(), key=lambda item: -item[1])
    return [{"label": label, "score": score} for label, score in ranked]
