"""What a model returns when it is called: as the classes of transformers, forward and backward."""

import dataclasses
import functools
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from bert_peers import FAMILIES, draw_config, draw_input, peer
from bothways.core.batch import Batch, Layout
from bothways.core.errors import ConfigError
from bothways.model.attention.patterns import Causal
from bothways.model.config import EncoderConfig, Own, Readout
from bothways.model.heads import (
    ChoiceHead,
    LabelHead,
    NextTokenHead,
    PairHead,
    Pooler,
    PoolerHead,
    SpanHead,
    TagHead,
)
from bothways.model.model import Model
from bothways.prediction.prepared_model import prepare_model
from family_peers import assert_gradients_equal
from small_models import SHAPES, batch_for
from spread import first_of
from toy_relation import RelationHead

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_vectors_attentions_and_gradients_are_those_of_transformers(order, training):
    config = draw_config(5, order)
    model = Model(config, [PoolerHead()]).train(training)  # without dropout
    theirs = peer(model, "Model", attn_implementation="eager").train(training)
    text = draw_input(config, [7, 4, 11])
    wanted = theirs(**text.padded, output_hidden_states=True, output_attentions=True)
    found = model(text.batch, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(found.pooler_output, wanted.pooler_output, **CLOSE)
    vectors = wanted.last_hidden_state[text.kept]
    torch.testing.assert_close(found.last_hidden_state, vectors, **CLOSE)
    assert found.hidden_states[-1] is found.last_hidden_state
    for mine, reference in zip(found.hidden_states, wanted.hidden_states, strict=True):
        torch.testing.assert_close(mine, reference[text.kept], **CLOSE)
    loss = wanted.pooler_output.square().sum() + found.pooler_output.square().sum()
    for layer, reference in zip(found.attentions, wanted.attentions, strict=True):
        assert [share.shape[-1] for share in layer] == text.batch.layout.lengths
        for share, padded in zip(layer, reference, strict=True):
            part = padded[:, : share.shape[-1], : share.shape[-1]]
            torch.testing.assert_close(share, part, **CLOSE)
            loss = loss + (share**3).sum() + (part**3).sum()
    # As for maps of which word a prediction depends on.
    found.hidden_states[0].retain_grad()
    wanted.hidden_states[0].retain_grad()
    loss.backward()
    expected = wanted.hidden_states[0].grad[text.kept]
    torch.testing.assert_close(found.hidden_states[0].grad, expected, **CLOSE)
    [bare] = [each for each in FAMILIES[order].architectures if each.name.endswith("BertModel")]
    assert_gradients_equal(FAMILIES[order], bare, model, theirs)


@pytest.mark.parametrize(
    "config",
    first_of(
        [(config,) for config in SHAPES.values()],
        [repr((config.readout, config.order.kind, config.is_causal)) for config in SHAPES.values()],
        [*SHAPES],
    ),
)
def test_a_head_that_is_read_alone_has_the_outputs_of_a_call(config):
    batch, heads = (
        batch_for(config),
        [LabelHead(3), TagHead(2), SpanHead(), ChoiceHead(), PairHead()],
    )
    torch.manual_seed(0)
    model = Model(config, heads).eval()
    with torch.no_grad():
        output = model(batch)
        assert set(output.logits) == {head.kind for head in heads}
        for head in heads:
            found = model.read(head.kind, batch)
            torch.testing.assert_close(found, output.logits[head.kind], **CLOSE)
            rows = batch.layout.sequences if head.of_sequences else batch.layout.tokens
            assert found.shape == (rows, head.outputs)


class MaxPooler(Pooler):
    """Reads the largest feature of all tokens of a sequence."""

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        largest = [part.amax(0) for part in x.split(layout.lengths)]
        result: Tensor = self.dense(torch.stack(largest))
        return result


@dataclasses.dataclass(frozen=True)
class MaxHead(TagHead):
    """A row for each sequence, of which it reads all tokens: a head says which it reads."""

    kind: Literal["max"] = "max"
    of_sequences: ClassVar[bool] = True

    def build(self, config: EncoderConfig) -> nn.Module:
        return MaxPooler(config)


def test_a_head_of_sequences_that_is_read_alone_may_read_all_tokens():
    config = draw_config(5, "post")
    head, text = MaxHead(1), draw_input(config, [7, 4, 11])
    assert not head.reads_one_token(config)
    assert LabelHead(2).reads_one_token(config)
    model = Model(config, [head]).eval()
    with torch.no_grad():
        output = model(text.batch, heads=["max"])
        torch.testing.assert_close(model.read("max", text.batch), output.logits["max"], **CLOSE)


def test_means_of_half_precision_are_rounded_once():
    torch.manual_seed(0)
    head = LabelHead(2).build(
        EncoderConfig(9, 8, 1, 2, 8, readout=Readout(labels=Own(reads="mean")))
    )
    x = torch.randn(700, 8).bfloat16()
    expected = torch.stack([part.double().mean(0) for part in x.split([333, 367])])
    assert torch.equal(head.pool(x, Layout.of([333, 367])), expected.bfloat16())


def test_a_prepared_model_has_attentions_and_a_longformer_gradients_through_them():
    config = SHAPES["bert-base-chinese"]
    model = Model(config, [PoolerHead()]).eval()
    batch = batch_for(config)
    with torch.no_grad():
        wanted = model(batch, output_attentions=True)
        found = prepare_model(model)(batch, output_attentions=True)
    assert not found.hidden_states
    for mine, theirs in zip(found.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)

    config = SHAPES["longformer-large-4096"]
    chosen = torch.arange(batch.layout.tokens) % 5 == 0
    batch = dataclasses.replace(batch_for(config), global_attention_mask=chosen)
    model = Model(config, []).eval()
    output = model(batch, output_attentions=True)
    sum((share**2).sum() for share in output.attentions[-1]).backward()
    assert model.encoder.blocks[-1].attention.global_qkv.weight.grad.abs().max() > 0


def test_what_a_model_cannot_compute_is_one_message():
    config = draw_config(5, "post")
    heads = [TagHead(3), NextTokenHead(), RelationHead(3)]
    model, text = Model(config, heads), draw_input(config, [3])
    assert list(model(text.batch).logits) == ["tags"]
    with pytest.raises(
        ConfigError, match=r"heads: .* no head 'masked'; it has tags, causal, relation"
    ):
        model(text.batch, heads="masked")
    with pytest.raises(ConfigError, match="'relation' is computed by its task model alone"):
        model(text.batch, heads=["relation"])
    with pytest.raises(ConfigError, match=r"not a str\n.*model\.tokenizer\.batch\(texts\)"):
        model._check("a text")  # types are checked earlier in tests
    most = config.max_positions
    batch = draw_input(config, [most, most + 1]).batch
    for compute in (model, functools.partial(model.read, "labels")):
        with pytest.raises(ConfigError, match=rf"text 1 has {most + 1} tokens, .* {most} pos"):
            compute(batch)


@pytest.mark.parametrize("readout", [Readout(), Readout(labels=Own())], ids=["pooler", "own"])
def test_a_causal_encoder_is_read_at_its_last_token(readout):
    """Its first token, [CLS], has seen nothing: read there, all texts would look alike."""
    config = EncoderConfig(20, 16, 2, 2, 32, patterns=(Causal(),), readout=readout)
    model, layout = Model(config, (LabelHead(2),)).eval(), Layout.of([5, 5])
    ids = torch.tensor([1, 5, 6, 7, 2, 1, 5, 6, 7, 3])
    with torch.no_grad():
        rows = model.read("labels", Batch(ids, torch.zeros_like(ids), layout))
    assert not torch.allclose(rows[0], rows[1])
