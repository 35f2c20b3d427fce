"""Any number of labels for a text or a pair: topics, emotions, codes.

Idea: as in classification, but each output of the dense layer says by itself, through a sigmoid, whether its label holds. From
which probability on a label is given is a threshold of its own, chosen on development data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError, DataError
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.core.targets import MultilabelTargets
from bothways.data.tables import TableRow
from bothways.model.head_config import Head, LabelHead
from bothways.model.model import Model
from bothways.objectives.losses import binary_cross_entropy
from bothways.tasks.classification.task import encode_texts
from bothways.tasks.metrics import best_thresholds, multilabel_metrics
from bothways.tasks.multilabel.checks import check_several
from bothways.tasks.predictions import MultilabelPrediction
from bothways.tasks.task import Direction, Metrics, Reading, Task
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.tasks.text_examples import (
    NOT_NAMED,
    TextColumns,
    cell_of,
    in_order,
    is_absent,
    label_of,
    open_examples,
    text_of,
)
from bothways.text.tokenizer import Tokenizer

EVEN = 0.5
"""The threshold of a label that has none of its own."""
LEAST = 1e-16
"""In the loss no probability counts as nearer to 0 or 1 than this, so that one wrong label costs at most 37 nats."""


@dataclass(frozen=True)
class MultilabelExample:
    """One or two texts and their labels, of which there may be none; `labels` is None where they are not known."""

    text: str
    text_b: str | None = None
    labels: tuple[str, ...] | None = None
    where: str = "an example"


@dataclass(frozen=True)
class MultilabelTask(Task[MultilabelExample, MultilabelPrediction]):
    """Any number of labels for a text or a pair of texts.

    Attributes:
        columns: where texts and labels are. Labels are a list, or a text such as "red, green".
        separator: what stands between labels in a text.
        thresholds: from which probability on each label is given, in their order; empty means one half for each.
    """

    metric: ClassVar[str] = "f1_micro"
    problem: ClassVar[Literal["multi_label_classification"]] = "multi_label_classification"

    columns: TextColumns = NOT_NAMED
    separator: str = ","
    thresholds: tuple[float, ...] = ()
    kind: Literal["multilabel"] = "multilabel"

    def __post_init__(self) -> None:
        if not self.separator:
            raise ConfigError(
                "must not be empty", where="separator", fix="Set task.separator=, say."
            )
        if not all(0 <= threshold <= 1 for threshold in self.thresholds):
            raise ConfigError(
                f"must lie in [0, 1], not {list(self.thresholds)}", where="thresholds"
            )

    def read(
        self, source: str, asked: TextColumns | None = None, *, labelled: bool = True
    ) -> Reading[MultilabelExample]:
        """As `Definition.read`; while reading, DataError for a row without a column, or with a text or labels that are none."""
        table, chosen = open_examples(
            source, asked or NOT_NAMED, usual=self.columns, labelled=labelled
        )
        return Reading(
            self.with_columns(chosen),
            (self._example(row, chosen) for row in table.rows),
            table.share,
        )

    def _example(self, row: TableRow, columns: TextColumns) -> MultilabelExample:
        assert columns.text is not None
        text_b = None if columns.text_b is None else text_of(row, columns.text_b)
        labels = (
            None
            if columns.label is None
            else self._labels(cell_of(row, columns.label), columns.label, row.where)
        )
        return MultilabelExample(text_of(row, columns.text), text_b, labels, row.where)

    def _labels(self, value: Any, column: str, where: str) -> tuple[str, ...] | None:
        """An empty list or text says that no label holds; null and NaN, as a text, too, say nothing."""
        if is_absent(value):
            return None
        if isinstance(value, str):
            value = value.split(self.separator)
        if isinstance(value, list | tuple):
            return in_order(
                name for item in value if (name := label_of(item, column, where)) is not None
            )
        one = label_of(value, column, where)
        return None if one is None else (one,)

    def labels(self, examples: Iterable[MultilabelExample]) -> tuple[str, ...]:
        """The labels that occur: whole numbers by value, then texts by their characters."""
        return in_order(label for example in examples for label in example.labels or ())

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """An output for each label."""
        return (LabelHead(max(1, len(labels)), dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """F1 of all decisions and mean F1 of the labels, the share of examples with exactly their labels, the loss."""
        return {"f1_micro": "highest", "f1_macro": "highest", "exact": "highest", "loss": "lowest"}

    def texts(self, example: MultilabelExample) -> tuple[str, ...]:
        """One text or two."""
        return (example.text,) if example.text_b is None else (example.text, example.text_b)

    def check(self, train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
        """Rows, labels, their balance, and what training and development data share."""
        return check_several(train, dev)

    def encode(
        self,
        examples: Many[MultilabelExample],
        tokenizer: Tokenizer,
        labels: Many[str],
        length: int,
    ) -> list[EncodedExample]:
        """As for classification, with targets `(1, labels)`."""
        index = {label: place for place, label in enumerate(labels)}
        targets = [
            MultilabelTargets(_held(example, index)[None].astype(np.float32))
            for example in examples
        ]
        return encode_texts(examples, targets, tokenizer, length)

    def baseline(self, train: Many[MultilabelExample], scored: Many[MultilabelExample]) -> Metrics:
        """The labels that more than half of the training examples have; for the loss, each label by its share."""
        names = self.labels(train)
        index = {name: place for place, name in enumerate(names)}
        share = np.mean([_known(example, index) for example in train], 0)
        truth = np.array([_known(example, index) for example in scored])
        given = np.broadcast_to(share > EVEN, truth.shape)
        loss = -np.log(np.maximum(np.where(truth, share, 1 - share), LEAST)).mean()
        counts = ((truth & given).sum(0), (truth ^ given).sum(0))
        return {
            **multilabel_metrics(*counts),
            "exact": float((truth == given).all(1).mean()),
            "loss": float(loss),
        }

    def answer(self, prediction: MultilabelPrediction) -> frozenset[str]:
        """The labels."""
        return frozenset(prediction.labels)

    def task(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> MultilabelClassifier:
        """With a model that has the head "labels". ConfigError for another number of thresholds than labels."""
        return MultilabelClassifier(self, model, tokenizer, labels, length)


class MultilabelClassifier(TaskLearner[MultilabelExample, MultilabelPrediction]):
    """A model with the head "labels", as a task; arguments as `Task`."""

    definition: MultilabelTask

    def __init__(
        self,
        definition: MultilabelTask,
        model: Model,
        tokenizer: Tokenizer,
        labels: Many[str],
        length: int,
    ) -> None:
        super().__init__(definition, model, tokenizer, labels, length)
        if len(definition.thresholds) not in {0, len(labels)}:
            what = f"there are {len(definition.thresholds)} for {len(labels)} labels"
            raise ConfigError(
                what, where="task.thresholds", fix="Give one for each label, in order, or none."
            )

    def weights(self, batch: Batch) -> dict[str, float]:
        """The number of labelled sequences times that of labels."""
        return {"label": float((~_labels(batch).isnan()).sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The cross-entropy of every label by itself."""
        return {"label": binary_cross_entropy(self.logits(batch), _labels(batch))}

    def logits(self, batch: Batch) -> Float[Tensor, "sequences labels"]:
        """One logit per label for each sequence."""
        return self.model.read("labels", batch)

    def outputs(self, batch: Batch) -> list[Output]:
        """The logits of each sequence `(labels)`."""
        return list(self.logits(batch).float().cpu().numpy())

    def decode(self, example: MultilabelExample, outputs: Many[Output]) -> MultilabelPrediction:
        """The labels whose sigmoid reaches their threshold."""
        (logits,) = outputs
        probabilities = (0.5 * (1 + np.tanh(logits.astype(np.float64) / 2))).tolist()
        limits = self.definition.thresholds or (EVEN,) * len(self.labels)
        chosen = (
            name
            for name, probability, limit in zip(self.labels, probabilities, limits, strict=True)
            if probability >= limit
        )
        return MultilabelPrediction(
            tuple(chosen), dict(zip(self.labels, probabilities, strict=True))
        )

    def score(self, results: Iterable[tuple[MultilabelExample, MultilabelPrediction]]) -> Metrics:
        """F1 over all decisions and by label, exact matches, mean cross-entropy ("loss", in nats, over examples × labels).

        Raises:
            DataError: examples without labels or with one that is none of the model's; no example at all.
        """
        index = {label: place for place, label in enumerate(self.labels)}
        right, wrong = np.zeros((2, len(index)), dtype=np.int64)
        count, exact, loss = 0, 0, 0.0
        for example, prediction in results:
            truth, given = (
                _known(example, index),
                np.array([name in prediction.labels for name in self.labels]),
            )
            right += truth & given
            wrong += truth ^ given
            p = np.array(list(prediction.probabilities.values()))
            loss -= float(np.log(np.maximum(np.where(truth, p, 1 - p), LEAST)).mean())
            count, exact = count + 1, exact + int((truth == given).all())
        if not count:
            raise DataError("there is no example to score", fix="Give at least one.")
        return {**multilabel_metrics(right, wrong), "exact": exact / count, "loss": loss / count}

    def grade(self, example: MultilabelExample, prediction: MultilabelPrediction) -> float:
        """1 for exactly the right labels."""
        return float(example.labels is not None and set(prediction.labels) == set(example.labels))

    def tuned(
        self, results: Iterable[tuple[MultilabelExample, MultilabelPrediction]]
    ) -> MultilabelTask:
        """With the threshold for each label that has the best F1; 9 bytes of memory for each example and label."""
        index = {label: place for place, label in enumerate(self.labels)}
        pairs = [
            (_known(example, index), np.array(list(made.probabilities.values())))
            for example, made in results
        ]
        if not pairs:
            return self.definition
        truth, probabilities = (np.stack(column) for column in zip(*pairs, strict=True))
        return dataclasses.replace(
            self.definition, thresholds=best_thresholds(truth.astype(np.int64), probabilities)
        )


def _held(example: MultilabelExample, index: Mapping[str, int]) -> NDArray[np.float64]:
    """For each label 1 where the example has it, else 0; NaN where that is not known `(labels)`."""
    if example.labels is None:
        return np.full(len(index), np.nan)
    held = np.zeros(len(index))
    for label in example.labels:
        if label not in index:
            what = f"label {label!r} is none of the model's: {', '.join(index)}"
            raise DataError(
                what,
                where=example.where,
                fix="Give data with the labels that the model was trained on.",
            )
        held[index[label]] = 1
    return held


def _known(example: MultilabelExample, index: Mapping[str, int]) -> NDArray[np.bool_]:
    if example.labels is None:
        raise DataError(
            "has no labels, so it cannot be scored",
            where=example.where,
            fix="Add them, or use predict.",
        )
    return _held(example, index) > 0


def _labels(batch: Batch) -> Tensor:
    return cast(torch.Tensor, cast(MultilabelTargets, batch.targets["label"]).labels)
