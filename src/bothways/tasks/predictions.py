"""Predictions of tasks: one frozen type for each kind of answer, with its form in JSON.

`to_json` returns plain values, as `bothways predict` writes them; `answer` is the value that
`Predictor.predict` returns, of predictions that have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import ConfigError
from bothways.core.loss import perplexity


def brief(value: float) -> float:
    """Round a number to six digits, for JSON."""
    return float(f"{value:.6g}")


def _brief_items(values: Mapping[str, float]) -> dict[str, float]:
    return {name: brief(value) for name, value in values.items()}


def _brief_vars(value: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a dataclass instance, those with these names rounded."""
    rounded = {name: brief(getattr(value, name)) for name in names}
    return {**vars(value), **rounded}


@dataclass(frozen=True)
class ClassPrediction:
    """One of several classes.

    Attributes:
        label: the most probable.
        index: its place among the labels.
        probabilities: of every label, in their order; they sum to 1.
    """

    label: str
    index: int
    probabilities: Mapping[str, float]

    @property
    def answer(self) -> str:
        """The label."""
        return self.label

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"label": self.label, "probabilities": _brief_items(self.probabilities)}


@dataclass(frozen=True)
class MultilabelPrediction:
    """Any number of labels.

    Attributes:
        labels: those whose probability reaches their threshold, in the model's order.
        probabilities: of every label by itself, in their order.
    """

    labels: tuple[str, ...]
    probabilities: Mapping[str, float]

    @property
    def answer(self) -> tuple[str, ...]:
        """The labels."""
        return self.labels

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"labels": list(self.labels), "probabilities": _brief_items(self.probabilities)}


@dataclass(frozen=True)
class ScorePrediction:
    """A number."""

    score: float

    @property
    def answer(self) -> float:
        """The number."""
        return self.score

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"score": brief(self.score)}


@dataclass(frozen=True)
class ChoicePrediction:
    """One of the endings of a question.

    Attributes:
        index: the place of the most probable, from 0.
        ending: its text.
        probabilities: of each ending; they sum to 1.
    """

    index: int
    ending: str
    probabilities: tuple[float, ...]

    @property
    def answer(self) -> int:
        """The index of the ending."""
        return self.index

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        probabilities = list(map(brief, self.probabilities))
        return {"index": self.index, "ending": self.ending, "probabilities": probabilities}


@dataclass(frozen=True)
class RankedDocument:
    """A document at its place in a ranking: its number among the documents, its score, its text."""

    index: int
    score: float
    document: str


@dataclass(frozen=True)
class RankPrediction:
    """The documents of a query with their scores.

    Attributes:
        query, documents: as they were given.
        logits: the model's output for each document.
        scores: what the task makes of it: σ of the output, or the output itself.
    """

    query: str
    documents: tuple[str, ...]
    logits: tuple[float, ...]
    scores: tuple[float, ...]

    @property
    def ranking(self) -> tuple[RankedDocument, ...]:
        """The documents, best first; of equal ones the first."""
        order = sorted(range(len(self.logits)), key=lambda n: -self.logits[n])
        return tuple(RankedDocument(n, self.scores[n], self.documents[n]) for n in order)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        ranking = [_brief_vars(ranked, ["score"]) for ranked in self.ranking]
        return {"query": self.query, "ranking": ranking}


@dataclass(frozen=True)
class TokenGuess:
    """A token for a mask, as the vocabulary spells it, and its probability."""

    token: str
    probability: float


@dataclass(frozen=True)
class JointFilling:
    """Tokens for all masks of a text, in their order.

    Attributes:
        tokens: as the vocabulary spells them.
        probability: of the first, times that of the second given the first, and so on.
        text: the text with these tokens.
    """

    tokens: tuple[str, ...]
    probability: float
    text: str


@dataclass(frozen=True)
class FillPrediction:
    """The tokens behind the masks of a text.

    Attributes:
        masks: for each mask its most probable tokens, given the other masks as masks, the most
            probable first.
        fillings: the best fillings of all masks together, the most probable first.
    """

    masks: tuple[tuple[TokenGuess, ...], ...]
    fillings: tuple[JointFilling, ...]

    @property
    def text(self) -> str:
        """The text with the best filling."""
        return self.fillings[0].text

    @property
    def answer(self) -> str:
        """The text with the best filling."""
        return self.text

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        masks = [[_brief_vars(guess, ["probability"]) for guess in mask] for mask in self.masks]
        fillings = [
            {**_brief_vars(filling, ["probability"]), "tokens": list(filling.tokens)}
            for filling in self.fillings
        ]
        return {"text": self.text, "masks": masks, "fillings": fillings}


