"""A model in parts over the ranks: FSDP2, and the way back to whole weights.

Each trained block is a group of its own, which is gathered when it is computed; all other
parameters are one group, the training module's, which is gathered for the whole step. So an
output layer reads the embedding that it is tied to, a discriminator that of its generator, and
blocks that several layers share are gathered once.

A frozen teacher is sharded as the rest: in parts where it takes memory, in no optimizer and no
checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bothways.core.errors import ConfigError
from bothways.core.loss import Loss
from bothways.core.runtime.devices import device_of
from bothways.core.training_module import TrainingModule
from bothways.training.parallel import Plan, Sharded, mesh_of


@contextlib.contextmanager
def sharded(training_module: TrainingModule, plan: Plan) -> Iterator[None]:
    """Give each rank its part of a training module; at the end, all ranks have whole weights again.

    Does nothing unless the plan is `Sharded`. After an error the parts stay: a rank that fails
    alone must not wait for the others.

    Raises:
        ConfigError: a batch may leave parameters of the training module without a gradient.
    """
    if not isinstance(plan, Sharded):
        yield
        return
    if training_module.partial:
        message = "a step of this model may leave some parameters without a gradient"
        fix = "Set sharding=none: each rank then has the whole model."
        raise ConfigError(
            f"{message}, which ranks that share a model cannot", where="sharding", fix=fix
        )
    originals = {module: _Own(module) for module in training_module.modules()}
    _shard(training_module, plan)
    yield
    gathered: dict[int, nn.Parameter | Tensor] = {}
    for module in training_module.modules():
        for tensors in (module._parameters, module._buffers):
            owned: dict[str, Any] = tensors
            for name, tensor in owned.items():
                if tensor is not None and is_part(tensor):
                    owned[name] = gathered.setdefault(id(tensor), _whole_parameter(tensor))
    for module, original in originals.items():
        original.restore(module)


def is_part(tensor: Tensor) -> bool:
    """Return True for a tensor that is distributed over ranks, without importing DTensor."""
    return hasattr(tensor, "placements")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks; all of them call this."""
    if not is_part(tensor):
        return tensor
    result: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return result


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shard of each tensor, in the same memory; for use without gradients."""
    return [t.to_local() if is_part(t) else t for t in tensors]  # type: ignore[attr-defined]


def give_up_gathered(training_module: nn.Module) -> None:
    """Drop gathered weights, which after an evaluation may still be there, with their old values.

    The next forward pass gathers them again. To be called where weights change other than by a
    step, after which they are dropped in any case.
    """
    for module in training_module.modules():
        reshard = getattr(module, "reshard", None)  # FSDP2's, which takes a second to import
        if callable(reshard):
            reshard()


def own_part_of(tensor: Tensor, target: Any) -> Tensor:
    """Return this rank's part of a whole tensor, placed as `target`; without communication."""
    if not is_part(target):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    moved = tensor.to(target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)


def _whole_parameter(tensor: Tensor) -> nn.Parameter | Tensor:
    full = full_tensor(tensor.detach())
    parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(full, requires_grad=tensor.requires_grad) if parameter else full


class _Own:
    """What a module had before it was sharded: its class, its hooks, its attributes."""

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


def _shard(training_module: TrainingModule, plan: Sharded) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sharding, device = plan.sharding, device_of(training_module)
    machines, remainder = divmod(plan.world, plan.local_world)
    if sharding.over == "machine" and remainder:
        message = f"{plan.world} ranks are not a multiple of the {plan.local_world} of this machine"
        raise ConfigError(message, where="sharding.over", fix="Set sharding.over=all.")
    is_flat = sharding.over == "all" or machines == 1
    shape = (plan.world,) if is_flat else (machines, plan.local_world)
    names = ("ranks",) if is_flat else ("machines", "ranks")
    settings: dict[str, Any] = {
        "mesh": mesh_of(device.type, shape, names),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if sharding.gathered == "bf16" else None,
            reduce_dtype=torch.float32 if sharding.gathered == "bf16" else None,
            cast_forward_inputs=False,
        ),
    }
    _show_losses_to_torch()
    # Each of these is gathered by itself, and runs once in a forward pass.
    units = [u for m in training_module.modules() for u in getattr(m, "gathered_apart", ())]
    for unit in units:
        fully_shard(unit, reshard_after_forward=sharding.reshard_after_forward, **settings)
    fully_shard(training_module, **settings)


@functools.cache
def _show_losses_to_torch() -> None:
    """Let FSDP2 find the tensors in a `Loss`, from whose gradients it knows that a backward begins.

    Torch before 2.13 does not look into dataclasses that it does not know. A training module
    without units of its own, such as one whose layers share a block, then had no gradients,
    without an error.
    """
    from torch.export import register_dataclass

    register_dataclass(Loss)
