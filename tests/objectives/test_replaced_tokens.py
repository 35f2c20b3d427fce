"""Replaced token detection: its losses by transformers, its gradients, its draws, and a run from start to folders."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bothways.core.batch import Batch, pack
from bothways.core.errors import BothwaysError, ConfigError
from bothways.core.source import Cursor, TrainingStep
from bothways.data.corpus import Corpus
from bothways.data.loader import TokenBudget
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import Dropouts, EncoderConfig, PostNorm
from bothways.model.families.catalogue import preset
from bothways.objectives.replaced_tokens import (
    Narrower,
    ReplacedTokens,
    ReplacedTokensModule,
    Shallower,
    generator_of,
    sample_tokens,
)
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.run import pretrain
from bothways.training.loop import evaluate_losses
from bothways.training.meter import EvaluationScores
from bothways.training.optimizers import AdamW
from bothways.training.parallel import Plan
from toy_objective import SIZE, build_module, draw_sequences, short_run
from toy_training import check_splits

TABLES = ("token", "position", "segment", "norm")


def shape_of(vocab: int = SIZE, embedding: int | None = 16) -> EncoderConfig:
    small = preset("electra-small-discriminator")
    return dataclasses.replace(
        small, vocab=vocab, width=32, depth=2, heads=4, intermediate_size=64, embedding=embedding
    )


@pytest.fixture
def module() -> ReplacedTokensModule:
    return build_module(ReplacedTokens(), shape_of())


def discriminated(module: ReplacedTokensModule, batch: Batch) -> tuple[dict, Tensor]:
    """Return the losses, and the ids that the discriminator read."""
    read: list[Tensor] = []
    hook = module.model.encoder.register_forward_pre_hook(
        lambda module, arguments: read.append(arguments[0].ids)
    )
    losses = module(batch)
    hook.remove()
    return dict(losses), read[0]


def originals_of(batch: Batch) -> Tensor:
    masked = batch.targets["masked"]
    return batch.ids.index_copy(0, masked.index, masked.ids)


def padded(batch: Batch, values: Tensor, fill: int) -> Tensor:
    bounds = batch.layout.cu_seqlens.tolist()
    rows = [values[a:b] for a, b in itertools.pairwise(bounds)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


@pytest.mark.parametrize("embedding", [16, None])
def test_both_losses_are_those_of_transformers(embedding, tmp_path):
    from transformers import ElectraForMaskedLM, ElectraForPreTraining

    module = build_module(ReplacedTokens(), shape_of(embedding=embedding))
    for role, model in module.saved().items():
        save_model(tmp_path / role, model)
    discriminator = ElectraForPreTraining.from_pretrained(tmp_path / "model").double().eval()
    generator = ElectraForMaskedLM.from_pretrained(tmp_path / "generator").double().eval()
    module.double()
    batch = pack(draw_sequences(ReplacedTokens()))
    losses, read = discriminated(module, batch)
    weights = module.weights(batch)
    attention = padded(batch, torch.ones_like(read), 0)
    originals = originals_of(batch)
    labels = (read != originals).long()
    assert 0 < labels.sum() <= weights["masked"]
    masked = batch.targets["masked"]
    hidden = torch.full_like(originals, -100).index_copy(0, masked.index, masked.ids)
    with torch.no_grad():
        theirs = discriminator(padded(batch, read, 0), attention, labels=padded(batch, labels, 0))
        hidden = padded(batch, hidden, -100)
        filled = generator(padded(batch, batch.ids, 0), attention, labels=hidden)
    means = {name: loss.total.item() / weights[name] for name, loss in losses.items()}
    expected = {"replaced": theirs.loss.item(), "masked": filled.loss.item()}
    assert means == pytest.approx(expected, abs=1e-6)
    flagged = (theirs.logits > 0) & attention.bool()
    wrong = padded(batch, labels, 0).bool()
    counts = {name: int(count) for name, count in losses["replaced"].counts.items()}
    assert counts == {
        "replaced": int(labels.sum()),
        "flagged": int(flagged.sum()),
        "found": int((flagged & wrong).sum()),
    }


def test_shared_parameters_count_once(module):
    ours, theirs = (model.encoder.embedding for model in (module.model, module.generator))
    assert all(getattr(ours, name) is getattr(theirs, name) for name in TABLES)
    assert ours.project is not theirs.project
    trained = [*module.trained_parameters()]
    assert len({id(p) for _, p in trained}) == len(trained)
    assert not any(name.startswith("generator.encoder.embedding.token") for name, _ in trained)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draws_have_the_probabilities_of_the_softmax(temperature):
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1)) * 2
    count = 200_000
    draws = torch.from_numpy(np.random.default_rng(0).random(count))
    found = sample_tokens(logits.expand(count, -1), draws, temperature)
    expected = count * torch.softmax(logits.double() / temperature, 0)
    chi = ((torch.bincount(found, minlength=20) - expected).square() / expected).sum()
    assert chi < 43.8  # 99.9 % at 19 degrees of freedom


def test_draws_at_their_ends_and_at_low_temperatures():
    logits = torch.tensor([[-torch.inf, 1.0, 3.0, 2.0, -torch.inf]]).expand(3, -1)
    draws = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logits, draws, 1.0).tolist() == [1, 2, 3]
    assert sample_tokens(logits, draws, 1e-3).tolist() == [2, 2, 2]
    assert sample_tokens(logits.bfloat16(), draws, 1.0).tolist() == [1, 2, 3]
    assert sample_tokens(logits[:0], draws[:0], 1.0).tolist() == []


def test_a_draw_that_equals_the_original_counts_as_original(module, monkeypatch):
    batch = pack(draw_sequences(ReplacedTokens()))
    monkeypatch.setattr(
        "bothways.objectives.replaced_tokens.sample_tokens",
        lambda logits, draws, temperature: batch.targets["masked"].ids,
    )
    losses, read = discriminated(module, batch)
    assert torch.equal(read, originals_of(batch))
    assert losses["replaced"].counts["replaced"] == 0


def test_the_factor_and_the_temperature_of_the_objective_count():
    module = build_module(ReplacedTokens(replaced=7.0, temperature=1e-6), shape_of())
    assert module.coefficients == {"replaced": 7.0}
    batch = pack(draw_sequences(ReplacedTokens()))
    index = batch.targets["masked"].index
    likeliest = module.generator(batch, heads=["masked"]).logits["masked"][index].argmax(1)
    assert torch.equal(discriminated(module, batch)[1][index], likeliest)


def test_an_update_does_not_depend_on_microbatches(module):
    check_splits(module.double(), draw_sequences(ReplacedTokens()))


def test_metrics_are_those_of_the_replaced_tokens(module):
    batches = (
        pack(draw_sequences(ReplacedTokens(), [9, 28, 12])),
        pack(draw_sequences(ReplacedTokens())[3:]),
    )
    step = TrainingStep(batches, Cursor(), 0, 5, 0.0)
    seen: list[Tensor] = []
    head = module.model.heads["replaced"]
    hook = head.register_forward_hook(lambda module, arguments, output: seen.append(output))
    with torch.no_grad():  # scores on both sides of 0, and none so near that rounding decides
        module(batches[0])
        middle = seen[0].sort().values[len(seen[0]) // 2 :][:2]
        head.dense.bias -= middle.mean()
    hook.remove()
    scores = evaluate_losses(module, [step], Plan(), precision="fp32")
    counts = [module(batch)["replaced"].counts for batch in batches]
    replaced, flagged, found = (
        sum(int(each[name]) for each in counts) for name in ("replaced", "flagged", "found")
    )
    tokens = sum(len(batch.ids) for batch in batches)
    metrics = ReplacedTokens().metrics(scores, module.predicts)
    r = replaced / tokens
    assert metrics["rate/replaced"] == pytest.approx(r)
    assert metrics["precision/replaced"] == pytest.approx(found / flagged)
    assert metrics["recall/replaced"] == pytest.approx(found / replaced)
    assert metrics["f1/replaced"] == pytest.approx(2 * found / (replaced + flagged))
    bound = -r * math.log(r) - (1 - r) * math.log(1 - r)
    assert metrics["entropy/replaced"] == pytest.approx(bound)
    none = EvaluationScores(rates=dict.fromkeys([f"replaced/{n}" for n in counts[0]], 0.0))
    assert set(ReplacedTokens().metrics(none, ()).values()) == {0.0}


@pytest.mark.parametrize(
    ("name", "size", "width", "heads"),
    [("small", 1 / 4, 64, 1), ("base", 1 / 3, 256, 4), ("large", 1 / 4, 256, 4)],
)
def test_generators_have_the_sizes_of_the_paper(name, size, width, heads):
    discriminator = preset(f"electra-{name}-discriminator")
    generator = generator_of(discriminator, Narrower(size))
    sizes = (generator.width, generator.heads, generator.intermediate_size)
    assert sizes == (width, heads, 4 * width)
    assert generator.depth == discriminator.depth
    assert generator.embedding_width == discriminator.embedding_width
    if name != "small":
        assert generator == preset(f"electra-{name}-generator")
    assert generator_of(discriminator, Narrower(1.0)) == discriminator


@pytest.mark.parametrize(
    ("name", "depth"), [("xsmall", 6), ("small", 3), ("base", 6), ("large", 12)]
)
def test_generators_of_deberta_have_half_the_layers(name, depth):
    discriminator = preset(f"deberta-v3-{name}")
    generator = generator_of(discriminator, Shallower())
    assert generator == dataclasses.replace(discriminator, depth=depth)


@pytest.mark.parametrize(("groups", "share", "expected"), [(6, 0.25, 2), (9, 0.25, 1), (9, 0.5, 9)])
def test_groups_of_a_generator_divide_its_heads(groups, share, expected):
    encoder = dataclasses.replace(preset("eurobert-610m"), key_value_heads=groups)
    assert generator_of(encoder, Narrower(share)).key_value_heads == expected


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: ReplacedTokens(temperature=0.0), "objective.temperature"),
        (lambda: ReplacedTokens(replaced=math.nan), "objective.replaced"),
        (lambda: Narrower(2.0), "objective.generator.share"),
        (lambda: Shallower(0.0), "objective.generator.share"),
    ],
)
def test_bad_settings_are_refused(make, where):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.where == where


def test_encoders_without_a_place_for_it_are_refused(corpus):
    with pytest.raises(ConfigError, match="does not fit this encoder"):
        ReplacedTokens().models(preset("gpt2"))
    wide = dataclasses.replace(preset("bert-tiny"), embedding=16, order=PostNorm(projected=True))
    with pytest.raises(ConfigError, match="share the embedding's LayerNorm") as raised:
        ReplacedTokens().models(wide)
    for settings in ({"generator": Shallower()}, {"sharing": "disentangled"}):
        assert len(ReplacedTokens(**settings).models(wide)) == 2, raised.value.fix
    odd = ReplacedTokens(generator=Narrower(0.305))
    with pytest.raises(ConfigError, match="rotary positions need an even head size") as raised:
        odd.models(preset("modernbert-base"))  # whose own heads have 64 features
    assert raised.value.where == "objective.generator"
    bert = short_run(corpus, ReplacedTokens(), "bert-tiny", steps=1)
    with pytest.raises(BothwaysError, match="no bert class with the heads replaced"):
        pretrain(bert, corpus)


def config_of(corpus: Corpus, steps: int = 4) -> PretrainConfig:
    name = "electra-small-discriminator"
    return short_run(corpus, ReplacedTokens(), name, steps, heads=4, embedding=16)


def test_a_run_saves_both_networks(corpus, tmp_path):
    whole = pretrain(config_of(corpus), corpus, tmp_path / "run")
    metrics = {name.removeprefix("held-out/") for name in whole.metrics}
    assert {"loss/masked", "loss/replaced", "perplexity", "f1/replaced"} <= metrics
    saved = {role: load_model(tmp_path / "run" / role).model for role in ("model", "generator")}
    for role, model in whole.training_module.saved().items():
        for name, tensor in model.state_dict().items():
            assert torch.equal(saved[role].state_dict()[name], tensor), name
    tables, others = (model.encoder.embedding.tables() for model in saved.values())
    assert len(tables) == 3
    assert all(torch.equal(table.weight, others[name].weight) for name, table in tables.items())


@pytest.mark.slow
def test_the_discriminator_learns_more_than_the_share_of_replaced_tokens(corpus):
    config = config_of(corpus, 250)
    config = dataclasses.replace(
        config,
        encoder=dataclasses.replace(
            config.encoder,
            width=64,
            intermediate_size=128,
            embedding=32,
            dropout=Dropouts(0.0, 0.0),
        ),
        objective=ReplacedTokens(generator=Narrower(0.5)),
        training=dataclasses.replace(config.training, optimizer=AdamW(lr=3e-3)),
        batch=TokenBudget(1024),
        evaluation_tokens=3000,
    )
    scores = pretrain(config, corpus).metrics
    assert scores["held-out/loss/masked"] < scores["unigram/loss/masked"] - 0.5
    assert scores["held-out/loss/replaced"] < scores["held-out/entropy/replaced"] - 0.02
    assert scores["held-out/f1/replaced"] > 0.1
