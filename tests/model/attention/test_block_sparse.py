"""Attention read block by block, in windows and in blocks, against the formula over all pairs of tokens, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from attention_formulas import HEADS, SIZE, assert_same_with_gradients, sparse_formula
from bothways.core.batch import Layout
from bothways.core.runtime.tuning import TUNING
from bothways.model.attention import block_sparse, dispatch as kernels
from bothways.model.attention.bigbird_random import RandomBlocks, random_blocks
from bothways.model.attention.dispatch import attend
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Blocks, Window
from bothways.model.config import EncoderConfig
from bothways.model.model import attention_views

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@pytest.mark.parametrize("kernel", ["fused", "products"])
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    pattern=st.one_of(
        st.builds(Window, st.integers(0, 12), st.booleans()),
        st.builds(Blocks, st.integers(1, 3), st.integers(1, 2)),
    ),
    share=st.sampled_from([0.0, 0.1, 0.9]),
    smallest=st.sampled_from([1, 4, 16]),
    masked=st.sampled_from([-99, -99, 10**9]),
    layer=st.sampled_from([None, 0, 3]),
)
def test_output_and_gradients_equal_the_sparse_formula(
    kernel, lengths, seed, pattern, share, smallest, masked, layer
):
    """Block by block, and windows in whole rectangles with a mask."""
    torch.manual_seed(seed)
    tokens = sum(lengths)
    named = (torch.rand(tokens) < share) & torch.tensor(
        isinstance(pattern, Window) and pattern.global_attention
    )
    drawn = isinstance(pattern, Blocks) and layer is not None
    draw = RandomBlocks(layer, HEADS, 64) if drawn else None
    both = [torch.randn(tokens, 3, HEADS, SIZE, dtype=torch.float64) * 2 for _ in range(2)]
    mine = [x.float().requires_grad_() for x in both]
    reference = [x.clone().requires_grad_() for x in both]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "padded_kernel", lambda _: kernel)
        patch.setattr(kernels, "TUNING", replace(TUNING, masked_window_cpu=masked))
        patch.setattr(block_sparse, "TUNING", replace(TUNING, smallest_block=smallest))
        view = AttentionView(Layout.of(lengths), pattern, global_attention_mask=named, random=draw)
        found = attend(mine[0], view, 0.0, mine[1])
    wanted = sparse_formula(*reference, lengths, pattern, named, draw)
    assert_same_with_gradients(found, wanted, mine, reference, near=5e-6)


def test_dropout_acts_on_what_blocks_read_in_windows():
    torch.manual_seed(0)
    copies, length, rate = 1500, 70, 0.3
    one = torch.randn(length, 3, HEADS, SIZE)
    named = torch.arange(length) == 0
    view = AttentionView(
        Layout.of([length] * copies),
        Window(3, global_attention=True),
        global_attention_mask=named.repeat(copies),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TUNING", replace(TUNING, masked_window_cpu=0))
        draws = attend(one.repeat(copies, 1, 1, 1), view, rate).double()
    draws = draws.view(copies, length, HEADS, SIZE)
    expected = sparse_formula(one.double(), one.double(), [length], Window(3), named, None)
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
def test_blocks_are_drawn_as_transformers_draws(size, random, heads, most, tokens):
    config = BigBirdConfig(
        vocab_size=80, hidden_size=heads, num_attention_heads=heads, max_position_embeddings=most, block_size=size,
    )  # fmt: skip
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
        found = random_blocks(RandomBlocks(seed, heads, most), tokens, Blocks(size, random))
        assert np.array_equal(found[:, 1:-1], np.stack(rows))
        assert not found[:, [0, -1]].any()


def test_a_length_with_too_few_blocks_to_draw_from_repeats_them():
    """transformers has no answer there."""
    drawn = random_blocks(RandomBlocks(0, 1, 4096), 3072, Blocks(256, 3))
    assert drawn.shape == (1, 12, 3)
    assert int(drawn.max()) < 12


def test_layers_that_draw_have_views_of_their_own_and_others_share_one():
    layout = Layout.of([60, 9])
    blocks = EncoderConfig(50, 8, 3, 2, 8, patterns=(Blocks(2, 1),))
    for training, different in ((True, 3), (False, 1)):
        views = attention_views(blocks, layout, training=training)
        assert len({id(view) for view in views}) == different
    windows = EncoderConfig(50, 8, 3, 2, 8, patterns=(Window(2),))
    assert len({id(view) for view in attention_views(windows, layout, training=True)}) == 1


def test_rectangles_fall_apart_where_a_sequence_is_long():
    layout = Layout.of([9, 9, 8, 3, 2, 3])
    assert [(part.rows, part.longest) for part in layout.even(100)] == [(6, 9)]
    shapes = [(part.rows, part.longest) for part in layout.even(8)]
    assert shapes == [(2, 9), (1, 8), (1, 3), (1, 2), (1, 3)]
    assert all(part.keep is None for part in layout.even(8))