@dataclass(frozen=True)
class LikelihoodPrediction:
    """The likelihood of a text.

    Attributes:
        tokens: of the text, as the vocabulary spells them.
        log_likelihoods: the natural logarithm of each one's probability given the others.
    """

    tokens: tuple[str, ...]
    log_likelihoods: tuple[float, ...]

    @property
    def log_likelihood(self) -> float:
        """The pseudo-log-likelihood of the text, in nats; 0 for an empty one."""
        return math.fsum(self.log_likelihoods)

    @property
    def pseudo_perplexity(self) -> float | None:
        """exp of the mean loss of a token; None for an empty text."""
        return perplexity(-self.log_likelihood / len(self.tokens)) if self.tokens else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        perplexity = self.pseudo_perplexity
        pairs = zip(self.tokens, self.log_likelihoods, strict=True)
        return {
            "log_likelihood": brief(self.log_likelihood),
            "pseudo_perplexity": None if perplexity is None else brief(perplexity),
            "tokens": [[token, brief(log)] for token, log in pairs],
        }


@dataclass(frozen=True)
class PreferencePrediction:
    """The log-likelihoods of two texts, in nats; of a masked model the pseudo-log-likelihoods."""

    first: float
    second: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        preferred = "first" if self.first > self.second else "second"
        return {
            "preferred": preferred,
            "log_likelihoods": [brief(self.first), brief(self.second)],
        }


@dataclass(frozen=True, eq=False)
class VectorPrediction:
    """The vectors of one text or two `(texts, width)`."""

    vectors: NDArray[np.float32]

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between two vectors; None for a single one."""
        if len(self.vectors) < 2:
            return None
        a, b = self.vectors.astype(np.float64)
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with enough digits to restore the vector."""
        rows = [[float(str(value)) for value in vector] for vector in self.vectors]
        if self.cosine is None:
            return {"vector": rows[0]}
        return {"vectors": rows, "cosine": brief(self.cosine)}


@dataclass(frozen=True)
class Entity:
    """Words that name something.

    Attributes:
        type: its kind, such as PER.
        text: a slice of the text.
        start, end: its first character, and the one after its last.
        score: the mean probability of its words' tags.
    """

    type: str
    text: str
    start: int
    end: int
    score: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return _brief_vars(self, ["score"])


@dataclass(frozen=True)
class TagPrediction:
    """A tag for each word.

    Attributes:
        words: of the sentence.
        tags: the most probable of each.
        probabilities: of every label for each word `(words, labels)`.
        entities: the entities that the tags spell; None for plain tags.
        text: the text whose characters the entities count; None for the words joined by blanks.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    probabilities: NDArray[np.float64] = field(compare=False, repr=False)
    entities: tuple[Entity, ...] | None = None
    text: str | None = field(default=None, compare=False, repr=False)

    @property
    def answer(self) -> tuple[str, ...]:
        """The tags."""
        return self.tags

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        result: dict[str, Any] = {}
        if self.entities is not None:
            result["entities"] = [entity.to_json() for entity in self.entities]
        return {**result, "words": list(self.words), "tags": list(self.tags)}

    def to_spans(self) -> dict[str, Any]:
        """Return the text with its entities as character spans, which can be trained on.

        Raises:
            ConfigError: the tags are not those of entities.
        """
        if self.entities is None:
            what = "spans are of entities, and the tags of this model are of single words"
            raise ConfigError(what, where="format", fix="Choose jsonl.")
        text = " ".join(self.words) if self.text is None else self.text
        spans = [{"start": e.start, "end": e.end, "label": e.type} for e in self.entities]
        return {"text": text, "spans": spans}


@dataclass(frozen=True)
class AnswerSpan:
    """A span of a context as an answer.

    Attributes:
        text: a slice of the context.
        start, end: its characters `[start, end)` there.
        score: of its first token as a start plus its last as an end.
        probability: among all spans that were considered.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float


@dataclass(frozen=True)
class AnswerPrediction:
    """A part of the context, or no answer.

    Attributes:
        id: of the question.
        text: the answer; empty for none.
        start, end: its characters `[start, end)` in the context; None without an answer.
        confidence: the probability of the prediction, among the spans and, with a threshold, no
            answer.
        null_difference: the score of no answer minus that of the best span; 0 in a context without
            a token.
        spans: the best spans, best first, each text once, whatever is predicted.
    """

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

    @property
    def answer(self) -> str:
        """The text of the answer."""
        return self.text

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        spans = [_brief_vars(span, ["score", "probability"]) for span in self.spans]
        return {**_brief_vars(self, ["confidence", "null_difference"]), "spans": spans}
