"""The cost of a pre-training run before it begins: time, memory, checkpoints and price.

The operations and the memory of a run are counted. Its speed is measured on this machine by the
run's own step on random tokens, or computed for a card from its data sheet and an assumed share of
the rate of matrix products. Objectives know nothing of all this: one from outside the library is
counted by its models and by its masking rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bothways.core.batch import LabelTargets, pack
from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime import cards, devices
from bothways.core.source import Sequence, rng
from bothways.data.loader import ExampleBudget, TokenRamp
from bothways.data.masking import Vocabulary
from bothways.model.config import EncoderConfig
from bothways.model.embedding import Embedding
from bothways.model.init import without_weights
from bothways.model.model import Model
from bothways.objectives import distillation
from bothways.objectives.gpt_bert import GPTBERT
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.objectives.span_boundary import OFFSET_WIDTH, MaskedLMSpanBoundary
from bothways.pretraining.config import PretrainConfig
from bothways.training import step_cost
from bothways.training.run import compute_as
from bothways.training.schedules import Epochs, Hours, StepRates, Steps
from bothways.training.step_cost import BACKWARD, FLOAT

UTILISATION = 0.25
"""The share of a card's rate of bf16 products that a run is assumed to reach. On an H200 BERT-base
had 0.24 in a run by `short`, 0.27 in steps of 64 × 512 tokens, and 0.30 in compiled ones."""
SAMPLE = 2048
"""Tokens of the batch on which the speed is measured here."""
UPDATE_BYTES = 28
"""Bytes that an update of Adam reads and writes per parameter: weight, gradient and two moments are
read, all but the gradient written."""
LAUNCHES = 3.1e-3
"""Seconds to launch the kernels of a block in a step, both passes and its share of the update, as
measured beside an H200. A step takes no less, however few its tokens."""


def predicted_share(objective: Objective) -> float:
    """Return the fraction of tokens for which logits over the vocabulary are computed."""
    rate = None if objective.masking is None else objective.masking.rate
    if isinstance(objective, GPTBERT):
        return objective.causal + (1 - objective.causal) * objective.masking.rate
    if not isinstance(objective, distillation.Distillation):
        return 1.0 if rate is None else rate
    soft = objective.loss(distillation.SoftTargets)
    return 1.0 if soft is not None and soft.at == "all" else rate or 0.0


def objective_flops(objective: Objective, encoder: EncoderConfig, length: int) -> float:
    """Return the operations per token of a forward pass of all models, and of the losses' networks.

    That of a model without a backward pass counts by its share of a step.
    """
    predicted = predicted_share(objective)
    operations = sum(
        step_cost.forward_flops(spec.encoder, spec.heads, length, predicted)
        / (1 + BACKWARD if role in objective.frozen_models else 1)
        for role, spec in objective.models(encoder).items()
    )
    if isinstance(objective, MaskedLMSpanBoundary):
        width, embedded = encoder.width, encoder.embedding_width
        network = (2 * width + OFFSET_WIDTH) * width + width * embedded + embedded * encoder.vocab
        operations += 2 * predicted * network
    return operations


def shared_parameters(objective: Objective, encoder: EncoderConfig) -> int:
    """Return the number of parameters that two models have in common: tables and LayerNorm."""
    if not isinstance(objective, ReplacedTokens) or objective.sharing != "shared":
        return 0
    with without_weights():
        embedding = Embedding(encoder)
    modules = [*embedding.tables().values(), embedding.norm]
    return sum(weight.numel() for module in modules for weight in module.parameters())


def _loss_floats(settings: PretrainConfig) -> step_cost.LossFloats:
    """Return the numbers that the losses hold: predictions over the vocabulary and their gradient,
    and of a teacher's pass what they read.
    """
    objective, encoder = settings.objective, settings.encoder
    specs = objective.models(encoder)
    if isinstance(objective, GPTBERT):  # a microbatch may have more causal sequences than others
        length = max(phase.length for phase in settings.phases)
        share, sequences = objective.causal, max(1, settings.microbatch_tokens // length)
        most = min(1.0, share + 3 * math.sqrt(share * (1 - share) / sequences))
        objective = dataclasses.replace(objective, causal=most)
    predictions = 2 * predicted_share(objective) * encoder.vocab
    if not isinstance(objective, distillation.Distillation):
        predicting = sum(any(h.of_vocabulary for h in spec.heads) for spec in specs.values())
        return step_cost.LossFloats(predictions * predicting)
    rate = 0.0 if objective.masking is None else objective.masking.rate
    width, losses = specs["teacher"].encoder.width, {type(loss) for loss in objective.losses}
    last_vectors = bool(losses & {distillation.SoftTargets, distillation.CosineStates})
    per_token = {
        distillation.MaskedTokens: 2 * rate * encoder.vocab,
        distillation.SoftTargets: encoder.width,
        distillation.CosineStates: 2 * width,
        distillation.Relations: 6 * encoder.width,
    }
    # Of some tokens at a time the logits, probabilities and gradients of both, and three gradients
    # of the table.
    rows = (6 * distillation.LOGIT_ROWS + 3 * encoder.embedding_width) * encoder.vocab
    return step_cost.LossFloats(
        sum(per_token[type(loss)] for loss in objective.losses),
        width * (last_vectors + 3.0 * (distillation.Relations in losses)),
        float(rows) if distillation.SoftTargets in losses else 0.0,
    )


def memory_demand(settings: PretrainConfig) -> step_cost.MemoryDemand:
    """Return the demands of a run in which each rank has a whole model."""
    objective, encoder = settings.objective, settings.encoder
    specs, frozen = objective.models(encoder), objective.frozen_models
    return step_cost.MemoryDemand(
        tuple(spec for role, spec in specs.items() if role not in frozen),
        max(phase.length for phase in settings.phases), settings.microbatch_tokens,
        settings.training, shared_parameters(objective, encoder), _loss_floats(settings),
        tuple(spec for role, spec in specs.items() if role in frozen),
    )  # fmt: skip


def tokens_of_phases(settings: PretrainConfig, corpus_tokens: float) -> list[float] | None:
    """Return the number of tokens that a run reads in each phase; None if its length is a time."""
    end, batch = settings.training.end, settings.batch
    if isinstance(batch, TokenRamp) and isinstance(end, Steps):
        ends = itertools.accumulate((phase.share for phase in settings.phases), initial=0.0)
        # A ramp counts from the start of the run: phases are differences of its sums.
        totals = [batch.tokens(share * end.count) for share in ends]
        return [stop - start for start, stop in itertools.pairwise(totals)]
    result = list[float]()
    for phase in settings.phases:
        of_step = float(batch.n * (phase.length if isinstance(batch, ExampleBudget) else 1))
        steps = end.steps(StepRates(of_step, of_step / corpus_tokens if corpus_tokens else None))
        if steps is None:
            return None
        result.append(phase.share * steps * of_step)
    return result


@dataclass(frozen=True)
class Cards:
    """Cards of one kind.

    Attributes:
        count: one for each rank.
        utilisation: the share of `Accelerator.bf16` that a step reaches.
    """

    card: cards.Accelerator
    count: int = 1
    utilisation: float = UTILISATION

    def __post_init__(self) -> None:
        require_at_least(1, ranks=self.count)
        require_range("(0, 1]", utilisation=self.utilisation)


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
    step: step_cost.StepSeconds
    ranks: int
    checkpoint: int
    corpus_tokens: float | None

    def work(self) -> _Work:
        """Return the work of the run.

        The clock of a run in hours goes on during evaluations and checkpoints: they take of these
        hours what the others add to the work. Only those at its end come after them.
        """
        tokens = tokens_of_phases(self.settings, self.corpus_tokens or 0.0)
        if tokens is not None:
            return self._reading(tokens)
        hours = 3600 * self.settings.training.end.count
        low, high = 1e-6 * hours, hours  # of which the rest is for pauses
        for _ in range(50):
            middle = (low + high) / 2
            fits = middle + self._reading(self._tokens_within(middle)).pauses <= hours
            low, high = (middle, high) if fits else (low, middle)
        return self._reading(self._tokens_within(low))

    def _tokens_within(self, seconds: float) -> list[float]:
        """Return the tokens that each phase reads in its share of these seconds of work.

        A phase of t seconds reads t / (s + u · updates / tokens) tokens, with s seconds for a token
        and u for an update. The last factor is constant but for a ramp: it is found by iteration.
        """
        step, tokens = self.step, [float(phase.length) for phase in self.settings.phases]
        for _ in range(100):
            ends = [self._updates(tokens[:n]) for n in range(len(tokens) + 1)]
            tokens = [
                seconds * phase.share
                / (per_token / self.ranks + (step.update + step.exchange) * (end - start) / count)
                for phase, per_token, start, end, count in zip(
                    self.settings.phases, step.per_token, ends, ends[1:], tokens, strict=False
                )
            ]  # fmt: skip
        return tokens

    def _updates(self, phases: list[float]) -> float:
        """Return the updates in which the run reads these tokens in each of its first phases."""
        batch = self.settings.batch
        if isinstance(batch, TokenRamp):
            return batch.steps(sum(phases))
        examples = isinstance(batch, ExampleBudget)
        pairs = zip(phases, self.settings.phases, strict=False)
        return sum(n / (batch.n * (phase.length if examples else 1)) for n, phase in pairs)

    def _reading(self, phases: list[float]) -> _Work:
        """Return the work of a run that reads these tokens in each phase."""
        settings, step, training = self.settings, self.step, self.settings.training
        # Rounded up but for an error of floating point: 300.0000001 are 300.
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
        ranks: number of processes that train.
        operations_per_token: operations of a step, on average.
        choice: the placement, its memory per rank, and the reason.
        free: bytes of memory of a rank.
        microbatch, largest: tokens that go through the model at once, as set and at most.
        seconds: seconds of training, updates, exchange, evaluation and checkpoints.
        checkpoint: bytes of a checkpoint.
        cost: cost at the price per rank and hour; None without a price.
        assumed: sentences about figures that were not measured.
    """

    hardware: str
    ranks: int
    parameters: int
    tokens: float
    updates: int
    operations_per_token: float
    choice: step_cost.PlacementChoice
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
        values["seconds"] |= {"total": self.total}
        memory = values.pop("choice").memory
        amounts = memory._asdict() | {"total": memory.total, "free": values.pop("free")}
        choice = self.choice._asdict() | {"memory": amounts}
        return values | choice | {"tokens_per_second": self.rate}


