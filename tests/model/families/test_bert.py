"""BERT's presets, and its settings both ways against the configuration classes of transformers."""

import dataclasses
import random
import re

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from bothways.core.errors import ConfigError, FolderError
from bothways.model.config import Dropouts, EncoderConfig, PostNorm, PreNorm, Readout
from bothways.model.families import bert
from bothways.model.families.catalogue import (
    PRESETS,
    family_for,
    family_named,
    nearest_preset,
    preset,
)
from bothways.model.families.family import ACTIVATIONS
from bothways.model.positions import Learned

CLASSES = {"bert": transformers.BertConfig, "megatron-bert": transformers.MegatronBertConfig}
FAMILIES = {"bert": bert.BERT, "megatron-bert": bert.MEGATRON_BERT}


def draw(seed: int, model_type: str) -> EncoderConfig:
    rng = random.Random(seed)
    heads = rng.randint(1, 5)
    return EncoderConfig(
        vocab=rng.randint(10, 99),
        width=heads * rng.randint(1, 9),
        depth=rng.randint(1, 9),
        heads=heads,
        intermediate_size=rng.randint(1, 99),
        segments=rng.randint(1, 4),
        position=Learned(rng.randint(1, 999)),
        order=PostNorm() if model_type == "bert" else PreNorm(),
        activation=rng.choice(("gelu", "gelu_tanh", "relu", "silu")),
        norm_epsilon=rng.choice((1e-12, 1e-5)),
        dropout=Dropouts(rng.choice((0.0, 0.1, 0.3)), rng.choice((0.0, 0.1, 0.3))),
        initial_range=rng.choice((0.02, 0.5)),
        pad=rng.choice((None, 0, 3)),
        readout=Readout(output=rng.choice(("embedding", "own"))),
    )


@pytest.mark.parametrize("model_type", CLASSES)
@given(seed=st.integers(0, 10**6))
def test_settings_go_there_and_back(model_type, seed):
    """Through transformers' class, so that a setting it does not know, or reads otherwise, is found."""
    config, family = draw(seed, model_type), FAMILIES[model_type]
    written = family.config_rules.write(config)
    assert written is not None
    theirs = CLASSES[model_type](**written)
    assert family.config_rules.read(theirs.to_dict(), "config.json") == config
    assert family.config_rules.read(written, "config.json") == config
    assert family_for(config) is family


@pytest.mark.parametrize("model_type", CLASSES)
def test_absent_settings_mean_what_they_mean_in_transformers(model_type):
    family, theirs = FAMILIES[model_type], CLASSES[model_type]()
    assert family.config_rules.read({}, "config.json") == family.config_rules.read(
        theirs.to_dict(), "config.json"
    )


def test_unknown_settings_are_left_out():
    assert (
        bert.BERT.config_rules.read(
            {"gradient_checkpointing": True, "_name_or_path": "x"}, "config.json"
        )
        == bert.base()
    )


@pytest.mark.parametrize(("name", "activation"), sorted(ACTIVATIONS.items()))
def test_activations_are_the_functions_of_these_names(name, activation):
    from bothways.model.block import activate

    x = torch.linspace(-6, 6, 999, dtype=torch.float64)
    torch.testing.assert_close(
        activate(activation, x), transformers.activations.ACT2FN[name](x), rtol=0, atol=2e-7
    )


def test_the_two_gelus_differ_by_less_than_the_docstring_says():
    from bothways.model.block import activate

    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    difference = float((activate("gelu", x) - activate("gelu_tanh", x)).abs().max())
    assert 4e-4 < difference < 5e-4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder True has no counterpart here: it must be one of False"),
        ({"add_cross_attention": True}, "add_cross_attention True has no counterpart here"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' has no counterpart here"),
        ({"hidden_act": ["gelu"]}, "hidden_act ['gelu'] has no counterpart here"),
        ({"hidden_size": "768"}, "hidden_size must be a whole number, not '768'"),
        ({"hidden_size": 768.0}, "hidden_size must be a whole number, not 768.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, not True"),
        ({"layer_norm_eps": 10**400}, "layer_norm_eps must be a number, not 1000000000"),
        ({"layer_norm_eps": None}, "layer_norm_eps must be a number, not None"),
        ({"pad_token_id": "0"}, "pad_token_id must be a whole number, not '0'"),
        ({"hidden_size": 100}, "encoder.heads: width 100 cannot be divided among 12 heads"),
        ({"max_position_embeddings": 0}, "encoder.position.max_positions: must be at least 1"),
    ],
)
def test_what_cannot_be_said_here_is_refused_by_name(setting, message):
    with pytest.raises(FolderError, match=re.escape(f"some/config.json: {message}")):
        bert.BERT.config_rules.read(setting, "some/config.json")


def test_what_cannot_be_said_there_has_no_family():
    assert family_for(dataclasses.replace(bert.tiny(), segments=0)) is None
    assert family_named("bert") is bert.BERT
    assert family_named("t5") is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("bert-tiny", (2, 128, 2, 512, 30_522)),
        ("bert-mini", (4, 256, 4, 1024, 30_522)),
        ("bert-small", (4, 512, 8, 2048, 30_522)),
        ("bert-medium", (8, 512, 8, 2048, 30_522)),
        ("bert-base", (12, 768, 12, 3072, 30_522)),
        ("bert-large", (24, 1024, 16, 4096, 30_522)),
        ("bert-base-cased", (12, 768, 12, 3072, 28_996)),
        ("bert-base-multilingual-cased", (12, 768, 12, 3072, 119_547)),
        ("bert-base-chinese", (12, 768, 12, 3072, 21_128)),
    ],
)
def test_presets_have_the_published_sizes(name, shape):
    config = preset(name)
    assert (
        config.depth,
        config.width,
        config.heads,
        config.intermediate_size,
        config.vocab,
    ) == shape
    assert config == dataclasses.replace(
        bert.base(),
        **{
            key: getattr(config, key)
            for key in ("depth", "width", "heads", "intermediate_size", "vocab")
        },
    )


def test_every_preset_has_a_family_and_takes_another_vocabulary():
    without = {name for name, make in PRESETS.items() if family_for(make()) is None}
    assert without == {
        "transformer-base",
        "transformer-big",
    }
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
        found = nearest_preset(name)
        assert found == meant
    with pytest.raises(ConfigError, match=r"did you mean 'electra-base'\?\n  To begin with"):
        preset("google/electra-base")
    with pytest.raises(ConfigError, match="there is no preset 'xyz'"):
        preset("xyz")
