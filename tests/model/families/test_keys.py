"""Key rules, each both ways."""

import pytest
import torch
from hypothesis import given, strategies as st

from bothways.model.families.bert import BERT, MEGATRON_BERT
from bothways.model.families.catalogue import FAMILIES
from bothways.model.families.weight_names import (
    KeyTable,
    Rename,
    Stack,
    Tie,
    Transpose,
    to_file_names,
)

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
    for name, tensor in state.items():
        place = TABLE.place(name)
        pieces = [theirs[piece] for piece in place.names]
        assert {piece.shape for piece in pieces} == {place.part_shape(tensor.shape)}
        assert torch.equal(place.join(pieces), tensor)


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
    assert [*map(type, TABLE.origins("decoder.weight"))] == [Tie]


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
