"""All families and presets by name: the one place where a new family is added."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable

from bothways.core.config.reader import config_difference
from bothways.core.errors import ConfigError, argument
from bothways.model.config import EncoderConfig
from bothways.model.families import (
    albert,
    bert,
    bigbird,
    deberta,
    distilbert,
    electra,
    ernie,
    eurobert,
    gpt,
    gte,
    longformer,
    modernbert,
    mpnet,
    nomic,
    roberta,
    transformer,
)
from bothways.model.families.family import Family

FAMILIES: tuple[Family, ...] = (
    bert.BERT, bert.MEGATRON_BERT, roberta.ROBERTA, roberta.XLM_ROBERTA, distilbert.DISTILBERT,
    albert.ALBERT, electra.ELECTRA, deberta.DEBERTA, deberta.DEBERTA_V2, longformer.LONGFORMER,
    bigbird.BIGBIRD, modernbert.MODERNBERT, gpt.GPT, gpt.GPT2, roberta.CAMEMBERT,
    ernie.ERNIE, mpnet.MPNET, nomic.NOMIC_BERT, gte.GTE, eurobert.EUROBERT,
)  # fmt: skip
PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    **bert.PRESETS, **roberta.PRESETS, **distilbert.PRESETS, **albert.PRESETS, **electra.PRESETS,
    **deberta.PRESETS, **longformer.PRESETS, **bigbird.PRESETS, **modernbert.PRESETS,
    **gpt.PRESETS, **transformer.PRESETS, **ernie.PRESETS, **mpnet.PRESETS,
    **nomic.PRESETS, **gte.PRESETS, **eurobert.PRESETS,
}  # fmt: skip


def family_named(model_type: str) -> Family | None:
    """Return the family with this `model_type`."""
    return next((f for f in FAMILIES if model_type in (f.model_type, *f.other_types)), None)


@functools.lru_cache(maxsize=128)  # writing all families' settings takes 10 ms
def family_for(
    config: EncoderConfig, vocabulary: str | None = None, origin: str | None = None
) -> Family | None:
    """Return the family that a configuration is saved as; None if no family can express it.

    Args:
        config: the configuration.
        vocabulary: the model of its tokenizer; families with this one have priority.
        origin: the `model_type` of the folder that it comes from, which has priority among these.
    """
    # Without a vocabulary, or with one that no family is known by, all are alike.
    ranked = sorted(
        FAMILIES,
        key=lambda family: (
            vocabulary is not None and family.vocabulary != vocabulary,
            family.model_type != origin,
        ),
    )
    return next((f for f in ranked if f.config_rules.write(config) is not None), None)


def nearest_family(config: EncoderConfig) -> tuple[str, list[str]]:
    """Return the model type of the family that a configuration is nearest to, and what differs.

    The differences are the family's settings as lines of TOML, such as "pad = 1".
    """
    differences = {
        family.model_type: config_difference(nearest.canonical, config.canonical)
        for family in FAMILIES
        if (nearest := family.config_rules.nearest(config)) is not None
    }
    return min(differences.items(), key=lambda item: len(item[1]))


def preset(name: str) -> EncoderConfig:
    """Return the configuration of a published model.

    Args:
        name: such as "bert-base"; the pages about the families have all names.

    Raises:
        ConfigError: there is no preset of this name.

    Examples:
        >>> preset("bert-tiny").width
        128
    """
    if name not in PRESETS:
        near = nearest_preset(name)
        guess = f"; did you mean {near!r}?" if near else ""
        weights = f"To begin with its weights, give {argument(start=name)}. " if "/" in name else ""
        names = difflib.get_close_matches(name, PRESETS, n=5, cutoff=0.4) if near else PRESETS
        fix = f"{weights}Choose from {', '.join(names)}."
        raise ConfigError(f"there is no preset {name!r}{guess}", where="model", fix=fix)
    return PRESETS[name]()


def nearest_preset(name: str) -> str | None:
    """Return the preset that a name probably means: "google/Electra_Small" → "electra-small"."""
    plain = name.rpartition("/")[2].lower().replace("_", "-")
    near = difflib.get_close_matches(plain, PRESETS, n=1)
    return next((preset for preset in (plain, f"{plain}-base", *near) if preset in PRESETS), None)
