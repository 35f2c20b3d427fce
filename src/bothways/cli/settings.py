"""`bothways settings`: every setting of the commands that train, from its declaration."""

from __future__ import annotations

import difflib
import json as encoder
from collections.abc import Iterator
from typing import Literal, NamedTuple

from bothways.cli import options
from bothways.core.errors import ConfigError
from bothways.core.terminal import output_console, say


class Row(NamedTuple):
    """A setting of a command; the other fields are those of `Setting`.

    Attributes:
        command: pretrain, finetune or features.
        name: a common name that means the same, or "".
    """

    command: str
    path: str
    name: str
    kinds: tuple[str, ...]
    values: str
    default: str
    meaning: str


Command = Literal["finetune", "pretrain", "features"]


def settings(
    prefix: str = "", /, *, command: Command | None = None, json: options.JsonOutput = False
) -> None:
    """List the settings of pretrain, finetune and features: default, values and meaning.

    adapt and plan take those of pretrain, sweep those of finetune, distil both. Defaults are those
    of the recipe modern, for pretrain with bert-base.

    Parameters
    ----------
    prefix
        A path or its beginning, such as training.optimizer, also from one of its dots, such as
        masking; or a common name, such as lr. By default all are listed.
    command
        The command whose settings are listed; default: all three.
    """
    rows = [
        row
        for row in all_settings()
        if command in (None, row.command)
        and (f".{row.path}".find(f".{prefix}") >= 0 or row.name == prefix)
    ]
    if not rows:
        names = {
            name for row in all_settings() for name in (row.path, *row.path.split("."), row.name)
        }
        near = difflib.get_close_matches(prefix, names, 1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"no setting begins with {prefix!r}{guess}",
            where="prefix",
            fix="bothways settings lists all.",
        )
    console = output_console()
    if json:
        say(console, encoder.dumps([row._asdict() for row in rows], indent=1, ensure_ascii=False))
        return
    for at, row in enumerate(rows):
        if at == 0 or rows[at - 1].command != row.command:
            say(console, f"{row.command}:")
        default = f" = {row.default}" if row.default else ""
        name = f" (or {row.name})" if row.name else ""
        kinds = f", for {', '.join(row.kinds)}" if row.kinds else ""
        say(console, f"  {row.path}{default}{name}: {row.values}{kinds}")
        say(console, f"      {row.meaning}")


def all_settings() -> Iterator[Row]:
    """Yield the settings of the commands in the order of their declarations."""
    from bothways.core.config.reader import list_settings
    from bothways.finetuning.config import SHORTHANDS, FinetuneConfig
    from bothways.lab.features.run import FeatureConfig
    from bothways.model.families.catalogue import preset
    from bothways.pretraining.recipes import modern
    from bothways.training.run import TRAINING_NAMES

    features = FeatureConfig(model="MODEL", train="TRAIN", dev="DEV")
    for command, config, aliases in (
        ("finetune", FinetuneConfig(), SHORTHANDS),
        ("pretrain", modern(preset("bert-base")), TRAINING_NAMES),
        ("features", features, {}),
    ):
        # Of several names, the one that the path ends with.
        ordered = sorted(aliases.items(), key=lambda item: item[1].endswith(f".{item[0]}"))
        names = {path: name for name, path in ordered}
        for setting in list_settings(config):
            yield Row(
                command, setting.path, names.get(setting.path, ""), setting.kinds,
                setting.values, setting.default, setting.meaning,
            )  # fmt: skip
