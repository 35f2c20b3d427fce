"""Ranks of a run: one process, or several under `torchrun`, with whole copies of the model (torch's
DistributedDataParallel) or with a part of it each (FSDP2, `sharded`).

The values that ranks agree on (weights of losses, the clock, the wish to stop) are small and on the
host: they travel over gloo and never wait for a GPU. Gradients travel over NCCL where there is one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import re
import secrets
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

import bothways
from bothways.core.errors import (
    BothwaysError,
    ConfigError,
    LostRankError,
    ResourceError,
    argument,
    setting,
)
from bothways.core.runtime.devices import device_of
from bothways.core.training_module import Loss, TrainingModule


@dataclass(frozen=True)
class Sharding:
    """How ranks share the weights, gradients and moments of one model (FSDP2).

    The trained blocks of Transformers are gathered one at a time, when they are computed;
    embeddings and heads stay gathered from a forward pass to its backward pass.
    To keep less of the values in between, set `training.recompute`.

    Attributes:
        reshard_after_forward: whether the weights of a block are given up after its forward pass,
            and gathered again for its backward pass: less memory, half as much again to send.
        gathered: the type in which weights are gathered; gradients are summed in fp32 in any case.
            bf16 is for runs that compute in bf16: it halves what is sent, and rounds LayerNorms
            and embeddings, too.
        over: the ranks that hold one model between them: all of them, or those of one machine, so
            that machines exchange gradients only.

    Source: Zhao et al. 2023 (arXiv 2304.11277).
    """

    reshard_after_forward: bool = True
    gathered: Literal["fp32", "bf16"] = "fp32"
    over: Literal["all", "machine"] = "all"
    kind: Literal["sharding"] = "sharding"


@dataclass(frozen=True)
class Plan:
    """A process among the ranks of a run, which read different parts of each step.

    Attributes:
        rank, world: its number and how many there are; one process by default.
        local_rank, local_world: the same on this machine.
        sharding: how the ranks share one model; None: each has the whole model.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    sharding: Sharding | None = None


T = TypeVar("T")

_RUNS = itertools.count()
"""Counts the runs of this process; equal on every rank."""

MEETING = 1800.0
"""Seconds in which the ranks have to meet."""


