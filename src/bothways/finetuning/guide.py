"""A guide: another model of vectors, by whose cosines likely positives are no negatives.

It reads each training text once, before training, as a teacher does; its vectors become targets.

Source: Solatorio 2024, "GISTEmbed".
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import Precision
from bothways.finetuning.data import LabelledData
from bothways.prediction.engine import PredictionCounts, predict, prepare_task_model
from bothways.prediction.predictor import open_task_model, unit
from bothways.tasks.sentence_embedding.losses import InBatchSoftmax, TextTargets
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.text_task import EncodedTexts


def guide_of(task: object) -> str | None:
    """Return the folder of the guide that the loss of a task names, if any."""
    loss = task.loss if isinstance(task, SentenceEmbeddingTask) else None
    return loss.guide if isinstance(loss, InBatchSoftmax) else None


def with_guide_vectors(
    data: LabelledData,
    folder: str,
    device: torch.device,
    precision: Precision = "auto",
    progress: Progress = SILENT,
) -> LabelledData:
    """Return the data with the guide's vectors as targets of the training texts.

    Raises:
        ConfigError: the folder holds a model for another task.
        FolderError: the folder cannot be read.
    """
    task_model = open_task_model(folder, "embed", device=str(device))
    if not isinstance(task_model.task, SentenceEmbeddingTask):
        message = f"{folder} is for the task {task_model.task.name}"
        raise ConfigError(message, where="task.loss.guide", fix="Choose a model of vectors.")
    progress.stage("asking the guide", len(data.train))
    counts = PredictionCounts(on_count=progress.advance)
    guide = prepare_task_model(task_model, precision)
    results = predict(guide, data.train_examples, counts=counts)
    train = list[EncodedTexts]()
    for item, (_, prediction) in zip(data.train, results, strict=True):
        assert isinstance(item, EncodedTexts)
        # A text that is read in windows has one vector for all of them.
        rows = np.repeat(unit(prediction.vectors), item.windows, axis=0)[:, None]
        sequences = tuple(
            dataclasses.replace(
                sequence,
                targets={
                    **sequence.targets,
                    "texts": dataclasses.replace(sequence.target("texts", TextTargets), guide=row),
                },
            )
            for sequence, row in zip(item.sequences, rows, strict=True)
        )
        train.append(dataclasses.replace(item, sequences=sequences))
    return dataclasses.replace(data, train=tuple(train))
