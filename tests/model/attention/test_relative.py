"""Disentangled attention against its formula, its buckets against the authors' code told again, the ledger's letters."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention_formulas import assert_same_with_gradients
from batch_operations import batch_flops
from bothways.core.batch import EQUAL, LOOSE, Batch, Layout, RectanglePolicy
from bothways.core.config.reader import read, to_dict
from bothways.core.errors import ConfigError
from bothways.model.attention import relative as disentangled
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Causal, Full, Pattern, Window
from bothways.model.attention.probabilities import attention_probabilities
from bothways.model.attention.relative import PositionTerms, along_diagonals, attend_relative
from bothways.model.config import Bias, EncoderConfig, Own, PostNorm, PreNorm
from bothways.model.embedding import distances_of, row_of
from bothways.model.heads import Head, LabelHead, MaskedHead, ReplacedHead
from bothways.model.model import Encoder, Model
from bothways.model.positions import Convolution, Disentangled
from bothways.training.step_cost import forward_flops
from random_weights import perturb
from small_models import batch_for

HEADS, SIZE = 2, 5


def row(position: Disentangled, distance: int) -> int:
    """The row of the table of one distance, in 64 bits, as the authors' code has it."""
    place, size, buckets = distance, abs(distance), position.buckets
    if buckets is not None and size > buckets // 2:
        middle = buckets // 2
        share = np.log(size / middle) / np.log((position.farthest - 1) / middle)
        place = int(np.ceil(share * (middle - 1)) + middle) * int(math.copysign(1, distance))
    return min(max(place + position.span, 0), 2 * position.span - 1)


NUMBERS = st.tuples(
    st.integers(8, 60), st.none() | st.integers(3, 60), st.none() | st.integers(2, 40)
)


def drawn(numbers: tuple[int, int | None, int | None]) -> Disentangled:
    """The longest input, the reach, and as many of the buckets as that allows."""
    most, reach, buckets = numbers
    return Disentangled(
        most, max_distance=reach, buckets=buckets and min(buckets, 2 * ((reach or most) - 1) - 1)
    )


@given(numbers=NUMBERS)
@example(numbers=(512, None, 256))  # as published
def test_each_distance_has_the_row_of_the_authors_code(numbers):
    position = drawn(numbers)
    distances = torch.arange(-numbers[0] - 90, numbers[0] + 91)
    edge = position.farthest - 1  # where rounding in 32 bits may decide, as in transformers
    for distance, found in zip(
        distances.tolist(), row_of(position, distances).tolist(), strict=True
    ):
        assert abs(found - row(position, distance)) <= (abs(distance) == edge)


@pytest.mark.parametrize(
    ("most", "reach", "buckets"), [(9, None, 16), (8, None, 16), (9, 4, 17), (1, None, 2)]
)
def test_half_the_buckets_may_be_enough_for_every_distance(most, reach, buckets):
    """Then each has a row of its own, and inputs that are too long have no other order."""
    position = Disentangled(most, max_distance=reach, buckets=buckets)
    distances = torch.arange(1 - most, most)
    rows = row_of(position, distances)
    assert rows.tolist() == [row(position, int(distance)) for distance in distances]
    assert len(rows.unique()) == len(distances)
    ends = row_of(position, torch.tensor([-99, -buckets, buckets, 99])).tolist()
    assert ends == [0, 0, 2 * buckets - 1, 2 * buckets - 1]


@given(n=st.integers(1, 9), lead=st.integers(1, 3))
def test_diagonals_are_read_where_they_lie(n, lead):
    x = torch.randn(lead, n, 2 * n - 1)
    wanted = [[[x[at, i, n - 1 - i + j] for j in range(n)] for i in range(n)] for at in range(lead)]
    assert torch.equal(along_diagonals(x), torch.tensor(wanted))


def formula(
    qkv: Tensor,
    keys: Tensor | None,
    queries: Tensor | None,
    lengths: list[int],
    position: Disentangled,
    pattern: Pattern,
) -> Tensor:
    """Score by score, in 64 bits; keys and queries by row of the whole table."""
    count, parts = 1 + (keys is not None) + (queries is not None), []
    for part in qkv.split(lengths):
        n = len(part)
        q, k, v = part.unbind(1)
        rows = torch.tensor([[row(position, i - j) for j in range(n)] for i in range(n)])
        scores = torch.einsum("ihd,jhd->hij", q, k)
        if keys is not None:
            scores = scores + torch.einsum("ihd,ijhd->hij", q, keys[rows])
        if queries is not None:
            scores = scores + torch.einsum("jhd,ijhd->hij", k, queries[rows])
        distance = torch.arange(n)[:, None] - torch.arange(n)
        hidden = {
            Full: distance < -n,
            Causal: distance < 0,
            Window: distance.abs() > getattr(pattern, "radius", 0),
        }
        scores = (scores / math.sqrt(SIZE * count)).masked_fill(hidden[type(pattern)], -torch.inf)
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v))
    return torch.cat(parts)


