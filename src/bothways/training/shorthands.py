"""Common names of settings and their dotted paths, `lr=3e-5`, and the names of recipes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from bothways.core.config.tree import Tree, merge, nest, parse_overrides, rename

TRAINING_NAMES: Mapping[str, str] = {
    "lr": "training.optimizer.lr", "learning_rate": "training.optimizer.lr",
    "epochs": "training.until", "until": "training.until",
    "warmup": "training.schedule.warmup", "weight_decay": "training.optimizer.decay",
    "precision": "training.precision", "evaluate": "training.evaluate",
    "optimizer": "training.optimizer", "schedule": "training.schedule",
}  # fmt: skip
"""Common names → dotted paths, of every run."""

SAME_SETTINGS: Mapping[str, tuple[str, str]] = {
    "num_train_epochs": ("epochs", "{}"), "num_epochs": ("epochs", "{}"),
    "max_steps": ("until", "{} steps"), "steps": ("until", "{} steps"),
    "warmup_steps": ("warmup", "{} steps"), "warmup_ratio": ("warmup", "{}"),
    "max_grad_norm": ("training.clip_norm", "{}"), "lr_scheduler_type": ("schedule", "{}"),
    "eval_steps": ("evaluate", "{} steps"),
    "save_steps": ("training.save", "{} steps"), "logging_steps": ("training.report", "{} steps"),
    "patience": ("training.early_stopping", "{}"),
    "early_stopping_patience": ("training.early_stopping", "{}"),
}  # fmt: skip
"""Names of other libraries with the same meaning → the name here, and the form of its value."""


def expand_names(
    overrides: Tree | Iterable[str],
    names: Mapping[str, str],
    same: Mapping[str, tuple[str, str]] = SAME_SETTINGS,
) -> dict[str, Any]:
    """Return overrides as a tree in which common names are replaced by their dotted paths.

        ["lr=3e-5", "epochs=4"] → {"training": {"optimizer": {"lr": "3e-5"}, "until": "4 epochs"}}

    Args:
        names: common names → dotted paths.
        same: names of other libraries, as in `SAME_SETTINGS`.

    Raises:
        ConfigError: a text is not a setting, a setting is given under two names, or a name without
            a path is part of a longer path.
    """
    tree: dict[str, Any] = {}
    given = nest(overrides) if isinstance(overrides, Mapping) else parse_overrides(overrides)
    named = {key: same.get(key, (key, "{}")) for key in given}
    paths = {key: names.get(name, name) for key, (name, _) in named.items()}
    rename(given, paths)  # refuses two names of one setting
    # A whole member of a union first: it would replace its settings.
    for key in sorted(given, key=lambda key: paths[key].count(".")):
        setting, (name, form) = given[key], named[key]
        value = setting if form == "{}" else form.format(setting)
        leaf: Any = f"{value} epochs" if name == "epochs" and value != "auto" else value
        for step in reversed(paths[key].split(".")):
            leaf = {step: leaf}
        tree = merge(tree, leaf)
    return tree


PretrainRecipe = Literal[
    "modern",
    "paper",
    "short",
    "electra",
    "roberta",
    "albert",
    "spanbert",
    "deberta",
    "deberta_v3",
]
FinetuneRecipe = Literal["modern", "paper", "electra"]
DistilRecipe = Literal["distilbert", "tinybert", "minilm", "modern", "paper"]
"""With a corpus the first three, with labelled data the last two and tinybert."""