def forecast_run(
    settings: PretrainConfig,
    hardware: str | Cards,
    *,
    corpus_tokens: float | None = None,
    price: float | None = None,
    out: Path = Path(),
    progress: Progress = SILENT,
) -> RunForecast:
    """Return the forecast of a run.

    Args:
        hardware: a device of this machine, whose speed is measured, or cards.
        corpus_tokens: tokens of an epoch, for a length in epochs.
        price: price of one rank for an hour, in any currency.
        out: folder for checkpoints, on this machine.

    Raises:
        ConfigError: the length of the run is in epochs, and `corpus_tokens` is None.
        ResourceError: it does not fit; the error names what would.
    """
    require_at_least(0, price=price)
    if isinstance(settings.training.end, Epochs) and corpus_tokens is None:
        message = "the run is as long as epochs of a corpus, and none is named"
        fix = "Give --tokens N, or the corpus: --corpus FOLDER."
        raise ConfigError(message, where="training.until", fix=fix)
    demand, assumed = memory_demand(settings), tuple[str, ...]()
    if isinstance(hardware, str):
        ranks, device = 1, devices.choose_device(hardware)
        title, available = devices.describe_device(device), devices.memory_available(device)
        free = math.inf if available is None else float(available)
        choice = step_cost.choose_placement(demand, ranks, free, device)
        step = measure_step(settings, device, out, progress)
    else:
        card, ranks, device = hardware.card, hardware.count, torch.device("cuda")
        title, free = f"{ranks} × {card.title}" if ranks > 1 else card.title, card.memory
        choice = step_cost.choose_placement(demand, ranks, free, device)
        step = _compute_step(settings, hardware, demand, choice.placement == "sharded")
        between = f"; {cards.NETWORK / 1e9:,.0f} GB/s between machines"
        assumed = (
            f"{hardware.utilisation:.0%} of {card.bf16 / 1e12:,.0f} TFLOP/s (--utilisation), "
            f"figures of the data sheet{between if ranks > cards.MACHINE else ''}",
            "not measured: the time of checkpoints, and of reading the data",
        )
    work = _Run(settings, step, ranks, demand.saved, corpus_tokens).work()
    tokens, hours = round(sum(work.tokens)), sum(work.seconds.values()) / 3600
    operations = float(np.dot(work.tokens, _operations(settings))) / tokens
    largest = demand.largest_microbatch(free, device, ranks if choice.placement == "sharded" else 1)
    return RunForecast(
        title, ranks, demand.parameters, tokens, work.updates, operations, choice, free,
        demand.microbatch, largest, work.seconds, demand.saved, work.checkpoints,
        None if price is None else price * ranks * hours, assumed,
    )  # fmt: skip


