"""Attention read block by block, in windows and in blocks, against the formula over all pairs of tokens, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from bothways.attention import block_sparse as reach
from bothways.attention import dispatch as kernels
from bothways.attention.bigbird_random import Draw, drawn_blocks
from bothways.attention.dispatch import Kernel, attend, in_blocks
from bothways.attention.mask import AttentionView, attention_views
from bothways.attention.patterns import Blocks, Full, Pattern, Window
from bothways.core.errors import ConfigError
from bothways.core.layout import Layout
from bothways.model.config import EncoderConfig

HEADS, SIZE = 2, 4
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
CPU = torch.device("cpu")


def counts(pattern: Pattern, length: int, chosen: Tensor, draw: Draw | None) -> Tensor:
    """How often each query reads each key `(heads, length, length)`, from the words of the papers."""
    place = torch.arange(length)
    match pattern:
        case Window(radius):
            near = ((place[:, None] - place).abs() <= radius) | chosen | chosen[:, None]
            return near.double().expand(HEADS, -1, -1)
        case Blocks(size) if length > pattern.dense:
            block, last = place // size, (length - 1) // size
            ends = (block == 0) | (block == last)
            read = (
                (((block[:, None] - block).abs() <= 1) | ends | ends[:, None])
                .double()
                .repeat(HEADS, 1, 1)
            )
            drawn = drawn_blocks(draw, length, pattern).expand(HEADS, -1, -1)
            for head in range(HEADS):
                for number in range(1, last):
                    for other in drawn[head, number].tolist():
                        read[head][(block == number)[:, None] & (block == other)] += 1
            return read
        case _:
            return torch.ones(HEADS, length, length, dtype=torch.float64)


def softmax(q: Tensor, k: Tensor, v: Tensor, read: Tensor) -> Tensor:
    """`(length, heads, d)` each, and how often each key is read."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    shares = read * torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdim=True), v)


def formula(
    qkv: Tensor,
    wide: Tensor,
    lengths: list[int],
    pattern: Pattern,
    named: Tensor,
    draw: Draw | None,
) -> Tensor:
    parts = []
    for part, far, chosen in zip(
        qkv.split(lengths), wide.split(lengths), named.split(lengths), strict=True
    ):
        found = softmax(*part.unbind(1), counts(pattern, len(part), chosen, draw))
        if isinstance(pattern, Window):
            all_seen = softmax(
                *far.unbind(1), torch.ones(HEADS, len(part), len(part), dtype=torch.float64)
            )
            found = torch.where(chosen[:, None, None], all_seen, found)
        parts.append(found)
    return torch.cat(parts)


@pytest.mark.parametrize("kernel", ["fused", "written_out"])
@settings(max_examples=25, deadline=None)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    pattern=st.one_of(
        st.builds(Window, st.integers(0, 12), st.booleans()),
        st.builds(Blocks, st.integers(1, 3), st.integers(1, 2)),
    ),
    share=st.sampled_from([0.0, 0.1, 0.9]),
    smallest=st.sampled_from([1, 4, 16]),
    layer=st.sampled_from([None, 0, 3]),
)
def test_output_and_gradients_equal_the_formula(
    kernel: Kernel,
    lengths: list[int],
    seed: int,
    pattern: Pattern,
    share: float,
    smallest: int,
    layer: int | None,
) -> None:
    torch.manual_seed(seed)
    tokens = sum(lengths)
    named = (torch.rand(tokens) < share) & torch.tensor(
        isinstance(pattern, Window) and pattern.global_attention
    )
    draw = Draw(layer, HEADS, 64) if isinstance(pattern, Blocks) and layer is not None else None
    both = [torch.randn(tokens, 3, HEADS, SIZE, dtype=torch.float64) * 2 for _ in range(2)]
    weights = torch.randn(tokens, HEADS, SIZE, dtype=torch.float64)
    mine, reference = (
        [x.float().requires_grad_() for x in both],
        [x.clone().requires_grad_() for x in both],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "choose", lambda *_: kernel)
        patch.setattr(kernels, "LONGEST_MASKED", {"cpu": -99})
        patch.setattr(reach, "SMALLEST", smallest)
        view = AttentionView.of(Layout.of(lengths), pattern, global_attention_mask=named, draw=draw)
        found = attend(mine[0], view, 0.0, mine[1])
    wanted = formula(*reference, lengths, pattern, named, draw)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-6)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for own, other in zip(mine, reference, strict=True):
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (own, other)]
        torch.testing.assert_close(
            gradients[0].double(), gradients[1].double(), rtol=1e-5, atol=2e-5
        )


