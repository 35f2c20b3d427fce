"""Where a run keeps its checkpoints: in a folder, with records and signals, or in memory.

A run in a folder can be interrupted and resumed; a run in memory keeps the best weights alone and
ends with them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bothways.core.config.tree import flatten
from bothways.core.errors import CheckpointError, installed
from bothways.core.learner import Learner
from bothways.training.average import use_average
from bothways.training.checkpoint import (
    Best,
    Checkpoint,
    DamagedError,
    Keep,
    best_checkpoint,
    checkpoints,
    new_checkpoint,
    prune,
    read_checkpoint,
)
from bothways.training.early_stopping import BEST, WAITED, Metrics
from bothways.training.hosted_trackers import HostedTracker, open_hosted
from bothways.training.parallel import Plan, Sharded, barrier, from_main_rank, is_main, on_all_ranks
from bothways.training.remote import open_remote
from bothways.training.run_folder import note_settings
from bothways.training.saved_state import Group
from bothways.training.signals import Interruption
from bothways.training.state import RunState
from bothways.training.step_record import StepRecord
from bothways.training.trackers import JsonLines, TensorBoard, Tracker

NoteStep = Callable[[RunState, float], object]
"""Receives the state before each step, and the multiple of the peak rate that the step has."""
Session = tuple[list[Tracker], Interruption, NoteStep]


class Background:
    """Runs jobs next to the training in a thread, one after the other; no error is lost."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: Any = None

    def group(self, plan: Plan) -> Any:
        """Return the ranks as a group of its own, in which jobs exchange values; None for one rank.

        All ranks call this, not in a job.
        """
        if self._group is None and isinstance(plan, Sharded):
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group

    def run(self, job: Callable[[], object]) -> None:
        """Start a job when the one before is done.

        Raises:
            Exception: that of the job before.
        """
        self.wait()

        def work() -> None:
            """Do the job and keep its error."""
            try:
                job()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="saving")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


