"""Detection of failed fine-tuning runs: equal answers to all inputs, or no gain over the baseline.

Fine-tuning on few labels fails in some seeds and not in others: the loss stays at that of the
label frequencies (Devlin et al. 2018, section 4.1; Mosbach et al. 2020, who call a run failed if
it does not beat the majority class). Three signs are checked after a run. The task computes the
metrics of the majority baseline (`Task.baseline`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bothways.core.advice import argument, render
from bothways.core.progress import SILENT, Progress, track
from bothways.core.sequence import Sequence
from bothways.core.terminal import quantity
from bothways.core.training_module import TrainingModule
from bothways.data.batching import ExampleBudget
from bothways.data.list_source import ListSource
from bothways.data.loader import Loader, unchanged
from bothways.finetuning.automatic import BASE_RATE
from bothways.tasks.base import Direction, Metrics
from bothways.training.loop import evaluate_losses
from bothways.training.optimizers import BertAdam
from bothways.training.parallel import Single
from bothways.training.run import Training

SAMPLE = 512
"""Number of training sequences that the loss is measured on."""
_PERFECT = ("accuracy", "exact", "em", "f1")
"""Metrics that are 1 if all answers are right."""
LEARNED = 0.02
"""Smallest decrease of the loss, as a share of the baseline's, in a run that learns."""
CONVERGED = 0.3
"""The same in a run with many classes that is near convergence."""
MANY_CLASSES = math.log(8)
"""The baseline's loss from which a task has many classes: that of eight equally frequent ones."""
FEW_UPDATES = 100
"""Number of updates below which a run that learned nothing was too short at any rate."""
CAUTIOUS, FAR_OFF = 0.4, 4.0
"""The rate advised to a failed run, as a multiple of the usual one (5e-5 → 2e-5); the factor
between two rates from which on one of them is wrong for the model."""
LONG_WARMUP = 0.1
"""The warm-up advised to runs with a shorter one."""
FEW_REPORTS = 8
"""Number of reports below which the course of the training loss is not judged."""
FALLING = 0.2
"""The share of the whole decrease of the loss that the second half of a run has at least if the
loss is still falling."""


@dataclass(frozen=True)
class Failure:
    """A run that learned nothing, nothing that the metrics show, or little.

    Attributes:
        reasons: the signs, each as one clause.
        training: the run's settings; the advice leaves out measures that were taken.
        updates: number of updates; None if unknown.
        unfinished: True if the run learned, but was stopped far from convergence.
        falling: True if the training loss was still falling at the end; None if unknown.
        default_rate: default rate of the model (`automatic.default_rate`).
    """

    reasons: tuple[str, ...]
    training: Training
    updates: int | None = None
    unfinished: bool = False
    falling: bool | None = None
    default_rate: float = BASE_RATE

    def __str__(self) -> str:
        return self.message()

    @property
    def failed(self) -> tuple[str, ...]:
        """The reasons why the run counts as failed; empty if it is only unfinished."""
        return () if self.unfinished else self.reasons

    def message(self, several: bool = False) -> str:
        """Return the signs and the advice; for one of several runs, without the advice of other
        seeds.
        """
        seeds = () if several or self.unfinished else (f"other seeds ({render(argument(seed=1))})",)
        verdict = "could learn more" if self.unfinished else "has probably failed"
        advice = join([*seeds, *self._advice()])
        return f"this run {verdict}: {'; '.join(self.reasons)}. Try {advice}."

    def _advice(self) -> Iterator[str]:
        """Yield measures that help and were not taken."""
        short = self.updates is not None and self.updates < FEW_UPDATES
        if short or self.falling or (self.unfinished and self.falling is None):
            count = (
                "" if self.updates is None else f"; it made {quantity(self.updates, 'update(s)')}"
            )
            loss = "; the loss was still falling" if self.falling else ""
            yield f"more epochs (training.until{count}{loss})"
            yield from self._other_rate(short=True)
            return
        yield from self._other_rate(short=False)
        if self.unfinished:
            return
        warmup = getattr(self.training.schedule, "warmup", None)
        if isinstance(warmup, int | float) and warmup < LONG_WARMUP:
            yield f"a longer warm-up (training.schedule.warmup={LONG_WARMUP})"
        yield "more epochs (training.until)"
        if isinstance(self.training.optimizer, BertAdam):
            yield "the optimizer with bias correction (training.optimizer.kind=adamw)"

    def _other_rate(self, *, short: bool) -> Iterator[str]:
        """Yield a better rate: the usual one if the run's is far from it.

        Otherwise a run that learned is advised a higher one, and a failed one a lower one, unless
        it was too short to blame the rate.
        """
        rate = getattr(self.training.optimizer, "lr", None)
        if not isinstance(rate, int | float):
            return
        if rate > FAR_OFF * self.default_rate:
            yield f"a lower rate (training.optimizer.lr={self.default_rate:g})"
        elif rate < self.default_rate / FAR_OFF:
            yield f"a higher rate (training.optimizer.lr={self.default_rate:g})"
        elif self.unfinished and not self.falling:
            yield f"a higher rate (training.optimizer.lr={2 * rate:g})"
        elif not short and rate > CAUTIOUS * self.default_rate:
            yield f"a lower rate (training.optimizer.lr={CAUTIOUS * self.default_rate:.2g})"


