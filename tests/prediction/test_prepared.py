"""Models prepared for predictions say what they said; packed weights against the layers that they were made of."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bothways.core.batch import pack
from bothways.core.errors import ConfigError
from bothways.core.runtime.devices import has_bf16, has_int8, packs_weights
from bothways.core.source import Sequence
from bothways.model.attention.patterns import Window
from bothways.model.block import Block
from bothways.model.config import EncoderConfig, Gated, PreNorm
from bothways.model.families.catalogue import preset
from bothways.model.heads import LabelHead, MaskedHead
from bothways.model.kernels import library as native
from bothways.model.kernels.library import Feature
from bothways.model.kernels.linear import InferenceLayer, OneDNNLinear
from bothways.model.model import Encoder, Model
from bothways.model.positions import Disentangled, Learned, Rotary, Sinusoidal
from bothways.prediction import prepared_model as prepared
from bothways.prediction.prepared_model import prepare_model
from small_models import batch_for

CPU = torch.device("cpu")
BF16 = has_bf16(CPU)
packs = pytest.mark.skipif(not packs_weights(CPU), reason="nothing is packed on this processor")
int8 = pytest.mark.skipif(not has_int8(CPU), reason="this processor does not multiply int8")
pytestmark = pytest.mark.usefixtures("either_way")
bf16 = pytest.mark.skipif(not BF16, reason="this processor does not multiply bf16")
FP32, INT8 = pytest.param("fp32", marks=packs), pytest.param("int8", marks=int8)
BOTH = pytest.mark.parametrize("precision", [FP32, INT8])
ALL = pytest.mark.parametrize("precision", [FP32, pytest.param("bf16", marks=(packs, bf16)), INT8])


def made(precision: str) -> str:
    """The class of a prepared dense layer."""
    if precision == "int8":
        return "Int8Linear"
    return "PanelLinear" if native.multiplies("fp32") else "OneDNNLinear"


def config(**changes: object) -> EncoderConfig:
    return EncoderConfig(50, 32, 2, 2, 64, position=Learned(24), initial_range=0.2, **changes)


def layers(model: nn.Module) -> dict[str, list[str]]:
    """The names of dense layers by their class."""
    found: dict[str, list[str]] = {}
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for name, module in block.named_modules():
            if name and isinstance(module, nn.Linear | InferenceLayer):
                found.setdefault(type(module).__name__, []).append(name)
    return found


@packs
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=bf16)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_give_the_product(dtype, bias):
    torch.manual_seed(1)
    linear = nn.Linear(37, 23, bias=bias)
    packed = OneDNNLinear(linear, dtype)
    for rows in (0, 1, 17, 300):
        x = torch.randn(rows, 37)
        with torch.no_grad():
            found = packed(x)
            wanted = linear.to(dtype).double()(x.to(dtype).double())
        assert found.dtype == dtype
        rtol = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=1e-5)


@packs
def test_gradients_are_refused():
    layer = prepared.layer_packer(CPU, torch.float32)(nn.Linear(8, 3))
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(ConfigError, match=f"{made('fp32')} is for inference and has no gradients"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (2, 3)


@BOTH
def test_saving_is_refused(precision):
    with pytest.raises(ConfigError, match="exist in memory only"):
        prepare_model(Model(config(), ()), precision).state_dict()


@BOTH
def test_the_model_stays_and_all_else_is_shared(precision):
    model = Model(config(), (MaskedHead(), LabelHead(3))).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = prepare_model(model, precision)
    assert model.training
    assert not any(module.training for module in result.modules())
    names = ["attention.qkv", "attention.out", "mlp.up", "mlp.down"] * 2
    assert layers(model) == {"Linear": names}
    assert layers(result) == {made(precision): names}
    kept = dict(model.named_parameters())
    assert all(parameter is kept[name] for name, parameter in result.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert isinstance(result.encoder, Encoder)


@BOTH
def test_what_is_no_plain_linear_is_left(precision):
    class Other(torch.nn.Linear):
        """A layer that may compute anything."""

    model = Model(config(mlp=Gated()), ())
    for parent in list(model.encoder.blocks[1].modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear:
                setattr(parent, name, Other(child.in_features, child.out_features))
    assert sorted(layers(prepare_model(model, precision))) == sorted([made(precision), "Other"])


SMALL = {"vocab": 60, "width": 64, "heads": 4, "depth": 2, "intermediate_size": 96, "pad": 0}
FAMILIES = (
    "bert-base", "megatron-bert-345m", "roberta-base", "distilbert-base-uncased", "albert-base-v2", "electra-small-generator",
    "deberta-base", "deberta-v2-xlarge", "deberta-v3-base", "longformer-base-4096", "bigbird-roberta-base", "modernbert-base",
    "gpt2", "transformer-base", "ernie-3.0-nano-zh", "mpnet-base", "nomic-bert-2048", "gte-base-en-v1.5",
    "eurobert-610m",
)  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", FAMILIES)
def test_every_preset_in_small_says_the_same(name, precision):
    """Of tokens, and of what the masked head reads, which disentangled attention makes with queries of its own."""
    base = preset(name)
    shrunk = replace(
        base, **SMALL, embedding=base.embedding and 32, patterns=base.patterns[:2],
        key_value_heads=base.key_value_heads and 2, initial_range=0.1,
    )  # fmt: skip
    torch.manual_seed(7)
    model = Model(shrunk, (MaskedHead(),)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = [torch.randint(1, 60, (length,), dtype=torch.int32).numpy() for length in (5, 17, 30)]
    batch = pack([Sequence(row, np.zeros(len(row), np.int8)) for row in ids])
    found = prepare_model(model, precision)
    left = ["attention.qkv"] if isinstance(base.position, Disentangled) else []
    kept = [name for name in layers(found).get("Linear", []) if "position" not in name]
    assert kept == left
    assert made(precision) in layers(found)
    with torch.no_grad():
        for read in (
            lambda it: it.encoder(batch).last,
            lambda it: it.masked_vectors(batch, it.encoder(batch)),
        ):
            wanted, got = read(model), read(found)
            if precision == "fp32":
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
            assert nn.functional.cosine_similarity(wanted, got).min() > 0.995


@ALL
@pytest.mark.parametrize(
    ("changes", "layers_joined", "rest_joined"),
    [
        ({}, True, True),
        ({"position": Sinusoidal()}, True, True),
        ({"patterns": (Window(8),)}, False, True),
        ({"position": Rotary()}, False, True),
        ({"heads": 4}, False, True),
        ({"order": PreNorm()}, False, False),
        ({"mlp": Gated()}, False, False),
        ({"activation": "relu"}, False, False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_tables_say_what_is_one_kernel(changes, layers_joined, rest_joined, precision):
    result = prepare_model(Model(replace(config(), **changes), ()), precision)
    own = native.multiplies(precision)
    assert (result.encoder.layers is not None) is (layers_joined and own)
    for block in (m for m in result.modules() if isinstance(m, prepared.PreparedBlock)):
        assert (block.fused is not None) is (rest_joined and own)


def test_many_tokens_go_through_prepared_layers_where_kernels_are_faster_for_any_number():
    model = Model(config(), ())
    gains = Feature.AMX in native.kernel_features()
    assert prepared.gains_at_bulk(model) is gains
    if packs_weights(CPU):
        result = prepare_model(model)
        assert not prepared.gains_at_bulk(result)
        assert result.splits_batches is gains
        if BF16:
            assert prepare_model(model, "bf16").splits_batches is native.multiplies("bf16")


def test_int8_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(prepared.devices, "has_int8", lambda device: False)
    with pytest.raises(ConfigError, match="int8 needs instructions"):
        prepare_model(Model(config(), ()), "int8")


def test_layers_stay_where_nothing_can_be_packed(monkeypatch):
    monkeypatch.setattr(prepared.devices, "packs_weights", lambda device: False)
    model = Model(config(), ())
    kept = dict(model.named_parameters())
    result = prepare_model(model)
    assert result is not model
    assert dict(result.named_parameters()).keys() == kept.keys()
    assert all(parameter is kept[name] for name, parameter in result.named_parameters())


@bf16
def test_weights_are_converted_once_where_nothing_can_be_packed(monkeypatch):
    """With the bits of autocast, which converts them in every batch, as on a GPU."""
    monkeypatch.setattr(prepared.devices, "packs_weights", lambda device: False)
    model = Model(config(), ()).eval()
    result, batch = prepare_model(model, "bf16"), batch_for(model.config, [5, 9])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted, found = (each.encoder(batch).last for each in (model, result))
    assert torch.equal(found, wanted)
    block = result.encoder.blocks[0]
    layers = [block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down]
    assert {layer.weight.dtype for layer in layers} == {torch.bfloat16}
    assert model.encoder.blocks[0].mlp.up.weight.dtype is torch.float32
