"""Classification of single texts and of pairs (Devlin et al. 2018, section 4.1 and figure 4a, b).

Idea: the pooled vector of [CLS] goes through dropout and one dense layer to the logits of the classes; everything is trained
together. Data it reads: `Example`s, a text or two and a label. A GLUE task such as CoLA or RTE is one. By choice targets are
smoothed, and classes weighed against their frequency.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.config.checks import require_probability
from bothways.core.errors import ConfigError, DataError
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.core.sequence import Ids, Sequence
from bothways.core.targets import IGNORED, LabelTargets, Targets
from bothways.kernels.cross_entropy import cross_entropy
from bothways.model.head_config import Head, LabelHead
from bothways.model.model import Model
from bothways.objectives.losses import weighted_cross_entropy
from bothways.tasks.metrics import classification_metrics
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.task import Direction, Metrics, Reading, Task
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.tasks.text_checks import Texts, check_examples
from bothways.tasks.text_examples import (
    NOT_NAMED,
    TextColumns,
    TextExample,
    example_of,
    in_order,
    label_names,
    open_examples,
)
from bothways.text.template import Template, assemble
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ClassificationTask(Task[TextExample, ClassPrediction]):
    """One of several classes for a text or a pair of texts.

    Attributes:
        columns: where texts and labels are.
        smoothing: the share of every target that is spread evenly over all classes; metrics leave it out, the loss too.
        weighting: of the classes in training: "equal", "balanced", or a weight above 0 for each label in their order. Balanced
            weights are counted when training data is read, which then is read twice, and stand here afterwards; for examples
            in memory give `balanced(examples)`.
    """

    metric: ClassVar[str] = "accuracy"
    problem: ClassVar[Literal["single_label_classification"]] = "single_label_classification"

    columns: TextColumns = NOT_NAMED
    smoothing: float = 0.0
    weighting: Literal["equal", "balanced"] | tuple[float, ...] = "equal"
    kind: Literal["classify"] = "classify"

    def __post_init__(self) -> None:
        require_probability(smoothing=self.smoothing)
        if isinstance(self.weighting, tuple) and not all(
            0 < weight < math.inf for weight in self.weighting
        ):
            raise ConfigError(
                f"must be numbers above 0, not {list(self.weighting)}", where="weighting"
            )

    def read(
        self, source: str, asked: TextColumns | None = None, *, labelled: bool = True
    ) -> Reading[TextExample]:
        """As `Definition.read`; while reading, DataError for a row without a column or with a text that is no text."""
        table, chosen = open_examples(
            source, asked or NOT_NAMED, usual=self.columns, labelled=labelled
        )
        definition = self.with_columns(chosen)
        if labelled and self.weighting == "balanced":
            definition = dataclasses.replace(
                definition, weighting=balanced(example_of(row, chosen) for row in table.rows)
            )
            table, _ = open_examples(source, chosen)
        return Reading(definition, (example_of(row, chosen) for row in table.rows), table.share)

    def labels(self, examples: Iterable[TextExample]) -> tuple[str, ...]:
        """The labels that occur: whole numbers by value, then texts by their characters."""
        return label_names(examples)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """An output for each label."""
        return (LabelHead(max(1, len(labels)), dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """ "f1" is of two classes."""
        known: dict[str, Direction] = {
            "accuracy": "highest",
            "f1_macro": "highest",
            "mcc": "highest",
            "loss": "lowest",
        }
        return known | {"f1": "highest"} if len(labels) == 2 else known

    def texts(self, example: TextExample) -> tuple[str, ...]:
        """One text or two."""
        return (example.text,) if example.text_b is None else (example.text, example.text_b)

    def check(self, train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
        """Rows, labels, their balance, and what training and development data share."""
        return check_examples(train, dev)

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """[CLS] A [SEP] or [CLS] A [SEP] B [SEP], cut as Google's run_classifier.py cuts."""
        index = {label: place for place, label in enumerate(labels)}
        targets = [
            LabelTargets(np.array([_index(example, index)], dtype=np.int64)) for example in examples
        ]
        return encode_texts(examples, targets, tokenizer, length)

    def baseline(self, train: Many[TextExample], scored: Many[TextExample]) -> Metrics:
        """The most frequent class for all; for the loss, each class by its share, unless targets are smoothed or weighed."""
        counts = Counter(example.label for example in train)
        index = {label: place for place, label in enumerate(self.labels(train))}
        most = max(index, key=counts.__getitem__)
        confusion, loss = np.zeros((len(index), len(index)), dtype=np.int64), 0.0
        for example in scored:
            confusion[_index(example, index), index[most]] += 1
            loss -= float(np.log(counts[example.label] / counts.total()))
        own = self.smoothing == 0 and self.weighting == "equal"
        return classification_metrics(confusion) | ({"loss": loss / len(scored)} if own else {})

    def answer(self, prediction: ClassPrediction) -> str:
        """The label."""
        return prediction.label

    def task(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> Classifier:
        """With a model that has the head "labels"."""
        return Classifier(self, model, tokenizer, labels, length)


class Classifier(TaskLearner[TextExample, ClassPrediction]):
    """A model with the head "labels", as a task; arguments as `Task`.

    Raises:
        ConfigError: another number of weights than labels, or balanced weights that nobody has counted.
    """

    def __init__(
        self,
        definition: ClassificationTask,
        model: Model,
        tokenizer: Tokenizer,
        labels: Many[str],
        length: int,
    ) -> None:
        super().__init__(definition, model, tokenizer, labels, length)
        self._smoothing, self._equal = definition.smoothing, definition.weighting == "equal"
        self._classes = torch.tensor(_weights(definition, self.labels), dtype=torch.float64)

    def weights(self, batch: Batch) -> dict[str, float]:
        """The weights of the labels that there are, together; where classes are equal, the number of labelled sequences."""
        known = _labels(batch)[_labels(batch) != IGNORED]
        return {"label": float(len(known)) if self._equal else float(self._classes[known].sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The cross-entropy of the labels; with weights for the classes hits are not counted, since weights are no numbers."""
        logits, labels = self.logits(batch), _labels(batch)
        if self._equal and self._smoothing == 0:
            return {"label": cross_entropy(logits, labels)}
        loss = weighted_cross_entropy(
            logits, labels, self._classes.to(logits.device), self._smoothing
        )
        return {"label": loss if self._equal else dataclasses.replace(loss, hits=None)}

    def logits(self, batch: Batch) -> Float[Tensor, "sequences labels"]:
        """One logit per label for each sequence."""
        return self.model.read("labels", batch)

    def outputs(self, batch: Batch) -> list[Output]:
        """The logits of each sequence `(labels)`."""
        return list(self.logits(batch).float().cpu().numpy())

    def decode(self, example: TextExample, outputs: Many[Output]) -> ClassPrediction:
        """The softmax of the logits."""
        (logits,) = outputs
        exponentials = np.exp(logits.astype(np.float64) - logits.max())
        probabilities = (exponentials / exponentials.sum()).tolist()
        index = int(logits.argmax())
        return ClassPrediction(
            self.labels[index], index, dict(zip(self.labels, probabilities, strict=True))
        )

    def score(self, results: Iterable[tuple[TextExample, ClassPrediction]]) -> Metrics:
        """Accuracy, F1, Matthews correlation and mean cross-entropy ("loss", in nats), neither smoothed nor weighed.

        Raises:
            DataError: an example without a label or with one that is none of the model's; no example at all.
        """
        index = {label: place for place, label in enumerate(self.labels)}
        confusion, loss = np.zeros((len(index), len(index)), dtype=np.int64), 0.0
        for example, prediction in results:
            if example.label is None:
                raise DataError(
                    "has no label, so it cannot be scored",
                    where=example.where,
                    fix="Add it, or use predict.",
                )
            confusion[_index(example, index), prediction.index] += 1
            loss -= float(
                np.log(max(prediction.probabilities[example.label], np.finfo(np.float64).tiny))
            )
        if not confusion.any():
            raise DataError("there is no example to score", fix="Give at least one.")
        return {**classification_metrics(confusion), "loss": loss / float(confusion.sum())}

    def grade(self, example: TextExample, prediction: ClassPrediction) -> float:
        """1 for the right label."""
        return float(prediction.label == example.label)


def encode_texts(
    examples: Many[Texts], targets: Many[Targets], tokenizer: Tokenizer, length: int
) -> list[EncodedExample]:
    """Single texts and pairs, each with its target under the name "label"; at most `length` tokens with specials."""
    firsts = tokenizer.encode([example.text for example in examples])
    seconds = iter(
        tokenizer.encode([example.text_b for example in examples if example.text_b is not None])
    )
    return [
        _input(a, None if example.text_b is None else next(seconds), target, tokenizer, length)
        for example, a, target in zip(examples, firsts, targets, strict=True)
    ]


def _input(
    a: Ids, b: Ids | None, target: Targets, tokenizer: Tokenizer, length: int
) -> EncodedExample:
    bare, cut = fit_to_length(a, b, tokenizer.template, length)
    global_tokens = np.arange(len(bare)) == 0  # what the head reads, in Longformer
    whole = Sequence(
        bare.ids, bare.segments, {"label": target}, global_attention_mask=global_tokens
    )
    return EncodedExample((whole,), len(a) + (0 if b is None else len(b)), cut)


def fit_to_length(a: Ids, b: Ids | None, template: Template, length: int) -> tuple[Sequence, int]:
    """A text or a pair with its special tokens, at most `length` in all, and how many tokens were cut."""
    if b is None:
        keep = min(len(a), length - template.single)
        return assemble(a[:keep], None, template), len(a) - keep
    first, second = truncated(len(a), len(b), length - template.pair)
    return assemble(a[:first], b[:second], template), len(a) + len(b) - first - second


def truncated(a: int, b: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay where `room` tokens fit: the longer loses its last one, of equals the second.

    Source: `_truncate_seq_pair` in google-research/bert run_classifier.py, in closed form.
    """
    if a + b <= room:
        return a, b
    if a <= (room + 1) // 2:
        return a, room - a
    if b <= room // 2:
        return room - b, b
    return (room + 1) // 2, room // 2


def _index(example: TextExample, index: Mapping[str, int]) -> int:
    if example.label is None:
        return IGNORED
    if example.label not in index:
        what = f"label {example.label!r} is none of the model's: {', '.join(index)}"
        raise DataError(
            what,
            where=example.where,
            fix="Give data with the labels that the model was trained on.",
        )
    return index[example.label]


def _labels(batch: Batch) -> torch.Tensor:
    return cast(torch.Tensor, cast(LabelTargets, batch.targets["label"]).labels)


def balanced(examples: Iterable[TextExample]) -> tuple[float, ...]:
    """n / (classes · count) for each label in order, so that all classes weigh the same together and the mean weight is 1.

    Source: scikit-learn, `class_weight="balanced"`; King and Zeng 2001.
    """
    counts = Counter(example.label for example in examples if example.label is not None)
    return tuple(counts.total() / (len(counts) * counts[label]) for label in in_order(counts))


def _weights(definition: ClassificationTask, labels: Many[str]) -> tuple[float, ...]:
    weighting, where = definition.weighting, "task.weighting"
    if weighting == "equal":
        return (1.0,) * len(labels)
    if weighting == "balanced":
        what = "balanced weights are counted when training data is read, and none was read"
        raise ConfigError(
            what, where=where, fix="For examples in memory give weighting=balanced(examples)."
        )
    if len(weighting) != len(labels):
        what = f"there are {len(weighting)} for {len(labels)} labels ({', '.join(labels)})"
        raise ConfigError(what, where=where, fix="Give one for each label, in this order.")
    return weighting
