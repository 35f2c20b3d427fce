"""What the paper says of each task's settings, where it says more than for all."""

from __future__ import annotations

import pytest

from bothways.recipes.method import paper
from bothways.tasks.answer import Answering
from bothways.tasks.catalogue import Trainable
from bothways.tasks.choice import MultipleChoice
from bothways.tasks.classify import Classification
from bothways.tasks.regress import Regression
from bothways.tasks.tag import Tagging
from bothways.training.optim import BertAdam
from bothways.training.schedule import GoogleLinear
from bothways.training.state import Epochs


@pytest.mark.parametrize(
    ("task", "batch", "rate"),
    [
        (MultipleChoice(), 16, 2e-5),  # section 4.4
        (Answering(), 32, 5e-5),  # section 4.2
        (Classification(), 32, 5e-5),
        (Regression(), 32, 5e-5),
        (Tagging(), 32, 5e-5),
    ],
)
def test_batch_and_rate_are_those_that_the_paper_has_for_the_task(task: Trainable, batch: int, rate: float) -> None:
    method = paper(task)
    assert (method.batch.n, method.training.optimiser, method.training.until) == (batch, BertAdam(lr=rate), Epochs(3.0))
    assert (method.training.schedule, method.task, method.length) == (GoogleLinear(0.1), task, task.length)
