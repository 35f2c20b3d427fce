"""A family's settings, classes and weight names, as transformers has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from bothways.model.config import EncoderConfig
from bothways.model.families.config_rules import ConfigRules
from bothways.model.families.weight_names import KeyTable, untied

DROPOUTS: dict[str, tuple[str, float | None]] = {
    "labels": ("classifier_dropout", None),
    "tags": ("classifier_dropout", None),
    "choice": ("classifier_dropout", None),
}
"""Dropouts of heads in BERT."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, or its stand-in for a model in our own format.

    Attributes:
        name: its name in `architectures` of `config.json`.
        heads: the heads that it has.
        bare: whether its files leave out the family's prefix.
        own: whether it is a stand-in.
        idle: those of its heads that its files hold and nothing reads.
    """

    name: str
    heads: frozenset[str]
    bare: bool = False
    own: bool = False
    idle: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Family:
    """A family of encoders in transformers.

    Attributes:
        model_type: its name in `config.json`.
        keys: its weight names.
        architectures: its classes, one for each set of heads; that of pre-training is the first.
        classless: sets of heads that no class has and that are published without naming one; the
            name is that of the class which opens the encoder in them.
        config_rules: its settings.
        vocabulary: the model of its tokenizers ("Unigram"), where only that distinguishes it from
            another family.
        dropouts: for heads with a dropout of their own, the setting and its default; None means
            the encoder's dropout.
        adapted: the weight names of a configuration, where they depend on it.
        seen: adds to a configuration what the names of a file's tensors show.
        otherwise: the class of presets that are not pre-trained as the first one.
        other_keys: weight names that are read and not written: of models that were published with
            code of their own before transformers had the family, and of transformers' modules
            where its files have others.
        other_types: the `model_type` of models that were published with code of their own.
    """

    model_type: str
    keys: KeyTable
    architectures: tuple[Architecture, ...]
    config_rules: ConfigRules
    classless: tuple[Architecture, ...] = ()
    vocabulary: str | None = None
    dropouts: Mapping[str, tuple[str, float | None]] = field(default_factory=lambda: DROPOUTS)
    adapted: Callable[[EncoderConfig], KeyTable] | None = None
    seen: Callable[[EncoderConfig, Collection[str]], EncoderConfig] = lambda config, names: config
    otherwise: Mapping[str, str] = field(default_factory=dict)
    other_keys: tuple[KeyTable, ...] = ()
    other_types: tuple[str, ...] = ()

    def keys_for(self, config: EncoderConfig, names: Collection[str] = ()) -> KeyTable:
        """Return the weight names of a model of this configuration.

        Args:
            config: the configuration.
            names: the tensors of a file; the weight names that it has most of are returned.
        """
        family_table = self.keys if self.adapted is None else self.adapted(config)
        candidate = max(
            (family_table, *self.other_keys), key=lambda candidate: sum(map(candidate.knows, names))
        )
        return untied(candidate) if config.readout.output == "own" else candidate

    def architecture_named(self, names: Iterable[str]) -> Architecture | None:
        """Return the first of these classes that the family has."""
        candidates = {architecture.name: architecture for architecture in self.architectures}
        return next((candidates[name] for name in names if name in candidates), None)

    def pretrained(self, preset: str) -> Architecture:
        """Return the class that a preset is pre-trained as."""
        return self.architecture_named([self.otherwise.get(preset, "")]) or self.architectures[0]

    def architecture_with(self, heads: Iterable[str]) -> Architecture | None:
        """Return the class with exactly these heads; idle ones may be missing."""
        kinds = frozenset(heads)
        candidates = (*self.architectures, *self.classless)
        matching = (a for a in candidates if a.heads - a.idle <= kinds <= a.heads)
        return next(matching, None)
