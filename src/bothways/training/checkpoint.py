"""Checkpoints: folders from which a run continues as if it had never stopped.

    step-120/model.safetensors   weights, and state.pt, optimizer and random state (`saved_state`);
             shards/             of a large sharded model instead, one such file a rank
             progress.json       progress, metrics and the run's configuration
             manifest.json       format, and the sha256 of each of these; written last

A checkpoint is written whole or not at all. One of another run or of another format is refused; a
damaged one is skipped with a note. Draws for the data are keyed by place, so that the cursor is
their only state.

A run keeps them in its folder, with records and signals (`FolderStore`): it can be interrupted and
resumed. A run in memory keeps the best weights alone and ends with them (`MemoryStore`).

After Ctrl-C, SIGTERM, SIGUSR1 or a closed terminal the run finishes its step and saves.
Clouds send SIGTERM before they take a machine away, Slurm the signal that a job asks for: SIGUSR1
by custom. A second Ctrl-C ends the program at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

import bothways
from bothways.core import errors
from bothways.core.config.values import flatten, require_at_least
from bothways.core.errors import argument, read_errors
from bothways.core.files import (
    HIDDEN,
    LOCK,
    OWNER,
    file_digest,
    lock_folder,
    read_object,
    remove_folder,
    replace_text,
)
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import device_of
from bothways.core.runtime.process import END_SIGNALS
from bothways.core.source import rng
from bothways.core.training_module import TrainingModule
from bothways.training import saved_state, trackers
from bothways.training.parallel import Plan, from_main_rank, is_main, on_all_ranks
from bothways.training.saved_state import MANIFEST, PROGRESS, RunTensors, use_average
from bothways.training.schedules import RunState
from bothways.training.trackers import StepRecord

Metrics = Mapping[str, int | float]
"""Results of an evaluation by name, such as "held-out/loss/masked"."""
CONFIG = "config.toml"
"""The file of a run with its settings."""
STOPPING = "early_stopping/"
"""The prefix of the state of early stopping, which is kept among the metrics of a checkpoint."""


class DamagedError(errors.CheckpointError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class Best:
    """The checkpoint to keep however old: the one with the best value of a metric."""

    metric: str
    direction: Literal["lowest", "highest"]

    def rank(self, value: float | int) -> tuple[bool, float | int]:
        """Return the sort key of a value, the best first; NaN is worse than any number."""
        return math.isnan(value), -value if self.direction == "highest" else value

    def order(self, metrics: Mapping[str, int | float]) -> tuple[bool, float | int, float | int]:
        """Return the sort key of an evaluation, the best first; of equal values, the lower loss."""
        losses = (value for name, value in metrics.items() if "loss" in name.split("/"))
        return *self.rank(metrics[self.metric]), sum(losses)


@dataclass(frozen=True)
class Keep:
    """The checkpoints that stay: the newest `last`, and the best.

    Attributes:
        last: how many of the newest.
        best: the metric by which one more is kept; None for none.
    """

    last: int = 2
    best: Best | None = None

    def __post_init__(self) -> None:
        require_at_least(1, "training.keep", last=self.last)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are as they were written.

    Attributes:
        progress: the state of the run when it was saved.
        metrics: the last evaluation before, by name.
        config: the configuration of the run, in plain values.
    """

    folder: Path
    progress: RunState
    metrics: Mapping[str, int | float]
    config: Mapping[str, Any]

    def restore(
        self,
        tensors: RunTensors,
        config: Mapping[str, Any],
        changeable: Collection[str] = (),
    ) -> RunState:
        """Restore weights, optimizer and random state, and return the progress.

        With another number of ranks than before, dropout has new draws; the data does not change.

        Args:
            config: the settings of the run that continues.
            changeable: paths of settings that may differ from the checkpoint's.

        Raises:
            CheckpointError: it is of another run, or its tensors are not those of this model.
        """
        # Through JSON, since what was saved went through it too: a tuple is a list there.
        saved, current = flatten(self.config), flatten(json.loads(json.dumps(config)))
        changed = [
            name
            for name in {*saved, *current}
            if saved.get(name) != current.get(name)
            and not any(f"{name}.".startswith(f"{path}.") for path in changeable)
        ]
        # Settings such as `start` may be the reason why others, or what was read, differ.
        changed.sort(key=lambda name: (_is_digest(saved.get(name)), name.count("."), name))
        if changed:
            missing = "not set"
            listed = "; ".join(
                f"{name} is not the same"
                if _is_digest(saved.get(name)) and _is_digest(current.get(name))
                else f"{name} was {saved.get(name, missing)!r}, is {current.get(name, missing)!r}"
                for name in changed[:5]
            )
            suffix = f"; {len(changed) - 5} more" if len(changed) > 5 else ""
            message = f"is of another run: {listed}{suffix}"
            began = "the settings that it began with"
            if (file := self.folder.parent / CONFIG).is_file():
                began += f", which are in {file}"
            model = self.folder.parent / "model"
            start = f"; it can begin with the model in {model}" if model.is_dir() else ""
            fix = f"Continue with {began}, or start a run in another folder{start}."
            raise errors.CheckpointError(message, where=self.folder, fix=fix)
        with read_errors(self.folder):  # the main rank has verified it, maybe on another machine
            (self.folder / MANIFEST).stat()
        saved_state.load_weights(self.folder, tensors.training_module)
        random = saved_state.load_state(self.folder, tensors.optimizer)
        plan, device = tensors.plan, device_of(tensors.training_module)
        if len(random["cpu"]) != plan.world:
            draws = rng(self.progress.steps, "dropout", index=plan.rank)
            torch.manual_seed(int(draws.integers(2**63)))
            return self.progress
        # Clones, since torch reads a state from the start of its storage, whatever row this is.
        torch.set_rng_state(random["cpu"][plan.rank].clone())
        if device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"][plan.rank].clone(), device)
        return self.progress


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder, verified by its checksums.

    Raises:
        CheckpointError: it is of another format.
        DamagedError: a file is missing or was changed.
    """
    manifest = _json(folder, MANIFEST)
    formats = whole, in_parts = saved_state.WHOLE, saved_state.IN_PARTS
    if manifest.get("format") not in formats:  # of any type
        raise errors.CheckpointError(
            f"is of format {manifest.get('format')}, by bothways {manifest.get('bothways')}; "
            f"bothways {bothways.__version__} reads formats {whole} and {in_parts}",
            where=folder,
            fix="Continue the run with the version that began it.",
        )
    digests = manifest.get("files")
    if not isinstance(digests, dict):
        raise DamagedError(f"{MANIFEST} is damaged", where=folder, fix=_GO_BACK)
    tensors = (saved_state.WEIGHTS,) if manifest["format"] == whole else ()
    for name in dict.fromkeys((*tensors, saved_state.STATE, PROGRESS, *digests)):
        if not (folder / name).is_file():
            raise DamagedError(f"{name} is missing", where=folder, fix=_GO_BACK)
        if file_digest(folder / name) != digests.get(name):
            message = f"{name} is damaged or was changed: it is not what was saved"
            raise DamagedError(message, where=folder, fix=_GO_BACK)
    values = _json(folder, PROGRESS)
    try:
        progress = RunState.from_json(values["progress"])
        metrics, config = dict(values["metrics"]), dict(values["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{PROGRESS} is damaged", where=folder, fix=_GO_BACK) from error
    return Checkpoint(folder, progress, metrics, config)


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    steps = {path: path.name.removeprefix("step-") for path in run.glob("step-*")}
    return sorted(
        (path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path])
    )


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint folder of a run; None if there is none."""
    return next(reversed(checkpoints(run)), None)


