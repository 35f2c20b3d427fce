"""A score for a text or a pair of texts (Devlin et al. 2018, section 4.1, on STS-B).

As in classification, but the dense layer on the pooled vector has one output, trained by its
squared error.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from bothways.core.advice import argument
from bothways.core.batch import Batch, LabelTargets
from bothways.core.errors import DataError
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.model.heads import Head, LabelHead
from bothways.objectives.losses import squared_error
from bothways.tasks import base, text_checks
from bothways.tasks.columns import Column
from bothways.tasks.metrics import correlation
from bothways.tasks.predictions import ScorePrediction
from bothways.tasks.text_task import (
    LABEL,
    LABELS,
    TEXT,
    LongTextTask,
    NumberModel,
    TextExample,
    averaged,
    encode_texts,
    targets_of,
    window_weight,
)
from bothways.text.tokenizer import Tokenizer

SCORES = ("score", "similarity", "similarity_score", "relatedness_score", "rating", *LABELS)
"""Common names of a column of scores."""
LARGEST = 1e18
"""The largest score: squared errors must fit into fp32."""
FAR = 20.0
"""The mean size of scores from which they are learned in their own units."""
_TOO_LARGE = f"beyond ±{LARGEST:g}"


class Regressor(NumberModel[TextExample, ScorePrediction]):
    """A regression task with a model whose head "labels" has one output; see `TaskModel`."""

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the squared error of the scores."""
        return {"label": squared_error(scores, targets_of(batch), window_weight(batch))}

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> ScorePrediction:
        """Return the score, the mean over windows."""
        return ScorePrediction(float(averaged(outputs)[0]))


@dataclass(frozen=True)
class RegressionTask(LongTextTask[ScorePrediction]):
    """A number for a text or a pair of texts."""

    aliases: ClassVar[Many[str]] = ("regression", "score", "sts")
    model_class: ClassVar[type[Regressor]] = Regressor
    metric: ClassVar[str] = "spearman"
    metrics: ClassVar[Mapping[str, base.Direction]] = {
        "spearman": "highest",
        "pearson": "highest",
        "mse": "lowest",
    }
    problem: ClassVar[Literal["regression"]] = "regression"
    column_table: ClassVar[Many[Column]] = (TEXT, replace(LABEL, names=SCORES))

    kind: Literal["regress"] = "regress"

    def labels(self, examples: Iterable[TextExample]) -> tuple[str, ...]:
        return ("score",)

    def stratum(self, example: TextExample) -> Hashable:
        """Return the score."""
        value = _number(example.label)
        return None if math.isnan(value) else value

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (LabelHead(1, dropout),)

    def check(self, train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
        return [
            *text_checks.check_examples(train, dev, self.texts, lambda e: e.label),
            *_check_scores(train, dev),
        ]

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Encode texts as in classification.

        A label that is not a number becomes an absent one: `check` and `score` refuse it.
        """
        scores = [np.array([_number(example.label)], dtype=np.float32) for example in examples]
        return encode_texts(examples, list(map(LabelTargets, scores)), tokenizer, self.fit(length))

    def score(
        self, results: Iterable[tuple[TextExample, ScorePrediction]], labels: Many[str]
    ) -> base.Metrics:
        """Return Pearson's and Spearman's correlation and the mean squared error.

        Memory: 16 bytes an example, because ranks need all scores.
        """
        truth, predicted = array("d"), array("d")
        for example, prediction in results:
            truth.append(_known(example))
            predicted.append(prediction.score)
        if not truth:
            raise base.nothing_to_score()
        return correlation(np.frombuffer(truth), np.frombuffer(predicted))

    def grade(self, example: TextExample, prediction: ScorePrediction, labels: Many[str]) -> float:
        """Return the squared error, negated."""
        return -((_known(example) - prediction.score) ** 2)

    def output_scale(self, train: Many[TextExample]) -> base.OutputScale | None:
        """Return mean and standard deviation of scores that are far from 0."""
        scores = _numbers(train)
        if not scores or float(np.mean(np.abs(scores))) <= FAR or min(scores) == max(scores):
            return None
        return base.OutputScale(float(np.mean(scores)), float(np.std(scores)))

    def baseline(self, examples: Many[TextExample]) -> base.Metrics:
        """Return the metrics of always answering the mean score."""
        mean = float(np.mean([_known(example) for example in examples]))
        error = float(np.mean([(_known(example) - mean) ** 2 for example in examples]))
        return {"spearman": 0.0, "pearson": 0.0, "mse": error, "loss": error}


def _any_number(label: str | None) -> float:
    """Return a label as a number; NaN if it is absent or not a finite number."""
    try:
        # float() takes "1_0" for 10.
        value = math.nan if label is None or "_" in label else float(label)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _number(label: str | None) -> float:
    """Return a label as a number; NaN also for one that is too large."""
    value = _any_number(label)
    return value if abs(value) <= LARGEST else math.nan


def _known(example: TextExample) -> float:
    if example.label is None:
        raise base.unlabelled(example.where)
    value = _number(example.label)
    if math.isnan(value):
        fix = f"Write a number, such as 2.5, or set {argument(task='classify')}."
        large = not math.isnan(_any_number(example.label))
        message = f"label {example.label!r} is {_TOO_LARGE if large else 'not a number'}"
        raise DataError(message, where=example.where, fix=fix)
    return value


def _check_scores(train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
    errors = [
        f"{e.where} ({e.label!r})"
        for e in (*train, *dev)
        if e.label is not None and math.isnan(_any_number(e.label))
    ]
    large = [e.where for e in (*train, *dev) if abs(_any_number(e.label)) > LARGEST]
    fix = f"Fix these rows, name another label column, or set {argument(task='classify')}."
    findings = text_checks.report_rows("labels", errors, "label(s) is|are not numbers", fix)
    findings += text_checks.report_rows(
        "labels", large, f"label(s) is|are {_TOO_LARGE}", "Scale the scores."
    )
    for name, examples in (("training", train), ("dev", dev)):
        scores = _numbers(examples)
        if scores and min(scores) == max(scores):
            message = f"all {name} examples have the score {scores[0]:g}; correlation is undefined"
            findings.append(
                Finding("balance", "error" if name == "training" else "warning", message)
            )
    return findings


def _numbers(examples: Many[TextExample]) -> list[float]:
    """Return the scores that are numbers."""
    values = (_number(example.label) for example in examples)
    return [value for value in values if not math.isnan(value)]
