"""BERT's descendants against transformers: random shapes, every parameter moved, through the folder, all classes and modes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.core.layout import Layout
from bothways.families.catalogue import FAMILIES, PRESETS, family_for, preset
from bothways.families.family import Architecture, Family
from bothways.families.keys import to_theirs
from bothways.interop.folder import load_model, save_model
from bothways.interop.weights import open_weights
from bothways.model.heads import Model
from bothways.model.ledger import ledger
from bothways.text.train import Unigram, train

ELSEWHERE = ("bert", "megatron-bert", "longformer", "big_bird")
"""Tested in files of their own."""
NEW = [family for family in FAMILIES if family.model_type not in ELSEWHERE]
CASES = [(family, architecture) for family in NEW for architecture in family.architectures if not architecture.own]
NAMES = [architecture.name for _, architecture in CASES]
LENGTHS = [7, 11, 1, 9, 3, 11]
SEGMENTLESS = ("distilbert", "modernbert", "gpt2", "openai-gpt")
SPECIALS = {"bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"}
"""In settings, but the tokenizer's to know."""
CHOICES = 3
"""Of the sequences make up a question."""


def draw_settings(model_type: str, seed: int, dropout: float = 0.0) -> dict[str, object]:
    """A small configuration in transformers' terms, its options at random."""
    rng = random.Random(seed)
    heads, most = rng.choice((1, 2, 4)), rng.randint(20, 30)
    width, depth = heads * rng.choice((5, 8)), rng.randint(1, 4)
    activation = rng.choice(("gelu", "gelu_new", "relu", "silu"))
    if model_type == "distilbert":
        return {
            "vocab_size": 50, "dim": width, "n_layers": depth, "n_heads": heads, "hidden_dim": rng.randint(8, 40),
            "max_position_embeddings": most, "activation": activation, "dropout": dropout, "attention_dropout": dropout,
            "qa_dropout": dropout, "seq_classif_dropout": dropout,
        }  # fmt: skip
    if model_type in ("gpt2", "openai-gpt"):
        name, inner = ("activation_function", {"n_inner": rng.randint(8, 40)}) if model_type == "gpt2" else ("afn", {})
        return {
            "vocab_size": 50, "n_embd": width, "n_layer": depth, "n_head": heads, "n_positions": most,
            "layer_norm_epsilon": rng.choice((1e-5, 1e-2)), "resid_pdrop": dropout, "embd_pdrop": dropout / 2,
            "attn_pdrop": dropout, "bos_token_id": 1, "eos_token_id": 2, name: rng.choice(("gelu", "relu", "silu")), **inner,
        }  # fmt: skip
    if model_type == "modernbert":
        kinds = ("full_attention", "sliding_attention")
        layers = [*rng.sample(kinds, 2), *rng.choices(kinds, k=depth - 1)]
        return {
            "vocab_size": 50, "hidden_size": heads * rng.choice((6, 8)), "num_hidden_layers": len(layers),
            "num_attention_heads": heads, "intermediate_size": rng.randint(8, 40), "max_position_embeddings": most,
            "hidden_activation": rng.choice(("gelu", "gelu_pytorch_tanh", "relu", "silu")),
            "classifier_activation": rng.choice(("gelu", "relu")), "norm_eps": rng.choice((1e-5, 1e-2)),
            "layer_types": layers, "local_attention": 2 * rng.randint(0, 4),
            "rope_parameters": {kind: {"rope_theta": rng.choice((5.0, 1e4))} for kind in kinds},
            "classifier_pooling": rng.choice(("cls", "mean")), "attention_dropout": dropout, "classifier_dropout": dropout,
            "embedding_dropout": dropout / 2, "mlp_dropout": dropout / 3,
            **{f"{name}_bias": rng.random() < 0.5 for name in ("attention", "mlp", "norm", "decoder", "classifier")},
            **{f"{name}_token_id": at for name, at in (("pad", 3), ("cls", 1), ("bos", 1), ("sep", 2), ("eos", 2))},
        }  # fmt: skip
    if model_type in ("deberta", "deberta-v2"):
        return draw_deberta(model_type, rng, most, dropout)
    settings: dict[str, object] = {
        "vocab_size": 50, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads,
        "intermediate_size": rng.randint(8, 40), "max_position_embeddings": most, "hidden_act": activation,
        "type_vocab_size": rng.randint(1, 2), "layer_norm_eps": rng.choice((1e-12, 1e-5, 1e-2)),
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    if model_type == "albert":
        settings |= {
            "embedding_size": rng.choice((6, width)), "num_hidden_groups": rng.randint(1, depth),
            "inner_group_num": rng.randint(1, 3), "classifier_dropout_prob": dropout,
        }  # fmt: skip
    if model_type == "electra":
        settings |= {"embedding_size": rng.choice((6, width)), "summary_last_dropout": dropout}
    if "roberta" in model_type:
        settings |= {"pad_token_id": rng.choice((0, 1, 3))}
    return settings


def draw_deberta(model_type: str, rng: random.Random, most: int, dropout: float) -> dict[str, object]:
    """Disentangled attention with all its options, or none of it, which is transformers' default."""
    heads, relative = rng.choice((1, 2, 4)), rng.random() < 0.8
    width = heads * rng.choice((5, 8))
    settings: dict[str, object] = {
        "vocab_size": 50, "hidden_size": width, "num_hidden_layers": rng.randint(1, 3), "num_attention_heads": heads,
        "intermediate_size": rng.randint(8, 40), "max_position_embeddings": most, "layer_norm_eps": rng.choice((1e-7, 1e-2)),
        "hidden_act": rng.choice(("gelu", "gelu_new", "relu")), "type_vocab_size": rng.randint(0, 2),
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "pooler_dropout": dropout / 2,
        "cls_dropout": dropout, "pooler_hidden_act": rng.choice(("gelu", "tanh", "relu")),
        "relative_attention": relative, "position_biased_input": not relative or rng.random() < 0.4,
        "pos_att_type": rng.choice((["c2p"], ["p2c"], ["c2p", "p2c"], ["p2c", "c2p"])) if relative else None,
        "max_relative_positions": rng.choice((-1, 4, 9)) if relative else -1,
        **({"embedding_size": 6} if rng.random() < 0.5 else {}),
    }  # fmt: skip
    if model_type == "deberta-v2" and relative:
        settings |= {
            "position_buckets": rng.choice((-1, 4, 5)), "share_att_key": rng.random() < 0.5,
            "norm_rel_ebd": rng.choice(("none", "layer_norm")),
        }  # fmt: skip
        if rng.random() < 0.6:
            size, act = rng.choice((1, 3, 5)), rng.choice(("tanh", "gelu"))
            settings |= {"conv_kernel_size": size, "conv_groups": rng.choice((1, heads)), "conv_act": act}
    return settings


def peer(family: Family, architecture: Architecture, seed: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture.name)
    named = {"num_labels": 3} if architecture.heads & {"labels", "tags"} else {}
    config = cls.config_class(**draw_settings(family.model_type, seed, dropout), **named)
    model: nn.Module = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def inputs(theirs: nn.Module, seed: int) -> tuple[Batch, dict[str, Tensor], Tensor]:
    """The same sequences packed and padded, and where the rectangle holds a token."""
    generator, config = torch.Generator().manual_seed(seed), theirs.config
    kept = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(4, 50, kept.shape, generator=generator)
    segments = torch.randint(max(1, getattr(config, "type_vocab_size", 1)), kept.shape, generator=generator)
    padded = {"input_ids": ids.masked_fill(~kept, config.pad_token_id or 0), "attention_mask": kept.long()}
    if config.model_type not in SEGMENTLESS:
        padded["token_type_ids"] = segments * kept
    return Batch(ids[kept], segments[kept], Layout.of(LENGTHS)), padded, kept


def outputs(model: Model, batch: Batch) -> list[Tensor]:
    layout, heads = batch.layout, model.heads
    if found := [model.read(kind, batch) for kind in ("labels", "choice") if kind in heads]:  # type: ignore[arg-type]
        return found
    x = model.encoder(batch, only=layout.firsts if set(heads) == {"pooler", "pair"} else None).last
    found = [heads[kind](x, model.encoder.embedding.token.weight) for kind in ("masked", "causal") if kind in heads]
    found += [heads["replaced"](x, layout)] if "replaced" in heads else []
    found += [heads["pair"](heads["pooler"](x, layout))] if "pair" in heads else []
    found += [heads[kind](x) for kind in ("tags", "span") if kind in heads]
    if found:
        return found
    return [x, heads["pooler"](x, layout)] if "pooler" in heads else [x]


def peer_outputs(model: nn.Module, architecture: Architecture, padded: dict[str, Tensor], kept: Tensor) -> list[Tensor]:
    if "choice" in architecture.heads:
        rows = {name: value.view(-1, CHOICES, value.shape[-1]) for name, value in padded.items()}
        return [model(**rows).logits.view(-1, 1)]
    theirs = model(**padded)
    if architecture.bare:
        pooled = [theirs.pooler_output] if architecture.heads else []
        return [theirs.last_hidden_state[kept], *pooled]
    if "pair" in architecture.heads:
        return [theirs.prediction_logits[kept], theirs.sop_logits]
    if "span" in architecture.heads:
        return [torch.stack([theirs.start_logits, theirs.end_logits], -1)[kept]]
    return [theirs.logits if "labels" in architecture.heads else theirs.logits[kept]]


def assert_near(found: Tensor, wanted: Tensor, floor: float = 1.0) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * max(float(wanted.abs().max()), floor))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("family", "architecture"), CASES, ids=NAMES)
def test_every_class_equals_transformers(family: Family, architecture: Architecture, seed: int, tmp_path: Path) -> None:
    """Read from their folder: outputs in evaluation with dropout configured, outputs and gradients in training without."""
    quiet = peer(family, architecture, seed, dropout=0.3)
    quiet.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    assert set(loaded.model.heads) == architecture.heads
    assert not loaded.report.faults
    batch, padded, kept = inputs(quiet, seed)
    with torch.no_grad():
        for found, wanted in zip(
            outputs(loaded.model, batch), peer_outputs(quiet.eval(), architecture, padded, kept), strict=True
        ):
            assert_near(found, wanted)

    theirs = peer(family, architecture, seed).train()
    theirs.save_pretrained(tmp_path / "training")
    mine = load_model(tmp_path / "training").model.train()
    pairs = list(zip(outputs(mine, batch), peer_outputs(theirs, architecture, padded, kept), strict=True))
    for found, wanted in pairs:
        assert_near(found.detach(), wanted.detach())
        weights = torch.randn_like(wanted)
        (found * weights).sum().backward(retain_graph=True)
        (wanted * weights).sum().backward(retain_graph=True)
    state = {name: parameter.grad for name, parameter in mine.named_parameters() if parameter.grad is not None}
    keys = family.keys_for(mine.config)
    found_gradients = to_theirs(keys, state)
    prefix = family.keys.prefix if architecture.bare else ""
    ties = {tie.theirs: name for name, tie in keys.ties.items()}
    full = {prefix + name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    wanted_gradients = {ties.get(name, name): gradient for name, gradient in full.items()}
    assert found_gradients.keys() == wanted_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
    for name, gradient in wanted_gradients.items():
        assert_near(found_gradients[name], gradient, floor=largest * 1e-2)


@pytest.mark.parametrize(("family", "architecture"), CASES, ids=NAMES)
def test_a_folder_comes_back_as_it_was(family: Family, architecture: Architecture, tmp_path: Path) -> None:
    """Theirs → ours → theirs: class, settings, tensors by name and value; transformers opens it with nothing missing."""
    theirs = peer(family, architecture, 5, dropout=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    tokenizer = train(["a few words to learn from"], Unigram(40)) if family.vocabulary == "Unigram" else None
    save_model(tmp_path / "ours", loaded.model, tokenizer)
    before, after = open_weights(tmp_path / "theirs"), open_weights(tmp_path / "ours")
    ties = {rule.theirs for rule in family.keys.ties.values()}
    assert set(after.shapes) == set(before.shapes) - ties
    assert all(torch.equal(before.read(name), after.read(name)) for name in after.shapes)
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    written, original = again.config.to_dict(), theirs.config.to_dict()
    assert written["model_type"] == family.model_type
    read = {key for kind, (key, _) in family.dropouts.items() if kind in architecture.heads}
    other = {key for key, _ in family.dropouts.values()} - read - {"classifier_dropout_prob"}  # of heads that are not here
    same = set(original) - {"transformers_version", "dtype", "architectures", "_name_or_path"} - SPECIALS - other
    assert {key: written[key] for key in same} == {key: original[key] for key in same}


@pytest.mark.parametrize("architecture", CASES, ids=NAMES)
def test_a_sequence_alone_is_a_sequence_in_a_batch(architecture: tuple[Family, Architecture], tmp_path: Path) -> None:
    theirs = peer(*architecture, 9)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    batch, _, _ = inputs(theirs, 9)
    together = model.encoder(batch).last
    for start, stop in zip(batch.layout.offsets[:-1].tolist(), batch.layout.offsets[1:].tolist(), strict=True):
        alone = Batch(batch.ids[start:stop], batch.segments[start:stop], Layout.of([stop - start]))
        assert_near(model.encoder(alone).last.detach(), together[start:stop].detach())


@pytest.mark.parametrize("name", ["ModernBertModel", "OpenAIGPTModel", "GPT2Model"])
def test_dropout_acts_where_theirs_does(name: str, tmp_path: Path) -> None:
    """One sequence many times over, each copy with draws of its own: first and second moments of every output."""
    family, architecture = CASES[NAMES.index(name)]
    theirs = peer(family, architecture, 3, dropout=0.3)
    theirs.save_pretrained(tmp_path)
    mine, (copies, length) = load_model(tmp_path).model, (6000, 5)
    ids = torch.randint(4, 50, (length,))
    batch = Batch(ids.repeat(copies), torch.zeros(copies * length, dtype=torch.int64), Layout.of([length] * copies))
    with torch.no_grad():
        found = mine.train().encoder(batch).last.double().view(copies, -1)
        wanted = theirs.train()(input_ids=ids.repeat(copies, 1)).last_hidden_state.double().view(copies, -1)
    for power in (1, 2):
        a, b = found**power, wanted**power
        error = ((a.var(0) + b.var(0)) / copies).sqrt()
        assert float(((a.mean(0) - b.mean(0)) / error).abs().max()) < 5
    assert float(found.std(0).min()) > 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("roberta-base", 124_055_040),
        ("albert-base-v2", 11_092_992),
        ("distilbert-base-uncased", 66_362_880),
        ("modernbert-base", 149_014_272),
        ("modernbert-large", 394_781_696),
        ("openai-gpt", 116_534_784),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_published_sizes(name: str, count: int) -> None:
    assert ledger(preset(name)).total == count


@pytest.mark.parametrize("name", PRESETS)
def test_the_ledger_counts_every_preset(name: str) -> None:
    config = preset(name)
    with torch.device("meta"):
        model = Model(config, ())
    assert ledger(config).total == sum(parameter.numel() for parameter in model.parameters())
    ours = name.startswith(("elmo-", "transformer-"))  # saved as a folder of our own type
    assert (family_for(config) is None) is ours
