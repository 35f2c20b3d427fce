"""The cost of a training step: operations, memory and seconds; and the placement that fits.

Operations are counted as in Kaplan et al. 2020, section 2.1, with heads and attention over the
sequence added. The memory is counted on models without memory for their weights, so a forecast
takes milliseconds whatever the size of the model, and needs neither the device nor the ranks.

Source of what a sharded rank holds: PyTorch's documentation of `fully_shard` (FSDP2); Zhao et al.
2023, PyTorch FSDP, section 3.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Iterable, Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.batch import Batch
from bothways.core.errors import Finding, ResourceError, os_errors, setting
from bothways.core.files import make_folder
from bothways.core.progress import SILENT, Progress, track
from bothways.core.runtime import devices
from bothways.core.runtime.tuning import TUNING
from bothways.core.training_module import TrainingModule, hidden_matrices
from bothways.model.attention import dispatch, patterns
from bothways.model.attention.mask import sees_all
from bothways.model.config import EncoderConfig, Gated
from bothways.model.heads import (
    Head,
    MaskedHead,
    MaskedOutput,
    NextTokenOutput,
    OwnOutput,
    PoolerHead,
    with_pooler,
)
from bothways.model.init import without_weights
from bothways.model.model import Model
from bothways.model.positions import Disentangled
from bothways.training import optimizers
from bothways.training.loop import arithmetic_of
from bothways.training.parallel import Plan, Sharding, all_gather
from bothways.training.run import Training
from bothways.training.schedules import WSD

BACKWARD = 2
"""The backward pass has two products for each one of the forward pass: the gradients of the input
and of the weights."""
FLOAT = 4
"""Bytes of a weight, a gradient, an average and an activation, in fp32."""
HALF = 0.5
"""The bytes of a value in bf16, over those in fp32."""
USABLE = 0.9
"""The share of the free memory that a run is planned for; the rest is for gaps of the allocator."""
GATHERED = 2
"""Blocks whose weights a sharded rank holds whole at once: the current one and the next."""
MAX_RANKS = 4096
"""The largest number of ranks that is tried when no smaller one fits."""
PROBE = 2**24
"""Bytes that are written to measure the speed of checkpoints."""


def seen(pattern: patterns.Pattern, length: int) -> float:
    """Return the mean number of tokens of a sequence that a token attends to.

    A block that is read twice counts twice, as it is computed.
    """
    match pattern:
        case patterns.Window(radius):
            # 2 · near + 1, less what is cut off at both ends: 2 · (1 + 2 + … + near) / length.
            near = min(radius, length - 1)
            return 2 * near + 1 - near * (near + 1) / length
        case patterns.Causal():
            return (length + 1) / 2
        case patterns.Blocks(size, random) if length > pattern.dense:
            count = -(-length // size)
            outer, inner = size + length - (count - 1) * size, (count - 2) * size
            # Of the inner blocks the first and the last have a global neighbour, counted already.
            near = 3 * inner - 2 * size
            return (outer * length + inner * (outer + random * size) + size * near) / length
        case patterns.Full() | patterns.Blocks():
            return float(length)
        case _:
            assert_never(pattern)


def forward_flops(
    config: EncoderConfig, heads: Iterable[Head], length: int, predicted: float = 0.15
) -> float:
    """Return floating-point operations per token of a forward pass.

    A multiply-add in a matrix product counts as 2; nothing else counts. Attention costs 4·L·H·n
    per token for scores and sums, with n the tokens that it sees: the reference kernel computes
    more and masks it. For global tokens of a batch, and for what is made from relative positions
    once per batch, only projections count. The part of the last block after attention is counted
    for the tokens that a head reads; without heads, for all.

    Args:
        predicted: the share of tokens that the masked LM head predicts.
    """
    specification, h = {*with_pooler(config, heads)}, config.width
    relative = config.position if isinstance(config.position, Disentangled) else None
    # Queries are of the full width; keys and values of that of their heads.
    groups = (config.key_value_heads or config.heads) / config.heads
    projections = 2 * (1 + 2 * groups + 3 * config.has_global_attention) * h * h
    matrices = 3 if isinstance(config.mlp, Gated) else 2
    tail = 2.0 * (h * h + matrices * h * config.intermediate_size)
    # Relative positions: products with 2n − 1 distances, for each term.
    distances = len(relative.terms) * 2.0 * h * (2 * length - 1) if relative else 0.0
    blocks = [
        projections + 4 * h * seen(config.pattern(layer), length) + distances + tail
        for layer in range(config.depth)
    ]
    convolution = relative.convolution if relative else None
    encoder = sum(blocks) * (config.steps // config.depth)
    encoder += 2 * config.embedding * h if config.embedding is not None else 0
    encoder += 2.0 * convolution.size * h**2 / convolution.groups if convolution else 0.0
    masked = predicted if MaskedHead() in specification else 0.0
    if MaskedHead() in specification and relative and relative.absolute == "decoder":
        # An enhanced mask decoder is the last block twice more, with queries of its own; the second
        # time at predicted tokens.
        encoder += 2 * (blocks[-1] + 2 * h**2) - (1 - predicted) * tail
    remaining = specification - {MaskedHead()}
    head_shares = [1 / length if head.reads_one_token(config) else 1.0 for head in remaining]
    token_share = min(1.0, masked + max(head_shares, default=0.0))
    if specification <= {PoolerHead()} or (config.depth == 1 and convolution):
        token_share = 1.0  # all vectors are the result
    of_heads = sum(_head_flops(config, head, length, predicted) for head in specification)
    return encoder - (1 - token_share) * tail + of_heads


def _head_flops(config: EncoderConfig, head: Head, length: int, predicted: float) -> float:
    """Return the operations of a head per token, counted from the matrices of its module."""
    with without_weights():
        module = head.build(config)
    rows = predicted if isinstance(head, MaskedHead) else 1 / length if head.of_sequences else 1.0
    late = isinstance(module, OwnOutput) and module.reads == "late"
    operations = 0.0
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):  # a mean is taken after the inner layer if "late"
            operations += 2.0 * layer.weight.numel() * (1.0 if late and name == "inner" else rows)
    predicting = isinstance(module, MaskedOutput | NextTokenOutput)
    if predicting and module.output is None:
        operations += 2.0 * rows * config.embedding_width * config.vocab  # the token embedding
    return operations


def kept_floats(
    config: EncoderConfig,
    length: int,
    device: torch.device,
    recompute: bool = False,
    precision: devices.Precision = "auto",
    learning: bool = True,
) -> float:
    """Estimate the numbers, in fp32, that a pass keeps of each token, in sequences of this length.

    For the backward pass: with `recompute` the input of each block, and all that one block keeps.
    Without `learning` those that exist at once at the widest place of a block: between the matrices
    of the feed-forward layer, or in attention.

    The compiled attention kernel keeps no probabilities; nor do a GPU's kernels without scores of
    relative positions. The device may be of another machine.
    """
    h, inner, relative = config.width, config.intermediate_size, config.has_relative_scores
    cpu, size = device.type == "cpu", _size(precision, device)
    between = (4 if isinstance(config.mlp, Gated) else 2) * inner
    masks = sum(config.dropout_at(place) > 0 for place in ("attention", "mlp")) / FLOAT  # of bytes
    blocks = list[float]()
    for pattern in map(config.pattern, range(config.depth)):
        if cpu:
            rate = config.dropout.attention if learning else 0.0
            dtype, features = devices.resolve_precision(precision, device), h // config.heads
            shape = device, dtype, features, length, pattern, rate, learning
            packed = dispatch.choose(dispatch.AttentionCall(*shape)) == "compiled"
        else:  # by FlashAttention
            packed = size < 1 and not isinstance(pattern, patterns.Blocks)
        packed = packed and not relative
        scores = config.heads * seen(pattern, length)
        # Inputs of norms, products and dropouts. Attention in rectangles also keeps queries, keys
        # and values once more, and probabilities, but for a GPU's kernels for all of a rectangle.
        whole = isinstance(pattern, patterns.Causal) or sees_all(pattern, length)
        dense = whole and not (cpu or relative)
        rectangles = 0.0 if packed else 4.0 * h + (0.0 if dense else 2 * scores)
        if not learning:
            # Relative positions have scores of their own, before and after they are gathered.
            score_floats = (5 if relative else 2) * scores
            attention = (
                score_floats if relative or not (packed or sees_all(pattern, length)) else 0.0
            )
            blocks.append(6.0 * h + max(between, h + attention))
        elif cpu:
            blocks.append(12.0 * h + 2 * inner + rectangles)
        else:  # the two inputs of norms are in fp32
            blocks.append((6.0 * h + between + rectangles) * size + (2 + masks) * h)
    if not learning:
        return max(blocks)
    if recompute:
        return (config.steps - 1) * h + max(blocks)
    return sum(blocks) * (config.steps // config.depth)


def _size(precision: devices.Precision, device: torch.device) -> float:
    """Return the bytes of a value that a step keeps, over those in fp32."""
    if device.type == "cpu" or precision == "fp32":
        return 1.0
    known = torch.cuda.is_available()  # else the card is of another machine
    return HALF if not known or devices.has_bf16(device) else 1.0


class LossFloats(NamedTuple):
    """The numbers that the losses of a step hold, in addition to the activations of the model.

    Attributes:
        per_token: such as predictions over the vocabulary with their gradient.
        read: of each token, what the pass of a frozen model leaves for the losses.
        fixed: whatever the number of tokens.
    """

    per_token: float = 0.0
    read: float = 0.0
    fixed: float = 0.0


class MemoryPerRank(NamedTuple):
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
    frozen: float
    gathered: float

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self)


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
            sizes = {name: weight.numel() for name, weight in model.named_parameters()}
            parameters += sum(sizes.values())
            hidden += sum(sizes.get(name, 0) for name in hidden_matrices(model))
            for block in model.encoder.blocks.children():
                blocks.append(sum(weight.numel() for weight in block.parameters()))
        return cls(parameters, hidden, sum(blocks), max(blocks, default=0))


@dataclass(frozen=True)
class MemoryDemand:
    """The demands of a run on a machine.

    Attributes:
        models: that are trained.
        length: maximum length of a sequence in tokens.
        microbatch: maximum number of tokens that go through the model at once, unless one sequence
            is longer.
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

    @functools.cached_property
    def _state(self) -> tuple[int, int, int]:
        """The bytes of the weights, of their gradients, and of the moments and the average."""
        trained = self.parameters if self.trained is None else self.trained
        # Muon keeps one moment of a hidden matrix, AdamW two.
        of_hidden, of_others = moment_bytes(self.training.optimizer)
        hidden = min(trained, self.counts.hidden)
        moments = of_hidden * hidden + of_others * (trained - hidden)
        average = 0 if self.training.ema is None else FLOAT * trained
        return FLOAT * self.parameters, FLOAT * trained, moments + average

    @property
    def saved(self) -> int:
        """The bytes of a checkpoint."""
        return self._state[0] + self._state[2]

    def memory(self, device: torch.device, shards: int = 1) -> MemoryPerRank:
        """Return the bytes of a rank at the peak of a step, that of a microbatch after the first.

        Args:
            device: of the kind that the run will have; it need not exist here.
            shards: the ranks that have one model between them; replicas exchange gradients in
                place.
        """
        training, losses = self.training, self.losses
        stored = sum(
            kept_floats(encoder, self.length, device, training.recompute, training.precision)
            for encoder, _ in self.models
        )
        passing = [
            kept_floats(encoder, self.length, device, False, training.precision, learning=False)
            for encoder, _ in self.frozen
        ]
        # The peak is at the end of the forward pass, or within that of a frozen model before it.
        tokens, of_losses = max(self.microbatch, self.length), losses.per_token
        value_size = _size(training.precision, device)
        passes = stored + value_size * of_losses, *passing
        per_token = losses.read + max(passes)
        weights, gradients, moments = (size / shards for size in self._state)
        activations = FLOAT * (per_token * tokens + losses.fixed)
        if device.type != "cpu":
            # In cross-entropy some rows of the predictions in fp32.
            activations += FLOAT * min(TUNING.loss_chunk_elements_cuda, tokens * of_losses / 2)
            if value_size < 1:  # autocast keeps the weights in bf16, too
                activations += value_size * gradients
        frozen_bytes, gathered = FLOAT * self.frozen_counts.parameters / shards, 0.0
        if shards > 1:
            # GATHERED blocks, and all that is outside of blocks; of a frozen model no gradients.
            for weight_counts, size in ((self.counts, 2 * FLOAT), (self.frozen_counts, FLOAT)):
                outside = weight_counts.parameters - weight_counts.blocks
                gathered += size * (GATHERED * weight_counts.largest + outside)
        return MemoryPerRank(weights, gradients, moments, activations, frozen_bytes, gathered)

    def largest_microbatch(self, free: float, device: torch.device, shards: int = 1) -> int:
        """Return the most tokens that may go through the model at once; 0 if no sequence fits."""

        def further(tokens: int) -> int:
            """Return the number of further tokens that fit, by what the next one takes."""
            sizes = (tokens, tokens + 1)
            one, more = (replace(self, microbatch=n).memory(device, shards) for n in sizes)
            room = USABLE * free - one.total
            return math.floor(room / (more.activations - one.activations))

        # Memory is linear in the tokens, and less steep once a chunk of the predictions is full.
        first = self.length + further(self.length)
        return 0 if first < self.length else first + max(0, further(first))

    def fits(self, free: float, device: torch.device, shards: int = 1) -> bool:
        """Return True if a step takes no more than the usable share of the free memory."""
        return self.memory(device, shards).total <= USABLE * free


