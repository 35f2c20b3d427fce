"""A model folder of a type of our own, for a model that no class of transformers can be.

`config.json` has the model type "bothways" and, under one key of that name, our configuration and heads as they are; weights
have our own names. All else (tokenizer, labels, card, record) is as in any other folder. transformers does not open it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from bothways.core.config import reader as configs
from bothways.core.config.tree import join_path
from bothways.core.errors import ConfigError, FolderError
from bothways.families.config_rules import LARGEST
from bothways.families.family import Architecture, HeadKind
from bothways.families.weight_names import KeyTable, Rename
from bothways.model.config import EncoderConfig
from bothways.model.head_config import Head
from bothways.model.init import without_weights
from bothways.model.lstm_config import LSTMConfig
from bothways.model.model import Model
from bothways.model.parameters import parameter_table

OWN = "bothways"
"""The model type, and the key that our configuration stands under."""
KEYS = KeyTable(
    "",
    (
        Rename("encoder", "encoder"),
        *(Rename(f"heads.{kind}", f"heads.{kind}") for kind in get_args(HeadKind)),
    ),
)
"""All names are ours."""
LAYERS, PARAMETERS = 10_000, 10**13
"""No model has more."""


@dataclass(frozen=True)
class Description:
    """What the key holds.

    Attributes:
        encoder: the shape.
        heads: which heads the folder has.
    """

    encoder: EncoderConfig | LSTMConfig
    heads: tuple[Head, ...] = ()

    def __post_init__(self) -> None:
        kinds = [head.kind for head in self.heads]
        if len(set(kinds)) < len(kinds):
            raise ConfigError(
                f"one of each kind can be there, not {', '.join(kinds)}", where="heads"
            )

    @property
    def architecture(self) -> Architecture:
        """What stands in the place of a class of transformers."""
        return Architecture("bothways.Model", frozenset(head.kind for head in self.heads), own=True)


def own_settings(model: Model) -> dict[str, Any]:
    """The content of `config.json`, without labels."""
    described = Description(model.config, model.specification)
    return {
        "architectures": [described.architecture.name],
        "model_type": OWN,
        "dtype": "float32",
        OWN: configs.to_dict(described),
    }


def read_description(raw: Mapping[str, Any], file: Path) -> Description:
    """Our configuration in a `config.json`.

    Raises:
        FolderError: there is none, or a key or value of it is none that is known; with its dotted path.
    """
    tree = raw.get(OWN)
    if not isinstance(tree, Mapping):
        what = f"{OWN}: must be a table with encoder and heads, not {tree!r:.40}"
        raise FolderError(
            what, where=file, fix="Save the model again, or copy the file from where it was saved."
        )
    try:
        described = configs.read(Description, tree, where=OWN)
        _compare(tree, configs.to_dict(described), OWN)
        _check_size(described)
        with without_weights():
            Model(described.encoder, described.heads)
    except ConfigError as error:
        raise FolderError(f"{error.where}: {error.what}", where=file, fix=error.fix) from error
    return described


def _compare(given: Any, read: Any, where: str) -> None:
    """Refuse what was only understood because a command line writes it so, as texts: a file that we wrote has the types."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        for key in given:
            _compare(given[key], read[key], join_path(where, str(key)))
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for place, pair in enumerate(zip(given, read, strict=True)):
            _compare(*pair, join_path(where, str(place)))
    elif not isinstance(given, Mapping) or not isinstance(
        read, str
    ):  # a table without more than its kind is its kind
        _compare_value(given, read, where)


def _compare_value(given: Any, read: Any, where: str) -> None:
    whole_for_float = type(given) is int and type(read) is float
    if type(given) is not type(read) and not whole_for_float:
        raise ConfigError(
            f"{given!r:.40} is given, where {read!r:.40} is meant", where=where, fix="Write it so."
        )
    if isinstance(read, int | float) and not abs(read) <= LARGEST:
        raise ConfigError(f"{given!r:.40} is beyond what any model has", where=where)


def _check_size(described: Description) -> None:
    """Sizes that are allowed one by one, and together would take all memory before the weights are looked at."""
    layers, parameters = (
        described.encoder.depth,
        parameter_table(described.encoder, described.heads).total,
    )
    if max(layers / LAYERS, parameters / PARAMETERS) > 1:
        what = f"{layers:,} layers with {parameters:,} parameters are beyond what any model has"
        raise ConfigError(what, where=f"{OWN}.encoder")
