"""Multiple choice: which of several endings follows (Devlin et al. 2018, section 4.4, on SWAG).

Files of SWAG (from its authors or from the Hub), of HellaSwag, and JSON lines with "context",
"endings" and "label" are read without naming columns. CODAH's have no header: context=1,
endings=2,3,4,5, label=6.

Each choice is a pair, [CLS] context [SEP] ending [SEP]. A vector, the only new parameters, scores
each pair from its pooled vector; a softmax over the choices of a question gives probabilities. The
choices of a question are one sequence of several parts, so that they share a batch; their number
may differ between questions.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.batch import IGNORED, Batch, ChoiceTargets
from bothways.core.config.values import is_integer
from bothways.core.errors import DataError, Finding
from bothways.core.source import Sequence
from bothways.core.training_module import Loss
from bothways.model.heads import ChoiceHead, Head
from bothways.objectives.losses import choice_cross_entropy
from bothways.tasks import base, text_checks
from bothways.tasks.base import Columns
from bothways.tasks.columns import Column, TableTask, cell_of, label_of, text_of
from bothways.tasks.metrics import negative_log
from bothways.tasks.predictions import ChoicePrediction
from bothways.tasks.text_task import together
from bothways.text.template import assemble, truncated
from bothways.text.tokenizer import Tokenizer

CONTEXTS = ("context", "sent1", "startphrase", "ctx", "premise", "prompt", "question")
LISTS = ("endings", "choices", "options", "candidate_answers")
LABELS = ("label", "answer", "gold", "target", "correct_answer_idx")
NUMBERED = re.compile(r"(?:ending|choice|option|answer)_?\d+")
_FIX = "A label is the place of the right ending, counted from 0."


@dataclass(frozen=True)
class ChoiceExample:
    """A context, its possible endings, the place of the right one if known, and its source."""

    context: str
    endings: tuple[str, ...]
    label: int | None = None
    where: str = "an example"


@dataclass(frozen=True)
class ChoiceColumns(Columns):
    """The columns of questions; see `Columns`.

    Attributes:
        context: the text before the endings.
        continuation: the beginning of every ending, such as SWAG's "sent2"; absent if `context` is
            given alone.
        endings: a column for each ending, or one column with lists of them.
        label: the place of the right ending, from 0.
    """

    context: str | None = None
    continuation: str | None = None
    endings: tuple[str, ...] = ()
    label: str | None = None


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
        # Questions of 2, 3 and 2 choices end at 2, 5 and 7
        ends = _targets(batch)[0].cpu().numpy().cumsum()
        return np.split(self.scores(batch).float().cpu().numpy(), ends[:-1])

    def decode(
        self, example: ChoiceExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> ChoicePrediction:
        """Return the ending with the highest score, and all probabilities."""
        (scores,) = outputs
        index = int(scores.argmax())
        return ChoicePrediction(index, example.endings[index], tuple(base.softmax(scores).tolist()))


@dataclass(frozen=True)
class ChoiceTask(TableTask[ChoiceExample, ChoicePrediction]):
    """One of the endings of a context.

    Attributes:
        columns: the columns of contexts, endings and labels.
    """

    aliases = "multiple-choice"
    model_class = Chooser
    metric = "accuracy"
    metrics = base.directions("accuracy", lowest="loss")
    window = 1024
    example_input: ClassVar[Any] = {
        "context": "It rained.",
        "endings": ["She took an umbrella.", "She ate."],
    }

    column_table = (
        # SWAG's "startphrase" is "sent1" and "sent2".
        Column(
            "context", "context", CONTEXTS, companion="continuation", pairs=[("sent1", "sent2")],
            shadows=("startphrase",),
        ),
        Column("endings", "endings", LISTS, numbered=NUMBERED),
        Column("label", "label", LABELS, answer=True),
    )  # fmt: skip

    columns: ChoiceColumns = ChoiceColumns()
    kind: Literal["choice"] = "choice"

    def parse(self, row: base.Row, columns: ChoiceColumns, where: str) -> ChoiceExample:
        assert columns.context is not None
        begin = ""
        if columns.continuation is not None:
            begin = text_of(row, columns.continuation, where).strip()
        if len(columns.endings) > 1:
            texts = [text_of(row, column, where) for column in columns.endings]
        else:
            column = columns.endings[0]
            texts = cell_of(row, column, where)
            if not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
                message = f"column {column!r} holds {type(texts).__name__}, not a list of texts"
                fix = "Write a list, or name a column for each ending."
                raise DataError(message, where=where, fix=fix)
        endings = tuple(f"{begin} {text}".strip() for text in texts)
        label = None
        if columns.label is not None:
            value = label_of(cell_of(row, columns.label, where), columns.label, where)
            if value is not None:
                number = value.removesuffix(".0")
                if not is_integer(number.removeprefix("-")):
                    message = f"column {columns.label!r} holds {value!r}, not an ending's place"
                    raise DataError(message, where=where, fix=_FIX)
                label = int(number)
        return ChoiceExample(text_of(row, columns.context, where), endings, label, where)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (ChoiceHead(dropout),)

    def stratum(self, example: ChoiceExample) -> Hashable:
        return example.label

    def texts(self, example: ChoiceExample) -> tuple[str, ...]:
        return example.context, *example.endings

    def check(self, train: Many[ChoiceExample], dev: Many[ChoiceExample]) -> list[Finding]:
        examples = [*train, *dev]
        outside = [
            f"{e.where} ({e.label} of {len(e.endings)})"
            for e in examples
            if e.label is not None and not 0 <= e.label < len(e.endings)
        ]
        short = "example(s) has|have fewer than two endings"
        double = "example(s) has|have the same ending twice"
        balance = text_checks.check_constant(
            counts := Counter(e.label for e in train if e.label is not None)
        )
        if len(counts) == 1:
            fix = "Check the label column; are the endings shuffled?"
            balance = [replace(finding, severity="warning", fix=fix) for finding in balance]
        return [
            *text_checks.check_rows(examples, short, lambda e: len(e.endings) < 2),
            *text_checks.check_rows(
                examples, double, lambda e: len({*e.endings}) < len(e.endings), None, "warning"
            ),
            *text_checks.check_examples(train, dev, self.texts, lambda e: e.label),
            *text_checks.report_rows("labels", outside, "label(s) is|are out of range", _FIX),
            *balance,
        ]

    def encode(
        self, examples: Many[ChoiceExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return one sequence for each example: its choices, pairs of at most `length` tokens.

        A label out of range becomes an absent one: `check` and `score` refuse it.
        """
        contexts = tokenizer.encode([example.context for example in examples])
        endings = iter(tokenizer.encode([text for example in examples for text in example.endings]))
        template, results = tokenizer.template, list[base.EncodedExample]()
        for example, context in zip(examples, contexts, strict=True):
            if not example.endings:
                fix = "Complete the row or remove it."
                raise DataError("has no ending to choose from", where=example.where, fix=fix)
            pairs, tokens, cut = list[Sequence](), 0, 0
            for ending in itertools.islice(endings, len(example.endings)):
                first, second = truncated(len(context), len(ending), length - template.pair)
                pair = assemble(context[:first], ending[:second], template)
                # The tokens from the ending on are global in Longformer.
                begin = len(template.first) + first + len(template.between)
                pairs.append(replace(pair, global_attention_mask=np.arange(len(pair)) >= begin))
                tokens += len(context) + len(ending)
                cut += len(context) - first + len(ending) - second
            label = example.label if example.label in range(len(pairs)) else IGNORED
            count, target = (np.array([number], dtype=np.int64) for number in (len(pairs), label))
            sequence = replace(together(pairs), targets={"label": ChoiceTargets(count, target)})
            results.append(base.EncodedExample((sequence,), tokens, cut))
        return results

    def score(
        self, results: base.Results[ChoiceExample, ChoicePrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return accuracy and mean cross-entropy ("loss", in nats)."""
        count, correct, loss = 0, 0, 0.0
        for example, prediction in results:
            label, endings = base.required(example.label, example.where), len(example.endings)
            if not 0 <= label < endings:
                message = f"label {label} is out of range for {endings} endings"
                raise DataError(message, where=example.where, fix=_FIX)
            count, correct = count + 1, correct + int(prediction.index == label)
            loss += negative_log(prediction.probabilities[label])
        if not count:
            raise base.nothing_to_score()
        return {"accuracy": correct / count, "loss": loss / count}

    def grade(
        self, example: ChoiceExample, prediction: ChoicePrediction, labels: Many[str]
    ) -> float:
        return float(prediction.index == example.label)

    def baseline(self, examples: Many[ChoiceExample]) -> base.Metrics:
        """Return the accuracy of the most frequent index, and the loss of equal probabilities."""
        (_, correct), *_ = Counter(example.label for example in examples).most_common(1)
        loss = float(np.mean([np.log(len(example.endings)) for example in examples]))
        return {"accuracy": correct / len(examples), "loss": loss}


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the number of choices and the label of each question."""
    targets = batch.target("label", ChoiceTargets)
    return torch.as_tensor(targets.counts), torch.as_tensor(targets.labels)
