"""Longformer and BigBird against transformers: each sequence alone there, all packed here; every class, mode and option.

transformers' batch of mixed lengths is no reference: BigBird's last block and its draws are those of the longest one there.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
import transformers
from test_descendants import SPECIALS, assert_near, outputs
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.core.errors import FolderError
from bothways.core.layout import Layout
from bothways.core.learner import Learner
from bothways.families.bigbird import BIGBIRD
from bothways.families.catalogue import preset
from bothways.families.family import Architecture, Family
from bothways.families.keys import to_theirs
from bothways.families.longformer import LONGFORMER
from bothways.interop.folder import load_model, save_model
from bothways.interop.weights import open_weights
from bothways.model.config import Blocks, EncoderConfig, Window
from bothways.model.heads import Labels, Masked, Model, Span, Tags
from bothways.model.ledger import forward_flops, ledger, seen
from bothways.training.parallel import Replicated, replicate

CASES = [(family, architecture) for family in (LONGFORMER, BIGBIRD) for architecture in family.architectures]
NAMES = [architecture.name for _, architecture in CASES]
LENGTHS = [41, 7, 60, 1, 41, 28]
TANH = {"longformer": "gelu_pytorch_tanh", "big_bird": "gelu_new"}
"""Of the names of one function, the one that is written."""


def draw_settings(model_type: str, seed: int, dropout: float = 0.0) -> dict[str, object]:
    rng = random.Random(seed)
    heads, depth = rng.choice((1, 2, 4)), rng.randint(1, 3)
    settings: dict[str, object] = {
        "vocab_size": 50, "hidden_size": heads * rng.choice((5, 8)), "num_hidden_layers": depth, "num_attention_heads": heads,
        "intermediate_size": rng.randint(8, 40), "max_position_embeddings": rng.randint(66, 90),
        "type_vocab_size": rng.randint(1, 2),
        "hidden_act": rng.choice(("gelu", TANH[model_type], "relu", "silu")), "layer_norm_eps": rng.choice((1e-12, 1e-5, 1e-2)),
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "bos_token_id": 1, "eos_token_id": 2,
        "sep_token_id": 3, "pad_token_id": rng.choice((0, 1, 3)),
    }  # fmt: skip
    if model_type == "longformer":
        half = rng.choice((2, 3, 5))  # theirs reads only lengths that all windows divide
        windows = [2 * half * rng.choice((1, 4)) for _ in range(depth)]
        return settings | {"attention_window": rng.choice((2 * half, windows))}
    sparse = {"attention_type": "block_sparse", "block_size": rng.choice((2, 4)), "num_random_blocks": rng.randint(1, 3)}
    return settings | rng.choice((sparse, sparse, sparse, {"attention_type": "original_full"})) | {
        "use_bias": rng.random() < 0.5, "rescale_embeddings": rng.random() < 0.5,
    }  # fmt: skip


def peer(family: Family, architecture: Architecture, seed: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture.name)
    named = {"num_labels": 3} if architecture.heads & {"labels", "tags"} else {}
    model: nn.Module = cls(cls.config_class(**draw_settings(family.model_type, seed, dropout), **named))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def inputs(theirs: nn.Module, seed: int) -> Batch:
    torch.manual_seed(seed)
    tokens, config = sum(LENGTHS), theirs.config
    named = torch.rand(tokens) < 0.1 if config.model_type == "longformer" else None
    segments = torch.randint(config.type_vocab_size, (tokens,))
    return Batch(torch.randint(4, 50, (tokens,)), segments, Layout.of(LENGTHS), {}, named)


def alone(theirs: nn.Module, batch: Batch, start: int, stop: int) -> dict[str, Tensor]:
    if getattr(theirs.config, "attention_type", "") == "block_sparse":
        base = theirs if hasattr(theirs, "set_attention_type") else theirs.bert
        base.set_attention_type("block_sparse")  # it stays with full attention after one short input
    row = {"input_ids": batch.ids[None, start:stop], "token_type_ids": batch.segments[None, start:stop]}
    if batch.everywhere is not None:
        row["global_attention_mask"] = batch.everywhere[None, start:stop].long()
    return row


def peer_outputs(model: nn.Module, architecture: Architecture, batch: Batch) -> list[Tensor]:
    bounds, parts = batch.layout.offsets.tolist(), []
    for start, stop in itertools.pairwise(bounds):
        row = alone(model, batch, start, stop)
        if "choice" in architecture.heads:
            row = {name: value[None] for name, value in row.items()}
        theirs = model(**row)
        if architecture.bare:
            parts.append([theirs.last_hidden_state[0], theirs.pooler_output])
        elif "pair" in architecture.heads:
            parts.append([theirs.prediction_logits[0], theirs.seq_relationship_logits])
        elif "span" in architecture.heads:
            parts.append([torch.stack([theirs.start_logits[0], theirs.end_logits[0]], -1)])
        else:
            parts.append([theirs.logits if architecture.heads & {"labels", "choice"} else theirs.logits[0]])
    return [torch.cat(part) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("family", "architecture"), CASES, ids=NAMES)
def test_every_class_equals_transformers(family: Family, architecture: Architecture, seed: int, tmp_path: Path) -> None:
    """Read from their folder: outputs in evaluation with dropout configured, outputs and gradients in training without."""
    quiet = peer(family, architecture, seed, dropout=0.3).eval()
    quiet.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    assert set(loaded.model.heads) == architecture.heads
    assert not loaded.report.faults
    batch = inputs(quiet, seed)
    with torch.no_grad():
        for found, wanted in zip(outputs(loaded.model, batch), peer_outputs(quiet, architecture, batch), strict=True):
            assert_near(found, wanted)

    theirs = peer(family, architecture, seed).train()
    theirs.save_pretrained(tmp_path / "training")
    mine = load_model(tmp_path / "training").model.train()
    for found, wanted in zip(outputs(mine, batch), peer_outputs(theirs, architecture, batch), strict=True):
        assert_near(found.detach(), wanted.detach())
        weights = torch.randn_like(wanted)
        (found * weights).sum().backward(retain_graph=True)
        (wanted * weights).sum().backward(retain_graph=True)
    state = {name: parameter.grad for name, parameter in mine.named_parameters() if parameter.grad is not None}
    found_gradients = to_theirs(family.keys, state)
    prefix = family.keys.prefix if architecture.bare else ""
    ties = {tie.theirs: name for name, tie in family.keys.ties.items()}
    full = {prefix + name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    wanted_gradients = {ties.get(name, name): gradient for name, gradient in full.items()}
    assert found_gradients.keys() == wanted_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
    for name, gradient in wanted_gradients.items():
        assert_near(found_gradients[name], gradient, floor=largest * 1e-2)


@pytest.mark.parametrize(("family", "architecture"), CASES, ids=NAMES)
def test_a_folder_comes_back_as_it_was(family: Family, architecture: Architecture, tmp_path: Path) -> None:
    """Theirs → ours → theirs: class, settings, tensors by name and value; transformers opens it with nothing missing."""
    for seed in (5, 6, 8):
        theirs = peer(family, architecture, seed, dropout=0.2)
        theirs.save_pretrained(tmp_path / "theirs")
        save_model(tmp_path / "ours", load_model(tmp_path / "theirs").model)
        before, after = open_weights(tmp_path / "theirs"), open_weights(tmp_path / "ours")
        assert set(after.shapes) == set(before.shapes) - {rule.theirs for rule in family.keys.ties.values()}
        assert all(torch.equal(before.read(name), after.read(name)) for name in after.shapes)
        again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(report.values())
        written, original = again.config.to_dict(), theirs.config.to_dict()
        same = set(original) - {"transformers_version", "dtype", "architectures", "_name_or_path"} - SPECIALS
        assert {key: written[key] for key in same} == {key: original[key] for key in same}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_sequence_alone_is_a_sequence_in_a_batch(case: tuple[Family, Architecture], tmp_path: Path) -> None:
    theirs = peer(*case, 9)
    theirs.save_pretrained(tmp_path)
    model, batch = load_model(tmp_path).model.train(), inputs(theirs, 9)
    together, bounds = model.encoder(batch).last.detach(), batch.layout.offsets.tolist()
    for start, stop in itertools.pairwise(bounds):
        named = None if batch.everywhere is None else batch.everywhere[start:stop]
        one = Batch(batch.ids[start:stop], batch.segments[start:stop], Layout.of([stop - start]), {}, named)
        assert_near(model.encoder(one).last.detach(), together[start:stop])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LongformerModel", {"attention_window": 4}),
        ("BigBirdModel", {"block_size": 1, "num_random_blocks": 1}),
        ("BigBirdModel", {"attention_type": "original_full"}),
    ],
)
def test_dropout_acts_where_theirs_does(name: str, settings: dict[str, object], tmp_path: Path) -> None:
    """One sequence many times over, each copy with draws of its own: first and second moments of every output."""
    cls, (copies, length) = getattr(transformers, name), (3000, 9)
    common = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    more = {"max_position_embeddings": 20, "pad_token_id": 1, "sep_token_id": 2, "hidden_dropout_prob": 0.3}
    torch.manual_seed(1)
    theirs = cls(cls.config_class(**common, **more, attention_probs_dropout_prob=0.3, initializer_range=0.5, **settings))
    theirs.save_pretrained(tmp_path)
    mine, ids = load_model(tmp_path).model, torch.randint(4, 50, (length,))
    named = torch.arange(length) < 2
    batch = Batch(ids.repeat(copies), torch.zeros(copies * length, dtype=torch.int64), Layout.of([length] * copies))
    row = {"input_ids": ids.repeat(copies, 1)}
    if name == "LongformerModel":
        batch = Batch(batch.ids, batch.segments, batch.layout, {}, named.repeat(copies))
        row["global_attention_mask"] = named.long().repeat(copies, 1)
    with torch.no_grad():
        found = mine.train().encoder(batch).last.double().view(copies, -1)
        wanted = theirs.train()(**row).last_hidden_state.double().view(copies, -1)
    for power in (1, 2):
        a, b = found**power, wanted**power
        error = ((a.var(0) + b.var(0)) / copies).sqrt()
        assert float(((a.mean(0) - b.mean(0)) / error).abs().max()) < 5
    assert float(found.std(0).min()) > 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("longformer-base-4096", {"vocab_size": 50_265, "max_position_embeddings": 4098, "type_vocab_size": 1}),
        ("longformer-large-4096", {"vocab_size": 50_265, "max_position_embeddings": 4098, "type_vocab_size": 1}),
        ("bigbird-roberta-base", {}),
        ("bigbird-roberta-large", {}),
    ],
)
def test_published_sizes(name: str, settings: dict[str, int]) -> None:
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    cls = transformers.LongformerModel if name.startswith("longformer") else transformers.BigBirdModel
    with torch.device("meta"):
        theirs = cls(cls.config_class(**settings, **(large if "large" in name else {})), add_pooling_layer=False)
    assert ledger(preset(name)).total == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize("family", [LONGFORMER, BIGBIRD])
def test_the_ledger_counts_every_option_and_head(family: Family, tmp_path: Path) -> None:
    for seed in range(6):
        config = family.translation.read(draw_settings(family.model_type, seed), "")
        model = Model(config, (Masked(), Labels(3), Span()))
        total = ledger(config, model.specification).total
        assert total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("length", [29, 33, 60])
def test_what_is_seen_in_blocks_is_what_theirs_attends_to(length: int) -> None:
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
        shares = theirs.eval()(torch.full((1, length), 7), output_attentions=True).attentions[0][0, 0, :length, :length]
    # No query reads the second block twice, and the last block least of all.
    keys = 1 / torch.where(shares > 0, shares, torch.inf).amin(1)
    assert seen(pattern, length) == pytest.approx(float(keys.mean()), rel=1e-5)
    assert seen(pattern, pattern.dense) == pattern.dense


def test_blocks_cost_time_linear_in_the_length() -> None:
    config = preset("bigbird-roberta-base")
    assert isinstance(config, EncoderConfig)
    assert forward_flops(config, (), 16384) < 1.1 * forward_flops(config, (), 2048)


@pytest.mark.parametrize("window", [3, 0, -2, [4], [4, 4, 4], "8", True, None])
def test_windows_that_are_none(window: object) -> None:
    settings = draw_settings("longformer", 0) | {"num_hidden_layers": 2, "attention_window": window}
    with pytest.raises(FolderError, match="attention_window must be an even number"):
        LONGFORMER.translation.read(settings, "config.json")


@pytest.mark.parametrize(("key", "value"), [("attention_type", "sparse"), ("block_size", 0), ("num_random_blocks", 0)])
def test_blocks_that_are_none(key: str, value: object) -> None:
    with pytest.raises(FolderError):
        BIGBIRD.translation.read({key: value}, "config.json")


class Tagger(Learner):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.model = Model(config, (Tags(3),))

    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        result: Tensor = self.model.heads["tags"](self.model.encoder(batch).last).sum()
        return result


def test_ranks_agree_on_batches_with_global_tokens_and_without(tmp_path: Path) -> None:
    """torch's wrapper would wait for gradients that never come."""
    learner = Tagger(EncoderConfig(50, 8, 2, 2, 8, patterns=(Window(2, everywhere=True),)))
    assert learner.partial
    assert not Tagger(EncoderConfig(50, 8, 2, 2, 8)).partial
    wide = learner.model.encoder.blocks[0].attention.wide.weight
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        replica = replicate(learner, Replicated(0, 1, 0))
        for named in (None, torch.arange(9) == 0, None):
            replica(Batch(torch.arange(9), torch.zeros(9, dtype=torch.int64), Layout.of([9]), {}, named)).backward()
            assert (wide.grad is None) == (named is None)
            learner.zero_grad()
    finally:
        torch.distributed.destroy_process_group()
