"""Attention patterns: which tokens attend to which, one value per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.core.config.values import require_at_least


@dataclass(frozen=True)
class Full:
    """Every token attends to all tokens of its sequence."""

    kind: Literal["full"] = "full"


@dataclass(frozen=True)
class Window:
    """Every token attends to those at most `radius` positions away, on both sides.

    Source: Beltagy et al. 2020, section 3.1.

    Attributes:
        radius: in tokens.
        global_attention: whether the batch's global tokens attend to all tokens and all tokens to
            them. Their own attention has queries, keys and values of its own (section 3.1, "linear
            projections for global attention").
    """

    radius: int = 64
    global_attention: bool = False
    kind: Literal["window"] = "window"

    def __post_init__(self) -> None:
        require_at_least(0, "encoder.patterns", radius=self.radius)


@dataclass(frozen=True)
class Blocks:
    """Every token attends to its block, both neighbours, the first and last block and random ones.

    Tokens of the first and the last block attend to all tokens. Sequences of up to `dense` tokens
    have full attention.

    Source: Zaheer et al. 2020, section 2, the internal construction (ITC).

    Attributes:
        size: tokens per block.
        random: random blocks per block, layer and head, the same in every run.
    """

    size: int = 64
    random: int = 3
    kind: Literal["blocks"] = "blocks"

    @property
    def dense(self) -> int:
        """The longest sequence with full attention, in tokens."""
        # The limit of transformers' code: 2 global blocks, 3 neighbours, twice the random blocks.
        # With 3 random blocks of 64 tokens that is 11 blocks, 704 tokens.
        return (5 + 2 * self.random) * self.size

    def __post_init__(self) -> None:
        require_at_least(1, "encoder.patterns", size=self.size, random=self.random)


@dataclass(frozen=True)
class Causal:
    """Every token attends to itself and to those before it (Devlin et al. 2018, figure 3: GPT)."""

    kind: Literal["causal"] = "causal"


# A new pattern is added here; `match` statements with `assert_never` then name what it lacks.
Pattern = Full | Window | Blocks | Causal
