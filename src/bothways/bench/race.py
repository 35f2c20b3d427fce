"""This machine's speed at a pre-training step, side by side with transformers in one run.

The contenders take turns, round after round, with the same threads on the same tokens; the medians are compared. Each is a
process of its own, as it would be for its users: what one asks of the allocator or of torch does nothing for another.

Operations are counted as the matrix products that the model needs, a multiply and an add as two, backward as twice forward:
per token 12·H² a block and 2·n·H for attention at length n; the MLM head on masked tokens alone. So a contender that computes
the head everywhere is not credited for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import signal
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from bothways.bench.workloads import CONTENDERS, Workload, contenders, make_batch
from bothways.core.errors import ResourceError
from bothways.kernels import library as native
from bothways.runtime.allocator import give_back
from bothways.runtime.devices import Precision, describe_device, gemm_rate, has_bf16, wait


@dataclass(frozen=True)
class Timing:
    """Attributes:
    rounds: seconds of an update in each, after one that is not counted.
    memory: the most bytes that its process has held; none where the system does not tell.
    """

    contender: str
    precision: Precision
    rounds: tuple[float, ...]
    memory: int | None

    @property
    def median(self) -> float:
        """Of the rounds, in seconds."""
        return statistics.median(self.rounds)


class ContenderProcess:
    """A contender in a process of its own, so that no setting of one, such as how memory is taken, serves another.

    Args:
        name: of `contenders.CONTENDERS`.
        work: what it does over and over.
        precision: of its matrix products.
        device: where.
    """

    def __init__(
        self, name: str, work: Workload, precision: Precision, device: torch.device
    ) -> None:
        self.name, self.precision, self._work = name, precision, work
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        given = (theirs, name, work, precision, device, torch.get_num_threads())
        self._process = context.Process(target=_take_turns, args=given, daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has built what it needs."""
        self._told()

    def turn(self) -> tuple[float, int | None]:
        """Two updates: seconds of the second, and the most bytes that the process has held so far."""
        with contextlib.suppress(BrokenPipeError):  # then there is nothing to be told, either
            self._connection.send(None)
        seconds, most = self._told()
        return seconds, most

    def end(self) -> None:
        """Without waiting for what it does."""
        self._process.kill()

    def _told(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            work = f"{self._work.rows} × {self._work.length} tokens of {self._work.name}"
            what = f"{self.name} in {self.precision} came to no end with {work}: too little memory, or what stands above"
            raise ResourceError(what, fix="Choose a smaller one: bothways bench small.") from error


def _take_turns(
    connection: Connection,
    name: str,
    work: Workload,
    precision: Precision,
    device: torch.device,
    threads: int,
) -> None:
    """What the process does: a turn whenever it is asked for."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the process that asks says that it was interrupted
    torch.set_num_threads(threads)
    with contextlib.suppress(torch.OutOfMemoryError):
        update = CONTENDERS[name](work, make_batch(work), precision, device)
        connection.send(None)
        while True:
            connection.recv()
            update()  # finds caches as others left them, and no memory that is kept
            wait(device)
            start = time.perf_counter()
            update()
            wait(device)
            seconds = time.perf_counter() - start
            give_back(device)  # for the others
            connection.send((seconds, high_water_mark(device)))


def race(work: Workload, rounds: int, device: torch.device) -> list[Timing]:
    """Seconds of an update for each contender in each precision that the device has, in interleaved rounds.

    Raises:
        ResourceError: one has ended before: the device has not the memory, or an error, whose traceback has been printed.
    """
    precisions: list[Precision] = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    taken: dict[ContenderProcess, list[tuple[float, int | None]]] = {}
    try:
        for name, precision in itertools.product(contenders(device), precisions):
            taken[ContenderProcess(name, work, precision, device)] = []
        for process in taken:
            process.ready()
        for _ in range(rounds):
            for process, turns in taken.items():
                turns.append(process.turn())
    finally:
        for process in taken:
            process.end()
    return [
        Timing(each.name, each.precision, tuple(seconds for seconds, _ in turns), turns[-1][1])
        for each, turns in taken.items()
    ]


def high_water_mark(device: torch.device) -> int | None:
    """Bytes that this process has held at most; of a GPU's memory, in tensors; none where the system does not tell.

    (getrusage would count its parent's, too.)
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            (line,) = (line for line in file if line.startswith("VmHWM"))
    except FileNotFoundError:
        return None
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class BenchRow:
    """One line of the table: tokens a second, ratios to transformers by default and in the same precision, share of GEMM."""

    timing: Timing
    tokens_per_second: float
    against_default: float
    against_same: float
    share_of_gemm: float


def measure(work: Workload, rounds: int, device: torch.device) -> list[BenchRow]:
    """The race of one workload.

    Raises:
        ResourceError: the device has not the memory, or transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ResourceError(
            "transformers is not installed", fix="pip install transformers, to compare with it."
        )
    timings = race(work, rounds, device)
    median = {(t.contender, t.precision): t.median for t in timings}
    return [
        BenchRow(
            t,
            work.tokens / t.median,
            median["transformers", "fp32"] / t.median,
            median["transformers", t.precision] / t.median,
            work.operations
            / t.median
            / gemm_rate(device, torch.bfloat16 if t.precision == "bf16" else torch.float32),
        )
        for t in timings
    ]


def hardware(device: torch.device) -> str:
    """The machine and the versions that the figures belong to."""
    import transformers as peer

    return (
        f"{describe_device(device)}, {native.describe_kernels()}, transformers {peer.__version__}"
    )
