"""The cost of a pre-training run before it begins: time, memory, checkpoints and price.

The operations and the memory of a run are counted. Its speed is measured on this machine by the
run's own step on random tokens, or computed for a card from its data sheet and an assumed share of
the rate of matrix products.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from typing_extensions import assert_never

from bothways.core.batch import Batch, pack
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, ResourceError
from bothways.core.keyed_rng import rng
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.cards import CARDS, MACHINE, NETWORK, Accelerator
from bothways.core.runtime.devices import choose_device, describe_device, memory_available
from bothways.core.sequence import Sequence
from bothways.core.targets import LabelTargets
from bothways.data.batching import ExampleBudget, TokenBudget, TokenRamp
from bothways.data.masking import Vocabulary
from bothways.model.config import EncoderConfig
from bothways.model.flops import BACKWARD, forward_flops
from bothways.model.model import Model
from bothways.objectives.objective import Objective
from bothways.objectives.step_cost import objective_flops
from bothways.pretraining.build import memory_demand, tokens_of_phases
from bothways.pretraining.config import PretrainConfig
from bothways.training.durations import Epochs, Hours, StepRates
from bothways.training.optimizers import build_optimizer
from bothways.training.preflight.machine import (
    StepSeconds,
    compute_as,
    measure_updates,
    seconds_per_byte,
)
from bothways.training.preflight.memory import (
    USABLE,
    MemoryDemand,
    MemoryPerRank,
    PlacementChoice,
    choose_placement,
    size_text,
)

UTILISATION = 0.35
"""The share of a card's rate of bf16 products that a run is assumed to reach."""
SAMPLE = 2048
"""Tokens of the batch on which the speed is measured here."""
UPDATE_BYTES = 28
"""Bytes that an update of Adam reads and writes per parameter: weight, gradient and two moments are
read, all but the gradient written."""


LAUNCH = 5e-6
"""Seconds to launch a kernel on a card that is not here; on this machine it is measured."""
UPDATE_LAUNCHES = 150
"""Kernels of an update, clipping included, whatever the size of the model."""
STEP_LAUNCH = 2e-5
"""Seconds from one kernel of a step to the next where Python launches them: on an H100 a step of
BERT-base has 950 launches and takes 18.5 ms longer than its kernels."""
LAYER_LAUNCHES, OTHER_LAUNCHES = 70, 110
"""Kernels of the forward and backward pass of a layer, and of everything else in a step."""


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
        return choose_device(self.device)

    @property
    def memory(self) -> float:
        """The free memory in bytes; infinite if it is unknown."""
        free = memory_available(self.torch_device)
        return math.inf if free is None else float(free)

    @property
    def title(self) -> str:
        """The name of the device."""
        return describe_device(self.torch_device)


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
        if not isinstance(end, Hours):
            tokens = tokens_of_phases(self.settings, self.corpus_tokens or 0.0)
            assert tokens is not None
            return self._reading(tokens)
        from scipy.optimize import brentq

        hours = 3600 * end.count

        def excess(share: float) -> float:
            """Return the seconds of the pauses beyond those that training leaves."""
            return self._reading(self._tokens_within(hours * share)).pauses - hours * (1 - share)

        share = 1.0
        if excess(1.0) > 0:  # else even without a pause less is done than the hours hold
            tight = excess(MIN_SHARE) >= 0
            share = MIN_SHARE if tight else brentq(excess, MIN_SHARE, 1.0, xtol=MIN_SHARE)
        return self._reading(self._tokens_within(hours * share))

    def _tokens_within(self, seconds: float) -> list[float]:
        """Return the tokens that each phase reads in its share of these seconds of work."""
        from scipy.optimize import brentq

        def excess(tokens: float, phases: list[float], end: float) -> float:
            """Return the seconds of work after `end` if the next phase reads these tokens."""
            return self._work_seconds([*phases, tokens]) - end

        phases, end = list[float](), 0.0
        for phase, per_token in zip(self.settings.phases, self.step.per_token, strict=True):
            room = end + seconds * phase.share - self._work_seconds(phases)
            end += seconds * phase.share
            # Without updates the phase would read this much: the root is below.
            limit = room * self.ranks / per_token * (1 + 1e-9)
            phases.append(brentq(excess, 0.0, limit, args=(phases, end)))
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
        end, clock = training.end, sum(seconds.values())
        if isinstance(end, Hours):
            clock = 3600 * end.count
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
        microbatch: tokens that go through the model at once, as set.
        largest: the largest microbatch that fits, in tokens.
        seconds: seconds of training, updates, exchange, evaluation and checkpoints.
        checkpoint: bytes of a checkpoint.
        checkpoints: number of checkpoints that are written.
        cost: cost at the price per rank and hour; None without a price.
        assumed: sentences about figures that were not measured.
        remarks: sentences about what makes the run slow, or slower than its forecast.
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
    remarks: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The seconds of the run."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Tokens per second of all ranks, evaluation and checkpoints left out."""
        work = sum(self.seconds[name] for name in ("training", "updates", "exchange"))
        return self.tokens / work

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = dataclasses.asdict(self)
        choice = values.pop("choice")
        memory = choice["memory"] | {"total": self.choice.memory.total, "free": values.pop("free")}
        return values | {
            "placement": choice["placement"],
            "why": choice["why"],
            "memory": memory,
            "seconds": values["seconds"] | {"total": self.total},
            "tokens per second": self.rate,
            "assumed": [*self.assumed],
            "remarks": [*self.remarks],
        }


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
    try:
        choice = choose_placement(demand, ranks, free, device)
    except ResourceError as error:
        raise _with_cards(error, demand, hardware) from error
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
        tuple(_remarks(settings, hardware, demand, work.seconds)),
    )  # fmt: skip


