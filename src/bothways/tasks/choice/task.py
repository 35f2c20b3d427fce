"""Multiple choice: which of several endings follows (Devlin et al. 2018, section 4.4, on SWAG).

Each choice is a pair, [CLS] context [SEP] ending [SEP]. A vector, the only new parameters, scores
each pair from its pooled vector; a softmax over the choices of a question gives probabilities. The
choices of a question are one sequence of several parts, so that they share a batch; their number
may differ between questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import DataError
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.core.sequence import Ids, Sequence
from bothways.core.targets import IGNORED, ChoiceTargets
from bothways.model.heads import ChoiceHead, Head
from bothways.objectives.losses import choice_cross_entropy
from bothways.tasks import base
from bothways.tasks.choice.checks import check_choices
from bothways.tasks.choice.examples import (
    HOW,
    NO_COLUMNS,
    TABLE,
    ChoiceColumns,
    ChoiceExample,
    example_of,
)
from bothways.tasks.columns import choose_columns, open_columns
from bothways.tasks.metrics import negative_log, softmax
from bothways.tasks.predictions import ChoicePrediction
from bothways.text.template import assemble, truncated
from bothways.text.tokenizer import Tokenizer


class Chooser(base.TaskModel[ChoiceExample, ChoicePrediction]):
    """A choice task with a model that has the head "choice"; see `TaskModel`."""

    scale = "choices"

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of questions with a label."""
        return {"label": float((_targets(batch)[1] != IGNORED).sum())}

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the cross-entropy over the choices of each question."""
        return {"label": choice_cross_entropy(scores, *_targets(batch))}

    def scores(self, batch: Batch) -> Float[Tensor, " choices"]:
        """Return one score for each choice, question after question."""
        result: Tensor = self.model.read("choice", batch)
        return result[:, 0]

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return the scores of each question `(its choices)`."""
        ends = _targets(batch)[0].cpu().numpy().cumsum()
        return np.split(self.scores(batch).float().cpu().numpy(), ends[:-1])


