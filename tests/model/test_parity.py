"""Our encoder and heads against transformers' BERT and MegatronBERT: random shapes, every parameter random, mixed lengths."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bert_peers import Input, draw_config, draw_input, gradients, ours, peer
from bothways.core.batch import LabelTargets, Layout, TokenTargets
from bothways.core.errors import ConfigError
from bothways.model.attention.dispatch import attend
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Blocks, Causal, Full, Window
from bothways.model.attention.probabilities import attention_probabilities
from bothways.model.config import EncoderConfig
from bothways.model.heads import Head, LabelHead, MaskedHead, PairHead, PoolerHead
from bothways.model.model import Encoder, Model, recorded_attentions
from bothways.objectives.masked_lm import MaskedLMModule
from small_models import SHAPES, batch_for
from spread import in_turn

LENGTHS = [7, 20, 19, 1, 17, 3, 20]
TOLERANCE = 1e-5
CLASSES: dict[str, tuple[Head, ...]] = {
    "Model": (PoolerHead(),),
    "ForPreTraining": (MaskedHead(), PoolerHead(), PairHead()),
    "ForMaskedLM": (MaskedHead(),),
    "ForNextSentencePrediction": (PoolerHead(), PairHead()),
    "ForSequenceClassification": (PoolerHead(), LabelHead(3)),
}

CASES = [(order, name) for order in ("post", "pre") for name in CLASSES]


def outputs(model: Model, text: Input) -> dict[str, Tensor]:
    """What their class of the same heads returns, by the names it has there."""
    x, heads = model.encoder(text.batch).last, model.heads
    pooled = heads["pooler"](x, text.batch.layout) if "pooler" in heads else None
    result = (
        {}
        if "masked" not in heads
        else {"masked": heads["masked"](x, model.encoder.embedding.token.weight)}
    )
    if "pair" in heads:
        result["pair"] = heads["pair"](pooled)
    if "labels" in heads:
        result["labels"] = heads["labels"](pooled)
    return result or {"hidden": x, "pooled": pooled}


def peer_outputs(model: nn.Module, text: Input) -> dict[str, Tensor]:
    theirs = model(**text.padded)
    match type(model).__name__.removeprefix("Megatron"):
        case "BertModel":
            return {"hidden": theirs.last_hidden_state[text.kept], "pooled": theirs.pooler_output}
        case "BertForPreTraining":
            return {
                "masked": theirs.prediction_logits[text.kept],
                "pair": theirs.seq_relationship_logits,
            }
        case "BertForMaskedLM":
            return {"masked": theirs.logits[text.kept]}
        case "BertForNextSentencePrediction":
            return {"pair": theirs.logits}
        case _:
            return {"labels": theirs.logits}


def pair_of_models(config: EncoderConfig, name: str, seed: int) -> tuple[Model, nn.Module]:
    torch.manual_seed(seed)
    theirs = peer(config, name, num_labels=3)
    return ours(theirs, config, CLASSES[name]), theirs


def assert_near(found: Tensor, wanted: Tensor, floor: float = 1.0) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=TOLERANCE * max(float(wanted.abs().max()), floor)
    )


@pytest.mark.parametrize(("order", "name", "seed"), in_turn(CASES, range(4)))
def test_evaluation_equals_transformers_with_dropout_configured(order, name, seed):
    config = draw_config(seed, order, dropout=0.3, attention_dropout=0.2)
    mine, theirs = pair_of_models(config, name, seed)
    text = draw_input(config, LENGTHS, seed)
    with torch.no_grad():
        found, wanted = outputs(mine.eval(), text), peer_outputs(theirs.eval(), text)
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert_near(found[key], wanted[key])


@pytest.mark.parametrize(("order", "name", "seed"), in_turn(CASES, range(10, 13)))
def test_training_without_dropout_equals_transformers_forward_and_gradients(order, name, seed):
    config = draw_config(seed, order)
    mine, theirs = pair_of_models(config, name, seed)
    text = draw_input(config, LENGTHS, seed)
    found, wanted = outputs(mine.train(), text), peer_outputs(theirs.train(), text)
    for key, value in wanted.items():
        assert_near(found[key].detach(), value.detach())
        weights = torch.randn_like(value)
        (found[key] * weights).sum().backward(retain_graph=True)
        (value * weights).sum().backward(retain_graph=True)
    compare_gradients(mine, theirs)


def compare_gradients(mine: Model, theirs: nn.Module) -> None:
    found = gradients(mine)
    prefix = (
        "" if any(name.startswith("bert.") for name, _ in theirs.named_parameters()) else "bert."
    )
    wanted = {
        prefix + name: parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    assert found.keys() == wanted.keys()
    # The key's bias has no influence at all: its gradient is rounding, measured against that of the whole.
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert_near(found[name], gradient, floor=largest * 1e-2)


@pytest.mark.parametrize("order", ["post", "pre"])
def test_pretraining_losses_equal_transformers(order):
    config = draw_config(5, order)
    mine, theirs = pair_of_models(config, "ForPreTraining", 5)
    text = draw_input(config, LENGTHS)
    labels = torch.where(
        torch.rand(text.kept.shape) < 0.3, text.padded["input_ids"], -100
    ).masked_fill(~text.kept, -100)
    labels[:, 0] = -100  # [CLS] is never masked
    pairs = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    wanted = theirs.train()(**text.padded, labels=labels, next_sentence_label=pairs)
    wanted.loss.backward()

    index = (labels[text.kept] != -100).nonzero()[:, 0]
    targets = {"masked": TokenTargets(index, labels[text.kept][index]), "pair": LabelTargets(pairs)}
    training_module = MaskedLMModule(mine.train())
    losses = training_module(replace(text.batch, targets=targets))
    weights = training_module.weights(replace(text.batch, targets=targets))
    assert weights == {"masked": float(len(index)), "pair": float(len(pairs))}
    loss = sum(losses[name].total / weight for name, weight in weights.items())
    loss.backward()
    assert_near(loss.detach(), wanted.loss.detach())
    compare_gradients(mine, theirs)


@pytest.mark.parametrize("order", ["post", "pre"])
def test_every_layer_equals_transformers(order):
    config = draw_config(6, order)
    mine, theirs = pair_of_models(config, "Model", 6)
    text = draw_input(config, LENGTHS)
    with torch.no_grad():
        found = mine.eval().encoder(text.batch, keep_layers=True)
        wanted = theirs.eval()(**text.padded, output_hidden_states=True).hidden_states
    # Theirs has the last layer of a pre-norm encoder twice, before and after the LayerNorm at the end.
    wanted = (*wanted[: config.depth], wanted[-1])
    assert len(found.layers) == len(wanted) == config.depth + 1
    for ours_, theirs_ in zip(found.layers, wanted, strict=True):
        assert_near(ours_, theirs_[text.kept])
    assert found.layers[-1] is found.last


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize(("dropout", "attention_dropout"), [(0.3, 0.0), (0.0, 0.4), (0.2, 0.2)])
def test_training_with_dropout_equals_transformers_in_distribution(
    order, dropout, attention_dropout
):
    """One sequence many times over in a batch, each copy with draws of its own: first and second moments of every output.

    The second moment tells where dropout acts: on attention scores, or on the values, it would be another one.
    """
    config = draw_config(21, order, dropout, attention_dropout)
    mine, theirs = pair_of_models(config, "Model", 21)
    copies, length = 6000, 5
    one = draw_input(config, [length])
    text = draw_input(config, [length] * copies)
    text.batch.ids.copy_(one.batch.ids.repeat(copies))
    text.batch.segments.copy_(one.batch.segments.repeat(copies))
    padded = {name: tensor.repeat(copies, 1) for name, tensor in one.padded.items()}
    with torch.no_grad():
        found = mine.train().encoder(text.batch).last.double().view(copies, -1)
        wanted = theirs.train()(**padded).last_hidden_state.double().view(copies, -1)
    for power in (1, 2):
        a, b = found**power, wanted**power
        error = ((a.var(0) + b.var(0)) / copies).sqrt()
        assert float(((a.mean(0) - b.mean(0)) / error).abs().max()) < 5
    assert float(found.std(0).min()) > 0


@pytest.mark.parametrize("order", ["post", "pre"])
def test_a_sequence_packed_with_others_equals_it_alone(order):
    config = draw_config(7, order)
    mine, _ = pair_of_models(config, "Model", 7)
    text = draw_input(config, LENGTHS)
    with torch.no_grad():
        together = mine.eval().encoder(text.batch).last.split(LENGTHS)
        for at, (length, found) in enumerate(zip(LENGTHS, together, strict=True)):
            start = sum(LENGTHS[:at])
            alone = draw_input(config, [length])
            alone.batch.ids.copy_(text.batch.ids[start : start + length])
            alone.batch.segments.copy_(text.batch.segments[start : start + length])
            torch.testing.assert_close(found, mine.encoder(alone.batch).last, rtol=0, atol=1e-6)


def test_evaluating_twice_gives_equal_outputs():
    config = draw_config(8, "post", dropout=0.5, attention_dropout=0.5)
    mine, _ = pair_of_models(config, "ForPreTraining", 8)
    text = draw_input(config, LENGTHS)
    with torch.no_grad():
        first, second = outputs(mine.eval(), text), outputs(mine, text)
    assert all(torch.equal(first[key], second[key]) for key in first)


SHORT = [9, 3, 40, 1]


@pytest.mark.parametrize(
    "pattern", [Full(), Causal(), Window(3), Window(3, global_attention=True)], ids=repr
)
def test_probabilities_times_values_are_the_output(pattern):
    torch.manual_seed(0)
    layout = Layout.of(SHORT)
    qkv, other = torch.randn(2, layout.tokens, 3, 2, 4)
    chosen = torch.rand(layout.tokens) < 0.2
    view = AttentionView(layout, pattern, global_attention_mask=chosen)
    global_qkv = other if view.has_global_tokens else None
    shares = attention_probabilities(qkv, view, global_qkv=global_qkv)
    assert [tuple(share.shape) for share in shares] == [(2, n, n) for n in SHORT]
    starts = layout.cu_seqlens.tolist()
    values = [qkv[a:b, 2] for a, b in itertools.pairwise(starts)]
    outputs = [torch.einsum("hqk,khd->qhd", s, v) for s, v in zip(shares, values, strict=True)]
    if global_qkv is not None:
        own = [global_qkv[a:b, 2] for a, b in itertools.pairwise(starts)]
        theirs = [torch.einsum("hqk,khd->qhd", s, v) for s, v in zip(shares, own, strict=True)]
        outputs = [torch.where(chosen[:, None, None], torch.cat(theirs), torch.cat(outputs))]
    found = attend(qkv, view, 0.0, global_qkv)
    torch.testing.assert_close(torch.cat(outputs), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name, c in SHAPES.items() if isinstance(c, EncoderConfig)]
)
def test_every_family_has_attentions(name):
    config = SHAPES[name]
    encoder, batch = Encoder(config).eval(), batch_for(config)
    if any(isinstance(pattern, Blocks) for pattern in config.patterns):
        message = "block-sparse sequences longer than 44 tokens"
        with pytest.raises(ConfigError, match=message), recorded_attentions(encoder):
            encoder(batch)
        return
    with recorded_attentions(encoder) as attentions:
        encoder(batch)
    assert len(attentions) == config.steps
    for layer in attentions:
        assert [share.shape[-1] for share in layer] == batch.layout.lengths
        for share in layer:
            torch.testing.assert_close(share.sum(-1), torch.ones(share.shape[:-1]))
    assert not any(module._forward_pre_hooks for module in encoder.modules())
