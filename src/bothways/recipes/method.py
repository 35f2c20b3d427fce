"""How a model is fine-tuned, as one value; what is usual today, and what the paper did.

Source: Devlin et al. 2018, sections 4 and 5.3, appendix A.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from bothways.core.errors import ConfigError
from bothways.core.ranges import check_least, check_rates
from bothways.data.packing import Examples, Tokens
from bothways.recipes.stability import Stability
from bothways.tasks.catalogue import Trainable
from bothways.tasks.classify import Classification
from bothways.tasks.task import SHORTEST
from bothways.training.checkpoint import Keep
from bothways.training.optim import AdamW, BertAdam
from bothways.training.run import Training
from bothways.training.schedule import GoogleLinear, Linear
from bothways.training.state import Epochs


def adam() -> Training:
    """Three epochs of AdamW at 5e-5 with a tenth of warm-up: the paper's grid, with the bias correction that its code lacks.

    That the correction makes fine-tuning on small sets stable is from Zhang et al. 2020 and Mosbach et al. 2020.
    """
    return Training(until=Epochs(3.0), optimiser=AdamW(lr=5e-5), schedule=Linear(0.1), evaluate=Epochs(1.0), keep=Keep(1))


@dataclass(frozen=True)
class Method:
    """How a model is fine-tuned.

    Attributes:
        training: the optimiser, its schedule, the length of the run, and how often the dev data is scored.
        length: the longest sequence in tokens, specials included; what is longer is cut.
        batch: sequences or tokens per update.
        microbatch_tokens: the most tokens in memory at once; changes neither data nor update.
        metric: of the dev data, by which the best weights are chosen; none means the task's usual one.
        dropout: on the vectors that the new head reads; none means the encoder's.
        stability: what keeps the run near its start, or frees it of what is bad in it.
        task: what for.
    """

    training: Training = field(default_factory=adam)
    length: int = 128
    batch: Examples | Tokens = Examples(32)
    microbatch_tokens: int = 8192
    metric: str | None = None
    dropout: float | None = None
    stability: Stability = Stability()
    task: Trainable = Classification()

    def __post_init__(self) -> None:
        if self.length < SHORTEST:
            what = f"must be at least {SHORTEST} ([CLS], a token, [SEP], a token, [SEP]), not {self.length}"
            raise ConfigError(what, where="length")
        check_least(1, microbatch_tokens=self.microbatch_tokens)
        if self.training.keep.best is not None:
            what = "which checkpoint is the best is decided by metric"
            raise ConfigError(what, where="training.keep.best", fix="Set metric instead, such as metric=mcc.")
        check_rates(dropout=self.dropout)

    @property
    def chosen_by(self) -> str:
        """The metric by which the best weights are chosen."""
        return self.metric or self.task.metric


def modern(task: Trainable) -> Method:
    """What one would do today: AdamW, three epochs, a tenth of warm-up."""
    return Method(adam(), task.length, task=task)


def paper(task: Trainable) -> Method:
    """Devlin et al. 2018 (sections 4 and 5.3, appendix A.3), with the optimiser and the schedule of google-research/bert."""
    epochs, rate, batch = PAPER.get(task.name, (3.0, 5e-5, 32))
    training = dataclasses.replace(adam(), until=Epochs(epochs), optimiser=BertAdam(lr=rate), schedule=GoogleLinear(0.1))
    return Method(training, task.length, Examples(batch), task=task)


PAPER: dict[str, tuple[float, float, int]] = {"choice": (3.0, 2e-5, 16)}
"""Epochs, learning rate and batch of the tasks for which the paper says others than 3, 5e-5 and 32."""

RECIPES: dict[str, Callable[[Trainable], Method]] = {"modern": modern, "paper": paper}

USUAL = Method()
"""Three epochs of classification, as one would do it today."""
