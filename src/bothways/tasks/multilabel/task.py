"""Any number of labels for a text or a pair: topics, emotions, codes.

As in classification, but a sigmoid on each output of the dense layer gives the probability of its
label by itself. A label is assigned from its own threshold on, which is chosen on development data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch, LabelTargets
from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError, DataError, Finding, argument, setting
from bothways.core.terminal import listed
from bothways.core.training_module import Loss
from bothways.model.model import Model
from bothways.objectives.losses import binary_cross_entropy
from bothways.tasks import base, text_checks, text_task
from bothways.tasks.columns import cell_of, is_absent, label_of, split_names, unlabelled_marks
from bothways.tasks.metrics import macro_thresholds, micro_thresholds, multilabel_metrics, sigmoid
from bothways.tasks.predictions import MultilabelPrediction
from bothways.text.tokenizer import Tokenizer

EVEN = 0.5
"""The threshold of labels without their own."""
LEAST = 1e-16
"""Probabilities are clipped to this in the loss: one wrong label costs at most 37 nats."""


_FIX = 'Write a list as JSON, such as ["a", "b"], or the labels with separators between them.'
_FLAGS = {"": None, "-1": None, "0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True)
class MultilabelExample(text_task.Texts):
    """One or two texts and their labels, possibly none; `labels` is None where they are unknown."""

    labels: tuple[str, ...] | None = None
    where: str = "an example"


Results = base.Results[MultilabelExample, MultilabelPrediction]


class MultilabelClassifier(base.TaskModel[MultilabelExample, MultilabelPrediction]):
    """A multilabel task with a model that has the head "labels"; see `TaskModel`."""

    task: MultilabelTask
    scale = "labels"

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of labelled texts times that of labels."""
        labelled = ~text_task.targets_of(batch).isnan()
        weight = text_task.window_weight(batch)[:, None]
        return {"label": float((labelled * weight).sum(dtype=torch.float64))}

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the cross-entropy of all decisions.

        Hits are not counted: nearly all labels are absent, so the share of right decisions is high
        for any model.
        """
        weight = text_task.window_weight(batch)[:, None]
        loss = binary_cross_entropy(scores, text_task.targets_of(batch), weight)
        return {"label": replace(loss, hits=None)}

    def decode(
        self, example: MultilabelExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> MultilabelPrediction:
        probabilities = sigmoid(text_task.averaged(outputs))
        assigned = zip(self.labels, probabilities >= self.task.limits(self.labels), strict=True)
        return MultilabelPrediction(
            tuple(name for name, predicted in assigned if predicted),
            dict(zip(self.labels, probabilities.tolist(), strict=True)),
        )


@dataclass(frozen=True)
class MultilabelTask(text_task.LongTextTask[MultilabelPrediction]):
    """Any number of labels for a text or a pair of texts.

    The label column holds lists, or texts such as "red, green". Several columns, whose names are
    given with commas, hold 0 or 1 each: label="toxic,obscene,threat".

    Attributes:
        separator: separator of labels in a text.
        thresholds: for each label, in order, the probability from which it is assigned; empty for
            0.5.
    """

    aliases = "multi-label multi-label-classification"
    model_class = MultilabelClassifier
    metric = "f1_micro"
    metrics = base.directions("f1_micro", "f1_macro", "exact", lowest="loss")
    problem = "multi_label_classification"
    column_table = (text_task.TEXT, replace(text_task.LABEL, several=True))

    separator: str = ","
    thresholds: tuple[float, ...] = ()
    kind: Literal["multilabel"] = "multilabel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            fix = f"Set, for example, {setting('task.separator', ',')}"
            raise ConfigError("must not be empty", where="separator", fix=fix)
        for threshold in self.thresholds:
            require_range("[0, 1]", thresholds=threshold)

    def parse(self, row: base.Row, columns: text_task.TextColumns, where: str) -> MultilabelExample:
        text, text_b = text_task.texts_of_row(row, columns, where)
        labels, column = None, columns.label
        if column is not None and column not in row and "," in column:
            labels = labels_of_columns(row, split_names(column), where)
        elif column is not None:
            labels = parse_labels(cell_of(row, column, where), self.separator, column, where)
        return MultilabelExample(text, text_b, labels, where)

    def answered(self, example: MultilabelExample, answer: object) -> MultilabelExample:
        labels = parse_labels(answer, self.separator, "answers", example.where)
        return replace(example, labels=labels)

    def labels(self, examples: Iterable[MultilabelExample]) -> tuple[str, ...]:
        return text_task.in_order(label for example in examples for label in example.labels or ())

    def stratum(self, example: MultilabelExample) -> Hashable:
        return example.labels

    def check(self, train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
        marks = unlabelled_marks(label for e in (*train, *dev) for label in e.labels or ())
        train, dev = (
            [replace(e, labels=None) if marks.intersection(e.labels or ()) else e for e in some]
            for some in (train, dev)
        )
        findings = text_checks.check_examples(train, dev, self.texts, lambda e: e.labels, marks)
        names, columns = self.labels(train), split_names(self.columns.label)
        if not names:
            fix = "Name another label column, or give more data."
            message = "no training example has a label"
            return [*findings, Finding("labels", "error", message, fix=fix)]
        labels = ((label, e.where) for e in dev for label in e.labels or ())
        findings += text_checks.check_known(names, labels, ": their thresholds stay at 0.5")
        if len(columns) > 1 and (never := sorted({*columns} - {*names})):
            message = f"no training example has the labels {listed(never, 5)}: they are left out"
            findings.append(Finding("labels", "warning", message))
        label_sets = [e.labels for e in train if e.labels is not None]
        counts = Counter(label for some in label_sets for label in {*some})
        mean, none = counts.total() / len(label_sets), sum(not some for some in label_sets)
        message = f"a training example has {mean:.2f} of {len(counts)} labels on average; "
        findings.append(Finding("balance", "note", f"{message}{none} have none"))
        findings += text_checks.check_rare(counts, len(label_sets), "labels")
        always = [label for label, count in counts.items() if count == len(label_sets)]
        if always:
            message = "all training examples have these labels, which teaches nothing: "
            findings.append(Finding("balance", "warning", message + listed(always, 5)))
        # Labels that another separator would cut into several that all occur often.
        for mark in (*";|,\t", "\uff0c", "\u3001", "\uff1b"):  # at last full-width: ， 、 ；
            pieces = {piece.strip() for name in names for piece in name.split(mark)}
            cut = sum(mark in name for name in names)
            if mark != self.separator and cut and len(pieces) < len(names) + cut:
                message = f"{cut} of {len(names)} labels hold {mark!r}, and are cut at "
                message += repr(self.separator)
                # In quotes: a shell ends a command at ";" and begins another at "|".
                fix = f"If it separates labels, set {setting('task.separator', mark)}."
                return [*findings, Finding("labels", "warning", message, fix=fix)]
        return findings

    def target(self, example: MultilabelExample, index: Mapping[str, int]) -> LabelTargets:
        return LabelTargets(_held(example, index)[None].astype(np.float32))

    def limits(self, labels: Many[str]) -> NDArray[np.float64]:
        """Return the threshold of each label."""
        return np.array(self.thresholds or (EVEN,) * len(labels), dtype=np.float64)

    def score(self, results: Results, labels: Many[str]) -> base.Metrics:
        """Return micro and macro F1, exact matches, and the mean cross-entropy of a decision.

        Labels are assigned by this task's thresholds, whichever the predictions were made with.
        """
        index = {label: position for position, label in enumerate(labels)}
        limits = self.limits(labels)
        correct, errors = np.zeros((2, len(index)), dtype=np.int64)
        count, exact, loss = 0, 0, 0.0
        for example, prediction in results:
            truth = _known(example, index)
            chances = np.array([*prediction.probabilities.values()])
            predicted = chances >= limits
            correct += truth & predicted
            errors += truth ^ predicted
            loss -= float(np.log(np.maximum(np.where(truth, chances, 1 - chances), LEAST)).mean())
            count, exact = count + 1, exact + int((truth == predicted).all())
        if not count:
            raise base.nothing_to_score()
        return {**multilabel_metrics(correct, errors), "exact": exact / count, "loss": loss / count}

    def score_tuned(self, results: Results, labels: Many[str], metric: str) -> base.Metrics:
        """Return the metrics at the best thresholds; at 0.5, an early model assigns no label."""
        collected = list(results)
        return self.tuned(collected, labels, metric).score(collected, labels)

    def grade(
        self, example: MultilabelExample, prediction: MultilabelPrediction, labels: Many[str]
    ) -> float:
        return float(example.labels is not None and set(prediction.labels) == set(example.labels))

    def tuned(self, results: Results, labels: Many[str], metric: str) -> MultilabelTask:
        """Return the task with the thresholds that are best for a metric.

        For "f1_macro" each label has its own best F1; else all decisions have the best micro-F1.
        """
        index = {label: position for position, label in enumerate(labels)}
        pairs = [(_known(e, index), [*p.probabilities.values()]) for e, p in results]
        if not pairs:
            return self
        truth, chances = (np.stack(column) for column in zip(*pairs, strict=True))
        choose = macro_thresholds if metric == "f1_macro" else micro_thresholds
        return replace(self, thresholds=choose(truth.astype(np.int64), chances))

    def baseline(self, examples: Many[MultilabelExample]) -> base.Metrics:
        """Return the metrics of always assigning the most frequent labels; none without labels.

        Their number is the one with the best micro-F1; the loss is the label frequencies'.
        """
        index = {label: number for number, label in enumerate(self.labels(examples))}
        if not index:
            return {}
        truth = np.array([_known(example, index) for example in examples])
        predicted = np.broadcast_to(constant_labels(truth.sum(0), len(truth)), truth.shape)
        share = truth.mean(0)
        loss = -np.log(np.maximum(np.where(truth, share, 1 - share), LEAST)).mean()
        counts = ((truth & predicted).sum(0), (truth ^ predicted).sum(0))
        exact = float((truth == predicted).all(1).mean())
        return {**multilabel_metrics(*counts), "exact": exact, "loss": float(loss)}

    def check_binding(self, model: Model, tokenizer: Tokenizer, labels: Many[str]) -> None:
        if len(self.thresholds) not in {0, len(labels)}:
            message = f"there are {len(self.thresholds)} for {len(labels)} labels"
            fix = "Give one for each label, in order, or none."
            raise ConfigError(message, where="task.thresholds", fix=fix)


def constant_labels(counts: NDArray[np.int64], examples: int) -> NDArray[np.bool_]:
    """Return the labels that the majority baseline has, by micro-F1.

    Args:
        counts: number of examples with each label.
        examples: number of examples.
    """
    # F1 of the k most frequent labels for all n examples: 2·Σ right / (k·n + Σ true)
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
    base.required(example.labels, example.where, "labels")
    return _held(example, index) > 0


def labels_of_columns(row: base.Row, columns: Many[str], location: str) -> tuple[str, ...] | None:
    """Return the labels in a row with a column of 0 and 1 for each label.

    They are unknown (None) if a column is empty or -1, as in the test data of Jigsaw.

    Raises:
        DataError: a column is missing, or its value is neither.
    """
    flags = dict[str, bool | None]()
    for column in columns:
        value = cell_of(row, column, location)
        text = "" if is_absent(value) else str(value).strip().lower()
        flag = text.removesuffix(".0")
        if flag not in _FLAGS or text == ".0":
            message = f"column {column!r} holds {value!r:.80}, not 0 or 1"
            fix = "Write 1 in each column whose label the text has, else 0."
            raise DataError(message, where=location, fix=fix)
        flags[column] = _FLAGS[flag]
    if None in flags.values():
        return None
    return tuple(column for column in columns if flags[column])


def parse_labels(value: Any, separator: str, column: str, location: str) -> tuple[str, ...] | None:
    """Return the labels in a cell: a list, also as JSON, or a text with separators.

    An empty list or text means that the example has no label; null and NaN that it is unknown.

    Raises:
        DataError: an item cannot be a label, or a text is a list in another form than JSON.
    """
    if is_absent(value):
        return None
    if isinstance(value, str):
        text = value.strip()
        fault = f"column {column!r} holds {value[:60]!r}, a printed"
        # Cut at separators, a list as Python or NumPy prints it would give labels with brackets and
        # quotation marks. pandas writes such to .csv files.
        if re.fullmatch(r"\{.*[,:'\"].*\}|\(.*,.*\)", text):
            raise DataError(f"{fault} set, dict or tuple", where=location, fix=_FIX)
        if text.startswith("[") and text.endswith("]"):
            try:
                value = list(json.loads(value))
            except (ValueError, RecursionError):
                message = f"{fault} list that is not JSON"
                raise DataError(message, where=location, fix=_FIX) from None
        elif re.fullmatch(r"[01](?:[\s,;|]+[01]){2,}", text):  # a vector, with any separator
            value = re.findall("[01]", text)
        else:
            value = value.split(separator)
    if isinstance(value, list | tuple):
        flags = {str(item).strip().lower().removesuffix(".0") for item in value}
        # One-hot vectors would be read as the labels 0 and 1, probabilities as labels like "0.7".
        is_one_hot = flags <= {"0", "1", "true", "false"} and len(value) > len(flags)
        if is_one_hot or any(isinstance(item, float) and item % 1 > 0 for item in value):
            kind = "numbers 0 and 1" if is_one_hot else "numbers, also fractions"
            message = f"column {column!r} holds {len(value)} {kind}, not labels"
            columns = argument(label="NAME,NAME")
            fix = f"Give the labels of the text, or a column for each: {columns}."
            raise DataError(message, where=location, fix=fix)
        names = (label_of(item, column, location) for item in value)
        return text_task.in_order(name for name in names if name is not None)
    label = label_of(value, column, location)
    return None if label is None else (label,)
