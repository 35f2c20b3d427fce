"""Distillation in fine-tuning: a student learns the layers and the answers of a fine-tuned teacher.

The teacher reads each training sequence once, before training: its dropout is off and the inputs
never change, so its outputs do not either. They become targets of the sequences. During training
there is no teacher, neither in memory nor in checkpoints. In a run folder they are kept in a file
that a resumed run reads. The stage of the layers (`learn_layers`) comes first, and has the teacher
in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float, Float32
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

from bothways.core.atomic_files import make_folder, replace_file
from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.finding import places
from bothways.core.loss import Loss
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.runtime.devices import Precision, device_of
from bothways.core.runtime.tuning import TUNING
from bothways.core.sequence import Sequence
from bothways.core.targets import ChoiceTargets, Targets, TokenTargets
from bothways.core.training_module import TrainingModule
from bothways.data.list_source import ListSource
from bothways.data.loader import Loader, Share, ahead, in_batches, unchanged
from bothways.finetuning.config import RECIPES, FinetuneConfig, tinybert_finetuning
from bothways.finetuning.data import LabelledData
from bothways.finetuning.teacher import LayerStage, Teacher, objective_of
from bothways.hub.provenance import digest_of_model
from bothways.model.model import Model
from bothways.objectives.distillation import Distillation, DistillationModule, TokenWeights
from bothways.objectives.distillation_losses import soft_divergence
from bothways.prediction.engine import prepare_task_model
from bothways.prediction.predictor import open_task_model
from bothways.tasks.base import EncodedExample, Scale, TaskModel
from bothways.tasks.catalogue import Trainable
from bothways.tasks.text_encoding import window_weight
from bothways.training.parallel import Plan, is_main, plan_here
from bothways.training.run import TrainingPhase, TrainingRun
from bothways.training.state import RunState
from bothways.training.store import Store

STAGE = "layers"
"""The folder of the first stage, in that of the run and in that of its copies."""
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
    """A task's task model with the soft loss in addition; parameters have the names that it has.

    Args:
        task: the task model of the student.
        teacher: the weight and the temperature; the scores are in the batches.
    """

    def __init__(self, task_model: TaskModel[Any, Any], teacher: Teacher) -> None:
        super().__init__()
        # The task is not a submodule, so that names and checkpoints are those without a teacher.
        assert task_model.scale is not None
        self._task_model, self.model, self._scale = (
            (task_model,),
            task_model.model,
            task_model.scale,
        )
        self._temperature = teacher.temperature
        self.coefficients = {task_model.loss_name: 1 - teacher.weight, SOFT: teacher.weight}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the weights of the task, and the number of the teacher's answers."""
        [task_model] = self._task_model
        answers = _answers(self._scale, batch, _target(batch))
        return {**task_model.weights(batch), SOFT: float(answers.sum(dtype=torch.float64))}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses of the task, and the soft one."""
        [task_model] = self._task_model
        scores, target = task_model.scores(batch), _target(batch)
        weight = _answers(self._scale, batch, target)
        total = soft_loss(
            self._scale, scores, target.nan_to_num(0.0), weight, batch, self._temperature
        )
        return {**task_model.losses(scores, batch), SOFT: Loss(total)}

    def train(self, mode: bool = True) -> TaughtModule:
        """Set the mode, of the task too."""
        self._task_model[0].train(mode)
        return super().train(mode)


def _target(batch: Batch) -> Float[Tensor, "rows columns"]:
    return torch.as_tensor(batch.target(TARGET, TeacherTargets).scores)


def _answers(
    scale: Scale, batch: Batch, target: Float[Tensor, "rows columns"]
) -> Float[Tensor, " answers"]:
    """Return the weight of each answer that is compared: a row, a question, or a sequence."""
    scored = ~target[:, 0].isnan()
    match scale:
        case "classes":
            return scored * (window_weight(batch) if "weight" in batch.targets else 1.0)
        case "labels" | "number":
            return scored * window_weight(batch) * target.shape[1]
        case "choices":
            counts = torch.as_tensor(batch.target("label", ChoiceTargets).counts)
            return scored[counts.cumsum(0) - counts].double()
        case "span":
            return scored[batch.layout.first_tokens].double()
        case _:
            assert_never(scale)


def soft_loss(
    scale: Scale,
    scores: Tensor,
    target: Float[Tensor, "rows columns"],
    weight: Float[Tensor, " answers"],
    batch: Batch,
    temperature: float,
) -> Float[Tensor, ""]:
    """Return Σ over answers of weight · the soft loss; see `Teacher`.

    Args:
        scores: scores of the student, as `TaskModel.scores` returns them.
        target: scores of the teacher, a row for each of the student's.
    """
    target = target.to(torch.promote_types(scores.dtype, torch.float32))
    match scale:
        case "classes":
            return soft_divergence(scores, target, weight, temperature)
        case "labels":
            weights = _binary_divergence(scores.to(target.dtype), target, temperature)
            return (weights.mean(1) * weight).sum()
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
            logits, target_logits = (_by_sequence(batch, values) for values in (scores, target))
            weights = weight.repeat_interleave(2) / 2  # the mean of start and end
            return soft_divergence(logits, target_logits, weights, temperature)
        case _:
            assert_never(scale)


def _binary_divergence(
    scores: Float[Tensor, "rows labels"], target: Float[Tensor, "rows labels"], temperature: float
) -> Float[Tensor, "rows labels"]:
    """Return T² · KL between the probabilities σ(z/T) of each label."""
    z, t = scores / temperature, target / temperature
    p = t.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(t, p, reduction="none")
    return temperature**2 * (F.binary_cross_entropy_with_logits(z, p, reduction="none") - entropy)


def _by_sequence(batch: Batch, x: Float[Tensor, "tokens 2"]) -> Float[Tensor, "both longest"]:
    """Return a row for the starts and one for the ends of each sequence."""
    layout = batch.layout
    table = x.new_full((layout.sequences, layout.max_seqlen, 2), ABSENT)
    table = table.index_put((layout.sequence_ids, layout.positions), x)
    return table.transpose(1, 2).flatten(0, 1)


def with_teacher_scores(
    data: LabelledData,
    teacher: Teacher,
    device: torch.device,
    precision: Precision = "auto",
    folder: Path | None = None,
    progress: Progress = SILENT,
) -> LabelledData:
    """Return the data with the teacher's scores as targets of the training sequences.

    Args:
        folder: folder of the run, where they are kept; None to keep them in memory alone.

    Raises:
        ConfigError: the teacher has another vocabulary, other labels, too few positions, or the
            task has none to learn from.
        FolderError: the teacher cannot be read, or is for another task.
    """
    location = "teacher.folder"
    task_model = open_task_model(teacher.folder, data.task.name, device=str(device))
    if task_model.scale is None:
        message = f"models for {data.task.name} are not taught by another one"
        raise ConfigError(message, where="teacher", fix="Leave the teacher out.")
    if difference := task_model.tokenizer.difference(data.tokenizer):
        message = f"{teacher.folder} has another vocabulary than the student: {difference}"
        fix = "Both read the same ids: choose a student with the teacher's vocabulary."
        raise ConfigError(message, where=location, fix=fix)
    if (positions := task_model.model.config.max_positions) < data.length:
        message = f"{teacher.folder} reads {positions} tokens, and the run has {data.length}"
        raise ConfigError(message, where=location, fix=f"Set length={positions}.")
    columns = _columns(task_model, data.labels, teacher.folder)
    sequences = data.sequences
    cache = None if folder is None else folder / f"teacher-{_key(sequences, teacher.folder)}.npy"
    if cache is not None and cache.is_file():
        scores = np.load(cache)
    else:
        scores = _scores(prepare_task_model(task_model, precision), sequences, device, progress)
        if cache is not None and is_main(plan_here()):
            make_folder(cache.parent)
            with io.BytesIO() as file:
                np.save(file, scores)
                content = file.getvalue()
            replace_file(cache, lambda path: path.write_bytes(content))
    return _with_targets(data, scores[:, columns], _rows(sequences, task_model.scale))


def _columns(task_model: TaskModel[Any, Any], labels: Many[str], folder: str) -> list[int] | slice:
    """Return the teacher's outputs for the student's labels, in their order."""
    if task_model.scale not in ("classes", "labels"):
        return slice(None)
    if {*labels} != {*task_model.labels}:
        teacher_labels, data_labels = places(task_model.labels), places(tuple(labels))
        message = f"{folder} has the labels {teacher_labels}, and the data {data_labels}"
        fix = "Choose a teacher that was trained with the labels of this data."
        raise ConfigError(message, where="teacher.folder", fix=fix)
    return [task_model.labels.index(label) for label in labels]


def _key(sequences: Many[Sequence], folder: str) -> str:
    """Return a name for the scores of a model on sequences."""
    result = hashlib.sha256(digest_of_model(folder).encode())
    for sequence in sequences:
        result.update(sequence.ids.tobytes() + sequence.segments.tobytes() + b"\n")
    return result.hexdigest()[:16]


def _scores(
    task_model: TaskModel[Any, Any],
    sequences: Many[Sequence],
    device: torch.device,
    progress: Progress,
) -> Float32[np.ndarray, "rows columns"]:
    """Return the scores of all sequences, one after the other."""
    scores_by_index: dict[int, NDArray[np.float32]] = {}
    max_tokens = TUNING.predict_tokens_cuda if device.type == "cuda" else TUNING.predict_tokens_cpu
    progress.stage("asking the teacher", len(sequences))
    model: Any = task_model.model
    dtype = model.autocast_dtype
    with torch.inference_mode():
        for at, batch in in_batches(sequences, max_tokens, device):
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                outputs = task_model.outputs(batch)
            scores_by_index.update(zip(at, map(np.atleast_2d, outputs), strict=True))
            progress.advance(len(scores_by_index))
    if task_model.scale == "choices":
        scores_by_index = {at: scores.T for at, scores in scores_by_index.items()}
    return np.concatenate([scores_by_index[at] for at in range(len(sequences))])


def _rows(sequences: Many[Sequence], scale: Scale) -> list[int]:
    """Return the number of rows that a teacher's scores have for each sequence."""
    match scale:
        case "labels" | "number":
            return [1] * len(sequences)
        case "classes":
            # Tags have a row for each word.
            tags = [sequence.targets.get("tag") for sequence in sequences]
            return [len(tag.index) if isinstance(tag, TokenTargets) else 1 for tag in tags]
        case "choices":
            return [len(sequence.parts) for sequence in sequences]
        case "span":
            return [len(sequence) for sequence in sequences]
        case _:
            assert_never(scale)