def plan_here() -> Plan:
    """Return the plan that `torchrun` sets in the environment; one process without it.

    Raises:
        ConfigError: a variable that torchrun sets is missing, not a number or out of range.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Plan()
    numbers = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")
    world, rank, local_rank, _ = map(_variable, numbers)
    if not os.environ.get("MASTER_ADDR"):  # the address at which torch lets the ranks meet
        message, fix = "WORLD_SIZE is set, but MASTER_ADDR is not", "Start the ranks with torchrun."
        raise ConfigError(message, where="environment", fix=fix)
    if not 0 <= rank < world:
        raise ConfigError(f"RANK is {rank}, but must be from 0 to {world - 1}", where="environment")
    local_world = _variable("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else world
    return Plan(rank, world, local_rank, local_world)


def _variable(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        message = f"WORLD_SIZE is set, but {name} is {value!r} which is not a number"
        raise ConfigError(message, where="environment", fix="Start the ranks with torchrun.")
    return int(value)


def rank_device(plan: Plan, device: torch.device) -> torch.device:
    """Return the device of this rank: on CUDA, the one with its local number.

    Raises:
        ResourceError: this machine has fewer devices than ranks.
    """
    if plan.world == 1 or device.type != "cuda":
        return device
    if plan.local_rank >= (count := torch.cuda.device_count()):
        message = f"rank {plan.rank} needs CUDA device {plan.local_rank}, but there are {count}"
        fix = "Give torchrun as many processes per node as there are devices."
        raise ResourceError(message, fix=fix)
    return torch.device("cuda", plan.local_rank)


@functools.cache
def _store(rank: int, world: int) -> Any:
    """Return the store where ranks find each other, torchrun's or one that rank 0 serves.

    It is opened once in a process: rank 0 could not serve another one at the same port while a
    rank still reads the first.
    """
    address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store, _, _ = next(rendezvous("env://", rank, world))
    except torch.distributed.DistNetworkError as error:  # such as EADDRINUSE
        fix = "Start rank 0 there, or choose a free port: torchrun --master-port=N."
        raise LostRankError(f"the ranks cannot meet: {error}", where=address, fix=fix) from error
    return PrefixStore(start_name(store, rank, world), store)


def start_name(store: Any, rank: int, world: int) -> str:
    """Return a new name for this start of the ranks, the same on all of them.

    torchrun's store outlives the ranks: below a name of theirs alone, they cannot find the
    addresses of those that were killed. The main rank chooses the name. Each other one asks for it
    under a word of its own, so that no rank takes the answer to an earlier one.

    Raises:
        ResourceError: a rank has not come in half an hour.
    """
    deadline, word = time.monotonic() + MEETING, secrets.token_hex(8)
    if rank:
        while not store.check([f"start/{rank}/{word}"]):
            store.set(f"asks/{rank}", word)  # again: one that is dying may have asked after us
            _pause(deadline, "the main rank")
        name = str(store.get(f"start/{rank}/{word}").decode())
        store.set(f"knows/{name}/{rank}", "yes")
        return name
    waiting = {*range(1, world)}
    while True:
        for other in waiting:
            if store.check([f"asks/{other}"]):
                store.set(f"start/{other}/{store.get(f'asks/{other}').decode()}", word)
        waiting = {other for other in waiting if not store.check([f"knows/{word}/{other}"])}
        if not waiting:
            return word
        _pause(deadline, f"rank {min(waiting)}")


def _pause(deadline: float, awaited: str) -> None:
    if time.monotonic() > deadline:
        message = f"{awaited} has not come in {MEETING / 60:g} minutes"
        raise ResourceError(message, fix="Look at what it says; then start all ranks again.")
    time.sleep(0.05)


@contextlib.contextmanager
def connected(
    plan: Plan, device: torch.device, patience: timedelta | None = None
) -> Iterator[None]:
    """Connect the ranks, so that they can exchange values.

    Args:
        patience: for which a rank waits for another one; None for torch's own.
    """
    if plan.world == 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # The store outlives a group, too.
    group_store = PrefixStore(f"run {next(_RUNS)}", _store(plan.rank, plan.world))
    torch.distributed.init_process_group(
        backend, timeout=patience, store=group_store, rank=plan.rank, world_size=plan.world
    )
    try:
        yield
    except BaseException as error:
        # Their variables are modules, which hold groups of ranks.
        traceback.clear_frames(error.__traceback__)
        if lost := lost_contact(plan, error):
            raise lost from None
        raise
    finally:
        torch.distributed.destroy_process_group()
        # End the threads of groups that are destroyed but still held, by caches of torch and
        # cycles. One that is still at work while Python ends ends the process by SIGABRT.
        while _MESHES:  # which torch's caches of operations on tensors in parts keep for ever
            getattr(_MESHES.pop(), "_pg_registry", {}).clear()
        gc.collect()


_MESHES: list[Any] = []
"""torch's meshes of the ranks in this process, until its groups end."""


