"""Distillation in fine-tuning: a student learns the answers of a fine-tuned teacher.

The teacher reads each training sequence once, before training: its dropout is off and the inputs
never change, so its outputs do not either. They become targets of the sequences. During training
there is no teacher, neither in memory nor in checkpoints. A resumed run asks it again.

So does a guide: another model of vectors, by whose cosines likely positives are no negatives
(Solatorio 2024, "GISTEmbed").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

from bothways.core.batch import Batch, ChoiceTargets, Targets
from bothways.core.errors import ConfigError, report_findings
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import Precision
from bothways.core.source import Sequence
from bothways.core.terminal import listed
from bothways.core.training_module import Loss, TrainingModule
from bothways.finetuning.data import LabelledData
from bothways.objectives.distillation import Teacher, check_teacher, soft_divergence
from bothways.prediction import engine
from bothways.prediction.opening import open_task_model
from bothways.prediction.predictor import unit
from bothways.tasks.base import EncodedExample, TaskModel
from bothways.tasks.sentence_embedding.losses import InBatchSoftmax, TextTargets
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.text_task import window_weight

TARGET, SOFT = "teacher", "soft"
"""The names of the targets and of the loss."""
ABSENT = -1e9
"""The score of a place in a table that holds nothing: its probability and gradient are 0."""


@dataclass(frozen=True)
class TeacherTargets(Targets):
    """The teacher's scores `(rows, columns)` of a sequence; NaN carries no weight."""

    scores: NDArray[np.float32] | Tensor

    def without_weight(self) -> TeacherTargets:
        """Return unknown scores."""
        return type(self)(np.full_like(self.scores, np.nan))


class TokenTeacherTargets(TeacherTargets):
    """The same for chosen tokens, of which a sequence without weight has none."""

    def without_weight(self) -> TokenTeacherTargets:
        """Return no scores."""
        return type(self)(self.scores[:0])


