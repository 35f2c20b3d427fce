"""A run: the loop with records, evaluations and checkpoints, shared by every kind of training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from bothways.core.config.checks import require_at_least
from bothways.core.config.reader import Members
from bothways.core.errors import ConfigError
from bothways.core.learner import Learner
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import Precision
from bothways.core.source import TrainingStep
from bothways.training.average import Average
from bothways.training.checkpoint import Keep
from bothways.training.durations import Auto, Duration, Steps
from bothways.training.early_stopping import EarlyStopping, Evaluation, Metrics, Target
from bothways.training.hosted_trackers import HostedTracker
from bothways.training.loop import clock_from, fit
from bothways.training.meter import Meter, StepReport
from bothways.training.optimizers import (
    OptimizerConfig,
    OptimizerFactory,
    ParameterRules,
    build_optimizer,
    same_for_all,
)
from bothways.training.pace import stragglers
from bothways.training.parallel import Plan, barrier
from bothways.training.schedules import Schedule, ScheduleFunction, plateau_end, rate_factor
from bothways.training.sharding import sharded
from bothways.training.state import RunState
from bothways.training.store import Store
from bothways.training.trackers import (
    Peak,
    Record,
    Speed,
    Tracker,
    progress_values,
    record_text,
    report_values,
)


@dataclass(frozen=True)
class Training:
    """Settings of training, whatever the model learns.

    Attributes:
        until: the length of the run; "auto" is for fine-tuning only.
        optimizer: in Python also a function that makes any `torch.optim.Optimizer` of groups.
        schedule: in Python also a function of the share of the run that is done.
        clip_norm: the highest global gradient norm; None for no clipping.
        ema: the decay of the moving average of the weights, which is evaluated and saved instead
            of them; None for no average.
        recompute: compute blocks again in the backward pass instead of keeping their values: less
            memory, more time, the same update.
        compiled: compile what a block computes between two attentions; on a GPU only.
        report, evaluate, save: how often; None for `evaluate` and `save`: once, at the end.
        keep: the checkpoints that stay. To keep the best one, each evaluation is followed by a
            checkpoint.
        early_stopping: the number of evaluations in a row without a better value of the metric of
            `keep.best` after which the run ends; None for never.
        target: the value of a metric at which the run ends before its length; None for none.
        step_limit: seconds after which a step that does not end is taken for a hang: each rank
            reports what it was doing, and ends; None for no limit.
        trackers: where records are sent besides the run's folder: "wandb", "mlflow".
    """

    until: Duration | Auto
    optimizer: Annotated[OptimizerConfig | OptimizerFactory, Members(OptimizerConfig)]
    schedule: Annotated[Schedule | ScheduleFunction, Members(Schedule)]
    precision: Precision = "auto"
    clip_norm: float | None = 1.0
    ema: float | None = None
    recompute: bool = False
    compiled: bool = False
    report: Duration = field(default_factory=lambda: Steps(10))
    evaluate: Duration | None = None
    save: Duration | None = None
    keep: Keep = field(default_factory=Keep)
    early_stopping: int | None = None
    target: Target | None = None
    step_limit: float | None = None
    trackers: tuple[HostedTracker, ...] = ()

    def __post_init__(self) -> None:
        require_at_least(1, "training", early_stopping=self.early_stopping)
        if self.step_limit is not None and not self.step_limit > 0:
            what = f"must be seconds above 0, not {self.step_limit:g}"
            raise ConfigError(what, where="training.step_limit", fix="For no limit: none.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            what = f"must be greater than 0, not {self.clip_norm:g}"
            raise ConfigError(
                what, where="training.clip_norm", fix="For no clipping, set it to none."
            )
        if self.ema is not None and not 0 < self.ema < 1:
            what = f"must be above 0 and below 1, not {self.ema:g}"
            raise ConfigError(what, where="training.ema", fix="For no average, set it to none.")

    @property
    def end(self) -> Duration:
        """The length of the run. Raises ConfigError for "auto", which only fine-tuning resolves."""
        if isinstance(self.until, str):
            what = "is chosen by fine-tuning alone, and must be a duration here"
            raise ConfigError(what, where="training.until", fix='Set it, such as "3 epochs".')
        return self.until


@dataclass(frozen=True)
class TrainingPhase:
    """A part of a run with data of its own, such as sequences of one length.

    Attributes:
        until: the part of the run at which it ends.
        steps: its data, from the cursor of a state on; where phases ended before is in the state.
    """

    until: Duration
    steps: Callable[[RunState], Iterable[TrainingStep]]


@dataclass(frozen=True)
class Event:
    """Something that happened in a run.

    Attributes:
        kind: "step" after each update, "report" with a record of the steps since the last one,
            "evaluation" with its metrics, "checkpoint" after a save.
        progress: of the run.
        values: the record or the metrics.
    """

    kind: Literal["step", "report", "evaluation", "checkpoint"]
    progress: RunState
    values: Record = field(default_factory=dict)


OnEvent = Callable[[Event], object]


def train(  # noqa: PLR0913 – one independent value per question that a run answers
    learner: Learner,
    phases: Sequence[TrainingPhase],
    training: Training,
    plan: Plan,
    store: Store,
    *,
    evaluation: Evaluation | None = None,
    peak: Peak | None = None,
    rules: ParameterRules = same_for_all,
    progress: Progress = SILENT,
    on_event: OnEvent = lambda event: None,
) -> RunState:
    """Train from the store's newest checkpoint, or from the start; return the state at the end.

    In a folder SIGINT, SIGTERM, SIGHUP and SIGUSR1 end the run after a step, with a checkpoint: the
    state is then short of `training.until`.

    Args:
        learner: on its device; of equal weights on all ranks. In a sharded plan each rank has its
            part of them until the end.
        phases: in order; the last one ends with the run.
        store: a folder, or memory.
        evaluation: metrics of the learner as it is, equal on all ranks.
        peak: what to compare the speed with.
        rules: exceptions for single parameters.
        progress: receives the stage "training", the records in words, and those of evaluations.
        on_event: called on every rank after each step, report, evaluation and checkpoint.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        CheckpointError: the newest checkpoint cannot be used.
        ConfigError: the schedule does not fit the run, the metric that names the best checkpoint
            is not evaluated, or early stopping has no such metric.
        ResourceError: a file cannot be written.
    """
    with sharded(learner, plan):
        optimizer = build_optimizer(
            training.optimizer, learner.trained_parameters(), rules, learner.matrices()
        )
        average = None if training.ema is None else Average(learner, training.ema)
        if average is not None and evaluation is not None:
            evaluation = average.evaluating(evaluation)
        end = training.end
        schedule, waiting = rate_factor(training.schedule, end), _waiting(training, evaluation)
        state, metrics, notes = store.restore(learner, optimizer, plan, training.keep)
        for note in notes:
            progress.message(note)

        def save(state: RunState, metrics: Metrics) -> None:
            """Save a checkpoint."""
            store.save(learner, optimizer, plan, state, metrics, training.keep)
            on_event(Event("checkpoint", state, metrics))

        with store.session(plan, state, training.trackers) as (trackers, interruption, note_step):
            clock, speed = clock_from(state.seconds), Speed(end, peak)
            watch = _Watch(
                training, state, metrics, trackers, waiting, evaluation, save, clock, progress,
                on_event, alone=plan.world == 1,
            )  # fmt: skip
            speed.mark(state)

            def noted_rate(state: RunState) -> float:
                """Return the multiple of the peak rate of the next step, and record it."""
                rate = schedule(state)
                note_step(state, rate)
                return rate

            def on_step(state: RunState, meter: Meter) -> bool:
                """Do what is due; return True to stop."""
                if average is not None:
                    average.update(state.steps)
                on_event(Event("step", state))
                watch.step(state, meter, speed)
                return interruption.asked or waiting.over

            def fit_to(phase: TrainingPhase, state: RunState) -> RunState:
                """Train to the end of a phase."""
                now = dataclasses.replace(state, seconds=clock())
                return fit(
                    learner, phase.steps(now), optimizer, noted_rate, plan,
                    until=phase.until, progress=now,
                    on_step=on_step, on_rest=lambda report: watch.report(report, speed),
                    precision=training.precision, clip_norm=training.clip_norm,
                    step_limit=training.step_limit,
                )  # fmt: skip

            state = _one_by_one(phases, state, waiting, fit_to)
            watch.finish(state)
        # Where one rank ends, torchrun and Slurm kill the others: also one that is still saving.
        barrier(plan)
        reached = state.share(end) >= 1
        if average is not None and (waiting.over or reached):
            average.apply_to_weights()
        return dataclasses.replace(state, early=waiting.over and not reached)


def _one_by_one(
    phases: Sequence[TrainingPhase],
    progress: RunState,
    waiting: EarlyStopping,
    fit_to: Callable[[TrainingPhase, RunState], RunState],
) -> RunState:
    """Train the phases from the current one on, until one is interrupted or the run ends early."""
    for later, phase in enumerate(phases[progress.phase :]):
        if waiting.over:
            break
        progress = fit_to(phase, progress.next_phase() if later else progress)
        if progress.share(phase.until) < 1:
            break
    return progress


def _waiting(training: Training, evaluation: object) -> EarlyStopping:
    if training.early_stopping is not None and (training.keep.best is None or evaluation is None):
        what = "early stopping needs an evaluated metric that selects the best checkpoint"
        raise ConfigError(
            what,
            where="training.early_stopping",
            fix="Give development data, or leave early_stopping out.",
        )
    if training.target is not None and evaluation is None:
        what = "a run ends at a target only if it is evaluated"
        fix = "Give development data, or leave the target out."
        raise ConfigError(what, where="training.target", fix=fix)
    return EarlyStopping(training.early_stopping, training.keep.best, training.target)


class _Watch:
    """Does what is due between two steps: a record, an evaluation, a checkpoint, in this order.

    So the records of a step are written before the checkpoint from which a later session resumes.
    """

    def __init__(  # noqa: PLR0913, PLR0917 – what a step may call for
        self,
        training: Training,
        progress: RunState,
        metrics: Metrics,
        trackers: Sequence[Tracker],
        waiting: EarlyStopping,
        evaluation: Evaluation | None,
        save: Callable[[RunState, Metrics], object],
        clock: Callable[[], float],
        shown: Progress,
        on_event: OnEvent,
        *,
        alone: bool,
    ) -> None:
        self._training, self._trackers, self._waiting = training, trackers, waiting
        self._checkpoint, self._on_event, self._alone = save, on_event, alone
        self._evaluation = evaluation and waiting.watched(evaluation)
        self._before, self._metrics = progress, waiting.restore(metrics)
        self._evaluated = progress.steps if self._metrics else None
        self._saved, self._clock = progress, clock
        self._decay = plateau_end(training.schedule, training.end)
        decaying = progress.amount(training.end) >= self._decay
        self._plateau = (progress.plateau or progress.steps) if decaying else 0
        self._shown, self._slow = shown, set[int]()
        self._show_training(progress)

    def step(self, progress: RunState, meter: Meter, speed: Speed) -> None:
        """Do what is due after a step."""
        before, self._before = self._before, progress
        share = progress.share(self._training.end)
        end = share >= 1
        self._shown.advance(share)

        def due(every: Duration | None) -> bool:
            """Return True at the end of the run and at each multiple of a duration."""
            return end or (every is not None and progress.passed(every, before))

        until = self._training.end
        decaying = before.amount(until) < self._decay <= progress.amount(until)
        self._plateau = progress.steps if decaying else self._plateau
        evaluating = self._evaluation is not None and due(self._training.evaluate)
        saving = due(self._training.save) or (evaluating and self._training.keep.best is not None)
        saving = saving or decaying
        if due(self._training.report) or evaluating or saving:
            self.report(meter.read(), speed)
        if evaluating:
            self._evaluate(progress)
        if saving:
            self._save(progress)

    def report(self, report: StepReport, speed: Speed) -> None:
        """Write the record of the steps since the last one."""
        values = report_values(report) | speed.mark(report.progress)
        self._write(values)
        self._shown.advance(values["share"], record_text(values))
        for rank, times in stragglers(report.pace).items():
            if rank not in self._slow:
                what = f"rank {rank} works {times:.1f} times as long as the median of the ranks"
                self._shown.message(f"warning: {what}, which wait for it")
            self._slow.add(rank)
        self._on_event(Event("report", report.progress, values))

    def finish(self, progress: RunState) -> None:
        """Do what is still due at the end of the run or of an interrupted session."""
        until = self._training.end
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
            # Other ranks may have got through it, and would not take part in the save.
            if self._alone:
                failed.callback(self._save, progress)  # no step is lost to a failed evaluation
            metrics = dict(self._evaluation(self._shown))
            self._training.keep.check(metrics)
            if self._training.target is not None:
                self._training.target.check(metrics)
            failed.pop_all()
        self._metrics, self._evaluated = metrics, progress.steps
        values = progress_values(progress) | metrics
        self._write(values)
        self._shown.message(f"evaluation {record_text(values)}")
        # With the time of the evaluation: else the next step seems to be as fast as both together.
        self._show_training(dataclasses.replace(progress, seconds=self._clock()))
        self._on_event(Event("evaluation", progress, metrics))

    def _save(self, progress: RunState) -> None:
        metrics = self._metrics if self._evaluated == progress.steps else {}
        self._saved = progress  # whose time all ranks agree on; that of now is the main one's
        self._checkpoint(
            dataclasses.replace(progress, seconds=self._clock(), plateau=self._plateau),
            {**metrics, **self._waiting.state()},
        )

    def _show_training(self, progress: RunState) -> None:
        self._shown.stage("training", 1.0)
        self._shown.advance(progress.share(self._training.end))

    def _write(self, values: Record) -> None:
        for tracker in self._trackers:
            tracker.write(values)
