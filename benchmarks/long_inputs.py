"""Time and peak memory of one long input by length: sparse attention against full attention.

    python benchmarks/long_inputs.py [--lengths 512 1024 … 16384] [--whole 8192] [--threads 1]
                                     [--device cpu] [--base]

One sequence of random ids runs forward and through a training step (masked LM on 15 % of its
tokens, without dropout, so that full attention uses torch's fused kernel, too). Shapes: Longformer
(windows of 128 tokens on each side, the first token global), BigBird (blocks of 64, 3 others at
random) and full attention, with 2 layers of 128; with --base 12 of 768 and the published windows.
On a CPU each measurement has its own process; time is the best of three in processor time, memory
the growth of the process at its peak (Linux). Full attention is measured up to --whole tokens.

The exponent is the slope of log time, or memory, over log length from 2,048 tokens on: 1 is linear,
2 quadratic.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bothways.core.batch import Batch, Layout
from bothways.core.runtime.process import tune_allocator
from bothways.model.attention.patterns import Blocks, Full, Pattern, Window
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.model.positions import Learned

SMALL = {"width": 128, "depth": 2, "heads": 2, "intermediate_size": 512, "vocab": 1000}
FIRST = 2048
"""Shorter inputs take less than their fixed cost."""
MIB = 2**20


def shapes(base: bool) -> dict[str, EncoderConfig]:
    """By name, for any length."""
    windows: dict[str, Pattern] = {
        "full": Full(),
        "longformer": Window(256 if base else 128, global_attention=True),
        "bigbird": Blocks(64, 3),
    }
    found = {}
    for name, pattern in windows.items():
        shape = preset("bigbird-roberta-base")
        assert isinstance(shape, EncoderConfig)
        plain = replace(
            shape, patterns=(pattern,), dropout=Dropouts(0.0, 0.0), position=Learned(32_768)
        )
        found[name] = plain if base else replace(plain, **SMALL)
    return found


def measured(
    config: EncoderConfig, length: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Seconds and MiB of a forward pass and of a training step."""
    model, batch, places = _prepared(config, length, device)

    def forward() -> None:
        with torch.no_grad():
            model.eval().encoder(batch)

    def step() -> None:
        x = model.train().encoder(batch).last[places]
        logits: Tensor = model.heads["masked"](x, model.encoder.embedding.token.weight)
        torch.nn.functional.cross_entropy(logits, batch.ids[places]).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    pairs = [_best(run, device) for run in (forward, step)]
    return [seconds for seconds, _ in pairs], [memory for _, memory in pairs]


def _prepared(
    config: EncoderConfig, length: int, device: torch.device
) -> tuple[Model, Batch, Tensor]:
    tune_allocator()
    torch.manual_seed(0)
    ids, everywhere = torch.randint(5, config.vocab, (length,)), torch.arange(length) == 0
    batch = Batch(ids, torch.zeros_like(ids), Layout.of([length]), {}, everywhere).to(device)
    return (
        Model(config, (MaskedHead(),)).to(device),
        batch,
        torch.randperm(length)[: length * 15 // 100].to(device),
    )


def _best(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """The first call warms up; memory is that of all."""
    before, times = _reset(device), []
    for _ in range(4):
        _wait(device)
        start = time.process_time() if device.type == "cpu" else time.perf_counter()
        run()
        _wait(device)
        times.append((time.process_time() if device.type == "cpu" else time.perf_counter()) - start)
    return min(times[1:]), (_peak(device) - before) / MIB


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reset(device: torch.device) -> float:
    """Forgets the peak, and gives what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def _child(pipe: Connection, config: EncoderConfig, length: int) -> None:
    pipe.send(measured(config, length, torch.device("cpu")))


def apart(config: EncoderConfig, length: int) -> tuple[list[float], list[float]]:
    """The same in a process of its own, whose memory begins low."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, config, length))
    child.start()
    found: tuple[list[float], list[float]] = mine.recv()
    child.join()
    return found


def exponent(lengths: list[int], values: list[float]) -> float:
    """The slope in logarithms, by least squares."""
    kept = [
        (length, value)
        for length, value in zip(lengths, values, strict=True)
        if length >= FIRST and value > 0
    ]
    if len(kept) < 2:
        return math.nan
    x, y = np.log(np.array(kept)).T
    return float(np.polyfit(x, y, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384]
    )
    parser.add_argument("--whole", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--base", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {given.threads} threads, fp32, {device}"
    )
    print(f"{'':12}{'tokens':>8}{'forward s':>12}{'step s':>10}{'forward MiB':>13}{'step MiB':>10}")
    for name, config in shapes(given.base).items():
        lengths, rows = [n for n in given.lengths if name != "full" or n <= given.whole], []
        for length in lengths:
            seconds, memory = (
                measured(config, length, device) if device.type == "cuda" else apart(config, length)
            )
            rows.append([*seconds, *memory])
            print(
                f"{name:12}{length:8}{seconds[0]:12.3f}{seconds[1]:10.3f}{memory[0]:13.0f}{memory[1]:10.0f}",
                flush=True,
            )
        slopes = [exponent(lengths, [row[column] for row in rows]) for column in range(4)]
        print(
            f"{name:12}{'exponent':>8}{slopes[0]:12.2f}{slopes[1]:10.2f}{slopes[2]:13.2f}{slopes[3]:10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
