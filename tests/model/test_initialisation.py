"""Weights start as Google's do: a normal cut off at two σ, biases 0, LayerNorms at 1 and 0; and dropout's draws."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ModernBertConfig, ModernBertForMaskedLM

from bothways.model.config import Deep, Dropouts, EncoderConfig, FromVector, PreNorm, Readout
from bothways.model.families.catalogue import preset
from bothways.model.families.modernbert import MODERNBERT
from bothways.model.families.weight_names import to_file_names
from bothways.model.heads import LabelHead, MaskedHead, PairHead, PoolerHead, SpanHead
from bothways.model.init import without_weights
from bothways.model.kernels.dropout import Dropout, dropout, keep_mask
from bothways.model.model import Model
from bothways.model.positions import Convolution, Disentangled

SIGMA = 0.03
HEADS = (MaskedHead(), PoolerHead(), PairHead(), LabelHead(4), SpanHead())


def started(**settings: object) -> Model:
    torch.manual_seed(3)
    config = EncoderConfig(300, 64, 2, 4, 100, initial_range=SIGMA, **settings)
    return Model(config, HEADS)


@pytest.mark.parametrize("settings", [
    {}, {"order": PreNorm()}, {"position": Disentangled(64, convolution=Convolution(3))},
    {"readout": Readout(span=Deep())},
], ids=["post", "pre", "convolution", "deep"])  # fmt: skip
def test_matrices_follow_the_cut_normal_and_the_rest_is_constant(settings):
    model = started(**settings)
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    assert len(norms) == 2 * 2 + 1 + 1 + len({"position", "readout"} & {*settings})
    for name, parameter in model.state_dict().items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif name.rpartition(".")[0] in norms:
            assert bool((parameter == 1).all()), name
        else:
            # What a pre-norm block adds to the residual path is smaller.
            adds = "order" in settings and name.endswith(
                ("attention.out.weight", "mlp.down.weight")
            )
            sigma = SIGMA / np.sqrt(2 * 2) if adds else SIGMA
            assert float(parameter.abs().max()) <= 2 * sigma, name
            values = parameter.flatten().double().numpy() / sigma
            assert stats.kstest(values, stats.truncnorm(-2, 2).cdf).pvalue > 1e-4, name


def test_modernbert_starts_as_in_transformers():
    shape = dict(
        vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=100, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(4)
    reference = ModernBertForMaskedLM(ModernBertConfig(**shape))
    config = dataclasses.replace(
        preset("modernbert-base"), vocab=300, width=64, depth=3, heads=4, intermediate_size=100, pad=0,
    )  # fmt: skip
    model = Model(config, [MaskedHead()])
    tensors = to_file_names(MODERNBERT.keys, model.state_dict())
    for name, parameter in reference.named_parameters():
        ours, theirs = (
            tensor.flatten().double().numpy() for tensor in (tensors[name], parameter.detach())
        )
        assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=0.05), name
        assert stats.ks_2samp(ours, theirs).pvalue > 1e-4, name


def test_two_models_start_differently_and_a_seed_starts_equal_ones():
    first, second = started().state_dict(), started().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = Model(started().config, HEADS).state_dict()
    assert not torch.equal(
        other["encoder.embedding.token.weight"], first["encoder.embedding.token.weight"]
    )


def test_heads_are_where_they_were_asked_for():
    assert set(started().heads) == {"masked", "pooler", "pair", "labels", "span"}
    assert set(Model(started().config, [PoolerHead()]).heads) == {"pooler"}
    config = EncoderConfig(9, 8, 1, 1, 8, dropout=Dropouts(0.25))
    for rate, expected in ((None, 0.25), (0.0, 0.0), (0.5, 0.5)):
        head = Model(config, [LabelHead(2, rate)]).heads["labels"]
        assert head.dropout.rate == expected
    assert Model(config, [PairHead()]).heads["pair"].dropout.rate == 0
    config = dataclasses.replace(config, readout=Readout(labels=FromVector()))
    heads = [Model(config, [LabelHead(2, rate)]).heads["labels"] for rate in (None, 0.5)]
    assert [head.dropout.rate for head in heads] == [0, 0.5]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_expectation_and_drops_the_rate(rate):
    torch.manual_seed(0)
    count = 400_001  # no multiple of four, the numbers of a draw
    kept = dropout(torch.ones(count), rate)
    values = kept.unique().tolist()
    assert values == pytest.approx([0.0, 1 / (1 - rate)], rel=1e-4)
    dropped = int((kept == 0).sum())
    assert stats.binomtest(dropped, count, round(rate * 2**16) / 2**16).pvalue > 1e-4


@pytest.mark.parametrize("rate", [0.1, 0.3, 1 - 2**-16])
def test_of_all_draws_that_there_can_be_exactly_the_rate_is_dropped(rate, monkeypatch):
    class Each:
        def __init__(self, seed: int) -> None:
            pass

        def random_raw(self, count: int) -> np.ndarray:
            return np.arange(-(2**15), 2**15).astype(np.int16).view(np.uint64)

    monkeypatch.setattr(np.random, "SFC64", Each)
    mask = keep_mask(torch.empty(2**16), rate, 1)
    assert int((mask == 0).sum()) == round(rate * 2**16)
    assert mask.unique().tolist() == pytest.approx(
        [0.0, 2**16 / (2**16 - round(rate * 2**16))], rel=1e-7
    )


def test_neighbouring_draws_are_independent():
    kept = (keep_mask(torch.empty(800_000), 0.5, 1) > 0).view(-1, 4).long()
    patterns = (kept * torch.tensor([8, 4, 2, 1])).sum(1).bincount(minlength=16)
    assert stats.chisquare(patterns.numpy()).pvalue > 1e-4


def test_dropout_does_nothing_in_evaluation_or_at_rate_0():
    x = torch.randn(7, 3)
    assert Dropout(0.5).eval()(x) is x
    assert dropout(x, 0.0) is x
    assert not torch.equal(Dropout(0.5)(x), x)


def test_weights_that_will_be_loaded_are_not_drawn():
    """For draws without memory torch would import its compiler, which takes seconds."""
    drawn: list[str] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            drawn.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Recorded(), without_weights():
        model = Model(EncoderConfig(9, 4, 1, 1, 8), (MaskedHead(), LabelHead(2)))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert drawn
    assert not {name for name in drawn if "normal" in name or "uniform" in name or "rand" in name}
