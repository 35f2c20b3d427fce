"""What disentangled positions and their company add to the ledger: tables, layers, a convolution, a decoder."""

from __future__ import annotations

from bothways.model.config import EncoderConfig
from bothways.model.positions import Disentangled, Learned

Part = tuple[str, str, int]
"""What it is, its formula, and how many parameters. Letters as in `ledger.Entry`."""


def absolute_rows(config: EncoderConfig) -> int:
    """Rows of a table of absolute positions that is added to the tokens, P."""
    match config.position:
        case Learned(positions, offset):
            return positions + offset
        case Disentangled(positions, absolute="input"):
            return positions
        case _:
            return 0


def decoder_rows(config: EncoderConfig) -> int:
    """Rows of the table in the masked LM head, P, if that is an enhanced mask decoder."""
    position = config.position
    return (
        position.max_positions
        if isinstance(position, Disentangled) and position.absolute == "decoder"
        else 0
    )


def relative_parts(config: EncoderConfig) -> list[Part]:
    """The table of relative positions, what is made of it in each layer, and the convolution."""
    position, h, n = config.position, config.width, config.blocks
    if not isinstance(position, Disentangled):
        return []
    times = 2 if config.bias.norm else 1
    scale = "2·" if times == 2 else ""
    norm = f" + {scale}H" if position.norm else ""
    table = (
        "relative positions",
        f"2·R·H{norm}",
        2 * position.span * h + (times * h if position.norm else 0),
    )
    parts: list[Part] = [table, *_own_layers(config, position, h, n)]
    if position.convolution is not None:
        size, groups = position.convolution.size, position.convolution.groups
        count = size * h * h // groups + h + times * h
        shared = f"/{groups}" if groups > 1 else ""
        parts.append(("convolution", f"{size}·H²{shared} + H + {scale}H", count))
    return parts


def _own_layers(config: EncoderConfig, position: Disentangled, h: int, n: int) -> list[Part]:
    if position.shared:
        return []
    terms = len(position.terms)
    biases = sum(
        config.bias.attention and (config.bias.key or term != "c2p") for term in position.terms
    )
    formula = f"{terms}·L·H²" + (f" + {biases}·L·H" if biases else "")
    return [("relative positions: keys and queries", formula, terms * n * h * h + biases * n * h)]


def relative_flops(config: EncoderConfig, length: int) -> float:
    """Operations per token in one layer: its products with the 2·length − 1 distances, for each term."""
    position = config.position
    return (
        len(position.terms) * 2.0 * config.width * (2 * length - 1)
        if isinstance(position, Disentangled)
        else 0.0
    )


def convolution_flops(config: EncoderConfig) -> float:
    """Operations per token of the convolution; 0 without one."""
    position = config.position
    if not isinstance(position, Disentangled) or position.convolution is None:
        return 0.0
    return 2.0 * position.convolution.size * config.width**2 / position.convolution.groups
