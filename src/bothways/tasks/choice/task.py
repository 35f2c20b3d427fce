"""Multiple choice: which of several endings follows (Devlin et al. 2018, section 4.4, on SWAG).

Idea: each choice is a pair, [CLS] context [SEP] ending [SEP]; a vector, the only new parameters, gives each pair a score from
its pooled vector, and a softmax over the choices of one question makes probabilities of the scores. The choices of a question
are one sequence of several parts, so that they share a batch; their number may differ from question to question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import DataError
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.core.sequence import Ids, Sequence
from bothways.core.targets import IGNORED, ChoiceTargets
from bothways.model.head_config import ChoiceHead, Head
from bothways.model.model import Model
from bothways.objectives.losses import choice_cross_entropy
from bothways.tasks.choice.checks import check_choices
from bothways.tasks.choice.examples import (
    NO_COLUMNS,
    ChoiceColumns,
    ChoiceExample,
    open_choices,
    read_choices,
)
from bothways.tasks.classification.task import fit_to_length, truncated
from bothways.tasks.predictions import ChoicePrediction
from bothways.tasks.task import Direction, Metrics, Reading, Task
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.text.template import Template
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChoiceTask(Task[ChoiceExample, ChoicePrediction]):
    """One of the endings of a context.

    Attributes:
        columns: where contexts, endings and labels are.
    """

    metric: ClassVar[str] = "accuracy"
    window: ClassVar[int] = 1024

    columns: ChoiceColumns = NO_COLUMNS
    kind: Literal["choice"] = "choice"

    def read(
        self, source: str, asked: ChoiceColumns | None = None, *, labelled: bool = True
    ) -> Reading[ChoiceExample]:
        """As `Definition.read`; while reading, DataError for a row without a column or with what is no ending or label."""
        table, chosen = open_choices(source, asked or NO_COLUMNS, self.columns, labelled)
        return Reading(self.with_columns(chosen), read_choices(table, chosen), table.share)

    def labels(self, examples: Iterable[ChoiceExample]) -> tuple[str, ...]:
        """None: outputs are endings, and those are each question's own."""
        return ()

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """One score for each choice."""
        return (ChoiceHead(dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Accuracy and loss."""
        return {"accuracy": "highest", "loss": "lowest"}

    def texts(self, example: ChoiceExample) -> tuple[str, ...]:
        """The context and the endings."""
        return example.context, *example.endings

    def check(self, train: Many[ChoiceExample], dev: Many[ChoiceExample]) -> list[Finding]:
        """Endings, labels, their balance, and what training and development data share."""
        return check_choices(train, dev)

    def encode(
        self, examples: Many[ChoiceExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """A sequence for each example: its choices, each a pair of at most `length` tokens, cut as pairs are.

        A label that is the place of no ending is as none here, and for `check` and `score` to refuse.
        """
        contexts = tokenizer.encode([example.context for example in examples])
        endings = iter(
            tokenizer.encode([ending for example in examples for ending in example.endings])
        )
        return [
            _input(example, context, [next(endings) for _ in example.endings], tokenizer, length)
            for example, context in zip(examples, contexts, strict=True)
        ]

    def baseline(self, train: Many[ChoiceExample], scored: Many[ChoiceExample]) -> Metrics:
        """The place that is right most often; for the loss, all endings of a question alike."""
        most = Counter(example.label for example in train).most_common(1)[0][0]
        loss = float(np.mean([np.log(len(example.endings)) for example in scored]))
        return {
            "accuracy": sum(example.label == most for example in scored) / len(scored),
            "loss": loss,
        }

    def answer(self, prediction: ChoicePrediction) -> int:
        """The place of the ending."""
        return prediction.index

    def task(self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int) -> Chooser:
        """With a model that has the head "choice"."""
        return Chooser(self, model, tokenizer, labels, length)


class Chooser(TaskLearner[ChoiceExample, ChoicePrediction]):
    """A model with the head "choice", as a task."""

    def weights(self, batch: Batch) -> dict[str, float]:
        """The number of questions with a label."""
        return {"label": float((_tensor(_targets(batch).labels) != IGNORED).sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The cross-entropy among the choices of each question."""
        counts, labels = _tensor(_targets(batch).counts), _tensor(_targets(batch).labels)
        return {"label": choice_cross_entropy(self.scores(batch), counts, labels)}

    def scores(self, batch: Batch) -> Float[Tensor, " choices"]:
        """One score for each choice, question after question."""
        result: Tensor = self.model.read("choice", batch)
        return result[:, 0]

    def outputs(self, batch: Batch) -> list[Output]:
        """The scores of each question `(its choices)`."""
        ends = _tensor(_targets(batch).counts).cpu().numpy().cumsum()
        return np.split(self.scores(batch).float().cpu().numpy(), ends[:-1])

    def decode(self, example: ChoiceExample, outputs: Many[Output]) -> ChoicePrediction:
        """The softmax of the scores."""
        (scores,) = outputs
        exponentials = np.exp(scores.astype(np.float64) - scores.max())
        index = int(scores.argmax())
        return ChoicePrediction(
            index, example.endings[index], tuple((exponentials / exponentials.sum()).tolist())
        )

    def score(self, results: Iterable[tuple[ChoiceExample, ChoicePrediction]]) -> Metrics:
        """Accuracy and mean cross-entropy ("loss", in nats).

        Raises:
            DataError: an example without a label or with one that is the place of no ending; no example at all.
        """
        count, right, loss = 0, 0, 0.0
        for example, prediction in results:
            label = _known(example)
            count, right = count + 1, right + int(prediction.index == label)
            loss -= float(np.log(max(prediction.probabilities[label], np.finfo(np.float64).tiny)))
        if not count:
            raise DataError("there is no example to score", fix="Give at least one.")
        return {"accuracy": right / count, "loss": loss / count}

    def grade(self, example: ChoiceExample, prediction: ChoicePrediction) -> float:
        """1 for the right ending."""
        return float(prediction.index == example.label)


def _input(
    example: ChoiceExample, context: Ids, endings: Many[Ids], tokenizer: Tokenizer, length: int
) -> EncodedExample:
    if not endings:
        raise DataError(
            "has no ending to choose from",
            where=example.where,
            fix="Complete the row, or take it out.",
        )
    bare, cuts = zip(
        *(fit_to_length(context, ending, tokenizer.template, length) for ending in endings),
        strict=True,
    )
    right = example.label if example.label in range(len(endings)) else IGNORED
    targets = ChoiceTargets(
        np.array([len(endings)], dtype=np.int64), np.array([right], dtype=np.int64)
    )
    ids, segments = (
        np.concatenate([s.ids for s in bare]),
        np.concatenate([s.segments for s in bare]),
    )
    parts = tuple(len(s) for s in bare)
    global_tokens = np.concatenate(
        [_ending(context, ending, tokenizer.template, length) for ending in endings]
    )
    whole = Sequence(ids, segments, {"label": targets}, parts, global_tokens)
    return EncodedExample(
        (whole,), sum(len(context) + len(ending) for ending in endings), sum(cuts)
    )


def _ending(context: Ids, ending: Ids, template: Template, length: int) -> NDArray[np.bool_]:
    """True for the tokens of the ending in its pair, and for those behind it: the global ones, in Longformer."""
    first, second = truncated(len(context), len(ending), length - template.pair)
    before = len(template.first) + first + len(template.between)
    return np.arange(before + second + len(template.last)) >= before


def _known(example: ChoiceExample) -> int:
    if example.label is None:
        raise DataError(
            "has no label, so it cannot be scored",
            where=example.where,
            fix="Add it, or use predict.",
        )
    if not 0 <= example.label < len(example.endings):
        what = f"label {example.label} is the place of none of the {len(example.endings)} endings"
        raise DataError(
            what,
            where=example.where,
            fix="A label is the place of the right ending, counted from 0.",
        )
    return example.label


def _targets(batch: Batch) -> ChoiceTargets:
    return cast(ChoiceTargets, batch.targets["label"])


def _tensor(values: object) -> Tensor:
    return cast(Tensor, values)