def moment_bytes(
    config: optimizers.OptimizerConfig | optimizers.OptimizerFactory,
) -> tuple[int, int]:
    """Measure the bytes per parameter that an optimizer keeps, by one update of a small matrix.

    Values that an optimizer has once for a row or a parameter, such as its step, are not counted.

    Returns:
        Those of the matrices that a training module declares (`hidden_matrices`), and those
        of tables, heads, biases and LayerNorms.

    Raises:
        ConfigError: a function makes no suitable optimizer.
    """
    if isinstance(config, optimizers.OptimizerConfig):
        config = replace(config, lr=1.0)  # "auto" until the run begins
    weights = {name: nn.Parameter(torch.ones(2, 3)) for name in ("hidden", "other")}
    optimizer = optimizers.build_optimizer(config, weights.items(), matrices={"hidden": 1})
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizers.update(optimizer, None)
    sizes = [
        sum(
            value.nbytes // weight.numel()
            for value in optimizer.state.get(weight, {}).values()
            if isinstance(value, Tensor) and value.shape == weight.shape
        )
        for weight in weights.values()
    ]
    return sizes[0], sizes[1]


def size_text(count: int | float) -> str:
    """Return a number of bytes as text, in GiB from 1 GiB on, else in MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


class PlacementChoice(NamedTuple):
    """The placement of a model on its ranks, with its memory and the reason.

    Attributes:
        placement: the weights are on the only rank, whole on each rank, or a part on each rank.
    """

    placement: Literal["single", "replicated", "sharded"]
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
    memory, sharded = demand.memory(device), demand.memory(device, ranks)
    share = f"a step takes {size_text(memory.total)} of {size_text(free)} on each rank"
    if demand.fits(free, device):
        if ranks == 1:
            return PlacementChoice("single", memory, f"there is one rank: {share}")
        reason = f"the whole state fits on each rank: {share}"
        return PlacementChoice("replicated", memory, reason)
    if demand.fits(free, device, ranks):
        reason = f"replicated {share}, sharded {size_text(sharded.total)}"
        return PlacementChoice("sharded", sharded, reason)
    # Changes with which the run fits, each by itself, the least first.
    fixes = list[str]()
    recomputed = replace(demand, training=replace(demand.training, recompute=True))
    if not demand.training.recompute and recomputed.fits(free, device, ranks):
        fixes.append(setting("training.recompute", True))
    suffix = f" with {setting('training.recompute', True)}"
    for candidate, addition in ((demand, ""), (recomputed, suffix)):
        tokens = candidate.largest_microbatch(free, device, ranks)
        if demand.length <= tokens < demand.microbatch:
            fixes.append(f"microbatch_tokens={tokens // demand.length * demand.length}{addition}")
            break
    counts = [2**n for n in range(1, MAX_RANKS.bit_length()) if 2**n > ranks]
    if fitting := next((n for n in counts if demand.fits(free, device, n)), None):
        fixes.append(f"{fitting} ranks, sharded")
    fixes.append(f"{size_text(sharded.total / USABLE)} of memory on each rank")
    message = f"{share}, of which {USABLE:.0%} are planned for"
    raise ResourceError(message, where="memory", fix=f"This would fit: {'; '.join(fixes)}.")


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
    if plan.world == 1 or sharding is None:
        if isinstance(sharding, Sharding):
            progress.message("note: sharding does nothing in a run of one process")
        return plan
    if sharding != "auto":
        return replace(plan, sharding=sharding)
    free = devices.memory_available(device)
    # All ranks must choose alike: by the one with the least memory.
    local = torch.tensor(float("inf") if free is None else float(free), dtype=torch.float64)
    least = float(all_gather(plan, local).min())
    if demand.fits(least, device):
        return plan
    needed = size_text(demand.memory(device).total)
    progress.message(
        f"note: the {plan.world} ranks share one model: a step with a whole model may take {needed}"
        f" of memory, and {size_text(least)} are free"
    )
    return replace(plan, sharding=Sharding())


def check_machine(
    demand: MemoryDemand, folder: Path | None, device: torch.device, ranks: int = 1
) -> list[Finding]:
    """Check the disk space for checkpoints and model, and estimate the memory of a step.

    Args:
        folder: of the run; None for a run in memory.
        ranks: the number of processes that may have one model between them.
    """
    findings = []
    if demand.microbatch < demand.length:
        message = f"is {demand.microbatch:,}, and sequences of {demand.length:,} tokens stay whole"
        findings.append(Finding("memory", "note", message, "microbatch_tokens"))
    if folder is not None:
        # The newest, the best, the one that is being written, and that of a plateau.
        count = demand.training.keep.last + 2 + isinstance(demand.training.schedule, WSD)
        needed = demand.saved * count + FLOAT * demand.parameters
        free_disk = devices.disk_free(folder)
        # A resumed run replaces the files that it has written.
        written = [*folder.glob("step-*/*"), *folder.glob("model/*")]
        if needed > free_disk + sum(file.stat().st_size for file in written if file.is_file()):
            message = f"{count} checkpoints and the model take {size_text(needed)}, "
            message += f"but {size_text(free_disk)} are free"
            fix = "Make room, or choose a folder on another disk."
            findings.append(Finding("disk", "error", message, str(folder), fix))
    free = devices.memory_available(device)
    if free is None:
        return findings
    shards = 1 if demand.fits(free, device) else ranks
    memory = demand.memory(device, shards)
    available = f"but {size_text(free)} are free on {device}"
    # What is held all the time does not fit with any microbatch: an error, not a warning.
    between_steps = memory.total - memory.activations - memory.gathered
    if between_steps > free:
        message = f"the model with its optimizer takes {size_text(between_steps)} of memory, "
        fix = "Use a smaller model or another machine."
        findings.append(Finding("memory", "error", message + available, fix=fix))
    elif memory.total > free:
        message = f"a step may take {size_text(memory.total)} of memory, {available}"
        fix = "Use shorter sequences or a smaller model."
        sequences = demand.largest_microbatch(free, device, shards) // demand.length
        if sequences:
            fix = f"Set {setting('microbatch_tokens', sequences * demand.length)}."
        if not demand.training.recompute:
            fix += f" Or set {setting('training.recompute', True)}."
        findings.append(Finding("memory", "warning", message, "microbatch_tokens", fix))
    return findings


class StepSeconds(NamedTuple):
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
    training: Training,
    progress: Progress = SILENT,
) -> StepSeconds:
    """Measure steps on each batch, at a rate of 0: the weights do not change.

    Dropout draws from torch's generator: seed it afterwards.
    """
    device, per_token, update = devices.device_of(training_module), list[float](), 0.0
    weights, matrices = training_module.trained_parameters(), hidden_matrices(training_module)
    optimizer = optimizers.build_optimizer(training.optimizer, weights, matrices=matrices)
    optimizers.set_rate(optimizer, 0.0)
    training_module.train()
    steps = [(batch.to(device), is_last) for batch in batches for is_last in (False, True)]
    # The first step is slower: it allocates the moments.
    for batch, is_last in track(steps, progress, "measuring the speed of training"):
        start = time.perf_counter()
        with arithmetic_of(training.precision, device):
            losses = training_module(batch)
        torch.autograd.backward(torch.stack([loss.total for loss in losses.values()]).sum())
        devices.wait(device)
        passed = time.perf_counter()
        optimizers.update(optimizer, training.clip_norm)
        devices.wait(device)
        update = time.perf_counter() - passed
        if is_last:
            per_token.append((passed - start) / batch.layout.tokens)
    return StepSeconds(tuple(per_token), update)


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


def peak_of(forward: float, training: Training, device: torch.device, plan: Plan) -> float:
    """Return the highest possible speed of a run, in tokens a second.

    It is the rate of matrix products of all ranks over the operations of a step per token, three
    times those of a `forward` pass.
    """
    rate = devices.gemm_rate(device, devices.resolve_precision(training.precision, device))
    return rate * plan.world / ((1 + BACKWARD) * forward)
