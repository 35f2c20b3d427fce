"""How much of a job is done: who is told, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

OnShare = Callable[[float], None]
"""Is told how much is done, from 0 to 1."""


def untold(share: float) -> None:
    """Where nobody watches."""


class TimeLeft:
    """How long what is under way will take, from the share of it that is done and the time since the first share."""

    def __init__(self) -> None:
        self._begin: tuple[float, float] | None = None

    def said(self, share: float) -> str:
        """ "40% done, 0:01:30 left"; the first time, from which on it is measured, without the second part."""
        now = time.monotonic()
        start, before = self._begin = self._begin or (now, share)
        if share <= before:
            return f"{share:.0%} done"
        left = (now - start) * max(0.0, 1 - share) / (share - before)
        return f"{share:.0%} done, {timedelta(seconds=round(left))} left"
