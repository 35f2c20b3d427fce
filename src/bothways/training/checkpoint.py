"""Checkpoints: folders from which a run continues as if it had never stopped.

    step-120/model.safetensors   weights
             state.pt            optimizer, and the random state of each rank
             progress.json       progress, metrics and the run's configuration
             manifest.json       format, and the sha256 of each of these; written last

A checkpoint is written whole or not at all. One of another run or of another format is refused; a
damaged one is skipped with a note. Draws for the data are keyed by place, so that the cursor is
their only state.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import bothways
from bothways.core.atomic_files import file_digest, remove_folder, replace_folder
from bothways.core.config.checks import require_at_least
from bothways.core.config.tree import flatten
from bothways.core.errors import CheckpointError, ConfigError, ResourceError
from bothways.core.json_reader import read_object
from bothways.core.keyed_rng import rng
from bothways.core.learner import Learner
from bothways.runtime.devices import disk_free
from bothways.training.parallel import Plan, gather, is_main
from bothways.training.state import RunState

FORMAT = 1
HARMLESS = frozenset(
    {
        "training.report", "training.evaluate", "training.save", "training.keep",
        "training.early_stopping", "training.target", "training.recompute", "training.compiled",
        "training.until", "microbatch_tokens", "evaluation_tokens", "objective.teacher",
    }
)  # fmt: skip
"""Settings that may change on resume. None changes an update, except that a longer run has a longer
schedule. A teacher is known by its sha256, not by its path."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written."""


WEIGHTS, STATE = "model.safetensors", "state.pt"
PROGRESS, MANIFEST = "progress.json", "manifest.json"


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
    """The checkpoints that stay: the newest `last`, and the best."""

    last: int = 2
    best: Best | None = None

    def __post_init__(self) -> None:
        require_at_least(1, "training.keep", last=self.last)

    def check(self, evaluated: Iterable[str]) -> None:
        """Raise ConfigError if the metric of the best checkpoint is not evaluated."""
        if self.best and self.best.metric not in (known := list(evaluated)):
            what = f"{self.best.metric!r} is not evaluated: there are {', '.join(known)}"
            raise ConfigError(what, where="training.keep.best.metric")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are as they were written.

    Attributes:
        folder: of its files.
        progress: of the run when it was saved.
        metrics: of the last evaluation before, by name.
        config: the configuration of the run, in plain values.
    """

    folder: Path
    progress: RunState
    metrics: Mapping[str, int | float]
    config: Mapping[str, Any]

    def load_weights(self, learner: Learner) -> None:
        """Load the weights into a learner.

        Raises:
            CheckpointError: tensors are missing, too many or of another shape.
        """
        try:
            load_model(_Trained(learner), self.folder / WEIGHTS, device=str(_device(learner)))
        except (RuntimeError, SafetensorError) as error:
            raise _misfit(self.folder, WEIGHTS, error) from error

    def restore(
        self,
        learner: Learner,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        config: Mapping[str, Any],
    ) -> RunState:
        """Restore weights, optimizer and random state, and return the progress.

        With another number of ranks than before, dropout has new draws; the data does not change.

        Raises:
            CheckpointError: it is of another run, or its tensors are not those of this model.
        """
        _check_run(self, config)
        self.load_weights(learner)
        try:
            state = torch.load(self.folder / STATE, map_location="cpu", weights_only=True)
            optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise _misfit(self.folder, STATE, error) from error
        _set_random(state["random"], _device(learner), plan, self.progress)
        return self.progress


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder, verified by its checksums.

    Raises:
        CheckpointError: it is of another format.
        DamagedError: a file is missing or was changed.
    """
    manifest = _json(folder, MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"is of format {manifest.get('format')}, by bothways {manifest.get('bothways')}; "
            f"bothways {bothways.__version__} reads format {FORMAT}",
            where=folder,
            fix="Continue the run with the version that began it.",
        )
    digests = manifest.get("files")
    if not isinstance(digests, dict):
        raise DamagedError(f"{MANIFEST} is damaged", where=folder, fix=_GO_BACK)
    for name in (WEIGHTS, STATE, PROGRESS):
        if not (folder / name).is_file():
            raise DamagedError(f"{name} is missing", where=folder, fix=_GO_BACK)
        if file_digest(folder / name) != digests.get(name):
            what = f"{name} is damaged or was changed: it is not what was saved"
            raise DamagedError(what, where=folder, fix=_GO_BACK)
    values = _json(folder, PROGRESS)
    try:
        progress = RunState.from_json(values["progress"])
        metrics, config = dict(values["metrics"]), dict(values["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{PROGRESS} is damaged", where=folder, fix=_GO_BACK) from error
    return Checkpoint(folder, progress, metrics, config)


def save_checkpoint(
    run: Path,
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    progress: RunState,
    *,
    metrics: Mapping[str, int | float],
    config: Mapping[str, Any],
) -> None:
    """Write a checkpoint into the folder of a run; called on all ranks, the main one writes.

    Raises:
        ResourceError: there is no room or no permission; earlier checkpoints are untouched.
    """
    random = _random(_device(learner), plan)
    if not is_main(plan):
        return
    state = optimizer.state_dict()
    moments = (tensor for entry in state["state"].values() for tensor in entry.values())
    _check_room(run, [*learner.trained_state().values(), *moments])
    with replace_folder(run / f"step-{progress.steps}") as folder:
        save_model(_Trained(learner), str(folder / WEIGHTS))
        with (folder / STATE).open("wb") as stream:
            torch.save({"optimizer": state, "random": random}, stream)
        record = {"progress": progress.to_json(), "metrics": dict(metrics), "config": config}
        _write(folder / PROGRESS, record)
        files = {name: file_digest(folder / name) for name in (WEIGHTS, STATE, PROGRESS)}
        version = {"format": FORMAT, "bothways": bothways.__version__}
        _write(folder / MANIFEST, {**version, "files": files})


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    steps = {path: path.name.removeprefix("step-") for path in run.glob("step-*")}
    return sorted(
        (path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path])
    )