def _with_targets(data: LabelledData, scores: NDArray[np.float32], rows: Many[int]) -> LabelledData:
    """Return the data with its part of the scores in each sequence."""
    rows_of_scores = iter(np.split(scores.astype(np.float32), np.cumsum(rows)[:-1]))

    def add(item: EncodedExample) -> EncodedExample:
        """Return an example with targets in its sequences."""
        return dataclasses.replace(item, sequences=tuple(map(with_scores, item.sequences)))

    def with_scores(sequence: Sequence) -> Sequence:
        """Return a sequence with its scores."""
        cls = TokenTeacherTargets if "tag" in sequence.targets else TeacherTargets
        targets = {**sequence.targets, TARGET: cls(next(rows_of_scores))}
        return dataclasses.replace(sequence, targets=targets)

    train, unlabelled = tuple(map(add, data.train)), tuple(map(add, data.unlabelled))
    return dataclasses.replace(data, train=train, unlabelled=unlabelled)


def layer_module(student: Model, teacher: Model, objective: Distillation) -> DistillationModule:
    """Return the module to train: the student's encoder, without heads."""
    bare, frozen = (Model(model.config, (), model.encoder) for model in (student, teacher))
    return DistillationModule(bare, frozen, objective)


def with_token_weights(sequence: Sequence) -> Sequence:
    """Return a sequence whose only target is the weight of its tokens."""
    weights = TokenWeights(np.ones(len(sequence), dtype=np.float32))
    return dataclasses.replace(sequence, targets={"weights": weights})


