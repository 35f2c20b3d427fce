"""The recurrent encoder against torch's LSTMs on padded batches; each half of a vector knows one side alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bothways.core.batch import Batch, pack
from bothways.core.errors import ConfigError
from bothways.core.layout import Layout
from bothways.core.sequence import Sequence
from bothways.data.masking import Vocabulary
from bothways.model.attention.patterns import Causal
from bothways.model.config import Dropouts, EncoderConfig, LSTMConfig
from bothways.model.families.catalogue import family_for, preset
from bothways.model.flops import forward_flops
from bothways.model.heads import (
    BiLMHead,
    ChoiceHead,
    LabelHead,
    MaskedHead,
    NextTokenHead,
    PoolerHead,
    ReplacedHead,
    SpanHead,
    TagHead,
)
from bothways.model.lstm import LSTMEncoder, by_time
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.objectives.causal_lm import BiLM, CausalLM, LMLearner

VOCAB = 20
SMALL = LSTMConfig(VOCAB, projection=5, cells=7, depth=3, dropout=0.0, initial_range=1.0)


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    ids = torch.randint(VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return Batch(ids, torch.zeros_like(ids), Layout.of(lengths))


def moved(config: LSTMConfig, seed: int = 0) -> LSTMEncoder:
    torch.manual_seed(seed)
    encoder = LSTMEncoder(config)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return encoder


def reference(encoder: LSTMEncoder, batch: Batch) -> list[Tensor]:
    """Every layer by torch's LSTM on a padded batch; the way back reads rows that were turned round, token by token."""
    rows = list(batch.ids.split(batch.layout.lengths))
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    kept = torch.arange(padded.shape[1]) < torch.tensor(batch.layout.lengths)[:, None]

    def turned(x: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence(
            [row[mask].flip(0) for row, mask in zip(x, kept, strict=True)], batch_first=True
        )

    def read(lstm: nn.LSTM, x: Tensor) -> Tensor:
        result: Tensor = lstm(x.transpose(0, 1))[0].transpose(0, 1)
        return result

    ahead = encoder.embedding.token(padded)
    back, layers = ahead, [torch.cat([ahead, ahead], -1)[kept]]
    for number, block in enumerate(encoder.blocks):
        one, other = read(block.ahead, ahead), turned(read(block.back, turned(back)))
        ahead, back = (one + ahead, other + back) if number else (one, other)
        layers.append(torch.cat([ahead, back], -1)[kept])
    return layers


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_layers_and_gradients_are_those_of_padded_lstms(
    lengths: list[int], projection: int, more: int, depth: int, seed: int
) -> None:
    config = LSTMConfig(VOCAB, projection, projection + more, depth, dropout=0.0)
    encoder, batch = moved(config, seed).double(), batch_of(lengths, seed)
    found, wanted = encoder(batch, keep_layers=True), reference(encoder, batch)
    assert len(found.layers) == len(wanted) == depth + 1
    for mine, theirs in zip(found.layers, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(found.last, encoder(batch).last)
    weights = torch.randn_like(wanted[-1])
    parameters = list(encoder.parameters())
    gradients = torch.autograd.grad((found.last * weights).sum(), parameters)
    for mine, theirs in zip(
        gradients, torch.autograd.grad((wanted[-1] * weights).sum(), parameters), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
        assert theirs.abs().sum() > 0 or max(lengths) == 1  # then nothing is remembered


def test_a_sequence_alone_is_a_sequence_in_a_batch() -> None:
    encoder, lengths = moved(SMALL), [3, 1, 8, 5]
    batch = batch_of(lengths)
    together = encoder(batch).last.split(lengths)
    for ids, vectors in zip(batch.ids.split(lengths), together, strict=True):
        alone = Batch(ids, torch.zeros_like(ids), Layout.of([len(ids)]))
        torch.testing.assert_close(encoder(alone).last, vectors)


def test_neither_half_knows_the_other_side() -> None:
    encoder, length = moved(SMALL), 6
    batch, half = batch_of([length]), SMALL.projection
    before = encoder(batch).last
    for place in range(length):
        ids = batch.ids.clone()
        ids[place] = (ids[place] + 1) % VOCAB
        moves = (encoder(Batch(ids, batch.segments, batch.layout)).last - before).abs()
        ahead, back = moves[:, :half].amax(1) > 0, moves[:, half:].amax(1) > 0
        assert ahead.tolist() == [at >= place for at in range(length)]
        assert back.tolist() == [at <= place for at in range(length)]


def test_the_cell_is_the_textbooks_with_a_projection() -> None:
    """Sak et al. 2014, equations 1 to 6 without peepholes, in float64."""
    encoder = moved(replace(SMALL, depth=1)).double()
    batch = batch_of([6])
    block = encoder.blocks[0]
    x = encoder.embedding.token(batch.ids).detach().numpy()

    def read(lstm: nn.LSTM, rows: np.ndarray) -> np.ndarray:
        w = {name: value.detach().numpy() for name, value in lstm.named_parameters()}
        h, c, result = np.zeros(5), np.zeros(7), []
        for row in rows:
            gates = (
                w["weight_ih_l0"] @ row + w["bias_ih_l0"] + w["weight_hh_l0"] @ h + w["bias_hh_l0"]
            )
            i, f, g, o = np.split(gates, 4)
            c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            h = w["weight_hr_l0"] @ (np.tanh(c) / (1 + np.exp(-o)))
            result.append(h)
        return np.array(result)

    wanted = np.concatenate([read(block.ahead, x), read(block.back, x[::-1])[::-1]], axis=1)
    np.testing.assert_allclose(encoder(batch).last.detach().numpy(), wanted, rtol=1e-9)


def test_the_way_back_begins_at_the_ends() -> None:
    order, sizes = by_time(Layout.of([1, 3, 2]), back=True)
    assert order.tolist() == [3, 5, 0, 2, 4, 1]
    assert sizes.tolist() == [3, 2, 1]


def test_dropout_is_before_every_lstm_and_only_in_training() -> None:
    encoder, batch = moved(replace(SMALL, dropout=0.5, depth=1)), batch_of([4, 2])
    encoder.train()
    first, second = (encoder(batch, keep_layers=True) for _ in range(2))
    assert torch.equal(first.layers[0], second.layers[0])
    assert not torch.equal(first.last, second.last)
    encoder.eval()
    assert torch.equal(encoder(batch).last, encoder(batch).last)


def test_forget_gates_start_open() -> None:
    lstm = LSTMEncoder(SMALL).blocks[1].back
    bias = lstm.bias_ih_l0.detach() + lstm.bias_hh_l0.detach()
    assert bias.tolist() == [0.0] * 7 + [1.0] * 7 + [0.0] * 14
    assert float(lstm.weight_hh_l0.detach().abs().max()) <= 7**-0.5


HEADS = (BiLMHead(), LabelHead(3), TagHead(4), SpanHead(), ChoiceHead())


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, cells=5), replace(preset("elmo-small"), vocab=90)]
)
def test_the_ledger_counts_to_the_last_parameter(config: LSTMConfig) -> None:
    with torch.device("meta"):
        model = Model(config, HEADS)
    assert parameter_table(config, HEADS).total == sum(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [("elmo-original", 91_255_808), ("elmo-medium", 26_753_536), ("elmo-small", 8_658_176)],
)
def test_presets_have_their_sizes_and_no_family(name: str, count: int) -> None:
    config = preset(name)
    assert parameter_table(config).total == count
    assert family_for(config) is None


