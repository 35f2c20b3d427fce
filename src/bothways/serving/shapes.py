"""Requests and answers of all routes: each declares its fields, and the rest is refused.

    class EmbedRequest(TruncatedRequest):
        inputs: Texts
        normalize: Flag = True

From such a pydantic model come the validation, the message about a field that is unknown or has
another type, and the schema in the OpenAPI document. Answers are declared by a TypedDict next to
the function that writes them: mypy compares both, and the document is built from it. Null is as
good as absent.

A route reads the fields that it declares into a `Query`: which model, which inputs, and how the
predictions are written. It computes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence as Many
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StrictStr,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from bothways.serving.batcher import ModelJob
from bothways.serving.errors import Limits, RequestError
from bothways.serving.models import Models, ServedModel, request_errors
from bothways.tasks import predictions as p
from bothways.tasks.base import EncodedExample, did_you_mean
from bothways.tasks.catalogue import ALL_TASKS
from bothways.tasks.metrics import sigmoid
from bothways.tasks.sentence_embedding.task import PromptedText, SentenceEmbeddingTask
from bothways.tasks.sentence_embedding.vectors import quantize
from bothways.tasks.text_task import TextTask

Schema = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R", bound="Fields")


def _whole(value: Any) -> Any:
    """Return a number as it is; 8.0 is 8, since JSON has only one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bounded(value: Any, info: Any) -> Any:
    """Refuse more items than the limit, before anything is done with them.

    Args:
        info: pydantic's `ValidationInfo`, a protocol that beartype cannot check.
    """
    limits = info.context
    if isinstance(limits, Limits) and isinstance(value, list):
        if value and isinstance(value[0], int):  # token ids of one text, however many
            return value[:1]  # which is refused by its type
        limits.check("texts", info.field_name or "", len(value))
    return value


def must_be(description: str) -> WrapValidator:
    """Refuse a value of another type by one message, not by one for each alternative of a union."""

    def read(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {description}") from None

    return WrapValidator(read)


Text = StrictStr
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True, ge=0), BeforeValidator(_whole)]
Count = Annotated[int, Field(strict=True, ge=1), BeforeValidator(_whole)]
BOUNDED = BeforeValidator(bounded)
"""Of a value that may be a list, one item for each input."""
NonEmpty = Annotated[list[T], Field(json_schema_extra={"minItems": 1})]
"""A list; the document excludes an empty one, which has an error of its own, `empty`."""
Pair = Annotated[list[Text], Field(min_length=2, max_length=2), AfterValidator(tuple)]
Row = Text | Pair | dict[str, Any]
AN_INPUT = must_be("a text, a list of two texts, or an object with columns")
Input = Annotated[Row, AN_INPUT]
Texts = Annotated[Text | NonEmpty[Text], must_be("a text or a list of texts"), BOUNDED]
TextList = Annotated[
    Texts, AfterValidator(lambda texts: texts if isinstance(texts, list) else [texts])
]
"""A text or a list of texts, read as a list."""
Prompt = Annotated[
    Text, Field(description="a prompt of the model, put before the text; absent: its default one")
]
Meaningless = Annotated[Any, WithJsonSchema({"description": "accepted, and without effect"})]
"""A field that clients always send, and that means nothing here."""


class Fields(BaseModel):
    """The fields of an object in a request; others are refused."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Schema:
        """Build the JSON schema, in which fields that may be absent may be null."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name in schema["properties"].keys() - schema.get("required", ()):
            field = schema["properties"][name]
            if {"type": "null"} not in field.get("anyOf", ()):
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        return schema

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = cls.model_fields
        return {name: x for name, x in data.items() if x is not None or name not in names}


class RequestBody(Fields):
    """Fields of every request."""

    model: Text | None = Field(default=None, description="with a single model any name will do")


class Truncation(Fields):
    """Treatment of texts that are longer than the model reads."""

    truncate: Flag = Field(default=True, description="false: a text that is too long is an error")
    truncation_direction: Literal["right", "Right"] = Field(
        default="right", description="long texts lose their end"
    )


class TruncatedRequest(RequestBody, Truncation):
    """A request with texts that may be too long."""


class Options(Fields):
    """Options of Hugging Face's hosted API, which clients send: they have no effect here."""

    use_cache: Meaningless = None
    wait_for_model: Meaningless = None
    use_gpu: Meaningless = None


class HostedRequest(TruncatedRequest):
    """A request of Hugging Face's clients, which send `truncate` at the root or below."""

    parameters: Truncation = Truncation()
    options: Options = Options()

    @property
    def cuts(self) -> bool:
        """True if texts that are too long are cut."""
        return self.truncate and self.parameters.truncate


def parse(request: type[R], body: Mapping[str, Any], limits: Limits) -> R:
    """Return the fields of a body.

    Raises:
        RequestError: a field is unknown, missing, or has another type; too many items.
    """
    try:
        return request.model_validate(body, context=limits)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
    # An unknown name first: it may be the one that is missing under another.
    fault = min(errors, key=lambda fault: fault["type"] != "extra_forbidden")
    names = [str(name) for name in fault["loc"]]
    path, name = ".".join(names) or "the body", names[-1] if names else ""
    message, value = str(fault["msg"]), fault.get("input")
    match fault["type"]:
        case "extra_forbidden":
            fields: type[Fields] = request  # the declaration of the object at the path
            for key in names[:-1]:
                field = fields.model_fields.get(key)
                inner = None if field is None else field.annotation
                if not (isinstance(inner, type) and issubclass(inner, Fields)):
                    break
                fields = inner
            near = did_you_mean(name, fields.model_fields)
            message = f"{path[:100]} is not one of {', '.join(fields.model_fields)}{near}"
        case "missing":
            message = f"{path} is missing"
        case "model_type":
            message = f"{path} must be an object"
        case _:
            message = message.removeprefix("Value error, ").replace("Input should be", "must be")
            value_text = f", not {value!r:.50}" if isinstance(value, str | int | float) else ""
            message = f"{path} {message}{value_text if 'must be' in message else ''}"
    raise RequestError("invalid", message, param=path[:100])


