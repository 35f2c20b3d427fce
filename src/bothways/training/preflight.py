"""Checks before a run: its memory and disk, and the speed of a step.

Each check returns findings. Errors stop the run, all of them in one message; warnings and notes are
printed once. `encoding_checks` checks texts, and each task its labels.

The memory of a step is counted on models without memory for their weights, so a forecast takes
milliseconds whatever the size of the model, and needs neither the device nor the ranks.

Source of what a sharded rank holds: PyTorch's documentation of `fully_shard` (FSDP2); Zhao et al.
2023, PyTorch FSDP, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from bothways.core.atomic_files import make_folder
from bothways.core.batch import Batch
from bothways.core.errors import ConfigError, ResourceError, os_errors
from bothways.core.finding import Finding
from bothways.core.progress import SILENT, Progress, track
from bothways.core.runtime import devices
from bothways.core.training_module import TrainingModule
from bothways.model.block import Block
from bothways.model.config import EncoderConfig
from bothways.model.encoder import Encoder
from bothways.model.flops import BACKWARD, LossFloats, kept_floats, passing_floats
from bothways.model.heads import Head
from bothways.model.init import without_weights
from bothways.model.model import Model
from bothways.training import optimizers
from bothways.training.meter import Peak
from bothways.training.parallel import Plan, Sharding, Single, all_gather, shard
from bothways.training.run import Training
from bothways.training.schedules import WSD

WEIGHT, GRADIENT = 4, 4
"""Bytes per parameter in training: the weight and its gradient, in fp32."""
AVERAGE_BYTES = 4
"""Bytes per parameter of the moving average of the weights, in training and in a checkpoint."""
USABLE = 0.9
"""The share of the free memory that a run is planned for; the rest is for gaps of the allocator."""
GATHERED = 2
"""Blocks whose weights a sharded rank holds whole at once: the current one and the next."""
MOST_RANKS = 4096
"""The largest number of ranks that is tried when no smaller one fits."""

Placement = Literal["single", "replicated", "sharded"]
"""Where the weights are: on the only rank, whole on each rank, or a part on each rank."""


@dataclass(frozen=True)
class MemoryPerRank:
    """The bytes of one rank at the peak of a step, by what they hold.

    Attributes:
        weights, gradients: in fp32.
        optimizer: its moments, and the moving average of the weights.
        activations: values that the backward pass keeps, and the losses': predictions over
            the vocabulary, and what a frozen model computes.
        frozen: the weights of models that are only read, such as a teacher, in fp32.
        gathered: weights and gradients that a sharded rank holds whole for a while.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    frozen: float = 0.0
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        state = self.weights + self.gradients + self.optimizer + self.frozen
        return state + self.activations + self.gathered


Models = tuple[tuple[EncoderConfig, tuple[Head, ...]], ...]
"""The encoder and the heads of each model."""


class WeightCounts(NamedTuple):
    """Parameters of models, of their hidden matrices, of all blocks, and of the largest block."""

    parameters: int
    hidden: int
    blocks: int
    largest: int

    @classmethod
    def of(cls, models: Models) -> WeightCounts:
        """Count the parameters of models; a shared block counts once."""
        parameters, hidden, blocks = 0, 0, list[int]()
        for spec in models:
            with without_weights():
                model = Model(*spec)
            parameters += sum(weight.numel() for weight in model.parameters())
            for module in model.modules():
                names = getattr(module, "hidden_matrices", {})
                weights = module.named_parameters() if names else ()
                hidden += sum(weight.numel() for name, weight in weights if name in names)
            for block in model.encoder.blocks.children():
                blocks.append(sum(weight.numel() for weight in block.parameters()))
        return cls(parameters, hidden, sum(blocks), max(blocks, default=0))


