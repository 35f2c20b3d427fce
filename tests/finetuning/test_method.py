"""What the paper says of each task's settings, where it says more than for all."""

from __future__ import annotations

import pytest

from bothways.finetuning.config import paper_finetuning
from bothways.tasks.catalogue import Trainable
from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.tagging.task import TaggingTask
from bothways.training.durations import Epochs
from bothways.training.optimizers import BertAdam
from bothways.training.schedules import GoogleLinear


@pytest.mark.parametrize(
    ("task", "batch", "rate"),
    [
        (ChoiceTask(), 16, 2e-5),  # section 4.4
        (QuestionAnsweringTask(), 32, 5e-5),  # section 4.2
        (ClassificationTask(), 32, 5e-5),
        (RegressionTask(), 32, 5e-5),
        (TaggingTask(), 32, 5e-5),
    ],
)
def test_batch_and_rate_are_those_that_the_paper_has_for_the_task(
    task: Trainable, batch: int, rate: float
) -> None:
    method = paper_finetuning(task)
    assert (method.batch.n, method.training.optimizer, method.training.until) == (
        batch,
        BertAdam(lr=rate),
        Epochs(3.0),
    )
    assert (method.training.schedule, method.task, method.length) == (
        GoogleLinear(0.1),
        task,
        task.length,
    )