def lost_contact(plan: Plan, error: BaseException, prefix: str = "") -> LostRankError | None:
    """Return the error of a rank that cannot reach another one; None if this is another error.

    Args:
        prefix: the beginning of the message.
    """
    if isinstance(error, BothwaysError | KeyboardInterrupt | SystemExit):
        return None
    network = getattr(torch.distributed, "DistError", ())
    cause: BaseException | None = error
    # gloo raises a plain RuntimeError.
    while cause is not None and not (
        isinstance(cause, network) or (isinstance(cause, RuntimeError) and "gloo" in str(cause))
    ):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    fix = "Its own message says why: above, or in the log of its machine. "
    resume = argument(resume=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        fix += f"torchrun starts all ranks again while --max-restarts allows it; else add {resume}."
    else:
        fix += f"Start all ranks again with {resume}: they continue from the last checkpoint."
    message = f"rank {plan.rank} has lost contact with another rank, which has probably ended"
    return LostRankError(prefix + message, fix=fix)


def replicate(training_module: TrainingModule, plan: Plan) -> nn.Module:
    """Return the training module as the loop calls it: gradients become the mean over ranks.

    Weights start as those of rank 0. Every parameter that needs a gradient must take part in
    `forward`, also for a batch without weight, unless the training module is partial.
    """
    if plan.world == 1 or plan.sharding is not None:  # FSDP2 works by hooks of the modules
        return training_module
    trained = {name for name, _ in training_module.trained_parameters()}
    left = {name for name, _ in training_module.named_parameters()} - trained
    parallel = nn.parallel.DistributedDataParallel
    ignore = parallel._set_params_and_buffers_to_ignore_for_model
    ignore(training_module, [*left])  # type: ignore[no-untyped-call]
    # No training changes a buffer: they are not sent.
    names = ("forward_sync_buffers", "broadcast_buffers")  # as torch names the option by release
    buffers = next(name for name in names if name in inspect.signature(parallel).parameters)
    options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
    return parallel(training_module, find_unused_parameters=training_module.partial, **options)


def exchanging(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which `backward` sums gradients over ranks only if `enabled`.

    A sharded model sums them in any case, since whole ones would take the memory that it saves.
    """
    if enabled or not isinstance(model, nn.parallel.DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def all_gather(plan: Plan, values: Tensor) -> Tensor:
    """Gather CPU tensors `(…)` of equal shape into `(world, …)`, bit-equal on all ranks."""
    if plan.world == 1:
        return values[None]
    gathered = [torch.empty_like(values) for _ in range(plan.world)]
    torch.distributed.all_gather(gathered, values)
    return torch.stack(gathered)


def sum_over_ranks(plan: Plan, values: Mapping[str, float]) -> dict[str, float]:
    """Return the sum over ranks of each value; all ranks give the same names, in any order."""
    names = sorted(values)
    local = torch.tensor([values[name] for name in names], dtype=torch.float64)
    return dict(zip(names, all_gather(plan, local).sum(0).tolist(), strict=True))


def from_main_rank(plan: Plan, make: Callable[[], T]) -> T:
    """Return on all ranks what the main one makes, or raise its error on all of them."""
    return cast(T, on_all_ranks(plan, lambda: make() if is_main(plan) else None)[0])


def on_all_ranks(plan: Plan, work: Callable[[], T]) -> list[T]:
    """Do something on each rank, and return the results of all; an error is raised on all."""
    if plan.world == 1:
        return [work()]
    result, failed = None, None
    try:
        result = work()
    except LostRankError:  # which no other rank can be told
        raise
    except BothwaysError as error:
        failed = error
    # The error is sent as a value: a rank that raised alone would leave the others waiting.
    gathered: list[Any] = [None] * plan.world
    torch.distributed.all_gather_object(gathered, (result, failed))
    if (first := failed or next(filter(None, (error for _, error in gathered)), None)) is not None:
        raise first
    return [result for result, _ in gathered]


def require_agreement(
    plan: Plan, values: Mapping[str, object], files: Collection[str] = ()
) -> None:
    """Check that all ranks were started with equal values, and equal versions; all call this.

    Args:
        values: settings and digests of data, by name.
        files: names of those that may differ, since they are paths on the machine of a rank.

    Raises:
        ConfigError: on all ranks, the same one: the first values that differ, and where.
    """
    if plan.world == 1:
        return
    # An optimizer may be a function, whose text has an address.
    local = {
        name: re.sub(r" at 0x[0-9a-f]+", "", str(value))
        for name, value in values.items()
        if name not in files
    }
    local |= {"bothways": bothways.__version__, "torch": torch.__version__}
    gathered: list[Any] = [None] * plan.world
    torch.distributed.all_gather_object(gathered, local)
    reference, missing = gathered[0], "not set"
    for rank, other in enumerate(gathered):
        names = [name for name in {**reference, **other} if reference.get(name) != other.get(name)]
        if not names:
            continue
        pairs = (
            f"{name} is {other.get(name, missing)}, and {reference.get(name, missing)} on rank 0"
            for name in names[:3]
        )
        suffix = f"; {len(names) - 3} more" if len(names) > 3 else ""
        fix = "Start all ranks with the same command, the same data and the same versions."
        error = ConfigError(f"{'; '.join(pairs)}{suffix}", where=f"rank {rank}", fix=fix)
        error.on_every_rank = True
        raise error


def is_main(plan: Plan) -> bool:
    """Return True on the rank that writes files and the terminal."""
    return plan.rank == 0


@contextlib.contextmanager
def sharded(training_module: TrainingModule, plan: Plan) -> Iterator[None]:
    """Give each rank its part of a training module; at the end, all ranks have whole weights again.

    Does nothing unless the plan has a sharding. After an error the parts stay: a rank that fails
    alone must not wait for the others.

    Raises:
        ConfigError: a batch may leave parameters of the training module without a gradient.
    """
    if plan.sharding is None:
        yield
        return
    if training_module.partial:
        message = "a step of this model may leave some parameters without a gradient"
        fix = f"Set {setting('sharding', 'none')}: each rank then has the whole model."
        message += ", which ranks that share a model cannot"
        raise ConfigError(message, where="sharding", fix=fix)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    originals = {module: _ModuleState(module) for module in training_module.modules()}
    sharding, device = plan.sharding, device_of(training_module)
    machines, remainder = divmod(plan.world, plan.local_world)
    if sharding.over == "machine" and remainder:
        message = f"{plan.world} ranks are not a multiple of the {plan.local_world} of this machine"
        fix = f"Set {setting('sharding.over', 'all')}."
        raise ConfigError(message, where="sharding.over", fix=fix)
    is_flat = sharding.over == "all" or machines == 1
    shape = (plan.world,) if is_flat else (machines, plan.local_world)
    axes = ("ranks",) if is_flat else ("machines", "ranks")
    _MESHES.append(init_device_mesh(device.type, shape, mesh_dim_names=axes))
    dtypes = (torch.bfloat16, torch.float32) if sharding.gathered == "bf16" else (None, None)
    policy = MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False)
    settings: dict[str, Any] = {"mesh": _MESHES[-1], "mp_policy": policy}
    _show_losses_to_torch()
    # Each of these is gathered by itself, and runs once in a forward pass.
    units = [u for m in training_module.modules() for u in getattr(m, "gathered_apart", ())]
    for unit in units:
        fully_shard(unit, reshard_after_forward=sharding.reshard_after_forward, **settings)
    fully_shard(training_module, **settings)
    yield
    # By identity: a weight that two modules share is gathered once.
    gathered: dict[int, nn.Parameter | Tensor] = {}
    for module in training_module.modules():
        for tensors in (module._parameters, module._buffers):
            owned: dict[str, Any] = tensors
            for name, tensor in owned.items():
                if tensor is None or not is_sharded(tensor):
                    continue
                if id(tensor) not in gathered:
                    full = full_tensor(tensor.detach())
                    is_parameter, trained = isinstance(tensor, nn.Parameter), tensor.requires_grad
                    full = nn.Parameter(full, requires_grad=trained) if is_parameter else full
                    gathered[id(tensor)] = full
                owned[name] = gathered[id(tensor)]
    for module, original in originals.items():
        original.restore(module)


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a tensor that is distributed over ranks, without importing DTensor."""
    return hasattr(tensor, "placements")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks; all of them call this."""
    if not is_sharded(tensor):
        return tensor
    result: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return result


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shard of each tensor, in the same memory; for use without gradients."""
    return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


def shard_like(tensor: Tensor, target: Any) -> Tensor:
    """Return this rank's part of a whole tensor, placed as `target`; without communication."""
    if not is_sharded(target):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    moved = tensor.to(target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)


class _ModuleState:
    """The class, the hooks and the attributes of a module before it was sharded."""

    def __init__(self, module: nn.Module) -> None:
        self._class, self._names = type(module), {*vars(module)}
        self._hooks: Mapping[str, Any] = {
            name: value.copy() for name, value in vars(module).items() if name.endswith("_hooks")
        }

    def restore(self, module: nn.Module) -> None:
        """Take away what FSDP2 added."""
        module.__class__ = self._class
        for name, hooks in self._hooks.items():
            getattr(module, name).clear()
            getattr(module, name).update(hooks)
        for name in {*vars(module)} - self._names:
            delattr(module, name)


@functools.cache
def _show_losses_to_torch() -> None:
    """Let FSDP2 find the tensors in a `Loss`, from whose gradients it knows that a backward begins.

    Torch before 2.13 does not look into dataclasses that it does not know. A training module
    without units of its own, such as one whose layers share a block, then had no gradients,
    without an error.
    """
    from torch.export import register_dataclass

    register_dataclass(Loss)
