"""Distribution of the sequences of a step over ranks, microbatches and padded rectangles.

The user sets the size of a step for all ranks together. Sequences are sorted by length and dealt
to the ranks, so that every rank has about the same number of tokens. A token budget cuts them to
microbatches of about equal memory, and neighbours of similar length leave little padding in the
rectangles of `core.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal

from typing_extensions import assert_never

from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError


@dataclass(frozen=True)
class ExampleBudget:
    """A step of `n` sequences over all ranks."""

    n: int
    kind: Literal["examples"] = "examples"

    def __post_init__(self) -> None:
        require_at_least(1, "batch", n=self.n)


@dataclass(frozen=True)
class TokenBudget:
    """A step of as many sequences as fit in `n` tokens over all ranks, specials included; at least
    one.
    """

    n: int
    kind: Literal["tokens"] = "tokens"

    def __post_init__(self) -> None:
        require_at_least(1, "batch", n=self.n)


@dataclass(frozen=True)
class TokenRamp:
    """Token budgets that grow straight from `start` to `n` while the run reads its first `over`
    tokens.

    The budget of a step depends on the tokens read before it, not on steps or time.
    """

    start: int
    n: int
    over: int
    kind: Literal["token_ramp"] = "token_ramp"

    def __post_init__(self) -> None:
        require_at_least(1, "batch", n=self.n, start=self.start, over=self.over)
        if self.n < self.start:
            message = f"{self.n:,} tokens are fewer than the {self.start:,} of the first updates"
            fix = f"Set batch.start lower; or for equal updates, batch.kind=tokens batch.n={self.n}"
            raise ConfigError(message, where="batch.n", fix=fix)

    def steps(self, tokens: float) -> float:
        """Return the number of steps in which a run reads `tokens`, about."""
        growth, inside = (self.n - self.start) / self.over, min(tokens, self.over)
        # The budget grows with the tokens read, so these grow exponentially with the steps.
        ramp = math.log1p(inside * growth / self.start) / growth if growth else inside / self.n
        return ramp + (tokens - inside) / self.n

    def tokens(self, steps: float) -> float:
        """Return the number of tokens that a run reads in `steps`, about."""
        growth, ramp = (self.n - self.start) / self.over, self.steps(self.over)
        if steps >= ramp:
            return self.over + (steps - ramp) * self.n
        return self.start * math.expm1(steps * growth) / growth if growth else steps * self.n


BatchSize = ExampleBudget | TokenBudget | TokenRamp


def budget_at(batch: BatchSize, tokens_read: int) -> ExampleBudget | TokenBudget:
    """Return the budget of the step that follows `tokens_read` tokens of the run."""
    if not isinstance(batch, TokenRamp):
        return batch
    grown = (batch.n - batch.start) * min(tokens_read, batch.over) // batch.over
    return TokenBudget(batch.start + grown)


def fits(batch: ExampleBudget | TokenBudget, sequences: int, tokens: int) -> bool:
    """Return True if sequences with these totals fit in one step."""
    match batch:
        case ExampleBudget(n):
            return sequences <= n
        case TokenBudget(n):
            return tokens <= n or sequences == 1
        case _:
            assert_never(batch)


def deal(lengths: Many[int], world: int, budget: int) -> list[list[list[int]]]:
    """Assign sequences to ranks and microbatches; return positions in `lengths`.

    Sequences are sorted by length, longest first, ties in the given order; rank r takes every
    world-th sequence from the r-th on. A microbatch has at most `budget` tokens, or is one longer
    sequence. All ranks have the same number of microbatches, because a sharded model works in
    lockstep; some may be empty.

        lengths = [3, 9, 5, 4], world = 2, budget = 9
        rank 0: 9, 4 → [[1], [3]]        rank 1: 5, 3 → [[2, 0], []]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    ranks = [_cut(order[rank::world], lengths, budget) for rank in range(world)]
    count = max(len(microbatches) for microbatches in ranks)
    return [microbatches + [[]] * (count - len(microbatches)) for microbatches in ranks]


def _cut(indices: list[int], lengths: Many[int], budget: int) -> list[list[int]]:
    """Group neighbours that fit in `budget` tokens."""
    groups: list[list[int]] = []
    room = 0
    for index in indices:
        room -= lengths[index]
        if not groups or room < 0:
            groups.append([])
            room = budget - lengths[index]
        groups[-1].append(index)
    return groups
