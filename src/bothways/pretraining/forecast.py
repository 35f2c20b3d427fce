"""The cost of a pre-training run before it begins: time, memory, checkpoints and price.

The operations and the memory of a run are counted. Its speed is measured on this machine by the
run's own step on random tokens, or computed for a card from its data sheet and an assumed share of
the rate of matrix products.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from typing_extensions import assert_never

from bothways.core.batch import Batch, LabelTargets, pack
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError
from bothways.core.keyed_rng import rng
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime import devices
from bothways.core.runtime.cards import MACHINE, NETWORK, Accelerator
from bothways.core.sequence import Sequence
from bothways.data.batching import ExampleBudget, TokenBudget, TokenRamp
from bothways.data.masking import Vocabulary
from bothways.model.flops import BACKWARD, forward_flops
from bothways.model.model import Model
from bothways.objectives.objective import Objective
from bothways.objectives.step_cost import objective_flops
from bothways.pretraining.build import memory_demand, tokens_of_phases
from bothways.pretraining.config import PretrainConfig
from bothways.training.durations import Epochs, Hours, StepRates
from bothways.training.optimizers import build_optimizer
from bothways.training.preflight import (
    MemoryDemand,
    PlacementChoice,
    StepSeconds,
    choose_placement,
    compute_as,
    measure_updates,
    seconds_per_byte,
)

UTILISATION = 0.35
"""The share of a card's rate of bf16 products that a run is assumed to reach."""
SAMPLE = 2048
"""Tokens of the batch on which the speed is measured here."""
UPDATE_BYTES = 28
"""Bytes that an update of Adam reads and writes per parameter: weight, gradient and two moments are
read, all but the gradient written."""


SHORTEST_UPDATE = 7.5e-4
"""Seconds to launch the 150 kernels of an update on a card, whatever the size of the model."""


@dataclass(frozen=True)
class Here:
    """This machine, whose speed is measured."""

    device: str = "auto"
    kind: Literal["here"] = "here"
    count: ClassVar[int] = 1
    assumed: ClassVar[tuple[str, ...]] = ()

    @property
    def torch_device(self) -> torch.device:
        """The device of the run."""
        return devices.choose_device(self.device)

    @property
    def memory(self) -> float:
        """The free memory in bytes; infinite if it is unknown."""
        free = devices.memory_available(self.torch_device)
        return math.inf if free is None else float(free)

    @property
    def title(self) -> str:
        """The name of the device."""
        return devices.describe_device(self.torch_device)


@dataclass(frozen=True)
class Cards:
    """Cards of one kind.

    Attributes:
        count: one for each rank.
        utilisation: the share of `Accelerator.bf16` that a step reaches.
    """

    card: Accelerator
    count: int = 1
    utilisation: float = UTILISATION
    kind: Literal["cards"] = "cards"
    torch_device: ClassVar[torch.device] = torch.device("cuda")

    def __post_init__(self) -> None:
        require_at_least(1, ranks=self.count)
        if not 0 < self.utilisation <= 1:
            message = f"must be above 0 and at most 1, not {self.utilisation:g}"
            raise ConfigError(message, where="utilisation")

    @property
    def memory(self) -> float:
        """The memory of each card in bytes."""
        return self.card.memory

    @property
    def title(self) -> str:
        """The number of cards and their name."""
        return f"{self.count} × {self.card.title}" if self.count > 1 else self.card.title

    @property
    def rate(self) -> float:
        """Operations per second that a step of a rank reaches."""
        return self.utilisation * self.card.bf16

    @property
    def assumed(self) -> tuple[str, ...]:
        """Sentences about figures that were not measured."""
        rate = f"{self.card.bf16 / 1e12:,.0f} TFLOP/s"
        between = f"; {NETWORK / 1e9:,.0f} GB/s between machines" if self.count > MACHINE else ""
        return (
            f"{self.utilisation:.0%} of {rate} (--utilisation), figures of the data sheet{between}",
            "not measured: the time of checkpoints, and of reading the data",
        )