def learn_layers(
    student: Model,
    data: LabelledData,
    settings: FinetuneConfig,
    store: Store,
    *,
    plan: Plan,
    progress: Progress = SILENT,
) -> RunState:
    """Train the student's encoder in place, from the store's newest checkpoint; return the state.

    Args:
        student: on its device.
        data: the training sequences, those without labels too.
        settings: settings of the run, with a teacher and a stage.
        store: checkpoints of this stage alone.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: a loss does not fit the two encoders.
    """
    assert settings.teacher is not None
    assert settings.stage is not None
    device, seed, stage = device_of(student), settings.ordered_by, settings.stage
    objective = objective_of(stage, settings.teacher.folder, student.config)
    teacher = open_task_model(settings.teacher.folder, data.task.name, device=str(device)).model
    torch.manual_seed(seed)  # of the map between widths
    training_module = layer_module(student, teacher, objective).to(device)
    source = ListSource([with_token_weights(sequence) for sequence in data.sequences], seed)
    share = Share(plan.rank, plan.world)
    steps = Loader(source, unchanged, settings.batch, settings.microbatch_tokens, seed, share)
    torch.manual_seed(seed + 1 + plan.rank)
    note = f"note: first the teacher's layers, {stage.training.end}; forecasts are of what follows"
    progress.message(note)
    return TrainingRun(
        training_module,
        [TrainingPhase(stage.training.end, lambda at: ahead(steps.steps(at.cursor), device))],
        stage.training,
        plan,
        store,
        progress=Part(progress, "layers"),
    ).train()


