"""Early stopping: a run ends after a number of evaluations in a row without improvement.

The count is kept in the metrics of checkpoints: a resumed run ends where an unbroken one does.

Source: Prechelt, Early stopping – but when? (1998): the number of evaluations without progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from bothways.core.progress import Progress
from bothways.training.checkpoint import Best

BEST, WAITED = "early_stopping/best", "early_stopping/waited"
Metrics = Mapping[str, int | float]
"""Results of an evaluation by name, such as "held-out/loss/masked"."""
Evaluation = Callable[[Progress], Metrics]
"""Returns the metrics of a learner as it is, and reports its progress."""


class EarlyStopping:
    """Counts the evaluations since the best one.

    Args:
        patience: the count that ends the run; None for no limit.
        best: the metric; None without patience.
    """

    def __init__(self, patience: int | None, best: Best | None) -> None:
        self._patience, self._best = patience, best
        self._value = math.nan
        self._waited = 0

    @property
    def over(self) -> bool:
        """True if the run must end."""
        return self._patience is not None and self._waited >= self._patience

    def note(self, value: float) -> None:
        """Count an evaluation with this value of the metric; NaN is no improvement."""
        assert self._best is not None
        if self._best.prefers(value, self._value):
            self._value, self._waited = value, 0
        else:
            self._waited += 1

    def watched(self, evaluation: Evaluation) -> Evaluation:
        """Return an evaluation that also counts."""
        if self._patience is None or self._best is None:
            return evaluation
        metric = self._best.metric

        def evaluate(progress: Progress) -> Metrics:
            """Evaluate and count."""
            metrics = evaluation(progress)
            if metric in metrics:  # the caller refuses the others
                self.note(metrics[metric])
            return metrics

        return evaluate

    def state(self) -> dict[str, int | float]:
        """Return the state that a checkpoint keeps."""
        if self._patience is None:
            return {}
        return {WAITED: self._waited} | ({} if math.isnan(self._value) else {BEST: self._value})

    def restore(self, state: Metrics) -> dict[str, int | float]:
        """Restore the state from a checkpoint's metrics, and return the other metrics."""
        self._value, self._waited = state.get(BEST, math.nan), int(state.get(WAITED, 0))
        return {name: value for name, value in state.items() if name not in {BEST, WAITED}}
