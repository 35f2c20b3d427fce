"""Where a run keeps its checkpoints: in a folder, with records and signals, or in memory.

A run in a folder can be interrupted and resumed; a run in memory keeps the best weights alone and
ends with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bothways.core.advice import argument
from bothways.core.atomic_files import HIDDEN, replace_text
from bothways.core.config.tree import flatten
from bothways.core.errors import CheckpointError, ResourceError, installed, os_errors
from bothways.core.folder_lock import LOCK, OWNER, lock_folder
from bothways.core.progress import SILENT, Progress
from bothways.core.training_module import TrainingModule
from bothways.training import checkpoint as saved
from bothways.training.average import use_average
from bothways.training.early_stopping import BEST, WAITED, Metrics
from bothways.training.parallel import Plan, Sharded, from_main_rank, is_main, on_all_ranks
from bothways.training.saved_state import Group, RunTensors, new_checkpoint
from bothways.training.signals import Interruption
from bothways.training.state import RunState
from bothways.training.step_record import StepRecord
from bothways.training.trackers import HOSTED, HostedTracker, JsonLines, TensorBoard, Tracker

NoteStep = Callable[[RunState, float], object]
"""Receives the state before each step, and the multiple of the peak rate that the step has."""


@dataclass(frozen=True)
class RunSession:
    """The receivers of a session of training: all of them, on the main rank."""

    trackers: Sequence[Tracker] = ()
    interruption: Interruption = field(default_factory=Interruption)
    note_step: NoteStep = lambda state, rate: None


class Background:
    """Runs jobs next to the training in a thread, one after the other; no error is lost."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "saving")
        self._job: Future[object] | None = None
        self._group: Any = None

    def group(self, plan: Plan) -> Any:
        """Return a separate group of the ranks, in which jobs exchange values; None for one rank.

        All ranks call this, not in a job.
        """
        if self._group is None and isinstance(plan, Sharded):
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group

    def run(self, job: Callable[[], object]) -> None:
        """Start a job when the one before is done; raise the error of that one."""
        self.wait()
        self._job = self._thread.submit(job)

    def wait(self) -> None:
        """Wait for the job; raise its error."""
        job, self._job = self._job, None
        if job is not None:
            job.result()


@dataclass(frozen=True)
class FolderStore:
    """The folder of a run (`run_folder`), seen by all ranks.

    Attributes:
        config: the resolved configuration, in plain values. A checkpoint with another one is
            refused.
        changeable: paths of settings that may differ (`changeable_settings`).
        settings: the text of `config.toml`; None to write none.
    """

    folder: Path
    config: Mapping[str, Any]
    changeable: Collection[str] = ()
    settings: str | None = None
    _background: Background = field(default_factory=Background, init=False, repr=False)

    def restore(self, tensors: RunTensors, keep: saved.Keep) -> tuple[RunState, Metrics, list[str]]:
        """Restore the newest whole checkpoint; return its progress, its metrics and notes.

        With another `training.until`, a run in the decay of its schedule returns to the end of the
        plateau.

        Raises:
            CheckpointError: a checkpoint is of another run, or all are damaged.
        """
        checkpoint, notes = from_main_rank(tensors.plan, self._choose)
        state, metrics = RunState(), dict[str, int | float]()
        if checkpoint is not None:
            state = checkpoint.restore(tensors, self.config, self.changeable)
            metrics = dict(checkpoint.metrics)
        if is_main(tensors.plan) and self.settings is not None:
            replace_text(self.folder / "config.toml", self.settings)
        return state, metrics, notes

    def _choose(self) -> tuple[saved.Checkpoint | None, list[str]]:
        """Return the checkpoint to continue from, and notes."""
        newest, notes = self._newest()
        if newest is None:
            return None, notes
        # A run that is longer now continues from before the decay, not from the end of it.
        plateau = self.folder / f"step-{newest.progress.plateau}"
        previous, current = (
            config.get("training", {}).get("until") for config in (newest.config, self.config)
        )
        if previous == current or plateau == newest.folder or not plateau.exists():
            return newest, notes
        notes.append(f"note: continues from {plateau.name}, where the decay of the rate began")
        return saved.read_checkpoint(plateau), notes

    def _newest(self) -> tuple[saved.Checkpoint | None, list[str]]:
        notes: list[str] = []
        failures: list[CheckpointError] = []
        for folder in reversed(saved.checkpoints(self.folder)):
            try:
                return saved.read_checkpoint(folder), notes
            except saved.DamagedError as error:
                failures.append(error)
                notes.append(f"note: skipped a damaged checkpoint: {error}")
        if failures:
            raise failures[0]
        return None, notes

    def save(
        self, tensors: RunTensors, state: RunState, metrics: Metrics, keep: saved.Keep
    ) -> None:
        """Write a checkpoint and delete those that need not stay; all ranks wait for it.

        A rank that went on would take the main one for one that hangs, and would only learn that
        it is lost if the disk is full.
        """
        plan = tensors.plan
        on_all_ranks(plan, self._background.wait)  # for the copy in memory of the one before
        new = new_checkpoint(
            self.folder, tensors, state,
            metrics=metrics, config=self.config, copied=keep.asynchronous,
        )  # fmt: skip

        def write(group: Group = None) -> None:
            """Write it, and delete those that need not stay."""
            new.write(group)
            if is_main(plan):
                saved.prune(self.folder, keep, state.steps, state.plateau)

        if keep.asynchronous:
            group = self._background.group(plan)
            self._background.run(lambda: write(group))
        else:
            on_all_ranks(plan, write)

    def load_best(self, training_module: TrainingModule, best: saved.Best) -> None:
        """Load the best weights into a training module, if any evaluation has the metric."""
        if (folder := saved.best_checkpoint(self.folder, best)) is not None:
            saved.read_checkpoint(folder).load_weights(training_module)
            use_average(training_module)

    @contextlib.contextmanager
    def session(
        self, plan: Plan, state: RunState, hosted: Sequence[HostedTracker] = ()
    ) -> Iterator[RunSession]:
        """Open the trackers and the step record of this rank; signals end the session."""
        with contextlib.ExitStack() as stack:
            session = RunSession(interruption=stack.enter_context(Interruption()))
            if is_main(plan):
                record = StepRecord(self.folder, state.steps, plan.world)
                stack.enter_context(contextlib.closing(record))
                trackers: list[Tracker] = [JsonLines(self.folder / "metrics.jsonl", state.steps)]
                if installed("tensorboard"):
                    trackers.append(TensorBoard(self.folder / "tensorboard", state.steps))
                plain = flatten(dict(self.config))
                trackers += [HOSTED[kind](self.folder, plain) for kind in hosted]
                for tracker in trackers:
                    stack.enter_context(contextlib.closing(tracker))
                session = RunSession(trackers, session.interruption, record.note)
            try:
                yield session
                on_all_ranks(plan, self._background.wait)
            finally:
                self._background.wait()