def join(phrases: Many[str]) -> str:
    """Join phrases: "a, b and c"."""
    *start, end = phrases
    return f"{', '.join(start)} and {end}" if start else end


@dataclass
class DistinctAnswers:
    """A check for equal predictions, made while they are scored.

    Attributes:
        answer: signature of the first prediction.
        count: number of predictions.
        alike: True if all signatures equal the first.
    """

    answer: Any = None
    count: int = 0
    alike: bool = field(default=True)

    def seen(self, results: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the same results, and compare each answer with the first."""
        for example, prediction in results:
            signature = prediction.signature
            self.answer = signature if self.count == 0 else self.answer
            self.alike, self.count = self.alike and signature == self.answer, self.count + 1
            yield example, prediction


def training_loss(
    training_module: TrainingModule,
    sequences: Many[Sequence],
    microbatch_tokens: int,
    progress: Progress = SILENT,
) -> float:
    """Return the mean loss on the training data with the present weights, without dropout.

    Of a large data set, an even sample is used.
    """
    sample = sequences[:: max(1, len(sequences) // SAMPLE)]
    source, size = ListSource(sample, None), ExampleBudget(len(sample))
    steps_of_one = [
        dataclasses.replace(step, microbatches=(batch,))
        for step in Loader(source, unchanged, size, microbatch_tokens, 0).epoch()
        for batch in step.microbatches
    ]
    tracked = track(steps_of_one, progress, "measuring the training loss")
    return sum(
        evaluate_losses(training_module, tracked, Single(), precision="fp32").losses.values()
    )


def still_falling(losses: Many[float]) -> bool | None:
    """Detect a training loss that was still falling at the end, by its values in order.

    The second half of the run then has a good part of the whole decrease:
    4.3 … 4.0 … 3.8 → True, 4.3 … 0.5 … 0.5 → False. None for too few values.
    """
    if len(losses) < FEW_REPORTS:
        return None
    size = len(losses) // FEW_REPORTS
    middle = (len(losses) - size) // 2
    begin, middle_mean, end = (
        fmean(losses[start : start + size]) for start in (0, middle, len(losses) - size)
    )
    return begin - end > LEARNED * begin and middle_mean - end > FALLING * (begin - end)


def signs_of_training(loss: float, baseline: Metrics) -> tuple[str, ...]:
    """Return the signs of a failed run in the loss on the training data."""
    expected = baseline.get("loss")
    if expected is None or expected <= 0 or loss < (1 - LEARNED) * expected:
        return ()
    below = "hardly" if loss < expected else "not"
    baseline_loss = f"that of the majority baseline, {expected:.4f}"
    return (f"its training loss, {loss:.4f}, is {below} below {baseline_loss}",)


def signs_of_little_training(loss: float, baseline: Metrics) -> tuple[str, ...]:
    """Return the sign that a run with many classes was too short, by its training loss."""
    expected = baseline.get("loss", 0.0)
    if expected < MANY_CLASSES or loss < (1 - CONVERGED) * expected:
        return ()
    message = f"near that of the majority baseline, {expected:.4f}"
    return (f"its training loss, {loss:.4f}, is {message}",)


def signs_of_scores(
    metrics: Metrics, baseline: Metrics, metric: str, direction: Direction, answers: DistinctAnswers
) -> tuple[str, ...]:
    """Return the signs of a failed run in the dev metrics.

    The result is empty if one answer is right for all dev data.
    """
    value, expected = metrics[metric], baseline.get(metric)
    worse = expected is not None and (
        value <= expected if direction == "highest" else value >= expected
    )
    if baseline.get("accuracy") == 1 or any(metrics.get(name) == 1 for name in _PERFECT):
        return ()
    signs = []
    if answers.alike and answers.count > 1:
        answer = answers.answer
        text = repr(answer)
        if isinstance(answer, frozenset):  # a set of labels
            text = " and ".join(sorted(map(repr, answer))) or "nothing"
        signs.append(f"it answers {text} for all {answers.count:,} dev examples")
    if worse:
        signs.append(
            f"its {metric} on the dev data, {value:.4f}, is not better than that of a constant "
            f"answer, {expected:.4f}"
        )
    return tuple(signs)
