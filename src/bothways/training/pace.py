"""How fast each rank is, and which one has stopped.

Ranks wait for each other in every step, so the time of a step says nothing about one of them. What
does is the time in which a rank is at work by itself: reading the data, and the forward passes up
to the first exchange. On a GPU, where work is queued, it is the time until the work is queued.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

import torch

from bothways.core.advice import argument, render
from bothways.training.parallel import Plan, all_gather, lost_contact

SLOW = 1.5
"""A rank is a straggler from this multiple of the median time on."""
ENDED_BY_WATCHDOG = 75
"""Exit status of a process that the watchdog ends (EX_TEMPFAIL of sysexits.h)."""

Doing = Literal[
    "reading its batch",
    "waiting for the other ranks",
    "computing",
    "exchanging gradients",
    "resting",
]
"""What a rank does in a step; "resting" is evaluation and saving, which no limit is for."""


class Pace:
    """The seconds that this rank has worked by itself since the last reading, and its tokens."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seconds = 0.0
        self._tokens = 0

    def add(self, seconds: float, tokens: int) -> None:
        """Add a step of this rank."""
        self._seconds += seconds
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Return the pace of all ranks as a record, and start again; all ranks call this.

        "rank/N/seconds" is the time of work of rank N by itself, "rank/N/tokens" what it read.
        Of one process there is nothing to report.
        """
        local = torch.tensor([self._seconds, self._tokens], dtype=torch.float64)
        self._seconds, self._tokens = 0.0, 0
        if self._plan.world == 1:
            return {}
        table = all_gather(self._plan, local).tolist()
        return {
            f"rank/{rank}/{name}": value
            for rank, row in enumerate(table)
            for name, value in zip(("seconds", "tokens"), row, strict=True)
        }


def stragglers(record: Mapping[str, float]) -> dict[int, float]:
    """Return the ranks that take much longer than the median, with the multiple of it."""
    times = {
        int(name.split("/")[1]): value
        for name, value in record.items()
        if name.startswith("rank/") and name.endswith("/seconds")
    }
    if not times:
        return {}
    # The lower one of two: of two ranks, the slow one must not be the measure.
    median = sorted(times.values())[(len(times) - 1) // 2]
    return {
        rank: seconds / median
        for rank, seconds in times.items()
        if median and seconds > SLOW * median
    }


class Watchdog:
    """Ends the process when a step takes too long, and says who waits for whom.

    A rank that hangs makes all others wait. Each one then reports what it was doing: the one that
    did not wait is the cause. torchrun starts all of them again.

    Args:
        limit: in seconds; None for no limit.
    """

    def __init__(self, plan: Plan, limit: float | None) -> None:
        self._plan, self._limit = plan, limit
        self._now: tuple[Doing, int, float] = ("resting", 0, time.monotonic())
        self._over = threading.Event()

    def note(self, doing: Doing, step: int) -> None:
        """Note what is done, for which step."""
        self._now = doing, step, time.monotonic()

    def __enter__(self) -> Watchdog:
        if self._limit is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        prefix = f"step {self._now[1]}: "
        if error is not None and (lost := lost_contact(self._plan, error, prefix)):
            raise lost from error

    def _watch(self) -> None:
        assert self._limit is not None
        while not self._over.wait(min(1.0, self._limit / 4)):
            doing, step, since = self._now
            if doing != "resting" and time.monotonic() - since > self._limit:
                message = self.message(doing, step)
                os.write(2, f"\n{message}\n".encode())
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                os._exit(ENDED_BY_WATCHDOG)

    def message(self, doing: Doing, step: int) -> str:
        """Return the message for the end of the limit."""
        resume = render(argument(resume=True))
        return (
            f"step {step}: rank {self._plan.rank} has been {doing} for more than "
            f"{self._limit:g} seconds, and ends.\n  The rank that did not wait for others is the "
            f"cause. Look at its batch: bothways inspect-step RUN {step}; continue with {resume}."
        )
