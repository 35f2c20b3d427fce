"""Accelerators by name, with the figures of their manufacturers' data sheets.

bf16 rates are those of dense products that sum in fp32. Links are those to other cards of the same
machine, in one direction: NVLink, Infinity Fabric or PCIe.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from bothways.core.errors import ConfigError

NETWORK = 50e9
"""Bytes per second between machines, for each card: one port of 400 Gb/s."""
MACHINE = 8
"""Cards of a machine."""


@dataclass(frozen=True)
class Accelerator:
    """An accelerator.

    Attributes:
        memory: in bytes.
        bf16: dense operations per second.
        bandwidth: of the memory, in bytes per second.
        link: to another card of the machine, in bytes per second.
    """

    name: str
    title: str
    memory: float
    bf16: float
    bandwidth: float
    link: float


_DATA_SHEETS = (  # GB, 10¹² operations, GB/s of the memory, GB/s of the link
    ("l4", "NVIDIA L4", 24, 121, 300, 32),
    ("a10", "NVIDIA A10", 24, 125, 600, 32),
    ("rtx3090", "NVIDIA GeForce RTX 3090", 24, 71, 936, 32),
    ("rtx4090", "NVIDIA GeForce RTX 4090", 24, 165, 1008, 32),
    ("a100-40", "NVIDIA A100 SXM 40 GB", 40, 312, 1555, 300),
    ("l40s", "NVIDIA L40S", 48, 362, 864, 32),
    ("a100", "NVIDIA A100 SXM 80 GB", 80, 312, 2039, 300),
    ("h100", "NVIDIA H100 SXM", 80, 989, 3350, 450),
    ("h200", "NVIDIA H200 SXM", 141, 989, 4800, 450),
    ("b200", "NVIDIA B200 (HGX)", 180, 2250, 7700, 900),
    ("mi300x", "AMD Instinct MI300X", 192, 1307, 5300, 448),
)
CARDS = {
    name: Accelerator(name, title, memory * 1e9, bf16 * 1e12, bandwidth * 1e9, link * 1e9)
    for name, title, memory, bf16, bandwidth, link in _DATA_SHEETS
}
"""By name, the smallest memory first."""


def card_named(name: str) -> Accelerator:
    """Return the card of this name, in any case.

    Raises:
        ConfigError: there is none.
    """
    if name.lower() not in CARDS:
        near = difflib.get_close_matches(name.lower(), CARDS, 1)
        message = f"there is no card {name!r}: it must be here or one of {', '.join(CARDS)}"
        fix = f"Did you mean {near[0]!r}?" if near else None
        raise ConfigError(message, where="hardware", fix=fix)
    return CARDS[name.lower()]
