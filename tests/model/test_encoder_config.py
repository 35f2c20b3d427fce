"""A configuration that cannot be is refused by name, with both values of a conflict."""

from dataclasses import replace

import pytest
import torch

from bothways.core.errors import ConfigError
from bothways.model.attention.patterns import Blocks, Full, Window
from bothways.model.config import Dropouts, EncoderConfig, Gated, Own, Readout, Sharing
from bothways.model.heads import LabelHead, MaskedHead, NextTokenHead
from bothways.model.positions import (
    Convolution,
    Disentangled,
    DistanceBias,
    Learned,
    Rotary,
    Sinusoidal,
)


def encoder(**settings):
    return lambda: EncoderConfig(**{"vocab": 50, **settings})


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (encoder(vocab=0), "encoder.vocab"),
        (encoder(width=-8), "encoder.width"),
        (encoder(depth=0), "encoder.depth"),
        (encoder(heads=0), "encoder.heads"),
        (encoder(intermediate_size=0), "encoder.intermediate_size"),
        (encoder(width=100, heads=12), "encoder.heads"),
        (encoder(segments=-1), "encoder.segments"),
        (encoder(norm_epsilon=0.0), "encoder.norm_epsilon"),
        (encoder(initial_range=-0.02), "encoder.initial_range"),
        (encoder(pad=50), "encoder.pad"),
        (encoder(pad=-1), "encoder.pad"),
        (encoder(patterns=()), "encoder.patterns"),
        (encoder(patterns=(Blocks(),), position=Disentangled()), "encoder.patterns"),
        (encoder(patterns=(Blocks(),), position=Learned(bias=DistanceBias())), "encoder.patterns"),
        (encoder(heads=4, width=8, key_value_heads=3), "encoder.key_value_heads"),
        (encoder(key_value_heads=0), "encoder.key_value_heads"),
        (encoder(key_value_heads=1, position=Disentangled()), "encoder.key_value_heads"),
        (encoder(patterns=(Window(4, global_attention=True),), position=Disentangled()), "encoder.patterns"),
        (encoder(position=Rotary(), width=12, heads=4), "encoder.heads"),
        (encoder(depth=2, sharing=Sharing(3)), "encoder.sharing.groups"),
        (lambda: Dropouts(hidden=1.0), "encoder.dropout.hidden"),
        (lambda: Dropouts(hidden=float("nan")), "encoder.dropout.hidden"),
        (lambda: Dropouts(attention=-0.1), "encoder.dropout.attention"),
        (lambda: Dropouts(embedding=1.0), "encoder.dropout.embedding"),
        (lambda: Learned(0), "encoder.position.max_positions"),
        (lambda: Learned(4, offset=-1), "encoder.position.offset"),
        (lambda: Sinusoidal(0), "encoder.position.max_positions"),
        (lambda: Rotary(0), "encoder.position.max_positions"),
        (lambda: Rotary(bases=(1.0,)), "encoder.position.bases"),
        (lambda: DistanceBias(2), "encoder.position.bias.buckets"),
        (lambda: DistanceBias(6), "encoder.position.bias.buckets"),
        (lambda: DistanceBias(32, 8), "encoder.position.bias.max_distance"),
        (lambda: Disentangled(0), "encoder.position.max_positions"),
        (lambda: Disentangled(max_distance=0), "encoder.position.max_distance"),
        (lambda: Disentangled(terms=()), "encoder.position.terms"),
        (lambda: Disentangled(terms=("c2p", "c2p")), "encoder.position.terms"),
        (lambda: Disentangled(buckets=1), "encoder.position.buckets"),
        (lambda: Convolution(4), "encoder.position.convolution.size"),
        (lambda: Convolution(groups=0), "encoder.position.convolution.groups"),
        (encoder(position=Disentangled(convolution=Convolution(groups=5))), "encoder.position.convolution.groups"),
        (lambda: Sharing(layers_per_group=2, parts="attention"), "encoder.sharing.layers_per_group"),
        (lambda: Own(input_dropout=1.0), "encoder.readout.input_dropout"),
        (lambda: Window(-1), "encoder.patterns.radius"),
        (lambda: Gated(1.0), "encoder.mlp.dropout"),
        (lambda: Readout(pair_dropout=1.5), "encoder.readout.pair_dropout"),
        (lambda: Readout(span_dropout=-0.5), "encoder.readout.span_dropout"),
        (lambda: LabelHead(0), "heads.labels.count"),
        (lambda: LabelHead(2, 1.0), "heads.labels.dropout"),
        (lambda: NextTokenHead().build(EncoderConfig(50, embedding=4)), "encoder.embedding"),
        (lambda: MaskedHead().build(EncoderConfig(50, embedding=4, readout=Readout(masked="direct"))), "encoder.readout.masked"),
        (lambda: MaskedHead().build(EncoderConfig(50, position=Disentangled(absolute="decoder"), readout=Readout(shifted=True))), "encoder.readout.shifted"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(make, where):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.where == where


def test_an_output_layer_of_its_own_predicts_from_any_width():
    own = NextTokenHead().build(EncoderConfig(50, embedding=4, readout=Readout(output="own")))
    assert own(torch.ones(3, 768), torch.ones(50, 4)).shape == (3, 50)


def test_patterns_and_bases_go_round_and_equal_encoders_have_one_canonical_form():
    patterns, position = (Full(), Window(2)), Rotary(9, (7.0, 3.0, 3.0))
    config = EncoderConfig(50, depth=5, patterns=patterns, position=position)
    assert [config.pattern(layer) for layer in range(5)] == [*patterns, *patterns, Full()]
    assert [config.base(layer) for layer in range(5)] == [7, 3, 3, 7, 3]
    assert EncoderConfig(50).base(0) is None
    position = Rotary(9, (7.0, 3.0, 3.0, 7.0, 3.0, 8.0))
    longer = replace(config, patterns=patterns * 4, position=position)
    assert longer.canonical == config.canonical == config
    assert replace(longer, depth=6).canonical != replace(config, depth=6).canonical
