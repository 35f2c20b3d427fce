"""Nomic BERT and GTE as they were published, with settings and tensors under other names than transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from bothways.core.batch import Batch, Layout
from bothways.core.errors import FolderError
from bothways.hub.model_folder import LoadedModel, load_model, save_model
from bothways.model.attention.mask import RotaryTables
from bothways.model.families.catalogue import FAMILIES
from bothways.model.families.family import Family
from bothways.model.families.gte import GTE
from bothways.model.families.nomic import NOMIC_BERT
from bothways.model.positions import Rotary
from family_peers import peer


def classes_of(family: Family) -> dict[str, Any]:
    return {a.name: a for a in family.architectures}


def saved(family: Family, name: str, folder: Path) -> nn.Module:
    reference = peer(family, classes_of(family)[name], 2).eval()
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
    assert isinstance(position, Rotary)
    places, size = torch.arange(100), 32
    tables = RotaryTables.of(places, size, position.bases[0], position.factor)
    powers = torch.arange(0, size, 2).double() / size
    frequencies = (20_000.0 * 8) ** -powers / 8 ** (2 / size)
    expected = (places[:, None] * frequencies).cos()
    torch.testing.assert_close(tables.cos.flatten(1).double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("nomic_bert", {"head_dim": 3}, "head_dim must be 64"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction must be 1, not 0.5"),
        ("nomic_bert", {"prenorm": True}, "prenorm True has no counterpart here"),
        ("gte", {"rope_parameters": {"rope_type": "yarn"}}, "of type 'yarn' have no counterpart"),
        ("gte", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor have"),
        ("gte", {"rope_parameters": [1]}, "rope_parameters must be a table"),
        ("new", {"pack_qkv": False}, "pack_qkv False has no counterpart here"),
        ("gte", {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "must be above 0"),
    ],
)
def test_other_settings_are_refused(model_type, settings, message):
    family = next(f for f in FAMILIES if model_type in (f.model_type, *f.other_types))
    with pytest.raises(FolderError, match=message):
        family.config_rules.read(settings, "config.json")