def latest(run: Path) -> Path | None:
    """Return the newest checkpoint folder of a run; None if there is none."""
    return next(reversed(checkpoints(run)), None)


def best(run: Path, wanted: Best) -> Path | None:
    """Return the checkpoint folder with the best value of a metric, if any has that metric.

    Of equal values, the one with the lower loss; of equal losses, the oldest.

    Raises:
        CheckpointError: the metrics of a checkpoint cannot be read.
    """
    evaluations: dict[Path, Mapping[str, float]] = {}
    for folder in checkpoints(run):
        metrics = _json(folder, PROGRESS).get("metrics", {})
        if isinstance(metrics, dict) and wanted.metric in metrics:
            evaluations[folder] = metrics
    return min(evaluations, key=lambda folder: wanted.order(evaluations[folder]), default=None)


def prune(run: Path, keep: Keep, newest: int | None = None, plateau: int = 0) -> None:
    """Delete the checkpoints that need not stay, and those after the step `newest`.

    The latter are damaged ones, which a resumed run has skipped, or those of a decay that it has
    left out. That of the step `plateau` stays.
    """
    for folder in checkpoints(run):
        if newest is not None and int(folder.name.removeprefix("step-")) > newest:
            remove_folder(folder)
    found = checkpoints(run)
    stay = {*found[-keep.last :], best(run, keep.best) if keep.best else None}
    stay.add(run / f"step-{plateau}")
    for folder in found:
        if folder not in stay:
            remove_folder(folder)


_GO_BACK = "Delete the folder to continue from the checkpoint before it."


class _Trained(nn.Module):
    """The trained part of a learner, as safetensors reads and writes a module."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self._whole = (learner,)  # in a tuple, which does not register it as a submodule

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the trained tensors by name."""
        return self._whole[0].trained_state()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the trained tensors; return missing and unexpected names."""
        result = self._whole[0].load_state_dict(state_dict, strict=False)
        frozen = self._whole[0].frozen()
        missing = [name for name in result.missing_keys if not name.startswith(frozen)]
        return missing, result.unexpected_keys


def _device(learner: Learner) -> torch.device:
    return next(learner.parameters()).device


def _misfit(folder: Path, name: str, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(f"{name} does not fit this model: {reason}", where=folder)


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_object(folder / name, DamagedError, _GO_BACK)
    except ResourceError as error:
        what = f"is not a checkpoint: {name} cannot be read"
        raise DamagedError(what, where=folder, fix=_GO_BACK) from error


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


def _check_room(run: Path, tensors: Iterable[Tensor]) -> None:
    needed, free = sum(tensor.nbytes for tensor in tensors), disk_free(run)
    if needed > free:
        raise ResourceError(
            f"a checkpoint takes {needed / 2**20:,.0f} MiB, but only {free / 2**20:,.0f} MiB "
            "are free",
            where=run,
            fix="Make room; the checkpoints before are whole.",
        )


def _check_run(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    # Through JSON, since what was saved went through it too: a tuple is a list there.
    then, now = flatten(checkpoint.config), flatten(json.loads(json.dumps(config)))
    changed = [
        name
        for name in {*then, *now}
        if then.get(name) != now.get(name)
        and not any(f"{name}.".startswith(f"{harmless}.") for harmless in HARMLESS)
    ]
    # Settings such as `start` may be the reason why others, or what was read, differ.
    changed.sort(key=lambda name: (_is_digest(then.get(name)), name.count("."), name))
    if changed:
        pairs = ((name, then.get(name, "not set"), now.get(name, "not set")) for name in changed)
        shown = "; ".join(_change(*pair) for pair in itertools.islice(pairs, 5))
        more = f"; {len(changed) - 5} more" if len(changed) > 5 else ""
        fix = "Continue with the settings that it began with, or start a run in another folder."
        raise CheckpointError(f"is of another run: {shown}{more}", where=checkpoint.folder, fix=fix)


def _change(name: str, then: Any, now: Any) -> str:
    return (
        f"{name} is not the same"
        if _is_digest(then) and _is_digest(now)
        else f"{name} was {then!r}, is {now!r}"
    )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _random(device: torch.device, plan: Plan) -> dict[str, Tensor]:
    """Return the state of torch's generators by device type, one row a rank."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: gather(plan, state) for name, state in states.items()}


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
