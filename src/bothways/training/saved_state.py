"""The files of a checkpoint, written and read: its tensors are whole in one file, or in parts, one
file a rank, by torch's distributed checkpoints (DCP).

    model.safetensors   weights, whole
    shards/             weights and the optimizer's moments, in parts
    state.pt            the rest: whole moments, counts, settings of groups, random state

Parameters that modules share are stored once. Both kinds are read by any plan and any number of
ranks: a rank takes its part of a whole file, and DCP finds in the files of others what it needs.

The moving average of the weights (`Average`) is a submodule of the module that is trained:
checkpoints hold it, and a resumed run continues it.
"""

from __future__ import annotations

import contextlib
import enum
import json
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bothways
from bothways.core.errors import AGAIN, CheckpointError, ResourceError, os_errors
from bothways.core.files import file_digest, hidden_folder, replace_folder
from bothways.core.runtime.devices import device_of, disk_free
from bothways.core.training_module import TrainingModule
from bothways.training import parallel
from bothways.training.schedules import RunState

WEIGHTS, STATE, SHARDS = "model.safetensors", "state.pt", "shards"
_RETRY = f"Every rank reads all parts: look at the disk, then {AGAIN}."
WHOLE_BYTES = 2**30
"""Checkpoints of sharded models up to this size are written whole, by the main rank."""

WHOLE, IN_PARTS = 1, 2
"""The formats of checkpoints."""
PROGRESS, MANIFEST = "progress.json", "manifest.json"
_MAKE_ROOM = f"Make room, then {AGAIN}: the checkpoints before are whole."


@dataclass(frozen=True)
class RunTensors:
    """The training module and optimizer of a run, whose tensors a checkpoint holds on this rank."""

    training_module: TrainingModule
    optimizer: torch.optim.Optimizer
    plan: parallel.Plan

    @property
    def nbytes(self) -> int:
        """The bytes of a checkpoint."""
        moments = (value for entry in self.optimizer.state.values() for value in entry.values())
        tensors: Iterable[Any] = [*self.training_module.trained_state().values(), *moments]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def save_checkpoint(
    run: Path,
    tensors: RunTensors,
    progress: RunState,
    metrics: Mapping[str, int | float],
    config: Mapping[str, Any],
) -> None:
    """Write the state of a run as a checkpoint in its folder; all ranks call this.

    The main rank writes whole tensors; of tensors in parts, each rank writes a file of its own.

    Raises:
        ResourceError: there is no room or no permission; earlier checkpoints are untouched.
    """
    plan = tensors.plan
    # The generators' states by device type, one row a rank.
    generators, device = {"cpu": torch.get_rng_state()}, device_of(tensors.training_module)
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    random = {name: parallel.all_gather(plan, state) for name, state in generators.items()}

    def check_room() -> None:
        """Raise ResourceError if the disk has no room for the checkpoint."""
        needed, free = tensors.nbytes, disk_free(run)
        if needed > free:
            sizes = f"{needed / 2**20:,.0f} MiB, but only {free / 2**20:,.0f} MiB are free"
            raise ResourceError(f"a checkpoint takes {sizes}", where=run, fix=_MAKE_ROOM)

    parallel.from_main_rank(plan, check_room)
    state = tensors.training_module.trained_state()
    weights = {names[0]: state[names[0]] for names in _same_tensors(tensors.training_module)}
    moments = tensors.optimizer.state_dict()
    of_parameters, folder = moments["state"], run / f"step-{progress.steps}"
    rest = {
        STATE: {"optimizer": moments, "random": random},
        PROGRESS: {"progress": progress.to_json(), "metrics": dict(metrics), "config": config},
    }
    if plan.sharding is not None and tensors.nbytes > WHOLE_BYTES:
        shards = {f"weights/{name}": tensor for name, tensor in weights.items()} | {
            f"optimizer/{number}/{name}": tensor
            for number, values in of_parameters.items()
            for name, tensor in values.items()
            if parallel.is_part(tensor)
        }
        moments["state"] = {
            number: {n: value for n, value in values.items() if not parallel.is_part(value)}
            for number, values in of_parameters.items()
        }
        _save_parts(folder, plan, shards, rest)
        return
    keep = parallel.is_main(plan)
    weights = {name: _gathered(tensor, keep) for name, tensor in weights.items()}
    moments["state"] = {
        number: {name: _gathered(value, keep) for name, value in values.items()}
        for number, values in of_parameters.items()
    }
    if keep:
        with replace_folder(folder, _MAKE_ROOM) as hidden:
            save_file({n: value.contiguous() for n, value in weights.items()}, hidden / WEIGHTS)
            _write_rest(hidden, rest, WHOLE, {WEIGHTS: file_digest(hidden / WEIGHTS)})
            # safetensors creates files that only their owner can read, whatever the umask.
            (hidden / WEIGHTS).chmod((hidden / STATE).stat().st_mode)


