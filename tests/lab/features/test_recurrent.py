"""The packed BiLSTM against torch's, one sequence at a time; the choices of layers."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from attention_formulas import OnGpu
from bothways.core.batch import Layout
from bothways.core.errors import ConfigError
from bothways.lab.features import LayerChoice
from bothways.lab.features.run import BiLSTM, LayerSum, chosen_layers


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 10**6))
def test_each_sequence_is_read_as_if_alone(lengths, seed):
    torch.manual_seed(seed)
    ours = BiLSTM(5, 3, layers=2)
    x = torch.randn(sum(lengths), 5, requires_grad=True)
    got = ours(x, Layout.of(lengths))
    alone = torch.cat([ours.lstm(part)[0] for part in x.split(lengths)])
    torch.testing.assert_close(got, alone)
    weights = torch.randn_like(got)
    (gradient,) = torch.autograd.grad((got * weights).sum(), x)
    (expected,) = torch.autograd.grad((alone * weights).sum(), x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_reads_in_the_precision_of_the_weights(dtype, monkeypatch):
    """Autocast would give cuDNN's LSTMs fp16, whatever it was asked for."""
    seen = []

    def recorded(lstm: nn.LSTM, given: PackedSequence) -> tuple[PackedSequence, None]:
        seen.append((torch.is_autocast_enabled("cuda"), given.data.dtype))
        return given, None

    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(nn.LSTM, "forward", recorded)
    x = torch.randn(5, 6, dtype=dtype).as_subclass(OnGpu)
    with torch.autocast("cuda", torch.float16):
        BiLSTM(6, 3)(x, Layout.of([3, 2]))
    assert seen == [(False, torch.float32)]


def test_dropout_is_between_layers_and_only_in_training():
    layout, x = Layout.of([3, 2]), torch.randn(5, 4)
    lstm = BiLSTM(4, 3, layers=2, dropout=0.5).train()
    assert not torch.equal(lstm(x, layout), lstm(x, layout))
    lstm.eval()
    assert torch.equal(lstm(x, layout), lstm(x, layout))
    single = BiLSTM(4, 3, layers=1, dropout=0.5).train()
    assert torch.equal(single(x, layout), single(x, layout))
    assert lstm.width == lstm(x, layout).shape[1] == 6


def test_choices_are_those_of_table_7():
    chosen = {choice: chosen_layers(choice, 12) for choice in get_args(LayerChoice)}
    assert chosen == {
        "embeddings": (0,),
        "second_to_last": (11,),
        "last": (12,),
        "weighted_last_four": (9, 10, 11, 12),
        "concat_last_four": (9, 10, 11, 12),
        "weighted_all": tuple(range(1, 13)),
    }


@pytest.mark.parametrize(
    ("choice", "depth"), [("concat_last_four", 3), ("weighted_last_four", 3), ("second_to_last", 1)]
)
def test_a_shallow_encoder_has_no_four_last_layers(choice, depth):
    with pytest.raises(ConfigError, match=f"needs more blocks than the encoder's {depth}"):
        chosen_layers(choice, depth)
    assert len(chosen_layers(choice, depth + 1)) in {1, 4}


def test_weighted_sum_begins_as_the_mean_and_learns():
    x = torch.randn(7, 4, 3)
    mix = LayerSum(4)
    torch.testing.assert_close(mix(x), x.mean(1))
    with torch.no_grad():
        mix.weights.copy_(torch.tensor([0.0, 1.0, -2.0, 0.5]))
        mix.scale.fill_(3.0)
    shares = np.exp([0.0, 1.0, -2.0, 0.5]) / np.exp([0.0, 1.0, -2.0, 0.5]).sum()
    expected = 3 * np.einsum("tlw,l->tw", x.numpy(), shares)
    np.testing.assert_allclose(mix(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    mix(x).square().sum().backward()
    assert all(parameter.grad.any() for parameter in mix.parameters())
