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
from typing import Any, Literal

import numpy as np
import torch

from bothways.core.batch import Batch, pack
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, ResourceError
from bothways.core.keyed_rng import rng
from bothways.core.progress import SILENT, Progress
from bothways.core.sequence import Sequence
from bothways.core.targets import LabelTargets
from bothways.data.batching import ExampleBudget, TokenRamp
from bothways.data.masking import Vocabulary
from bothways.model.config import EncoderConfig
from bothways.model.flops import BACKWARD, forward_flops
from bothways.model.model import Model
from bothways.objectives.objective import Objective
from bothways.preflight.machine import compute_as, seconds_per_byte, speed, update_seconds
from bothways.preflight.memory import (
    USABLE,
    Load,
    PlacementChoice,
    RankMemory,
    choose_placement,
    size_text,
)
from bothways.pretraining.build import load_of, tokens_of_phases
from bothways.pretraining.config import PretrainConfig
from bothways.runtime.cards import CARDS, MACHINE, NETWORK, Accelerator
from bothways.runtime.devices import choose_device, describe_device, memory_available
from bothways.training.durations import Duration, Epochs, Hours, Steps, Tokens
from bothways.training.optimizers import build_optimizer, set_rate

UTILISATION = 0.35
"""The share of a card's rate of bf16 products that a run is assumed to reach."""
SAMPLE = 2048
"""Tokens of the batch on which the speed is measured here."""
UPDATE_BYTES = 28
"""Bytes that an update of Adam reads and writes per parameter: weight, gradient and two moments are
read, all but the gradient written."""


@dataclass(frozen=True)
class Here:
    """This machine, whose speed is measured."""

    device: str = "auto"
    kind: Literal["here"] = "here"


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

    def __post_init__(self) -> None:
        require_at_least(1, ranks=self.count)
        if not 0 < self.utilisation <= 1:
            what = f"must be above 0 and at most 1, not {self.utilisation:g}"
            raise ConfigError(what, where="utilisation")


Hardware = Here | Cards


@dataclass(frozen=True)
class StepSeconds:
    """The parts of the time of a run.

    Attributes:
        per_token: of forward and backward pass on one rank, in seconds.
        update: of one update, in seconds.
        exchange: of an update, in seconds: what the exchange between ranks adds to it.
        per_byte: of a checkpoint, in seconds; 0 if it is not known.
    """

    per_token: float
    update: float
    exchange: float = 0.0
    per_byte: float = 0.0


