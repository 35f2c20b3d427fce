"""A score for a text or a pair of texts (Devlin et al. 2018, section 4.1, on STS-B).

As in classification, but the dense layer on the pooled vector has one output, trained by its
squared error.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from bothways.core.batch import Batch, LabelTargets
from bothways.core.errors import DataError, Finding, Severity, argument
from bothways.core.training_module import Loss
from bothways.objectives.losses import squared_error
from bothways.tasks import base, text_checks, text_task
from bothways.tasks.columns import number_of
from bothways.tasks.metrics import correlation
from bothways.tasks.predictions import ScorePrediction
from bothways.tasks.text_task import LongTextTask, TextExample

SCORES = (
    "score", "similarity", "similarity_score", "relatedness_score", "rating", *text_task.LABELS,
)  # fmt: skip
"""Common names of a column of scores."""
LARGEST = 1e18
"""The largest score: squared errors must fit into fp32."""
FAR = 20.0
"""The mean size of scores from which they are learned in their own units."""
_TOO_LARGE = f"beyond ±{LARGEST:g}"


class Regressor(text_task.NumberModel[TextExample, ScorePrediction]):
    """A regression task with a model whose head "labels" has one output; see `TaskModel`."""

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the squared error of the scores."""
        targets, weight = text_task.targets_of(batch), text_task.window_weight(batch)
        return {"label": squared_error(scores, targets, weight)}

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> ScorePrediction:
        """Return the score, the mean over windows."""
        return ScorePrediction(float(text_task.averaged(outputs)[0]))


@dataclass(frozen=True)
class RegressionTask(LongTextTask[ScorePrediction]):
    """A number for a text or a pair of texts."""

    aliases = "regression score sts"
    model_class = Regressor
    metric = "spearman"
    metrics = base.directions("spearman", "pearson", lowest="mse")
    problem = "regression"
    column_table = (text_task.TEXT, replace(text_task.LABEL, names=SCORES))

    kind: Literal["regress"] = "regress"

    def labels(self, examples: Iterable[TextExample]) -> tuple[str, ...]:
        return ("score",)

    def stratum(self, example: TextExample) -> Hashable:
        """Return the score."""
        value = _number(example.label)
        return None if math.isnan(value) else value

    def check(self, train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
        numbers = [(e, number_of(e.label)) for e in (*train, *dev) if e.label is not None]
        errors = [f"{e.where} ({e.label!r})" for e, number in numbers if math.isnan(number)]
        large = [e.where for e, number in numbers if abs(number) > LARGEST]
        fix = f"Fix these rows, name another label column, or set {argument(task='classify')}."
        fault = f"label(s) is|are {_TOO_LARGE}"
        findings = [
            *text_checks.check_examples(train, dev, self.texts, lambda e: e.label),
            *text_checks.report_rows("labels", errors, "label(s) is|are not numbers", fix),
            *text_checks.report_rows("labels", large, fault, "Scale the scores."),
        ]
        for name, examples in (("training", train), ("dev", dev)):
            scores = _numbers(examples)
            if scores and min(scores) == max(scores):
                message = f"all {name} examples have the score {scores[0]:g}: "
                message += "correlation is undefined"
                severity: Severity = "error" if name == "training" else "warning"
                findings.append(Finding("balance", severity, message))
        return findings

    def target(self, example: TextExample, index: Mapping[str, int]) -> LabelTargets:
        """Return the score, absent if it is not a number, which `check` and `score` refuse."""
        return LabelTargets(np.array([_number(example.label)], dtype=np.float32))

    def score(
        self, results: base.Results[TextExample, ScorePrediction], labels: Many[str]
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
        # The constant with the least squared error is the mean, and the error is the variance
        mean = ScorePrediction(float(np.mean([_known(example) for example in examples])))
        metrics = self.score(((example, mean) for example in examples), ())
        return {**metrics, "loss": metrics["mse"]}


def _number(label: str | None) -> float:
    """Return a label as a number; NaN also for one that is too large."""
    value = number_of(label)
    return value if abs(value) <= LARGEST else math.nan


def _known(example: TextExample) -> float:
    value = _number(base.required(example.label, example.where))
    if math.isnan(value):
        fix = f"Write a number, such as 2.5, or set {argument(task='classify')}."
        large = not math.isnan(number_of(example.label))
        message = f"label {example.label!r} is {_TOO_LARGE if large else 'not a number'}"
        raise DataError(message, where=example.where, fix=fix)
    return value


def _numbers(examples: Many[TextExample]) -> list[float]:
    """Return the scores that are numbers."""
    values = (_number(example.label) for example in examples)
    return [value for value in values if not math.isnan(value)]
