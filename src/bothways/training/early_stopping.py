"""Early stopping: a run ends when so many evaluations in a row have brought nothing better.

What is counted goes into the checkpoints' metrics, so that a resumed run ends where an unbroken one does.

Source: Prechelt, Early stopping – but when? (1998): the number of evaluations without progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from bothways.core.progress import OnShare
from bothways.training.checkpoint import Best

BEST, WAITED = "early_stopping/best", "early_stopping/waited"
Metrics = Mapping[str, int | float]
"""What an evaluation finds, by name, such as "held-out/loss/masked"."""
Evaluation = Callable[[OnShare], Metrics]
"""Finds the metrics of a learner as it is, and tells meanwhile how far it is."""


class EarlyStopping:
    """Evaluations since the best one.

    Args:
        patience: how many of them end the run; none for any number.
        best: the metric that is watched; none where there is no patience.
    """

    def __init__(self, patience: int | None, best: Best | None) -> None:
        self._patience, self._best = patience, best
        self._value = math.nan
        self._waited = 0

    @property
    def over(self) -> bool:
        """Whether patience is at its end."""
        return self._patience is not None and self._waited >= self._patience

    def note(self, value: float) -> None:
        """Count an evaluation with this value of the metric. A value that is no number is not better."""
        assert self._best is not None
        if self._best.prefers(value, self._value):
            self._value, self._waited = value, 0
        else:
            self._waited += 1

    def watched(self, evaluation: Evaluation) -> Evaluation:
        """The same evaluation, with its value counted."""
        if self._patience is None or self._best is None:
            return evaluation
        metric = self._best.metric

        def evaluate(on_share: OnShare) -> Metrics:
            """Evaluate, and count it."""
            metrics = evaluation(on_share)
            if metric in metrics:  # the caller refuses the others
                self.note(metrics[metric])
            return metrics

        return evaluate

    def state(self) -> dict[str, int | float]:
        """What a checkpoint keeps."""
        if self._patience is None:
            return {}
        return {WAITED: self._waited} | ({} if math.isnan(self._value) else {BEST: self._value})

    def restore(self, state: Metrics) -> dict[str, int | float]:
        """Go on from what a checkpoint kept; what else it kept."""
        self._value, self._waited = state.get(BEST, math.nan), int(state.get(WAITED, 0))
        return {name: value for name, value in state.items() if name not in {BEST, WAITED}}