def test_operations_are_two_for_each_weight_of_a_matrix() -> None:
    with torch.device("meta"):
        matrices = [p for p in LSTMEncoder(SMALL).blocks.parameters() if p.dim() == 2]
    encoder = 2 * sum(p.numel() for p in matrices)
    assert forward_flops(SMALL, (), 10) == encoder
    # Each half is multiplied with the embedding.
    assert forward_flops(SMALL, (BiLMHead(),), 10) == encoder + 2 * 2 * 5 * VOCAB


def test_a_head_of_whole_sequences_reads_the_mean() -> None:
    torch.manual_seed(1)
    model, batch = Model(SMALL, (LabelHead(3),)).eval(), batch_of([3, 5])
    x = model.encoder(batch).last
    head = model.heads["labels"]
    means = torch.stack([part.mean(0) for part in x.split([3, 5])])
    torch.testing.assert_close(
        model.read("labels", batch), head.dense(torch.tanh(head.inner(means)))
    )


@pytest.mark.parametrize("head", [MaskedHead(), PoolerHead(), ReplacedHead(), NextTokenHead()])
def test_heads_of_a_transformer_are_refused(
    head: MaskedHead | PoolerHead | ReplacedHead | NextTokenHead,
) -> None:
    with pytest.raises(
        ConfigError, match=f"^heads: the '{head.kind}' head reads vectors that know both sides"
    ):
        Model(SMALL, (head,))


