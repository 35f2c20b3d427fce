"""Scores of tags in one pass: of entities by two rules, and of words.

An entity is right if its type, its first and its last word are. Predicted entities follow one of
two rules:

- conlleval (Tjong Kim Sang and Buchholz 2000): every tag but O belongs to an entity, even in an
  invalid sequence. Papers report this, and it is seqeval's default.
- strict: no tag of an entity breaks the scheme of the labels. In IOB2, the scheme of every model
  trained here, an entity begins with B, so a lone I-PER is not one. In seqeval: mode="strict",
  scheme=IOB2. Labels of other models may spell IOB1, BIOES or BILOU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from bothways.tasks.metrics import Confusion, classification_metrics
from bothways.tasks.tagging.schemes import Chunk, Spelling, chunks, flaws, scheme_of, tag_part


def types_of(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the entity types that these tags spell, sorted."""
    tag_parts = map(tag_part, labels)
    return tuple(
        sorted(
            {
                entity_tag.type
                for entity_tag in tag_parts
                if entity_tag is not None and entity_tag.type
            }
        )
    )


def strict_chunks(tags: Many[str], scheme: Spelling) -> list[Chunk]:
    """Return the entities of a sequence that are spelled by the rules of the scheme."""
    broken = set(flaws(tags, scheme))
    return [chunk for chunk in chunks(tags) if broken.isdisjoint(range(chunk.begin, chunk.end))]


@dataclass
class EntityCounts:
    """The number of true, predicted and rightly predicted entities by type."""

    expected: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)

    def add(self, truth: Iterable[Chunk], predicted: Iterable[Chunk]) -> None:
        """Count one sentence."""
        true, given = set(truth), set(predicted)
        self.expected.update(chunk.type for chunk in true)
        self.predicted.update(chunk.type for chunk in given)
        self.right.update(chunk.type for chunk in true & given)

    def scores(self, suffix: str = "") -> dict[str, float]:
        """Return F1, precision and recall over all types; 0 where a quotient is undefined."""
        return _scores(self.right.total(), self.predicted.total(), self.expected.total(), suffix)

    def scores_of(self, kind: str) -> dict[str, float]:
        """Return the same of one type: "f1/PER" and so on."""
        return _scores(self.right[kind], self.predicted[kind], self.expected[kind], f"/{kind}")


def _scores(correct: int, predicted: int, expected: int, suffix: str) -> dict[str, float]:
    quotients = {
        "f1": (2 * correct, predicted + expected),
        "precision": (correct, predicted),
        "recall": (correct, expected),
    }
    return {f"{name}{suffix}": a / b if b else 0.0 for name, (a, b) in quotients.items()}


class TagCounts:
    """The counts from which the scores of a data set follow, in constant memory.

    Args:
        labels: the tags.
        entities: whether they spell entities.
    """

    def __init__(self, labels: Many[str], entities: bool) -> None:
        self._entities, self._scheme = entities, scheme_of(labels)
        self._types = types_of(labels) if entities else ()
        self._index = {label: position for position, label in enumerate(labels)}
        self._confusion = Confusion(len(labels))
        self._loose, self._strict, self._loss = EntityCounts(), EntityCounts(), 0.0

    @property
    def words(self) -> int:
        """Number of words that were counted."""
        return self._confusion.total

    def add(self, truth: Many[str], predicted: Many[str], loss: float) -> None:
        """Count one sentence; `loss` is the sum over its words."""
        rows, columns = ([self._index[tag] for tag in tags] for tags in (truth, predicted))
        self._confusion.pairs.update(zip(rows, columns, strict=True))
        self._loss += loss
        if self._entities:
            self._loose.add(chunks(truth), chunks(predicted))
            strict = (strict_chunks(tags, self._scheme) for tags in (truth, predicted))
            self._strict.add(*strict)

    def scores(self) -> dict[str, float]:
        """Return the metrics.

        Returns:
            For entities "f1", "precision" and "recall" by conlleval's rule, the same with
            "_strict", and for each type, such as "f1/PER". For plain tags "f1", the mean over the
            tags. For words "accuracy" and "loss" (mean cross-entropy, in nats).
        """
        accuracy = float(self._confusion.right.sum()) / self.words
        of_words = {"accuracy": accuracy, "loss": self._loss / self.words}
        if not self._entities:
            return {"f1": classification_metrics(self._confusion)["f1_macro"], **of_words}
        scores = self._loose.scores() | self._strict.scores("_strict") | of_words
        for kind in self._types:
            scores |= self._loose.scores_of(kind)
        return scores