def _save_parts(
    folder: Path, plan: parallel.Plan, shards: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """Write a checkpoint in parts; all ranks call this."""
    hidden = hidden_folder(folder)
    with contextlib.ExitStack() as stack:
        replaced = replace_folder(folder, _MAKE_ROOM)
        parallel.from_main_rank(plan, lambda: stack.enter_context(replaced))

        def write() -> dict[str, str]:
            """Write the files of this rank; return their digests."""
            with os_errors(folder, _MAKE_ROOM):
                hidden.mkdir(parents=True, exist_ok=True)  # on a machine without the main rank
                write_shards(hidden, shards)
                files = sorted((hidden / SHARDS).glob(f"__{plan.rank}_*"))
                if parallel.is_main(plan):
                    files.append(hidden / SHARDS / ".metadata")  # the table of contents
                return {f"{SHARDS}/{file.name}": file_digest(file) for file in files}

        tables = parallel.on_all_ranks(plan, write)
        if parallel.is_main(plan):
            digests = {name: digest for table in tables for name, digest in table.items()}
            _write_rest(hidden, rest, IN_PARTS, digests)


def write_shards(folder: Path, shards: Mapping[str, Tensor]) -> None:
    """Write this rank's part of tensors; all ranks call this.

    Raises:
        OSError: on all ranks, if one cannot write.
    """
    writer = _writer(folder / SHARDS)
    with _error_of_a_rank():
        _dcp().save(dict(shards), storage_writer=writer)


def _write_rest(
    folder: Path, rest: Mapping[str, Any], kind: int, digests: Mapping[str, str]
) -> None:
    """Write what is not in parts, and the manifest of all files last."""
    with (folder / STATE).open("wb") as stream:
        torch.save(rest[STATE], stream)
    _write_json(folder / PROGRESS, rest[PROGRESS])
    files = {**digests, **{name: file_digest(folder / name) for name in (STATE, PROGRESS)}}
    version = {"format": kind, "bothways": bothways.__version__}
    _write_json(folder / MANIFEST, {**version, "files": files})


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


def load_weights(folder: Path, training_module: TrainingModule) -> None:
    """Load the weights of a checkpoint; in a sharded plan, this rank's part. All ranks call this.

    Raises:
        CheckpointError: tensors are missing, too many or of another shape.
    """
    targets = training_module.trained_state()
    if (folder / SHARDS).is_dir():
        names = [same[0] for same in _same_tensors(training_module)]
        stored = {f"weights/{name}": targets[name] for name in names}
        _read_parts(folder, stored, "weights/")
        return
    try:
        stored = load_file(folder / WEIGHTS, device=str(device_of(training_module)))
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        if differences := _differences(_same_tensors(training_module), shapes, targets):
            raise RuntimeError(differences)
        shards = {
            name: parallel.own_part_of(tensor, targets[name]) for name, tensor in stored.items()
        }
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
            # The optimizer has no state yet: moments are read into tensors like the parameters.
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
                        values[name] = parallel.own_part_of(value, target)
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


def _differences(
    required: Iterable[list[str]], stored: Mapping[str, Any], targets: Mapping[str, Tensor]
) -> str:
    """Describe tensors that are missing, unknown or of another shape; empty if all fit.

    Args:
        required: the names of each tensor; one of them must be there.
        stored: shapes by name.
    """
    missing = [names[0] for names in required if not any(name in stored for name in names)]
    differing = [
        f"{name} is {[*shape]}, not {[*targets[name].shape]}"
        for name, shape in stored.items()
        if name in targets and shape != targets[name].shape
    ]
    extra = [name for name in stored if name not in targets]
    lists = {"missing": missing, "unexpected": extra}
    texts = [f"{title}: {', '.join(names)}" for title, names in lists.items() if names]
    return "; ".join([*texts, *differing])


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


_CONTENTS = {
    "Metadata", "StorageMeta", "ChunkStorageMetadata", "MetadataIndex", "TensorStorageMetadata",
    "TensorProperties", "_MEM_FORMAT_ENCODING", "_StorageInfo",
    "_get_layout", "Size", "Path", "PosixPath", "WindowsPath",
}  # fmt: skip
"""The names in torch's table of contents, next to types of numbers. A table of tensors alone: torch
reads any other value by an unpickler, too."""


def _member(kind: Any, name: str) -> enum.Enum:
    """Return a member of an enum, for which Python 3.11.2 pickles a call of `getattr`."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError("it reads an attribute, which may run code")
    return kind[name]


class _Contents(pickle.Unpickler):
    """Reads torch's table of contents, and runs no other code: torch itself reads any pickle."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class by name; raise UnpicklingError for any other than those of a table."""
        if (module, name) == ("builtins", "getattr"):  # members of enums in Python 3.11.2
            return _member
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or (module.partition(".")[0] in ("torch", "pathlib") and name in _CONTENTS):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which may run code")


def _metadata(folder: Path) -> Mapping[str, Any]:
    """Return the table of contents, without which no part is read.

    Raises:
        CheckpointError: it is none.
    """
    try:
        with (folder / SHARDS / ".metadata").open("rb") as file:
            tensors: Mapping[str, Any] = _Contents(file).load().state_dict_metadata
    except (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError,
            AttributeError) as error:  # fmt: skip
        message = f"{SHARDS}/.metadata is not a table of tensors: {error}"
        fix = "Delete the folder to continue from the checkpoint before it."
        raise CheckpointError(message, where=folder, fix=fix) from error
    return tensors


def _read_parts(folder: Path, targets: dict[str, Tensor], prefix: str) -> None:
    """Read parts into tensors of the same names."""
    dcp = _dcp()
    stored = {n: e.size for n, e in _metadata(folder).items() if n.startswith(prefix)}
    if differences := _differences([[name] for name in targets], stored, targets):
        raise misfit(folder, SHARDS, RuntimeError(differences))
    reader = dcp.FileSystemReader(folder / SHARDS)
    with warnings.catch_warnings():  # one process without a group is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            with _error_of_a_rank():
                dcp.load(targets, storage_reader=reader)
        except OSError as error:
            message = f"{SHARDS} cannot be read: {error.strerror or error}"
            raise CheckpointError(message, where=folder, fix=_RETRY) from error


def _gathered(value: Any, keep: bool) -> Any:
    """Return a whole tensor where it is kept, else an empty one; gathering takes all ranks.

    What is in no parts is returned as it is.
    """
    if not parallel.is_part(value):
        return value
    full = parallel.full_tensor(value)
    return full if keep else full.new_empty(0)


NAME = "average"
"""The name of the submodule."""


class Average(nn.Module):
    """The exponential moving average of a training module's weights, for evaluation and saving.

    After update t it is Σ dᵗ⁻ⁱ wᵢ / Σ dᵗ⁻ⁱ over the updates i ≤ t, with wᵢ the weights after update
    i and d the decay: the weights at the start have no share. It follows from

        average ← average + (1 − d)/(1 − dᵗ) · (wₜ − average)

    Source: Polyak & Juditsky 1992; the correction for the start is that of Kingma & Ba 2014,
    section 3.

    Args:
        decay: d, above 0 and below 1.
    """

    def __init__(self, training_module: TrainingModule, decay: float) -> None:
        super().__init__()
        self.decay = decay
        trained = [(name, p) for name, p in training_module.trained_parameters() if p.requires_grad]
        self._weights = [p for _, p in trained]  # in a list, so that they are not its own
        for name, p in trained:
            self.register_buffer(name.replace(".", "/"), p.detach().clone())
        training_module.add_module(NAME, self)
        self._training_module = (training_module,)  # in a tuple, so that it is no submodule

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Add the weights after an update to the average.

        Args:
            steps: the number of updates, this one included.
        """
        share = (1 - self.decay) / (1 - self.decay**steps)
        torch._foreach_lerp_(
            parallel.own_parts(self.buffers()), parallel.own_parts(self._weights), share
        )

    @torch.no_grad()
    def apply_to_weights(self) -> list[Tensor]:
        """Replace the weights by their average; return those before, of this rank."""
        previous = [weight.detach().clone() for weight in parallel.own_parts(self._weights)]
        self._set(parallel.own_parts(self.buffers()))
        return previous

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the average as the weights, such as in an evaluation."""
        previous = self.apply_to_weights()
        try:
            yield
        finally:
            self._set(previous)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(parallel.own_parts(self._weights), values)
        # Gathered weights, which may still be there after an evaluation, have the old values: the
        # next forward pass gathers them again. After a step they are dropped in any case.
        for module in self._training_module[0].modules():
            reshard = getattr(module, "reshard", None)  # FSDP2's, which takes a second to import
            if callable(reshard):
                reshard()


def use_average(training_module: TrainingModule) -> None:
    """Replace the weights of a training module by their average, if it has one."""
    average = getattr(training_module, NAME, None)
    if isinstance(average, Average):
        average.apply_to_weights()


@contextlib.contextmanager
def averaged_weights(training_module: TrainingModule) -> Iterator[None]:
    """Use the average of the weights, if a training module has one, such as to save it."""
    average = getattr(training_module, NAME, None)
    with average.applied() if isinstance(average, Average) else contextlib.nullcontext():
        yield
