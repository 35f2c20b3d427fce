"""The settings of a `config.json` ↔ our configuration, as data: each number under its name there, and what may not differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bothways.core.errors import ConfigError, FolderError
from bothways.model.activation import Activation
from bothways.model.config import EncoderConfig
from bothways.model.positions import Learned

NUMBERS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "segments": "type_vocab_size",
    "norm_epsilon": "layer_norm_eps",
    "dropout.hidden": "hidden_dropout_prob",
    "dropout.attention": "attention_probs_dropout_prob",
    "initial_range": "initializer_range",
}
"""Our fields, by dotted path, and what most families call them."""

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
FIXED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
"""What these settings may say; anything else is another model."""

LARGEST = 2**31 - 1
"""No setting of a model is beyond it."""


@dataclass(frozen=True)
class ConfigRules:
    """Attributes:
    defaults: the configuration that a `config.json` without settings means.
    numbers: their names of our fields.
    most: their name for the longest input.
    activation: their name for the activation.
    activations: what they call each; the first name of one is written.
    fixed: settings that must say this, or nothing.
    constant: what is written beside.
    aliases: other names that transformers takes for theirs.
    read_more: what else their settings say: (configuration so far, settings, their file) → configuration.
    write_more: the same, the other way.
    """

    defaults: EncoderConfig
    numbers: Mapping[str, str] = field(default_factory=lambda: NUMBERS)
    most: str = "max_position_embeddings"
    activation: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    fixed: Mapping[str, Any] = field(default_factory=lambda: FIXED)
    constant: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    read_more: Callable[[EncoderConfig, Mapping[str, Any], str], EncoderConfig] = (
        lambda config, raw, where: config
    )
    write_more: Callable[[EncoderConfig], dict[str, Any]] = lambda config: {}

    def read(self, raw: Mapping[str, Any], where: str) -> EncoderConfig:
        """Their settings → our configuration.

        Raises:
            FolderError: a setting that has no counterpart here, or is malformed.
        """
        raw = self._without_aliases(raw, where)
        for key, value in self.fixed.items():
            read_choice(raw, key, {value: value}, value, where)
        defaults = self.defaults
        numbers = {
            ours: read_number(raw, theirs, _at(defaults, ours), where)
            for ours, theirs in self.numbers.items()
        }
        most = read_number(
            raw, self.most, defaults.position.max_positions + _offset(defaults), where
        )
        named = next(
            theirs for theirs, ours in self.activations.items() if ours == defaults.activation
        )
        activation = read_choice(raw, self.activation, self.activations, named, where)
        pad = raw.get("pad_token_id", defaults.pad)
        pad = None if pad is None else read_number(raw, "pad_token_id", defaults.pad or 0, where)
        if defaults.pad is None and pad is not None and not 0 <= pad < numbers["vocab"]:
            pad = None  # a family without padding: nothing reads what such an id stands for
        tied = read_flag(raw, "tie_word_embeddings", True, where)
        readout = replace(defaults.readout, output="embedding" if tied else "own")
        common = {"activation": activation, "pad": pad, "readout": readout}
        try:
            position = replace(defaults.position, max_positions=most - _offset(defaults))
            return self.read_more(
                replace(defaults, **_changes(defaults, numbers), position=position, **common),
                raw,
                where,
            )
        except ConfigError as error:
            raise FolderError(f"{error.where}: {error.what}", where=where, fix=error.fix) from error

    def _without_aliases(self, raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """The settings under their first names."""
        for alias, name in self.aliases.items():
            if alias in raw and raw.get(name, raw[alias]) != raw[alias]:
                what = f"{name} is {raw[name]!r:.40}, and {alias}, which is another name of it, {raw[alias]!r:.40}"
                raise FolderError(
                    what, where=where, fix="Leave out the one that is not the model's."
                )
        return {**raw, **{name: raw[alias] for alias, name in self.aliases.items() if alias in raw}}

    def write(self, config: EncoderConfig) -> dict[str, Any] | None:
        """Our configuration → their settings; none if the family cannot say it: reading them would give another one."""
        if "segments" in self.numbers and not config.segments:
            return None  # their embedding of segments is always read
        settings = {
            **{theirs: _at(config, ours) for ours, theirs in self.numbers.items()},
            self.most: config.position.max_positions + _offset(config),
            self.activation: next(
                (theirs for theirs, ours in self.activations.items() if ours == config.activation),
                "",
            ),
            "pad_token_id": config.pad,
            "tie_word_embeddings": config.readout.output == "embedding",
            **self.constant,
            **self.write_more(config),
        }
        try:
            return settings if self.read(settings, "").canonical == config.canonical else None
        except FolderError:
            return None


def _at(config: EncoderConfig, path: str) -> Any:
    """The field at a dotted path."""
    return functools.reduce(getattr, path.split("."), config)


def _changes(config: EncoderConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that change, if these dotted paths of one or two names have these values."""
    changed: dict[str, Any] = {}
    for path, value in values.items():
        first, _, second = path.partition(".")
        changed[first] = (
            replace(changed.get(first, getattr(config, first)), **{second: value})
            if second
            else value
        )
    return changed


def _offset(config: EncoderConfig) -> int:
    return config.position.offset if isinstance(config.position, Learned) else 0


def read_number(raw: Mapping[str, Any], key: str, default: int | float, where: str) -> Any:
    """A setting that must be a number of the default's type; one that is absent has the default."""
    value, kind = raw.get(key, default), type(default)
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or abs(value) > LARGEST:
        raise FolderError(
            f"{key} must be {'a number' if kind is float else 'a whole number'}, not {value!r:.40}",
            where=where,
        )
    return kind(value)


def read_flag(raw: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    """A setting that must be true or false; one that is absent has the default."""
    value: bool = read_choice(raw, key, {True: True, False: False}, default, where)
    return value


def read_choice(
    raw: Mapping[str, Any], key: str, allowed: Mapping[Any, Any], default: Any, where: str
) -> Any:
    """What a setting that must be one of the keys of `allowed` means; one that is absent has the default."""
    value = raw.get(key, default)
    if not isinstance(value, str | bool) or value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise FolderError(
            f"{key} {value!r} has no counterpart here: it must be one of {choices}", where=where
        )
    return allowed[value]