@dataclass(frozen=True)
class MemoryDemand:
    """The demands of a run on a machine.

    Attributes:
        models: that are trained.
        length: maximum length of a sequence in tokens.
        microbatch: maximum number of tokens that go through the model at once.
        training: the settings that decide what is kept in memory and on the disk.
        shared: the number of parameters that two of the models have in common.
        losses: the numbers that the losses hold.
        frozen: models that are only read, such as a teacher.
        trained: the number of parameters that are trained; None for all.
    """

    models: Models
    length: int
    microbatch: int
    training: Training
    shared: int = 0
    losses: LossFloats = LossFloats()
    frozen: Models = ()
    trained: int | None = None

    @functools.cached_property
    def counts(self) -> WeightCounts:
        """The weights of the models that are trained."""
        counts = WeightCounts.of(self.models)
        return counts._replace(parameters=counts.parameters - self.shared)

    @functools.cached_property
    def frozen_counts(self) -> WeightCounts:
        """The weights of the models that are only read."""
        return WeightCounts.of(self.frozen)

    @property
    def parameters(self) -> int:
        """The number of parameters of all models that are trained."""
        return self.counts.parameters

    @property
    def checkpoints(self) -> int:
        """The number of checkpoints on the disk at once: the newest, the best, the one that is
        being written, and that of a plateau.
        """
        return self.training.keep.last + 2 + isinstance(self.training.schedule, WSD)

    @property
    def fixed(self) -> int:
        """The bytes of the weights, their gradients, the moments and the average, and of what is
        only read.
        """
        return sum(self._fixed) + WEIGHT * self.frozen_counts.parameters

    @property
    def saved(self) -> int:
        """The bytes of a checkpoint."""
        weights, _, moments = self._fixed
        return weights + moments

    @functools.cached_property
    def _fixed(self) -> tuple[int, int, int]:
        """The bytes of the weights, of their gradients, and of the moments and the average."""
        trained = self.parameters if self.trained is None else self.trained
        moment_size = moment_bytes(self.training.optimizer)
        hidden = min(trained, self.counts.hidden)
        moments = moment_size.hidden * hidden + moment_size.others * (trained - hidden)
        average = 0 if self.training.ema is None else AVERAGE_BYTES * trained
        return WEIGHT * self.parameters, GRADIENT * trained, moments + average

    def memory(
        self, device: torch.device, placement: Placement = "single", ranks: int = 1
    ) -> MemoryPerRank:
        """Return the bytes of a rank at the peak of a step.

        Args:
            device: of the kind that the run will have; it need not exist here.
        """
        activations, counts, frozen = self._activations(device), self.counts, self.frozen_counts
        weights, gradients, moments = map(float, self._fixed)
        read = float(WEIGHT * frozen.parameters)
        if placement != "sharded":  # replicas exchange gradients in place
            return MemoryPerRank(weights, gradients, moments, activations, read)
        gathered = sum(  # of a frozen model no gradients
            size * (GATHERED * each.largest + each.parameters - each.blocks)
            for each, size in ((counts, WEIGHT + GRADIENT), (frozen, WEIGHT))
        )
        weights, gradients, moments = weights / ranks, gradients / ranks, moments / ranks
        return MemoryPerRank(
            weights, gradients, moments, activations, read / ranks, float(gathered)
        )

    def _activations(self, device: torch.device) -> float:
        """Return the bytes of what a step computes, at its peak.

        That is at the end of the forward pass, or within that of a frozen model before it.
        """
        training, losses = self.training, self.losses
        stored = sum(
            kept_floats(encoder, self.length, device, training.recompute, training.precision)
            for encoder, _ in self.models
        )
        passing = [
            passing_floats(encoder, self.length, device, training.precision)
            for encoder, _ in self.frozen
        ]
        per_token = losses.read + max(stored + losses.per_token, *passing, 0.0)
        return 4.0 * (per_token * self.microbatch + losses.fixed)

    def largest_microbatch(
        self, free: float, device: torch.device, placement: Placement = "single", ranks: int = 1
    ) -> int:
        """Return the most tokens that may go through the model at once; 0 if none fit."""
        empty = replace(self, microbatch=0).memory(device, placement, ranks)
        single = replace(self, microbatch=1).memory(device, placement, ranks)
        room = USABLE * free - empty.total
        return max(0, math.floor(room / (single.activations - empty.activations)))

    def fits(
        self, free: float, device: torch.device, placement: Placement = "single", ranks: int = 1
    ) -> bool:
        """Return True if a step takes no more than the usable share of the free memory."""
        return self.memory(device, placement, ranks).total <= USABLE * free


@dataclass(frozen=True)
class PlacementChoice:
    """A placement with the memory that it takes.

    Attributes:
        why: the reason, as one sentence.
    """

    placement: Placement
    memory: MemoryPerRank
    why: str


def choose_placement(
    demand: MemoryDemand, ranks: int, free: float, device: torch.device
) -> PlacementChoice:
    """Return the simplest placement that fits: single, replicated, then sharded.

    Replicas are preferred to shards: they exchange gradients once per update, shards also gather
    weights in each pass.

    Args:
        ranks: the number of processes that train.
        free: bytes of memory for each of them.

    Raises:
        ResourceError: none fits; the error names changes with which the run does.
    """
    unsharded: Placement = "single" if ranks == 1 else "replicated"
    memory = demand.memory(device, unsharded, ranks)
    share = f"a step takes {size_text(memory.total)} of {size_text(free)} on each rank"
    if demand.fits(free, device, unsharded, ranks):
        reason = "there is one rank" if ranks == 1 else "the whole state fits on each rank"
        return PlacementChoice(unsharded, memory, f"{reason}: {share}")
    if ranks > 1 and demand.fits(free, device, "sharded", ranks):
        memory = demand.memory(device, "sharded", ranks)
        reason = f"replicated {share}, sharded {size_text(memory.total)}"
        return PlacementChoice("sharded", memory, reason)
    message = f"{share}, of which {USABLE:.0%} are planned for"
    fixes = [*_remedies(demand, ranks, free, device)]
    fix = f"This would fit: {'; '.join(fixes)}." if fixes else "Choose a smaller model."
    raise ResourceError(message, where="memory", fix=fix)