def _operations(settings: PretrainConfig) -> list[float]:
    """Return the operations per token of a step in each phase; recomputation is not work."""
    return [
        (1 + BACKWARD)
        * objective_flops(settings.objective_of(phase), settings.encoder, phase.length)
        for phase in settings.phases
    ]


def _compute_step(
    settings: PretrainConfig, hardware: Cards, demand: step_cost.MemoryDemand, sharded: bool
) -> step_cost.StepSeconds:
    """Compute the times of a step on cards from their data sheet."""
    encoder, phases, batch = settings.encoder, settings.phases, settings.batch
    card, ranks, per_token = hardware.card, hardware.count, list[float]()
    rate, operations = hardware.utilisation * card.bf16, _operations(settings)
    for work, phase in zip(operations, phases, strict=True):
        # All blocks but one have a second forward pass.
        share = (1 - 1 / encoder.depth) if settings.training.recompute else 0.0
        recomputed = step_cost.forward_flops(encoder, (), phase.length) * share
        per_token.append((work + recomputed) / rate)
    update = UPDATE_BYTES * demand.parameters / (ranks if sharded else 1) / card.bandwidth
    examples = isinstance(batch, ExampleBudget)
    of_rank = sum(p.share * batch.n * (p.length if examples else 1) for p in phases) / ranks
    mean = float(np.dot([phase.share for phase in phases], operations))
    # A ring sends 2·(r − 1)/r of the gradients; shards also gather weights in both passes. What the
    # backward pass of the last microbatch hides is not counted.
    sent = FLOAT * demand.parameters * (ranks - 1) / ranks
    micro = math.ceil(max(1.0, of_rank / demand.microbatch))
    total = sent * (1 + 2 * micro) if sharded else 2 * sent
    compute = mean * min(float(demand.microbatch), of_rank) / rate
    link = cards.NETWORK if ranks > cards.MACHINE else card.link
    exchange = max(0.0, total / link - compute * BACKWARD / (1 + BACKWARD))
    update = max(update, LAUNCHES * encoder.steps - mean * of_rank / rate)
    return step_cost.StepSeconds(tuple(per_token), update, exchange)