Hardware = Here | Cards


MIN_SHARE = 1e-6
"""The smallest share of a length in hours that is left for training."""


class _Work(NamedTuple):
    """The tokens read in each phase, the number of updates and checkpoints, the seconds by kind of
    work, and those of the evaluations and checkpoints before the end of the run.
    """

    tokens: list[float]
    updates: int
    checkpoints: int
    seconds: dict[str, float]
    pauses: float


@dataclass(frozen=True)
class _Run:
    """A run with the seconds of its step, its ranks, the bytes of a checkpoint, and the tokens of
    an epoch, None if they are unknown.
    """

    settings: PretrainConfig
    step: StepSeconds
    ranks: int
    checkpoint: int
    corpus_tokens: float | None

    def work(self) -> _Work:
        """Return the work of the run.

        The clock of a run in hours goes on during evaluations and checkpoints: they take of these
        hours what the others add to the work. Only those at its end come after them.
        """
        end = self.settings.training.end
        tokens = tokens_of_phases(self.settings, self.corpus_tokens or 0.0)
        if tokens is not None:
            return self._reading(tokens)
        hours = 3600 * end.count
        work = self._reading(self._tokens_within(hours))
        for _ in range(20):  # less training has fewer pauses, which leave more training
            left = max(hours - work.pauses, MIN_SHARE * hours)
            work = self._reading(self._tokens_within(left))
        return work

    def _tokens_within(self, seconds: float) -> list[float]:
        """Return the tokens that each phase reads in its share of these seconds of work."""
        phases, end = list[float](), 0.0
        for phase, per_token in zip(self.settings.phases, self.step.per_token, strict=True):
            end += seconds * phase.share
            # Without updates the phase would read `high`; the number is found by bisection.
            low, high = 0.0, (end - self._work_seconds(phases)) * self.ranks / per_token
            for _ in range(60):
                middle = (low + high) / 2
                fits = self._work_seconds([*phases, middle]) <= end
                low, high = (middle, high) if fits else (low, middle)
            phases.append(high)
        return phases

    def _work_seconds(self, phases: list[float]) -> float:
        """Return the seconds in which the run reads these tokens in each of its first phases."""
        reading = float(np.dot(phases, self.step.per_token[: len(phases)])) / self.ranks
        return reading + self._updates(phases) * (self.step.update + self.step.exchange)

    def _updates(self, phases: list[float]) -> float:
        """Return the updates in which the run reads these tokens in each of its first phases."""
        match self.settings.batch:
            case TokenRamp() as ramp:
                return ramp.steps(sum(phases))
            case TokenBudget(n):
                return sum(phases) / n
            case ExampleBudget(n):
                pairs = zip(phases, self.settings.phases, strict=False)
                return sum(tokens / (n * phase.length) for tokens, phase in pairs)
            case _:
                assert_never(self.settings.batch)

    def _reading(self, phases: list[float]) -> _Work:
        """Return the work of a run that reads these tokens in each phase."""
        settings, step, training = self.settings, self.step, self.settings.training
        updates, tokens = max(1, math.ceil(self._updates(phases) - 1e-6)), sum(phases)
        seconds = {
            "training": float(np.dot(phases, step.per_token)) / self.ranks,
            "updates": updates * step.update,
            "exchange": updates * step.exchange,
        }
        epochs = tokens / self.corpus_tokens / updates if self.corpus_tokens else None
        by_clock = isinstance(training.end, Hours)
        clock = 3600 * training.end.count if by_clock else sum(seconds.values())
        rates = StepRates(tokens / updates, epochs, clock / updates)
        evaluations = rates.times(training.evaluate, updates)
        checkpoints = rates.times(training.save, updates)
        if training.keep.best is not None:  # each evaluation is followed by one
            checkpoints = max(checkpoints, evaluations)
        # Evaluation is without a backward pass, in sequences of the greatest length.
        index = max(range(len(phases)), key=lambda n: settings.phases[n].length)
        forward = step.per_token[index] / (1 + BACKWARD)
        evaluation = settings.evaluation_tokens * forward / self.ranks
        checkpoint = self.checkpoint * step.per_byte
        seconds |= {"evaluation": evaluations * evaluation, "checkpoints": checkpoints * checkpoint}
        pauses = (evaluations - 1) * evaluation + (checkpoints - 1) * checkpoint
        return _Work(phases, updates, checkpoints, seconds, pauses)


