"""What the tasks with one number for each text share: regression and reranking."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.targets import LabelTargets
from bothways.tasks.base import E, Output, P, Scale, TaskLearner
from bothways.tasks.text_encoding import window_weight


class NumberLearner(TaskLearner[E, P]):
    """A task with a model whose head "labels" has one output. Subclasses define `losses`."""

    scale: ClassVar[Scale | None] = "number"

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of texts with a label; the windows of a text count as one."""
        known = ~targets_of(batch).isnan()
        return {"label": float(window_weight(batch)[known].sum(dtype=torch.float64))}

    def scores(self, batch: Batch) -> Float[Tensor, " sequences"]:
        """Return one number for each sequence."""
        result: Tensor = self.model.read("labels", batch)
        return result[:, 0]

    def outputs(self, batch: Batch) -> list[Output]:
        """Return the number of each sequence `(1)`."""
        return list(self.scores(batch).float().cpu().numpy()[:, None])


def targets_of(batch: Batch) -> Float[Tensor, " sequences"]:
    """Return the label of each sequence; NaN where there is none."""
    return torch.as_tensor(batch.target("label", LabelTargets).labels)
