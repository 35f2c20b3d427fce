"""BERT's descendants against transformers: random shapes, every parameter moved, through the folder, all classes and modes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bothways.core.batch import Batch, Layout
from bothways.core.errors import FolderError
from bothways.hub.model_folder import load_model, save_model
from bothways.model.families.catalogue import FAMILIES, family_for, preset
from bothways.model.families.family import Architecture
from bothways.model.heads import ChoiceHead, Head, LabelHead, TagHead
from bothways.model.model import Model
from drawn_settings import draw_settings
from family_peers import (
    LONG,
    answers,
    assert_alone_as_in_a_batch,
    assert_class_equals,
    assert_drops_alike,
    assert_folder_comes_back,
    assert_near,
    every_class,
    long_inputs,
    outputs,
    peer,
)
from model_folders import change_settings
from spread import first_of

SINGLE = [
    (family, architecture) for family in FAMILIES for architecture in family.architectures[-1:]
]
DROPPING = [
    (family, architecture)
    for family in FAMILIES
    if family.model_type not in LONG
    for architecture in family.architectures
]
LENGTHS = [7, 11, 1, 9, 3, 11]
COPIES = 3000
SEGMENTLESS = ("distilbert", "modernbert", "gpt2", "openai-gpt", "mpnet", "eurobert")
CHOICES = 3
"""Of the sequences make up a question."""


def inputs(
    theirs: nn.Module, seed: int
) -> tuple[Batch, Callable[[nn.Module, Architecture], list[Tensor]]]:
    """Sequences packed for us; for them padded, together in one rectangle, or long ones one by one."""
    if theirs.config.model_type in LONG:
        return long_inputs(theirs, seed)
    generator = torch.Generator().manual_seed(seed)
    kept = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(4, 50, kept.shape, generator=generator)
    types = max(1, getattr(theirs.config, "type_vocab_size", 1))
    segments = torch.randint(types, kept.shape, generator=generator)
    batch = Batch(ids[kept], segments[kept], Layout.of(LENGTHS))
    return batch, _read_by(theirs.config, ids, segments, kept)


def copies(
    theirs: nn.Module, count: int
) -> tuple[Batch, Callable[[nn.Module, Architecture], list[Tensor]]]:
    """One sequence many times over."""
    kept = torch.ones(count, 5, dtype=torch.bool)
    ids = torch.randint(4, 50, (5,)).expand_as(kept)
    segments = torch.zeros_like(ids)
    batch = Batch(ids.reshape(-1), segments.reshape(-1), Layout.of([5] * count))
    return batch, _read_by(theirs.config, ids, segments, kept)


def _read_by(
    config: Any, ids: Tensor, segments: Tensor, kept: Tensor
) -> Callable[[nn.Module, Architecture], list[Tensor]]:
    padded = {
        "input_ids": ids.masked_fill(~kept, config.pad_token_id or 0),
        "attention_mask": kept.long(),
    }
    if config.model_type not in SEGMENTLESS:
        padded["token_type_ids"] = segments * kept

    def given(model: nn.Module, architecture: Architecture) -> list[Tensor]:
        rows = {name: value.view(-1, CHOICES, value.shape[-1]) for name, value in padded.items()}
        return answers(
            model(**(rows if "choice" in architecture.heads else padded)), architecture, kept
        )

    return given


@pytest.mark.parametrize(("family", "architecture", "seed"), every_class(range(3)))
def test_every_class_equals_transformers(family, architecture, seed, tmp_path):
    assert_class_equals(family, architecture, seed, inputs, tmp_path)


@pytest.mark.parametrize(("family", "architecture", "seed"), every_class([5, 6]))
def test_a_folder_comes_back_as_it_was(family, architecture, seed, tmp_path):
    read = {key for kind, (key, _) in family.dropouts.items() if kind in architecture.heads}
    # Settings of heads that are not here.
    other = {key for key, _ in family.dropouts.values()} - read - {"classifier_dropout_prob"}
    assert_folder_comes_back(family, architecture, seed, tmp_path, other)


@pytest.mark.parametrize(("family", "architecture"), SINGLE)
def test_a_sequence_alone_is_a_sequence_in_a_batch(family, architecture, tmp_path):
    theirs = peer(family, architecture, 9)
    theirs.save_pretrained(tmp_path)
    mine = load_model(tmp_path).model.train(family.model_type in LONG)
    assert_alone_as_in_a_batch(mine, inputs(theirs, 9)[0])


@pytest.mark.parametrize(
    ("family", "architecture"),
    first_of(
        DROPPING,
        [(family.model_type, "labels" in architecture.heads) for family, architecture in DROPPING],
        [architecture.name for _, architecture in DROPPING],
    ),
)
def test_dropout_acts_where_theirs_does(family, architecture, tmp_path):
    """In the encoder and in the head of every class."""
    theirs = peer(family, architecture, 3, dropout=0.3)
    batch, given = copies(theirs, COPIES)
    assert_drops_alike(theirs, batch, lambda model: given(model, architecture), COPIES, tmp_path)


HEADS: tuple[Head, ...] = (
    LabelHead(3, dropout=0.4),
    TagHead(3, dropout=0.4),
    ChoiceHead(dropout=0.4),
)
ANSWERING = [
    (family, architecture, head)
    for family in FAMILIES
    for architecture in family.architectures
    for head in HEADS
    if head.kind in architecture.heads
]


@pytest.mark.parametrize(
    ("family", "architecture", "head"),
    first_of(
        ANSWERING,
        [(family.model_type, head.kind in family.dropouts) for family, _, head in ANSWERING],
        [f"{family.model_type}-{head.kind}" for family, _, head in ANSWERING],
    ),
)
def test_a_heads_own_dropout_is_kept(family, architecture, head, tmp_path):
    """By transformers, too, where it has a setting for it."""
    config = family.config_rules.read(draw_settings(family.model_type, 3, dropout=0.1), "settings")
    save_model(tmp_path, Model(config, (head,)), extra={"threshold": 0.5})
    loaded = load_model(tmp_path)
    assert head in loaded.model.specification
    assert loaded.extra == {"threshold": 0.5}
    theirs = getattr(transformers, architecture.name).from_pretrained(tmp_path)
    inside = {id(module) for module in theirs.base_model.modules()}
    rates = {
        module.p
        for module in theirs.modules()
        if isinstance(module, nn.Dropout) and id(module) not in inside
    }
    assert (0.4 in rates) is (head.kind in family.dropouts)


@pytest.mark.parametrize(
    ("vocabulary", "origin", "model_type"),
    [
        (None, None, "roberta"),
        ("BPE", "roberta", "roberta"),
        ("BPE", "xlm-roberta", "xlm-roberta"),
        ("Unigram", None, "xlm-roberta"),
        ("Unigram", "roberta", "xlm-roberta"),
        ("Unigram", "camembert", "camembert"),
        (None, "camembert", "camembert"),
        (None, "bert", "roberta"),
    ],
)
def test_saved_type_follows_vocabulary_then_folder(vocabulary, origin, model_type):
    family = family_for(preset("roberta-base"), vocabulary, origin)
    assert family.model_type == model_type


@pytest.mark.parametrize("family", FAMILIES, ids=[family.model_type for family in FAMILIES])
def test_the_other_names_of_a_setting_in_transformers_are_known(family):
    theirs = transformers.CONFIG_MAPPING[family.model_type].attribute_map
    assert theirs.items() <= family.config_rules.aliases.items()


@pytest.mark.parametrize("model_type", ["distilbert", "gpt2", "openai-gpt"])
def test_settings_are_read_under_their_other_names(model_type, tmp_path):
    family = next(family for family in FAMILIES if family.model_type == model_type)
    architecture = next(known for known in family.architectures if known.bare)
    peer(family, architecture, 4).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    aliases = family.config_rules.aliases
    change_settings(tmp_path, **{alias: settings[name] for alias, name in aliases.items()})
    both = load_model(tmp_path).model.config
    names = {name: alias for alias, name in aliases.items()}
    file.write_text(json.dumps({names.get(key, key): value for key, value in settings.items()}))
    theirs = getattr(transformers, architecture.name).from_pretrained(tmp_path).eval()
    mine = load_model(tmp_path).model
    assert mine.config == both
    batch, given = inputs(theirs, 4)
    with torch.no_grad():
        for found, wanted in zip(outputs(mine, batch), given(theirs, architecture), strict=True):
            assert_near(found, wanted)
    name, alias = next(iter(names.items()))
    file.write_text(json.dumps(settings | {alias: settings[name] + 1}))
    with pytest.raises(
        FolderError,
        match=f"{name} is {settings[name]}, and its other name {alias} is {settings[name] + 1}",
    ):
        load_model(tmp_path)
