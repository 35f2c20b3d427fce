"""A range test: a short run whose learning rate grows from step to step, to see where it breaks.

Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.3.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bothways.core.errors import ConfigError, DivergedError
from bothways.core.progress import Progress
from bothways.data.corpus import Corpus
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.run import pretrain
from bothways.training.checkpoint import Keep
from bothways.training.optimizers import OptimizerConfig, peak_rate
from bothways.training.run import Event
from bothways.training.schedules import Steps

LOWEST, HIGHEST = 1e-6, 1.0
"""The rates of the first and the last step."""
_SMOOTHING = 0.9
_BROKEN = 1.5
"""Times the lowest smoothed loss at which the test ends."""


@dataclass(frozen=True)
class RateTest:
    """The loss of each step of a run whose rate grows by the same factor from step to step.

    Attributes:
        rates: of the steps, the last one where the loss had risen or was not finite.
        losses: the sum of the objective's losses, each a mean over its targets.
    """

    rates: Sequence[float]
    losses: Sequence[float]

    @property
    def smoothed(self) -> list[float]:
        """The moving average of the losses, Σ 0.9ᵗ⁻ⁱ lᵢ / Σ 0.9ᵗ⁻ⁱ."""
        sums = accumulate(self.losses, lambda total, loss: _SMOOTHING * total + loss)
        weights = accumulate(self.losses, lambda total, _: _SMOOTHING * total + 1, initial=0.0)
        return [total / weight for total, weight in zip(sums, list(weights)[1:], strict=True)]

    @property
    def suggestion(self) -> float:
        """A tenth of the rate with the lowest smoothed loss: the loss still falls there."""
        smoothed = self.smoothed
        return self.rates[smoothed.index(min(smoothed))] / 10

    def __repr__(self) -> str:
        return f"RateTest(suggestion={self.suggestion:.2g}, steps={len(self.rates)})"


class _RisenError(Exception):
    """Ends the test: the loss is far above its lowest value."""


def run_rate_test(
    settings: PretrainConfig,
    corpus: Corpus | Mapping[str, Corpus],
    steps: int,
    device: str,
    progress: Progress,
) -> RateTest:
    """Run the first phase of these settings with growing rates, in memory.

    Raises:
        BothwaysError: as `pretrain`; a loss that is not finite only ends the test.
    """
    optimizer = settings.training.optimizer
    if not isinstance(optimizer, OptimizerConfig):
        message = "is a function, whose rate is not known"
        fix = "Name one, such as adamw, with its settings."
        raise ConfigError(message, where="training.optimizer", fix=fix)
    peak = peak_rate(optimizer)
    factor = (HIGHEST / LOWEST) ** (1 / max(1, steps - 1))
    training = dataclasses.replace(
        settings.training, until=Steps(steps), report=Steps(1), evaluate=None, save=None,
        ema=None, keep=Keep(), early_stopping=None, target=None, trackers=(),
        schedule=lambda share: LOWEST / peak * factor ** round(share * steps),
    )  # fmt: skip
    phases = (dataclasses.replace(settings.phases[0], share=1.0, rate=1.0),)
    settings = dataclasses.replace(
        settings, training=training, phases=phases, evaluation_tokens=1, probes=(),
        word_milestones=(),
    )  # fmt: skip
    rates, losses = list[float](), list[float]()

    def note(event: Event) -> None:
        if event.kind == "report":
            rates.append(event.values["learning_rate"])
            losses.append(sum(v for name, v in event.values.items() if name.startswith("loss/")))
            smoothed = RateTest(rates, losses).smoothed
            if smoothed[-1] > _BROKEN * min(smoothed):
                raise _RisenError

    with contextlib.suppress(DivergedError, _RisenError):
        pretrain(settings, corpus, device=device, progress=progress, on_event=note)
    return RateTest(rates, losses)
