"""The tensors of a checkpoint: whole in one file, or in parts, one file a rank, by torch's
distributed checkpoints (DCP).

    model.safetensors   weights, whole
    shards/             weights and the optimizer's moments, in parts
    state.pt            the rest: whole moments, counts, settings of groups, random state

Parameters that modules share are stored once. Both kinds are read by any plan and any number of
ranks: a rank takes its part of a whole file, and DCP finds in the files of others what it needs.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bothways.core.errors import AGAIN, CheckpointError
from bothways.core.runtime.devices import device_of
from bothways.core.training_module import TrainingModule
from bothways.training.parallel import Plan, Sharded, is_main
from bothways.training.sharding import full_tensor, is_part, own_part_of

WEIGHTS, STATE, SHARDS = "model.safetensors", "state.pt", "shards"
_RETRY = f"Every rank reads all parts: look at the disk, then {AGAIN}."
WHOLE_BYTES = 2**30
"""Checkpoints of sharded models up to this size are written whole, by the main rank."""

Group = Any
"""A process group of torch, or None for the one of all ranks."""


@dataclass(frozen=True)
class RunTensors:
    """The training module and optimizer of a run, whose tensors a checkpoint holds on this rank."""

    training_module: TrainingModule
    optimizer: torch.optim.Optimizer
    plan: Plan

    @property
    def nbytes(self) -> int:
        """The bytes of a checkpoint."""
        moments = (value for entry in self.optimizer.state.values() for value in entry.values())
        tensors: Iterable[Any] = [*self.training_module.trained_state().values(), *moments]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint will hold.

    Attributes:
        weights: by name. Whole ones are on the main rank alone.
        parts: the optimizer's tensors that are in parts, by "optimizer/PARAMETER/NAME".
        rest: the content of `state.pt`; of the main rank.
        in_parts: whether each rank writes a file of its own.
    """

    weights: Mapping[str, Tensor]
    parts: Mapping[str, Tensor]
    rest: Mapping[str, Any]
    in_parts: bool

    def write_whole(self, folder: Path) -> None:
        """Write the weights and the rest."""
        save_file(
            {name: tensor.contiguous() for name, tensor in self.weights.items()}, folder / WEIGHTS
        )
        self.write_rest(folder)
        # safetensors creates files that only their owner can read, whatever the umask.
        (folder / WEIGHTS).chmod((folder / STATE).stat().st_mode)

    def write_parts(self, folder: Path, group: Group) -> None:
        """Write this rank's part; all ranks call this.

        Raises:
            OSError: on all ranks, if one cannot write.
        """
        dcp = _dcp()
        tensors = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        writer = _writer(folder / SHARDS)
        with _error_of_a_rank():
            dcp.save(tensors | dict(self.parts), storage_writer=writer, process_group=group)

    def write_rest(self, folder: Path) -> None:
        """Write what is not in parts."""
        with (folder / STATE).open("wb") as stream:
            torch.save(dict(self.rest), stream)


def collect_state(
    tensors: RunTensors, random: Mapping[str, Tensor], *, copied: bool = False
) -> SavedState:
    """Collect the state of a run; all ranks call this.

    Args:
        random: the states of the generators of all ranks.
        copied: copy all tensors to the host, so that training can go on.
    """
    state = tensors.training_module.trained_state()
    weights = {name: state[name] for name in _stored_names(tensors.training_module)}
    moments = tensors.optimizer.state_dict()
    in_parts = isinstance(tensors.plan, Sharded) and tensors.nbytes > WHOLE_BYTES
    shards: dict[str, Tensor] = {}
    if in_parts:
        shards = {
            f"optimizer/{number}/{name}": tensor
            for number, values in moments["state"].items()
            for name, tensor in values.items()
            if is_part(tensor)
        }
        remainder = _mapped(moments, lambda tensor: None if is_part(tensor) else tensor)
    else:
        keep = is_main(tensors.plan)
        weights = {name: _gathered(tensor, keep) for name, tensor in weights.items()}
        remainder = _mapped(moments, lambda tensor: _gathered(tensor, keep))
    saved = {"optimizer": remainder, "random": dict(random)}
    if not copied:
        return SavedState(weights, shards, saved, in_parts)
    if in_parts:
        weights, shards = _copy_parts(weights), _copy_parts(shards)
    else:
        weights = _mapped(weights, _copy_to_host)
    return SavedState(weights, shards, _mapped(saved, _copy_to_host), in_parts)


def load_weights(folder: Path, training_module: TrainingModule) -> None:
    """Load the weights of a checkpoint; in a sharded plan, this rank's part. All ranks call this.

    Raises:
        CheckpointError: tensors are missing, too many or of another shape.
    """
    targets = training_module.trained_state()
    if (folder / SHARDS).is_dir():
        stored = {f"weights/{name}": targets[name] for name in _stored_names(training_module)}
        _read_parts(folder, stored, "weights/")
        return
    try:
        stored = load_file(folder / WEIGHTS, device=str(device_of(training_module)))
        _check_names(training_module, stored, targets)
        shards = {name: own_part_of(tensor, targets[name]) for name, tensor in stored.items()}
        training_module.load_state_dict(shards, strict=False)
    except (RuntimeError, SafetensorError) as error:
        raise misfit(folder, WEIGHTS, error) from error


