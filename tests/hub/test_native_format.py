"""Folders of our own type: random configurations there and back, and files that were tampered with."""

import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from bothways.core.errors import FolderError
from bothways.hub.hf_config import read_hf_config
from bothways.hub.model_folder import load_model, save_model
from bothways.model.attention.patterns import Causal, Full, Window
from bothways.model.config import (
    Bias,
    Dropouts,
    EncoderConfig,
    FromPooler,
    FromVector,
    Gated,
    Own,
    Plain,
    PostNorm,
    PreNorm,
    Readout,
    Sharing,
)
from bothways.model.families.catalogue import family_for
from bothways.model.heads import LabelHead, MaskedHead, PairHead, PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned, Rotary, Sinusoidal
from commands import run_line
from random_weights import perturb
from small_models import EVERY_HEAD, batch_for

VOCAB = 23
LENGTHS = [4, 1, 6]


def draw_transformer(rng: random.Random) -> EncoderConfig:
    """A small shape with a value of every union at random."""
    heads, depth, most = rng.randint(1, 2), rng.randint(1, 3), rng.randint(6, 9)

    def flag() -> bool:
        return rng.random() < 0.5

    def own() -> Own:
        return Own(rng.choice(("tanh", "relu")), norm=flag(), reads=rng.choice(("first", "mean")))

    def pattern() -> Full | Window | Causal:
        return rng.choice((Full(), Window(rng.randint(0, 4)), Causal()))

    bases = tuple(rng.uniform(2, 1e5) for _ in range(rng.randint(1, 2)))
    return EncoderConfig(
        VOCAB, heads * rng.choice((2, 4)), depth, heads, rng.randint(1, 9), rng.randint(0, 2),
        position=rng.choice((Learned(most, rng.randint(0, 2)), Sinusoidal(most, flag(), flag()), Rotary(most, bases))),
        patterns=tuple(pattern() for _ in range(rng.randint(1, 2))),
        order=rng.choice((PostNorm(flag()), PreNorm(flag()))),
        mlp=rng.choice((Plain(), Gated(rng.random() * 0.9))),
        bias=Bias(*(flag() for _ in range(5))),
        activation=rng.choice(("gelu", "gelu_tanh", "relu", "silu")),
        norm_epsilon=10 ** -rng.uniform(3, 12),
        dropout=Dropouts(rng.random() * 0.9, rng.random() * 0.9),
        pad=rng.choice((None, rng.randrange(VOCAB))),
        sharing=rng.choice((None, Sharing(rng.randint(1, depth), rng.randint(1, 2)))),
        readout=Readout(labels=rng.choice((FromPooler(), FromVector(), own())), tokens=rng.choice((None, own()))),
    )  # fmt: skip


HEADS = [*(EVERY_HEAD | {"labels": LabelHead(3, 0.25)}).values()]


def draw_model(seed: int) -> Model:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Model(draw_transformer(rng), rng.sample(HEADS, rng.randint(0, 4))).eval()
    return perturb(model, 0.3)


