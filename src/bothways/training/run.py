"""A run: the loop with records, evaluations and checkpoints, shared by every kind of training.

`TrainingRun` holds the model, its data, its settings and its checkpoints. Its method `train` trains
from the newest checkpoint on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch

from bothways.core.config.reader import CHANGEABLE, Members
from bothways.core.config.values import (
    Tree,
    merge,
    parse_overrides,
    require_at_least,
    require_range,
)
from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import Precision
from bothways.core.source import TrainingStep
from bothways.core.terminal import quantity
from bothways.core.training_module import TrainingModule, hidden_matrices
from bothways.model.block import Block
from bothways.model.model import Encoder
from bothways.training import meter as meters, optimizers, schedules
from bothways.training.checkpoint import STOPPING, Best, Keep, Metrics, Store
from bothways.training.loop import Loop, clock_from
from bothways.training.parallel import Plan, on_all_ranks, sharded
from bothways.training.saved_state import Average, RunTensors
from bothways.training.trackers import HostedTracker

BEST, WAITED, REACHED = (f"{STOPPING}{name}" for name in ("best", "waited", "reached"))
Evaluation = Callable[[Progress], Metrics]
"""Returns the metrics of a training module as it is, and reports its progress."""


@dataclass(frozen=True)
class Target:
    """The value of a metric at which a run ends, such as a held-out loss.

    Attributes:
        at_most: the run ends at the first evaluation with this value or a lower one.
    """

    metric: str
    at_most: float


@dataclass(frozen=True)
class Training:
    """Settings of training, whatever the model learns.

    Attributes:
        until: the length of the run; "auto" is for fine-tuning only. A longer run has a longer
            schedule.
        optimizer: in Python also a function that makes any `torch.optim.Optimizer` of groups.
        schedule: in Python also a function of the share of the run that is done.
        precision: of matrix products; auto is bf16 where the hardware has it.
        clip_norm: the highest global gradient norm; None for no clipping.
        ema: the decay of the moving average of the weights, which is evaluated and saved instead
            of them; None for no average.
        recompute: compute blocks again in the backward pass instead of keeping their values: less
            memory, more time, the same update.
        compiled: compile blocks; on a GPU only.
        graphs: capture updates as CUDA graphs: for masked LM by Adam, one process, in bf16.
        report, evaluate, save: how often; None for `evaluate` and `save`: once, at the end.
        keep: the checkpoints that stay. To keep the best one, each evaluation is followed by a
            checkpoint.
        early_stopping: the number of evaluations in a row without a better value of the metric of
            `keep.best` after which the run ends; None for never.
        target: the value of a metric at which the run ends before its length; None for none.
        step_limit: seconds after which a step that does not end is taken for a hang: each rank
            reports what it was doing, and ends; None for no limit.
        trackers: where records are sent besides the run's folder: "wandb".
    """

    until: schedules.Duration | schedules.Auto = field(metadata=CHANGEABLE)
    optimizer: Annotated[
        optimizers.OptimizerConfig | optimizers.OptimizerFactory,
        Members(optimizers.OptimizerConfig),
    ]
    schedule: Annotated[
        schedules.Schedule | schedules.ScheduleFunction, Members(schedules.Schedule)
    ]
    precision: Precision = "auto"
    clip_norm: float | None = 1.0
    ema: float | None = None
    recompute: bool = field(default=False, metadata=CHANGEABLE)
    compiled: bool = field(default=False, metadata=CHANGEABLE)
    graphs: bool = field(default=False, metadata=CHANGEABLE)
    report: schedules.Duration = field(
        default_factory=lambda: schedules.Steps(10), metadata=CHANGEABLE
    )
    evaluate: schedules.Duration | None = field(default=None, metadata=CHANGEABLE)
    save: schedules.Duration | None = field(default=None, metadata=CHANGEABLE)
    keep: Keep = field(default_factory=Keep, metadata=CHANGEABLE)
    early_stopping: int | None = field(default=None, metadata=CHANGEABLE)
    target: Target | None = field(default=None, metadata=CHANGEABLE)
    step_limit: float | None = field(default=None, metadata=CHANGEABLE)
    trackers: tuple[HostedTracker, ...] = field(default=(), metadata=CHANGEABLE)

    def __post_init__(self) -> None:
        require_at_least(1, "training", early_stopping=self.early_stopping)
        fix = "It is in seconds; write none for no limit."
        require_range("(0, inf]", "training", step_limit=self.step_limit, fix=fix)
        require_range(
            "(0, inf]", "training", clip_norm=self.clip_norm, fix="Write none for no limit."
        )
        require_range("(0, 1)", "training", ema=self.ema, fix="Write none for no average.")

    @property
    def end(self) -> schedules.Duration:
        """The length of the run. Raises ConfigError for "auto", which only fine-tuning resolves."""
        if isinstance(self.until, str):
            message = "is chosen by fine-tuning alone, and must be a duration here"
            raise ConfigError(message, where="training.until", fix='Set it, such as "3 epochs".')
        return self.until

    def check_metrics(self, evaluated: Collection[str]) -> None:
        """Raise ConfigError if a metric that selects the best or ends the run is not evaluated."""
        for name, setting in {"keep.best": self.keep.best, "target": self.target}.items():
            if setting is not None and setting.metric not in evaluated:
                message = f"{setting.metric!r} is not evaluated: there are {', '.join(evaluated)}"
                raise ConfigError(message, where=f"training.{name}.metric")


def compute_as(encoder: Encoder, training: Training, device: torch.device) -> None:
    """Set `training.recompute` and `training.compiled` on an encoder.

    Raises:
        ConfigError: compiled is set on a CPU or for an encoder without Transformer blocks, or
            graphs on a CPU.
    """
    encoder.recompute = training.recompute
    blocks = [module for module in encoder.modules() if isinstance(module, Block)]
    if training.compiled and (device.type == "cpu" or not blocks):
        kind = type(encoder).__name__
        message = f"is for the blocks of a Transformer on a GPU, not for this {kind} on {device}"
        fix = "Leave it out: on a CPU compiled blocks are not faster."
        raise ConfigError(message, where="training.compiled", fix=fix)
    if training.graphs and device.type == "cpu":
        message = f"is for CUDA graphs, not for {device}"
        raise ConfigError(message, where="training.graphs", fix="Leave it out.")
    for block in blocks:
        block.compiled = training.compiled


@dataclass(frozen=True)
class TrainingPhase:
    """A stretch of a run with its own data, such as sequences of one length.

    Attributes:
        until: the end of the phase, counted from the start of the run.
        steps: the data from the cursor of a state on; the state also has the ends of the phases
            before.
        rate: multiple of the schedule's learning rate.
    """

    until: schedules.Duration
    steps: Callable[[schedules.RunState], Iterable[TrainingStep]]
    rate: float = 1.0


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
    progress: schedules.RunState
    values: meters.Record = field(default_factory=dict)


OnEvent = Callable[[Event], object]


class EarlyStopping:
    """Ends a run after some evaluations in a row without improvement, or at a target.

    The count is kept in the metrics of checkpoints: a resumed run ends where an unbroken one does.

    Source: Prechelt, Early stopping – but when? (1998): the number of evaluations without progress.

    Args:
        patience: the count that ends the run; None for no limit.
        best: the metric; None without patience.
        target: ends the run, too; None for none.
    """

    def __init__(
        self, patience: int | None, best: Best | None, target: Target | None = None
    ) -> None:
        self._patience, self._best, self._target = patience, best, target
        self._value = math.nan
        self._waited = 0
        self._reached = False

    @property
    def over(self) -> bool:
        """True if the run must end."""
        waited = self._patience is not None and self._waited >= self._patience
        return waited or self._reached

    def note(self, metrics: Metrics) -> None:
        """Count an evaluation; NaN is not an improvement."""
        if self._patience is not None and self._best is not None:
            value = metrics[self._best.metric]
            if self._best.rank(value) < self._best.rank(self._value):
                self._value, self._waited = value, 0
            else:
                self._waited += 1
        if self._target is not None:
            self._reached = metrics[self._target.metric] <= self._target.at_most

    def state(self) -> dict[str, int | float]:
        """Return the state that a checkpoint keeps."""
        reached: dict[str, int | float] = {REACHED: 1} if self._reached else {}
        if self._patience is None:
            return reached
        best = {} if math.isnan(self._value) else {BEST: self._value}
        return {WAITED: self._waited} | best | reached

    def restore(self, state: Metrics) -> dict[str, int | float]:
        """Restore the state from a checkpoint's metrics, and return the other metrics."""
        self._value, self._waited = state.get(BEST, math.nan), int(state.get(WAITED, 0))
        self._reached = REACHED in state
        state_names = {BEST, WAITED, REACHED}
        return {name: value for name, value in state.items() if name not in state_names}


