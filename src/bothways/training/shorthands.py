"""Common names of settings and their dotted paths, `lr=3e-5`, and the names of recipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from bothways.core.config.tree import Tree, merge, nest, parse_overrides
from bothways.core.errors import ConfigError

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
        ConfigError: a text is not a setting, or a setting is given under two names.
    """
    settings = nest(overrides) if isinstance(overrides, Mapping) else parse_overrides(overrides)
    leaves: dict[tuple[str, ...], tuple[str, Any]] = {}
    for name, setting in settings.items():
        common, form = same.get(name, (name, "{}"))
        value = setting if form == "{}" else form.format(setting)
        if common == "epochs" and value != "auto":
            value = f"{value} epochs"
        path = tuple(names.get(common, common).split("."))
        for keys, leaf in _leaves(value, path):
            spelling = name if path != (name,) else ".".join(keys)
            # A union's member by its name alone, optimizer=lamb, is its kind.
            kind = keys[:-1] if keys[-1] == "kind" else (*keys, "kind")
            if other := leaves.get(keys) or leaves.get(kind):
                message = f"{spelling!r} sets what {other[0]!r} sets, which is given, too"
                raise ConfigError(message, where=spelling, fix="Leave one of them out.")
            leaves[keys] = spelling, leaf
    tree: dict[str, Any] = {}
    # Members of unions before their settings, which the name of a member alone would replace.
    for keys, (_, setting) in sorted(leaves.items(), key=lambda item: len(item[0])):
        table = setting
        for key in reversed(keys):
            table = {key: table}
        tree = merge(tree, table)
    return tree


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each setting of a tree."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


PretrainRecipe = Literal[
    "modern", "paper", "short", "electra", "roberta", "albert", "spanbert", "deberta", "deberta_v3"
]  # fmt: skip
"""The only list of these names: `pretraining.recipes` looks its functions up by them."""
FinetuneRecipe = Literal["modern", "paper", "electra"]
DistilRecipe = Literal["distilbert", "minilm", "modern", "paper"]
"""With a corpus the first two, with labelled data the last two."""
