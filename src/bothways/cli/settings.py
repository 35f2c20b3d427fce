"""`bothways settings`: every setting of the commands that train, from its declaration."""

from __future__ import annotations

import difflib
import itertools
import json as encoder
from typing import TYPE_CHECKING, Literal

from bothways.cli import options
from bothways.core.errors import ConfigError
from bothways.core.terminal import output_console, say

if TYPE_CHECKING:
    from bothways.core.config.reader import Setting

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
    chosen = {
        name: [s for s in listed if f".{prefix}" in f".{s.path}" or s.name == prefix]
        for name, listed in all_settings().items()
        if command in (None, name)
    }
    if not any(chosen.values()):
        every = itertools.chain(*all_settings().values())
        names = {name for s in every for name in (s.path, *s.path.split("."), s.name)}
        near = difflib.get_close_matches(prefix, names, 1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"no setting begins with {prefix!r}{guess}",
            where="prefix",
            fix="bothways settings lists all.",
        )
    console = output_console()
    if json:
        rows = [{"command": name, **vars(s)} for name, listed in chosen.items() for s in listed]
        say(console, encoder.dumps(rows, indent=1, ensure_ascii=False))
        return
    for heading, listed in chosen.items():
        if listed:
            say(console, f"{heading}:")
        for setting in listed:
            default = f" = {setting.default}" if setting.default else ""
            name = f" (or {setting.name})" if setting.name else ""
            kinds = f", for {', '.join(setting.kinds)}" if setting.kinds else ""
            say(console, f"  {setting.path}{default}{name}: {setting.values}{kinds}")
            say(console, f"      {setting.meaning}")


def all_settings() -> dict[str, list[Setting]]:
    """Return the settings by command, in the order of their declarations."""
    from bothways.core.config.reader import list_settings
    from bothways.finetuning.config import SHORTHANDS, FinetuneConfig
    from bothways.lab.features.run import FeatureConfig
    from bothways.model.families.catalogue import preset
    from bothways.pretraining.recipes import modern
    from bothways.training.run import TRAINING_NAMES

    features = FeatureConfig(model="MODEL", train="TRAIN", dev="DEV")
    return {
        "finetune": list_settings(FinetuneConfig(), SHORTHANDS),
        "pretrain": list_settings(modern(preset("bert-base")), TRAINING_NAMES),
        "features": list_settings(features),
    }
