"""What a pre-training run does from its beginning to its end: tokens, updates, evaluations and
checkpoints, and the time of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from typing_extensions import assert_never

from bothways.data.batching import ExampleBudget, TokenBudget, TokenRamp
from bothways.model.flops import BACKWARD
from bothways.pretraining.build import tokens_of_phases
from bothways.pretraining.config import PretrainConfig
from bothways.training.durations import Duration, Epochs, Hours, Steps, Tokens
from bothways.training.preflight.memory import Load

SHORTEST = 1e-6
"""The least share of a length in hours in which a run is taken to train."""


@dataclass(frozen=True)
class StepSeconds:
    """The parts of the time of a run.

    Attributes:
        per_token: of forward and backward pass on one rank, in seconds, in each phase.
        update: of one update, in seconds.
        exchange: of an update, in seconds: what the exchange between ranks adds to it.
        per_byte: of a checkpoint, in seconds; 0 if it is not known.
    """

    per_token: tuple[float, ...]
    update: float
    exchange: float = 0.0
    per_byte: float = 0.0


def _tokens_read(
    settings: PretrainConfig,
    corpus_tokens: float | None,
    per: StepSeconds,
    ranks: int,
    share: float,
) -> list[float]:
    """Return the tokens that the run reads in each phase.

    Args:
        share: of a length in hours, the part in which it trains.
    """
    end = settings.training.end
    if not isinstance(end, Hours):
        phases = tokens_of_phases(settings, corpus_tokens or 0.0)
        assert phases is not None
        return phases
    phases = []
    for phase, seconds in zip(settings.phases, per.per_token, strict=True):
        each, room = seconds / ranks, 3600 * end.count * phase.share * share
        before, low, high = _updates(settings, phases), 0.0, room / each
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            more = _updates(settings, [*phases, middle]) - before
            takes = middle * each + more * (per.update + per.exchange)
            low, high = (middle, high) if takes < room else (low, middle)
        phases.append(high)
    return phases


def _updates(settings: PretrainConfig, phases: list[float]) -> float:
    """Return the updates in which the run reads these tokens in each of its first phases."""
    match settings.batch:
        case TokenRamp() as ramp:
            return ramp.steps(sum(phases))
        case TokenBudget(n):
            return sum(phases) / n
        case ExampleBudget(n):
            pairs = zip(phases, settings.phases, strict=False)
            return sum(tokens / (n * phase.length) for tokens, phase in pairs)
        case _:
            assert_never(settings.batch)


@dataclass(frozen=True)
class Course:
    """What a run does: tokens by phase, updates, checkpoints, and the seconds of each kind of work.

    Attributes:
        meanwhile: the seconds of the evaluations and checkpoints before its end.
    """

    phases: list[float]
    updates: int
    checkpoints: int
    seconds: dict[str, float]
    meanwhile: float

    @property
    def tokens(self) -> float:
        """All tokens."""
        return sum(self.phases)


def course_of(
    settings: PretrainConfig, per: StepSeconds, ranks: int, load: Load, corpus_tokens: float | None
) -> Course:
    """Return the course of a run.

    The clock of a run in hours goes on during evaluations and checkpoints: they take of these hours
    what the others add to the work. Only those at its end come after them.
    """
    end = settings.training.end
    made = _in_share(settings, per, ranks, load, corpus_tokens, 1.0)
    if not isinstance(end, Hours) or not made.meanwhile:
        return made
    low, high = 0.0, 1.0
    while high - low > SHORTEST:
        share = (low + high) / 2
        made = _in_share(settings, per, ranks, load, corpus_tokens, share)
        fits = made.meanwhile <= 3600 * end.count * (1 - share)
        low, high = (share, high) if fits else (low, share)
    return _in_share(settings, per, ranks, load, corpus_tokens, max(low, SHORTEST))


def _in_share(
    settings: PretrainConfig,
    per: StepSeconds,
    ranks: int,
    load: Load,
    corpus_tokens: float | None,
    share: float,
) -> Course:
    training = settings.training
    phases = _tokens_read(settings, corpus_tokens, per, ranks, share)
    updates = math.ceil(_updates(settings, phases) - 1e-6)
    seconds = {
        "training": float(np.dot(phases, per.per_token)) / ranks,
        "updates": updates * per.update,
        "exchange": updates * per.exchange,
    }
    run = _Amounts(sum(phases), updates, sum(seconds.values()), corpus_tokens)
    evaluations = run.times(training.evaluate, training.end)
    longest = max(range(len(phases)), key=lambda n: settings.phases[n].length)
    evaluation = settings.evaluation_tokens * per.per_token[longest] / (1 + BACKWARD) / ranks
    checkpoints = run.times(training.save, training.end)
    if training.keep.best is not None:  # each evaluation is followed by one
        checkpoints = max(checkpoints, evaluations)
    checkpoint = load.saved * per.per_byte
    seconds |= {"evaluation": evaluations * evaluation, "checkpoints": checkpoints * checkpoint}
    before = (evaluations - 1) * evaluation + (checkpoints - 1) * checkpoint
    return Course(phases, updates, checkpoints, seconds, before)


@dataclass(frozen=True)
class _Amounts:
    """How long a run is, in each unit; `corpus_tokens` are those of an epoch, if known."""

    tokens: float
    updates: float
    seconds: float
    corpus_tokens: float | None

    def times(self, every: Duration | None, end: Duration) -> int:
        """Return how often something is done that is done after each duration, and at the end."""
        match every, end:
            case None, _:
                count = 1.0
            case Steps(each), _:
                count = self.updates / each
            case Tokens(each), _:
                count = self.tokens / each
            case Hours(each), Hours(whole):
                count = whole / each
            case Hours(each), _:
                count = self.seconds / 3600 / each
            case Epochs(each), Epochs(whole):
                count = whole / each
            case Epochs(each), _:
                count = self.tokens / (self.corpus_tokens * each) if self.corpus_tokens else 1.0
            case _:
                assert_never(every)
        return max(1, math.ceil(count - 1e-9))
