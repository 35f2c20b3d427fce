"""The memory of a training step on one rank, and the choice of a placement on several ranks.

Everything is counted on models without memory for their weights, so a forecast takes milliseconds
whatever the size of the model, and needs neither the device nor the ranks.

Source of what a sharded rank holds: PyTorch's documentation of `fully_shard` (FSDP2); Zhao et al.
2023, PyTorch FSDP, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.errors import ResourceError
from bothways.model.config import EncoderConfig
from bothways.model.flops import LossFloats, kept_floats, passing_floats
from bothways.model.heads import Head
from bothways.model.init import without_weights
from bothways.model.model import Model
from bothways.training import optimizers
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
        activations = self._activations(device)
        weights, gradients, moments = map(float, self._fixed)
        frozen = float(WEIGHT * self.frozen_counts.parameters)
        unsharded = MemoryPerRank(weights, gradients, moments, activations, frozen)
        match placement:
            case "single" | "replicated":  # replicas exchange gradients in place
                return unsharded
            case "sharded":
                gathered = 0  # of a frozen model no gradients
                for counts, size in (
                    (self.counts, WEIGHT + GRADIENT),
                    (self.frozen_counts, WEIGHT),
                ):
                    outside = counts.parameters - counts.blocks
                    gathered += size * (GATHERED * counts.largest + outside)
                return MemoryPerRank(
                    unsharded.weights / ranks,
                    unsharded.gradients / ranks,
                    unsharded.optimizer / ranks,
                    activations,
                    unsharded.frozen / ranks,
                    float(gathered),
                )
            case _:
                assert_never(placement)

    def _activations(self, device: torch.device) -> float:
        """Return the bytes of what a step computes, at its peak.

        That is at the end of the forward pass, or within that of a frozen model before it.
        """
        training, losses = self.training, self.losses
        stored = sum(
            kept_floats(encoder, self.length, device, training.recompute, training.precision)
            for encoder, _ in self.models
        )
        passing = max(
            (
                passing_floats(encoder, self.length, device, training.precision)
                for encoder, _ in self.frozen
            ),
            default=0.0,
        )
        per_token = losses.read + max(stored + losses.per_token, passing)
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
    count = max(2, 2 * ranks)
    while count <= MOST_RANKS and not demand.fits(free, device, "sharded", count):
        count *= 2
    if count <= MOST_RANKS:
        yield f"{count} ranks, sharded"
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
    match config:
        case (
            optimizers.AdamW()
            | optimizers.BertAdam()
            | optimizers.Lamb()
            | optimizers.StableAdamW()
            | optimizers.Muon()
        ):
            config = dataclasses.replace(config, lr=1.0)  # "auto" until the run begins
        case _:
            pass
    parameters = {name: nn.Parameter(torch.ones(2, 3)) for name in MomentBytes._fields}
    optimizer = optimizers.build_optimizer(config, parameters.items(), matrices={"hidden": 1})
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizers.update(optimizer, None)
    return MomentBytes(*(_kept(optimizer, parameter) for parameter in parameters.values()))


def _kept(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    state = optimizer.state.get(parameter, {}).values()
    moments = [
        value for value in state if isinstance(value, Tensor) and value.shape == parameter.shape
    ]
    return sum(value.nbytes for value in moments) // parameter.numel()