@dataclass(frozen=True)
class ChoiceTask(base.Task[ChoiceExample, ChoicePrediction]):
    """One of the endings of a context.

    Attributes:
        columns: the columns of contexts, endings and labels.
    """

    aliases: ClassVar[Many[str]] = ("multiple-choice",)
    model_class: ClassVar[type[Chooser]] = Chooser
    metric: ClassVar[str] = "accuracy"
    window: ClassVar[int] = 1024

    columns: ChoiceColumns = NO_COLUMNS
    kind: Literal["choice"] = "choice"

    def read(
        self, source: str, columns: ChoiceColumns | None = None, *, labelled: bool = True
    ) -> base.Reading[ChoiceExample]:
        """Open a source and stream its examples; see `Task.read`."""
        requested = columns or NO_COLUMNS
        table, selected = open_columns(
            source, TABLE, requested, self.columns, labelled, lambda _: HOW
        )
        return base.Reading.of_table(
            self.with_columns(selected),
            table,
            lambda row: example_of(row.values, selected, row.where),
        )

    def example(self, row: base.Row, *, where: str = "an example") -> ChoiceExample:
        """Return the example in a row; see `Task.example`."""
        columns = choose_columns(TABLE, tuple(row), where, NO_COLUMNS, self.columns, None, HOW)
        return example_of(row, columns, where)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Return the head that scores choices."""
        return (ChoiceHead(dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, base.Direction]:
        """Return accuracy and loss."""
        return {"accuracy": "highest", "loss": "lowest"}

    def stratum(self, example: ChoiceExample) -> Hashable:
        """Return the place of the right ending."""
        return example.label

    def texts(self, example: ChoiceExample) -> tuple[str, ...]:
        """Return the texts of an example."""
        return example.context, *example.endings

    def check(self, train: Many[ChoiceExample], dev: Many[ChoiceExample]) -> list[Finding]:
        """Return the problems of the examples; `dev` may be empty."""
        return check_choices(train, dev)

    def encode(
        self, examples: Many[ChoiceExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return one sequence for each example: its choices, pairs of at most `length` tokens.

        A label out of range becomes an absent one: `check` and `score` refuse it.
        """
        contexts = tokenizer.encode([example.context for example in examples])
        endings = iter(
            tokenizer.encode([ending for example in examples for ending in example.endings])
        )
        return [
            _encode(example, context, [next(endings) for _ in example.endings], tokenizer, length)
            for example, context in zip(examples, contexts, strict=True)
        ]

    def decode(
        self,
        example: ChoiceExample,
        encoded: base.EncodedExample,
        outputs: Many[base.Output],
        tokenizer: Tokenizer,
        labels: Many[str],
    ) -> ChoicePrediction:
        """Return the ending with the highest score, and all probabilities."""
        (scores,) = outputs
        index = int(scores.argmax())
        return ChoicePrediction(index, example.endings[index], tuple(softmax(scores).tolist()))

    def score(
        self, results: Iterable[tuple[ChoiceExample, ChoicePrediction]], labels: Many[str]
    ) -> base.Metrics:
        """Return accuracy and mean cross-entropy ("loss", in nats)."""
        count, correct, loss = 0, 0, 0.0
        for example, prediction in results:
            label = _known(example)
            count, correct = count + 1, correct + int(prediction.index == label)
            loss += negative_log(prediction.probabilities[label])
        if not count:
            raise base.nothing_to_score()
        return {"accuracy": correct / count, "loss": loss / count}

    def grade(
        self, example: ChoiceExample, prediction: ChoicePrediction, labels: Many[str]
    ) -> float:
        """Return 1 for the right ending, else 0."""
        return float(prediction.index == example.label)

    def baseline(self, examples: Many[ChoiceExample]) -> base.Metrics:
        """Return the accuracy of the most frequent index, and the loss of equal probabilities."""
        (_, correct), *_ = Counter(example.label for example in examples).most_common(1)
        loss = float(np.mean([np.log(len(example.endings)) for example in examples]))
        return {"accuracy": correct / len(examples), "loss": loss}


def _encode(
    example: ChoiceExample, context: Ids, endings: Many[Ids], tokenizer: Tokenizer, length: int
) -> base.EncodedExample:
    if not endings:
        fix = "Complete the row or remove it."
        raise DataError("has no ending to choose from", where=example.where, fix=fix)
    template, pairs, ending_masks, kept_tokens = tokenizer.template, [], [], 0
    for ending in endings:
        first, second = truncated(len(context), len(ending), length - template.pair)
        pairs.append(assemble(context[:first], ending[:second], template))
        # The tokens from the ending on are global in Longformer.
        begin = len(template.first) + first + len(template.between)
        ending_masks.append(np.arange(len(pairs[-1])) >= begin)
        kept_tokens += first + second
    target = example.label if example.label in range(len(endings)) else IGNORED
    targets = ChoiceTargets(
        np.array([len(endings)], dtype=np.int64), np.array([target], dtype=np.int64)
    )
    sequence = Sequence(
        np.concatenate([pair.ids for pair in pairs]),
        np.concatenate([pair.segments for pair in pairs]),
        {"label": targets},
        parts=tuple(map(len, pairs)),
        global_attention_mask=np.concatenate(ending_masks),
    )
    tokens = len(context) * len(endings) + sum(map(len, endings))
    return base.EncodedExample((sequence,), tokens, tokens - kept_tokens)


def _known(example: ChoiceExample) -> int:
    if example.label is None:
        raise base.unlabelled(example.where)
    if not 0 <= example.label < len(example.endings):
        message = f"label {example.label} is out of range for {len(example.endings)} endings"
        fix = "A label is the place of the right ending, counted from 0."
        raise DataError(message, where=example.where, fix=fix)
    return example.label


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the number of choices and the label of each question."""
    targets = batch.target("label", ChoiceTargets)
    return torch.as_tensor(targets.counts), torch.as_tensor(targets.labels)