@dataclass(frozen=True)
class RunForecast:
    """The forecast of a run.

    Attributes:
        hardware: its title.
        ranks: number of processes that train.
        parameters, tokens, updates: their number in the run.
        operations: operations per token of a step, on average.
        choice: the placement, its memory per rank, and the reason.
        free: bytes of memory of a rank.
        microbatch, largest: tokens that go through the model at once, as set and at most.
        seconds: seconds of training, updates, exchange, evaluation and checkpoints.
        checkpoint: bytes of a checkpoint.
        checkpoints: number of checkpoints that are written.
        cost: cost at the price per rank and hour; None without a price.
        assumed: sentences about figures that were not measured.
    """

    hardware: str
    ranks: int
    parameters: int
    tokens: float
    updates: int
    operations: float
    choice: PlacementChoice
    free: float
    microbatch: int
    largest: int
    seconds: dict[str, float]
    checkpoint: int
    checkpoints: int
    cost: float | None
    assumed: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The seconds of the run."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Tokens per second of all ranks, evaluation and checkpoints left out."""
        return self.tokens / sum(self.seconds[name] for name in ("training", "updates", "exchange"))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = dataclasses.asdict(self)
        choice = values.pop("choice")
        memory = choice["memory"] | {"total": self.choice.memory.total, "free": values.pop("free")}
        values["seconds"] |= {"total": self.total}
        values |= choice | {"memory": memory, "tokens per second": self.rate}
        return values


def forecast_run(
    settings: PretrainConfig,
    hardware: Hardware,
    *,
    corpus_tokens: float | None = None,
    price: float | None = None,
    out: Path = Path(),
    progress: Progress = SILENT,
) -> RunForecast:
    """Return the forecast of a run.

    Args:
        corpus_tokens: tokens of an epoch, for a length in epochs.
        price: price of one rank for an hour, in any currency.
        out: folder for checkpoints, on this machine.

    Raises:
        ConfigError: the length of the run is in epochs, and `corpus_tokens` is None.
        ResourceError: it does not fit; the error names what would.
    """
    require_at_least(0, price=price)
    if isinstance(settings.training.end, Epochs) and corpus_tokens is None:
        message = f"{settings.training.end} of an unknown text"
        fix = "Give --tokens N, or the corpus: --corpus FOLDER."
        raise ConfigError(message, where="training.until", fix=fix)
    demand = memory_demand(settings)
    ranks, free, device = hardware.count, hardware.memory, hardware.torch_device
    choice = choose_placement(demand, ranks, free, device)
    match hardware:
        case Here():
            step = measure_step(settings, device, out, progress)
        case Cards():
            step = compute_step(settings, hardware, demand, choice)
        case _:
            assert_never(hardware)
    work = _Run(settings, step, ranks, demand.saved, corpus_tokens).work()
    tokens, hours = sum(work.tokens), sum(work.seconds.values()) / 3600
    return RunForecast(
        hardware.title, ranks, demand.parameters, tokens, work.updates,
        float(np.dot(work.tokens, _operations(settings))) / tokens, choice, free,
        demand.microbatch, demand.largest_microbatch(free, device, choice.placement, ranks),
        work.seconds, demand.saved, work.checkpoints,
        None if price is None else price * ranks * hours, hardware.assumed,
    )  # fmt: skip