@pytest.mark.parametrize("kernel", ["fused", "products", "in_place"])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    cut=st.sampled_from([LOOSE, EQUAL, RectanglePolicy(small=0)]),
    numbers=NUMBERS,
    held=st.sampled_from([(True, True), (True, False), (False, True)]),
    pattern=st.sampled_from([Full(), Causal(), Window(2)]),
)
def test_output_and_gradient_equal_the_formula(kernel, lengths, seed, cut, numbers, held, pattern):
    torch.manual_seed(seed)
    position = drawn(numbers)
    exact = [torch.randn(sum(lengths), 3, HEADS, SIZE).double().requires_grad_()]
    exact += [
        torch.randn(2 * position.span, HEADS, SIZE).double().requires_grad_() for _ in range(2)
    ]
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disentangled, "padded_kernel", lambda _: kernel)
        packed = Layout.of(lengths, cut)
        distances = distances_of(position, packed)
        terms = [
            tensor[distances.start : distances.stop] if there else None
            for tensor, there in zip(single[1:], held, strict=True)
        ]
        found = attend_relative(
            single[0], PositionTerms(*terms), AttentionView(packed, pattern, distances=distances)
        )
    keys, queries = (
        tensor if there else None for tensor, there in zip(exact[1:], held, strict=True)
    )
    wanted = formula(exact[0], keys, queries, lengths, position, pattern)
    assert_same_with_gradients(found, wanted, single, exact, near=5e-6)


def test_dropout_acts_on_probabilities():
    """With p the probabilities and r the rate, the mean is p·v and the variance Σ p²v² · r / (1 − r)."""
    torch.manual_seed(0)
    n, copies, rate = 6, 20_000, 0.25
    qkv, table = torch.randn(n, 3, HEADS, SIZE), torch.randn(2, 16, HEADS, SIZE)
    one, many = (
        AttentionView(layout, distances=distances_of(Disentangled(8), layout))
        for layout in (Layout.of([n]), Layout.of([n] * copies))
    )
    terms = PositionTerms(*table[:, one.distances.start : one.distances.stop])
    found = attend_relative(qkv.repeat(copies, 1, 1, 1), terms, many, rate).double()
    found, v = found.view(copies, -1), qkv[:, 2].double()
    (p,) = attention_probabilities(qkv, one, terms)
    mean, variance = (
        torch.einsum("hij,jhd->ihd", p.double() ** power, v**power).flatten() for power in (1, 2)
    )
    assert float(((found.mean(0) - mean) / (found.std(0) / copies**0.5)).abs().max()) < 5
    torch.testing.assert_close(found.var(0), variance * rate / (1 - rate), rtol=0.1, atol=0)


