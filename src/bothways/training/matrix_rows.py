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
        count = int(self.group["parts"])
        rows = len(self.parameter) if self.parameter.ndim else 1  # a single number is a row
        return count, rows // count, self.parameter.numel() // max(rows, 1)

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
        for weight, matrix_change, rate in zip(
            _split(self.weight.view(-1), self.numbers), self.apart(change), rates, strict=True
        ):
            weight.sub_(matrix_change.mul_(rate))


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
    start_number, count = sum(by_rank[:rank]), int(group["parts"])
    size = parameter.numel() // count
    ends = [min(max(size * i - start_number, 0), by_rank[rank]) for i in range(count + 1)]
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
    rows_per_rank, width = -(-rows // world), weight.numel() // max(rows, 1)
    sizes = tuple(
        width * min(max(rows - rows_per_rank * rank, 0), rows_per_rank) for rank in range(world)
    )
    return ranks, weight.device_mesh.get_local_rank(shared), sizes


def over_ranks(parameters: Sequence[OwnRows], sums: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return vectors of sums over this rank's rows as sums over all rows, by one exchange.

    They are gathered and then added in the order of the ranks, so that all ranks, also those of
    other machines, have the same bits.
    """
    ranks = parameters[0].ranks
    if ranks is None:
        return sums
    local = torch.cat([*sums])
    gathered = [torch.empty_like(local) for _ in parameters[0].by_rank]
    torch.distributed.all_gather(gathered, local, ranks)
    return _split(torch.stack(gathered).sum(0), [len(vector) for vector in sums])


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
        for parameter in parameters:
            yield (
                parameter,
                function(parameter.gradient.reshape(parameter.shape)).reshape(
                    parameter.weight.shape
                ),
            )
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
    sent = [parameter.gradient.numel() for parameter in turn] + [0] * (world - len(turn))
    taken = [0] * world if mine is None else [*mine.by_rank]
    rows = torch.cat([parameter.gradient.reshape(-1) for parameter in turn])
    matrices = rows.new_empty(sum(taken))
    torch.distributed.all_to_all_single(matrices, rows, taken, sent, ranks)
    if mine is not None:
        matrices = function(matrices.view(mine.shape)).reshape(-1)
    torch.distributed.all_to_all_single(rows, matrices, sent, taken, ranks)
    for parameter, parameter_rows in zip(turn, _split(rows, sent), strict=False):
        yield parameter_rows.view_as(parameter.gradient)


def _split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(x, [*sizes])
