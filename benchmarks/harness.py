"""What all benchmarks share: interleaved rounds, two clocks, medians with their spread, and the machine that they belong to.

Contenders take turns, round by round, so that what else the machine does falls on all of them. Rates are for seconds of
processor time, of this process and of children that it has waited for, where one thread works: a busy machine then does not
matter much. With several threads they are for seconds on the clock, since threads that wait for each other burn time.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bothways.kernels import library as native


@dataclass(frozen=True)
class Rounds:
    """Seconds of each round of one contender.

    Attributes:
        processor: that processors worked.
        clock: that passed.
    """

    processor: tuple[float, ...]
    clock: tuple[float, ...]

    def seconds(self, threads: int) -> tuple[float, ...]:
        """Those that count with so many threads."""
        return self.processor if threads == 1 else self.clock


def clocks() -> tuple[float, float]:
    """Seconds of processor time, and on the clock."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system, time.perf_counter()


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm: int = 1
) -> dict[str, Rounds]:
    """Each contender once a round; the first `warm` rounds are not counted."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(warm + rounds):
        for name, work in contenders.items():
            start = clocks()
            work()
            processor, clock = (
                after - before for before, after in zip(start, clocks(), strict=True)
            )
            if number >= warm:
                taken[name].append((processor, clock))
    return {name: Rounds(*map(tuple, zip(*pairs, strict=True))) for name, pairs in taken.items()}


@dataclass(frozen=True)
class Line:
    """Attributes:
    name: of the contender.
    seconds: the median of its rounds.
    speed: how many times as fast as the reference, the median over rounds; then the slowest round and the fastest.
    clock: the median of the seconds that passed.
    """

    name: str
    seconds: float
    speed: tuple[float, float, float]
    clock: float


def against(taken: Mapping[str, Rounds], reference: str, threads: int) -> list[Line]:
    """Each contender beside the reference, round by round."""
    base, lines = taken[reference].seconds(threads), []
    for name, rounds in taken.items():
        seconds = rounds.seconds(threads)
        ratios = [theirs / own for theirs, own in zip(base, seconds, strict=True)]
        speed = (statistics.median(ratios), min(ratios), max(ratios))
        lines.append(Line(name, statistics.median(seconds), speed, statistics.median(rounds.clock)))
    return lines


def best(taken: Mapping[str, Rounds], names: Iterable[str], threads: int) -> str:
    """The one of these with the lowest median."""
    return min(names, key=lambda name: statistics.median(taken[name].seconds(threads)))


def show(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table on the terminal, or plain in a file."""
    table = Table("", *columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if os.isatty(1) else 128).print(table)


def span(speed: tuple[float, float, float]) -> str:
    """A ratio with its spread, as text."""
    middle, low, high = speed
    return f"{middle:.2f}× ({low:.2f}–{high:.2f})"


def machine(packages: Iterable[str]) -> str:
    """The processor, and the versions of Python and of those packages that are installed."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return f"{processor()}, {os.cpu_count()} cores, {native.describe_kernels()}; Python {platform.python_version()}, {', '.join(found)}"


def processor() -> str:
    """The processor's name, as far as it can be found."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
