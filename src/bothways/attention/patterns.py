"""Which tokens attend to which in a layer: one value for each pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.core.config.checks import require_at_least


@dataclass(frozen=True)
class Full:
    """Every token sees all tokens of its sequence."""

    kind: Literal["full"] = "full"


@dataclass(frozen=True)
class Window:
    """A token sees those at most `radius` places away, on both sides (Beltagy et al. 2020, section 3.1).

    Attributes:
        radius: in tokens.
        global_attention: whether the tokens that a batch names as global see all and are seen by all. What they see, they see
            through queries, keys and values of their own ("linear projections for global attention").
    """

    radius: int = 64
    global_attention: bool = False
    kind: Literal["window"] = "window"

    def __post_init__(self) -> None:
        require_at_least(0, "encoder.patterns", radius=self.radius)


@dataclass(frozen=True)
class Blocks:
    """A token sees its block and both neighbours, the first and the last block, and some drawn at random.

    Tokens of the first and the last block see all. A sequence of up to `dense` tokens sees itself whole.

    Source: Zaheer et al. 2020, section 2, the internal construction (ITC).

    Attributes:
        size: tokens of a block.
        random: blocks that are drawn for each block, layer and head; always the same ones.
    """

    size: int = 64
    random: int = 3
    kind: Literal["blocks"] = "blocks"

    @property
    def dense(self) -> int:
        """The longest sequence with full attention."""
        return (5 + 2 * self.random) * self.size

    def __post_init__(self) -> None:
        require_at_least(1, "encoder.patterns", size=self.size, random=self.random)


@dataclass(frozen=True)
class Causal:
    """A token sees itself and those before it: left to right, as in GPT (Devlin et al. 2018, figure 3)."""

    kind: Literal["causal"] = "causal"


Pattern = Full | Window | Blocks | Causal
