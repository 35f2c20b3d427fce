"""Lines on a terminal that are what they are: brackets in names are no markup, and a path can be copied whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(console: Console, text: str) -> None:
    """Print a line as it is: without markup, colours, or breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