@dataclass(frozen=True)
class RunPlan:
    """A forecast.

    Attributes:
        hardware: in words.
        ranks: processes that train.
        parameters, tokens, updates: of the run.
        operations: per token of a step.
        choice: the placement, its memory per rank, and why.
        free: bytes of memory of a rank.
        microbatch: tokens that go through the model at once, as set.
        largest: the most that fit.
        seconds: of training, updates, exchange, evaluation and checkpoints.
        checkpoint: its bytes.
        checkpoints: how many are written.
        cost: at the price per rank and hour; None if no price was given.
        assumed: sentences on what was not measured.
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
        }


def plan_run(
    settings: PretrainConfig,
    hardware: Hardware,
    *,
    text: float | None = None,
    price: float | None = None,
    out: Path = Path(),
    progress: Progress = SILENT,
) -> RunPlan:
    """Return the forecast of a run.

    Args:
        text: tokens of the corpus, for a length in epochs.
        price: of one rank for an hour, in any currency.
        out: where checkpoints are written, on this machine.

    Raises:
        ConfigError: the length of the run is in epochs, and there is no text.
        ResourceError: it does not fit; the error names what would.
    """
    require_at_least(0, price=price)
    if isinstance(settings.training.end, Epochs) and text is None:
        what = f"{settings.training.end} of an unknown text"
        fix = "Give --tokens N, or the corpus: --corpus FOLDER."
        raise ConfigError(what, where="training.until", fix=fix)
    load = load_of(settings)
    ranks, free, device = _memory_of(hardware)
    try:
        choice = choose_placement(load, ranks, free, device)
    except ResourceError as error:
        raise _with_cards(error, load, hardware) from error
    per = seconds_of(settings, hardware, load, choice, out, progress)
    tokens, updates = _amounts(settings, text, per, ranks)
    seconds = _seconds(settings, per, tokens, updates, load, ranks)
    checkpoints = _times(settings.training.save, tokens, updates, sum(seconds.values()))
    seconds["checkpoints"] = checkpoints * load.saved * per.per_byte
    hours = sum(seconds.values()) / 3600
    return RunPlan(
        _title(hardware), ranks, load.parameters, tokens, updates,
        _operations(settings), choice, free,
        load.microbatch, load.largest_microbatch(free, device, choice.placement, ranks),
        seconds, load.saved, checkpoints,
        None if price is None else price * ranks * hours, _assumed(hardware),
    )  # fmt: skip


def _memory_of(hardware: Hardware) -> tuple[int, float, torch.device]:
    """Return the ranks, the memory of each in bytes, and the kind of device."""
    match hardware:
        case Here(name):
            device = choose_device(name)
            free = memory_available(device)
            return 1, math.inf if free is None else float(free), device
        case Cards(card, count):
            return count, card.memory, torch.device("cuda")


def _title(hardware: Hardware) -> str:
    match hardware:
        case Here(name):
            return describe_device(choose_device(name))
        case Cards(card, count):
            return f"{count} × {card.title}" if count > 1 else card.title


def _assumed(hardware: Hardware) -> tuple[str, ...]:
    match hardware:
        case Here():
            return ()
        case Cards(card, count, share):
            rate = f"{card.bf16 / 1e12:,.0f} TFLOP/s"
            between = f"; {NETWORK / 1e9:,.0f} GB/s between machines" if count > MACHINE else ""
            return (
                f"{share:.0%} of {rate} (--utilisation), figures of the data sheet{between}",
                "not measured: the time of checkpoints, and of reading the data",
            )


def _with_cards(error: ResourceError, load: Load, hardware: Hardware) -> ResourceError:
    """Return the error with the smallest card with which the run fits as it is."""
    if isinstance(hardware, Here):
        return error
    larger = (
        card.name
        for card in CARDS.values()
        if load.fits(card.memory, torch.device("cuda"), "sharded", hardware.count)
        or load.fits(card.memory, torch.device("cuda"))
    )
    name = next(larger, None)
    fix = f"{error.fix} Or: --hardware {name}." if name else error.fix
    return ResourceError(error.what, where=error.where, fix=fix)


def _operations(settings: PretrainConfig) -> float:
    """Return the operations per token of a step, over all phases; recomputation is not work."""
    objective, encoder = settings.objective, settings.encoder
    return (1 + BACKWARD) * sum(
        phase.share * objective.forward_flops(encoder, phase.length) for phase in settings.phases
    )


def _recomputed(settings: PretrainConfig) -> float:
    """Return how much longer a step takes for computing the blocks again."""
    encoder = settings.encoder
    if not settings.training.recompute or not isinstance(encoder, EncoderConfig):
        return 1.0
    length = settings.phases[0].length
    blocks = forward_flops(encoder, (), length) * (1 - 1 / encoder.depth)
    whole = settings.objective.forward_flops(encoder, length)
    return 1 + blocks / ((1 + BACKWARD) * whole)


def seconds_of(
    settings: PretrainConfig,
    hardware: Hardware,
    load: Load,
    choice: PlacementChoice,
    out: Path,
    progress: Progress = SILENT,
) -> StepSeconds:
    """Return the times of a step: measured here, or computed for cards."""
    match hardware:
        case Here(name):
            return measure_step(settings, choose_device(name), out, progress)
        case Cards(card, count, share):
            per_token = _operations(settings) * _recomputed(settings) / (share * card.bf16)
            held = load.parameters / (count if choice.placement == "sharded" else 1)
            update = UPDATE_BYTES * held / card.bandwidth
            return StepSeconds(per_token, update, _exchange(settings, hardware, load, choice))


def _exchange(
    settings: PretrainConfig, hardware: Cards, load: Load, choice: PlacementChoice
) -> float:
    """Return the seconds that the exchange between ranks adds to an update.

    A ring sends 2·(r − 1)/r of the gradients; shards also gather weights in both passes. What the
    backward pass of the last microbatch hides is not counted.
    """
    ranks = hardware.count
    if ranks == 1:
        return 0.0
    link = NETWORK if ranks > MACHINE else hardware.card.link
    sent = 4 * load.parameters * (ranks - 1) / ranks
    micro = max(1.0, _tokens_per_step(settings) / ranks / load.microbatch)
    total = 2 * sent if choice.placement == "replicated" else sent * (1 + 2 * math.ceil(micro))
    tokens = min(float(load.microbatch), _tokens_per_step(settings) / ranks)
    compute = _operations(settings) * tokens / (hardware.utilisation * hardware.card.bf16)
    hidden = compute * BACKWARD / (1 + BACKWARD)
    return max(0.0, total / link - hidden)


def measure_step(
    settings: PretrainConfig, device: torch.device, out: Path, progress: Progress = SILENT
) -> StepSeconds:
    """Measure a step of the run on this machine, on random tokens. Draws from torch's generator."""
    objective, training = settings.objective, settings.training
    models = {role: Model(*spec) for role, spec in objective.models(settings.encoder).items()}
    vocabulary = _vocabulary(settings.encoder.vocab)
    learner = objective.learner(models, vocabulary).to(device)
    for model in models.values():
        compute_as(model.encoder, training, device)
    per_token, batch = 0.0, None
    for phase in settings.phases:
        batch = _random_batch(settings.objective_of(phase), vocabulary, settings, phase.length)
        per_token += phase.share / speed(learner, batch, training.precision, progress)
    assert batch is not None
    optimizer = build_optimizer(
        training.optimizer, learner.trained_parameters(), matrices=learner.matrices()
    )
    set_rate(optimizer, 0.0)
    update = update_seconds(learner, batch, optimizer, training, progress)
    return StepSeconds(per_token, update, per_byte=seconds_per_byte(out))


