"""Detection of failed fine-tuning runs: equal answers to all inputs, or no gain over the baseline.

Fine-tuning on few labels fails in some seeds and not in others: the loss stays at that of the
label frequencies (Devlin et al. 2018, section 4.1; Mosbach et al. 2020, who call a run failed if
it does not beat the majority class, `Task.baseline`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence as Many
from dataclasses import dataclass
from typing import Any

from bothways.core.errors import argument, render
from bothways.core.progress import SILENT, Progress, track
from bothways.core.source import Sequence
from bothways.core.training_module import TrainingModule
from bothways.data.loader import ExampleBudget, ListSource, Loader, unchanged
from bothways.tasks.base import Direction, Metrics
from bothways.training.loop import evaluate_losses
from bothways.training.parallel import Single

SAMPLE = 512  # training sequences that the loss is measured on
_PERFECT = ("accuracy", "exact", "em", "f1")  # 1 if all answers are right
LEARNED, CONVERGED = 0.02, 0.3
"""Smallest decrease of the loss, as a share of the baseline's, in a run that learns; the same in a
run with many classes that is near convergence."""
MANY_CLASSES = math.log(8)
"""The baseline's loss from which a task has many classes: that of eight equally frequent ones."""


@dataclass(frozen=True)
class Failure:
    """A run that learned nothing, nothing that the metrics show, or little.

    Attributes:
        reasons: the signs, each as one clause.
        unfinished: True if the run learned, but was stopped far from convergence.
    """

    reasons: tuple[str, ...]
    unfinished: bool = False

    @property
    def failed(self) -> tuple[str, ...]:
        """The reasons why the run counts as failed; empty if it is only unfinished."""
        return () if self.unfinished else self.reasons

    def __str__(self) -> str:
        verdict = "could learn more" if self.unfinished else "has probably failed"
        advice = "more epochs (training.until) or a higher rate (training.optimizer.lr)"
        if not self.unfinished:
            seed = render(argument(seed=1))
            advice = f"other seeds ({seed}), a lower rate (training.optimizer.lr) or more epochs"
        return f"this run {verdict}: {'; '.join(self.reasons)}. Try {advice}."


class DistinctAnswers:
    """A check for equal predictions, made while they are scored."""

    def __init__(self) -> None:
        self.first: Any = None
        self.count, self.alike = 0, True

    def seen(self, results: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the same results, and compare each answer with the first."""
        for example, prediction in results:
            self.first = prediction.signature if self.count == 0 else self.first
            self.alike = self.alike and prediction.signature == self.first
            self.count += 1
            yield example, prediction


def training_loss(
    training_module: TrainingModule,
    sequences: Many[Sequence],
    microbatch_tokens: int,
    progress: Progress = SILENT,
) -> float:
    """Return the mean loss on an even sample of the training data, without dropout."""
    sample = sequences[:: max(1, len(sequences) // SAMPLE)]
    source, size = ListSource(sample, None), ExampleBudget(len(sample))
    steps = Loader(source, unchanged, size, microbatch_tokens, 0).epoch()
    ones = [dataclasses.replace(s, microbatches=(b,)) for s in steps for b in s.microbatches]
    tracked = track(ones, progress, "measuring the training loss")
    scores = evaluate_losses(training_module, tracked, Single(), precision="fp32")
    return sum(scores.losses.values())


def signs_of_training(loss: float, baseline: Metrics) -> tuple[tuple[str, ...], bool]:
    """Return the sign of a failed or unfinished run in the training loss; True for the latter."""
    expected = baseline.get("loss", 0.0)
    unfinished = expected >= MANY_CLASSES and (1 - LEARNED) * expected > loss
    if expected <= 0 or loss < (1 - (CONVERGED if unfinished else LEARNED)) * expected:
        return (), False
    below = "near" if unfinished else "hardly below" if loss < expected else "not below"
    message = f"{below} that of the majority baseline, {expected:.4f}"
    return (f"its training loss, {loss:.4f}, is {message}",), unfinished


def signs_of_scores(
    metrics: Metrics, baseline: Metrics, metric: str, direction: Direction, answers: DistinctAnswers
) -> tuple[str, ...]:
    """Return the signs of a failed run in the dev metrics; none if one answer is right for all."""
    if baseline.get("accuracy") == 1 or any(metrics.get(name) == 1 for name in _PERFECT):
        return ()
    signs, value, expected = [], metrics[metric], baseline.get(metric)
    better = 1 if direction == "highest" else -1
    if answers.alike and answers.count > 1:
        text = repr(answers.first)
        if isinstance(answers.first, frozenset):  # a set of labels
            text = " and ".join(sorted(map(repr, answers.first))) or "nothing"
        signs.append(f"it answers {text} for all {answers.count:,} dev examples")
    if expected is not None and better * value <= better * expected:
        constant = f"that of a constant answer, {expected:.4f}"
        signs.append(f"its {metric} on the dev data, {value:.4f}, is not better than {constant}")
    return tuple(signs)