@dataclass
class MemoryStore:
    """The best weights of a run of one process, in memory.

    Attributes:
        history: (epochs, metrics) of every evaluation.
        metrics: metrics of the best weights; empty without evaluations.
    """

    history: list[tuple[float, Metrics]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def restore(self, tensors: RunTensors, keep: saved.Keep) -> tuple[RunState, Metrics, list[str]]:
        """Return the start of a run."""
        return RunState(), {}, []

    def save(
        self, tensors: RunTensors, state: RunState, metrics: Metrics, keep: saved.Keep
    ) -> None:
        """Keep the weights if their metrics are the best so far."""
        metrics = {name: value for name, value in metrics.items() if name not in (BEST, WAITED)}
        if not metrics or keep.best is None:
            return
        self.history.append((state.epochs, metrics))
        if not self.metrics or keep.best.order(metrics) < keep.best.order(self.metrics):
            weights = tensors.training_module.trained_state()
            self.metrics, self.weights = metrics, {n: w.clone() for n, w in weights.items()}

    def load_best(self, training_module: TrainingModule, best: saved.Best) -> None:
        """Load the best weights into a training module, if there was an evaluation."""
        if self.weights:
            training_module.load_state_dict(self.weights, strict=False)
            use_average(training_module)

    @contextlib.contextmanager
    def session(
        self, plan: Plan, state: RunState, hosted: Sequence[HostedTracker] = ()
    ) -> Iterator[RunSession]:
        """Open nothing: Ctrl-C ends the run at once."""
        yield RunSession()


Store = FolderStore | MemoryStore


MARK = ".run"
"""Empty file that marks the folder of a run, also before its first checkpoint."""
LAST_RANK = 120.0
"""Seconds for a rank that is ending: torchrun kills it after 30, and a file server takes up to 90
to free what a machine has locked that is gone."""


@contextlib.contextmanager
def run_folder(folder: Path, *, resume: bool, progress: Progress = SILENT) -> Iterator[Path]:
    """Create the folder if it is missing, and lock it for this process.

    A rank that torchrun has started again waits for the one before it, which may be on another
    machine and slow to end.

    Args:
        folder: of the run's checkpoints and records.
        resume: continue with the checkpoints in it; without, it must hold none.
        progress: receives a note about the wait.

    Raises:
        ResourceError: it is locked, holds checkpoints or other files, or cannot be written.
    """
    another = "Choose another folder."
    with os_errors(folder, another):
        if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
            message = "is not empty, and not the folder of a run"
            raise ResourceError(message, where=folder, fix=another)
        if not resume and saved.latest_checkpoint(folder) is not None:
            fix = f"Add {argument(resume=True)} to continue it, or choose another folder."
            raise ResourceError("holds the checkpoints of an earlier run", where=folder, fix=fix)
    patience = LAST_RANK if resume and "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    with lock_folder(folder, patience, progress):
        with os_errors(folder, another):
            begun = (folder / MARK).exists()
            (folder / MARK).touch()
            for leftover in folder.glob(f"{HIDDEN}*"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        try:
            yield folder
        except BaseException:
            if not begun and {file.name for file in folder.iterdir()} <= {MARK, LOCK, OWNER}:
                (folder / MARK).unlink()  # the run was refused
            raise
