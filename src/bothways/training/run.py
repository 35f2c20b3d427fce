"""A run in its folder: the loop with its records, evaluations, checkpoints and signals, as every kind of training shares it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError
from bothways.core.learner import Learner
from bothways.core.source import Cursor, TrainingStep
from bothways.runtime.devices import Precision
from bothways.training.checkpoint import Keep, latest, prune, read_checkpoint, save_checkpoint
from bothways.training.durations import Duration, Steps
from bothways.training.early_stopping import EarlyStopping, Evaluation, Metrics
from bothways.training.loop import clock_from, fit
from bothways.training.meter import Meter, StepReport
from bothways.training.optimizers import (
    FusedAdamW,
    OptimizerConfig,
    ParameterRules,
    build_optimizer,
    same_for_all,
)
from bothways.training.parallel import Plan, is_main
from bothways.training.schedules import Schedule, factor
from bothways.training.signals import Interruption
from bothways.training.state import RunState
from bothways.training.trackers import (
    JsonLines,
    Peak,
    Record,
    Speed,
    TensorBoard,
    Terminal,
    Tracker,
    at,
    record,
)


@dataclass(frozen=True)
class Training:
    """How a model is trained, whatever it learns.

    Attributes:
        until: the end of the run.
        clip_norm: the highest global gradient norm; none for no clipping.
        recompute: whether blocks are computed again in the backward pass, in place of being kept: less memory, more time, the
            same update. Recipes hand it to the encoder.
        compiled: whether a compiler makes one program of what a block computes between one attention and the next; on a GPU
            alone. Recipes hand it to the encoder.
        report, evaluate, save: how often; `evaluate` and `save` none for once, at the end.
        keep: which checkpoints stay. Where the best one does, each evaluation is followed by a checkpoint.
        patience: after so many evaluations in a row without a better value of the metric that names the best checkpoint, the
            run ends; none for never.
    """

    until: Duration
    optimizer: OptimizerConfig
    schedule: Schedule
    precision: Precision = "auto"
    clip_norm: float | None = 1.0
    recompute: bool = False
    compiled: bool = False
    report: Duration = field(default_factory=lambda: Steps(10))
    evaluate: Duration | None = None
    save: Duration | None = None
    keep: Keep = field(default_factory=Keep)
    early_stopping: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, "training", early_stopping=self.early_stopping)
        if self.clip_norm is not None and not self.clip_norm > 0:
            what = f"must be greater than 0, not {self.clip_norm:g}"
            raise ConfigError(
                what, where="training.clip_norm", fix="For no clipping, set it to none."
            )


@dataclass(frozen=True)
class TrainingPhase:
    """A part of a run with data of its own, such as sequences of one length.

    Attributes:
        until: where in the run it ends.
        steps: its data, from a cursor on.
    """

    until: Duration
    steps: Callable[[Cursor], Iterable[TrainingStep]]


def train_in_folder(  # noqa: PLR0913 – one independent value per question that a run answers
    learner: Learner,
    phases: Sequence[TrainingPhase],
    training: Training,
    plan: Plan,
    folder: Path,
    *,
    config: Mapping[str, Any],
    evaluation: Evaluation | None = None,
    peak: Peak | None = None,
    rules: ParameterRules = same_for_all,
) -> RunState:
    """Train from the newest checkpoint in the folder, or from the start if there is none; the progress at the end.

    SIGINT and SIGTERM end the run after a step, with a checkpoint: the progress is then short of `training.until`.

    Args:
        learner: on its device; of equal weights on all ranks.
        phases: in order; the last one ends with the run.
        folder: of this run (`training.folder.run_folder`), seen by all ranks.
        config: the resolved configuration, in plain values; a checkpoint with another one is refused.
        evaluation: metrics of the learner as it is, equal on all ranks; tells how far it is.
        peak: what to compare the speed with.
        rules: what holds for single parameters.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        CheckpointError: the newest checkpoint cannot be used.
        ConfigError: the schedule does not fit the run, the metric that names the best checkpoint is not evaluated, or there is
            patience without such a metric.
        ResourceError: a file cannot be written.
    """
    optimizer = build_optimizer(training.optimizer, learner.trained_parameters(), rules)
    schedule, waiting = factor(training.schedule, training.until), _waiting(training, evaluation)
    checkpoints = _Checkpoints(folder, learner, optimizer, plan, config, training.keep)
    progress, metrics = checkpoints.restore(waiting)
    with Interruption() as interruption, _trackers(folder, plan, progress) as trackers:
        clock = clock_from(progress.seconds)
        watch = _Watch(
            training, progress, metrics, trackers, waiting, evaluation, checkpoints, clock
        )
        speed = Speed(training.until, peak)
        speed.mark(progress)

        def on_step(progress: RunState, meter: Meter) -> bool:
            """Do what is due; whether to stop."""
            watch.step(progress, meter, speed)
            return interruption.asked or waiting.over

        def fit_to(phase: TrainingPhase, progress: RunState) -> RunState:
            """Train to the end of a phase."""
            now = dataclasses.replace(progress, seconds=clock())
            return fit(
                learner, phase.steps(now.cursor), optimizer, schedule, plan, until=phase.until, progress=now,
                on_step=on_step, on_rest=lambda report: watch.report(report, speed),
                precision=training.precision, clip_norm=training.clip_norm,
            )  # fmt: skip

        progress = _one_by_one(phases, progress, waiting, fit_to)
        watch.finish(progress)
    return dataclasses.replace(progress, early=waiting.over and progress.share(training.until) < 1)


def _one_by_one(
    phases: Sequence[TrainingPhase],
    progress: RunState,
    waiting: EarlyStopping,
    fit_to: Callable[[TrainingPhase, RunState], RunState],
) -> RunState:
    """Phases from the current one on, until one is left before its end or early stopping ends the run."""
    for later, phase in enumerate(phases[progress.phase :]):
        if waiting.over:
            break
        progress = fit_to(phase, progress.next_phase() if later else progress)
        if progress.share(phase.until) < 1:
            break
    return progress


@dataclass(frozen=True)
class _Checkpoints:
    """Those of a run, in its folder: where it goes on from, and what it leaves there."""

    folder: Path
    learner: Learner
    optimizer: FusedAdamW
    plan: Plan
    config: Mapping[str, Any]
    keep: Keep

    def restore(self, waiting: EarlyStopping) -> tuple[RunState, Metrics]:
        """Go back to the newest, in what is waited for too; the progress and the metrics there, or the start of a run."""
        newest = latest(self.folder)
        if newest is None:
            return RunState(), {}
        checkpoint = read_checkpoint(newest)
        progress = checkpoint.restore(self.learner, self.optimizer, self.plan, self.config)
        return progress, waiting.restore(checkpoint.metrics)

    def save(self, progress: RunState, metrics: Metrics) -> None:
        """Write one, and delete those that need not stay."""
        save_checkpoint(
            self.folder,
            self.learner,
            self.optimizer,
            self.plan,
            progress,
            metrics=metrics,
            config=self.config,
        )
        if is_main(self.plan):
            prune(self.folder, self.keep)


def _waiting(training: Training, evaluation: object) -> EarlyStopping:
    if training.early_stopping is not None and (training.keep.best is None or evaluation is None):
        what = "early stopping needs an evaluated metric that selects the best checkpoint"
        raise ConfigError(
            what,
            where="training.early_stopping",
            fix="Give development data, or leave early_stopping out.",
        )
    return EarlyStopping(training.early_stopping, training.keep.best)


@contextlib.contextmanager
def _trackers(folder: Path, plan: Plan, progress: RunState) -> Iterator[list[Tracker]]:
    """Where the records of this rank go: nowhere, if it is not the main one."""
    with contextlib.ExitStack() as stack:
        if not is_main(plan):
            yield []
            return
        lines = stack.enter_context(
            contextlib.closing(JsonLines(folder / "metrics.jsonl", progress.steps))
        )
        board = stack.enter_context(
            contextlib.closing(TensorBoard(folder / "tensorboard", progress.steps))
        )
        yield [lines, board, stack.enter_context(contextlib.closing(Terminal("training")))]


class _Watch:
    """What happens between two steps where it is due: a record, an evaluation, a checkpoint, in this order.

    So the records of a step are written before the checkpoint from which a later session goes on.
    """

    def __init__(
        self,
        training: Training,
        progress: RunState,
        metrics: Metrics,
        trackers: Sequence[Tracker],
        waiting: EarlyStopping,
        evaluation: Evaluation | None,
        checkpoints: _Checkpoints,
        clock: Callable[[], float],
    ) -> None:
        self._training, self._trackers, self._waiting, self._checkpoints = (
            training,
            trackers,
            waiting,
            checkpoints,
        )
        self._evaluation = evaluation and waiting.watched(evaluation)
        self._before, self._metrics, self._evaluated = (
            progress,
            metrics,
            progress.steps if metrics else None,
        )
        self._saved, self._clock = progress, clock

    def step(self, progress: RunState, meter: Meter, speed: Speed) -> None:
        """Do what is due after a step."""
        before, self._before = self._before, progress
        end = progress.share(self._training.until) >= 1

        def due(every: Duration | None) -> bool:
            """At the end, and each time that so much is done."""
            return end or (every is not None and progress.passed(every, before))

        evaluating = self._evaluation is not None and due(self._training.evaluate)
        saving = due(self._training.save) or (evaluating and self._training.keep.best is not None)
        if due(self._training.report) or evaluating or saving:
            self.report(meter.read(), speed)
        if evaluating:
            self._evaluate(progress)
        if saving:
            self._save(progress)

    def report(self, report: StepReport, speed: Speed) -> None:
        """Write what the steps since the last record came to."""
        self._write(record(report) | speed.mark(report.progress))

    def finish(self, progress: RunState) -> None:
        """Do what is still due at the end of the run, or of a session that was interrupted."""
        until = self._training.until
        end = progress.share(until) >= 1
        evaluating = end and self._evaluation is not None and self._evaluated != progress.steps
        if evaluating:
            self._evaluate(progress)
        # The time may have run out after the step that was saved, or in its evaluation.
        if (
            evaluating
            or self._saved.steps < progress.steps
            or (end and self._saved.share(until) < 1)
        ):
            self._save(progress)

    def _evaluate(self, progress: RunState) -> None:
        assert self._evaluation is not None
        with contextlib.ExitStack() as failed:
            if (
                self._checkpoints.plan.world == 1
            ):  # other ranks may have got through it, and would not take part
                failed.callback(self._save, progress)  # so that no step is lost by it
            metrics = dict(self._evaluation(self._under_way))
            self._training.keep.check(metrics)
            failed.pop_all()
        self._metrics, self._evaluated = metrics, progress.steps
        self._write(at(progress) | metrics)

    def _save(self, progress: RunState) -> None:
        metrics = self._metrics if self._evaluated == progress.steps else {}
        self._saved = progress  # whose time all ranks agree on; that of now is the main one's
        self._checkpoints.save(
            dataclasses.replace(progress, seconds=self._clock()),
            {**metrics, **self._waiting.state()},
        )

    def _under_way(self, share: float) -> None:
        for tracker in self._trackers:
            tracker.evaluating(share)

    def _write(self, values: Record) -> None:
        for tracker in self._trackers:
            tracker.write(values)
