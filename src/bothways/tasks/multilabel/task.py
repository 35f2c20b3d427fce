"""Any number of labels for a text or a pair: topics, emotions, codes.

As in classification, but a sigmoid on each output of the dense layer gives the probability of its
label by itself. A label is assigned from its own threshold on, which is chosen on development data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.finding import Finding, places
from bothways.core.loss import Loss
from bothways.core.targets import MultilabelTargets
from bothways.model.heads import Head, LabelHead
from bothways.model.model import Model
from bothways.objectives.losses import binary_cross_entropy
from bothways.tasks import base
from bothways.tasks.columns import Column, cell_of
from bothways.tasks.metrics import macro_thresholds, micro_thresholds, multilabel_metrics
from bothways.tasks.multilabel.examples import (
    MultilabelExample,
    check_label_sets,
    labels_of_columns,
    parse_labels,
)
from bothways.tasks.predictions import MultilabelPrediction
from bothways.tasks.text_encoding import averaged, encode_texts, window_weight
from bothways.tasks.text_examples import LABEL, TEXT, TextColumns, in_order, texts_of_row
from bothways.tasks.text_task import LongTextTask
from bothways.text.tokenizer import Tokenizer

EVEN = 0.5
"""The threshold of labels without their own."""
LEAST = 1e-16
"""Probabilities are clipped to this in the loss: one wrong label costs at most 37 nats."""


@dataclass(frozen=True)
class MultilabelTask(LongTextTask[MultilabelPrediction]):
    """Any number of labels for a text or a pair of texts.

    The label column holds lists, or texts such as "red, green". Several columns, whose names are
    given with commas, hold 0 or 1 each: columns={"label": "toxic,obscene,threat"}.

    Attributes:
        separator: separator of labels in a text.
        thresholds: for each label, in order, the probability from which it is assigned; empty for
            0.5.
    """

    aliases: ClassVar[Many[str]] = ("multi-label", "multi-label-classification")
    metric: ClassVar[str] = "f1_micro"
    problem: ClassVar[Literal["multi_label_classification"]] = "multi_label_classification"
    column_table: ClassVar[Many[Column]] = (TEXT, replace(LABEL, several=True))

    separator: str = ","
    thresholds: tuple[float, ...] = ()
    kind: Literal["multilabel"] = "multilabel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            fix = "Set, for example, task.separator=,"
            raise ConfigError("must not be empty", where="separator", fix=fix)
        if not all(0 <= threshold <= 1 for threshold in self.thresholds):
            message = f"must be in [0, 1], not {list(self.thresholds)}"
            raise ConfigError(message, where="thresholds")

    def parse(self, row: base.Row, columns: TextColumns, where: str) -> MultilabelExample:
        """Return the example in these columns of a row."""
        text, text_b = texts_of_row(row, columns, where)
        labels, column = None, columns.label
        if column is not None and column not in row and "," in column:
            labels = labels_of_columns(row, columns.labels, where)
        elif column is not None:
            labels = parse_labels(cell_of(row, column, where), self.separator, column, where)
        return MultilabelExample(text, text_b, labels, where)

    def answered(self, example: MultilabelExample, answer: object) -> MultilabelExample:
        """Return an example with its labels; see `Task.answered`."""
        labels = parse_labels(answer, self.separator, "answers", example.where)
        return dataclasses.replace(example, labels=labels)

    def labels(self, examples: Iterable[MultilabelExample]) -> tuple[str, ...]:
        """Return the labels that occur, in order."""
        return in_order(label for example in examples for label in example.labels or ())

    def stratum(self, example: MultilabelExample) -> Hashable:
        """Return the labels."""
        return example.labels

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Return a head with one output per label."""
        return (LabelHead(max(1, len(labels)), dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, base.Direction]:
        """Return F1 of all decisions, mean F1 of the labels, exact matches, and the loss."""
        return {"f1_micro": "highest", "f1_macro": "highest", "exact": "highest", "loss": "lowest"}

    def check(self, train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
        """Return the problems of the examples; `dev` may be empty."""
        findings, names = check_label_sets(train, dev), self.columns.labels
        if len(names) > 1 and (never := sorted({*names} - {*self.labels(train)})):
            message = (
                f"no training example has one of the labels {places(never)}: they are left out"
            )
            findings.append(Finding("labels", "warning", message))
        return findings + _check_separator(self.separator, self.labels(train))

    def encode(
        self,
        examples: Many[MultilabelExample],
        tokenizer: Tokenizer,
        labels: Many[str],
        length: int,
    ) -> list[base.EncodedExample]:
        """Return the model inputs of texts, with 0 or 1 per label as targets."""
        index = {label: position for position, label in enumerate(labels)}
        targets = [
            MultilabelTargets(_held(example, index)[None].astype(np.float32))
            for example in examples
        ]
        return encode_texts(examples, targets, tokenizer, self.fit(length))

    def decode(
        self,
        example: MultilabelExample,
        encoded: base.EncodedExample,
        outputs: Many[base.Output],
        tokenizer: Tokenizer,
        labels: Many[str],
    ) -> MultilabelPrediction:
        """Return the labels from their thresholds on, and all probabilities."""
        logits = averaged(outputs).astype(np.float64)
        probabilities = 0.5 * (1 + np.tanh(logits / 2))  # the sigmoid, without overflow
        assigned = zip(labels, probabilities >= self._limits(labels), strict=True)
        return MultilabelPrediction(
            tuple(name for name, predicted in assigned if predicted),
            dict(zip(labels, probabilities.tolist(), strict=True)),
        )

    def _limits(self, labels: Many[str]) -> NDArray[np.float64]:
        return np.array(self.thresholds or (EVEN,) * len(labels), dtype=np.float64)

    def score(
        self, results: Iterable[tuple[MultilabelExample, MultilabelPrediction]], labels: Many[str]
    ) -> base.Metrics:
        """Return micro and macro F1, exact matches, and the mean cross-entropy of a decision.

        Labels are assigned by this task's thresholds, whichever the predictions were made with.
        """
        index = {label: position for position, label in enumerate(labels)}
        limits = self._limits(labels)
        correct, errors = np.zeros((2, len(index)), dtype=np.int64)
        count, exact, loss = 0, 0, 0.0
        for example, prediction in results:
            truth, chances = _known(example, index), _chances(prediction)
            predicted = chances >= limits
            correct += truth & predicted
            errors += truth ^ predicted
            loss -= float(np.log(np.maximum(np.where(truth, chances, 1 - chances), LEAST)).mean())
            count, exact = count + 1, exact + int((truth == predicted).all())
        if not count:
            raise base.nothing_to_score()
        return {**multilabel_metrics(correct, errors), "exact": exact / count, "loss": loss / count}

    def score_tuned(
        self,
        results: Iterable[tuple[MultilabelExample, MultilabelPrediction]],
        labels: Many[str],
        metric: str,
    ) -> base.Metrics:
        """Return the metrics at the best thresholds; at 0.5, an early model assigns no label."""
        collected = list(results)
        return self.tuned(collected, labels, metric).score(collected, labels)

    def grade(
        self, example: MultilabelExample, prediction: MultilabelPrediction, labels: Many[str]
    ) -> float:
        """Return 1 for exactly the right labels, else 0."""
        return float(example.labels is not None and set(prediction.labels) == set(example.labels))

    def tuned(
        self,
        results: Iterable[tuple[MultilabelExample, MultilabelPrediction]],
        labels: Many[str],
        metric: str,
    ) -> MultilabelTask:
        """Return the task with the thresholds that are best for a metric.

        For "f1_macro" each label has its own best F1; else all decisions have the best micro-F1.
        """
        index = {label: position for position, label in enumerate(labels)}
        pairs = [(_known(example, index), _chances(prediction)) for example, prediction in results]
        if not pairs:
            return self
        truth, chances = (np.stack(column) for column in zip(*pairs, strict=True))
        choose = macro_thresholds if metric == "f1_macro" else micro_thresholds
        return dataclasses.replace(self, thresholds=choose(truth.astype(np.int64), chances))

    def baseline(self, examples: Many[MultilabelExample]) -> base.Metrics:
        """Return the metrics of always assigning the most frequent labels.

        Their number is the one with the best micro-F1; the loss is the label frequencies'.
        """
        index = {label: number for number, label in enumerate(self.labels(examples))}
        truth = np.array([_known(example, index) for example in examples])
        predicted = np.broadcast_to(constant_labels(truth.sum(0), len(truth)), truth.shape)
        share = truth.mean(0)
        loss = -np.log(np.maximum(np.where(truth, share, 1 - share), LEAST)).mean()
        counts = ((truth & predicted).sum(0), (truth ^ predicted).sum(0))
        exact = float((truth == predicted).all(1).mean())
        return {**multilabel_metrics(*counts), "exact": exact, "loss": float(loss)}

    def bind(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> MultilabelClassifier:
        """Bind the task to a model; ConfigError if thresholds and labels differ in number."""
        if len(self.thresholds) not in {0, len(labels)}:
            message = f"there are {len(self.thresholds)} for {len(labels)} labels"
            fix = "Give one for each label, in order, or none."
            raise ConfigError(message, where="task.thresholds", fix=fix)
        return MultilabelClassifier(self, model, tokenizer, labels, length)


class MultilabelClassifier(base.TaskModel[MultilabelExample, MultilabelPrediction]):
    """A multilabel task with a model that has the head "labels"; see `TaskModel`."""

    scale = "labels"

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of labelled texts times that of labels."""
        labelled = ~_labels(batch).isnan()
        return {"label": float((labelled * window_weight(batch)[:, None]).sum(dtype=torch.float64))}

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the cross-entropy of all decisions.

        Hits are not counted: nearly all labels are absent, so the share of right decisions is high
        for any model.
        """
        weight = window_weight(batch)[:, None]
        loss = binary_cross_entropy(scores, _labels(batch), weight)
        return {"label": dataclasses.replace(loss, hits=None)}

    def scores(self, batch: Batch) -> Float[Tensor, "sequences labels"]:
        """Return one logit per label for each sequence."""
        return self.model.read("labels", batch)

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return the logits of each sequence `(labels)`."""
        return list(self.scores(batch).float().cpu().numpy())


def _check_separator(separator: str, labels: Many[str]) -> list[Finding]:
    """Report labels that another separator would cut into several that all occur often."""
    for mark in ";|,\t":
        names = [name.strip() for label in labels for name in label.split(mark)]
        cut = sum(mark in label for label in labels)
        if mark != separator and cut and len({*names}) < len(labels) + cut:
            message = f"{cut} of {len(labels)} labels hold {mark!r}, and are cut at {separator!r}"
            fix = f"If it separates labels, set task.separator={mark}."
            return [Finding("labels", "warning", message, fix=fix)]
    return []


def constant_labels(counts: NDArray[np.int64], examples: int) -> NDArray[np.bool_]:
    """Return the labels that the majority baseline has, by micro-F1.

    Args:
        counts: number of examples with each label.
        examples: number of examples.
    """
    order = np.argsort(-counts, kind="stable")
    number = np.arange(1, len(counts) + 1)
    f1 = 2 * counts[order].cumsum() / np.maximum(1, number * examples + counts.sum())
    result = np.zeros(len(counts), dtype=np.bool_)
    result[order[: int(f1.argmax()) + 1]] = True
    return result


def _held(example: MultilabelExample, index: Mapping[str, int]) -> NDArray[np.float64]:
    """Return 1 for each label of the example, else 0; NaN where unknown `(labels)`."""
    if example.labels is None:
        return np.full(len(index), np.nan)
    occurrences = np.zeros(len(index))
    for label in example.labels:
        if label not in index:
            raise base.unknown_label(f"label {label!r}", label, [*index], example.where)
        occurrences[index[label]] = 1
    return occurrences


def _known(example: MultilabelExample, index: Mapping[str, int]) -> NDArray[np.bool_]:
    if example.labels is None:
        raise base.unlabelled(example.where, "labels")
    return _held(example, index) > 0


def _chances(prediction: MultilabelPrediction) -> NDArray[np.float64]:
    return np.array(list(prediction.probabilities.values()))


def _labels(batch: Batch) -> Tensor:
    return torch.as_tensor(batch.target("label", MultilabelTargets).labels)
