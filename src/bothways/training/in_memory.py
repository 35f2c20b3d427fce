"""A run in memory, in this process alone: no folder and no records; it ends with the weights that were best.

`bothways.training.run` is the same with a folder, checkpoints and ranks.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bothways.core.learner import Learner
from bothways.core.source import TrainingStep
from bothways.training.checkpoint import Best
from bothways.training.early_stopping import EarlyStopping, Metrics
from bothways.training.loop import fit
from bothways.training.meter import Meter
from bothways.training.optimizers import ParameterRules, build_optimizer, same_for_all
from bothways.training.parallel import Single
from bothways.training.run import Training
from bothways.training.schedules import factor
from bothways.training.state import RunState


@dataclass(frozen=True)
class InMemoryResult:
    """What a run came to.

    Attributes:
        progress: at the end.
        history: (epochs, metrics) of every evaluation.
        metrics: of the weights that were best; empty without evaluations.
    """

    progress: RunState
    history: tuple[tuple[float, Metrics], ...]
    metrics: Metrics


def train_in_memory(
    learner: Learner,
    steps: Iterable[TrainingStep],
    training: Training,
    best: Best,
    evaluation: Callable[[], Metrics] | None,
    *,
    rules: ParameterRules = same_for_all,
    on_step: Callable[[RunState], None] = lambda progress: None,
) -> InMemoryResult:
    """Train from the start; the learner ends with its best weights, or without an evaluation with its last.

    Args:
        learner: on its device.
        steps: from the beginning of the data on.
        training: how, and how often to evaluate; the last weights are evaluated in any case.
        best: the metric by which weights are chosen and patience counts; each evaluation has it.
        evaluation: metrics of the learner as it is.
        rules: what holds for single parameters.
        on_step: called after each step, for a progress bar.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: the schedule does not fit the run.
    """
    held = _Held(learner, training, best, evaluation)

    def after(progress: RunState, meter: Meter) -> bool:
        """Evaluate if that is due; whether to stop."""
        held.after(progress)
        on_step(progress)
        return held.waiting.over

    progress = fit(
        learner,
        steps,
        build_optimizer(training.optimizer, learner.trained_parameters(), rules),
        factor(training.schedule, training.until),
        Single(),
        until=training.until,
        progress=RunState(),
        on_step=after,
        precision=training.precision,
        clip_norm=training.clip_norm,
    )
    return held.conclude(progress)


class _Held:
    """Evaluates a learner when that is due, and holds the weights that were best."""

    def __init__(
        self,
        learner: Learner,
        training: Training,
        best: Best,
        evaluation: Callable[[], Metrics] | None,
    ) -> None:
        self.waiting = EarlyStopping(training.early_stopping, best)
        self._learner, self._training, self._best, self._evaluation = (
            learner,
            training,
            best,
            evaluation,
        )
        self._history: list[tuple[float, Metrics]] = []
        self._metrics: Metrics = {}
        self._state: dict[str, Any] = {}
        self._before = self._evaluated = RunState()

    def after(self, progress: RunState) -> None:
        """Evaluate, if that is due after this step."""
        every, before, self._before = self._training.evaluate, self._before, progress
        if every is not None and progress.passed(every, before):
            self._evaluate(progress)

    def _evaluate(self, progress: RunState) -> None:
        if self._evaluation is None:
            return
        metrics, self._evaluated = self._evaluation(), progress
        self._history.append((progress.epochs, metrics))
        value = metrics[self._best.metric]
        self.waiting.note(value)
        if not self._metrics or self._best.prefers(value, self._metrics[self._best.metric]):
            self._metrics, self._state = metrics, copy.deepcopy(self._learner.state_dict())

    def conclude(self, progress: RunState) -> InMemoryResult:
        """Evaluate the last weights if that is still due, and go back to the best."""
        if self._evaluated.steps != progress.steps:
            self._evaluate(progress)
        if self._state:
            self._learner.load_state_dict(self._state)
        early = self.waiting.over and progress.share(self._training.until) < 1
        return InMemoryResult(
            dataclasses.replace(progress, early=early), tuple(self._history), self._metrics
        )
