"""A first stage of fine-tuning: the student learns the layers of its teacher on the task's texts.

It is the first half of TinyBERT's distillation for a task; the second half learns the teacher's
answers (`teacher.Teacher`). The labels are not read, and only the encoder is trained.

Source: Jiao et al. 2019, section 3.2; huawei-noah/Pretrained-Language-Model, task_distill.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.runtime.devices import device_of
from bothways.core.sequence import Sequence
from bothways.data.list_source import ListSource, Shuffled
from bothways.data.loader import Loader, Share, ahead, unchanged
from bothways.finetuning.config import FinetuneSettings
from bothways.finetuning.data import LabelledData
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.objectives.distillation import Distillation
from bothways.objectives.distillation_module import DistillationModule
from bothways.objectives.distillation_values import (
    AttentionScores,
    CosineStates,
    Counted,
    HiddenStates,
    Relations,
)
from bothways.prediction.predictor import open_learner
from bothways.training.checkpoint import Keep
from bothways.training.durations import Epochs
from bothways.training.optimizers import BertAdam
from bothways.training.parallel import Plan
from bothways.training.run import Training, TrainingPhase, TrainingRun
from bothways.training.schedules import Constant
from bothways.training.state import RunState
from bothways.training.store import Store

WHERE = "teacher.stage"
STAGE = "layers"
"""The folder of the stage, in that of the run and in that of its copies."""


def _training() -> Training:
    """Return ten epochs at a constant 5e-5."""
    return Training(Epochs(10.0), BertAdam(lr=5e-5), Constant())


@dataclass(frozen=True)
class LayerStage:
    """What the student learns of the teacher's layers, before it learns the task.

    Attributes:
        losses: between the two encoders, each kind at most once.
        layers: for `HiddenStates` and `AttentionScores`, the teacher's layer, from 1, for each of
            the student's; None spreads them evenly, the last for the last.
        training: its length and optimizer. The default is that of TinyBERT's code; its batch is
            that of the run, and so are `recompute` and `compiled`. Copies of its checkpoints are
            in the folder "layers" of those of the run, unless `keep.remote` names another place.
    """

    losses: tuple[CosineStates | HiddenStates | AttentionScores | Relations, ...] = (
        HiddenStates(),
        AttentionScores(),
    )
    layers: tuple[int, ...] | None = None
    training: Training = field(default_factory=_training, metadata={"fixed": ("until",)})
    kind: Literal["layers"] = "layers"

    def __post_init__(self) -> None:
        _at_stage(lambda: Distillation("teacher", self.losses, self.layers, masking=None))
        _ = self.training.end  # refuses "auto"
        _check_training(self.training)


def _check_training(training: Training) -> None:
    """Raise ConfigError for settings that do nothing in this stage."""
    names = ("evaluate", "early_stopping", "target")
    evaluated = {name: getattr(training, name) for name in names}
    for name, value in (evaluated | {"keep.best": training.keep.best}).items():
        if value is not None:
            what = "is about evaluations, and this stage has none"
            raise ConfigError(what, where=f"{WHERE}.training.{name}", fix="Leave it out.")
    for name in ("recompute", "compiled"):
        if getattr(training, name):
            what, fix = "is the same in both stages", f"Set training.{name} instead."
            raise ConfigError(what, where=f"{WHERE}.training.{name}", fix=fix)


def _at_stage(make: Any) -> Any:
    """Return what `make` does; its errors name the settings of the stage."""
    try:
        return make()
    except ConfigError as error:
        where = str(error.where or WHERE).replace("objective", WHERE)
        fix = (error.fix or "").replace("objective", WHERE)
        raise ConfigError(error.what, where=where, fix=fix or None) from error


def objective_of(stage: LayerStage, teacher: str, student: EncoderConfig) -> Distillation:
    """Return the objective of the stage, for a student that it fits.

    Raises:
        ConfigError: a loss does not fit the two encoders.
        FolderError: the teacher cannot be read.
    """
    objective = Distillation(teacher, stage.losses, stage.layers, masking=None)
    _at_stage(lambda: objective.models(student))
    return objective


def layer_learner(student: Model, teacher: Model, objective: Distillation) -> DistillationModule:
    """Return what is trained: the student's encoder, without heads."""
    ours, theirs = (Model(each.config, (), each.encoder) for each in (student, teacher))
    return DistillationModule(ours, theirs, objective)


def with_token_weights(sequence: Sequence) -> Sequence:
    """Return a sequence whose only target is the weight of its tokens."""
    weight = np.ones(len(sequence), dtype=np.float32)
    return dataclasses.replace(sequence, targets={"counted": Counted(weight)})


def _kept_with(training: Training, run: Keep) -> Training:
    """Return the training of the stage, with a copy of its checkpoints where the run has one."""
    keep = training.keep
    if keep.remote is None and run.remote is not None:
        keep = dataclasses.replace(keep, remote=f"{run.remote.rstrip('/')}/{STAGE}")
    return dataclasses.replace(training, keep=keep)


def learn_layers(  # noqa: PLR0913 – one independent value per question that a run answers
    student: Model,
    data: LabelledData,
    method: FinetuneSettings,
    stage: LayerStage,
    teacher: str,
    store: Store,
    *,
    plan: Plan,
    seed: int,
    progress: Progress = SILENT,
) -> RunState:
    """Train the student's encoder in place, from the store's newest checkpoint; return the state.

    Args:
        student: on its device.
        data: of which the training sequences are read, those without labels too.
        teacher: a folder of a model for the same task.
        store: of this stage alone.
        seed: of the order of the data and of the map between widths.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: a loss does not fit the two encoders.
    """
    device = device_of(student)
    objective = objective_of(stage, teacher, student.config)
    other = open_learner(teacher, data.task.name, device=str(device)).model
    torch.manual_seed(seed)
    learner = layer_learner(student, other, objective).to(device)
    source = ListSource([with_token_weights(each) for each in data.sequences], Shuffled(seed))
    share = Share(plan.rank, plan.world)
    steps = Loader(source, unchanged, method.batch, method.microbatch_tokens, seed, share)
    torch.manual_seed(seed + 1 + plan.rank)
    until = stage.training.end
    progress.message(f"note: first the teacher's layers, {until}; forecasts are of what follows")
    return TrainingRun(
        learner,
        [TrainingPhase(until, lambda at: ahead(steps.steps(at.cursor), device))],
        _kept_with(stage.training, method.training.keep),
        plan,
        store,
        progress=Part(progress, "layers"),
    ).train()
