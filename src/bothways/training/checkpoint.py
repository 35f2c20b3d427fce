"""Checkpoints: folders from which a run continues as if it had never stopped.

    step-120/model.safetensors   weights, and state.pt, optimizer and random state (`saved_state`);
             shards/             of a large sharded model instead, one file a rank
             progress.json       progress, metrics and the run's configuration
             manifest.json       format, and the sha256 of each of these; written last

A checkpoint is written whole or not at all. One of another run or of another format is refused; a
damaged one is skipped with a note. Draws for the data are keyed by place, so that the cursor is
their only state.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import bothways
from bothways.core import errors
from bothways.core.atomic_files import file_digest, remove_folder
from bothways.core.config.checks import require_at_least
from bothways.core.config.tree import flatten
from bothways.core.json_reader import read_object
from bothways.core.keyed_rng import rng
from bothways.core.runtime.devices import device_of
from bothways.core.training_module import TrainingModule
from bothways.training import saved_state
from bothways.training.parallel import Plan
from bothways.training.saved_state import MANIFEST, PROGRESS, RunTensors
from bothways.training.state import RunState


class DamagedError(errors.CheckpointError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class Best:
    """The checkpoint to keep however old: the one with the best value of a metric."""

    metric: str
    direction: Literal["lowest", "highest"]

    def prefers(self, new: float | int, old: float | int) -> bool:
        """Return True if the value `new` is better than `old`."""
        return self.rank(new) < self.rank(old)

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
        asynchronous: write them from a copy in memory while training goes on. An error of writing
            is then raised at the next save.
    """

    last: int = 2
    best: Best | None = None
    asynchronous: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, "training.keep", last=self.last)

    def check(self, evaluated: Iterable[str]) -> None:
        """Raise ConfigError if the metric of the best checkpoint is not evaluated."""
        if self.best and self.best.metric not in (names := list(evaluated)):
            message = f"{self.best.metric!r} is not evaluated: there are {', '.join(names)}"
            raise errors.ConfigError(message, where="training.keep.best.metric")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are as they were written.

    Attributes:
        folder: the folder of its files.
        progress: the state of the run when it was saved.
        metrics: the last evaluation before, by name.
        config: the configuration of the run, in plain values.
    """

    folder: Path
    progress: RunState
    metrics: Mapping[str, int | float]
    config: Mapping[str, Any]

    def load_weights(self, training_module: TrainingModule) -> None:
        """Load the weights into a training module.

        Raises:
            CheckpointError: tensors are missing, too many or of another shape.
        """
        saved_state.load_weights(self.folder, training_module)

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
        _check_run(self, config, changeable)
        self.load_weights(tensors.training_module)
        random = saved_state.load_state(self.folder, tensors.optimizer)
        _set_random(random, device_of(tensors.training_module), tensors.plan, self.progress)
        return self.progress


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder, verified by its checksums.

    Raises:
        CheckpointError: it is of another format.
        DamagedError: a file is missing or was changed.
    """
    manifest = _json(folder, MANIFEST)
    whole, in_parts = saved_state.WHOLE, saved_state.IN_PARTS
    if manifest.get("format") not in {whole, in_parts}:
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


def _check_run(
    checkpoint: Checkpoint, config: Mapping[str, Any], changeable: Collection[str]
) -> None:
    # Through JSON, since what was saved went through it too: a tuple is a list there.
    saved, current = flatten(checkpoint.config), flatten(json.loads(json.dumps(config)))
    changed = [
        name
        for name in {*saved, *current}
        if saved.get(name) != current.get(name)
        and not any(f"{name}.".startswith(f"{path}.") for path in changeable)
    ]
    # Settings such as `start` may be the reason why others, or what was read, differ.
    changed.sort(key=lambda name: (_is_digest(saved.get(name)), name.count("."), name))
    if changed:
        listed = "; ".join(
            f"{name} is not the same"
            if _is_digest(saved.get(name)) and _is_digest(current.get(name))
            else f"{name} was {saved.get(name, 'not set')!r}, is {current.get(name, 'not set')!r}"
            for name in changed[:5]
        )
        suffix = f"; {len(changed) - 5} more" if len(changed) > 5 else ""
        fix = "Continue with the settings that it began with, or start a run in another folder."
        raise errors.CheckpointError(
            f"is of another run: {listed}{suffix}", where=checkpoint.folder, fix=fix
        )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _set_random(
    states: Mapping[str, Tensor], device: torch.device, plan: Plan, progress: RunState
) -> None:
    if len(states["cpu"]) != plan.world:
        torch.manual_seed(int(rng(progress.steps, "dropout", index=plan.rank).integers(2**63)))
        return
    # Clones, since torch reads a state from the start of its storage, whatever row this is.
    torch.set_rng_state(states["cpu"][plan.rank].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][plan.rank].clone(), device)
