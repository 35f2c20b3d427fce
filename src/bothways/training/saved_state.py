"""The files of a checkpoint, written and read: its tensors are whole in one file, or in parts, one
file a rank.

    model.safetensors   weights, whole
    shards/             weights and the optimizer's moments; a file has the rows of its rank
    state.pt            the rest: whole moments, counts, settings of groups, random state

Parameters that modules share are stored once. Both kinds are read by any plan and any number of
ranks: a rank takes its part of each tensor, which it joins from the rows in all files.

The moving average of the weights (`Average`) is a submodule of the module that is trained:
checkpoints hold it, and a resumed run continues it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import bothways
from bothways.core.errors import AGAIN, CheckpointError, ResourceError, os_errors
from bothways.core.files import file_digest, hidden_folder, replace_folder
from bothways.core.runtime.devices import device_of, disk_free
from bothways.core.terminal import listed
from bothways.core.training_module import TrainingModule
from bothways.training import parallel
from bothways.training.schedules import RunState

WEIGHTS, STATE, SHARDS = "model.safetensors", "state.pt", "shards"
WHOLE_BYTES = 2**30
"""Checkpoints of sharded models up to this size are written whole, by the main rank."""

WHOLE, IN_PARTS = 1, 3
"""The formats of checkpoints."""
_MOMENTS = "optimizer/"
"""The prefix of moments in the files of shards: optimizer/NUMBER OF THE PARAMETER/NAME."""
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
        shards = weights | {
            f"{_MOMENTS}{number}/{name}": tensor
            for number, values in of_parameters.items()
            for name, tensor in values.items()
            if parallel.is_sharded(tensor)
        }
        moments["state"] = {
            number: {n: value for n, value in values.items() if not parallel.is_sharded(value)}
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
            _write_tensors(hidden / WEIGHTS, weights)
            _write_rest(hidden, rest, WHOLE, {WEIGHTS: file_digest(hidden / WEIGHTS)})


def _save_parts(
    folder: Path, plan: parallel.Plan, shards: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """Write a checkpoint in parts; all ranks call this."""
    assert plan.sharding is not None
    # Where each machine has the whole model, the first one writes it.
    writers = plan.world if plan.sharding.over == "all" else plan.local_world
    hidden, name = hidden_folder(folder), f"{SHARDS}/{plan.rank:05}.safetensors"
    # What is in no parts is on all ranks.
    rows = {n: t for n, t in shards.items() if parallel.is_sharded(t) or parallel.is_main(plan)}
    with contextlib.ExitStack() as stack:
        replaced = replace_folder(folder, _MAKE_ROOM)
        parallel.from_main_rank(plan, lambda: stack.enter_context(replaced))

        def write() -> dict[str, str]:
            """Write the file of this rank, if it has one; return its digest."""
            if plan.rank >= writers:
                return {}
            if not hidden.is_dir():
                message = f"is another folder on rank {plan.rank} than on the main rank"
                fix = "Give a folder that all machines share, such as one of a network file system."
                raise ResourceError(message, where=folder.parent, fix=fix)
            with os_errors(folder, _MAKE_ROOM):
                (hidden / SHARDS).mkdir(exist_ok=True)
                own_rows = zip(rows, parallel.local_shards(rows.values()), strict=True)
                _write_tensors(hidden / name, dict(own_rows))
                return {name: file_digest(hidden / name)}

        tables = parallel.on_all_ranks(plan, write)
        if parallel.is_main(plan):
            digests = {name: digest for table in tables for name, digest in table.items()}
            _write_rest(hidden, rest, IN_PARTS, digests)


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors."""
    file.touch()
    mode = file.stat().st_mode
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    file.chmod(mode)  # safetensors lets only the owner read, whatever the umask


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
    try:
        stored = {
            name: parallel.shard_like(tensor, targets.get(name))
            for name, tensor in read_weights(folder)
        }
        # It raises RuntimeError for other shapes. One name of a tensor suffices.
        unexpected = training_module.load_state_dict(stored, strict=False).unexpected_keys
        same = _same_tensors(training_module)
        missing = [names[0] for names in same if stored.keys().isdisjoint(names)]
        for kind, names in {"missing": missing, "unexpected": unexpected}.items():
            if names:
                raise RuntimeError(f"{kind}: {listed(names)}")
    except (RuntimeError, SafetensorError) as error:
        raise misfit(folder, SHARDS if _shard_files(folder) else WEIGHTS, error) from error


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
        for number, values in state["state"].items():
            target = parameters[number]
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == target.shape:
                    values[name] = parallel.shard_like(value, target)
        for path, tensor in _read_tensors(_shard_files(folder), moments=True):
            number, name = path.removeprefix(_MOMENTS).split("/", 1)
            moment = parallel.shard_like(tensor, parameters[int(number)])
            state["state"][int(number)][name] = moment
        optimizer.load_state_dict(state)
    except (RuntimeError, ValueError, LookupError, pickle.UnpicklingError) as error:
        raise misfit(folder, STATE, error) from error
    random: dict[str, Tensor] = saved["random"]
    return random


def _shard_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint in parts, in the order of rows; none of a whole one."""
    return sorted((folder / SHARDS).glob("*.safetensors"))


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of each weight in a checkpoint, whole, one at a time."""
    return _read_tensors(_shard_files(folder) or [folder / WEIGHTS], moments=False)


def _read_tensors(files: Iterable[Path], moments: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights or the moments in files, joined from the rows in each; one at a time."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        tables = [{*file.keys()} for file in opened]
        for name in sorted(set().union(*tables)):
            if name.startswith(_MOMENTS) == moments:
                pairs = zip(opened, tables, strict=True)
                rows = [file.get_tensor(name) for file, names in pairs if name in names]
                yield name, torch.cat(rows) if len(rows) > 1 else rows[0]


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


def _gathered(value: Any, keep: bool) -> Any:
    """Return a whole tensor where it is kept, else an empty one; gathering takes all ranks.

    What is in no parts is returned as it is.
    """
    if not parallel.is_sharded(value):
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
            parallel.local_shards(self.buffers()), parallel.local_shards(self._weights), share
        )

    @torch.no_grad()
    def apply_to_weights(self) -> list[Tensor]:
        """Replace the weights by their average; return those before, of this rank."""
        previous = [weight.detach().clone() for weight in parallel.local_shards(self._weights)]
        self._set(parallel.local_shards(self.buffers()))
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
        torch._foreach_copy_(parallel.local_shards(self._weights), values)
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
