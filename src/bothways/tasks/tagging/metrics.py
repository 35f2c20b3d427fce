"""Scores of tags in one pass: of entities by two rules, and of words.

An entity is right if its type, its first and its last word are. Two rules tell what the predicted entities are:

- conlleval's (Tjong Kim Sang and Buchholz 2000): every tag but O is of an entity, even where a sequence is broken. This is what
  papers report, and what seqeval does by default.
- strict: no tag of an entity breaks the scheme of the labels. In IOB2, the scheme of every model trained here, an entity begins
  with B, so a lone I-PER is none. In seqeval: mode="strict", scheme=IOB2; others' labels may spell IOB1, BIOES or BILOU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from bothways.tasks.metrics import classification_metrics
from bothways.tasks.tagging.schemes import Chunk, Spelling, chunks, flaws, scheme_of, tag_part


def types_of(labels: Iterable[str]) -> tuple[str, ...]:
    """The types of entities that these tags spell, in the order of their characters."""
    return tuple(
        sorted({part.type for part in map(tag_part, labels) if part is not None and part.type})
    )


def strict_chunks(tags: Many[str], scheme: Spelling) -> list[Chunk]:
    """The entities of a sequence that are spelled as the scheme has it."""
    broken = set(flaws(tags, scheme))
    return [chunk for chunk in chunks(tags) if broken.isdisjoint(range(chunk.begin, chunk.end))]


@dataclass
class EntityCounts:
    """How many entities of each type there are, were predicted, and were predicted right."""

    expected: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)

    def add(self, truth: Iterable[Chunk], predicted: Iterable[Chunk]) -> None:
        """Count one sentence along."""
        expected, found = set(truth), set(predicted)
        self.expected.update(chunk.type for chunk in expected)
        self.predicted.update(chunk.type for chunk in found)
        self.right.update(chunk.type for chunk in expected & found)

    def scores(self, suffix: str = "") -> dict[str, float]:
        """F1, precision and recall over all types; 0 where a quotient has no meaning."""
        return _scores(self.right.total(), self.predicted.total(), self.expected.total(), suffix)

    def scores_of(self, kind: str) -> dict[str, float]:
        """The same of one type: "f1/PER" and so on."""
        return _scores(self.right[kind], self.predicted[kind], self.expected[kind], f"/{kind}")


def _scores(right: int, predicted: int, expected: int, suffix: str) -> dict[str, float]:
    quotients = {
        "f1": (2 * right, predicted + expected),
        "precision": (right, predicted),
        "recall": (right, expected),
    }
    return {f"{name}{suffix}": a / b if b else 0.0 for name, (a, b) in quotients.items()}


class TagCounts:
    """All that the scores of a data set need of it; its size is that of the labels, squared.

    Args:
        labels: the tags.
        entities: whether they spell entities.
    """

    def __init__(self, labels: Many[str], entities: bool) -> None:
        self._entities, self._types, self._scheme = (
            entities,
            types_of(labels) if entities else (),
            scheme_of(labels),
        )
        self._index = {label: place for place, label in enumerate(labels)}
        self._confusion: Int[NDArray[np.int64], "labels labels"] = np.zeros(
            (len(labels), len(labels)), dtype=np.int64
        )
        self._loose, self._strict = EntityCounts(), EntityCounts()
        self._loss = 0.0

    @property
    def words(self) -> int:
        """How many have been counted."""
        return int(self._confusion.sum())

    def add(self, truth: Many[str], predicted: Many[str], loss: float) -> None:
        """Count one sentence along; `loss` is the sum over its words."""
        rows, columns = ([self._index[tag] for tag in tags] for tags in (truth, predicted))
        np.add.at(self._confusion, (rows, columns), 1)
        self._loss += loss
        if self._entities:
            self._loose.add(chunks(truth), chunks(predicted))
            self._strict.add(
                strict_chunks(truth, self._scheme), strict_chunks(predicted, self._scheme)
            )

    def scores(self) -> dict[str, float]:
        """ "f1", "precision", "recall" by conlleval's rule, the same with "_strict" by that of the labels' scheme, and of each
        type, such as "f1/PER"; of plain tags "f1", the mean over the tags. Of words: "accuracy" and "loss" (mean cross-entropy,
        in nats)."""
        of_words = {
            "accuracy": float(np.trace(self._confusion)) / self.words,
            "loss": self._loss / self.words,
        }
        if not self._entities:
            return {"f1": classification_metrics(self._confusion)["f1_macro"], **of_words}
        of_types = [self._loose.scores_of(kind) for kind in self._types]
        return (
            self._loose.scores()
            | self._strict.scores("_strict")
            | of_words
            | {k: v for one in of_types for k, v in one.items()}
        )
