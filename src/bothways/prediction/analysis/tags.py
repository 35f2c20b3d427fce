"""Analysis of tags: the outcome of every entity, confusion of tags, and calibration.

The outcomes of an entity are those of MUC and SemEval 2013, task 9: right; of another type; with
another boundary; both; missed; and, for a predicted entity where there is none, spurious.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import GUESSES, SURE, TaskAnalysis, reliability
from bothways.prediction.analysis.calibration import Calibration
from bothways.prediction.analysis.classes import class_table, confusion_sections
from bothways.tasks.base import Metrics
from bothways.tasks.metrics import TINY, Confusion
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import Chunk, chunks
from bothways.tasks.tagging.task import TaggingTask

Outcome = Literal[
    "right", "other type", "other boundary", "other type and boundary", "missed", "spurious"
]
OUTCOMES: tuple[Outcome, ...] = (
    "right", "other type", "other boundary", "other type and boundary", "missed", "spurious",
)  # fmt: skip


def outcomes(truth: Many[Chunk], predicted: Many[Chunk]) -> list[tuple[Chunk, Outcome]]:
    """Return every entity with its outcome; spurious ones are predicted, all others true.

    Each entity is paired at most once: with the same words first, then with shared words, an entity
    of the same type before others.
    """
    result: list[tuple[Chunk, Outcome]] = []
    left, free = list(truth), list(predicted)
    for outcome in OUTCOMES[:4]:
        for one in list(left):
            match = next((other for other in free if _outcome(one, other) == outcome), None)
            if match is not None:
                left.remove(one)
                free.remove(match)
                result.append((one, outcome))
    return [*result, *((one, "missed") for one in left), *((one, "spurious") for one in free)]


def _outcome(true: Chunk, predicted: Chunk) -> Outcome | None:
    """Return the outcome of a true entity by a predicted one; None if they share no word."""
    if true.begin >= predicted.end or predicted.begin >= true.end:
        return None
    same = (true.begin, true.end) == (predicted.begin, predicted.end)
    if true.type == predicted.type:
        return "right" if same else "other boundary"
    return "other type" if same else "other type and boundary"


class TagAnalysis(TaskAnalysis[TagExample, TagPrediction]):
    """Outcomes of entities, confusion of tags, and calibration.

    Args:
        task: the task.
        labels: of the model, in order.
    """

    grade_name, cost_name = "F1 of the sentence", "cross-entropy of the sentence"

    def __init__(self, task: TaggingTask, labels: Many[str]) -> None:
        self.labels, self._task = tuple(labels), task
        self._entities = task.spells(labels)
        self._index = {label: place for place, label in enumerate(labels)}
        self.confusion = Confusion(len(labels))
        self.calibration = Calibration()
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()

    def add(self, example: TagExample, prediction: TagPrediction) -> None:
        """Count a prediction."""
        gold = self._gold(example)
        truth, given = self._places(gold), self._places(prediction.tags)
        self.confusion.pairs.update(zip(truth.tolist(), given.tolist(), strict=True))
        confidences = prediction.probabilities.max(1).tolist()
        for confidence, right in zip(confidences, (truth == given).tolist(), strict=True):
            self.calibration.add(confidence, right)
        if self._entities:
            pairs = outcomes(chunks(gold), chunks(prediction.tags))
            self.outcomes.update((chunk.type, outcome) for chunk, outcome in pairs)

    def cost(self, example: TagExample, prediction: TagPrediction) -> float:
        """Return the cross-entropy of all words, in nats."""
        return -float(np.log(np.maximum(self._chances(example, prediction), TINY)).sum())

    def doubt(self, example: TagExample, prediction: TagPrediction) -> float | None:
        """Return the greatest lead of a wrong tag over the given one, where the model is sure."""
        top, given = prediction.probabilities.max(1), self._chances(example, prediction)
        leads = (top - given)[(top >= SURE) & (given < top)]
        return float(leads.max()) if len(leads) else None

    def show(self, example: TagExample, prediction: TagPrediction) -> s.ReportExample:
        """Return the sentence with its wrongly tagged words marked, and the tags of the worst."""
        gold, tags, words = self._gold(example), prediction.tags, example.words
        top = prediction.probabilities.max(1) if len(words) else np.zeros(0)
        wrong = [place for place, (a, b) in enumerate(zip(gold, tags, strict=True)) if a != b]
        worst = sorted(wrong, key=lambda place: -top[place])[:GUESSES]
        shown = [s.ReportGuess(f"{words[at]}: {tags[at]}", float(top[at]), False) for at in worst]
        truth = ", ".join(f"{words[at]}: {gold[at]}" for at in worst) or "as predicted"
        parts: list[str | s.Marked] = []
        for place, word in enumerate(words):
            parts += [s.Marked(word) if place in wrong else word, " "]
        return s.ReportExample(parts, truth, shown, example.where)

    def baseline(self) -> Metrics:
        """Return the accuracy of the most frequent tag; its F1 is 0 where tags spell entities."""
        truth = self.confusion.true
        accuracy = {"accuracy": float(truth.max() / max(1, truth.sum()))}
        return accuracy | ({"f1": 0.0} if self._entities else {})

    def sections(self) -> list[s.Section]:
        """Return the sections of a report."""
        entities: list[s.Section] = [self._outcome_table()] if self._entities else []
        return [
            *entities,
            class_table(self.labels, self.confusion),
            *confusion_sections(self.labels, self.confusion),
            *reliability(self.calibration, "tags"),
        ]

    def _outcome_table(self) -> s.TableSection:
        types = sorted({kind for kind, _ in self.outcomes})
        rows: list[Many[s.Cell]] = [
            [name, *(self.outcomes[name, outcome] for outcome in OUTCOMES)] for name in types
        ]
        total = [sum(self.outcomes[name, outcome] for name in types) for outcome in OUTCOMES]
        note = "Entities are counted by their true type, spurious ones by the predicted type."
        columns = ["type", *OUTCOMES]
        return s.TableSection(
            "Outcomes of entities", columns, [*rows, ["all", *total]], total=True, note=note
        )

    def _gold(self, example: TagExample) -> tuple[str, ...]:
        gold = self._task.gold_tags(example, self.labels)
        assert gold is not None
        return gold

    def _places(self, tags: Many[str]) -> NDArray[np.int64]:
        return np.array([self._index[tag] for tag in tags], dtype=np.int64)

    def _chances(self, example: TagExample, prediction: TagPrediction) -> NDArray[np.float64]:
        """Return the probability of each given tag."""
        places = self._places(self._gold(example))
        return prediction.probabilities[np.arange(len(places)), places]
