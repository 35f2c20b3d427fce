"""Classification of single texts and of pairs (Devlin et al. 2018, section 4.1 and figure 4a, b).

Idea: the pooled vector of [CLS] goes through dropout and one dense layer to the logits of the classes; everything is trained
together. Data it reads: `Example`s, a text or two and a label. A GLUE task such as CoLA or RTE is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.batch import IGNORED, Batch, LabelTargets
from bothways.core.errors import ConfigError, DataError
from bothways.core.loss import Loss
from bothways.core.sequence import Ids, Sequence
from bothways.model.heads import Model
from bothways.objectives.losses import cross_entropy
from bothways.tasks.examples import Example
from bothways.tasks.metrics import classification
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.task import Input, Metrics, Output, Task
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer

SPECIALS_SINGLE, SPECIALS_PAIR = 2, 3
"""[CLS] A [SEP], and [CLS] A [SEP] B [SEP]."""


class Classify(Task[Example, ClassPrediction]):
    """A model with the heads "pooler" and "labels", as a task.

    Args:
        model: the encoder with its heads.
        tokenizer: of its ids.
        labels: names of the outputs, in order.
        length: the longest sequence, specials included; what is longer is cut.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int) -> None:
        super().__init__()
        _check_length(length, model.config.position.most)
        self.model, self.tokenizer = model, tokenizer
        self.labels, self.length = tuple(labels), length

    def encode(self, examples: Many[Example]) -> list[Input]:
        """[CLS] A [SEP] or [CLS] A [SEP] B [SEP].

        Raises:
            DataError: a label that is none of the model's.
        """
        return encode(examples, self.tokenizer, self.labels, self.length)

    def weights(self, batch: Batch) -> dict[str, float]:
        """The number of labelled sequences."""
        return {"label": float((_labels(batch) != IGNORED).sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The cross-entropy of the labels."""
        return {"label": cross_entropy(self.logits(batch), _labels(batch), self.weights(batch)["label"])}

    def logits(self, batch: Batch) -> Float[Tensor, "sequences labels"]:
        """One logit per label for each sequence."""
        heads = self.model.heads
        result: Tensor = heads["labels"](heads["pooler"](self.model.encoder(batch).last, batch.layout))
        return result

    def outputs(self, batch: Batch) -> list[Output]:
        """The logits of each sequence `(labels)`."""
        return list(self.logits(batch).float().cpu().numpy())

    def decode(self, example: Example, outputs: Many[Output]) -> ClassPrediction:
        """The softmax of the logits."""
        (logits,) = outputs
        exponentials = np.exp(logits.astype(np.float64) - logits.max())
        probabilities = (exponentials / exponentials.sum()).tolist()
        index = int(logits.argmax())
        return ClassPrediction(self.labels[index], index, dict(zip(self.labels, probabilities, strict=True)))

    def score(self, results: Iterable[tuple[Example, ClassPrediction]]) -> Metrics:
        """Accuracy, F1, Matthews correlation and mean cross-entropy ("loss", in nats).

        Raises:
            DataError: an example without a label or with one that is none of the model's; no example at all.
        """
        index = {label: place for place, label in enumerate(self.labels)}
        confusion, loss = np.zeros((len(index), len(index)), dtype=np.int64), 0.0
        for example, prediction in results:
            if example.label is None:
                raise DataError("has no label, so it cannot be scored", where=example.where, fix="Add it, or use predict.")
            confusion[_index(example, index), prediction.index] += 1
            loss -= float(np.log(max(prediction.probabilities[example.label], np.finfo(np.float64).tiny)))
        if not confusion.any():
            raise DataError("there is no example to score", fix="Give at least one.")
        return {**classification(confusion), "loss": loss / float(confusion.sum())}


def encode(examples: Many[Example], tokenizer: Tokenizer, labels: Many[str], length: int) -> list[Input]:
    """Examples → what a classifier reads, cut to `length` tokens as Google's run_classifier.py cuts.

    Raises:
        DataError: a label that is none of `labels`.
    """
    index = {label: place for place, label in enumerate(labels)}
    firsts = tokenizer.encode([example.text for example in examples])
    paired = [example.text_b for example in examples if example.text_b is not None]
    seconds = iter(tokenizer.encode(paired))
    return [
        _input(a, None if example.text_b is None else next(seconds), _index(example, index), tokenizer, length)
        for example, a in zip(examples, firsts, strict=True)
    ]


def _input(a: Ids, b: Ids | None, label: int, tokenizer: Tokenizer, length: int) -> Input:
    if b is None:
        keep, tokens = (min(len(a), length - SPECIALS_SINGLE), 0), len(a)
    else:
        keep, tokens = truncated(len(a), len(b), length - SPECIALS_PAIR), len(a) + len(b)
    bare = assemble(a[: keep[0]], None if b is None else b[: keep[1]], tokenizer.specials)
    targets = {"label": LabelTargets(np.array([label], dtype=np.int64))}
    return Input((Sequence(bare.ids, bare.segments, targets),), tokens, tokens - sum(keep))


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


def _index(example: Example, index: Mapping[str, int]) -> int:
    if example.label is None:
        return IGNORED
    if example.label not in index:
        what = f"label {example.label!r} is none of the model's: {', '.join(index)}"
        raise DataError(what, where=example.where, fix="Give data with the labels that the model was trained on.")
    return index[example.label]


def _labels(batch: Batch) -> torch.Tensor:
    return cast(torch.Tensor, cast(LabelTargets, batch.targets["label"]).labels)


def _check_length(length: int, positions: int) -> None:
    if not SPECIALS_PAIR + 2 <= length <= positions:
        what = f"must be from {SPECIALS_PAIR + 2} to the encoder's {positions} positions, not {length}"
        raise ConfigError(what, where="length", fix=f"Set length={min(max(length, SPECIALS_PAIR + 2), positions)}.")