def taught_finetuning(
    teacher: str,
    train: str,
    student: str | None,
    recipe: str | None = None,
    dev: str | None = None,
) -> FinetuneConfig:
    """Return the settings of a run in which a student learns the task of its teacher.

    Args:
        teacher: a fine-tuned model: a folder, the folder of a run, or a Hub id.
        train, dev: as in `FinetuneConfig`.
        student: a model folder, the folder of a pre-training run, or a Hub id.
        recipe: "modern", "paper" or "tinybert"; None for the first. The last has two stages: the
            teacher's layers, then its answers without the labels.

    Raises:
        ConfigError: no student, an unknown recipe, or the teacher was not fine-tuned for a task.
        FolderError: the teacher cannot be read.
    """
    if student is None:
        message = "is missing: labelled data needs a pre-trained student"
        fix = "Name one with the teacher's vocabulary, or give a corpus folder to pre-train one."
        raise ConfigError(message, where="student", fix=fix)
    recipes = {**RECIPES, "tinybert": tinybert_finetuning}
    if recipe is not None and recipe not in recipes:
        message = f"{recipe!r} is for a corpus, and the data is labelled"
        raise ConfigError(message, where="recipe", fix=f"Choose one of {', '.join(recipes)}.")
    task = open_task_model(teacher).task
    if not isinstance(task, get_args(Trainable)):
        message = f"{teacher} is for the task {task.name!r}, which needs no labels"
        fix = "Choose a fine-tuned teacher, or give a corpus folder instead of labelled data."
        raise ConfigError(message, where="teacher", fix=fix)
    settings, taught_by = recipes[recipe or "modern"](type(task)()), Teacher(teacher)
    if recipe == "tinybert":
        taught_by = Teacher(teacher, weight=1.0, temperature=1.0, stage=LayerStage())
    return dataclasses.replace(settings, model=student, train=train, dev=dev, teacher=taught_by)
