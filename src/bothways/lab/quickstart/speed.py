"""The speed of this machine, and the model and length of pre-training that suit it.

Below a number of tokens that depends on the shape, a model predicts by token frequency alone and
pre-training gains nothing. So a quickstart picks the largest shape whose tokens can be read in the
time limit, by the speed of real updates. The number of threads is measured, too: threads wait for
each other at every matrix product, and where other programs use the cores, one thread can read more
than ten times as much as two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bothways.core.runtime.devices import choose_device, has_bf16, wait
from bothways.lab.bench.workloads import Workload, make_batch, ours
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.positions import Learned

MEASURED_SECONDS = 1.5
"""Duration of each measurement."""


@dataclass(frozen=True)
class Shape:
    """A model with the length of pre-training that it needs.

    Attributes:
        depth, width: layers and width.
        rate: peak learning rate of pre-training.
        tokens: tokens after which the model has left the plateau of token frequencies and gains
            on the labelled task (docs/decisions/086).
        seeds: fine-tuning runs from each start.
    """

    depth: int
    width: int
    rate: float
    tokens: int
    seeds: int

    def encoder(self, vocabulary: int) -> EncoderConfig:
        """Build the encoder's configuration."""
        return EncoderConfig(
            vocabulary, self.width, self.depth, max(2, self.width // 64), 4 * self.width,
            position=Learned(128), dropout=Dropouts(0.0, 0.0), initial_range=0.05,
        )  # fmt: skip


SHAPES = (
    Shape(4, 256, 1e-3, 1_300_000, 3),
    Shape(4, 128, 2e-3, 1_200_000, 3),
    Shape(2, 128, 2e-3, 800_000, 2),
)
"""Candidates, the largest first."""


@dataclass(frozen=True)
class MeasuredShape:
    """A shape with its measured speed.

    Attributes:
        tokens_per_second: speed of pre-training updates.
        threads: threads of torch with which it was measured.
    """

    shape: Shape
    tokens_per_second: float
    threads: int

    def seconds(self, fine_tuning_tokens: int) -> float:
        """Estimate the duration of pre-training and fine-tuning."""
        return (self.shape.tokens + fine_tuning_tokens * self.shape.seeds) / self.tokens_per_second


def measure_speed(shape: Shape, vocabulary: int, batch_tokens: int) -> float:
    """Measure the tokens per second of pre-training updates."""
    device, length = choose_device(), 64
    load = Workload("", shape.encoder(vocabulary), max(1, batch_tokens // length), length)
    update = ours(load, make_batch(load), "bf16" if has_bf16(device) else "fp32", device)
    update()
    wait(device)
    start, updates = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < MEASURED_SECONDS:
        update()
        wait(device)
        updates += 1
    return updates * load.tokens / seconds


def choose_pace(
    vocabulary: int,
    batch_tokens: int,
    seconds: float,
    fine_tuning_tokens: int,
    shapes: Sequence[Shape] = SHAPES,
) -> MeasuredShape:
    """Measure, set the faster number of threads, and choose the largest shape that fits.

    Args:
        seconds: time for pre-training and fine-tuning; if no shape fits, the last is chosen, with
            one seed.
        fine_tuning_tokens: tokens of fine-tuning from both starts, for each seed, in pre-training
            tokens that take as long.
    """
    threads, smallest = torch.get_num_threads(), shapes[-1]
    if threads > 1 and choose_device().type == "cpu":
        threaded_speed = measure_speed(smallest, vocabulary, batch_tokens)
        torch.set_num_threads(1)
        if measure_speed(smallest, vocabulary, batch_tokens) < threaded_speed:
            torch.set_num_threads(threads)
    for shape in shapes:
        speed = measure_speed(shape, vocabulary, batch_tokens)
        pace = MeasuredShape(shape, speed, torch.get_num_threads())
        if pace.seconds(fine_tuning_tokens) <= seconds:
            return pace
    return replace(pace, shape=replace(shape, seeds=1))
