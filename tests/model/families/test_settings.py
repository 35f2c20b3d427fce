"""Settings of families: older files, cycles over layers, and what has no counterpart."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from bothways.core.batch import Batch, Layout
from bothways.core.config.reader import load
from bothways.core.errors import FolderError
from bothways.hub.model_folder import LoadedModel, load_model, save_model
from bothways.hub.weight_files import plan_loading
from bothways.model.attention.mask import RotaryTables
from bothways.model.attention.patterns import Causal, Full, Window
from bothways.model.config import Dropouts, EncoderConfig, Own
from bothways.model.embedding import bucket_of
from bothways.model.families import gpt, modernbert
from bothways.model.families.catalogue import FAMILIES, family_for, family_named, preset
from bothways.model.families.family import Family
from bothways.model.families.gpt import GPT, GPT2
from bothways.model.families.gte import GTE
from bothways.model.families.modernbert import MODERNBERT
from bothways.model.families.nomic import NOMIC_BERT
from bothways.model.positions import DistanceBias, Learned, Rotary, Sinusoidal
from drawn_settings import draw_settings
from family_peers import peer

PUBLISHED: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "classifier_activation": "gelu", "classifier_bias": False,
    "classifier_dropout": 0.0, "classifier_pooling": "mean", "decoder_bias": True, "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu", "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 1152, "local_attention": 128, "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False,
    "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283, "vocab_size": 50368,
}  # fmt: skip
"""The settings of the published base model, from before `layer_types`."""
V3 = preset("deberta-v3-base")


def test_the_published_settings_are_the_preset():
    base = modernbert.base()
    assert MODERNBERT.config_rules.read(PUBLISHED, "") == base.canonical == base


@pytest.mark.parametrize("family", FAMILIES, ids=[family.model_type for family in FAMILIES])
def test_absent_settings_mean_what_they_mean_in_transformers(family):
    settings = transformers.CONFIG_MAPPING[family.model_type]().to_dict()
    assert family.config_rules.read({}, "") == family.config_rules.read(settings, "")


def test_absent_settings_of_gpt_are_its_preset():
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


@pytest.mark.parametrize(("depth", "interval"), [(1, 1), (4, 1), (4, 2), (7, 3)])
def test_releases_before_layer_types_read_the_same_model(depth, interval):
    rules = MODERNBERT.config_rules
    older = PUBLISHED | {"num_hidden_layers": depth, "global_attn_every_n_layers": interval}
    config = rules.read(older | {"global_rope_theta": 5.0, "local_rope_theta": 7.0}, "")
    settings = rules.write(config)
    for name in ("layer_types", "rope_parameters"):
        del settings[name]
    assert rules.read(settings, "") == config


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (modernbert.base(), {"patterns": (Full(), Window(64), Window(32))}),
        (modernbert.base(), {"patterns": (Causal(),)}),
        (modernbert.base(), {"position": Learned(8192)}),
        (modernbert.base(), {"position": Rotary(8192, (160_000.0, 10_000.0, 20_000.0))}),
        (modernbert.base(), {"dropout": Dropouts(0.1, 0.0, places=("embedding", "attention"))}),
        (modernbert.base(), {"segments": 2}),
        (
            modernbert.base(),
            {"readout": replace(modernbert.base().readout, tokens=Own(reads="late"))},
        ),
        (V3, {"position": Sinusoidal()}),
        (V3, {"readout": replace(V3.readout, choice=Own("relu"))}),
    ],
)
def test_what_theirs_cannot_say_has_no_counterpart(config, changes):
    family = family_for(config)
    assert family.config_rules.write(replace(config, **changes)) is None


BASES: dict[str, dict[str, Any]] = {
    "modernbert": PUBLISHED,
    "longformer": draw_settings("longformer", 0) | {"num_hidden_layers": 2},
    "deberta-v2": draw_settings("deberta-v2", 0) | {
        "hidden_size": 16, "num_attention_heads": 2, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False, "max_position_embeddings": 24,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder True has no counterpart here: it must be one of False"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention True has no counterpart here"),
        ("bert", {"hidden_act": "mish"}, "hidden_act 'mish' has no counterpart here"),
        ("bert", {"hidden_act": ["gelu"]}, "hidden_act ['gelu'] has no counterpart here"),
        ("bert", {"hidden_size": "768"}, "hidden_size must be a whole number, not '768'"),
        ("bert", {"hidden_size": 768.0}, "hidden_size must be a whole number, not 768.0"),
        ("bert", {"num_hidden_layers": True}, "num_hidden_layers must be a whole number, not True"),
        ("bert", {"layer_norm_eps": 10**400}, "layer_norm_eps must be a number, not 1000000000"),
        ("bert", {"layer_norm_eps": None}, "layer_norm_eps must be a number, not None"),
        ("bert", {"pad_token_id": "0"}, "pad_token_id must be a whole number, not '0'"),
        ("bert", {"hidden_size": 100}, "encoder.heads: width 100 cannot be divided among 12 heads"),
        ("bert", {"max_position_embeddings": 0}, "encoder.position.max_positions: must be at least 1"),
        ("big_bird", {"attention_type": "sparse"}, "attention_type 'sparse'"),
        ("big_bird", {"block_size": 0}, "must be at least 1"),
        ("big_bird", {"num_random_blocks": 0}, "must be at least 1"),
        *(("longformer", {"attention_window": window}, "attention_window must be an even number")
          for window in (3, 0, [4], [4, 4, 4], "8", True, None)),
        ("deberta-v2", {"pos_att_type": ["p2p"]}, "pos_att_type ['p2p'] has no counterpart here"),
        ("deberta-v2", {"pos_att_type": 3}, "pos_att_type 3 has no counterpart here"),
        ("deberta-v2", {"pos_att_type": "c2p|c2p"}, "must hold c2p, p2c or both, once each"),
        ("deberta-v2", {"pos_att_type": None}, "must hold c2p, p2c or both, once each"),
        ("deberta-v2", {"relative_attention": False}, "without relative_attention there must be no pos_att_type"),
        ("deberta-v2", {"relative_attention": False, "pos_att_type": None}, "without relative_attention"),
        ("deberta-v2", {"pooler_hidden_size": 8}, "pooler_hidden_size must be 16, as the other settings imply"),
        ("deberta-v2", {"attention_head_size": 4}, "attention_head_size must be 8, as the other settings imply"),
        ("deberta-v2", {"pooler_hidden_act": "mish"}, "pooler_hidden_act 'mish' has no counterpart"),
        ("deberta-v2", {"talking_head": True}, "talking_head True has no counterpart"),
        ("deberta-v2", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd 'batch_norm' has no counterpart"),
        ("deberta-v2", {"conv_kernel_size": 2}, "must be odd, not 2"),
        ("deberta-v2", {"position_buckets": 1}, "buckets: must be at least 2, not 1"),
        ("deberta-v2", {"position_buckets": 45, "max_relative_positions": 20}, "must be below twice"),
        ("deberta-v2", {"position_buckets": "6"}, "position_buckets must be a whole number, not '6'"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types must name full_attention"),
        ("modernbert", {"layer_types": ["linear_attention"] * 22}, "layer_types must name"),
        ("modernbert", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers must be at least 1, not 0"),
        ("modernbert", {"layer_types": [["full_attention"]] * 22}, "layer_types must name"),
        ("modernbert", {"rope_parameters": [1]}, "rope_parameters must be a table for each kind of layers"),
        ("modernbert", {"rope_parameters": {"full_attention": 5}}, "rope_parameters must be a table"),
        ("modernbert", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters must be a table for each kind"),
        ("modernbert", {"rope_scaling": {"type": "yarn"}}, "rotary positions scaled by"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rotary positions scaled"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_theta": "1e4"}}}, "rope_theta must be a number"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling 'max' has no counterpart here"),
        ("modernbert", {"norm_bias": "no"}, "norm_bias 'no' has no counterpart here: it must be one of True"),
        ("modernbert", {"num_attention_heads": 256}, "rotary positions need an even head size"),
        ("modernbert", {"mlp_dropout": 1.5}, "encoder.mlp.dropout: must be at least 0 and below 1, not 1.5"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("mpnet", {"pad_token_id": 0}, "pad_token_id must be 1, from which positions count, not 0"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "must be 32, not 64"),
        ("nomic_bert", {"head_dim": 3}, "head_dim must be 64"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction must be 1, not 0.5"),
        ("nomic_bert", {"rotary_emb_base": float("nan")}, "rope_theta must be a number, not nan"),
        ("nomic_bert", {"prenorm": True}, "prenorm True has no counterpart here"),
        ("gte", {"rope_parameters": {"rope_type": "yarn"}}, "of type 'yarn' have no counterpart"),
        ("gte", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor have"),
        ("gte", {"rope_parameters": [1]}, "rope_parameters must be a table"),
        ("new", {"pack_qkv": False}, "pack_qkv False has no counterpart here"),
        ("gte", {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "must be above 0"),
    ],
)  # fmt: skip
def test_settings_without_a_counterpart_are_refused(model_type, settings, message):
    rules = family_named(model_type).config_rules
    with pytest.raises(FolderError) as caught:
        rules.read(BASES.get(model_type, {}) | settings, "some/config.json")
    assert caught.value.where == "some/config.json"
    assert message in str(caught.value)


def test_a_single_pattern_is_given_by_its_name():
    assert load(EncoderConfig, base=gpt.base(), overrides=["patterns=full"]).patterns == (Full(),)


def test_masks_in_old_files_are_no_weights():
    held = {"h.0.attn.bias": (1, 1, 8, 8), "wte.weight": (9, 4)}
    report = plan_loading(GPT2.keys, {"encoder.embedding.token.weight": (9, 4)}, held, ())
    assert report.loaded == ("transformer.wte.weight",)
    assert report.unused == {"h.0.attn.bias": "computed here"}


def test_buckets_of_all_distances_equal_transformers():
    distances = torch.arange(-600, 601)
    reference = MPNetEncoder.relative_position_bucket(-distances, num_buckets=32)
    torch.testing.assert_close(bucket_of(DistanceBias(), distances), reference, rtol=0, atol=0)


def test_buckets_of_example():
    buckets = bucket_of(DistanceBias(8, 8), torch.arange(-4, 6)).tolist()
    assert buckets == [7, 6, 6, 5, 0, 1, 2, 2, 3, 3]


def saved(family: Family, name: str, folder: Path) -> nn.Module:
    reference = peer(family, family.architecture_named([name]), 2).eval()
    reference.save_pretrained(folder)
    return reference


def renamed(folder: Path, settings: dict[str, Any], old: str, new: str) -> None:
    """Give the folder these settings, and its tensors another prefix."""
    (folder / "config.json").write_text(json.dumps(settings))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}, file
    )


def assert_same_logits(loaded: LoadedModel, reference: nn.Module) -> None:
    ids = torch.randint(4, 50, (3, 7), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids.flatten(), torch.zeros(21, dtype=torch.int64), Layout.of([7] * 3))
    with torch.no_grad():
        expected = reference(input_ids=ids).logits.flatten(0, 1)
        actual = loaded.model(batch, heads=["masked"]).logits["masked"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_nomic_folder_as_published_is_read(tmp_path):
    reference = saved(NOMIC_BERT, "NomicBertForMaskedLM", tmp_path)
    config: Any = reference.config
    settings = {
        "model_type": "nomic_bert", "architectures": ["NomicBertForPreTraining"], "vocab_size": 50,
        "n_embd": config.hidden_size, "n_layer": config.num_hidden_layers, "n_head": config.num_attention_heads,
        "n_inner": config.intermediate_size, "n_positions": 64, "layer_norm_epsilon": config.layer_norm_eps,
        "activation_function": config.hidden_act, "type_vocab_size": config.type_vocab_size,
        "rotary_emb_base": config.rope_parameters["rope_theta"], "rotary_emb_fraction": 1.0, "rotary_emb_scale_base": None,
        "rotary_scaling_factor": 2, "max_trained_positions": 24, "prenorm": False, "qkv_proj_bias": False, "resid_pdrop": 0.0,
        "rope_parameters": config.rope_parameters, "pad_token_id": 0,
    }  # fmt: skip
    renamed(tmp_path, settings, "nomic_bert.", "bert.")
    loaded = load_model(tmp_path)
    assert not loaded.report.faults
    assert not loaded.report.unused
    assert loaded.model.config.max_positions == 24
    assert_same_logits(loaded, reference)
    save_model(tmp_path / "ours", loaded.model)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    assert_same_logits(loaded, again)


@pytest.mark.parametrize("prefix", ["new.", ""])
def test_gte_folder_as_published_is_read(prefix, tmp_path):
    reference = saved(GTE, "GteForMaskedLM", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {
        "model_type": "new", "architectures": ["NewForMaskedLM"], "position_embedding_type": "rope", "pack_qkv": True,
        "layer_norm_type": "layer_norm", "logn_attention_scale": False,
    }  # fmt: skip
    renamed(tmp_path, settings, "gte.", prefix)
    loaded = load_model(tmp_path)
    assert not loaded.report.unused
    assert_same_logits(loaded, reference)
    save_model(tmp_path / "ours", loaded.model)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "gte"


@pytest.mark.parametrize(
    ("family", "name"), [(NOMIC_BERT, "NomicBertForMaskedLM"), (GTE, "GteForMaskedLM")]
)
def test_names_of_modules_are_read(family, name, tmp_path):
    """As `save_pretrained(save_original_format=False)` and a state dict have them."""
    reference = saved(family, name, tmp_path)
    state = {key: value.clone() for key, value in reference.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert_same_logits(load_model(tmp_path), reference)


def test_ntk_scaling_is_larger_base_and_slower_angles():
    """The published code: inverse frequencies of base · factor, divided by factor^(2/d)."""
    settings = {"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 20_000.0}
    scaling = {"rope_scaling": {"type": "ntk", "factor": 8.0}, "vocab_size": 50}
    position = GTE.config_rules.read(settings | scaling, "config.json").position
    places, size = torch.arange(100), 32
    tables = RotaryTables.of(places, size, position.bases[0], position.factor)
    powers = torch.arange(0, size, 2).double() / size
    frequencies = (20_000.0 * 8) ** -powers / 8 ** (2 / size)
    expected = (places[:, None] * frequencies).cos()
    torch.testing.assert_close(tables.cos.flatten(1).double(), expected, rtol=0, atol=2e-5)
