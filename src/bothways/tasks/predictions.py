"""Predictions of tasks: one frozen type for each kind of answer.

The attributes of a prediction that are written, in JSON and in Arrow, are declared once, by its
annotations, from which the JSON Schema and the Arrow types are derived.

| annotation | JSON Schema | Arrow |
|---|---|---|
| `str`, `int`, `float` | string, integer from 0, number | string, int64, double |
| `Literal["a", "b"]` | an enum | string |
| X or None | also null | the type of X |
| `tuple[X, ...]` | an array | a list |
| `tuple[X, Y]`, a `NamedTuple` | an array of this length | a list; a struct |
| `Mapping[str, X]` | an object | a map |
| a dataclass | an object | a struct |
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import ConfigError
from bothways.core.training_module import perplexity

if TYPE_CHECKING:
    from bothways.tasks.base import Task


def brief(value: float) -> float:
    """Round a number to six digits, for JSON."""
    return float(f"{value:.6g}")


class WrittenField(NamedTuple):
    """An attribute that is written.

    Attributes:
        name: its name in JSON and Arrow.
        attribute: its name in Python.
        annotation: its type.
        optional: whether it is absent from JSON where it is None.
    """

    name: str
    attribute: str
    annotation: Any
    optional: bool


@functools.cache
def written_fields(kind: type) -> tuple[WrittenField, ...]:
    """Return the attributes of a dataclass that are written: those in `written`, or its fields."""
    fields = {item.name: item for item in dataclasses.fields(kind)}
    types, result = typing.get_type_hints(kind), list[WrittenField]()
    for entry in getattr(kind, "written", ()) or fields:
        attribute, _, name = entry.partition(" as ")
        if attribute in fields:
            annotation, optional = types[attribute], fields[attribute].default is None
        else:
            getter = getattr(kind, attribute).fget
            annotation, optional = typing.get_type_hints(getter)["return"], False
        result.append(WrittenField(name or attribute, attribute, annotation, optional))
    return tuple(result)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers with six digits, dataclasses as dicts."""
    match value:
        case float():
            return brief(value)
        case str() | int() | None:
            return value
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case tuple():
            return [plain(item) for item in value]
        case _:
            kind: Any = type(value)
            pairs = ((item, getattr(value, item.attribute)) for item in written_fields(kind))
            return {f.name: plain(v) for f, v in pairs if v is not None or not f.optional}


