"""ModernBERT's and GPT's settings: older files, cycles over layers, and what has no counterpart."""

from dataclasses import replace
from typing import Any

import pytest

from bothways.core.config.reader import load, read, to_dict, to_toml
from bothways.core.config.values import write_toml
from bothways.core.errors import FolderError
from bothways.hub.load_report import plan_loading
from bothways.model.attention.patterns import Causal, Full, Window
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families import gpt, modernbert
from bothways.model.families.catalogue import family_for, preset
from bothways.model.families.gpt import GPT, GPT2
from bothways.model.families.modernbert import MODERNBERT
from bothways.model.positions import Learned, Rotary

PUBLISHED: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "classifier_activation": "gelu", "classifier_bias": False,
    "classifier_dropout": 0.0, "classifier_pooling": "mean", "decoder_bias": True, "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu", "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 1152, "local_attention": 128, "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False,
    "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283, "vocab_size": 50368,
}  # fmt: skip
"""The settings of the published base model, from before `layer_types`."""


def test_the_published_settings_are_the_preset():
    assert (
        MODERNBERT.config_rules.read(PUBLISHED, "")
        == modernbert.base().canonical
        == modernbert.base()
    )


def test_absent_settings_mean_what_transformers_means():
    found = MODERNBERT.config_rules.read({}, "")
    assert found.patterns == (Full(), Window(64), Window(64))
    assert found.position == Rotary(8192, (160_000.0, 10_000.0, 10_000.0))
    assert GPT2.config_rules.read({}, "") == gpt.PRESETS["gpt2"]()
    assert GPT.config_rules.read({}, "") == gpt.base()


def test_no_local_base_means_the_global_one():
    found = MODERNBERT.config_rules.read(PUBLISHED | {"local_rope_theta": None}, "")
    assert found.position == Rotary(8192, (160_000.0,))


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
def test_other_depths_of_a_preset_keep_their_family(depth):
    config = replace(modernbert.base(), depth=depth)
    settings = MODERNBERT.config_rules.write(config)
    assert (
        settings["layer_types"]
        == (["full_attention", "sliding_attention", "sliding_attention"] * 3)[:depth]
    )
    assert MODERNBERT.config_rules.read(settings, "").canonical == config.canonical
    assert family_for(config) is MODERNBERT


@pytest.mark.parametrize(
    "settings",
    [
        {"patterns": (Full(), Window(64), Window(32))},
        {"patterns": (Causal(),)},
        {"position": Learned(8192)},
        {"position": Rotary(8192, (160_000.0, 10_000.0, 20_000.0))},
        {"dropout": Dropouts(0.1, 0.0, places=("embedding", "attention"))},
        {"segments": 2},
    ],
)
def test_what_theirs_cannot_say_has_no_counterpart(settings):
    assert MODERNBERT.config_rules.write(replace(modernbert.base(), **settings)) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must name full_attention"),
        ({"layer_types": ["linear_attention"] * 22}, "layer_types must name"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers must be at least 1, not 0"),
        ({"layer_types": [["full_attention"]] * 22}, "layer_types must name"),
        ({"rope_parameters": [1]}, "rope_parameters must be a table for each kind of layers"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters must be a table"),
        ({"rope_scaling": {"type": "yarn"}}, "rotary positions scaled by"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rotary positions scaled"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": "1e4"}}},
            "rope_theta must be a number",
        ),
        ({"classifier_pooling": "max"}, "classifier_pooling 'max' has no counterpart here"),
        ({"norm_bias": "no"}, "norm_bias 'no' has no counterpart here: it must be one of True"),
        ({"num_attention_heads": 256}, "rotary positions need an even head size"),
        ({"mlp_dropout": 1.5}, "encoder.mlp.dropout: must be in [0, 1), not 1.5"),
    ],
)
def test_settings_without_a_counterpart_are_refused(settings, message):
    with pytest.raises(FolderError) as caught:
        MODERNBERT.config_rules.read(PUBLISHED | settings, "config.json")
    assert message in str(caught.value)


def test_a_scaled_gpt_is_refused():
    with pytest.raises(FolderError, match="scale_attn_by_inverse_layer_idx True"):
        GPT2.config_rules.read({"scale_attn_by_inverse_layer_idx": True}, "")


@pytest.mark.parametrize("name", ["modernbert-base", "gpt2", "openai-gpt"])
def test_a_preset_comes_back_from_a_file(name, tmp_path):
    config = preset(name)
    (tmp_path / "encoder.toml").write_text(to_toml(config))
    assert load(EncoderConfig, file=tmp_path / "encoder.toml") == config
    assert read(EncoderConfig, to_dict(config)) == config


def test_a_single_pattern_is_given_by_its_name():
    assert load(EncoderConfig, base=gpt.base(), overrides=["patterns=full"]).patterns == (Full(),)


def test_tables_among_texts_are_written_in_line():
    assert (
        write_toml({"a": ["full", {"radius": 64, "kind": "window"}]})
        == 'a = ["full", {radius = 64, kind = "window"}]\n'
    )


def test_masks_in_old_files_are_no_weights():
    held = {"h.0.attn.bias": (1, 1, 8, 8), "wte.weight": (9, 4)}
    report = plan_loading(GPT2.keys, {"encoder.embedding.token.weight": (9, 4)}, held, ())
    assert report.loaded == ("transformer.wte.weight",)
    assert report.unused == {"h.0.attn.bias": "computed here"}
