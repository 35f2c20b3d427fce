"""The settings of a fine-tuning run that a fine-tuned teacher gives its task to."""

from __future__ import annotations

from typing import get_args

from bothways.core.errors import ConfigError
from bothways.finetuning.config import RECIPES
from bothways.finetuning.prepare import FinetuneConfig
from bothways.finetuning.teacher import Teacher
from bothways.prediction.predictor import open_learner
from bothways.tasks.catalogue import Trainable


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
        recipe: "modern" or "paper"; None for the first.

    Raises:
        ConfigError: no student, an unknown recipe, or the teacher was not fine-tuned for a task.
        FolderError: the teacher cannot be read.
    """
    if student is None:
        what = "is missing: labelled data needs a pre-trained student"
        fix = "Name one with the teacher's vocabulary, or give a corpus folder to pre-train one."
        raise ConfigError(what, where="student", fix=fix)
    if recipe is not None and recipe not in RECIPES:
        what = f"{recipe!r} is for a corpus, and the data is labelled"
        raise ConfigError(what, where="recipe", fix=f"Choose one of {', '.join(RECIPES)}.")
    definition = open_learner(teacher).task
    if not isinstance(definition, get_args(Trainable)):
        what = f"{teacher} is for the task {definition.name!r}, which needs no labels"
        fix = "Choose a fine-tuned teacher, or give a corpus folder instead of labelled data."
        raise ConfigError(what, where="teacher", fix=fix)
    settings = RECIPES[recipe or "modern"](type(definition)())
    return FinetuneConfig(
        model=student, train=train, dev=dev, teacher=Teacher(teacher), **vars(settings)
    )