class Prediction:
    """The base of predictions, which are frozen dataclasses.

    Class attributes:
        written: the attributes and properties that are written, in order, such as "label", or
            "scored_tokens as tokens" under another name; empty for all fields.
        answer_field: the attribute that is the answer; empty where there is none.
    """

    written: ClassVar[tuple[str, ...]] = ()
    answer_field: ClassVar[str] = ""

    @property
    def answer(self) -> Any:
        """The value that `Predictor.predict` returns; an AttributeError where there is none."""
        return getattr(self, self.answer_field)

    @property
    def signature(self) -> Any:
        """A value that is equal for all inputs of a model that ignores them."""
        return getattr(self, "answer", self)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `bothways predict` writes them."""
        values: dict[str, Any] = plain(self)
        return values

    def _repr_html_(self) -> str | None:
        """Return the ten most probable labels as a table; None, for the `repr`, without labels."""
        from bothways.core.report.html import metrics_html

        if not isinstance(by_label := getattr(self, "probabilities", None), Mapping):
            return None
        labels = self.answer if isinstance(self.answer, tuple) else filter(None, [self.answer])
        top = dict(sorted(by_label.items(), key=lambda item: -item[1])[:10])
        heading = "label" if len(top) == len(by_label) else f"{len(top)} of {len(by_label)} labels"
        return metrics_html(", ".join(labels) or "no label", {"probability": top}, heading)


@dataclass(frozen=True)
class ClassPrediction(Prediction):
    """One of several classes.

    Attributes:
        label: the most probable label; None if it is less probable than the task's `abstain`.
        index: the index of the most probable label among the labels.
        probabilities: the probability of every label, in their order; they sum to 1.
        label_set: labels that hold the right one as often as guaranteed, the most probable first;
            None for a model without conformal sets.
    """

    answer_field = "label"
    written = ("label", "probabilities", "label_set")

    label: str | None
    index: int
    probabilities: Mapping[str, float]
    label_set: tuple[str, ...] | None = None


@dataclass(frozen=True)
class MultilabelPrediction(Prediction):
    """Any number of labels.

    Attributes:
        labels: the labels whose probability reaches their threshold, in the model's order.
        probabilities: the probability of every label by itself, in their order.
    """

    answer_field = "labels"

    labels: tuple[str, ...]
    probabilities: Mapping[str, float]

    @property
    def signature(self) -> Any:
        """The labels in any order."""
        return frozenset(self.labels)


@dataclass(frozen=True)
class ScorePrediction(Prediction):
    """A number.

    Attributes:
        score: the number.
    """

    answer_field = "score"

    score: float


@dataclass(frozen=True)
class ChoicePrediction(Prediction):
    """One of the endings of a question.

    Attributes:
        index: the index of the most probable ending, from 0.
        ending: the text of this ending.
        probabilities: the probability of each ending; they sum to 1.
    """

    answer_field = "index"

    index: int
    ending: str
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class RankedDocument:
    """A document in a ranking.

    Attributes:
        index: its index among the documents, from 0.
        score: its score.
        document: its text.
    """

    index: int
    score: float
    document: str


@dataclass(frozen=True)
class RankPrediction(Prediction):
    """The documents of a query with their scores.

    Attributes:
        query: the query.
        documents: the documents, in the order of the input.
        logits: the model's output for each document.
        scores: the score of each document: σ of the output, or the output itself.
    """

    written = ("query", "ranking")

    query: str
    documents: tuple[str, ...]
    logits: tuple[float, ...]
    scores: tuple[float, ...]

    @property
    def ranking(self) -> tuple[RankedDocument, ...]:
        """The documents, best first; of equal ones the first."""
        order = sorted(range(len(self.logits)), key=lambda n: -self.logits[n])
        return tuple(RankedDocument(n, self.scores[n], self.documents[n]) for n in order)

    @property
    def signature(self) -> Any:
        """The distinct logits, rounded: a single one if all documents are alike."""
        return frozenset(round(logit, 2) for logit in self.logits)


@dataclass(frozen=True)
class TokenGuess:
    """A token for a mask.

    Attributes:
        token: the token, as the vocabulary spells it.
        probability: its probability.
    """

    token: str
    probability: float


@dataclass(frozen=True)
class JointFilling:
    """Tokens for all masks of a text, in their order.

    Attributes:
        tokens: the tokens, as the vocabulary spells them.
        probability: the first token's, times the second's given the first, and so on.
        text: the text with these tokens.
    """

    tokens: tuple[str, ...]
    probability: float
    text: str


@dataclass(frozen=True)
class FillPrediction(Prediction):
    """The tokens behind the masks of a text.

    Attributes:
        masks: for each mask its most probable tokens, given the other masks as masks, the most
            probable first.
        fillings: the best fillings of all masks together, the most probable first.
    """

    answer_field = "text"
    written = ("text", "masks", "fillings")

    masks: tuple[tuple[TokenGuess, ...], ...]
    fillings: tuple[JointFilling, ...]

    @property
    def text(self) -> str:
        """The text with the best filling."""
        return self.fillings[0].text


class TokenLikelihood(NamedTuple):
    """A token and the natural logarithm of its probability."""

    token: str
    log_likelihood: float


@dataclass(frozen=True)
class LikelihoodPrediction(Prediction):
    """The likelihood of a text.

    Attributes:
        tokens: the tokens of the text, as the vocabulary spells them.
        log_likelihoods: the natural logarithm of each token's probability given the others.
    """

    written = ("log_likelihood", "pseudo_perplexity", "scored_tokens as tokens")

    tokens: tuple[str, ...]
    log_likelihoods: tuple[float, ...]

    @property
    def scored_tokens(self) -> tuple[TokenLikelihood, ...]:
        """The tokens with their log-likelihoods."""
        return tuple(map(TokenLikelihood, self.tokens, self.log_likelihoods))

    @property
    def log_likelihood(self) -> float:
        """The pseudo-log-likelihood of the text, in nats; 0 for an empty one."""
        return math.fsum(self.log_likelihoods)

    @property
    def pseudo_perplexity(self) -> float | None:
        """exp of the mean loss of a token; None for an empty text."""
        return perplexity(-self.log_likelihood / len(self.tokens)) if self.tokens else None


@dataclass(frozen=True)
class PreferencePrediction(Prediction):
    """The log-likelihoods of two texts, in nats; of a masked model the pseudo-log-likelihoods."""

    written = ("preferred", "log_likelihoods")

    first: float
    second: float

    @property
    def preferred(self) -> Literal["first", "second"]:
        """The text that is more likely."""
        return "first" if self.first > self.second else "second"

    @property
    def log_likelihoods(self) -> tuple[float, float]:
        """The log-likelihoods of both texts."""
        return self.first, self.second


@dataclass(frozen=True, eq=False)
class VectorPrediction(Prediction):
    """The vectors of one text, of two, or of an anchor and its documents `(texts, width)`."""

    vectors: NDArray[Any]

    @property
    def cosine(self) -> float | None:
        """The cosine of two vectors, 0 with one of zeros; None for another number of vectors."""
        if len(self.vectors) != 2:
            return None
        a, b = self.vectors.astype(np.float64)
        # A static model has no token in an empty text, and zeros for it.
        return float(a @ b / max(np.sqrt((a @ a) * (b @ b)), 1e-24))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with enough digits to restore the vector."""
        if self.vectors.dtype.kind != "f":  # codes, whose cosine says nothing
            codes = self.vectors.tolist()
            return {"vector": codes[0]} if len(codes) == 1 else {"vectors": codes}
        rows = [[float(str(value)) for value in vector] for vector in self.vectors]
        if len(rows) == 1:
            return {"vector": rows[0]}
        return {"vectors": rows} | ({} if self.cosine is None else {"cosine": brief(self.cosine)})