def measure_step(
    settings: PretrainConfig, device: torch.device, out: Path, progress: Progress = SILENT
) -> step_cost.StepSeconds:
    """Measure a step of the run on this machine, on random tokens. Draws from torch's generator."""
    objective, training, size = settings.objective, settings.training, settings.encoder.vocab
    models = {role: Model(*spec) for role, spec in objective.models(settings.encoder).items()}
    # The special tokens are the first; each token has count 1.
    special = np.arange(size) < 5
    vocabulary = Vocabulary(special, np.zeros_like(special), 4, counts=np.ones(size, np.int64))
    training_module = objective.training_module(models, vocabulary).to(device)
    for model in models.values():
        compute_as(model.encoder, training, device)
    batches = []
    for phase in settings.phases:  # random tokens, with the phase's targets
        draw, length = rng(settings.seed, "plan"), phase.length
        phase_objective, sequences = settings.objective_of(phase), list[Sequence]()
        segments = np.zeros(length, np.int8)
        for _ in range(max(1, min(SAMPLE, settings.microbatch_tokens) // length)):
            ids = draw.integers(5, size, length, dtype=np.int32)
            plain = Sequence(ids, segments, {"pair": LabelTargets(draw.integers(0, 2, 1))})
            sequences.append(phase_objective.prepare(plain, vocabulary, draw))
        batches.append(pack(sequences))
    step = step_cost.measure_updates(training_module, batches, training, progress)
    return step._replace(per_byte=step_cost.seconds_per_byte(out))