def _vocabulary(size: int) -> Vocabulary:
    """Return a vocabulary of which the first tokens are special and each has been counted once."""
    special = np.arange(size) < 5
    return Vocabulary(special, np.zeros_like(special), 4, counts=np.ones(size, np.int64))


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


def _amounts(
    settings: PretrainConfig, text: float | None, per: StepSeconds, ranks: int
) -> tuple[float, int]:
    """Return the tokens and the updates of the run."""
    end, batch = settings.training.end, settings.batch

    def updates(tokens: float) -> float:
        """Return the updates in which the run reads `tokens`."""
        if isinstance(batch, TokenRamp):
            return batch.steps(tokens)
        return tokens / _tokens_per_step(settings)

    if isinstance(end, Hours):
        each, seconds = per.per_token / ranks, 3600 * end.count
        low, high = 0.0, seconds / each
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            takes = middle * each + updates(middle) * (per.update + per.exchange)
            low, high = (middle, high) if takes < seconds else (low, middle)
        return high, math.ceil(updates(high))
    phases = tokens_of_phases(settings, text or 0.0)
    assert phases is not None
    tokens = sum(phases)
    return tokens, end.count if isinstance(end, Steps) else math.ceil(updates(tokens))


def _seconds(
    settings: PretrainConfig,
    per: StepSeconds,
    tokens: float,
    updates: int,
    load: Load,
    ranks: int,
) -> dict[str, float]:
    """Return the seconds of a run by what they are spent on, without checkpoints."""
    seconds = {
        "training": tokens * per.per_token / ranks,
        "updates": updates * per.update,
        "exchange": updates * per.exchange,
    }
    done = sum(seconds.values())
    evaluations = _times(settings.training.evaluate, tokens, updates, done)
    one = settings.evaluation_tokens * per.per_token / (1 + BACKWARD) / ranks
    return seconds | {"evaluation": evaluations * one}


def _times(every: Duration | None, tokens: float, updates: int, seconds: float) -> int:
    """Return how often something is done that is done after each duration, and at the end."""
    match every:
        case None | Epochs():
            return 1
        case Steps(count):
            return math.ceil(updates / count)
        case Tokens(count):
            return math.ceil(tokens / count)
        case Hours(count):
            return math.ceil(seconds / 3600 / count)


def memory_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return the memory of a rank by its parts, as texts."""
    memory: RankMemory = plan.choice.memory
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        f"activations of {plan.microbatch:,} tokens": memory.activations,
        "teacher": memory.frozen,
        "gathered": memory.gathered,
    }
    rows = [(name, size_text(count)) for name, count in parts.items() if count]
    free = size_text(plan.free) if math.isfinite(plan.free) else "unknown"
    return [*rows, (f"all, of {free} of which {USABLE:.0%} count", size_text(memory.total))]