@dataclass(frozen=True)
class Entity:
    """Words that name something.

    Attributes:
        type: the kind of entity, such as PER.
        text: its slice of the text.
        start: the index of its first character.
        end: the index of the character after its last.
        score: the mean probability of its words' tags.
    """

    type: str
    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class TagPrediction(Prediction):
    """A tag for each word.

    Attributes:
        words: the words of the sentence.
        tags: the most probable tag of each word.
        probabilities: the probability of every label for each word `(words, labels)`.
        entities: the entities that the tags spell; None for plain tags without O.
        text: the text whose characters the entities count; None for the words joined by blanks.
    """

    answer_field = "tags"
    written = ("entities", "words", "tags")

    words: tuple[str, ...]
    tags: tuple[str, ...]
    probabilities: NDArray[np.float64] = field(compare=False, repr=False)
    entities: tuple[Entity, ...] | None = None
    text: str | None = field(default=None, compare=False, repr=False)

    @property
    def signature(self) -> Any:
        """The one tag of all words, as of a collapsed model; else the tags."""
        return self.tags[0] if len({*self.tags}) == 1 else self.tags

    def to_spans(self) -> dict[str, Any]:
        """Return the text with its entities as character spans, which can be trained on.

        Raises:
            ConfigError: the tags are not those of entities.
        """
        if self.entities is None:
            message = "spans are of entities, and the tags of this model are of single words"
            raise ConfigError(message, where="format", fix="Choose jsonl.")
        text = " ".join(self.words) if self.text is None else self.text
        spans = [{"start": e.start, "end": e.end, "label": e.type} for e in self.entities]
        return {"text": text, "spans": spans}