@dataclass(frozen=True)
class FolderStore:
    """The folder of a run (`run_folder`), seen by all ranks.

    Attributes:
        config: the resolved configuration, in plain values. A checkpoint with another one is
            refused, except for settings that change no update (`checkpoint.HARMLESS`).
        settings: the text of `config.toml`; None to write none.
    """

    folder: Path
    config: Mapping[str, Any]
    settings: str | None = None
    _background: Background = field(default_factory=Background, init=False, repr=False)

    def restore(
        self, learner: Learner, optimizer: torch.optim.Optimizer, plan: Plan, keep: Keep
    ) -> tuple[RunState, Metrics, list[str]]:
        """Restore the newest whole checkpoint: its progress, its metrics and notes.

        With another `training.until`, a run in the decay of its schedule returns to the end of the
        plateau.

        Raises:
            CheckpointError: a checkpoint is of another run, or all are damaged.
        """
        fetched = self._fetch(plan, keep)
        checkpoint, notes = from_main_rank(plan, self._chosen)
        if checkpoint is None:
            state: tuple[RunState, Metrics] = RunState(), {}
        else:
            progress = checkpoint.restore(learner, optimizer, plan, self.config)
            state = progress, checkpoint.metrics
        if is_main(plan) and self.settings is not None:
            note_settings(self.folder, self.settings)
        return *state, [*fetched, *notes]

    def _fetch(self, plan: Plan, keep: Keep) -> list[str]:
        """Copy the remote checkpoints that the folder lacks; return notes.

        On each machine one rank does so, for a folder that the machines do not share.
        """
        remote = open_remote(keep.remote)
        if remote is None:
            return []
        names = from_main_rank(plan, lambda: list(remote.checkpoints()))
        notes = []
        if getattr(plan, "local_rank", 0) == 0:
            here = {folder.name for folder in checkpoints(self.folder)}
            missing = [name for name in names if name not in here]
            for name in missing:
                remote.fetch(name, self.folder)
                notes.append(f"note: copied {name} from {remote.url}")
            if missing:
                remote.fetch_records(self.folder)
        barrier(plan)  # for the copies
        return notes

    def _chosen(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the checkpoint to continue from, and notes."""
        checkpoint, notes = self._newest()
        if checkpoint is not None and (plateau := self._plateau(checkpoint)) is not None:
            notes.append(f"note: continues from {plateau.name}, where the decay of the rate began")
            checkpoint = read_checkpoint(plateau)
        return checkpoint, notes

    def _newest(self) -> tuple[Checkpoint | None, list[str]]:
        notes: list[str] = []
        failures: list[CheckpointError] = []
        for folder in reversed(checkpoints(self.folder)):
            try:
                return read_checkpoint(folder), notes
            except DamagedError as error:
                failures.append(error)
                notes.append(f"note: skipped a damaged checkpoint: {error}")
        if failures:
            raise failures[0]
        return None, notes

    def _plateau(self, newest: Checkpoint) -> Path | None:
        """Return the folder of an earlier checkpoint from which a longer run continues."""
        then, now = (each.get("training", {}).get("until") for each in (newest.config, self.config))
        folder = self.folder / f"step-{newest.progress.plateau}"
        return folder if then != now and folder.exists() and folder != newest.folder else None

    def save(
        self,
        learner: Learner,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        progress: RunState,
        metrics: Metrics,
        keep: Keep,
    ) -> None:
        """Write a checkpoint and delete those that need not stay; all ranks wait for it.

        A rank that went on would take the main one for one that hangs, and would only learn that
        it is lost if the disk is full.
        """
        on_all_ranks(plan, self._background.wait)  # for the copy in memory of the one before
        new = new_checkpoint(
            self.folder, learner, optimizer, plan, progress,
            metrics=metrics, config=self.config, aside=keep.asynchronous,
        )  # fmt: skip
        remote = open_remote(keep.remote)

        def write(group: Group = None) -> None:
            """Write it, copy it, and delete those that need not stay."""
            new.write(group, remote.send if remote else lambda folder, files: None)
            if not is_main(plan):
                return
            prune(self.folder, keep, progress.steps, progress.plateau)
            if remote is not None:
                remote.complete(new.place)
                remote.send_records(self.folder)
                remote.keep_only(folder.name for folder in checkpoints(self.folder))

        if keep.asynchronous:
            group = self._background.group(plan)
            self._background.run(lambda: write(group))
        else:
            on_all_ranks(plan, write)

    def load_best(self, learner: Learner, wanted: Best) -> None:
        """Give the learner the best weights, if any evaluation has the metric."""
        if (folder := best_checkpoint(self.folder, wanted)) is not None:
            read_checkpoint(folder).load_weights(learner)
            use_average(learner)

    @contextlib.contextmanager
    def session(
        self, plan: Plan, progress: RunState, hosted: Sequence[HostedTracker] = ()
    ) -> Iterator[Session]:
        """Open the trackers and the step record of this rank, and note signals instead of dying of
        them.
        """
        with contextlib.ExitStack() as stack:
            interruption = stack.enter_context(Interruption())
            trackers: list[Tracker] = []
            note_step: NoteStep = _note_nothing
            if is_main(plan):
                record = StepRecord(self.folder, progress.steps, plan.world)
                note_step = stack.enter_context(contextlib.closing(record)).note
                trackers = [JsonLines(self.folder / "metrics.jsonl", progress.steps)]
                if installed("tensorboard"):
                    trackers.append(TensorBoard(self.folder / "tensorboard", progress.steps))
                plain = flatten(dict(self.config))
                trackers += [open_hosted(kind, self.folder, plain) for kind in hosted]
                for tracker in trackers:
                    stack.enter_context(contextlib.closing(tracker))
            try:
                yield trackers, interruption, note_step
                on_all_ranks(plan, self._background.wait)
            finally:
                self._background.wait()


@dataclass
class MemoryStore:
    """The best weights of a run of one process, in memory.

    Attributes:
        history: (epochs, metrics) of every evaluation.
        metrics: those of the best weights; empty without evaluations.
    """

    history: list[tuple[float, Metrics]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def restore(
        self, learner: Learner, optimizer: torch.optim.Optimizer, plan: Plan, keep: Keep
    ) -> tuple[RunState, Metrics, Sequence[str]]:
        """Return the start of a run."""
        return RunState(), {}, ()

    def save(
        self,
        learner: Learner,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        progress: RunState,
        metrics: Metrics,
        keep: Keep,
    ) -> None:
        """Keep the weights if their metrics are the best so far."""
        metrics = {name: value for name, value in metrics.items() if name not in (BEST, WAITED)}
        if not metrics or keep.best is None:
            return
        self.history.append((progress.epochs, metrics))
        if not self.metrics or keep.best.order(metrics) < keep.best.order(self.metrics):
            self.metrics = metrics
            self.weights = {
                name: tensor.clone() for name, tensor in learner.trained_state().items()
            }

    def load_best(self, learner: Learner, wanted: Best) -> None:
        """Give the learner the best weights, if there was an evaluation."""
        if self.weights:
            learner.load_state_dict(self.weights, strict=False)
            use_average(learner)

    @contextlib.contextmanager
    def session(
        self, plan: Plan, progress: RunState, hosted: Sequence[HostedTracker] = ()
    ) -> Iterator[Session]:
        """Open nothing: Ctrl-C ends the run at once."""
        yield [], Interruption(), _note_nothing


Store = FolderStore | MemoryStore


def _note_nothing(state: RunState, rate: float) -> None:
    """Ignore a step: another rank records it, or nobody does."""
