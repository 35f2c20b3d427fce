"""Names of presets, of families and of activations."""

import dataclasses

import pytest
import torch
import transformers

from bothways.core.errors import ConfigError
from bothways.model.block import activate
from bothways.model.families import bert
from bothways.model.families.catalogue import (
    PRESETS,
    family_for,
    family_named,
    nearest_preset,
    preset,
)
from bothways.model.families.family import ACTIVATIONS


def test_unknown_settings_are_skipped_and_no_padding_is_known():
    settings = {"gradient_checkpointing": True, "_name_or_path": "x"}
    assert bert.BERT.config_rules.read(settings, "config.json") == bert.base()
    written = bert.BERT.config_rules.write(dataclasses.replace(bert.base(), pad=None))
    assert written["pad_token_id"] is None


@pytest.mark.parametrize(("name", "activation"), sorted(ACTIVATIONS.items()))
def test_activations_are_the_functions_of_these_names(name, activation):
    x = torch.linspace(-6, 6, 999, dtype=torch.float64)
    torch.testing.assert_close(
        activate(activation, x), transformers.activations.ACT2FN[name](x), rtol=0, atol=2e-7
    )


def test_what_cannot_be_said_there_has_no_family():
    assert family_for(dataclasses.replace(bert.tiny(), segments=0)) is None
    assert family_named("bert") is bert.BERT
    assert family_named("t5") is None


def test_every_preset_has_a_family_and_takes_another_vocabulary():
    without = {name for name, make in PRESETS.items() if family_for(make()) is None}
    assert without == {"transformer-base", "transformer-big"}
    assert bert.small(4000) == dataclasses.replace(bert.small(), vocab=4000)


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^model: there is no preset 'bert-bse'"):
        preset("bert-bse")
    for name, meant in (
        ("electra", "electra-base"),
        ("google/Electra_Base", "electra-base"),
        ("BERT-base", "bert-base"),
        ("bert", "bert-base"),
        ("microsoft/deberta-v3-base", "deberta-v3-base"),
    ):
        assert nearest_preset(name) == meant
    with pytest.raises(ConfigError, match=r"did you mean 'electra-base'\?\n  To begin with"):
        preset("google/electra-base")
    with pytest.raises(ConfigError, match="there is no preset 'xyz'"):
        preset("xyz")