def _operations(settings: PretrainConfig) -> list[float]:
    """Return the operations per token of a step in each phase; recomputation is not work."""
    return [
        (1 + BACKWARD)
        * objective_flops(settings.objective_of(phase), settings.encoder, phase.length)
        for phase in settings.phases
    ]


def compute_step(
    settings: PretrainConfig, hardware: Cards, demand: MemoryDemand, choice: PlacementChoice
) -> StepSeconds:
    """Compute the times of a step on cards from their data sheet."""
    encoder, per_token = settings.encoder, list[float]()
    for work, phase in zip(_operations(settings), settings.phases, strict=True):
        again = 0.0
        if settings.training.recompute:  # all blocks but one have a second forward pass
            again = forward_flops(encoder, (), phase.length) * (1 - 1 / encoder.depth)
        per_token.append((work + again) / hardware.rate)
    ranks, sharded = hardware.count, choice.placement == "sharded"
    shards = ranks if sharded else 1
    update = UPDATE_BYTES * demand.parameters / shards / hardware.card.bandwidth
    exchange = 0.0
    if ranks > 1:
        # A ring sends 2·(r − 1)/r of the gradients; shards also gather weights in both passes. What
        # the backward pass of the last microbatch hides is not counted.
        batch, phases = settings.batch, settings.phases
        examples = isinstance(batch, ExampleBudget)
        of_rank = sum(p.share * batch.n * (p.length if examples else 1) for p in phases) / ranks
        sent = 4 * demand.parameters * (ranks - 1) / ranks
        micro = math.ceil(max(1.0, of_rank / demand.microbatch))
        total = sent * (1 + 2 * micro) if sharded else 2 * sent
        work = float(np.dot([phase.share for phase in phases], _operations(settings)))
        compute = work * min(float(demand.microbatch), of_rank) / hardware.rate
        link = NETWORK if ranks > MACHINE else hardware.card.link
        exchange = max(0.0, total / link - compute * BACKWARD / (1 + BACKWARD))
    return StepSeconds(tuple(per_token), max(update, SHORTEST_UPDATE), exchange)


def measure_step(
    settings: PretrainConfig, device: torch.device, out: Path, progress: Progress = SILENT
) -> StepSeconds:
    """Measure a step of the run on this machine, on random tokens. Draws from torch's generator."""
    objective, training = settings.objective, settings.training
    models = {role: Model(*spec) for role, spec in objective.models(settings.encoder).items()}
    # The special tokens are the first; each token has count 1.
    size = settings.encoder.vocab
    special = np.arange(size) < 5
    vocabulary = Vocabulary(special, np.zeros_like(special), 4, counts=np.ones(size, np.int64))
    training_module = objective.training_module(models, vocabulary).to(device)
    for model in models.values():
        compute_as(model.encoder, training, device)
    batches = [
        _random_batch(settings.objective_of(phase), vocabulary, settings, phase.length)
        for phase in settings.phases
    ]
    optimizer = build_optimizer(
        training.optimizer,
        training_module.trained_parameters(),
        matrices=training_module.matrices(),
    )
    step = measure_updates(training_module, batches, optimizer, training, progress)
    return dataclasses.replace(step, per_byte=seconds_per_byte(out))


def _random_batch(
    objective: Objective, vocabulary: Vocabulary, settings: PretrainConfig, length: int
) -> Batch:
    """Return random tokens in pairs of segments, with the objective's targets."""
    draw = rng(settings.seed, "plan")
    segments = (np.arange(length) >= length // 2).astype(np.int8)
    if getattr(settings.encoder, "segments", 2) < 2:
        segments = np.zeros_like(segments)
    sequences = []
    for _ in range(max(1, min(SAMPLE, settings.microbatch_tokens) // length)):
        ids = draw.integers(5, settings.encoder.vocab, length, dtype=np.int32)
        pair = LabelTargets(draw.integers(0, 2, 1))
        sequences.append(
            objective.prepare(Sequence(ids, segments, {"pair": pair}), vocabulary, draw)
        )
    return pack(sequences)