def _remedies(demand: MemoryDemand, ranks: int, free: float, device: torch.device) -> Iterator[str]:
    """Yield changes with which a run fits, each by itself, the least first."""
    placement: Placement = "single" if ranks == 1 else "sharded"
    recomputed = replace(demand, training=replace(demand.training, recompute=True))
    if not demand.training.recompute and recomputed.fits(free, device, placement, ranks):
        yield "training.recompute=true"
    for candidate, setting in ((demand, ""), (recomputed, " with training.recompute=true")):
        tokens = candidate.largest_microbatch(free, device, placement, ranks)
        if demand.length <= tokens < demand.microbatch:
            yield f"microbatch_tokens={tokens // demand.length * demand.length}{setting}"
            break
    counts = [2**n for n in range(1, MOST_RANKS.bit_length()) if 2**n > ranks]
    if fitting := [n for n in counts if demand.fits(free, device, "sharded", n)]:
        yield f"{fitting[0]} ranks, sharded"
    needed = demand.memory(device, placement, ranks).total / USABLE
    yield f"{size_text(needed)} of memory on each rank"


def size_text(count: int | float) -> str:
    """Return a number of bytes as text, in GiB from 1 GiB on, else in MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


class MomentBytes(NamedTuple):
    """Bytes that an optimizer keeps per parameter, in fp32.

    Attributes:
        hidden: of the matrices that a training module declares (`TrainingModule.matrices`).
        others: of tables, heads, biases and LayerNorms.
    """

    hidden: int
    others: int


def moment_bytes(config: optimizers.OptimizerConfig | optimizers.OptimizerFactory) -> MomentBytes:
    """Measure the state of an optimizer by one update of a small matrix of each kind.

    Values that an optimizer has once for a row or a parameter, such as its step, are not counted.

    Raises:
        ConfigError: a function makes no suitable optimizer.
    """
    if isinstance(config, optimizers.OptimizerConfig):
        config = dataclasses.replace(config, lr=1.0)  # "auto" until the run begins
    parameters = {name: nn.Parameter(torch.ones(2, 3)) for name in MomentBytes._fields}
    optimizer = optimizers.build_optimizer(config, parameters.items(), matrices={"hidden": 1})
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizers.update(optimizer, None)

    def kept(parameter: nn.Parameter) -> int:
        """Return the bytes of the moments of a parameter, per number."""
        state = optimizer.state.get(parameter, {}).values()
        shaped = (x for x in state if isinstance(x, Tensor) and x.shape == parameter.shape)
        return sum(moment.nbytes for moment in shaped) // parameter.numel()

    return MomentBytes(*map(kept, parameters.values()))


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
        needed = demand.saved * demand.checkpoints + 4 * demand.parameters
        free_disk = devices.disk_free(folder)
        # A resumed run replaces the files that it has written.
        written = [*folder.glob("step-*/*"), *folder.glob("model/*")]
        if needed > free_disk + sum(file.stat().st_size for file in written if file.is_file()):
            message = (
                f"{demand.checkpoints} checkpoints and the model take {size_text(needed)}, "
                f"but {size_text(free_disk)} are free"
            )
            fix = "Make room, or choose a folder on another disk."
            findings.append(Finding("disk", "error", message, str(folder), fix))
    free, fixed, memory = (
        devices.memory_available(device),
        demand.fixed / ranks,
        demand.memory(device),
    )
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
    free = devices.memory_available(device)
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
    batches: Many[Batch],
    optimizer: torch.optim.Optimizer,
    training: Training,
    progress: Progress = SILENT,
) -> StepSeconds:
    """Measure steps on each batch, at a rate of 0: the weights do not change.

    Dropout draws from torch's generator: seed it afterwards.
    """
    device = devices.device_of(training_module)
    dtype, per_token, update_seconds = (
        devices.resolve_precision(training.precision, device),
        [],
        0.0,
    )
    optimizers.set_rate(optimizer, 0.0)
    training_module.train()
    steps = [(batch.to(device), last) for batch in batches for last in (False, True)]
    # The first step is slower: it allocates the moments.
    for batch, last in track(steps, progress, "measuring the speed of training"):
        start = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            losses = training_module(batch)
        torch.autograd.backward(torch.stack([loss.total for loss in losses.values()]).sum())
        devices.wait(device)
        passed = time.perf_counter()
        optimizers.update(optimizer, training.clip_norm)
        devices.wait(device)
        update_seconds = time.perf_counter() - passed
        if last:
            per_token.append((passed - start) / batch.layout.tokens)
    return StepSeconds(tuple(per_token), update_seconds)


def seconds_per_byte(folder: Path) -> float:
    """Return the time to write a byte to a folder's disk and to hash it, as checkpoints are."""
    make_folder(folder)
    content = bytes(max(4096, min(PROBE, devices.disk_free(folder) // 4)))
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
    rate = devices.gemm_rate(device, devices.resolve_precision(training.precision, device))
    return Peak((1 + BACKWARD) * forward, rate * plan.world)
