"""Sharing the sequences of a step over ranks and microbatches, and the padding that this leaves."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bothways.core.errors import ConfigError
from bothways.data.loader import ExampleBudget, TokenBudget, deal, fits

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(lengths=LENGTHS, world=st.integers(1, 5), budget=st.integers(1, 120))
def test_every_sequence_is_dealt_once_within_the_budget(lengths, world, budget):
    ranks = deal(lengths, world, budget)
    assert len(ranks) == world
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(len(lengths)))
    assert len({len(microbatches) for microbatches in ranks}) == 1
    assert all(any(microbatches[0] for microbatches in ranks) for _ in ranks)
    for microbatches in ranks:
        for places in microbatches:
            assert len(places) <= 1 or sum(lengths[place] for place in places) <= budget
        mine = list(itertools.chain(*microbatches))
        # Longest first, and of equal ones the earlier first.
        assert mine == sorted(mine, key=lambda place: (-lengths[place], place))
    totals = [
        sum(lengths[place] for places in microbatches for place in places) for microbatches in ranks
    ]
    assert max(totals) - min(totals) <= max(lengths)


@given(lengths=LENGTHS, budget=st.integers(1, 120))
def test_microbatches_are_cut_only_where_the_next_sequence_does_not_fit(lengths, budget):
    (microbatches,) = deal(lengths, 1, budget)
    for before, after in itertools.pairwise(microbatches):
        assert sum(lengths[place] for place in before) + lengths[after[0]] > budget


def test_dealing_by_hand():
    assert deal([3, 9, 5, 5, 1], 2, 9) == [[[1], [3, 4]], [[2, 0], []]]
    assert deal([4], 3, 10) == [[[0]], [[]], [[]]]


@pytest.mark.parametrize(
    ("batch", "sequences", "tokens", "answer"),
    [
        (ExampleBudget(3), 3, 10**6, True),
        (ExampleBudget(3), 4, 4, False),
        (TokenBudget(100), 7, 100, True),
        (TokenBudget(100), 7, 101, False),
        (TokenBudget(100), 1, 500, True),
    ],
)
def test_what_fits_in_a_step(batch, sequences, tokens, answer):
    assert fits(batch, sequences, tokens) == answer


@pytest.mark.parametrize("kind", [ExampleBudget, TokenBudget])
def test_an_empty_step_is_refused(kind):
    with pytest.raises(ConfigError) as caught:
        kind(0)
    assert caught.value.where == "batch.n"
