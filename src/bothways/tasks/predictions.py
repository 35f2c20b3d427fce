"""What tasks predict: one frozen type per kind of answer, each with its form in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ClassPrediction:
    """One of several classes.

    Attributes:
        label: the most probable.
        index: its place among the labels.
        probabilities: of every label, in their order; they add up to 1.
    """

    label: str
    index: int
    probabilities: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        return {
            "label": self.label,
            "probabilities": {name: brief(value) for name, value in self.probabilities.items()},
        }


@dataclass(frozen=True)
class MultilabelPrediction:
    """Any number of labels.

    Attributes:
        labels: those whose probability reaches their threshold, in the model's order.
        probabilities: of every label, in their order, each by itself.
    """

    labels: tuple[str, ...]
    probabilities: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        rounded = {name: brief(value) for name, value in self.probabilities.items()}
        return {"labels": list(self.labels), "probabilities": rounded}


@dataclass(frozen=True)
class ScorePrediction:
    """A number."""

    score: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        return {"score": brief(self.score)}


@dataclass(frozen=True)
class ChoicePrediction:
    """One of the endings of a question.

    Attributes:
        index: the place of the most probable, from 0.
        ending: its text.
        probabilities: of each ending; they add up to 1.
    """

    index: int
    ending: str
    probabilities: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        return {
            "index": self.index,
            "ending": self.ending,
            "probabilities": list(map(brief, self.probabilities)),
        }


@dataclass(frozen=True)
class TokenGuess:
    """A token for a mask: as the vocabulary spells it, and its probability."""

    token: str
    probability: float


@dataclass(frozen=True)
class JointFilling:
    """Tokens for all masks of a text, in their order.

    Attributes:
        tokens: as the vocabulary spells them.
        probability: of the first, times that of the second given the first, and so on.
        text: the text with them in it.
    """

    tokens: tuple[str, ...]
    probability: float
    text: str


@dataclass(frozen=True)
class FillPrediction:
    """What belongs behind the masks of a text.

    Attributes:
        masks: for each mask its most probable tokens, given the other masks as masks; the most probable first.
        fillings: the best fillings of all masks together, the most probable first.
    """

    masks: tuple[tuple[TokenGuess, ...], ...]
    fillings: tuple[JointFilling, ...]

    @property
    def text(self) -> str:
        """The text with the best filling in it."""
        return self.fillings[0].text

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        return {
            "text": self.text,
            "masks": [
                [{"token": g.token, "probability": brief(g.probability)} for g in mask]
                for mask in self.masks
            ],
            "fillings": [
                {"tokens": list(f.tokens), "probability": brief(f.probability), "text": f.text}
                for f in self.fillings
            ],
        }


@dataclass(frozen=True)
class LikelihoodPrediction:
    """How likely a text is.

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
        """exp of the mean loss of a token; none for an empty text."""
        return math.exp(-self.log_likelihood / len(self.tokens)) if self.tokens else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        perplexity = self.pseudo_perplexity
        return {
            "log_likelihood": brief(self.log_likelihood),
            "pseudo_perplexity": None if perplexity is None else brief(perplexity),
            "tokens": [
                [token, brief(log)]
                for token, log in zip(self.tokens, self.log_likelihoods, strict=True)
            ],
        }


@dataclass(frozen=True, eq=False)
class VectorPrediction:
    """The vectors of one text or two `(texts, width)`."""

    vectors: NDArray[np.float32]

    @property
    def cosine(self) -> float | None:
        """Of the angle between two; none for a single one."""
        if len(self.vectors) < 2:
            return None
        a, b = self.vectors.astype(np.float64)
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them; digits enough to give the same vector back."""
        rows = [[float(str(value)) for value in vector] for vector in self.vectors]
        return (
            {"vector": rows[0]}
            if self.cosine is None
            else {"vectors": rows, "cosine": brief(self.cosine)}
        )


@dataclass(frozen=True)
class Entity:
    """Words that name something.

    Attributes:
        type: what, such as PER.
        text: as it stands in the text.
        start, end: its first character, and the one after its last.
        score: the mean probability of its words' tags.
    """

    type: str
    text: str
    start: int
    end: int
    score: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "type": self.type,
            "text": self.text,
            "start": self.start,
            "end": self.end,
            "score": brief(self.score),
        }


@dataclass(frozen=True)
class TagPrediction:
    """A tag for each word.

    Attributes:
        words: of the sentence.
        tags: the most probable of each.
        probabilities: of every label for each word `(words, labels)`.
        entities: what the tags mean; none if they are plain.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    probabilities: NDArray[np.float64] = field(compare=False, repr=False)
    entities: tuple[Entity, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        entities = (
            {}
            if self.entities is None
            else {"entities": [entity.to_json() for entity in self.entities]}
        )
        return {**entities, "words": list(self.words), "tags": list(self.tags)}


def brief(value: float) -> float:
    """A number with six digits, for JSON."""
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class AnswerSpan:
    """A span of a text as an answer.

    Attributes:
        text: as it stands in the context.
        start, end: its characters `[start, end)` there.
        score: of its first token as a start plus its last as an end.
        probability: among all that were considered.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float


@dataclass(frozen=True)
class AnswerPrediction:
    """A part of the context, or none.

    Attributes:
        id: of the question.
        text: the answer; empty for none.
        start, end: its characters `[start, end)` in the context; none where there is no answer.
        confidence: the probability of what is predicted, among the spans and, with a threshold, no answer.
        null_difference: the score of no answer, less that of the best span; 0 in a context without a token.
        spans: the best ones, best first, each text once, whatever is predicted.
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

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        spans = [
            {**vars(span), "score": brief(span.score), "probability": brief(span.probability)}
            for span in self.spans
        ]
        numbers = {
            "confidence": brief(self.confidence),
            "null_difference": brief(self.null_difference),
        }
        return {
            "id": self.id,
            "text": self.text,
            "start": self.start,
            "end": self.end,
            **numbers,
            "spans": spans,
        }
