"""Analysis of tags: what becomes of every entity, which tags are taken for which, whether probabilities hold.

What can happen to an entity (the kinds of MUC and SemEval 2013, task 9): right; of another type; with another boundary; both;
missed; and one that is predicted where there is none (spurious).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bothways.analysis.base import GUESSES, SURE, Analyst, reliability
from bothways.analysis.calibration import Calibration
from bothways.analysis.classes import by_class, confusion
from bothways.report import sections as s
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import Chunk, chunks
from bothways.tasks.tagging.task import TaggingTask

TagErrorKind = Literal[
    "right", "other type", "other boundary", "other type and boundary", "missed", "spurious"
]
KINDS: tuple[TagErrorKind, ...] = (
    "right",
    "other type",
    "other boundary",
    "other type and boundary",
    "missed",
    "spurious",
)


def paired(truth: Many[Chunk], predicted: Many[Chunk]) -> list[tuple[Chunk, TagErrorKind]]:
    """What becomes of every entity; spurious ones are predicted, all others are of the truth.

    Each entity is paired at most once: with the same words first, then with words that it shares, of one type before others.
    """
    result: list[tuple[Chunk, TagErrorKind]] = []
    left, free = list(truth), list(predicted)
    for kind in KINDS[:4]:
        for one in list(left):
            match = next((other for other in free if _kind(one, other) == kind), None)
            if match is not None:
                left.remove(one)
                free.remove(match)
                result.append((one, kind))
    return [*result, *((one, "missed") for one in left), *((one, "spurious") for one in free)]


def _kind(one: Chunk, other: Chunk) -> TagErrorKind | None:
    """What a predicted entity is to a true one; none for words apart."""
    if one.begin >= other.end or other.begin >= one.end:
        return None
    same = (one.begin, one.end) == (other.begin, other.end)
    if one.type == other.type:
        return "right" if same else "other boundary"
    return "other type" if same else "other type and boundary"


class TagAnalysis(Analyst[TagExample, TagPrediction]):
    """Kinds of errors and confusions of tags.

    Args:
        definition: of the task.
        labels: of the model, in order.
    """

    grade, loss = "F1 of the sentence", "cross-entropy of the sentence"

    def __init__(self, definition: TaggingTask, labels: Many[str]) -> None:
        self.labels, self._definition = tuple(labels), definition
        self._index = {label: place for place, label in enumerate(labels)}
        self.confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)
        self.calibration = Calibration()
        self.kinds: Counter[tuple[str, TagErrorKind]] = Counter()

    def see(self, example: TagExample, prediction: TagPrediction) -> None:
        """Count it; it has tags."""
        gold = self._gold(example)
        truth, found = self._places(gold), self._places(prediction.tags)
        np.add.at(self.confusion, (truth, found), 1)
        for confidence, right in zip(
            prediction.probabilities.max(1).tolist(), (truth == found).tolist(), strict=True
        ):
            self.calibration.add(confidence, right)
        if self._definition.spells(self.labels):
            self.kinds.update(
                (chunk.type, kind) for chunk, kind in paired(chunks(gold), chunks(prediction.tags))
            )

    def cost(self, example: TagExample, prediction: TagPrediction) -> float:
        """The cross-entropy of all words, in nats."""
        return -float(
            np.log(np.maximum(self._chances(example, prediction), np.finfo(np.float64).tiny)).sum()
        )

    def doubt(self, example: TagExample, prediction: TagPrediction) -> float | None:
        """The greatest lead of a wrong tag over the given one, where the model is sure of it."""
        top, given = prediction.probabilities.max(1), self._chances(example, prediction)
        leads = (top - given)[(top >= SURE) & (given < top)]
        return float(leads.max()) if len(leads) else None

    def shown(self, example: TagExample, prediction: TagPrediction) -> s.ReportExample:
        """The sentence with its wrongly tagged words marked, and the tags of the worst of them."""
        gold = self._gold(example)
        wrong = [
            place for place, (a, b) in enumerate(zip(gold, prediction.tags, strict=True)) if a != b
        ]
        worst = sorted(wrong, key=lambda place: -prediction.probabilities[place].max())[:GUESSES]
        guesses = [
            s.ReportGuess(
                f"{example.words[at]}: {prediction.tags[at]}",
                float(prediction.probabilities[at].max()),
                False,
            )
            for at in worst
        ]
        truth = ", ".join(f"{example.words[at]}: {gold[at]}" for at in worst) or "as predicted"
        return s.ReportExample(_marked(example.words, {*wrong}), truth, guesses, example.where)

    def sections(self) -> list[s.Section]:
        """Kinds of errors, each tag, what was taken for what, calibration."""
        kinds: list[s.Section] = [self._by_kind()] if self._definition.spells(self.labels) else []
        tables: list[s.Section] = [
            by_class(self.labels, self.confusion),
            confusion(self.labels, self.confusion),
        ]
        return [*kinds, *tables, *reliability(self.calibration, "tags")]

    def _by_kind(self) -> s.TableSection:
        types = sorted({kind for kind, _ in self.kinds})
        rows: list[Many[s.Cell]] = [
            [name, *(self.kinds[name, kind] for kind in KINDS)] for name in types
        ]
        total = [sum(self.kinds[name, kind] for name in types) for kind in KINDS]
        note = "An entity is of its true type; a spurious one, predicted where there is none, of the predicted type."
        return s.TableSection(
            "What becomes of entities",
            ["type", *KINDS],
            [*rows, ["all", *total]],
            total=True,
            note=note,
        )

    def _gold(self, example: TagExample) -> tuple[str, ...]:
        gold = self._definition.gold_tags(example, self.labels)
        assert gold is not None
        return gold

    def _places(self, tags: Many[str]) -> NDArray[np.int64]:
        return np.array([self._index[tag] for tag in tags], dtype=np.int64)

    def _chances(self, example: TagExample, prediction: TagPrediction) -> NDArray[np.float64]:
        """The probability of each given tag."""
        places = self._places(self._gold(example))
        return prediction.probabilities[np.arange(len(places)), places]


def _marked(words: Many[str], wrong: set[int]) -> list[str | s.Marked]:
    parts: list[str | s.Marked] = []
    for place, word in enumerate(words):
        parts += [s.Marked(word) if place in wrong else word, " "]
    return parts
