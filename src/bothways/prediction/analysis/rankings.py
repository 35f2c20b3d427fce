"""Analysis of rankings: the ranks of relevant documents, and calibration over all documents."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import GUESSES, SURE, Judgement, TaskAnalysis, clip
from bothways.tasks.base import Metrics
from bothways.tasks.metrics import sigmoid
from bothways.tasks.predictions import RankPrediction
from bothways.tasks.reranking.metrics import Rankings, ndcg
from bothways.tasks.reranking.task import RankExample

RANK_RANGES = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, 20), (21, 50), (51, 100))
"""Ranks that are counted together."""
MAX_RANK = 100
"""The last rank of the curves."""


class RankingAnalysis(TaskAnalysis[RankExample, RankPrediction]):
    """Ranks of relevant documents: 16 bytes of each document, and the queries, are kept.

    The documents of a query are one ranking, wherever they are in the data. Of documents with
    equal scores the relevant ones stand last.
    """

    grade_name, cost_name, calibrated = "nDCG@10", "nDCG@10 that is missing", "documents"

    def __init__(self) -> None:
        super().__init__()
        self.rankings = Rankings()

    def add(self, example: RankExample, prediction: RankPrediction) -> Judgement:
        """Compute 1 − nDCG@10, and how far the first document leads over the relevant ones.

        The cost is 0 without a relevant document, since every order is as good.
        """
        labels, logits = _labels(example), np.array(prediction.logits)
        relevant, chances = labels > 0, sigmoid(logits)
        for logit, label, chance in zip(prediction.logits, labels.tolist(), chances, strict=True):
            self.rankings.add(example.query, logit, label)
            self.calibration.add(chance, label > 0)
        cost = 1 - ndcg(logits, labels) if labels.any() else 0.0
        lead = float(chances.max() - chances.max(where=relevant, initial=0.0))
        return Judgement(cost, lead if lead > 0 and chances.max() >= SURE else None)

    def show(self, example: RankExample, prediction: RankPrediction) -> s.ReportExample:
        labels, chances = _labels(example), sigmoid(np.array(prediction.logits))
        ranking = [ranked.index for ranked in prediction.ranking]
        best = next(((n, index) for n, index in enumerate(ranking, 1) if labels[index] > 0), None)
        indices, truth = ranking[:GUESSES], "no relevant document"
        if best is not None:
            rank, index = best
            indices += [] if index in indices else [index]
            truth = f"{clip(example.documents[index])} (place {rank:,} of {len(ranking):,})"
        answers = [
            s.ReportGuess(clip(example.documents[i]), float(chances[i]), bool(labels[i] > 0))
            for i in indices
        ]
        return s.ReportExample([clip(example.query)], truth, answers, example.where)

    def baseline(self) -> Metrics:
        """Compute the metrics of equal scores, which are the metrics of a random order."""
        equal = {
            query: (array("d", bytes(8 * len(labels))), labels)
            for query, (_, labels) in self.rankings.by_query.items()
        }
        return Rankings(equal).metrics() if equal else {}

    def sections(self) -> list[s.Section]:
        queries = list[tuple[NDArray[np.int64], int]]()  # ranks of relevant documents, and of all
        for scores, labels in self.rankings.by_query.values():
            relevant = np.frombuffer(labels) > 0
            order = np.lexsort((relevant, -np.frombuffer(scores)))
            queries.append((1 + np.flatnonzero(relevant[order]), len(order)))
        best = np.array([ranks[0] if len(ranks) else 0 for ranks, _ in queries])
        groups = {
            f"{low}" if low == high else f"{low} to {high}": (low <= best) & (best <= high)
            for low, high in RANK_RANGES
        }
        groups |= {"beyond 100": best > RANK_RANGES[-1][1], "no relevant document": best == 0}
        rows: list[Sequence[s.Cell]] = [
            [name, int(members.sum()), s.percentage(float(members.mean()))]
            for name, members in groups.items()
            if members.any()
        ]
        note = "Of documents with equal scores the relevant ones stand last."
        title, columns = "The first relevant document of a query", ["place", "queries", "share"]
        table = s.TableSection(title, columns, rows, note=note)
        return [*_curves(queries), table, *self.reliability()]


def _curves(queries: Sequence[tuple[NDArray[np.int64], int]]) -> list[s.Section]:
    """Draw recall by rank, over queries that have a relevant document."""
    queries = [pair for pair in queries if len(pair[0])]
    if not queries:
        return []
    max_rank = min(MAX_RANK, max(count for _, count in queries))
    cutoffs = np.arange(1, max_rank + 1)
    hits, recall, chance = np.zeros((3, max_rank))
    for ranks, count in queries:
        hits += cutoffs >= ranks[0]
        recall += np.searchsorted(ranks, cutoffs, "right") / len(ranks)
        chance += np.minimum(cutoffs / count, 1)
    sums = {
        "queries with a relevant document": hits,
        "relevant documents": recall,
        "relevant documents, in a random order": chance,
    }
    x = cutoffs.tolist()
    lines = [s.Line(name, x, (total / len(queries)).tolist()) for name, total in sums.items()]
    note = f"Means over queries with a relevant document: {len(queries):,}."
    title = "What the first places hold"
    return [s.Curves(title, "down to this place", "share", lines, percent=True, note=note)]


def _labels(example: RankExample) -> NDArray[np.float64]:
    assert example.labels is not None
    return np.array(example.labels)
