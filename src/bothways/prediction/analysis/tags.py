"""Analysis of tags: the outcome of every entity, confusion of tags, and calibration.

The outcomes of an entity are those of MUC and SemEval 2013, task 9: right; of another type; with
another boundary; both; missed; and, for a predicted entity where there is none, spurious.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.prediction.analysis import base
from bothways.prediction.analysis.base import GUESSES, SURE, Judgement
from bothways.tasks.base import Metrics
from bothways.tasks.metrics import TINY, Confusion
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import Chunk, chunks
from bothways.tasks.tagging.task import TaggingTask

Outcome = Literal[
    "right", "other type", "other boundary", "other type and boundary", "missed", "spurious"
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


def outcomes(truth: Sequence[Chunk], predicted: Sequence[Chunk]) -> list[tuple[Chunk, Outcome]]:
    """List every entity with its outcome; spurious ones are predicted, all others true.

    Each entity is paired at most once: with the same words first, then with shared words, an entity
    of the same type before others.
    """
    pairs: list[tuple[Chunk, Outcome]] = []
    unmatched, free = list(truth), list(predicted)
    for outcome in OUTCOMES[:4]:  # those of pairs, the best first
        for chunk in list(unmatched):
            match = next((other for other in free if _outcome(chunk, other) == outcome), None)
            if match is not None:
                unmatched.remove(chunk)
                free.remove(match)
                pairs.append((chunk, outcome))
    missed = [(chunk, "missed") for chunk in unmatched]
    return [*pairs, *missed, *((chunk, "spurious") for chunk in free)]  # type: ignore[list-item]


def _outcome(true: Chunk, predicted: Chunk) -> Outcome | None:
    """Return the outcome of a true entity by a predicted one; None if they share no word."""
    if true.begin >= predicted.end or predicted.begin >= true.end:
        return None
    same = (true.begin, true.end) == (predicted.begin, predicted.end)
    if true.type == predicted.type:
        return "right" if same else "other boundary"
    return "other type" if same else "other type and boundary"


class TagAnalysis(base.TaskAnalysis[TagExample, TagPrediction]):
    """Outcomes of entities, confusion of tags, and calibration.

    Args:
        task: the task.
        labels: labels of the model, in order.
    """

    grade_name, cost_name = "F1 of the sentence", "cross-entropy of the sentence"
    calibrated = "tags"

    def __init__(self, task: TaggingTask, labels: Sequence[str]) -> None:
        super().__init__()
        self.labels, self._task = tuple(labels), task
        self._entities = task.spells(labels)
        self._index = {label: index for index, label in enumerate(labels)}
        self.confusion = Confusion(len(labels))
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()

    def add(self, example: TagExample, prediction: TagPrediction) -> Judgement:
        """Compute the cross-entropy of all words, and the greatest lead of a sure wrong tag."""
        gold, chances = self._gold(example), prediction.probabilities
        truth, predicted = self._indices(gold), self._indices(prediction.tags)
        self.confusion.pairs.update(zip(truth.tolist(), predicted.tolist(), strict=True))
        top, chances = chances.max(1), chances[np.arange(len(truth)), truth]
        for confidence, correct in zip(top.tolist(), (truth == predicted).tolist(), strict=True):
            self.calibration.add(confidence, correct)
        if self._entities:
            pairs = outcomes(chunks(gold), chunks(prediction.tags))
            self.outcomes.update((chunk.type, outcome) for chunk, outcome in pairs)
        leads = (top - chances)[(top >= SURE) & (chances < top)]
        loss = -float(np.log(np.maximum(chances, TINY)).sum())
        return Judgement(loss, float(leads.max()) if len(leads) else None)

    def show(self, example: TagExample, prediction: TagPrediction) -> s.ReportExample:
        """Show the sentence with its wrongly tagged words marked, and the tags of the worst."""
        gold, tags, words = self._gold(example), prediction.tags, example.words
        top = prediction.probabilities.max(1) if len(words) else np.zeros(0)
        errors = [index for index, (a, b) in enumerate(zip(gold, tags, strict=True)) if a != b]
        worst = sorted(errors, key=lambda index: -top[index])[:GUESSES]
        answers = [s.ReportGuess(f"{words[i]}: {tags[i]}", float(top[i]), False) for i in worst]
        truth = ", ".join(f"{words[index]}: {gold[index]}" for index in worst) or "as predicted"
        pieces: list[str | s.Marked] = []
        for index, word in enumerate(words):
            pieces += [s.Marked(word) if index in errors else word, " "]
        return s.ReportExample(pieces, truth, answers, example.where)

    def baseline(self) -> Metrics:
        """Compute the accuracy of the most frequent tag; its F1 is 0 where tags spell entities."""
        truth = self.confusion.true
        accuracy = {"accuracy": float(truth.max() / max(1, truth.sum()))}
        return accuracy | ({"f1": 0.0} if self._entities else {})

    def sections(self) -> list[s.Section]:
        classes = [*base.confusion_sections(self.labels, self.confusion), *self.reliability()]
        if not self._entities:
            return classes
        types = sorted({kind for kind, _ in self.outcomes})
        rows: list[Sequence[s.Cell]] = [
            [name, *(self.outcomes[name, outcome] for outcome in OUTCOMES)] for name in types
        ]
        total = [sum(self.outcomes[name, outcome] for name in types) for outcome in OUTCOMES]
        rows.append(["all", *total])
        note = "Entities are counted by their true type, spurious ones by the predicted type."
        columns = ["type", *OUTCOMES]
        table = s.TableSection("Outcomes of entities", columns, rows, total=True, note=note)
        return [table, *classes]

    def _gold(self, example: TagExample) -> tuple[str, ...]:
        gold = self._task.gold_tags(example, self.labels)
        assert gold is not None
        return gold

    def _indices(self, tags: Sequence[str]) -> NDArray[np.int64]:
        return np.array([self._index[tag] for tag in tags], dtype=np.int64)