def test_whole_and_in_blocks_a_window_is_the_same() -> None:
    torch.manual_seed(0)
    lengths = [90, 100, 33]
    qkv, wide = torch.randn(223, 3, HEADS, SIZE), torch.randn(223, 3, HEADS, SIZE)
    view = AttentionView.of(
        Layout.of(lengths),
        Window(5, global_attention=True),
        global_attention_mask=torch.rand(223) < 0.05,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LONGEST_MASKED", {"cpu": 10**9})
        whole = attend(qkv, view, 0.0, wide)
        patch.setattr(kernels, "LONGEST_MASKED", {"cpu": 0})
        assert in_blocks(CPU, view.parts[0].pattern, 33)
        torch.testing.assert_close(attend(qkv, view, 0.0, wide), whole, rtol=0, atol=2e-6)


def test_dropout_acts_on_what_blocks_read_in_windows() -> None:
    torch.manual_seed(0)
    copies, length, rate = 1500, 70, 0.3
    one = torch.randn(length, 3, HEADS, SIZE)
    named = torch.arange(length) == 0
    view = AttentionView.of(
        Layout.of([length] * copies),
        Window(3, global_attention=True),
        global_attention_mask=named.repeat(copies),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LONGEST_MASKED", {"cpu": 0})
        draws = (
            attend(one.repeat(copies, 1, 1, 1), view, rate)
            .double()
            .view(copies, length, HEADS, SIZE)
        )
    expected = formula(one.double(), one.double(), [length], Window(3), named, None)
    z = (draws.mean(0) - expected) / (draws.var(0) / copies).sqrt()
    assert float(z.abs().max()) < 5.5
    assert float(draws.std(0).min()) > 0


@pytest.mark.parametrize(
    ("size", "random", "heads", "most", "tokens"),
    [
        (4, 1, 2, 200, 60), (4, 3, 2, 4096, 100), (64, 3, 3, 4096, 1024), (64, 3, 2, 4096, 3072), (64, 3, 2, 4096, 4096),
        (64, 3, 2, 4096, 1000), (16, 2, 2, 2048, 1024), (64, 2, 1, 1024, 1024), (32, 3, 2, 4096, 2000), (128, 1, 2, 4096, 1024),
    ],
)  # fmt: skip
def test_blocks_are_drawn_as_transformers_draws(
    size: int, random: int, heads: int, most: int, tokens: int
) -> None:
    config = BigBirdConfig(
        vocab_size=80,
        hidden_size=heads,
        num_attention_heads=heads,
        max_position_embeddings=most,
        block_size=size,
    )
    theirs, length = BigBirdBlockSparseAttention(config), -(-tokens // size) * size
    for seed in (0, 5):
        np.random.seed(seed)  # noqa: NPY002
        if length in (1024, 3072, 4096):
            rows = [
                theirs._bigbird_block_rand_mask(most, most, size, size, random, last_idx=1024)
                for _ in range(heads)
            ]
            rows = [row[: length // size - 2] for row in rows]
        else:
            plan = theirs._get_rand_attn_plan(length, size, random)
            rows = theirs._bigbird_block_rand_mask_with_head(
                length, length, size, size, heads, *plan
            )
        found = drawn_blocks(Draw(seed, heads, most), tokens, Blocks(size, random))
        assert np.array_equal(found[:, 1:-1], np.stack(rows))
        assert not found[:, [0, -1]].any()


def test_a_length_with_too_few_blocks_to_draw_from_repeats_them() -> None:
    """transformers has no answer there."""
    drawn = drawn_blocks(Draw(0, 1, 4096), 3072, Blocks(256, 3))
    assert drawn.shape == (1, 12, 3)
    assert int(drawn.max()) < 12


@pytest.mark.parametrize(
    ("device", "pattern", "longest", "blocked"),
    [
        ("cpu", Window(64), 128 + 256, False),
        ("cpu", Window(64), 128 + 257, True),
        ("cpu", Window(0), 256, False),
        ("cuda", Window(256), 512 + 1024, False),
        ("mps", Window(256), 512 + 1025, True),
        ("cpu", Blocks(64, 3), 704, False),
        ("cuda", Blocks(64, 3), 705, True),
        ("cpu", Full(), 10**6, False),
    ],
)
def test_the_table_of_what_is_read_in_blocks(
    device: str, pattern: Pattern, longest: int, blocked: bool
) -> None:
    assert in_blocks(torch.device(device), pattern, longest) == blocked


def test_layers_that_draw_have_views_of_their_own_and_others_share_one() -> None:
    layout = Layout.of([60, 9])
    blocks = EncoderConfig(50, 8, 3, 2, 8, patterns=(Blocks(2, 1),))
    for training, different in ((True, 3), (False, 1)):
        assert (
            len({id(view) for view in attention_views(blocks, layout, training=training)})
            == different
        )
    windows = EncoderConfig(50, 8, 3, 2, 8, patterns=(Window(2),))
    assert len({id(view) for view in attention_views(windows, layout, training=True)}) == 1


@pytest.mark.parametrize("wrong", [{"size": 0}, {"random": 0}])
def test_blocks_that_are_none(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        Blocks(**wrong)


def test_rectangles_fall_apart_where_a_sequence_is_long() -> None:
    layout = Layout.of([9, 9, 8, 3, 2, 3])
    assert [(part.rows, part.longest) for part in layout.even(100)] == [(6, 9)]
    assert [(part.rows, part.longest) for part in layout.even(8)] == [
        (2, 9),
        (1, 8),
        (1, 3),
        (1, 2),
        (1, 3),
    ]
    assert all(part.keep is None for part in layout.even(8))
