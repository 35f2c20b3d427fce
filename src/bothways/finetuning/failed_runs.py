"""Whether a fine-tuning run has failed: it answers the same for all, or is no better than answering without reading.

Fine-tuning on few labels fails now and then, in some seeds and not in others: the loss stays at that of the label frequencies
(Devlin et al. 2018, section 4.1; Mosbach et al. 2020, who call a run failed if it does not beat the majority class). Three
signs are looked at after a run. What a constant answer reaches is for the task to say (`Definition.baseline`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from bothways.core.learner import Learner
from bothways.core.progress import OnShare, untold
from bothways.core.sequence import Sequence
from bothways.core.stages import followed
from bothways.data.batching import ExampleBudget
from bothways.data.list_source import InOrder, ListSource
from bothways.data.loader import Loader, unchanged
from bothways.tasks.base import Direction, Metrics, Task
from bothways.training.loop import evaluate
from bothways.training.optimizers import BertAdam
from bothways.training.parallel import Single
from bothways.training.run import Training

SAMPLE = 512
"""Training sequences by which the loss is judged."""
_PERFECT = ("accuracy", "exact", "em", "f1")
"""Metrics that are 1 where all is right."""
LEARNED = 0.02
"""The part of the baseline's loss by which a run that learns is at least below it."""
CONVERGED = 0.3
"""The same for a run with many classes that has learned most of what it can."""
MANY_CLASSES = math.log(8)
"""The baseline's loss from which there are many classes: that of eight equally frequent ones."""
FEW_UPDATES = 100
"""Updates below which a run that learned nothing was too short, whatever its rate."""
LOW_RATE, HIGH_RATE, LONG_WARMUP = 2e-5, 1e-3, 0.1
"""The rate advised to runs with a higher one; the rate that is too high for any model; the warm-up
advised to runs with a shorter one."""


@dataclass(frozen=True)
class Failure:
    """A run that learned nothing, nothing that shows, or little of what it could.

    Attributes:
        reasons: the signs, each as one clause.
        training: how it was trained, so that the advice names nothing that was done.
        updates: the number of them; None if unknown.
        unfinished: whether the run learned, but was stopped far from convergence.
    """

    reasons: tuple[str, ...]
    training: Training
    updates: int | None = None
    unfinished: bool = False

    def __str__(self) -> str:
        return self.said()

    @property
    def failed(self) -> tuple[str, ...]:
        """The reasons why the run counts as failed; empty if it is only unfinished."""
        return () if self.unfinished else self.reasons

    def said(self, several: bool = False) -> str:
        """Return the signs and the advice; other seeds are not advised to one of several runs."""
        seeds = () if several or self.unfinished else ("other seeds (--seeds 5)",)
        verdict = "could learn more" if self.unfinished else "has probably failed"
        advice = _listed([*seeds, *self._advice()])
        return f"this run {verdict}: {'; '.join(self.reasons)}. Try {advice}."

    def _advice(self) -> Iterator[str]:
        """Yield what helps and was not done."""
        training, warmup = self.training, getattr(self.training.schedule, "warmup", None)
        rate = getattr(training.optimizer, "lr", 0.0)
        short = self.updates is not None and self.updates < FEW_UPDATES
        if short or self.unfinished:
            made = f"; it made {self.updates:,} updates" if self.updates is not None else ""
            yield f"more epochs (training.until{made})"
            if rate > HIGH_RATE:
                yield f"a lower rate (training.optimizer.lr={LOW_RATE:g})"
            elif self.unfinished:
                yield f"a higher rate (training.optimizer.lr={2 * rate:g})"
            return
        if rate > LOW_RATE:
            yield f"a lower rate (training.optimizer.lr={LOW_RATE:g})"
        if isinstance(warmup, int | float) and warmup < LONG_WARMUP:
            yield f"a longer warm-up (training.schedule.warmup={LONG_WARMUP})"
        yield "more epochs (training.until)"
        if isinstance(training.optimizer, BertAdam):
            yield "the optimizer with bias correction (training.optimizer.kind=adamw)"


def _listed(parts: Many[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


@dataclass
class DistinctAnswers:
    """Whether all predictions that went by say the same.

    Attributes:
        first: the first answer.
        count: of predictions.
        alike: whether all are as the first.
    """

    definition: Task[Any, Any]
    first: Hashable = None
    count: int = 0
    alike: bool = field(default=True)

    def seen(self, results: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """The same results, looked at as they go by."""
        for example, prediction in results:
            answer = self.definition.answer(prediction)
            self.first = answer if self.count == 0 else self.first
            self.alike, self.count = self.alike and answer == self.first, self.count + 1
            yield example, prediction


def training_loss(
    learner: Learner, sequences: Many[Sequence], microbatch_tokens: int, on_share: OnShare = untold
) -> float:
    """The mean loss on training data as the weights are now, without dropout; of an even sample, if there is much."""
    sample = sequences[:: max(1, len(sequences) // SAMPLE)]
    steps = Loader(
        ListSource(sample, InOrder()),
        unchanged,
        ExampleBudget(len(sample)),
        microbatch_tokens,
        0,
    ).epoch()
    parts = [
        dataclasses.replace(step, microbatches=(batch,))
        for step in steps
        for batch in step.microbatches
    ]
    return sum(
        evaluate(learner, followed(parts, on_share), Single(), precision="fp32").losses.values()
    )


def signs_of_training(loss: float, baseline: Metrics) -> tuple[str, ...]:
    """What the loss on training data says against a run."""
    usual = baseline.get("loss")
    if usual is None or usual <= 0 or loss < (1 - LEARNED) * usual:
        return ()
    below = "hardly" if loss < usual else "not"
    return (
        f"its training loss, {loss:.4f}, is {below} below that of the best constant answer, {usual:.4f}",
    )


def signs_of_little_training(loss: float, baseline: Metrics) -> tuple[str, ...]:
    """Return what the loss on training data says of a run with many classes that was too short."""
    usual = baseline.get("loss", 0.0)
    if usual < MANY_CLASSES or loss < (1 - CONVERGED) * usual:
        return ()
    return (
        f"its training loss, {loss:.4f}, is near that of the best constant answer, {usual:.4f}",
    )


def _said(answer: Hashable) -> str:
    return (
        " and ".join(sorted(map(repr, answer))) or "nothing"
        if isinstance(answer, frozenset)
        else repr(answer)
    )


def signs_of_scores(
    metrics: Metrics, baseline: Metrics, metric: str, direction: Direction, answers: DistinctAnswers
) -> tuple[str, ...]:
    """What the dev data says against a run; nothing where one answer is right for all of it."""
    value, usual = metrics[metric], baseline.get(metric)
    worse = usual is not None and (value <= usual if direction == "highest" else value >= usual)
    if baseline.get("accuracy") == 1 or any(metrics.get(name) == 1 for name in _PERFECT):
        return ()
    signs = []
    if answers.alike and answers.count > 1:
        signs.append(f"it answers {_said(answers.first)} for all {answers.count:,} dev examples")
    if worse:
        signs.append(
            f"its {metric} on the dev data, {value:.4f}, is not better than that of a constant answer, {usual:.4f}"
        )
    return tuple(signs)
