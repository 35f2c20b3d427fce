"""Parameters whose update depends on whole matrices, of which this rank holds all rows or some.

A sharded parameter is cut in rows, wherever its matrices end:

    qkv.weight (3·4, 4) on 2 ranks: rank 0 holds queries and half the keys, numbers = (16, 8, 0)

What an update needs of a whole matrix is exchanged: sums, of all parameters at once
(`over_ranks`), or matrices, of which each rank has one at a time (`from_whole`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bothways.training.sharding import is_part, own_parts


@dataclass(frozen=True)
class OwnRows:
    """What this rank holds of a parameter.

    Attributes:
        group: the settings of the parameter's group: lr, weight_decay, parts, and those of the
            update. `parts` is the number of matrices that are stacked in the parameter.
        parameter: whole, or in parts over the ranks.
        state: of the parameter; `moment` and `count_step` fill it at the first step.
        weight: the rows, in the memory of the parameter.
        gradient: of the same shape, clipped and finite; its memory is used for the change.
        keep: 1, or 0 if nothing must change, on the parameter's device: nothing waits for it.
        numbers: how many numbers here belong to each of the stacked matrices.
        by_rank: how many numbers of the parameter each rank holds.
        ranks: the process group that shares the parameter; None if it is whole here.
    """

    group: Mapping[str, Any]
    parameter: nn.Parameter
    state: dict[str, Tensor]
    weight: Tensor
    gradient: Tensor
    keep: Float[Tensor, ""]
    numbers: tuple[int, ...]
    by_rank: tuple[int, ...]
    ranks: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of matrices, their rows and their columns, over all ranks."""
        parts = int(self.group["parts"])
        rows = len(self.parameter) if self.parameter.ndim else 1  # a single number is a row
        return parts, rows // parts, self.parameter.numel() // max(rows, 1)

    def count_step(self) -> Tensor:
        """Add one to the number of steps, unless nothing must change, and return it."""
        if "step" not in self.state:
            self.state["step"] = self.keep.new_zeros(())
        return self.state["step"].add_(self.keep)

    def moment(self, name: str) -> Tensor:
        """Return the rows of a moment, in its memory; it begins with 0."""
        if name not in self.state:
            self.state[name] = torch.zeros_like(self.parameter)
        return own_parts([self.state[name]])[0]

    def apart(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of a tensor like the weight as one vector for each matrix."""
        return _split(x.reshape(-1), self.numbers)

    def subtract(self, change: Tensor, rates: Float[Tensor, " parts"]) -> None:
        """Subtract each matrix's change, times its rate, from the weight."""
        for weight, own, rate in zip(
            _split(self.weight.view(-1), self.numbers), self.apart(change), rates, strict=True
        ):
            weight.sub_(own.mul_(rate))


def own_rows(
    group: Mapping[str, Any],
    parameter: nn.Parameter,
    state: dict[str, Tensor],
    found_inf: Tensor,
    scale: Tensor | None,
) -> OwnRows:
    """Return the rows of a parameter with a gradient that this rank holds.

    Args:
        found_inf: 1 if some gradient is not finite, else 0.
        scale: the divisor of gradients; None for 1.
    """
    assert parameter.grad is not None
    dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    weight, gradient = own_parts([parameter.detach(), dense])
    if scale is not None:
        gradient.div_(scale)
    gradient.masked_fill_(found_inf.bool(), 0.0)  # 0 times NaN is not 0
    keep = (1 - found_inf).to(weight.dtype)
    ranks, rank, by_rank = _cut(parameter)
    first, parts = sum(by_rank[:rank]), int(group["parts"])
    each = parameter.numel() // parts
    ends = [min(max(each * i - first, 0), by_rank[rank]) for i in range(parts + 1)]
    numbers = tuple(end - start for start, end in itertools.pairwise(ends))
    return OwnRows(group, parameter, state, weight, gradient, keep, numbers, by_rank, ranks)


def _cut(weight: Any) -> tuple[Any, int, tuple[int, ...]]:
    """Return the ranks that share a parameter, the number of this one, and what each holds.

    FSDP2 cuts rows as `torch.chunk` does, and leaves nothing for the last ranks if too few are
    left.
    """
    if not is_part(weight):
        return None, 0, (weight.numel(),)
    shared = next(i for i, placed in enumerate(weight.placements) if placed.is_shard())
    ranks = weight.device_mesh.get_group(shared)
    world, rows = weight.device_mesh.size(shared), len(weight)
    most, width = -(-rows // world), weight.numel() // max(rows, 1)
    held = tuple(width * min(max(rows - most * rank, 0), most) for rank in range(world))
    return ranks, weight.device_mesh.get_local_rank(shared), held


def over_ranks(parameters: Sequence[OwnRows], sums: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return vectors of sums over this rank's rows as sums over all rows, by one exchange.

    They are gathered and then added in the order of the ranks, so that all ranks, also those of
    other machines, have the same bits.
    """
    ranks = parameters[0].ranks
    if ranks is None:
        return sums
    own = torch.cat([*sums])
    found = [torch.empty_like(own) for _ in parameters[0].by_rank]
    torch.distributed.all_gather(found, own, ranks)
    return _split(torch.stack(found).sum(0), [len(each) for each in sums])


def from_whole(
    parameters: Sequence[OwnRows],
    function: Callable[[Float[Tensor, "parts rows columns"]], Float[Tensor, "parts rows columns"]],
    cost: Callable[[OwnRows], float],
) -> Iterator[tuple[OwnRows, Tensor]]:
    """Yield each parameter with this rank's rows of a function of its whole gradient.

    Of the sharded ones, each rank gets one whole, computes it and sends the rows back; then the
    next ones. Those that are computed at the same time cost about the same.
    """
    if parameters[0].ranks is None:
        for each in parameters:
            yield each, function(each.gradient.reshape(each.shape)).reshape(each.weight.shape)
        return
    world = len(parameters[0].by_rank)
    ordered = sorted(parameters, key=cost, reverse=True)
    for start in range(0, len(ordered), world):
        turn = ordered[start : start + world]
        yield from zip(turn, _in_turn(turn, function), strict=True)


def _in_turn(turn: Sequence[OwnRows], function: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield the rows of each parameter; rank 0 computes the first one, rank 1 the second."""
    ranks, world = turn[0].ranks, len(turn[0].by_rank)
    rank = torch.distributed.get_rank(ranks)
    mine = turn[rank] if rank < len(turn) else None
    given = [each.gradient.numel() for each in turn] + [0] * (world - len(turn))
    taken = [0] * world if mine is None else [*mine.by_rank]
    rows = torch.cat([each.gradient.reshape(-1) for each in turn])
    whole = rows.new_empty(sum(taken))
    torch.distributed.all_to_all_single(whole, rows, taken, given, ranks)
    if mine is not None:
        whole = function(whole.view(mine.shape)).reshape(-1)
    torch.distributed.all_to_all_single(rows, whole, given, taken, ranks)
    for each, own in zip(turn, _split(rows, given), strict=False):
        yield own.view_as(each.gradient)


def _split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(x, [*sizes])