def load_state(folder: Path, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Load the optimizer's state and return the random states, one row a rank.

    All ranks call this.

    Raises:
        CheckpointError: the state does not fit this model.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        saved = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        state = saved["optimizer"]
        if (folder / SHARDS).is_dir():
            shards = {
                name: torch.zeros_like(parameters[int(name.split("/")[1])])
                for name in _metadata(folder)
                if name.startswith("optimizer/")
            }
            _read_parts(folder, shards, "optimizer/")
            for path, tensor in shards.items():
                _, number, name = path.split("/", 2)
                state["state"][int(number)][name] = tensor
        else:
            for number, values in state["state"].items():
                target = parameters[number]
                for name, value in values.items():
                    if isinstance(value, Tensor) and value.shape == target.shape:
                        values[name] = own_part_of(value, target)
        optimizer.load_state_dict(state)
    except (RuntimeError, ValueError, IndexError, pickle.UnpicklingError) as error:
        raise misfit(folder, STATE, error) from error
    random: dict[str, Tensor] = saved["random"]
    return random


def misfit(folder: Path, name: str, error: Exception) -> CheckpointError:
    """Return the error of a file whose tensors are not the model's."""
    reason = " ".join(str(error).split())
    return CheckpointError(f"{name} does not fit this model: {reason}", where=folder)


def _same_tensors(training_module: TrainingModule) -> list[list[str]]:
    """Return the names of the trained state; those of one tensor together, in order."""
    owners: dict[int, list[str]] = {}
    trained = training_module.trained_state()
    for members in (training_module.named_parameters, training_module.named_buffers):
        for name, tensor in members(remove_duplicate=False):
            if name in trained:
                owners.setdefault(id(tensor), []).append(name)
    owned = {name for names in owners.values() for name in names}
    return [sorted(names) for names in owners.values()] + [[n] for n in trained if n not in owned]


def _stored_names(training_module: TrainingModule) -> list[str]:
    return [names[0] for names in _same_tensors(training_module)]


def _check_names(
    training_module: TrainingModule, stored: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> None:
    """Raise RuntimeError if tensors are missing, too many or of another shape."""
    missing = [
        names[0] for names in _same_tensors(training_module) if not any(n in stored for n in names)
    ]
    extra = [name for name in stored if name not in targets]
    differing = [
        f"{name} is {[*tensor.shape]}, not {[*targets[name].shape]}"
        for name, tensor in stored.items()
        if name in targets and tensor.shape != targets[name].shape
    ]
    problems = [
        *(["missing: " + ", ".join(missing)] if missing else []),
        *(["unexpected: " + ", ".join(extra)] if extra else []),
        *differing,
    ]
    if problems:
        raise RuntimeError("; ".join(problems))


def _dcp() -> Any:
    """Return torch's module of distributed checkpoints, which takes a second to import."""
    import torch.distributed.checkpoint as dcp

    return dcp


def _writer(folder: Path) -> Any:
    """Return torch's writer of parts, which raises the error of the disk as it is."""

    class Writer(_dcp().FileSystemWriter):
        """Raises OSError where `torch.save` hides it, since other ranks get no context of it."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            """Write the file of this rank."""
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    return Writer(folder)


@contextlib.contextmanager
def _error_of_a_rank() -> Iterator[None]:
    """Raise the error of the first rank that failed instead of torch's report about all of them.

    That report is no `Exception`, and its message is a traceback.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as report:
        rank, (error, _) = min(report.failures.items(), key=lambda failed: failed[0])
        if isinstance(error, OSError) and error.errno is not None:
            message = f"{error.strerror} (rank {rank})"
            raise OSError(error.errno, message, error.filename) from report
        raise error from report


def _metadata(folder: Path) -> Mapping[str, Any]:
    reader = _dcp().FileSystemReader(folder / SHARDS)
    tensors: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    return tensors


def _read_parts(folder: Path, targets: dict[str, Tensor], prefix: str) -> None:
    """Read parts into tensors of the same names."""
    dcp = _dcp()
    stored = {n: entry for n, entry in _metadata(folder).items() if n.startswith(prefix)}
    differing = [
        *(f"missing: {name}" for name in targets if name not in stored),
        *(f"unexpected: {name}" for name in stored if name not in targets),
        *(
            f"{name} is {[*stored[name].size]}, not {[*target.shape]}"
            for name, target in targets.items()
            if name in stored and stored[name].size != target.shape
        ),
    ]
    if differing:
        raise misfit(folder, SHARDS, RuntimeError("; ".join(differing)))
    reader = dcp.FileSystemReader(folder / SHARDS)
    with warnings.catch_warnings():  # one process without a group is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            with _error_of_a_rank():
                dcp.load(targets, storage_reader=reader)
        except OSError as error:
            message = f"{SHARDS} cannot be read: {error.strerror or error}"
            raise CheckpointError(message, where=folder, fix=_RETRY) from error


def _gathered(tensor: Tensor, keep: bool) -> Tensor:
    """Return a whole tensor where it is kept, else an empty one; gathering takes all ranks."""
    if not is_part(tensor):
        return tensor
    full = full_tensor(tensor)
    return full if keep else full.new_empty(0)


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    result: dict[str, Tensor] = BlockingAsyncStager(cache_staged_state_dict=False).stage(
        {**tensors}
    )
    return result


def _mapped(values: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """Return nested plain values with each tensor changed; those that become None are dropped."""
    match values:
        case Tensor():
            return change(values)
        case dict():
            changed = {key: _mapped(value, change) for key, value in values.items()}
            return {k: v for k, v in changed.items() if v is not None or values[k] is None}
        case list():
            return [_mapped(value, change) for value in values]
        case tuple():
            return tuple(_mapped(value, change) for value in values)
        case _:
            return values