@dataclass(eq=False)
class TrainingRun:
    """A run of a training module on its data.

    It trains in phases, and does what is due between two steps: a record, an evaluation, a
    checkpoint, in this order. So the records of a step are written before the checkpoint from which
    a later session resumes.

    Attributes:
        training_module: the model with its losses on its device, with equal weights on all ranks.
            In a sharded plan each rank has a shard of them until the end.
        phases: in order; the last one ends with the run.
        store: the checkpoints, in a folder or in memory.
        evaluation: metrics of the training module as it is, equal on all ranks.
        peak: the highest possible speed, in tokens a second, for comparison.
        rules: exceptions for single parameters.
        progress: receives the stage "training", the records in words, and those of evaluations.
        on_event: called on every rank after each step, report, evaluation and checkpoint.
        before: the state before the step that an event "step" is about.
        history: (epochs, metrics) of each evaluation of this session.

    Raises:
        ConfigError: early stopping or a target has no metric that is evaluated.
    """

    training_module: TrainingModule
    phases: Sequence[TrainingPhase]
    training: Training
    plan: Plan
    store: Store
    evaluation: Evaluation | None = None
    peak: float | None = None
    rules: optimizers.ParameterRules = optimizers.same_for_all
    progress: Progress = SILENT
    on_event: OnEvent = lambda event: None
    before: schedules.RunState = field(default=schedules.RunState(), init=False)
    history: list[tuple[float, Metrics]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        stopping, best = self.training.early_stopping, self.training.keep.best
        if stopping is not None and (best is None or self.evaluation is None):
            message = "early stopping needs an evaluated metric that selects the best checkpoint"
            need = "Give development data" if self.evaluation is None else "Set training.keep.best"
            fix = f"{need}, or leave early_stopping out."
            raise ConfigError(message, where="training.early_stopping", fix=fix)
        if self.training.target is not None and self.evaluation is None:
            fix = "Give development data, or leave the target out."
            raise ConfigError("requires evaluation data", where="training.target", fix=fix)

    def train(self) -> schedules.RunState:
        """Train from the store's newest checkpoint, or from the start; return the state at the end.

        Raises:
            BothwaysError: a loss or a gradient is not finite.
            CheckpointError: the newest checkpoint cannot be used.
            ConfigError: the schedule does not fit the run, or the metric that selects the best
                checkpoint is not evaluated.
            KeyboardInterrupt: in a folder, on every rank, after a checkpoint: a signal has ended
                the run.
            ResourceError: a file cannot be written.
        """
        module, training, end = self.training_module, self.training, self.training.end
        with sharded(module, self.plan):
            parameters, matrices = module.trained_parameters(), hidden_matrices(module)
            optimizer = optimizers.build_optimizer(
                training.optimizer, parameters, self.rules, matrices
            )
            self._tensors = RunTensors(module, optimizer, self.plan)
            self._average = None if training.ema is None else Average(module, training.ema)
            self._stopping = EarlyStopping(
                training.early_stopping, training.keep.best, training.target
            )
            self._schedule = schedules.rate_factor(training.schedule, end)
            self._decay = schedules.plateau_end(training.schedule, end)
            self._slow_ranks = set[int]()
            state = self._restore()
            with self.store.session(self.plan, state, training.trackers) as self._session:
                state = self._train_phases(state)
            if state.steps == 1 and self._schedule(schedules.RunState()) == 0:
                message = "warning: the only update had the rate 0, with which a warm-up begins: "
                message += "nothing was learned. Give the run more updates, or a warm-up of 0"
                self.progress.message(message)
            # All wait: where a rank ends, torchrun and Slurm kill the others, even one that saves.
            # A signal in the last step counts: a caller with more runs must not begin the next.
            if any(on_all_ranks(self.plan, lambda: bool(self._session.signals))):
                raise KeyboardInterrupt(f"Saved after step {state.steps:,}.")
            if self._average is not None:
                self._average.apply_to_weights()
            return dataclasses.replace(state, early=state.share(end) < 1)

    def _restore(self) -> schedules.RunState:
        """Load the newest checkpoint, if there is one; return its state."""
        state, metrics, notes = self.store.restore(self._tensors)
        for note in notes:
            self.progress.message(note)
        if state.steps and state.share(self.training.end) >= 1:
            steps = quantity(state.steps, "step(s)")
            message = f"the run has made {steps} and ends after {self.training.end}"
            self.progress.message(f"note: {message}: nothing is left to train")
        self.before = self._saved = state
        self._metrics = self._stopping.restore(metrics)
        self._evaluated = state.steps if self._metrics else None
        decaying = state.amount(self.training.end) >= self._decay
        self._plateau = (state.plateau or state.steps) if decaying else 0
        return state

    def _train_phases(self, state: schedules.RunState) -> schedules.RunState:
        """Train the phases from the current one on; return the state at the end."""
        training = self.training
        loop = Loop(
            self._tensors, self._rate, self._on_step, self._report,
            training.precision, training.clip_norm, training.step_limit, training.graphs,
        )  # fmt: skip
        self._clock = clock_from(state.seconds)
        self._speed = meters.Speed(training.end, self.peak)
        self._show_training(state)
        self._speed.mark(state)
        for number, phase in enumerate(self.phases[state.phase :]):
            if self._stopping.over:
                break
            state = state.next_phase() if number else state
            steps = phase.steps(state)
            try:
                state = loop.train(steps, phase.until, self._at_now(state))
            finally:  # the processes that build steps end now, also after an error
                if isinstance(steps, Generator):
                    steps.close()
            if state.share(phase.until) < 1:
                break
        self._finish(state)
        return state

    def _rate(self, state: schedules.RunState) -> float:
        """Return the multiple of the peak rate of the next step, and record it."""
        rate = self._schedule(state) * self.phases[state.phase].rate
        self._session.note_step(state, rate)
        return rate

    def _on_step(self, state: schedules.RunState, meter: meters.Meter) -> bool:
        """Do what is due after a step; return True to stop."""
        training, end = self.training, self.training.end
        if self._average is not None:
            self._average.update(state.steps)
        self.on_event(Event("step", state))
        previous, self.before = self.before, state
        share = state.share(end)
        self.progress.advance(self._at_now(state).share(end))

        def due(interval: schedules.Duration | None) -> bool:
            """Return True at the end of the run and at each multiple of a duration."""
            return share >= 1 or (interval is not None and state.passed(interval, previous))

        # The step at which the decay begins: its checkpoint can be continued with another length.
        decaying = previous.amount(end) < self._decay <= state.amount(end)
        self._plateau = state.steps if decaying else self._plateau
        evaluating = self.evaluation is not None and due(training.evaluate)
        saving = due(training.save) or (evaluating and training.keep.best is not None) or decaying
        if due(training.report) or evaluating or saving:
            self._report(meter.read())
        if evaluating:
            self._evaluate(state)
        if saving:
            self._save(state)
        return bool(self._session.signals) or self._stopping.over

    def _report(self, report: meters.StepReport) -> None:
        """Write the record of the steps since the last one."""
        speed = self._speed.mark(self._at_now(report.progress))
        values = meters.report_values(report) | speed
        self._write(values)
        self.progress.advance(values["share"], meters.record_text(values))
        for rank, times in meters.stragglers([seconds for seconds, _ in report.pace]).items():
            if rank not in self._slow_ranks:
                slow = f"rank {rank} works {times:.1f} times as long as the median of the ranks"
                self.progress.message(f"warning: {slow}, which wait for it")
            self._slow_ranks.add(rank)
        self.on_event(Event("report", report.progress, values))

    def _finish(self, state: schedules.RunState) -> None:
        """Do what is still due at the end of the run or of an interrupted session."""
        end = self.training.end
        ended = state.share(end) >= 1
        evaluating = ended and self.evaluation is not None and self._evaluated != state.steps
        if evaluating:
            self._evaluate(state)
        # The time may have run out after the step that was saved, or in its evaluation.
        unsaved = self._saved.steps < state.steps or (ended and self._saved.share(end) < 1)
        if evaluating or unsaved:
            self._save(state)

    def _evaluate(self, state: schedules.RunState) -> None:
        """Evaluate the training module, or the average of its weights."""
        assert self.evaluation is not None
        with contextlib.ExitStack() as failed:
            # Other ranks may have got through it, and would not take part in the save.
            if self.plan.world == 1:
                failed.callback(self._save, state)  # no step is lost to a failed evaluation
            with self._average.applied() if self._average else contextlib.nullcontext():
                metrics = dict(self.evaluation(self.progress))
            self.training.check_metrics(metrics)
            failed.pop_all()
        self._stopping.note(metrics)
        self._metrics, self._evaluated = metrics, state.steps
        self.history.append((state.epochs, metrics))
        values = meters.progress_values(state) | metrics
        self._write(values)
        self.progress.message(f"evaluation {meters.record_text(values)}")
        # With the time of the evaluation: else the next step seems to be as fast as both together.
        self._show_training(self._at_now(state))
        self.on_event(Event("evaluation", state, metrics))

    def _save(self, state: schedules.RunState) -> None:
        """Save a checkpoint."""
        metrics = self._metrics if self._evaluated == state.steps else {}
        metrics = {**metrics, **self._stopping.state()}
        self._saved = state  # whose time all ranks agree on; the current time is the main rank's
        state = dataclasses.replace(self._at_now(state), plateau=self._plateau)
        self.store.save(self._tensors, state, metrics, self.training.keep)
        self.on_event(Event("checkpoint", state, metrics))

    def _at_now(self, state: schedules.RunState) -> schedules.RunState:
        """Return a state with the current time; its own is when the last step began."""
        return dataclasses.replace(state, seconds=self._clock())

    def _show_training(self, state: schedules.RunState) -> None:
        """Show the stage of training and how much of it is done."""
        self.progress.stage("training", 1.0)
        self.progress.advance(state.share(self.training.end))

    def _write(self, values: meters.Record) -> None:
        """Send a record to all trackers."""
        for tracker in self._session.trackers:
            tracker.write(values)


TRAINING_NAMES: Mapping[str, str] = {
    "lr": "training.optimizer.lr", "learning_rate": "training.optimizer.lr",
    "epochs": "training.until", "until": "training.until",
    "warmup": "training.schedule.warmup", "weight_decay": "training.optimizer.decay",
    "precision": "training.precision", "evaluate": "training.evaluate",
    "optimizer": "training.optimizer", "schedule": "training.schedule",
}  # fmt: skip
"""Common names → dotted paths, of every run."""

SAME_SETTINGS: Mapping[str, tuple[str, str]] = {
    "num_train_epochs": ("epochs", "{}"), "num_epochs": ("epochs", "{}"),
    "max_steps": ("until", "{} steps"), "steps": ("until", "{} steps"),
    "warmup_steps": ("warmup", "{} steps"), "warmup_ratio": ("warmup", "{}"),
    "max_grad_norm": ("training.clip_norm", "{}"), "lr_scheduler_type": ("schedule", "{}"),
    "eval_steps": ("evaluate", "{} steps"),
    "save_steps": ("training.save", "{} steps"), "logging_steps": ("training.report", "{} steps"),
    "patience": ("training.early_stopping", "{}"),
    "early_stopping_patience": ("training.early_stopping", "{}"),
}  # fmt: skip
"""Names of other libraries with the same meaning → the name here, and the form of its value."""

PEER_NAMES: Mapping[str, str] = {
    "save_total_limit": "training.keep.last", "gradient_accumulation_steps": "microbatch_tokens",
    "fp16": "precision", "bf16": "precision",
    "adam_beta1": "training.optimizer.betas", "adam_beta2": "training.optimizer.betas",
    "adam_epsilon": "training.optimizer.eps", "gradient_checkpointing": "training.recompute",
    "torch_compile": "training.compiled", "report_to": "training.trackers",
    "eval_strategy": "evaluate", "evaluation_strategy": "evaluate",
    "save_strategy": "training.save", "logging_strategy": "training.report",
}  # fmt: skip
"""Names of transformers whose values mean something else → the setting to suggest."""


def expand_names(
    overrides: Tree | Iterable[str],
    names: Mapping[str, str],
    same: Mapping[str, tuple[str, str]] = SAME_SETTINGS,
) -> dict[str, Any]:
    """Return overrides as a tree in which common names are replaced by their dotted paths.

        ["lr=3e-5", "epochs=4"] → {"training": {"optimizer": {"lr": "3e-5"}, "until": "4 epochs"}}

    Args:
        names: common names → dotted paths.
        same: names of other libraries, as in `SAME_SETTINGS`.

    Raises:
        ConfigError: a text is not a setting, or a setting is given under two names.
    """
    settings = parse_overrides(overrides)
    leaves: dict[tuple[str, ...], tuple[str, Any]] = {}
    for name, setting in settings.items():
        common, form = same.get(name, (name, "{}"))
        if name == "warmup_steps" and _below_one(setting):  # in transformers 5, a share of the run
            form = "{}"
        value = setting if form == "{}" else form.format(setting)
        if common == "epochs" and value != "auto":
            value = f"{value} epochs"
        path = tuple(names.get(common, common).split("."))
        for keys, leaf in _leaves(value, path):
            spelling = name if path != (name,) else ".".join(keys)
            # A union's member by its name alone, optimizer=lamb, is its kind.
            kind = keys[:-1] if keys[-1] == "kind" else (*keys, "kind")
            if other := leaves.get(keys) or leaves.get(kind):
                message = f"{spelling!r} sets what {other[0]!r} sets, which is given, too"
                raise ConfigError(message, where=spelling, fix="Leave one of them out.")
            leaves[keys] = spelling, leaf
    tree: dict[str, Any] = {}
    # Members of unions before their settings, which the name of a member alone would replace.
    for keys, (_, setting) in sorted(leaves.items(), key=lambda item: len(item[0])):
        table = setting
        for key in reversed(keys):
            table = {key: table}
        tree = merge(tree, table)
    return tree


def _below_one(setting: Any) -> bool:
    """Return True for a number below 1, or its text."""
    try:
        return float(setting) < 1
    except (TypeError, ValueError):
        return False


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each setting of a tree."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value