def write_as_own(folder: Path, model: Model) -> None:
    """As ours even where a family could express it: the folder is to hold any configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bothways.hub.hf_config.family_for", lambda *arguments: None)
        save_model(folder, model)


@given(st.integers(0, 10**9))
def test_any_configuration_comes_back_as_it_was(seed):
    model = draw_model(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_as_own(folder, model)
        loaded = load_model(folder)
    assert loaded.model.config == model.config
    assert loaded.model.specification == model.specification
    state, again = model.state_dict(), loaded.model.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert not loaded.report.faults
    assert not loaded.report.unused
    given = batch_for(model.config, LENGTHS)
    with torch.no_grad():
        mine, theirs = (m.encoder(given, keep_layers=True).layers for m in (model, loaded.model))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


GEGLU = EncoderConfig(VOCAB, 8, 2, 2, 8, position=Learned(9), mlp=Gated())
ROTARY = replace(GEGLU, mlp=Plain(), position=Rotary(9))


@pytest.mark.parametrize(
    ("config", "heads", "labels"),
    [
        (GEGLU, (MaskedHead(), PoolerHead(), PairHead()), ()),
        (ROTARY, (PoolerHead(), LabelHead(2)), ("no", "yes")),
    ],
    ids=["GeGLU BERT", "rotary with a pooler"],
)
def test_what_no_family_has_is_ours(config, heads, labels, tmp_path, capsys):
    assert family_for(config) is None
    model = Model(config, heads).eval()
    save_model(tmp_path / "model", model, labels=labels)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (raw["model_type"], list(raw["bothways"])) == ("bothways", ["encoder", "heads"])
    card = (tmp_path / "model" / "README.md").read_text()
    assert "library_name: bothways" in card
    assert "transformers has no class for this model" in card
    assert "from_pretrained" not in card
    loaded, given = load_model(tmp_path / "model"), batch_for(config, LENGTHS)
    with torch.no_grad():
        assert torch.equal(loaded.model.encoder(given).last, model.encoder(given).last)
    assert loaded.labels == labels
    run_line("describe", tmp_path / "model")
    text = capsys.readouterr().out
    assert "bothways, bothways.Model" in text.replace("\n", "")
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" in text


@dataclass(frozen=True)
class CountedHead(PairHead):
    """A head with labels that is neither of texts nor of tokens."""

    count: int = 3
    kind: Literal["counted"] = "counted"

    def build(self, config):
        return nn.Linear(2 * config.width, self.count)


def test_labels_name_the_outputs_of_any_head_that_counts_them(tmp_path):
    model, labels = Model(EncoderConfig(VOCAB, 8, 1, 2, 16), [CountedHead()]), ("a", "b", "c")
    save_model(tmp_path / "saved", model, labels=labels)
    assert load_model(tmp_path / "saved", heads=[CountedHead()]).labels == labels
    with pytest.raises(FolderError, match=r"2 labels for 3 outputs: a, b"):
        save_model(tmp_path / "other", model, labels=labels[:2])


ENCODER = r"bothways\.encoder"
BAD: list[tuple[str, Any, str]] = [
    ("bothways", None, "bothways: must be an object with encoder and heads, not None"),
    ("bothways", {}, rf"{ENCODER}: is missing"),
    ("encoder.widht", 8, rf"{ENCODER}\.widht: unknown key 'widht'; did you mean width\?"),
    ("encoder.order", {"kind": "pots"}, rf"{ENCODER}\.order\.kind: .*did you mean post\?"),
    ("encoder.width", "8", rf"{ENCODER}\.width: must be 8, not '8'"),
    (
        "encoder.segments",
        True,
        rf"{ENCODER}\.segments: True is given, but it must be a whole number",
    ),
    ("encoder.width", [8], rf"{ENCODER}\.width: \[8\] is given, but it must be a whole number"),
    ("encoder.initial_range", float("inf"), r"\.initial_range: must be above 0 and finite"),
    ("encoder.intermediate_size", 10**400, r"\.intermediate_size: must be at most .*, not 1000000"),
    ("encoder.heads", 3, rf"{ENCODER}\.heads: width 8 cannot be divided among 3 heads"),
    ("encoder.depth", 2**31 - 1, r"\.depth: must be at most 10,000, not 2,147,483,647"),
    ("encoder", {"vocab": 2**31 - 1, "width": 2**31 - 2, "heads": 2}, r"\.vocab: must be at most"),
    ("heads", ["maskd"], r"\.heads\.0: 'maskd' is given, but it must be one of masked"),
    ("heads", ["masked", "masked"], r"bothways\.heads: must hold at most one head of each kind"),
    ("heads", ["masked", "span"], "does not hold the head span of this model"),
    ("id2label", {"0": "a"}, "id2label names 1 outputs, and the heads have none"),
    ("encoder.width", 4, "of another shape"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=[name for name, *_ in BAD])
def test_a_damaged_description_is_one_clear_error(name, value, message, tmp_path):
    save_model(tmp_path / "model", Model(GEGLU, (MaskedHead(),)))
    file = tmp_path / "model" / "config.json"
    raw = json.loads(file.read_text())
    *path, key = name.split(".")
    tree = raw["bothways"] if name.startswith(("encoder", "heads")) else raw
    for part in path:
        tree = tree[part]
    tree[key] = value
    file.write_text(json.dumps(raw))
    with pytest.raises(FolderError, match=message) as caught:
        load_model(tmp_path / "model")
    assert str(tmp_path / "model") in str(caught.value)


def test_what_is_left_out_is_as_the_classes_have_it(tmp_path):
    model = Model(EncoderConfig(VOCAB, 12, 1, 12, 8, mlp=Gated()), (MaskedHead(),))
    save_model(tmp_path / "model", model)
    file = tmp_path / "model" / "config.json"
    raw = json.loads(file.read_text())
    kept = {"vocab": VOCAB, "width": 12, "depth": 1, "intermediate_size": 8}
    raw["bothways"] = {"encoder": {**kept, "mlp": {"kind": "gated"}}, "heads": [{"kind": "masked"}]}
    file.write_text(json.dumps(raw))
    assert read_hf_config(tmp_path / "model").encoder == model.config
    assert load_model(tmp_path / "model").model.specification == (MaskedHead(),)


def test_a_preset_without_a_family_is_described(capsys):
    run_line("describe", "transformer-base")
    text = capsys.readouterr().out
    assert "a preset without a class in transformers" in " ".join(text.split())
    assert "masked LM head" in text
