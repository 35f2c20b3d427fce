"""What must hold of every layout, and typed access to the targets of a batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from bothways.core.batch import (
    EQUAL,
    LOOSE,
    LabelTargets,
    Layout,
    RectanglePolicy,
    TokenTargets,
    cut_to_predict,
    pack,
)
from bothways.core.source import Sequence

LENGTHS = st.lists(st.one_of(st.integers(1, 30), st.integers(200, 400)), min_size=1, max_size=12)


@given(LENGTHS)
def test_offsets_positions_and_owners_agree(lengths):
    layout = Layout.of(lengths)
    assert (layout.sequences, layout.tokens, layout.max_seqlen) == (
        len(lengths),
        sum(lengths),
        max(lengths),
    )
    assert layout.lengths == lengths
    assert layout.cu_seqlens.tolist() == [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    tokens = [
        (owner, position) for owner, length in enumerate(lengths) for position in range(length)
    ]
    assert list(zip(layout.sequence_ids.tolist(), layout.positions.tolist(), strict=True)) == tokens


@given(LENGTHS, st.sampled_from([LOOSE, EQUAL, RectanglePolicy(small=0)]))
def test_rectangles_cover_all_tokens_once_and_are_tight(lengths, cut):
    layout = Layout.of(lengths, cut)
    at, rows = 0, 0
    for rectangle in layout.rectangles:
        held = lengths[rows : rows + rectangle.rows]
        assert rectangle.start == at
        assert rectangle.longest == max(held)
        assert min(held) >= cut.tightness * max(held) or len(held) * max(held) <= cut.small
        assert (rectangle.slots is None) == (rectangle.keep is None) == (len(set(held)) == 1)
        at, rows = rectangle.stop, rows + rectangle.rows
        assert at == sum(lengths[:rows])
    assert rows == len(lengths)
    # A rectangle ends only where the next sequence would loosen it.
    for one, other in zip(layout.rectangles, layout.rectangles[1:], strict=False):
        ends = [layout.sequence_ids[one.start], layout.sequence_ids[one.stop - 1]]
        both = [*lengths[ends[0] : ends[1] + 1], lengths[layout.sequence_ids[other.start]]]
        assert min(both) < cut.tightness * max(both)


@given(LENGTHS, st.integers(0, 9))
def test_padding_and_unpadding_gives_the_tokens_back(lengths, seed):
    layout = Layout.of(lengths)
    x = torch.randn(layout.tokens, 3, generator=torch.Generator().manual_seed(seed))
    back = []
    for rectangle in layout.rectangles:
        padded = rectangle.pad(x)
        assert padded.shape == (rectangle.rows, rectangle.longest, 3)
        if rectangle.keep is not None:
            assert int(rectangle.keep.sum()) == rectangle.stop - rectangle.start
            assert torch.equal(padded[rectangle.keep], x[rectangle.start : rectangle.stop])
            assert not padded[~rectangle.keep].any()
        back.append(rectangle.unpad(padded))
    assert torch.equal(torch.cat(back), x)


@given(LENGTHS)
def test_a_layout_moves_whole(lengths):
    layout = Layout.of(lengths)
    moved = layout.apply(Tensor.clone)
    assert moved.lengths == lengths
    assert moved.max_seqlen == layout.max_seqlen
    assert torch.equal(moved.sequence_ids, layout.sequence_ids)
    assert torch.equal(moved.positions, layout.positions)


def test_moving_a_layout_makes_no_rectangles():
    """A GPU that reads packed sequences has no use for them."""
    layout = Layout.of([7, 3])
    moved = layout.to(torch.device("meta"))
    assert "rectangles" not in vars(layout)
    assert "rectangles" not in vars(moved)
    (rectangle,) = moved.rectangles  # waits for no value of the device
    assert rectangle.slots.is_meta


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32)}, "vector of int64"),
        ({"cu_seqlens": torch.tensor([1, 2, 5])}, "rise from 0 to the number of tokens, 5"),
        ({"cu_seqlens": torch.tensor([0, 2, 9])}, "rise from 0 to the number of tokens, 5"),
        ({"cu_seqlens": torch.tensor([0, 6, 5])}, "rise from 0 to the number of tokens, 5"),
        ({"max_seqlen": 2}, "max_seqlen must be 3"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(wrong, message):
    """A kernel that trusted it would read and write outside of its memory."""
    layout = Layout.of([2, 3])
    names = ("cu_seqlens", "positions", "sequence_ids", "max_seqlen")
    fields = {name: getattr(layout, name) for name in names}
    with pytest.raises(ValueError, match=message):
        Layout(**{**fields, **wrong})


def test_predictions_on_a_cpu_pad_nothing():
    layout = Layout.of([3, 3, 4, 2, 2], cut_to_predict(torch.device("cpu")))
    assert [(part.rows, part.longest) for part in layout.rectangles] == [(2, 3), (1, 4), (2, 2)]
    assert cut_to_predict(torch.device("cuda")) == LOOSE


def test_targets_are_read_by_name_and_type():
    target = TokenTargets(np.array([1]), np.array([7]))
    sequence = Sequence(np.arange(3, dtype=np.int32), np.zeros(3, np.int8), {"masked": target})
    assert sequence.target("masked", TokenTargets) is target
    batch = pack([sequence])
    assert batch.target("masked", TokenTargets).ids.tolist() == [7]
    with pytest.raises(TypeError, match="'masked' are TokenTargets, not LabelTargets"):
        batch.target("masked", LabelTargets)
    with pytest.raises(KeyError):
        batch.target("pair", LabelTargets)