def _remarks(
    settings: PretrainConfig, hardware: Hardware, demand: MemoryDemand, seconds: Mapping[str, float]
) -> Iterator[str]:
    """Yield causes of a slow run: updates and exchange, and on cards launches of kernels."""
    overhead = seconds["updates"] + seconds["exchange"]
    if overhead > seconds["training"] / 2:
        share = overhead / (overhead + seconds["training"])
        yield (
            f"updates and the exchange between ranks take {share:.0%} of the work: a larger batch "
            "has fewer of them"
        )
    if isinstance(hardware, Here):
        return
    tokens = min(float(demand.microbatch), _tokens_per_step(settings) / hardware.count)
    encoders = [spec.encoder for spec in settings.objective.models(settings.encoder).values()]
    layers = sum(encoder.depth for encoder in encoders if isinstance(encoder, EncoderConfig))
    launching = (LAYER_LAUNCHES * layers + OTHER_LAUNCHES) * STEP_LAUNCH
    work = max(_operations(settings)) * tokens / hardware.rate
    if work < launching:
        yield (
            f"a rank has {tokens:,.0f} tokens at once, which it computes in {1e3 * work:.2g} ms, "
            f"and launching the kernels takes about {1e3 * launching:.2g} ms: the run is slower "
            "than this forecast; set batch.n and microbatch_tokens higher, or use fewer ranks"
        )


def _with_cards(error: ResourceError, demand: MemoryDemand, hardware: Hardware) -> ResourceError:
    """Return the error with the smallest card with which the run fits as it is."""
    if isinstance(hardware, Here):
        return error
    larger = (
        card.name
        for card in CARDS.values()
        if demand.fits(card.memory, torch.device("cuda"), "sharded", hardware.count)
        or demand.fits(card.memory, torch.device("cuda"))
    )
    name = next(larger, None)
    fix = f"{error.fix} Or: --hardware {name}." if name else error.fix
    return ResourceError(error.what, where=error.where, fix=fix)


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
    shards = hardware.count if choice.placement == "sharded" else 1
    update = max(
        UPDATE_BYTES * demand.parameters / shards / hardware.card.bandwidth,
        UPDATE_LAUNCHES * _launch_seconds(),
    )
    exchange = _exchange_seconds(settings, hardware, demand, choice)
    return StepSeconds(tuple(per_token), update, exchange)


def _launch_seconds() -> float:
    """Return the seconds to launch a kernel, measured if this machine has a GPU."""
    if not torch.cuda.is_available():
        return LAUNCH
    value = torch.zeros((), device="cuda")
    value.add_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        value.add_(1)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 1000


def _exchange_seconds(
    settings: PretrainConfig, hardware: Cards, demand: MemoryDemand, choice: PlacementChoice
) -> float:
    """Return the seconds that the exchange between ranks adds to an update.

    A ring sends 2·(r − 1)/r of the gradients; shards also gather weights in both passes. What the
    backward pass of the last microbatch hides is not counted.
    """
    ranks = hardware.count
    if ranks == 1:
        return 0.0
    link = NETWORK if ranks > MACHINE else hardware.card.link
    sent = 4 * demand.parameters * (ranks - 1) / ranks
    of_rank = _tokens_per_step(settings) / ranks
    micro = max(1.0, of_rank / demand.microbatch)
    total = 2 * sent if choice.placement == "replicated" else sent * (1 + 2 * math.ceil(micro))
    tokens = min(float(demand.microbatch), of_rank)
    shares = [phase.share for phase in settings.phases]
    work = float(np.dot(shares, _operations(settings)))
    compute = work * tokens / hardware.rate
    hidden = compute * BACKWARD / (1 + BACKWARD)
    return max(0.0, total / link - hidden)


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


def _tokens_per_step(settings: PretrainConfig) -> float:
    """Return the tokens of an update over all ranks, on average over the phases."""
    batch = settings.batch
    if isinstance(batch, ExampleBudget):
        return sum(phase.share * batch.n * phase.length for phase in settings.phases)
    return float(batch.n)


def memory_rows(forecast: RunForecast) -> list[tuple[str, str]]:
    """Return the memory of a rank by its parts, as texts."""
    memory: MemoryPerRank = forecast.choice.memory
    sizes = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        f"activations of {forecast.microbatch:,} tokens": memory.activations,
        "teacher": memory.frozen,
        "gathered": memory.gathered,
    }
    rows = [(name, size_text(count)) for name, count in sizes.items() if count]
    free = size_text(forecast.free) if math.isfinite(forecast.free) else "unknown"
    return [*rows, (f"all, of {free} of which {USABLE:.0%} count", size_text(memory.total))]
