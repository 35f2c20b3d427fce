"""Key rules, each both ways; and BERT's tables against the names that transformers gives its own tensors."""

import dataclasses

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from bothways.model.config import EncoderConfig, PostNorm, PreNorm
from bothways.model.families.bert import BERT, MEGATRON_BERT
from bothways.model.families.catalogue import FAMILIES
from bothways.model.families.weight_names import (
    KeyTable,
    Rename,
    Stack,
    TensorPlacement,
    Tie,
    Transpose,
    to_file_names,
)
from bothways.model.heads import (
    ChoiceHead,
    Head,
    LabelHead,
    MaskedHead,
    PairHead,
    PoolerHead,
    SpanHead,
    TagHead,
)
from bothways.model.model import Model

TABLE = KeyTable(
    "net.",
    (
        Rename("plain", "net.a.plain"),
        Rename("blocks.{}.part", "net.layer.{}.part.dense"),
        Rename("blocks.{}.part_norm", "net.layer.{}.part"),
        Stack("blocks.{}.qkv", ("net.layer.{}.q", "net.layer.{}.k", "net.layer.{}.v")),
        Transpose("blocks.{}.turned", "net.layer.{}.conv"),
        Tie("plain.weight", "decoder.weight", owner="heads.out"),
    ),
    computed=("net.position_ids",),
)
SHAPES = {
    "plain.weight": (5, 2),
    "blocks.0.part.weight": (3, 2),
    "blocks.10.part.bias": (3,),
    "blocks.10.part_norm.weight": (3,),
    "blocks.1.qkv.weight": (6, 4),
    "blocks.1.qkv.bias": (6,),
    "blocks.1.turned.weight": (2, 7),
    "blocks.1.turned.bias": (2,),
}


@given(st.sets(st.sampled_from(sorted(SHAPES))))
def test_there_and_back_is_the_same(names):
    state = {name: torch.randn(SHAPES[name]) for name in names}
    theirs = to_file_names(TABLE, state)
    places = {name: TABLE.place(name) for name in names}
    back = {
        name: place.join([theirs[part] for part in place.names]) for name, place in places.items()
    }
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in names)
    again = to_file_names(TABLE, back)
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_part_is_known_before_it_is_read(name):
    tensor = torch.randn(SHAPES[name])
    place = TABLE.place(name)
    assert {tuple(part.shape) for part in place.split(tensor)} == {place.part_shape(SHAPES[name])}


def test_rules_follow_numbers_and_what_stands_below_a_module():
    state = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    assert set(to_file_names(TABLE, state)) == {
        "net.a.plain.weight",
        "net.layer.0.part.dense.weight",
        "net.layer.10.part.dense.bias",
        "net.layer.10.part.weight",
        *(f"net.layer.1.{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")),
        "net.layer.1.conv.weight",
        "net.layer.1.conv.bias",
    }
    assert to_file_names(TABLE, state)["net.layer.1.conv.weight"].shape == (7, 2)
    assert torch.equal(
        to_file_names(TABLE, state)["net.layer.1.k.weight"], state["blocks.1.qkv.weight"][2:4]
    )


def test_copies_are_never_written_and_known_by_what_they_copy():
    assert TABLE.ties == {
        "net.a.plain.weight": Tie("plain.weight", "decoder.weight", owner="heads.out")
    }
    assert isinstance(TABLE.origin("decoder.weight"), Tie)


@pytest.mark.parametrize(
    ("found", "full"),
    [
        ("net.a.plain.weight", "net.a.plain.weight"),
        ("a.plain.weight", "net.a.plain.weight"),
        ("layer.3.part.gamma", "net.layer.3.part.weight"),
        ("net.layer.3.part.beta", "net.layer.3.part.bias"),
        ("position_ids", "net.position_ids"),
        ("decoder.weight", "decoder.weight"),
        ("stranger.weight", "stranger.weight"),
        ("gamma", "gamma"),
    ],
)
def test_old_and_bare_names_are_understood(found, full):
    assert TABLE.full_name(found) == full


def test_a_name_without_a_rule_is_our_mistake():
    with pytest.raises(AssertionError, match="no rule for blocks"):
        TABLE.place("blocks.x.part.weight")


def test_a_place_says_how_the_tensor_lies():
    assert TABLE.place("plain.weight") == TensorPlacement(
        Rename("plain", "net.a.plain"), ("net.a.plain.weight",)
    )


HEADS: dict[str, Head] = {
    "masked": MaskedHead(),
    "pooler": PoolerHead(),
    "pair": PairHead(),
    "labels": LabelHead(2),
}
HEADS |= {"tags": TagHead(2), "span": SpanHead(), "choice": ChoiceHead()}
ORDERS = {"bert": PostNorm(), "megatron-bert": PreNorm()}
CASES = [
    (family, architecture)
    for family in (BERT, MEGATRON_BERT)
    for architecture in family.architectures
]


@pytest.mark.parametrize(
    ("family", "architecture"), CASES, ids=[architecture.name for _, architecture in CASES]
)
def test_every_tensor_of_every_class_has_its_name_and_shape(family, architecture):
    """Theirs, as transformers makes it, against ours: nothing too much, nothing missing."""
    config = EncoderConfig(
        vocab=30, width=8, depth=2, heads=2, intermediate_size=12, order=ORDERS[family.model_type]
    )
    stem = {"bert": "Bert", "megatron-bert": "MegatronBert"}[family.model_type]
    theirs_config = getattr(transformers, f"{stem}Config")(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
    )
    theirs = getattr(transformers, architecture.name)(theirs_config)
    wanted = {
        family.keys.full_name(name): tuple(parameter.shape)
        for name, parameter in theirs.named_parameters()
    }
    model = Model(config, [HEADS[kind] for kind in sorted(architecture.heads)])
    found = {
        name: tuple(tensor.shape)
        for name, tensor in to_file_names(family.keys, model.state_dict()).items()
    }
    assert found == wanted
    names = {name for name, _ in theirs.named_parameters()}
    assert architecture.bare == names.isdisjoint(wanted)


def test_families_are_told_apart():
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)
    assert BERT.architecture_named(["Unknown", "BertForMaskedLM"]) == BERT.architecture_with(
        ["masked"]
    )
    assert BERT.architecture_named(["MegatronBertModel"]) is None
    assert MEGATRON_BERT.architecture_with(["span", "tags"]) is None
    assert len({architecture.heads for architecture in BERT.architectures}) == len(
        BERT.architectures
    )
    assert dataclasses.replace(BERT) == BERT