def test_a_transformer_has_no_head_of_both_directions() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^heads: the 'bilm' head requires a recurrent encoder(.|\n)* with the head 'masked'",
    ):
        Model(EncoderConfig(VOCAB, 8, 1, 2, 8), (BiLMHead(),))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab": 0}, "encoder.vocab: must be at least 1, not 0"),
        ({"depth": 0}, "encoder.depth: must be at least 1, not 0"),
        ({"cells": 4}, "encoder.cells: 4 cells cannot give 5 features"),
        ({"dropout": 1.0}, r"encoder.dropout: must be in \[0, 1\), not 1.0"),
        ({"initial_range": 0.0}, "encoder.initial_range: must be above 0, not 0.0"),
        ({"pad": 20}, "encoder.pad: id 20 is not in the vocabulary of 20"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **changes)


NO_VOCABULARY = Vocabulary(np.zeros(0, bool), np.zeros(0, bool), 0)


def sequences(lengths: list[int]) -> list[Sequence]:
    draw = np.random.default_rng(3)
    return [
        Sequence(draw.integers(VOCAB, size=n, dtype=np.int32), np.zeros(n, np.int8))
        for n in lengths
    ]


def test_the_objective_is_the_likelihood_of_neighbours_from_one_side_each() -> None:
    torch.manual_seed(2)
    model = Model(SMALL, (BiLMHead(),)).double().eval()
    learner, given = LMLearner(model, BiLMHead.neighbours), sequences([4, 1, 6])
    with torch.no_grad():
        model.heads["bilm"].bias.normal_()
    batch = pack(
        [BiLM().prepare(sequence, NO_VOCABULARY, np.random.default_rng(0)) for sequence in given]
    )
    losses = learner(batch)
    matrix, bias = model.encoder.embedding.token.weight.detach(), model.heads["bilm"].bias.detach()
    totals = {"next": 0.0, "previous": 0.0}
    for sequence in given:
        ids = torch.from_numpy(sequence.ids).long()
        x = reference(model.encoder, Batch(ids, torch.zeros_like(ids), Layout.of([len(ids)])))[
            -1
        ].detach()
        ahead, back = ((part @ matrix.T + bias).log_softmax(-1) for part in x.split(5, -1))
        for at in range(len(ids) - 1):
            totals["next"] -= float(ahead[at, ids[at + 1]])
            totals["previous"] -= float(back[at + 1, ids[at]])
    for name, total in totals.items():
        assert float(losses[name].total.detach()) == pytest.approx(total, rel=1e-9)
        assert learner.weights(batch)[name] == 3 + 0 + 5


def test_from_left_to_right_the_objective_is_gpts() -> None:
    torch.manual_seed(2)
    config = EncoderConfig(VOCAB, 8, 2, 2, 8, patterns=(Causal(),), dropout=Dropouts(0.0, 0.0))
    learner, given = (
        LMLearner(Model(config, (NextTokenHead(),)), NextTokenHead.neighbours),
        sequences([5]),
    )
    batch = pack(
        [
            CausalLM().prepare(sequence, NO_VOCABULARY, np.random.default_rng(0))
            for sequence in given
        ]
    )
    losses = learner(batch)
    assert losses.keys() == {"next"}
    logits = learner.model.heads["causal"](
        learner.model.encoder(batch).last, learner.model.encoder.embedding.token.weight
    )
    wanted = nn.functional.cross_entropy(logits[:-1], batch.ids[1:], reduction="sum")
    torch.testing.assert_close(losses["next"].total, wanted)
