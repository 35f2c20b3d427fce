"""Longformer and BigBird against transformers: each sequence alone there, all packed here; every class, mode and option.

transformers' batch of mixed lengths is no reference: BigBird's last block and its draws are those of the longest one there.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from bothways.core.batch import Batch, Layout
from bothways.core.errors import FolderError
from bothways.core.training_module import TrainingModule
from bothways.hub.model_folder import load_model, save_model
from bothways.model.attention.patterns import Blocks, Window
from bothways.model.config import EncoderConfig
from bothways.model.families.bigbird import BIGBIRD
from bothways.model.families.catalogue import preset
from bothways.model.families.family import Architecture
from bothways.model.families.longformer import LONGFORMER
from bothways.model.heads import LabelHead, MaskedHead, SpanHead, TagHead
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.training.parallel import Replicated, replicate
from bothways.training.step_cost import forward_flops, seen
from drawn_settings import draw_settings
from family_peers import (
    answers,
    assert_alone_as_in_a_batch,
    assert_class_equals,
    assert_drops_alike,
    assert_folder_comes_back,
    peer,
)
from spread import first_of, in_turn

CASES = [
    (family, architecture)
    for family in (LONGFORMER, BIGBIRD)
    for architecture in family.architectures
]
NAMES = [architecture.name for _, architecture in CASES]
LENGTHS = [41, 7, 60, 1, 41, 28]


def inputs(
    theirs: nn.Module, seed: int
) -> tuple[Batch, Callable[[nn.Module, Architecture], list[Tensor]]]:
    """Sequences packed for us; for them one after the other."""
    torch.manual_seed(seed)
    tokens, config = sum(LENGTHS), theirs.config
    named = torch.rand(tokens) < 0.1 if config.model_type == "longformer" else None
    segments = torch.randint(config.type_vocab_size, (tokens,))
    batch = Batch(torch.randint(4, 50, (tokens,)), segments, Layout.of(LENGTHS), {}, named)

    def given(model: nn.Module, architecture: Architecture) -> list[Tensor]:
        parts = []
        for start, stop in itertools.pairwise(batch.layout.cu_seqlens.tolist()):
            row = alone(model, batch, start, stop)
            if "choice" in architecture.heads:
                row = {name: value[None] for name, value in row.items()}
            parts.append(
                answers(model(**row), architecture, torch.ones(1, stop - start, dtype=torch.bool))
            )
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    return batch, given


def alone(theirs: nn.Module, batch: Batch, start: int, stop: int) -> dict[str, Tensor]:
    if getattr(theirs.config, "attention_type", "") == "block_sparse":
        base = theirs if hasattr(theirs, "set_attention_type") else theirs.bert
        base.set_attention_type(
            "block_sparse"
        )  # it stays with full attention after one short input
    row = {
        "input_ids": batch.ids[None, start:stop],
        "token_type_ids": batch.segments[None, start:stop],
    }
    if batch.global_attention_mask is not None:
        row["global_attention_mask"] = batch.global_attention_mask[None, start:stop].long()
    return row


@pytest.mark.parametrize(("family", "architecture", "seed"), in_turn(CASES, range(3), NAMES))
def test_every_class_equals_transformers(family, architecture, seed, tmp_path):
    assert_class_equals(family, architecture, seed, inputs, tmp_path)


@pytest.mark.parametrize(("family", "architecture", "seed"), in_turn(CASES, [5, 6, 8], NAMES))
def test_a_folder_comes_back_as_it_was(family, architecture, seed, tmp_path):
    assert_folder_comes_back(family, architecture, seed, tmp_path)


@pytest.mark.parametrize(
    ("family", "architecture"), first_of(CASES, [family.model_type for family, _ in CASES], NAMES)
)
def test_a_sequence_alone_is_a_sequence_in_a_batch(family, architecture, tmp_path):
    theirs = peer(family, architecture, 9)
    theirs.save_pretrained(tmp_path)
    assert_alone_as_in_a_batch(load_model(tmp_path).model.train(), inputs(theirs, 9)[0])


DROPPING = [
    ("LongformerModel", {"attention_window": 4}),
    ("BigBirdModel", {"block_size": 1, "num_random_blocks": 1}),
    *(
        (name, {"attention_window": 4} if "Long" in name else {"attention_type": "original_full"})
        for name in NAMES
    ),
]


@pytest.mark.parametrize(
    ("name", "settings"),
    first_of(
        DROPPING,
        [("SequenceClassification" in name, *more) for name, more in DROPPING],
        [f"{name}-{'-'.join(more)}" for name, more in DROPPING],
    ),
)
def test_dropout_acts_where_theirs_does(name, settings, tmp_path):
    """In the encoder and in the head of every class."""
    cls, (copies, length), (_, architecture) = (
        getattr(transformers, name),
        (3000, 9),
        CASES[NAMES.index(name)],
    )
    common = {
        "vocab_size": 50,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    more = {
        "max_position_embeddings": 20,
        "pad_token_id": 1,
        "sep_token_id": 2,
        "hidden_dropout_prob": 0.3,
    }
    torch.manual_seed(1)
    theirs = cls(
        cls.config_class(
            **common, **more, attention_probs_dropout_prob=0.3, initializer_range=0.5, **settings
        )
    )
    with torch.no_grad():
        theirs.get_input_embeddings().weight[1] += (
            0.5  # that of the padding: else one logit is always 0
        )
    ids, named = torch.randint(4, 50, (length,)), torch.arange(length) < 2
    batch = Batch(
        ids.repeat(copies),
        torch.zeros(copies * length, dtype=torch.int64),
        Layout.of([length] * copies),
    )
    row = {
        "input_ids": ids.repeat(copies, 1),
        "token_type_ids": torch.zeros(copies, length, dtype=torch.int64),
    }
    if "Longformer" in name:
        batch = Batch(batch.ids, batch.segments, batch.layout, {}, named.repeat(copies))
        row["global_attention_mask"] = named.long().repeat(copies, 1)
    if "choice" in architecture.heads:
        row = {key: value.view(-1, 3, length) for key, value in row.items()}
    kept = torch.ones(copies, length, dtype=torch.bool)
    assert_drops_alike(
        theirs, batch, lambda model: answers(model(**row), architecture, kept), copies, tmp_path
    )


RELEASED = {"vocab_size": 50_265, "max_position_embeddings": 4098, "type_vocab_size": 1}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("longformer-base-4096", RELEASED),
        ("longformer-large-4096", RELEASED),
        ("bigbird-roberta-base", {}),
        ("bigbird-roberta-large", {}),
    ],
)
def test_published_sizes(name, settings):
    large = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    cls = (
        transformers.LongformerModel if name.startswith("longformer") else transformers.BigBirdModel
    )
    with torch.device("meta"):
        theirs = cls(
            cls.config_class(**settings, **(large if "large" in name else {})),
            add_pooling_layer=False,
        )
    assert parameter_table(preset(name)).total == sum(
        parameter.numel() for parameter in theirs.parameters()
    )


@pytest.mark.parametrize("family", [LONGFORMER, BIGBIRD])
def test_the_ledger_counts_every_option_and_head(family, tmp_path):
    for seed in range(6):
        config = family.config_rules.read(draw_settings(family.model_type, seed), "")
        model = Model(config, (MaskedHead(), LabelHead(3), SpanHead()))
        total = parameter_table(config, model.specification).total
        assert total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("length", [29, 33, 60])
def test_what_is_seen_in_blocks_is_what_theirs_attends_to(length):
    """Every probability is 1 / (keys read) where all scores are 0; a key read twice has twice that."""
    pattern = Blocks(4, 1)
    config = transformers.BigBirdConfig(
        vocab_size=80, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, block_size=4, num_random_blocks=1,
        max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.BigBirdModel(config)
    with torch.no_grad():
        for parameter in theirs.encoder.layer[0].attention.self.parameters():
            parameter.zero_()
        shares = theirs.eval()(torch.full((1, length), 7), output_attentions=True).attentions[0][
            0, 0, :length, :length
        ]
    # No query reads the second block twice, and the last block least of all.
    keys = 1 / torch.where(shares > 0, shares, torch.inf).amin(1)
    assert seen(pattern, length) == pytest.approx(float(keys.mean()), rel=1e-5)
    assert seen(pattern, pattern.dense) == pattern.dense


def test_blocks_cost_time_linear_in_the_length():
    config = preset("bigbird-roberta-base")
    assert forward_flops(config, (), 16384) < 1.1 * forward_flops(config, (), 2048)


@pytest.mark.parametrize("window", [3, 0, -2, [4], [4, 4, 4], "8", True, None])
def test_windows_that_are_none(window):
    settings = draw_settings("longformer", 0) | {"num_hidden_layers": 2, "attention_window": window}
    with pytest.raises(FolderError, match="attention_window must be an even number"):
        LONGFORMER.config_rules.read(settings, "config.json")


@pytest.mark.parametrize(
    ("key", "value"), [("attention_type", "sparse"), ("block_size", 0), ("num_random_blocks", 0)]
)
def test_blocks_that_are_none(key, value):
    with pytest.raises(FolderError):
        BIGBIRD.config_rules.read({key: value}, "config.json")


def test_a_pooler_that_was_never_read_is_written_as_a_new_one(tmp_path):
    """Where the folder has one, `test_a_folder_comes_back_as_it_was` finds it again. Equal models give equal files."""
    config = BIGBIRD.config_rules.read(
        draw_settings("big_bird", 1) | {"hidden_size": 64, "initializer_range": 0.3}, ""
    )
    model = Model(config, (MaskedHead(),))
    before = torch.get_rng_state()
    for name in ("once", "again"):
        save_model(tmp_path / name, model)
        torch.rand(3)
    torch.set_rng_state(before)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("once", "again")]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    weight = files[0]["bert.pooler.weight"]
    assert float(weight.std()) == pytest.approx(
        0.3 * 0.88, rel=0.1
    )  # of a normal distribution cut off at 2 σ
    assert not files[0]["bert.pooler.bias"].any()
    drawn = torch.rand(3)
    torch.set_rng_state(before)
    save_model(tmp_path / "third", model)
    assert torch.equal(torch.rand(3), drawn)
    _, report = transformers.BigBirdForMaskedLM.from_pretrained(
        tmp_path / "once", output_loading_info=True
    )
    assert not any(report.values())


class Tagger(TrainingModule):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.model = Model(config, (TagHead(3),))

    def forward(self, batch: Batch) -> Tensor:
        result: Tensor = self.model.heads["tags"](self.model.encoder(batch).last).sum()
        return result


def test_ranks_agree_on_batches_with_global_tokens_and_without(tmp_path):
    """torch's wrapper would wait for gradients that never come."""
    training_module = Tagger(
        EncoderConfig(50, 8, 2, 2, 8, patterns=(Window(2, global_attention=True),))
    )
    assert training_module.partial
    assert not Tagger(EncoderConfig(50, 8, 2, 2, 8)).partial
    wide = training_module.model.encoder.blocks[0].attention.global_qkv.weight
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        replica = replicate(training_module, Replicated(0, 1, 0))
        for named in (None, torch.arange(9) == 0, None):
            replica(
                Batch(torch.arange(9), torch.zeros(9, dtype=torch.int64), Layout.of([9]), {}, named)
            ).backward()
            assert (wide.grad is None) == (named is None)
            training_module.zero_grad()
    finally:
        torch.distributed.destroy_process_group()