@dataclass(frozen=True)
class AnswerSpan:
    """A span of a context as an answer.

    Attributes:
        text: its slice of the context.
        start: the index of its first character in the context.
        end: the index of the character after its last.
        score: the score of its first token as a start plus that of its last token as an end.
        probability: its probability among all spans that were considered.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float


@dataclass(frozen=True)
class AnswerPrediction(Prediction):
    """A part of the context, or no answer.

    Attributes:
        id: the id of the question.
        text: the answer; empty for none.
        start: the index of its first character in the context; None without an answer.
        end: the index of the character after its last; None without an answer.
        confidence: the probability of the prediction, among the spans and, with a threshold, no
            answer.
        null_difference: the score of no answer minus the best span's; 0 in a context without
            a token.
        spans: the best spans, best first, each text once, whatever is predicted.
    """

    answer_field = "text"

    id: str
    text: str
    start: int | None
    end: int | None
    confidence: float
    null_difference: float
    spans: tuple[AnswerSpan, ...]

    @property
    def best(self) -> str:
        """The best answer, whether it is given or not; empty in a context without a token."""
        return self.spans[0].text if self.spans else ""


Schema = dict[str, Any]
_PLAIN: dict[Any, tuple[Schema, str]] = {
    str: ({"type": "string"}, "string"),
    int: ({"type": "integer", "minimum": 0}, "int64"),
    float: ({"type": "number"}, "double"),
}
"""JSON Schema and Arrow alias of plain types; whole numbers are counts and indices."""
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


CUT_TO_TOP = (ClassPrediction, MultilabelPrediction, RankPrediction)
"""The predictions of which `top` keeps a part."""


def prediction_type(task: Task[Any, Any] | type[Task[Any, Any]]) -> type:
    """Return the type of a task's predictions: the one that its model's `decode` returns."""
    result: type = typing.get_type_hints(task.model_class.decode)["return"]
    return result


def json_schema(annotation: Any) -> Schema:
    """Return the JSON Schema of the values of a type, as `predictions.plain` writes them."""
    if annotation in _PLAIN:
        return dict(_PLAIN[annotation][0])
    if hasattr(annotation, "__dataclass_fields__"):
        # Attributes are described by the docstring of the class, properties by their own.
        section = inspect.cleandoc(annotation.__doc__ or "").partition("\nAttributes:\n")[2]
        texts = dict(_ATTRIBUTE.findall(section))
        members = vars(annotation).items()
        texts |= {name: value.__doc__ for name, value in members if isinstance(value, property)}
        about = {name: {"description": re.sub(r"\s+", " ", text)} for name, text in texts.items()}
        properties, required = dict[str, Schema](), list[str]()
        for field in written_fields(annotation):
            kind = _without_none(field.annotation) if field.optional else field.annotation
            properties[field.name] = json_schema(kind) | about.get(field.attribute, {})
            required += [] if field.optional else [field.name]
        return {"type": "object", "properties": properties, "required": required}
    # What is left is a literal, a mapping, an optional value or a tuple.
    items = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return {"enum": list(items)}
    if typing.get_origin(annotation) is Mapping:
        return {"type": "object", "additionalProperties": json_schema(items[1])}
    if hasattr(annotation, "_fields"):  # a named tuple
        items = (*typing.get_type_hints(annotation).values(),)
    elif type(None) in items:
        schema = json_schema(_without_none(annotation))
        return {**schema, "type": [schema["type"], "null"]}
    elif ... in items:
        return {"type": "array", "items": json_schema(items[0])}
    schemas = [json_schema(item) for item in dict.fromkeys(items)]
    alternative = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"type": "array", "items": alternative, "minItems": len(items), "maxItems": len(items)}


def arrow_type(annotation: Any) -> Any:
    """Return the Arrow type of the values of a type.

    Raises:
        TypeError: there is none, as for an array of NumPy.
    """
    import pyarrow

    items, origin = typing.get_args(annotation), typing.get_origin(annotation)
    if annotation in _PLAIN:
        return pyarrow.type_for_alias(_PLAIN[annotation][1])
    if origin is Literal:
        return pyarrow.string()
    if origin is Mapping:
        return pyarrow.map_(*map(arrow_type, items))
    if type(None) in items:
        return arrow_type(_without_none(annotation))
    if origin is tuple:
        return pyarrow.list_(arrow_type(items[0]))
    if hasattr(annotation, "_fields"):  # a named tuple
        hints = typing.get_type_hints(annotation)
        return pyarrow.struct([(name, arrow_type(kind)) for name, kind in hints.items()])
    if hasattr(annotation, "__dataclass_fields__"):
        return pyarrow.struct([*arrow_fields(annotation).items()])
    raise TypeError(f"{annotation} has no type of Arrow")


def arrow_fields(kind: Any) -> dict[str, Any]:
    """Return the Arrow types of a dataclass by the names that are written; errors as above."""
    return {field.name: arrow_type(field.annotation) for field in written_fields(kind)}


def _without_none(annotation: Any) -> Any:
    """Return X for `X | None`."""
    assert typing.get_origin(annotation) in (types.UnionType, typing.Union)
    (kind,) = (item for item in typing.get_args(annotation) if item is not type(None))
    return kind
