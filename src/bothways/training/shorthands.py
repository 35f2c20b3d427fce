"""Common names of settings and their dotted paths: `lr=3e-5`, `epochs=4`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bothways.core.config.tree import Tree, merge, parse_overrides
from bothways.core.errors import ConfigError

TRAINING_NAMES: Mapping[str, str] = {
    "lr": "training.optimizer.lr", "learning_rate": "training.optimizer.lr",
    "epochs": "training.until", "until": "training.until",
    "warmup": "training.schedule.warmup", "weight_decay": "training.optimizer.decay",
    "precision": "training.precision", "evaluate": "training.evaluate",
    "optimizer": "training.optimizer", "schedule": "training.schedule",
}  # fmt: skip
"""Common names → dotted paths, of every run."""

TRAINING_ELSEWHERE: Mapping[str, str] = {
    "num_train_epochs": "epochs", "num_epochs": "epochs", "max_steps": "until", "steps": "until",
    "gradient_accumulation_steps": "microbatch_tokens", "warmup_ratio": "warmup",
    "warmup_steps": "warmup", "max_grad_norm": "training.clip_norm", "optim": "optimizer",
    "lr_scheduler_type": "schedule", "fp16": "precision", "bf16": "precision",
    "eval_steps": "evaluate", "eval_strategy": "evaluate", "logging_steps": "training.report",
    "save_steps": "training.save", "callbacks": "on_event", "output_dir": "out",
    "report_to": "training.trackers",
}  # fmt: skip
"""Names of transformers → the names here."""


def expand_names(overrides: Tree | Iterable[str], names: Mapping[str, str]) -> dict[str, Any]:
    """Return overrides as a tree in which common names are replaced by their dotted paths.

        ["lr=3e-5", "epochs=4"] → {"training": {"optimizer": {"lr": "3e-5"}, "until": "4 epochs"}}

    Args:
        names: common names → dotted paths.

    Raises:
        ConfigError: a text is not a setting, or a name without a path is part of a longer path.
    """
    tree: dict[str, Any] = {}
    given = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    for name, value in given.items():
        leaf: Any = f"{value} epochs" if name == "epochs" and value != "auto" else value
        for key in reversed(names.get(name, name).split(".")):
            leaf = {key: leaf}
        tree = merge(tree, leaf)
    return tree


def check_names(tree: Tree, elsewhere: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting by its name in other libraries; the message says ours.

    Args:
        elsewhere: names of other libraries → the names here.
    """
    for name in tree.keys() & elsewhere.keys():
        what, fix = f"unknown setting {name!r}", f"Its name here is {elsewhere[name]}."
        raise ConfigError(what, where=name, fix=fix)
