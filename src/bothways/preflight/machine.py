"""Checks of the machine before training: disk space, memory, and the speed of training.

Each check is a function that returns findings. Errors stop the run, all of them in one message;
warnings and notes are printed once. `bothways.tasks.checks` checks labels.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.finding import Finding
from bothways.core.learner import Learner
from bothways.core.progress import SILENT, Progress, track
from bothways.model.block import Block
from bothways.model.flops import BACKWARD
from bothways.model.lstm import AnyEncoder
from bothways.preflight.memory import Load
from bothways.runtime.devices import (
    Precision,
    disk_free,
    gemm_rate,
    memory_available,
    resolve_precision,
)
from bothways.training.parallel import Plan
from bothways.training.run import Training
from bothways.training.trackers import Peak


def check_machine(load: Load, folder: Path | None, device: torch.device) -> list[Finding]:
    """Check the disk space for checkpoints and model, and estimate the memory of a step.

    Args:
        folder: of the run; None for a run in memory.
    """
    disk = [] if folder is None else _check_disk(load, folder)
    return [*disk, *_check_memory(load, device)]


def speed(
    learner: Learner, batch: Batch, precision: Precision, progress: Progress = SILENT
) -> float:
    """Return the tokens per second in training, measured forward and backward on one batch.

    The weights do not change. Dropout draws from torch's generator: seed it afterwards.
    """
    device = next(learner.parameters()).device
    dtype, moved = resolve_precision(precision, device), batch.to(device)
    learner.train()
    rate = 0.0
    for _ in track(range(2), progress, "measuring the speed of training"):  # the first is slower
        start = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            losses = learner(moved)
        torch.autograd.backward(torch.stack([loss.total for loss in losses.values()]).sum())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rate = batch.layout.tokens / (time.perf_counter() - start)
    learner.zero_grad()
    return rate


def _check_disk(load: Load, folder: Path) -> list[Finding]:
    needed = load.saved * load.checkpoints + 4 * load.parameters
    free = disk_free(folder)
    # A resumed run replaces the files that it has written.
    written = [*folder.glob("step-*/*"), *folder.glob("model/*")]
    if needed <= free + sum(file.stat().st_size for file in written if file.is_file()):
        return []
    what = (
        f"{load.checkpoints} checkpoints and the model take {_size(needed)}, "
        f"but {_size(free)} are free"
    )
    return [
        Finding(
            "disk", "error", what, str(folder), "Make room, or choose a folder on another disk."
        )
    ]


def _check_memory(load: Load, device: torch.device) -> list[Finding]:
    free, fixed = memory_available(device), load.fixed
    if free is None:
        return []
    if fixed > free:
        what = (
            f"the model with its optimizer takes {_size(fixed)} of memory, "
            f"but {_size(free)} are free on {device}"
        )
        return [Finding("memory", "error", what, fix="Use a smaller model or another machine.")]
    if (peak := load.memory(device).total) > free:
        what = f"a step may take {_size(peak)} of memory, but {_size(free)} are free on {device}"
        fix = f"Halve it; it is {load.microbatch}." + (
            "" if load.training.recompute else " Or set training.recompute=true."
        )
        return [Finding("memory", "warning", what, "microbatch_tokens", fix)]
    return []


def _size(count: int | float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def compute_as(encoder: AnyEncoder, training: Training, device: torch.device) -> None:
    """Set `training.recompute` and `training.compiled` on an encoder.

    Raises:
        ConfigError: compiled is set on a CPU or for an encoder without Transformer blocks.
    """
    encoder.recompute = training.recompute
    blocks = [module for module in encoder.modules() if isinstance(module, Block)]
    if training.compiled and (device.type == "cpu" or not blocks):
        what = (
            "is for the blocks of a Transformer on a GPU, "
            f"not for this {type(encoder).__name__} on {device}"
        )
        raise ConfigError(
            what,
            where="training.compiled",
            fix="Leave it out: on a CPU compiled blocks are not faster.",
        )
    for block in blocks:
        block.compiled = training.compiled


def peak_of(forward: float, training: Training, device: torch.device, plan: Plan) -> Peak:
    """Return the peak that the speed of a run is compared with.

    It holds the operations of a step per token, and the matrix product rate of all ranks.

    Args:
        forward: operations per token of a forward pass (`model.flops.forward_flops`).
    """
    rate = gemm_rate(device, resolve_precision(training.precision, device))
    return Peak((1 + BACKWARD) * forward, rate * plan.world)
