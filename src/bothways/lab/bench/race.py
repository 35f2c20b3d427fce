"""Time a pre-training step of this library and of transformers in one run.

The contenders take turns, round after round, with equal threads and tokens; their medians are
compared. Each contender runs in its own process, as it does for its users, so that the allocator
and torch settings of one do not affect another.

Operations count the matrix products that the model needs (a multiply-add is two, a backward pass
twice the forward pass): 12·H² per token and block, 2·n·H for attention at length n, and the MLM
head on masked tokens only. A contender that computes the head everywhere gets no credit for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from bothways.core.errors import ResourceError
from bothways.core.report.sections import Cell, TableSection
from bothways.core.runtime.allocator import give_back
from bothways.core.runtime.devices import Precision, describe_device, gemm_rate, has_bf16, wait
from bothways.lab.bench.workloads import CONTENDERS, Workload, contenders, make_batch
from bothways.model.kernels import library as native


@dataclass(frozen=True)
class Timing:
    """The times of a contender.

    Attributes:
        rounds: seconds per timed update; each follows an untimed one.
        memory: peak memory of the process in bytes; None where the system does not report it.
    """

    contender: str
    precision: Precision
    rounds: tuple[float, ...]
    memory: int | None

    @property
    def median(self) -> float:
        """Median of the rounds in seconds."""
        return statistics.median(self.rounds)


_UPDATE: list[Callable[[], None]] = []
"""The update of a contender, in its own process."""


def _build(
    name: str, work: Workload, precision: Precision, device: torch.device, threads: int
) -> None:
    """Build the contender of this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports the interruption
    torch.set_num_threads(threads)
    _UPDATE[:] = [CONTENDERS[name](work, make_batch(work), precision, device)]


def _take_turn(device: torch.device) -> tuple[float, int | None]:
    """Run two updates; return the seconds of the second and the peak memory so far in bytes."""
    _UPDATE[0]()  # untimed: other contenders have evicted the caches
    wait(device)
    start = time.perf_counter()
    _UPDATE[0]()
    wait(device)
    seconds = time.perf_counter() - start
    give_back(device)
    return seconds, high_water_mark(device)


def race(work: Workload, rounds: int, device: torch.device) -> list[Timing]:
    """Time every contender in every precision of the device, in interleaved rounds.

    Raises:
        ResourceError: a contender ended early: out of memory, or an error with its traceback.
    """
    precisions: list[Precision] = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    names, timings = [*itertools.product(contenders(device), precisions)], list[Timing]()
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(
                    1, context, initializer=_build, initargs=(*name, device, threads)
                )
            )
            for name in [(contender, work, precision) for contender, precision in names]
        ]
        turns = [
            [_turn(pool, device, work, *name) for pool, name in zip(pools, names, strict=True)]
            for _ in range(rounds)
        ]
    for (contender, precision), taken in zip(names, zip(*turns, strict=True), strict=True):
        seconds = tuple(seconds for seconds, _ in taken)
        timings.append(Timing(contender, precision, seconds, taken[-1][1]))
    return timings


def _turn(
    pool: ProcessPoolExecutor,
    device: torch.device,
    work: Workload,
    contender: str,
    precision: Precision,
) -> tuple[float, int | None]:
    """Return the result of a contender's turn."""
    try:
        return pool.submit(_take_turn, device).result()
    except (BrokenProcessPool, torch.OutOfMemoryError) as error:
        shape = f"{work.rows} × {work.length} tokens of {work.name}"
        message = f"{contender} in {precision} failed on {shape}: out of memory, or the error above"
        fix = "Choose a smaller workload: bothways bench small."
        raise ResourceError(message, fix=fix) from error


def high_water_mark(device: torch.device) -> int | None:
    """Return the peak memory of this process in bytes (tensors of a GPU), or `None` if unknown.

    getrusage is not used because it includes the peak of the parent process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            (line,) = (line for line in file if line.startswith("VmHWM"))
    except FileNotFoundError:
        return None
    return int(line.split()[1]) * 1024


def measure(work: Workload, rounds: int, device: torch.device) -> TableSection:
    """Time one workload and compare the contenders, one in each row.

    Raises:
        ResourceError: out of memory, or transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ResourceError("transformers is not installed", fix="Run `pip install transformers`.")
    timings = race(work, rounds, device)
    median = {(timing.contender, timing.precision): timing.median for timing in timings}
    dtypes, rows = {"fp32": torch.float32, "bf16": torch.bfloat16}, list[list[Cell]]()
    for timing in timings:
        step, precision = timing.median, timing.precision
        peak = gemm_rate(device, dtypes[precision])
        rows.append(
            [
                f"{timing.contender} {precision}",
                f"{step * 1e3:.0f} ({min(timing.rounds) * 1e3:.0f}–{max(timing.rounds) * 1e3:.0f})",
                f"{work.tokens / step:,.0f}",
                f"{median['transformers', 'fp32'] / step:.2f}",
                f"{median['transformers', precision] / step:.2f}",
                f"{work.operations / step / peak:.0%}",
                "–" if timing.memory is None else f"{timing.memory / 2**20:,.0f} MiB",
            ]
        )
    columns = ["", "ms (min–max)", "tokens/s", "× default", "× same", "of GEMM", "memory"]
    title = f"Pre-training step, {work.name}, {work.rows} × {work.length} tokens, MLM + NSP"
    note = "× default: relative to transformers in fp32, its default; × same: in equal precision"
    return TableSection(title, columns, rows, note=note)


def hardware(device: torch.device) -> str:
    """Describe the machine and the library versions."""
    import transformers as peer

    return (
        f"{describe_device(device)}, {native.describe_kernels()}, transformers {peer.__version__}"
    )