class _Schemas(GenerateJsonSchema):
    """JSON schemas without titles, which repeat the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False."""
        return False


def build_schema(annotation: Any, definitions: dict[str, Schema]) -> Schema:
    """Build the JSON schema of a request or an answer from its type.

    Args:
        annotation: a model of pydantic, a TypedDict, or a type made of these.
        definitions: receives the schemas of types within it, by their names.
    """
    schema: Schema = TypeAdapter(annotation).json_schema(
        ref_template="#/components/schemas/{model}", schema_generator=_Schemas
    )
    definitions.update(schema.pop("$defs", {}))
    return schema


PREDICTIONS: dict[str, Schema] = {
    kind: p.json_schema(p.prediction_type(task))
    for kind, task in ALL_TASKS.items()
    if kind not in ("embed", "rerank")
}
"""The lines of `bothways predict` by task; other routes answer vectors and rankings."""


@dataclass(frozen=True)
class Answer:
    """The predictions for a request.

    Attributes:
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
    def vectors(self) -> Float32[np.ndarray, "texts width"]:
        """The vector of each input, which is a single text."""
        return np.stack([prediction.vectors[0] for prediction in self.predictions])


@dataclass(frozen=True)
class Query:
    """A request that has been read.

    Attributes:
        inputs: each a text, a pair of texts or a row, as `Predictor` takes them.
        write: returns what the client receives, to be written as JSON.
        truncate: whether texts may be longer than the model reads, which are then cut.
        jobs: from examples and their encoded forms, what is computed in place of predictions.
        searches: whether `write` searches an index: it is called in a thread, and may return
            another query, whose answer the request gets.
        input_name: returns the name of an input for messages, from its number, counted from 1.
    """

    model: ServedModel
    inputs: Many[Any]
    write: Callable[[Answer], Any]
    truncate: bool = True
    jobs: Callable[[Many[Any], Many[EncodedExample]], Many[ModelJob]] | None = None
    searches: bool = False
    input_name: Callable[[int], str] = "input {}".format


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
        example: a request; None as `inputs` is the `example_inputs` of the model.
        computes: False for an answer that needs no model, and has no numbers of its computation.
    """

    request: type[RequestBody] | None
    read: Callable[[Models, Any], Any]
    answer: Any
    summary: str = ""
    kinds: tuple[str, ...] = ()
    example: Mapping[str, Any] = field(default_factory=lambda: {"inputs": None})
    computes: bool = True

    def query(self, models: Models, body: Mapping[str, Any]) -> Any:
        """Read the body of a request; errors as `parse` and `read`."""
        if self.request is None:
            return self.read(models, body).query(models, body)
        return self.read(models, parse(self.request, body, models.limits))


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
    with request_errors("prompt_name"):
        prompt = task.prompt_text(name)
    return [PromptedText(text, prompt=prompt) for text in texts]


class VectorRequest(TruncatedRequest):
    """Fields of a request for vectors."""

    dimensions: Count | None = None
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] = Field(
        default="float", description="as `precision` of sentence-transformers"
    )
    ranges: list[list[float]] | None = Field(
        default=None,
        description="for int8, uint8: the lowest and the highest value of each component",
    )
    prompt_name: Prompt | None = None


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
    width = task.width(model.task_model.model)
    count = request.dimensions or width
    if count > width:
        message = f"dimensions must be at most {width}, the width of {model.name!r}, not {count}"
        raise RequestError("invalid", message, param="dimensions")
    if (dtype in ("int8", "uint8")) != (ranges is not None):
        message = f"output_dtype {dtype} takes no ranges"
        if ranges is None:
            message = f"output_dtype {dtype} needs ranges, two lists of lowest and highest values; "
            message += "binary and ubinary need none"
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


class OwnRequest(TruncatedRequest):
    """Inputs as `bothways predict` reads them: texts, pairs, objects with columns."""

    inputs: Annotated[Text | dict[str, Any] | list[Row], AN_INPUT, BOUNDED]


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

    answers = {"anyOf": [PREDICTIONS[kind], {"type": "array", "items": PREDICTIONS[kind]}]}
    summary = f"Task {kind}: lines of `bothways predict`"
    return Route(OwnRequest, read, Annotated[Any, WithJsonSchema(answers)], summary, (kind,))


_SCORED = p.ClassPrediction | p.MultilabelPrediction | p.ScorePrediction | p.RankPrediction
CLASSIFIERS = tuple(
    kind
    for kind, task in ALL_TASKS.items()
    if issubclass(task, TextTask) and issubclass(p.prediction_type(task), _SCORED)
)
"""The tasks on texts and pairs whose predictions `label_scores` writes."""


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
            case p.RankPrediction(logits=(logit,)):
                scores = {name: logit if raw else float(sigmoid(np.array([logit]))[0])}
            case p.ScorePrediction(score=score):
                scores = {name: score}
            case _:
                scores = prediction.probabilities
        ranked = sorted(scores.items(), key=lambda item: -item[1])
        results.append([{"label": label, "score": score} for label, score in ranked])
    return results
