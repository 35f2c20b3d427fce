"""A score for a text or a pair of texts (Devlin et al. 2018, section 4.1: STS-B, how near two sentences are in meaning).

Idea: as in classification, but the dense layer on the pooled vector has one output, trained by its squared error.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import DataError
from bothways.core.finding import Finding, places
from bothways.core.loss import Loss
from bothways.core.targets import LabelTargets
from bothways.model.head_config import Head, LabelHead
from bothways.model.model import Model
from bothways.objectives.losses import squared_error
from bothways.tasks.classification.task import encode_texts
from bothways.tasks.metrics import correlation
from bothways.tasks.predictions import ScorePrediction
from bothways.tasks.task import Direction, Metrics, Reading, Task
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.tasks.text_checks import check_answered, check_overlap, check_texts, texts_of
from bothways.tasks.text_examples import (
    LABELS,
    NOT_NAMED,
    TextColumns,
    TextExample,
    example_of,
    open_examples,
)
from bothways.text.tokenizer import Tokenizer

SCORES = ("score", "similarity", "similarity_score", "relatedness_score", "rating", *LABELS)
"""What a column of scores may be called."""


@dataclass(frozen=True)
class RegressionTask(Task[TextExample, ScorePrediction]):
    """A number for a text or a pair of texts.

    Attributes:
        columns: where texts and scores are.
    """

    metric: ClassVar[str] = "spearman"
    problem: ClassVar[Literal["regression"]] = "regression"

    columns: TextColumns = NOT_NAMED
    kind: Literal["regress"] = "regress"

    def read(
        self, source: str, asked: TextColumns | None = None, *, labelled: bool = True
    ) -> Reading[TextExample]:
        """As `Definition.read`; while reading, DataError for a row without a column or with a text that is no text."""
        table, chosen = open_examples(
            source, asked or NOT_NAMED, usual=self.columns, labelled=labelled, guesses=SCORES
        )
        return Reading(
            self.with_columns(chosen), (example_of(row, chosen) for row in table.rows), table.share
        )

    def labels(self, examples: Iterable[TextExample]) -> tuple[str, ...]:
        """One output, "score"."""
        return ("score",)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """One output."""
        return (LabelHead(1, dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Correlations, and the mean squared error."""
        return {"spearman": "highest", "pearson": "highest", "mse": "lowest"}

    def texts(self, example: TextExample) -> tuple[str, ...]:
        """One text or two."""
        return (example.text,) if example.text_b is None else (example.text, example.text_b)

    def check(self, train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
        """Rows, scores, and what training and development data share."""
        return [
            *check_texts([*train, *dev]),
            *check_answered([e.where for e in (*train, *dev) if e.label is None]),
            *_check_scores(train, dev),
            *check_overlap(train, dev, texts_of),
        ]

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """As for classification; a label that is no number is as none here, and for `check` and `score` to refuse."""
        targets = [
            LabelTargets(np.array([_number(example.label)], dtype=np.float32))
            for example in examples
        ]
        return encode_texts(examples, targets, tokenizer, length)

    def baseline(self, train: Many[TextExample], scored: Many[TextExample]) -> Metrics:
        """The mean score for all, which correlates with nothing."""
        mean = float(np.mean([_known(example) for example in train]))
        error = float(np.mean([(_known(example) - mean) ** 2 for example in scored]))
        return {"spearman": 0.0, "pearson": 0.0, "mse": error, "loss": error}

    def task(self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int) -> Regressor:
        """With a model that has the head "labels", of one output."""
        return Regressor(self, model, tokenizer, labels, length)


class Regressor(TaskLearner[TextExample, ScorePrediction]):
    """A model with the head "labels", of one output, as a task."""

    def weights(self, batch: Batch) -> dict[str, float]:
        """The number of sequences with a score."""
        return {"label": float((~_scores(batch).isnan()).sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The squared error of the scores."""
        return {"label": squared_error(self.scores(batch), _scores(batch))}

    def scores(self, batch: Batch) -> Float[Tensor, " sequences"]:
        """One score for each sequence."""
        result: Tensor = self.model.read("labels", batch)
        return result[:, 0]

    def outputs(self, batch: Batch) -> list[Output]:
        """The score of each sequence `(1)`."""
        return list(self.scores(batch).float().cpu().numpy()[:, None])

    def decode(self, example: TextExample, outputs: Many[Output]) -> ScorePrediction:
        """The output as it is."""
        (scores,) = outputs
        return ScorePrediction(float(scores[0]))

    def score(self, results: Iterable[tuple[TextExample, ScorePrediction]]) -> Metrics:
        """Pearson's and Spearman's correlation, and the mean squared error; 16 bytes of memory an example: ranks need all.

        Raises:
            DataError: an example without a score or with a label that is no number; no example at all.
        """
        truth, predicted = array("d"), array("d")
        for example, prediction in results:
            truth.append(_known(example))
            predicted.append(prediction.score)
        if not truth:
            raise DataError("there is no example to score", fix="Give at least one.")
        return correlation(np.frombuffer(truth), np.frombuffer(predicted))

    def grade(self, example: TextExample, prediction: ScorePrediction) -> float:
        """The squared error, below 0."""
        return -((_known(example) - prediction.score) ** 2)


def _number(label: str | None) -> float:
    """NaN for a label that is none, and for one that is no finite number."""
    try:
        value = math.nan if label is None else float(label)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _known(example: TextExample) -> float:
    if example.label is None:
        raise DataError(
            "has no label, so it cannot be scored",
            where=example.where,
            fix="Add it, or use predict.",
        )
    value = _number(example.label)
    if math.isnan(value):
        fix = "Write a number, such as 2.5, or choose the task classify."
        raise DataError(f"label {example.label!r} is no number", where=example.where, fix=fix)
    return value


def _check_scores(train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
    findings = []
    strange = [
        f"{e.where} ({e.label!r})"
        for e in (*train, *dev)
        if e.label is not None and math.isnan(_number(e.label))
    ]
    if strange:
        what = f"{len(strange)} labels are no numbers: {places(strange)}"
        fix = "Mend these rows, name another label column, or choose the task classify."
        findings.append(Finding("labels", "error", what, fix=fix))
    for name, examples in (("training", train), ("dev", dev)):
        scores = [value for value in (_number(e.label) for e in examples) if not math.isnan(value)]
        if scores and min(scores) == max(scores):
            what = f"all {name} examples have the score {scores[0]:g}: nothing can be learned from them, or told by correlation"
            findings.append(Finding("balance", "error" if name == "training" else "warning", what))
    return findings


def _scores(batch: Batch) -> Tensor:
    return cast(torch.Tensor, cast(LabelTargets, batch.targets["label"]).labels)