def shape(seed: int) -> EncoderConfig:
    rng = np.random.default_rng(seed)
    heads, buckets = int(rng.integers(1, 4)), int(rng.integers(2, 9))
    position = Disentangled(
        12,
        (("c2p",), ("p2c",), ("c2p", "p2c"))[int(rng.integers(3))],
        max_distance=(None, 6)[int(rng.integers(2))],
        buckets=(None, buckets)[int(rng.integers(2))],
        shared=bool(rng.integers(2)),
        norm=bool(rng.integers(2)),
        absolute=("none", "input", "decoder")[int(rng.integers(3))],
        convolution=(None, Convolution(3, heads, "gelu"))[int(rng.integers(2))],
    )
    return EncoderConfig(
        31, heads * 4, int(rng.integers(1, 4)), heads, 11,
        segments=int(rng.integers(3)),
        position=position,
        order=PostNorm(projected=bool(rng.integers(2))),
        bias=Bias(*(bool(flag) for flag in rng.integers(2, size=5)), key=bool(rng.integers(2))),
        embedding=(None, 6)[int(rng.integers(2))],
        readout=replace(
            EncoderConfig(3).readout,
            labels=Own("gelu"),
            replaced=("token", "with_first")[int(rng.integers(2))],
        ),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_operations_with_a_decoder_are_those_that_torch_counts(seed):
    config = shape(seed)
    assert isinstance(config.position, Disentangled)
    config = replace(config, position=replace(config.position, absolute="decoder"))
    model, length, copies = Model(config, (MaskedHead(),)).eval(), 9, 3
    batch, asked = batch_for(config, [length] * copies), torch.arange(1, 25, 3)
    with FlopCounterMode(display=False) as counter:
        x = model.masked_vectors(batch, model.encoder(batch, only=asked), asked)
        model.heads["masked"](x, model.encoder.embedding.token.weight)
    tokens = length * copies
    share = len(asked) / tokens
    expected = forward_flops(config, (MaskedHead(),), length, predicted=share) * tokens
    expected += batch_flops(config, (MaskedHead(),), length)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_what_one_sequence_gives_does_not_depend_on_the_others(seed):
    """With a decoder and a convolution too, and every parameter moved, in rectangles that are padded."""
    torch.manual_seed(seed)
    config, lengths = shape(seed), [7, 8, 1, 5]
    model = Model(config, (MaskedHead(), ReplacedHead())).eval()
    perturb(model, 0.2)
    ids = torch.randint(config.vocab, (sum(lengths),))

    def run(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        batch = Batch(ids, torch.zeros_like(ids), Layout.of(lengths))
        hidden = model.encoder(batch)
        replaced = model.heads["replaced"](hidden.last, batch.layout)
        return model.masked_vectors(batch, hidden), replaced

    with torch.no_grad():
        masked, replaced = run(ids, lengths)
        for at, part in enumerate(ids.split(lengths)):
            alone = run(part, [len(part)])
            torch.testing.assert_close(alone[0], masked.split(lengths)[at], rtol=0, atol=1e-5)
            torch.testing.assert_close(alone[1], replaced.split(lengths)[at], rtol=0, atol=1e-5)


def test_keys_without_a_bias_are_keys_with_a_bias_of_zero():
    torch.manual_seed(1)
    config = EncoderConfig(
        30, 8, 2, 2, 9, position=Disentangled(12, absolute="decoder"), bias=Bias(key=False)
    )
    without = Model(config, (MaskedHead(),)).eval()
    plain = Model(replace(config, bias=Bias()), (MaskedHead(),)).eval()
    perturb(without, 0.2)
    state = without.state_dict()
    for layer in range(2):
        stem = f"encoder.blocks.{layer}.attention"
        query, value = state.pop(f"{stem}.bias").chunk(2)
        state[f"{stem}.qkv.bias"] = torch.cat([query, torch.zeros(8), value])
        state[f"{stem}.position_key.bias"] = torch.zeros(8)
    plain.load_state_dict(state)
    batch = batch_for(config, [5, 4])
    with torch.no_grad():
        found, wanted = (
            model.masked_vectors(batch, model.encoder(batch)) for model in (without, plain)
        )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_it_runs_in_bfloat16_and_before_other_norms():
    config = EncoderConfig(
        30, 8, 2, 2, 9, position=Disentangled(12, buckets=4, shared=True), order=PreNorm()
    )
    encoder = Encoder(config).eval()
    batch = batch_for(config, [5, 4])
    exact = encoder(batch)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(encoder(batch).last, exact.last, rtol=0, atol=0.1)
    assert exact.before is not None
    assert encoder.decode(batch, exact.before, exact.before).shape == exact.last.shape


@pytest.mark.parametrize("buckets", [16, 1021])
def test_buckets_that_would_not_widen_are_refused(buckets):
    message = rf"twice the distance 9 less 1 or at least 1022, .* 512 positions, not {buckets}"
    with pytest.raises(ConfigError, match=message) as raised:
        Disentangled(max_distance=9, buckets=buckets)
    assert raised.value.where == "encoder.position.buckets"


def test_a_configuration_comes_back_from_plain_values():
    for seed in range(20):
        assert read(EncoderConfig, to_dict(shape(seed))) == shape(seed)


def test_the_heads_that_need_no_decoder_have_no_table_of_its_own():
    config = EncoderConfig(9, 8, 1, 2, 9, position=Disentangled(12, absolute="decoder"))
    heads: tuple[Head, ...] = (LabelHead(2),)
    assert not any("position.weight" in name for name in Model(config, heads).state_dict())
