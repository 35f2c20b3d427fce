"""The settings of a fine-tuned teacher, whose outputs a smaller model learns with the labels.

`distillation` does the work: the first half of TinyBERT's distillation for a task, the teacher's
layers (`LayerStage`), and its answers.

Source: Hinton et al. 2015; Sanh et al. 2019, section 3, "an additional step of distillation"; Jiao
et al. 2019, section 3.2; huawei-noah/Pretrained-Language-Model, task_distill.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from bothways.core.config.reader import CHANGEABLE
from bothways.core.errors import ConfigError
from bothways.model.config import EncoderConfig
from bothways.objectives.distillation import (
    AttentionScores,
    CosineStates,
    Distillation,
    HiddenStates,
    Relations,
)
from bothways.training.durations import Epochs
from bothways.training.optimizers import BertAdam
from bothways.training.run import Training
from bothways.training.schedules import Constant

T = TypeVar("T")

WHERE = "teacher.stage"


@dataclass(frozen=True)
class LayerStage:
    """A first stage, in which the student learns the layers of its teacher on the task's texts.

    The labels are not read, and only the encoder is trained.

    Attributes:
        losses: losses between the two encoders, each kind at most once.
        layers: for `HiddenStates` and `AttentionScores`, the teacher's layer, from 1, for each of
            the student's; None spreads them evenly, the last for the last.
        training: its length and optimizer. The default is from TinyBERT's code; its batch is
            the run's, and so are `recompute` and `compiled`. Its checkpoints are in the folder
            "layers" of the run.
    """

    losses: tuple[CosineStates | HiddenStates | AttentionScores | Relations, ...] = (
        HiddenStates(),
        AttentionScores(),
    )
    layers: tuple[int, ...] | None = None
    training: Training = field(
        default_factory=lambda: Training(Epochs(10.0), BertAdam(lr=5e-5), Constant()),
        metadata={"fixed": ("until",)},
    )
    kind: Literal["layers"] = "layers"

    def __post_init__(self) -> None:
        _at_stage(lambda: Distillation("teacher", self.losses, self.layers, masking=None))
        training = self.training
        _ = training.end  # refuses "auto"
        for name in ("evaluate", "early_stopping", "target", "keep.best"):
            if operator.attrgetter(name)(training) is not None:
                message = "is about evaluations, and this stage has none"
                raise ConfigError(message, where=f"{WHERE}.training.{name}", fix="Omit it.")
        for name in ("recompute", "compiled"):
            if getattr(training, name):
                message, fix = "is the same in both stages", f"Set training.{name} instead."
                raise ConfigError(message, where=f"{WHERE}.training.{name}", fix=fix)


def _at_stage(make: Callable[[], T]) -> T:
    """Return the result of `make`; its errors name the settings of the stage."""
    try:
        return make()
    except ConfigError as error:
        location = str(error.where or WHERE).replace("objective", WHERE)
        fix = (error.fix or "").replace("objective", WHERE)
        raise ConfigError(error.what, where=location, fix=fix or None) from error


def objective_of(stage: LayerStage, teacher: str, student: EncoderConfig) -> Distillation:
    """Return the objective of the stage, for a student that it fits.

    Raises:
        ConfigError: a loss does not fit the two encoders.
        FolderError: the teacher cannot be read.
    """
    objective = Distillation(teacher, stage.losses, stage.layers, masking=None)
    _at_stage(lambda: objective.models(student))
    return objective


@dataclass(frozen=True)
class Teacher:
    """A fine-tuned model that a smaller one learns from.

    The loss is (1 − weight) · that of the labels + weight · the mean of the soft loss: T² ·
    KL(teacher ‖ student) of softmax(z/T) over classes, choices or the tokens of a span, of each
    label by itself in a multilabel task, and the squared difference of numbers.

    Attributes:
        folder: a model folder, the folder of a run, or a Hub id; of the same task, labels and
            vocabulary.
        weight: the share of the soft loss, from 0 to 1.
        temperature: T.
        unlabelled: further data of the task, without labels: for the soft loss alone.
        stage: earlier stage that trains the student on the teacher's layers; None for none.

    Examples:
        >>> from bothways.finetuning.teacher import Teacher
        >>> Teacher("my-classifier", weight=0.7).temperature
        2.0
    """

    folder: str = field(metadata=CHANGEABLE)  # the run knows the teacher by its SHA-256
    weight: float = 0.5
    temperature: float = 2.0
    unlabelled: str | None = field(default=None, metadata=CHANGEABLE)
    stage: LayerStage | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            message = f"must be from 0 to 1, not {self.weight}"
            raise ConfigError(message, where="teacher.weight")
        if not 0 < self.temperature < math.inf:
            message = f"must be above 0, not {self.temperature}"
            raise ConfigError(message, where="teacher.temperature")
