"""A run: the loop with records, evaluations and checkpoints, shared by every kind of training.

`TrainingRun` is a value: the model, its data, its settings and its checkpoints. Its method `train`
trains from the newest checkpoint on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from bothways.core.config.checks import require_at_least
from bothways.core.config.reader import CHANGEABLE, Members
from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import Precision
from bothways.core.source import TrainingStep
from bothways.core.training_module import TrainingModule
from bothways.training import optimizers
from bothways.training.average import Average
from bothways.training.checkpoint import Keep
from bothways.training.durations import Auto, Duration, Steps
from bothways.training.early_stopping import EarlyStopping, Evaluation, Target
from bothways.training.loop import clock_from, fit
from bothways.training.meter import Meter, StepReport
from bothways.training.pace import stragglers
from bothways.training.parallel import Plan, barrier
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import Schedule, ScheduleFunction, plateau_end, rate_factor
from bothways.training.sharding import sharded
from bothways.training.state import RunState
from bothways.training.store import RunSession, Store
from bothways.training.trackers import (
    HostedTracker,
    Peak,
    Record,
    Speed,
    progress_values,
    record_text,
    report_values,
)


@dataclass(frozen=True)
class Training:
    """Settings of training, whatever the model learns.

    Attributes:
        until: the length of the run; "auto" is for fine-tuning only. A longer run has a longer
            schedule.
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

    until: Duration | Auto = field(metadata=CHANGEABLE)
    optimizer: Annotated[
        optimizers.OptimizerConfig | optimizers.OptimizerFactory,
        Members(optimizers.OptimizerConfig),
    ]
    schedule: Annotated[Schedule | ScheduleFunction, Members(Schedule)]
    precision: Precision = "auto"
    clip_norm: float | None = 1.0
    ema: float | None = None
    recompute: bool = field(default=False, metadata=CHANGEABLE)
    compiled: bool = field(default=False, metadata=CHANGEABLE)
    report: Duration = field(default_factory=lambda: Steps(10), metadata=CHANGEABLE)
    evaluate: Duration | None = field(default=None, metadata=CHANGEABLE)
    save: Duration | None = field(default=None, metadata=CHANGEABLE)
    keep: Keep = field(default_factory=Keep, metadata=CHANGEABLE)
    early_stopping: int | None = field(default=None, metadata=CHANGEABLE)
    target: Target | None = field(default=None, metadata=CHANGEABLE)
    step_limit: float | None = field(default=None, metadata=CHANGEABLE)
    trackers: tuple[HostedTracker, ...] = field(default=(), metadata=CHANGEABLE)

    def __post_init__(self) -> None:
        require_at_least(1, "training", early_stopping=self.early_stopping)
        if self.step_limit is not None and not self.step_limit > 0:
            message = f"must be seconds above 0, not {self.step_limit:g}"
            raise ConfigError(message, where="training.step_limit", fix="For no limit: none.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            message, fix = f"must be greater than 0, not {self.clip_norm:g}", "For none: none."
            raise ConfigError(message, where="training.clip_norm", fix=fix)
        if self.ema is not None and not 0 < self.ema < 1:
            message = f"must be above 0 and below 1, not {self.ema:g}"
            raise ConfigError(message, where="training.ema", fix="For no average: none.")

    @property
    def end(self) -> Duration:
        """The length of the run. Raises ConfigError for "auto", which only fine-tuning resolves."""
        if isinstance(self.until, str):
            message = "is chosen by fine-tuning alone, and must be a duration here"
            raise ConfigError(message, where="training.until", fix='Set it, such as "3 epochs".')
        return self.until


@dataclass(frozen=True)
class TrainingPhase:
    """A stretch of a run with its own data, such as sequences of one length.

    Attributes:
        until: the end of the phase, counted from the start of the run.
        steps: the data from the cursor of a state on; the state also has the ends of the phases
            before.
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


@dataclass(frozen=True)
class TrainingRun:
    """A run of a training module on its data.

    Attributes:
        training_module: the model with its losses on its device, with equal weights on all ranks.
            In a sharded plan each rank has a shard of them until the end.
        phases: in order; the last one ends with the run.
        store: the checkpoints, in a folder or in memory.
        evaluation: metrics of the training module as it is, equal on all ranks.
        peak: the highest possible speed, for comparison.
        rules: exceptions for single parameters.
        progress: receives the stage "training", the records in words, and those of evaluations.
        on_event: called on every rank after each step, report, evaluation and checkpoint.

    Raises:
        ConfigError: early stopping or a target has no metric that is evaluated.
    """

    training_module: TrainingModule
    phases: Sequence[TrainingPhase]
    training: Training
    plan: Plan
    store: Store
    evaluation: Evaluation | None = None
    peak: Peak | None = None
    rules: optimizers.ParameterRules = optimizers.same_for_all
    progress: Progress = SILENT
    on_event: OnEvent = lambda event: None

    def __post_init__(self) -> None:
        stopping, best = self.training.early_stopping, self.training.keep.best
        if stopping is not None and (best is None or self.evaluation is None):
            message = "early stopping needs an evaluated metric that selects the best checkpoint"
            fix = "Give development data, or leave early_stopping out."
            raise ConfigError(message, where="training.early_stopping", fix=fix)
        if self.training.target is not None and self.evaluation is None:
            fix = "Give development data, or leave the target out."
            raise ConfigError("requires evaluation data", where="training.target", fix=fix)

    def train(self) -> RunState:
        """Train from the store's newest checkpoint, or from the start; return the state at the end.

        In a folder SIGINT, SIGTERM, SIGHUP and SIGUSR1 end the run after a step, with a checkpoint:
        the state is then short of `training.until`.

        Raises:
            BothwaysError: a loss or a gradient is not finite.
            CheckpointError: the newest checkpoint cannot be used.
            ConfigError: the schedule does not fit the run, or the metric that selects the best
                checkpoint is not evaluated.
            ResourceError: a file cannot be written.
        """
        with sharded(self.training_module, self.plan):
            trainer = _Trainer(self)
            state = trainer.restore()
            with self.store.session(self.plan, state, self.training.trackers) as session:
                state = trainer.train(state, session)
            # Where one rank ends, torchrun and Slurm kill the others, even one that is saving.
            barrier(self.plan)
            reached = state.share(self.training.end) >= 1
            if trainer.average is not None and (trainer.stopping.over or reached):
                trainer.average.apply_to_weights()
            return dataclasses.replace(state, early=trainer.stopping.over and not reached)


class _Trainer:
    """Trains one run, and does what is due between two steps: a record, an evaluation, a
    checkpoint, in this order.

    So the records of a step are written before the checkpoint from which a later session resumes.
    """

    def __init__(self, run: TrainingRun) -> None:
        training_module, training = run.training_module, run.training
        self.run, self.training, self.progress = run, training, run.progress
        optimizer = optimizers.build_optimizer(
            training.optimizer,
            training_module.trained_parameters(),
            run.rules,
            training_module.matrices(),
        )
        self.tensors = RunTensors(training_module, optimizer, run.plan)
        self.average = None if training.ema is None else Average(training_module, training.ema)
        self.stopping = EarlyStopping(training.early_stopping, training.keep.best, training.target)
        self.end = training.end
        self.schedule = rate_factor(training.schedule, self.end)
        self.decay = plateau_end(training.schedule, self.end)
        self.slow_ranks = set[int]()

    def restore(self) -> RunState:
        """Load the newest checkpoint, if there is one; return its state."""
        state, metrics, notes = self.run.store.restore(self.tensors, self.training.keep)
        for note in notes:
            self.progress.message(note)
        self.before = self.saved = state
        self.metrics = self.stopping.restore(metrics)
        self.evaluated = state.steps if self.metrics else None
        decaying = state.amount(self.end) >= self.decay
        self.plateau = (state.plateau or state.steps) if decaying else 0
        return state

    def train(self, state: RunState, session: RunSession) -> RunState:
        """Train the phases from the current one on; return the state at the end."""
        self.session, self.clock = session, clock_from(state.seconds)
        self.speed = Speed(self.end, self.run.peak)
        self.show_training(state)
        self.speed.mark(state)
        for number, phase in enumerate(self.run.phases[state.phase :]):
            if self.stopping.over:
                break
            state = dataclasses.replace(
                state.next_phase() if number else state, seconds=self.clock()
            )
            state = fit(
                self.run.training_module, phase.steps(state), self.tensors.optimizer, self.rate,
                self.run.plan, until=phase.until, progress=state,
                on_step=self.on_step, on_rest=self.report,
                precision=self.training.precision, clip_norm=self.training.clip_norm,
                step_limit=self.training.step_limit,
            )  # fmt: skip
            if state.share(phase.until) < 1:
                break
        self.finish(state)
        return state

    def rate(self, state: RunState) -> float:
        """Return the multiple of the peak rate of the next step, and record it."""
        rate = self.schedule(state)
        self.session.note_step(state, rate)
        return rate

    def on_step(self, state: RunState, meter: Meter) -> bool:
        """Do what is due after a step; return True to stop."""
        if self.average is not None:
            self.average.update(state.steps)
        self.run.on_event(Event("step", state))
        previous, self.before = self.before, state
        share = state.share(self.end)
        self.progress.advance(share)

        def due(interval: Duration | None) -> bool:
            """Return True at the end of the run and at each multiple of a duration."""
            return share >= 1 or (interval is not None and state.passed(interval, previous))

        decaying = previous.amount(self.end) < self.decay <= state.amount(self.end)
        self.plateau = state.steps if decaying else self.plateau
        evaluating = self.run.evaluation is not None and due(self.training.evaluate)
        saving = due(self.training.save) or (evaluating and self.training.keep.best is not None)
        saving = saving or decaying
        if due(self.training.report) or evaluating or saving:
            self.report(meter.read())
        if evaluating:
            self.evaluate(state)
        if saving:
            self.save(state)
        return self.session.interruption.asked or self.stopping.over

    def report(self, report: StepReport) -> None:
        """Write the record of the steps since the last one."""
        values = report_values(report) | self.speed.mark(report.progress)
        self.write(values)
        self.progress.advance(values["share"], record_text(values))
        for rank, times in stragglers(report.pace).items():
            if rank not in self.slow_ranks:
                slow = f"rank {rank} works {times:.1f} times as long as the median of the ranks"
                self.progress.message(f"warning: {slow}, which wait for it")
            self.slow_ranks.add(rank)
        self.run.on_event(Event("report", report.progress, values))

    def finish(self, state: RunState) -> None:
        """Do what is still due at the end of the run or of an interrupted session."""
        ended = state.share(self.end) >= 1
        evaluating = ended and self.run.evaluation is not None and self.evaluated != state.steps
        if evaluating:
            self.evaluate(state)
        # The time may have run out after the step that was saved, or in its evaluation.
        unsaved = self.saved.steps < state.steps or (ended and self.saved.share(self.end) < 1)
        if evaluating or unsaved:
            self.save(state)

    def evaluate(self, state: RunState) -> None:
        """Evaluate the training module, or the average of its weights."""
        assert self.run.evaluation is not None
        with contextlib.ExitStack() as failed:
            # Other ranks may have got through it, and would not take part in the save.
            if self.run.plan.world == 1:
                failed.callback(self.save, state)  # no step is lost to a failed evaluation
            with self.average.applied() if self.average else contextlib.nullcontext():
                metrics = dict(self.run.evaluation(self.progress))
            self.training.keep.check(metrics)
            if self.training.target is not None:
                self.training.target.check(metrics)
            failed.pop_all()
        self.stopping.note(metrics)
        self.metrics, self.evaluated = metrics, state.steps
        values = progress_values(state) | metrics
        self.write(values)
        self.progress.message(f"evaluation {record_text(values)}")
        # With the time of the evaluation: else the next step seems to be as fast as both together.
        self.show_training(dataclasses.replace(state, seconds=self.clock()))
        self.run.on_event(Event("evaluation", state, metrics))

    def save(self, state: RunState) -> None:
        """Save a checkpoint."""
        metrics = self.metrics if self.evaluated == state.steps else {}
        metrics = {**metrics, **self.stopping.state()}
        self.saved = state  # whose time all ranks agree on; the current time is the main rank's
        state = dataclasses.replace(state, seconds=self.clock(), plateau=self.plateau)
        self.run.store.save(self.tensors, state, metrics, self.training.keep)
        self.run.on_event(Event("checkpoint", state, metrics))

    def show_training(self, state: RunState) -> None:
        """Show the stage of training and how much of it is done."""
        self.progress.stage("training", 1.0)
        self.progress.advance(state.share(self.end))

    def write(self, values: Record) -> None:
        """Send a record to all trackers."""
        for tracker in self.session.trackers:
            tracker.write(values)
