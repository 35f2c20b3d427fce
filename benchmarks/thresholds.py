"""Measure the thresholds of `bothways.core.runtime.tuning` on this machine.

    python benchmarks/thresholds.py [--rounds 7] [--device cpu]

For each threshold two ways of computing are timed in turns at growing sizes. The measured value is
the largest size up to which the first way is faster, with a tolerance for noise. Batch sizes are
measured by their speed alone: the measured value is the fastest. The last lines are for
`src/bothways/core/runtime/tuning.py`. Close other programs first.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bothways.core.batch import Batch, Layout
from bothways.core.runtime.devices import choose_device, describe_device, has_bf16, wait
from bothways.core.runtime.tuning import TUNING
from bothways.model.attention.dispatch import attend_gathered
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Window
from bothways.model.attention.reference import PaddedKernel, attend_in_blocks, attend_padded
from bothways.model.config import EncoderConfig
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.library import (
    Feature,
    describe_kernels,
    kernel_features,
    supports_heads,
)
from bothways.model.kernels.linear import CompiledLinear
from bothways.model.model import Encoder

HEADS, SIZE, TOKENS = 12, 64, 2048
"""Heads, features of a head and tokens of a measured batch."""
NOISE = 0.97
"""A way counts as slower where the other one takes less than this share of its time."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """A threshold as measured.

    Attributes:
        field: name of the field of `Tuning`, or of another measurement.
        ways: description of the two ways.
        speedups: speed of the first way relative to the second, by size; for batch sizes, relative
            to the slowest.
        value: measured threshold; None if the first way was never faster.
    """

    field: str
    ways: str
    speedups: Mapping[int, float]
    value: int | None

    @property
    def used(self) -> int | None:
        """The value in use; None if it is not a field of `Tuning`."""
        return getattr(TUNING, self.field, None)


def measure_thresholds(device: torch.device, rounds: int = 7) -> Iterator[Measurement]:
    """Measure one threshold after the other."""
    if device.type == "cpu":
        bf16 = [("products_bf16", torch.bfloat16)] if has_bf16(device) else []
        for field, dtype in [("products_fp32", torch.float32), *bf16]:
            yield _race(
                field, "products against torch's fused kernel, with gradients",
                (32, 64, 128, 256, 512, 1024),
                lambda n, dtype=dtype: _padded(n, dtype, "products", True),
                lambda n, dtype=dtype: _padded(n, dtype, "fused", True),
                device, rounds,
            )  # fmt: skip
        yield _race(
            "in_place_fp32", "products in place against torch's fused kernel",
            (16, 32, 48, 64, 128),
            lambda n: _padded(n, torch.float32, "in_place", False),
            lambda n: _padded(n, torch.float32, "fused", False),
            device, rounds,
        )  # fmt: skip
        yield from _compiled(device, rounds)
        yield from _panels(device, rounds)
    yield _window(device, rounds)
    yield _batch_tokens(device, rounds)


def _race(
    field: str,
    ways: str,
    sizes: tuple[int, ...],
    first: Callable[[int], Work],
    second: Callable[[int], Work],
    device: torch.device,
    rounds: int,
) -> Measurement:
    """Time two ways in turns at each size."""
    speedups = {}
    for size in sizes:
        a, b = _medians([first(size), second(size)], device, rounds)
        speedups[size] = b / a
    faster = itertools.takewhile(lambda size: speedups[size] >= NOISE, sizes)
    return Measurement(field, ways, speedups, max(faster, default=None))


def _medians(works: list[Work], device: torch.device, rounds: int) -> list[float]:
    """Time works in turns, after a round that warms up; return the median of each in seconds."""
    times = [[_seconds(work, device) for work in works] for _ in range(rounds + 1)]
    return [statistics.median(taken) for taken in zip(*times[1:], strict=True)]


def _seconds(work: Work, device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def _qkv(n: int, dtype: torch.dtype, device: torch.device, learning: bool) -> Tensor:
    """Return packed queries, keys and values of sequences of `n` tokens."""
    tokens = max(1, TOKENS // n) * n
    qkv = torch.randn(tokens, 3, HEADS, SIZE, dtype=dtype, device=device)
    return qkv.requires_grad_(learning)


def _padded(n: int, dtype: torch.dtype, kernel: PaddedKernel, learning: bool) -> Work:
    """Return attention over rectangles; with gradients, products have their own backward pass."""
    qkv = _qkv(n, dtype, torch.device("cpu"), learning)
    view = AttentionView(Layout.of([n] * (len(qkv) // n)))

    def outputs() -> Tensor:
        """Compute attention once."""
        if learning and kernel == "products":
            return attend_gathered(qkv, view.parts, 0.0)
        q, k, v = view.parts[0].rectangle.pad(qkv).permute(2, 0, 3, 1, 4)
        return attend_padded(q, k, v, None, 0.0, kernel)

    if learning:
        return lambda: torch.autograd.backward(outputs().sum())
    return outputs


def _compiled(device: torch.device, rounds: int) -> Iterator[Measurement]:
    """Measure the compiled attention kernel, fp32 and, with AMX, bf16."""
    amx = Feature.AMX in kernel_features()
    for field, dtype, sizes in (
        ("compiled", torch.float32, (64, 128, 256, 512, 1024)),
        ("compiled_amx", torch.bfloat16, (256, 1024, 2048, 4096, 8192)),
    ):
        usable = supports_heads(device, dtype, SIZE) and (dtype == torch.float32 or amx)
        if usable:
            yield _race(
                field, "compiled kernel against torch's fused kernel", sizes,
                lambda n, dtype=dtype: _compiled_work(n, dtype),
                lambda n, dtype=dtype: _padded(n, dtype, "fused", False),
                device, rounds,
            )  # fmt: skip


def _compiled_work(n: int, dtype: torch.dtype) -> Work:
    qkv = _qkv(n, dtype, torch.device("cpu"), False)
    layout = Layout.of([n] * (len(qkv) // n))
    return lambda: packed_attention(qkv, layout, 0.0)


def _panels(device: torch.device, rounds: int) -> Iterator[Measurement]:
    """Measure dense layers with weights in panels."""
    if not kernel_features():
        return
    linear = nn.Linear(768, 768)
    panels = CompiledLinear(linear.weight.detach(), None, linear.bias.detach())

    def rows(n: int) -> Tensor:
        """Return `n` random rows."""
        return torch.randn(n, 768)

    def packed(n: int) -> Work:
        """Return a product with weights in panels."""
        x = rows(n)
        return lambda: panels(x)

    def plain(n: int) -> Work:
        """Return a plain product."""
        x, weight, bias = rows(n), linear.weight.detach(), linear.bias.detach()
        return lambda: nn.functional.linear(x, weight, bias)

    yield _race(
        "panel_rows", "weights in panels against a plain product, 768 features, fp32",
        (16, 48, 96, 192, 384, 768), packed, plain, device, rounds,
    )  # fmt: skip


def _window(device: torch.device, rounds: int) -> Measurement:
    """Measure full attention with a mask against block-sparse attention, for a radius of 64."""
    radius = 64
    pattern = Window(radius)

    def work(more: int, sparse: bool) -> Work:
        """Return attention over sequences `more` tokens longer than the window."""
        n = 2 * radius + more
        qkv = _qkv(n, torch.float32, device, True)
        view = AttentionView(Layout.of([n] * (len(qkv) // n)).to(device), pattern)
        (part,) = view.parts
        kernel: PaddedKernel = "products" if device.type == "cpu" else "fused"

        def run() -> None:
            """Compute attention and its gradient once."""
            q, k, v = part.rectangle.pad(qkv).permute(2, 0, 3, 1, 4)
            if sparse:
                outputs = attend_in_blocks(q, k, v, part.block_mask, None, 0.0, kernel)
            else:
                outputs = attend_padded(q, k, v, part.mask, 0.0, kernel)
            torch.autograd.backward(outputs.sum())

        return run

    return _race(
        f"masked_window_{device.type}", "full attention with a mask against blocks, radius 64",
        (64, 128, 256, 512, 1024, 2048),
        lambda more: work(more, False), lambda more: work(more, True), device, rounds,
    )  # fmt: skip


def _batch_tokens(device: torch.device, rounds: int) -> Measurement:
    """Measure tokens per batch in prediction, with 6 layers × 384 and texts of 32 tokens."""
    config = EncoderConfig(30_522, 384, 6, 12, 1536)
    encoder, length, total = Encoder(config).eval().to(device), 32, 8192

    def work(tokens: int) -> Work:
        """Return the encoding of `total` tokens in batches of `tokens`."""
        ids = torch.randint(config.vocab, (tokens,))
        layout = Layout.of([length] * (tokens // length))
        batch = Batch(ids, torch.zeros_like(ids), layout).to(device)

        @torch.no_grad()
        def run() -> None:
            """Encode all tokens once."""
            for _ in range(total // tokens):
                encoder(batch)

        return run

    sizes = (256, 512, 1024, 2048, 4096, 8192)
    medians = _medians([work(size) for size in sizes], device, rounds)
    speeds = {size: max(medians) / median for size, median in zip(sizes, medians, strict=True)}
    return Measurement(
        f"predict_tokens_{device.type}",
        "tokens per batch, relative to the slowest",
        speeds,
        max(speeds, key=speeds.__getitem__),
    )


def snippet(measurements: list[Measurement]) -> str:
    """Format the measured thresholds as Python, for `core/runtime/tuning.py`."""
    fields = {m.field: m.value for m in measurements if None not in (m.used, m.value)}
    changed = replace(TUNING, **fields)  # checks the names
    lines = [f"    {name}={getattr(changed, name):_}," for name in fields]
    return "\n".join(["TUNING = Tuning(", *lines, ")"])


def main() -> None:
    """Print thresholds as they are measured, then as Python."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device, measurements = choose_device(arguments.device), []
    for measurement in measure_thresholds(device, arguments.rounds):
        measurements.append(measurement)
        speedups = (f"{size:,}: {ratio:.2f}×" for size, ratio in measurement.speedups.items())
        print(f"{measurement.field}: {measurement.ways}\n  {', '.join(speedups)}")
        print(f"  measured: {measurement.value}, in use: {measurement.used}")
    print(snippet(measurements))
    print(f"{describe_device(device)}, {describe_kernels()}")


if __name__ == "__main__":
    main()
