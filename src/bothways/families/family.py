"""What a family is to the model folder: its settings, its classes and its weight names in transformers' terms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bothways.families.config_rules import ConfigRules
from bothways.families.weight_names import KeyTable, untied
from bothways.model.config import EncoderConfig

HeadKind = Literal[
    "masked", "pooler", "pair", "labels", "tags", "span", "choice", "replaced", "causal", "bilm"
]

DROPOUTS: dict[HeadKind, tuple[str, float | None]] = {
    "labels": ("classifier_dropout", None),
    "tags": ("classifier_dropout", None),
    "choice": ("classifier_dropout", None),
}
"""As in BERT."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, or a model of ours that none of its classes can be.

    Attributes:
        name: as `architectures` in `config.json` has it.
        heads: what it has beside the encoder.
        bare: whether its files leave out the family's prefix.
        idle: what of this its files hold and nothing reads.
        own: whether it is one of ours.
    """

    name: str
    heads: frozenset[HeadKind]
    bare: bool = False
    own: bool = False
    idle: frozenset[HeadKind] = frozenset()


@dataclass(frozen=True)
class Family:
    """Attributes:
    model_type: as `config.json` has it.
    keys: weight names.
    architectures: its classes, one for each set of heads that a folder can hold.
    translation: its settings.
    vocabulary: the model of its tokenizers ("Unigram"), where that alone tells it from another family; else none.
    dropouts: for heads with a dropout of their own, the setting and what it means if it is absent: none for the encoder's.
    adapted: where weight names, or what lies under them, depend on the configuration, those of one; none where they do not.
    seen: what the names of its weights tell of a file's configuration: (what its settings say, names) → configuration.
    otherwise: presets that are pre-trained as another class than the first, with its name.
    """

    model_type: str
    keys: KeyTable
    architectures: tuple[Architecture, ...]
    translation: ConfigRules
    vocabulary: str | None = None
    dropouts: Mapping[HeadKind, tuple[str, float | None]] = field(default_factory=lambda: DROPOUTS)
    adapted: Callable[[EncoderConfig], KeyTable] | None = None
    seen: Callable[[EncoderConfig, Collection[str]], EncoderConfig] = lambda config, names: config
    otherwise: Mapping[str, str] = field(default_factory=dict)

    def keys_for(self, config: EncoderConfig) -> KeyTable:
        """The weight names of a model of this configuration."""
        table = self.keys if self.adapted is None else self.adapted(config)
        return untied(table) if config.readout.output == "own" else table

    def architecture_named(self, names: Iterable[str]) -> Architecture | None:
        """The first of these classes that the family has."""
        known = {architecture.name: architecture for architecture in self.architectures}
        return next((known[name] for name in names if name in known), None)

    def pretrained(self, preset: str) -> Architecture:
        """The class that a preset is pre-trained as."""
        return self.architecture_named([self.otherwise.get(preset, "")]) or self.architectures[0]

    def architecture_with(self, heads: Iterable[str]) -> Architecture | None:
        """The class with exactly these heads; what it holds idle may be missing."""
        wanted = frozenset(heads)
        able = (
            known
            for known in self.architectures
            if known.heads - known.idle <= wanted <= known.heads
        )
        return next(able, None)