def best_checkpoint(run: Path, best: Best) -> Path | None:
    """Return the checkpoint folder with the best value of a metric, if any has that metric.

    Of equal values, the one with the lower loss; of equal losses, the oldest.

    Raises:
        CheckpointError: the metrics of a checkpoint cannot be read.
    """
    evaluations: dict[Path, Mapping[str, float]] = {}
    for folder in checkpoints(run):
        metrics = _json(folder, PROGRESS).get("metrics", {})
        if isinstance(metrics, dict) and best.metric in metrics:
            evaluations[folder] = metrics
    return min(evaluations, key=lambda folder: best.order(evaluations[folder]), default=None)


def prune(run: Path, keep: Keep, newest: int | None = None, plateau: int = 0) -> None:
    """Delete the checkpoints that need not stay, and those after the step `newest`.

    The latter are damaged ones, which a resumed run has skipped, or those of a decay that it has
    left out. The checkpoint of the step `plateau` stays.
    """
    for folder in checkpoints(run):
        if newest is not None and int(folder.name.removeprefix("step-")) > newest:
            remove_folder(folder)
    folders = checkpoints(run)
    stay = {*folders[-keep.last :], best_checkpoint(run, keep.best) if keep.best else None}
    stay.add(run / f"step-{plateau}")
    for folder in folders:
        if folder not in stay:
            remove_folder(folder)


