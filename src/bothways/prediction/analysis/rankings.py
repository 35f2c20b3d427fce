"""Analysis of rankings: where relevant documents stand, and calibration over all documents."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.core.terminal import quantity
from bothways.prediction.analysis.base import GUESSES, SURE, TaskAnalysis, clip_text, reliability
from bothways.prediction.analysis.calibration import Calibration
from bothways.tasks.base import Metrics
from bothways.tasks.metrics import sigmoid
from bothways.tasks.predictions import RankPrediction
from bothways.tasks.reranking.examples import RankExample
from bothways.tasks.reranking.metrics import Rankings, ndcg

FIRST_PLACES = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, 20), (21, 50), (51, 100))
"""Places, first and last of each row, that are counted together."""
DRAWN = 100
"""The last place of the curves."""

Places = NDArray[np.int64]


class RankingAnalysis(TaskAnalysis[RankExample, RankPrediction]):
    """Places of relevant documents: 16 bytes of each document, and the queries, are kept.

    The documents of a query are one ranking, wherever they are in the data. Of documents with
    equal scores the relevant ones stand last.
    """

    grade_name, cost_name = "nDCG@10", "nDCG@10 that is missing"

    def __init__(self) -> None:
        self.rankings, self.calibration = Rankings(), Calibration()

    def add(self, example: RankExample, prediction: RankPrediction) -> None:
        """Count a query with its documents."""
        labels, chances = _labels(example), _chances(prediction)
        for logit, label, chance in zip(prediction.logits, labels, chances, strict=True):
            self.rankings.add(example.query, logit, label)
            self.calibration.add(chance, label > 0)

    def cost(self, example: RankExample, prediction: RankPrediction) -> float:
        """Return 1 − nDCG@10; 0 without a relevant document, since every order is as good."""
        labels = np.array(_labels(example))
        return 1 - ndcg(np.array(prediction.logits), labels) if labels.any() else 0.0

    def doubt(self, example: RankExample, prediction: RankPrediction) -> float | None:
        """Return the lead of a first document that is not relevant, if the model is sure of it.

        The lead is over the best relevant document.
        """
        chances, relevant = _chances(prediction), np.array(_labels(example)) > 0
        lead = float(chances.max() - chances.max(where=relevant, initial=0.0))
        return lead if lead > 0 and chances.max() >= SURE else None

    def show(self, example: RankExample, prediction: RankPrediction) -> s.ReportExample:
        """Return the query, the first documents, and the best relevant one with its place."""
        labels, chances = _labels(example), _chances(prediction)
        ranking = [ranked.index for ranked in prediction.ranking]
        best = next(((n, at) for n, at in enumerate(ranking, 1) if labels[at] > 0), None)
        shown, truth = ranking[:GUESSES], "no relevant document"
        if best is not None:
            place, at = best
            shown += [] if at in shown else [at]
            truth = f"{clip_text(example.documents[at])} (place {place:,} of {len(ranking):,})"
        given = [
            s.ReportGuess(clip_text(example.documents[at]), float(chances[at]), labels[at] > 0)
            for at in shown
        ]
        return s.ReportExample([clip_text(example.query)], truth, given, example.where)

    def baseline(self) -> Metrics:
        """Return the metrics of equal scores, which are those of a random order."""
        equal = {
            query: (array("d", bytes(8 * len(labels))), labels)
            for query, (_, labels) in self.rankings.by_query.items()
        }
        return Rankings(equal).metrics() if equal else {}

    def sections(self) -> list[s.Section]:
        """Return the sections of a report."""
        found = list(self._places())
        return [*_curves(found), _first_places(found), *reliability(self.calibration, "documents")]

    def _places(self) -> Iterator[tuple[Places, int]]:
        """Yield the places of a query's relevant documents, from 1, and the number of all."""
        for scores, labels in self.rankings.by_query.values():
            relevant = np.frombuffer(labels) > 0
            order = np.lexsort((relevant, -np.frombuffer(scores)))
            yield 1 + np.flatnonzero(relevant[order]), len(order)


def _curves(found: Many[tuple[Places, int]]) -> list[s.Section]:
    """Return what is found down to each place, over queries that have a relevant document."""
    known = [pair for pair in found if len(pair[0])]
    if not known:
        return []
    last = min(DRAWN, max(count for _, count in known))
    down_to = np.arange(1, last + 1)
    hits, recall, chance = np.zeros((3, last))
    for places, count in known:
        hits += down_to >= places[0]
        recall += np.searchsorted(places, down_to, "right") / len(places)
        chance += np.minimum(down_to / count, 1)
    named = {
        "queries with a relevant document": hits,
        "relevant documents": recall,
        "relevant documents, in a random order": chance,
    }
    lines = [
        s.Line(name, down_to.tolist(), (sums / len(known)).tolist()) for name, sums in named.items()
    ]
    note = f"Means over {quantity(len(known), 'query|queries that has|have')} a relevant document."
    title = "What the first places hold"
    return [s.Curves(title, "down to this place", "share", lines, percent=True, note=note)]


def _first_places(found: Many[tuple[Places, int]]) -> s.TableSection:
    """Return how many queries have their first relevant document in which places."""
    first = np.array([places[0] if len(places) else 0 for places, _ in found])
    groups = {
        f"{low}" if low == high else f"{low} to {high}": (low <= first) & (first <= high)
        for low, high in FIRST_PLACES
    }
    groups |= {"beyond 100": first > FIRST_PLACES[-1][1], "no relevant document": first == 0}
    rows: list[Many[s.Cell]] = [
        [name, int(chosen.sum()), s.percentage(float(chosen.mean()))]
        for name, chosen in groups.items()
        if chosen.any()
    ]
    note = "Of documents with equal scores the relevant ones stand last."
    columns = ["place", "queries", "share"]
    return s.TableSection("The first relevant document of a query", columns, rows, note=note)


def _chances(prediction: RankPrediction) -> NDArray[np.float64]:
    return sigmoid(np.array(prediction.logits))


def _labels(example: RankExample) -> tuple[float, ...]:
    assert example.labels is not None
    return example.labels