class TaughtModule(TrainingModule):
    """A task's task model with the soft loss in addition; parameters have the names that it has."""

    def __init__(self, task_model: TaskModel[Any, Any], teacher: Teacher) -> None:
        super().__init__()
        # The task is not a submodule, so that names and checkpoints are those without a teacher.
        assert task_model.scale is not None
        self._task_model, self.model = (task_model,), task_model.model
        self._scale, self._temperature = task_model.scale, teacher.temperature
        self.coefficients = {task_model.loss_name: 1 - teacher.weight, SOFT: teacher.weight}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the weights of the task, and the number of the teacher's answers."""
        [task_model] = self._task_model
        answers = self._answers(batch, _target(batch))
        return {**task_model.weights(batch), SOFT: float(answers.sum(dtype=torch.float64))}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses of the task, and the soft one."""
        [task_model] = self._task_model
        scores = task_model.scores(batch)
        return {**task_model.losses(scores, batch), SOFT: Loss(self._soft_loss(scores, batch))}

    def _answers(
        self, batch: Batch, target: Float[Tensor, "rows columns"]
    ) -> Float[Tensor, " answers"]:
        """Return the weight of each answer that is compared: a row, a question, or a sequence."""
        scored = ~target[:, 0].isnan()
        match self._scale:
            case "classes":
                return scored * (window_weight(batch) if "weight" in batch.targets else 1.0)
            case "labels" | "number":
                return scored * window_weight(batch) * target.shape[1]
            case "choices":
                counts = torch.as_tensor(batch.target("label", ChoiceTargets).counts)
                # One answer a question: the first of its choices counts for all.
                return scored[counts.cumsum(0) - counts].double()
            case "span":
                return scored[batch.layout.first_tokens].double()
            case _:
                assert_never(self._scale)

    def _soft_loss(self, scores: Tensor, batch: Batch) -> Float[Tensor, ""]:
        """Return Σ over answers of weight · the soft loss; see `Teacher`."""
        target, temperature = _target(batch), self._temperature
        weight = self._answers(batch, target)
        target = target.nan_to_num(0.0).to(torch.promote_types(scores.dtype, torch.float32))
        match self._scale:
            case "classes":
                return soft_divergence(scores, target, weight, temperature)
            case "labels":
                # T² · KL between the probabilities σ(z/T) of each label
                z, t = scores.to(target.dtype) / temperature, target / temperature
                p = t.sigmoid()
                crossed, entropy = (
                    F.binary_cross_entropy_with_logits(x, p, reduction="none") for x in (z, t)
                )
                return ((temperature**2 * (crossed - entropy)).mean(1) * weight).sum()
            case "number":
                return ((scores.to(target.dtype) - target[:, 0]).square() * weight).sum()
            case "choices":
                counts = torch.as_tensor(batch.target("label", ChoiceTargets).counts)
                filled = torch.arange(int(counts.max()), device=scores.device) < counts[:, None]
                logits, target_logits = (
                    values.new_full(filled.shape, ABSENT).masked_scatter(filled, values)
                    for values in (scores, target[:, 0])
                )
                return soft_divergence(logits, target_logits, weight, temperature)
            case "span":
                layout = batch.layout
                # a row for the starts and one for the ends of each sequence
                logits, target_logits = (
                    x.new_full((layout.sequences, layout.max_seqlen, 2), ABSENT)
                    .index_put((layout.sequence_ids, layout.positions), x)
                    .transpose(1, 2)
                    .flatten(0, 1)
                    for x in (scores, target)
                )
                weights = weight.repeat_interleave(2) / 2  # the mean of start and end
                return soft_divergence(logits, target_logits, weights, temperature)
            case _:
                assert_never(self._scale)

    def train(self, mode: bool = True) -> TaughtModule:
        """Set the mode, of the task too."""
        self._task_model[0].train(mode)
        return super().train(mode)


def _target(batch: Batch) -> Float[Tensor, "rows columns"]:
    return torch.as_tensor(batch.target(TARGET, TeacherTargets).scores)


def with_teacher_scores(
    data: LabelledData,
    teacher: Teacher,
    device: torch.device,
    precision: Precision,
    progress: Progress = SILENT,
) -> LabelledData:
    """Return the data with the teacher's scores as targets of the training sequences.

    Raises:
        ConfigError: the teacher has another vocabulary, other labels, too few positions, or the
            task has none to learn from.
        FolderError: the teacher cannot be read, or is for another task.
    """
    task_model = open_task_model(teacher.folder, data.task.name, device=str(device))
    if task_model.scale is None:
        message = f"models for {data.task.name} are not taught by another one"
        raise ConfigError(message, where="teacher", fix="Leave the teacher out.")
    where, length = "teacher.folder", ("length", data.length)
    fix = "Both read the same ids: choose a student with the teacher's vocabulary."
    report_findings(check_teacher(teacher.folder, data.tokenizer, length, where, fix))
    columns: list[int] | slice = slice(None)
    if task_model.scale in ("classes", "labels"):
        if {*data.labels} != {*task_model.labels}:
            teacher_labels, data_labels = listed(task_model.labels, 5), listed(data.labels, 5)
            message = f"{teacher.folder} has the labels {teacher_labels}, the data {data_labels}"
            fix = "Choose a teacher that was trained with the labels of this data."
            raise ConfigError(message, where=where, fix=fix)
        # The teacher may list the same labels in another order.
        columns = [task_model.labels.index(label) for label in data.labels]
    model = engine.prepare_task_model(task_model, precision)
    count, examples = len(data.sequences), []
    progress.stage("asking the teacher", count)
    outputs = engine.predict_sequences(
        model, data.sequences, on_share=lambda share: progress.advance(share * count)
    )
    # Choices are the sequences of a question: a row for each.
    is_column = task_model.scale == "choices"
    scores = (x.T if is_column else x for x in map(np.atleast_2d, outputs))
    for example in (*data.train, *data.unlabelled):
        sequences = []
        for sequence in example.sequences:
            cls = TokenTeacherTargets if "tag" in sequence.targets else TeacherTargets
            targets = {**sequence.targets, TARGET: cls(next(scores)[:, columns])}
            sequences.append(dataclasses.replace(sequence, targets=targets))
        examples.append(dataclasses.replace(example, sequences=tuple(sequences)))
    train, unlabelled = examples[: len(data.train)], examples[len(data.train) :]
    return dataclasses.replace(data, train=tuple(train), unlabelled=tuple(unlabelled))


def guide_of(task: object) -> str | None:
    """Return the folder of the guide that the loss of a task names, if any."""
    loss = task.loss if isinstance(task, SentenceEmbeddingTask) else None
    return loss.guide if isinstance(loss, InBatchSoftmax) else None


def with_guide_vectors(
    data: LabelledData,
    folder: str,
    device: torch.device,
    precision: Precision,
    progress: Progress = SILENT,
) -> LabelledData:
    """Return the data with the guide's vectors as targets of the training texts.

    Raises:
        FolderError: the folder cannot be read.
    """
    task_model = open_task_model(folder, "embed", device=str(device))
    progress.stage("asking the guide", len(data.train))
    counts = engine.PredictionCounts(on_count=progress.advance)
    guide = engine.prepare_task_model(task_model, precision)
    results = engine.predict(guide, data.train_examples, counts=counts)
    train = list[EncodedExample]()
    for item, (_, prediction) in zip(data.train, results, strict=True):
        # A text that is read in windows has one vector for all of them.
        rows = np.repeat(unit(prediction.vectors), item.windows, axis=0)[:, None]
        sequences = list[Sequence]()
        for sequence, row in zip(item.sequences, rows, strict=True):
            texts = dataclasses.replace(sequence.target("texts", TextTargets), guide=row)
            targets = {**sequence.targets, "texts": texts}
            sequences.append(dataclasses.replace(sequence, targets=targets))
        train.append(dataclasses.replace(item, sequences=tuple(sequences)))
    return dataclasses.replace(data, train=tuple(train))