_GO_BACK = "Delete the folder to continue from the checkpoint before it."


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_object(folder / name, DamagedError, _GO_BACK)
    except errors.ResourceError as error:
        if (folder / name).is_file():  # it may be whole: a run that skips it would delete it
            raise
        message = f"is not a checkpoint: {name} cannot be read"
        raise DamagedError(message, where=folder, fix=_GO_BACK) from error


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


@dataclass(frozen=True)
class RunSession:
    """The receivers of a session of training: all of them, on the main rank.

    Attributes:
        signals: those that end it after a step, as they come.
        trackers: receive the records.
        note_step: records the rate before a step, for a repeat.
    """

    signals: Sequence[signal.Signals] = ()
    trackers: Sequence[trackers.Tracker] = ()
    note_step: Callable[[RunState, float], object] = lambda state, rate: None


@dataclass(frozen=True)
class FolderStore:
    """The folder of a run (`run_folder`), seen by all ranks.

    Attributes:
        config: the resolved configuration, in plain values. A checkpoint with another one is
            refused.
        changeable: paths of settings that may differ (`changeable_settings`).
        records: texts of further files by name, such as CONFIG. They are written when a checkpoint
            is restored: a refused run does not replace the records of the run in the folder.
    """

    folder: Path
    config: Mapping[str, Any]
    changeable: Collection[str] = ()
    records: Mapping[str, str] = field(default_factory=dict)

    def restore(self, tensors: RunTensors) -> tuple[RunState, Metrics, list[str]]:
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
        for name, text in self.records.items() if is_main(tensors.plan) else ():
            replace_text(self.folder / name, text)
        return state, metrics, notes

    def _choose(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the checkpoint to continue from, and notes."""
        notes: list[str] = []
        failures: list[errors.CheckpointError] = []
        for folder in reversed(checkpoints(self.folder)):
            try:
                newest = read_checkpoint(folder)
                break
            except DamagedError as error:
                failures.append(error)
                notes.append(f"note: skipped a damaged checkpoint: {error}")
        else:
            if failures:
                raise failures[0]
            return None, notes
        # A run that is longer now continues from before the decay, not from the end of it.
        plateau = self.folder / f"step-{newest.progress.plateau}"
        previous, current = (
            config.get("training", {}).get("until") for config in (newest.config, self.config)
        )
        if previous == current or plateau == newest.folder or not plateau.exists():
            return newest, notes
        notes.append(f"note: continues from {plateau.name}, where the decay of the rate began")
        return read_checkpoint(plateau), notes

    def save(self, tensors: RunTensors, state: RunState, metrics: Metrics, keep: Keep) -> None:
        """Write a checkpoint and delete those that need not stay; all ranks wait for it.

        A rank that went on would take the main one for one that hangs, and would only learn that
        it is lost if the disk is full.
        """

        def write() -> None:
            """Write it, and delete those that need not stay."""
            saved_state.save_checkpoint(self.folder, tensors, state, metrics, self.config)
            if is_main(tensors.plan):
                prune(self.folder, keep, state.steps, state.plateau)

        on_all_ranks(tensors.plan, write)

    def load_best(self, training_module: TrainingModule, best: Best) -> None:
        """Load the best weights into a training module, if any evaluation has the metric."""
        if (folder := best_checkpoint(self.folder, best)) is not None:
            saved_state.load_weights(read_checkpoint(folder).folder, training_module)
            use_average(training_module)

    @contextlib.contextmanager
    def session(
        self, plan: Plan, state: RunState, hosted: Sequence[trackers.HostedTracker] = ()
    ) -> Iterator[RunSession]:
        """Open the trackers and the record of steps; signals end the session."""
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(catch_signals())
            if not is_main(plan):
                yield RunSession(signals)
                return
            folder, step = self.folder, state.steps
            record = stack.enter_context(contextlib.closing(StepRecord(folder, step, plan.world)))
            receivers: list[trackers.Tracker] = [trackers.JsonLines(folder / "metrics.jsonl", step)]
            if errors.installed("tensorboard"):
                board = trackers.TensorBoard(folder / "tensorboard", step)
                receivers.append(stack.enter_context(contextlib.closing(board)))
            if hosted:
                remote = trackers.WeightsAndBiases(folder, flatten(dict(self.config)))
                receivers.append(stack.enter_context(contextlib.closing(remote)))
            yield RunSession(signals, receivers, record.note)


@dataclass
class MemoryStore:
    """The best weights of a run of one process, in memory.

    Attributes:
        metrics: metrics of the best weights; empty without evaluations.
    """

    metrics: Metrics = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def restore(self, tensors: RunTensors) -> tuple[RunState, Metrics, list[str]]:
        """Return the start of a run."""
        return RunState(), {}, []

    def save(self, tensors: RunTensors, state: RunState, metrics: Metrics, keep: Keep) -> None:
        """Keep the weights if their metrics are the best so far."""
        metrics = {name: value for name, value in metrics.items() if not name.startswith(STOPPING)}
        if not metrics or keep.best is None:
            return
        if not self.metrics or keep.best.order(metrics) < keep.best.order(self.metrics):
            weights = tensors.training_module.trained_state()
            self.metrics, self.weights = metrics, {n: w.clone() for n, w in weights.items()}

    def load_best(self, training_module: TrainingModule, best: Best) -> None:
        """Load the best weights into a training module, if there was an evaluation."""
        training_module.load_state_dict(self.weights, strict=False)
        use_average(training_module)

    @contextlib.contextmanager
    def session(
        self, plan: Plan, state: RunState, hosted: Sequence[trackers.HostedTracker] = ()
    ) -> Iterator[RunSession]:
        """Open nothing: Ctrl-C ends the run at once. Raises ConfigError for hosted trackers."""
        if hosted:
            message = "need a run in a folder, and this one is in memory"
            raise errors.ConfigError(message, where="training.trackers", fix="Give it a folder.")
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
    with errors.os_errors(folder, another):
        if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
            message = "is not empty, and not the folder of a run"
            raise errors.ResourceError(message, where=folder, fix=another)
        if not resume and latest_checkpoint(folder) is not None:
            fix = f"Add {argument(resume=True)} to continue it, or choose another folder."
            message = "holds the checkpoints of an earlier run"
            raise errors.ResourceError(message, where=folder, fix=fix)
    patience = LAST_RANK if resume and "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    with lock_folder(folder, patience, progress):
        with errors.os_errors(folder, another):
            begun = (folder / MARK).exists()
            (folder / MARK).touch()
            for leftover in folder.glob(f"{HIDDEN}*"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        try:
            yield folder
        except BaseException as error:
            if not folder.is_dir():
                message = "was removed while the run was writing to it"
                fix = "Start the run again, in a folder that stays."
                raise errors.ResourceError(message, where=folder, fix=fix) from error
            if not begun and {file.name for file in folder.iterdir()} <= {MARK, LOCK, OWNER}:
                (folder / MARK).unlink()  # the run was refused
            raise


@contextlib.contextmanager
def catch_signals() -> Iterator[list[signal.Signals]]:
    """Yield the list of the signals that come while it is open; restore the handlers at its end.

    Signals reach the main thread alone: opened in another thread, it changes nothing.
    """
    received = list[signal.Signals]()

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))
        # Not through sys.stderr: the signal may have come in the middle of a write to it.
        with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of the output, too
            message = f"the run saves after this step and ends. To continue, {errors.AGAIN}. "
            message += "Ctrl-C ends it at once."
            os.write(2, errors.render(f"\n{received[0].name}: {message}\n").encode())

    handlers = dict[signal.Signals, Any]()
    if threading.current_thread() is threading.main_thread():
        # What is ignored stays so: `nohup` ignores SIGHUP.
        numbers = [n for n in END_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command that resumes a run started with these arguments, under torchrun if needed.

    Of a run on several machines it is the command for each machine.

    >>> resume_command(["pretrain", "my run"])
    "bothways pretrain 'my run' --resume"
    """
    words = ["bothways", *(word for word in arguments if word != "--resume"), "--resume"]
    if ranks := os.environ.get("LOCAL_WORLD_SIZE"):
        machines, several = int(os.environ.get("WORLD_SIZE", ranks)) // int(ranks), []
        if machines > 1:
            endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            several = [f"--nnodes={machines}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        words = ["torchrun", *several, f"--nproc-per-node={ranks}", "-m", *words]
    return shlex.join(words)
