"""How the sequences of one step are shared out: over ranks, over microbatches, over padded rectangles.

A step is a list of sequences whose size the user sets for all ranks together. Sorted by length and dealt like cards, every
rank has about the same tokens; cut by a budget of tokens, a microbatch has about the same memory whatever the lengths; and
neighbours of near-equal length leave next to no padding in the rectangles of `core.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from typing_extensions import assert_never

from bothways.core.config.checks import require_at_least

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class ExampleBudget:
    """A step of `n` sequences, over all ranks."""

    n: int
    kind: Literal["examples"] = "examples"

    def __post_init__(self) -> None:
        require_at_least(1, "batch", n=self.n)


@dataclass(frozen=True)
class TokenBudget:
    """A step of as many sequences as fit in `n` tokens, over all ranks, specials included; at least one."""

    n: int
    kind: Literal["tokens"] = "tokens"

    def __post_init__(self) -> None:
        require_at_least(1, "batch", n=self.n)


def fits(batch: ExampleBudget | TokenBudget, sequences: int, tokens: int) -> bool:
    """Do so many sequences of so many tokens together fit in one step?"""
    match batch:
        case ExampleBudget(n):
            return sequences <= n
        case TokenBudget(n):
            return tokens <= n or sequences == 1
        case _:
            assert_never(batch)


def deal(lengths: Many[int], world: int, budget: int) -> list[list[list[int]]]:
    """Sequences of these lengths → for each rank its microbatches, as places in `lengths`.

    Longest first, equal lengths in the order given; rank r takes each world-th from the r-th on. A microbatch has at most
    `budget` tokens, or is one longer sequence. All ranks have equally many microbatches, because a sharded model works in
    lockstep; those that a rank has nothing for are empty.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    ranks = [_cut(order[rank::world], lengths, budget) for rank in range(world)]
    most = max(len(microbatches) for microbatches in ranks)
    return [microbatches + [[]] * (most - len(microbatches)) for microbatches in ranks]


def _cut(places: list[int], lengths: Many[int], budget: int) -> list[list[int]]:
    """Neighbours together as long as they fit in `budget` tokens."""
    groups: list[list[int]] = []
    room = 0
    for place in places:
        room -= lengths[place]
        if not groups or room < 0:
            groups.append([])
            room = budget - lengths[place]
        groups[-1].append(place)
    return groups
