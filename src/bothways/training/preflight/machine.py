"""Checks of the machine before training: disk space, memory, and the speed of training.

Each check is a function that returns findings. Errors stop the run, all of them in one message;
warnings and notes are printed once. `preflight.text` checks texts, and each task its labels.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bothways.core.atomic_files import make_folder
from bothways.core.batch import Batch
from bothways.core.errors import ConfigError, os_errors
from bothways.core.finding import Finding
from bothways.core.progress import SILENT, Progress, track
from bothways.core.runtime.devices import (
    device_of,
    disk_free,
    gemm_rate,
    memory_available,
    resolve_precision,
    wait,
)
from bothways.core.training_module import TrainingModule
from bothways.model.block import Block
from bothways.model.encoder import Encoder
from bothways.model.flops import BACKWARD
from bothways.training.optimizers import set_rate, update
from bothways.training.parallel import Plan, Sharding, Single, all_gather, shard
from bothways.training.preflight.memory import MemoryDemand, size_text
from bothways.training.run import Training
from bothways.training.trackers import Peak

PROBE = 2**24
"""Bytes that are written to measure the speed of checkpoints."""


def check_machine(
    demand: MemoryDemand, folder: Path | None, device: torch.device, ranks: int = 1
) -> list[Finding]:
    """Check the disk space for checkpoints and model, and estimate the memory of a step.

    Args:
        folder: of the run; None for a run in memory.
        ranks: the number of processes that may have one model between them.
    """
    findings = []
    if folder is not None:
        needed, free_disk = (
            demand.saved * demand.checkpoints + 4 * demand.parameters,
            disk_free(folder),
        )
        # A resumed run replaces the files that it has written.
        written = [*folder.glob("step-*/*"), *folder.glob("model/*")]
        if needed > free_disk + sum(file.stat().st_size for file in written if file.is_file()):
            message = (
                f"{demand.checkpoints} checkpoints and the model take {size_text(needed)}, "
                f"but {size_text(free_disk)} are free"
            )
            fix = "Make room, or choose a folder on another disk."
            findings.append(Finding("disk", "error", message, str(folder), fix))
    free, fixed, memory = memory_available(device), demand.fixed / ranks, demand.memory(device)
    if free is None:
        return findings
    if ranks > 1 and not demand.fits(free, device, "replicated", ranks):
        memory = demand.memory(device, "sharded", ranks)
    available = f"but {size_text(free)} are free on {device}"
    if fixed > free:
        message = f"the model with its optimizer takes {size_text(fixed)} of memory, {available}"
        fix = "Use a smaller model or another machine."
        findings.append(Finding("memory", "error", message, fix=fix))
    elif memory.total > free:
        message = f"a step may take {size_text(memory.total)} of memory, {available}"
        fix = f"Halve it; it is {demand.microbatch}." + (
            "" if demand.training.recompute else " Or set training.recompute=true."
        )
        findings.append(Finding("memory", "warning", message, "microbatch_tokens", fix))
    return findings


def choose_parallelism(
    plan: Plan,
    sharding: Literal["auto"] | Sharding | None,
    demand: MemoryDemand,
    device: torch.device,
    progress: Progress = SILENT,
) -> Plan:
    """Choose the parallelism: a copy of the model on each rank, or one shared by all.

    "auto" lets them share it if whole copies do not fit (`MemoryDemand.fits`) in the memory of the
    rank with the least. All ranks call this; they are connected.
    """
    if isinstance(plan, Single) or sharding is None:
        return plan
    if sharding != "auto":
        return shard(plan, sharding)
    free = memory_available(device)
    local = torch.tensor(float("inf") if free is None else float(free), dtype=torch.float64)
    least = float(all_gather(plan, local).min())
    if demand.fits(least, device, "replicated", plan.world):
        return plan
    needed = size_text(demand.memory(device, "replicated", plan.world).total)
    progress.message(
        f"note: the {plan.world} ranks share one model: a step with a whole model may take {needed}"
        f" of memory, and {size_text(least)} are free"
    )
    return shard(plan, Sharding())


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of the parts of a step.

    Attributes:
        per_token: seconds of forward and backward pass per token on one rank, for each batch that
            was measured, or each phase of a run.
        update: seconds of an update, clipping included.
        exchange: seconds that the exchange between ranks adds to an update.
        per_byte: seconds per byte of a checkpoint; 0 if unknown.
    """

    per_token: tuple[float, ...]
    update: float
    exchange: float = 0.0
    per_byte: float = 0.0


def measure_updates(
    training_module: TrainingModule,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    training: Training,
    progress: Progress = SILENT,
) -> StepSeconds:
    """Measure steps on each batch, at a rate of 0: the weights do not change.

    Dropout draws from torch's generator: seed it afterwards.
    """
    device = device_of(training_module)
    dtype, per_token, update_seconds = resolve_precision(training.precision, device), [], 0.0
    set_rate(optimizer, 0.0)
    training_module.train()
    steps = [(batch.to(device), last) for batch in batches for last in (False, True)]
    # The first step is slower: it allocates the moments.
    for batch, last in track(steps, progress, "measuring the speed of training"):
        start = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            losses = training_module(batch)
        torch.autograd.backward(torch.stack([loss.total for loss in losses.values()]).sum())
        wait(device)
        passed = time.perf_counter()
        update(optimizer, training.clip_norm)
        wait(device)
        update_seconds = time.perf_counter() - passed
        if last:
            per_token.append((passed - start) / batch.layout.tokens)
    return StepSeconds(tuple(per_token), update_seconds)


def seconds_per_byte(folder: Path) -> float:
    """Return the time to write a byte to a folder's disk and to hash it, as checkpoints are."""
    make_folder(folder)
    content = bytes(max(4096, min(PROBE, disk_free(folder) // 4)))
    fix = "Make room, or choose a folder on another disk."
    with os_errors(folder, fix), tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        hashlib.sha256(content)
        return (time.perf_counter() - start) / len(content)


def compute_as(encoder: Encoder, training: Training, device: torch.device) -> None:
    """Set `training.recompute` and `training.compiled` on an encoder.

    Raises:
        ConfigError: compiled is set on a CPU or for an encoder without Transformer blocks.
    """
    encoder.recompute = training.recompute
    blocks = [module for module in encoder.modules() if isinstance(module, Block)]
    if training.compiled and (device.type == "cpu" or not blocks):
        message = (
            "is for the blocks of a Transformer on a GPU, "
            f"not for this {type(encoder).__name__} on {device}"
        )
        raise ConfigError(
            message,
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
