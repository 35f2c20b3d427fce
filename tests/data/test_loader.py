"""Steps: the same sequences and masks for any ranks, microbatches and place to start from; and what runs ahead."""

import dataclasses
import functools
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from bothways.core.batch import IGNORED
from bothways.core.errors import ConfigError, DataError
from bothways.core.runtime.process import END_SIGNALS
from bothways.core.source import Cursor, Sequence
from bothways.data.corpus_source import CorpusSource
from bothways.data.loader import (
    ExampleBudget,
    ListSource,
    Loader,
    TokenBudget,
    TokenRamp,
    ahead,
    budget_at,
    by_workers,
    deal,
    prefetch,
    unchanged,
)
from bothways.data.masking import Masking, Vocabulary, mask_tokens
from bothways.data.segments import FullSentences, NextSentence
from spread import in_turn
from toy_corpora import corpus_of
from toy_template import TEMPLATE

SIZE = 400
SPECIAL = np.isin(np.arange(SIZE), [0, 2, 3, 4])
VOCABULARY = Vocabulary(SPECIAL, np.zeros(SIZE, dtype=bool), 4)


def masked(sequence, rng):
    return mask_tokens(sequence, Masking(0.3), VOCABULARY, rng)


def corpus_source(segments, data_copies=None, documents=12):
    r = random.Random(3)
    sizes = [[r.randint(1, 12) for _ in range(r.randint(1, 9))] for _ in range(documents)]
    corpus = corpus_of(sizes)
    corpus.tokens = np.random.default_rng(4).integers(5, SIZE, len(corpus.tokens)).astype(np.uint16)
    return CorpusSource(corpus, TEMPLATE, segments, np.arange(documents), 5, data_copies)


def list_source(lengths, order):
    ids = [np.full(n, 5 + i, dtype=np.int32) for i, n in enumerate(lengths)]
    return ListSource([Sequence(row, np.zeros(len(row), dtype=np.int8)) for row in ids], order)


def loader_of(source, batch, *, budget=60, rank=0, world=1, seed=9):
    return Loader(source, masked, batch, budget, seed, rank, world)


def sequences_of(batch):
    """A packed batch → its sequences as tuples of all they hold, targets at their own positions."""
    bounds = batch.layout.cu_seqlens.tolist()
    index, hidden = batch.targets["masked"].index.tolist(), batch.targets["masked"].ids.tolist()
    assert index == sorted(index)
    pairs = batch.targets.get("pair")
    labels = [None] * (len(bounds) - 1) if pairs is None else pairs.labels.tolist()
    masks = list(zip(index, hidden, strict=True))
    for (start, stop), label in zip(itertools.pairwise(bounds), labels, strict=True):
        mine = tuple((at - start, old) for at, old in masks if start <= at < stop)
        ids, segments = (tuple(row[start:stop].tolist()) for row in (batch.ids, batch.segments))
        yield ids, segments, mine, label


def is_void(sequence):
    return sequence[2] == () and sequence[3] in (None, IGNORED)


def contents(steps_by_rank):
    """What all ranks together read in one step: real sequences, sorted."""
    batches = [batch for step in steps_by_rank for batch in step.microbatches]
    return sorted(s for batch in batches for s in sequences_of(batch) if not is_void(s))


def steps_of(loader, count, cursor=Cursor()):  # noqa: B008
    return list(itertools.islice(loader.steps(cursor), count))


@pytest.mark.parametrize(
    ("segments", "batch"),
    in_turn([(NextSentence(24),), (FullSentences(24),)], [ExampleBudget(7), TokenBudget(130)]),
)
def test_ranks_and_microbatches_leave_sequences_and_masks_as_they_are(segments, batch):
    source = corpus_source(segments)
    whole = steps_of(loader_of(source, batch), 25)
    assert whole[-1].cursor.epoch >= 2
    alone = [contents([step]) for step in whole]
    for step, read in zip(whole, alone, strict=True):
        assert len(read) == step.sequences
        assert sum(len(ids) for ids, *_ in read) == step.tokens
    for world, budget in ((1, 1), (1, 10_000), (2, 60), (3, 40), (9, 30)):
        ranks = [
            steps_of(loader_of(source, batch, budget=budget, rank=rank, world=world), 25)
            for rank in range(world)
        ]
        for expected, before, *step in zip(whole, alone, *ranks, strict=True):
            assert contents(step) == before
            assert {(s.cursor, s.tokens, s.sequences, s.epochs) for s in step} == {
                (expected.cursor, expected.tokens, expected.sequences, expected.epochs)
            }
            assert len({len(s.microbatches) for s in step}) == 1
            for microbatch in itertools.chain(*(s.microbatches for s in step)):
                assert microbatch.layout.tokens <= budget or microbatch.layout.sequences == 1


def test_a_rank_without_a_sequence_has_the_shortest_one_without_weight():
    source, batch = corpus_source(NextSentence(24)), ExampleBudget(2)
    ranks = [steps_of(loader_of(source, batch, world=4, rank=rank), 15) for rank in range(4)]
    for step in zip(*ranks, strict=True):
        (longer,), (shorter,), *empty = (list(sequences_of(s.microbatches[0])) for s in step)
        assert not is_void(longer)
        assert not is_void(shorter)
        for (void,) in empty:
            assert is_void(void)
            assert void[0] in (longer[0], shorter[0])
            assert len(void[0]) == len(shorter[0])


def test_only_the_share_of_a_rank_is_built():
    built = []

    class Counting(ListSource):
        def build(self, plan):
            built.append(plan.row)
            return super().build(plan)

    sequences = list_source([4, 9, 6, 3, 8, 7, 5], None).sequences
    loader = loader_of(Counting(sequences, None), ExampleBudget(7), world=3, rank=1)
    assert len(steps_of(loader, 1)) == 1
    # By length: 1, 4, 5, 2, 6, 0, 3; the second of three takes the places 1 and 4.
    assert built == [4, 6]


@pytest.mark.parametrize("batch", [ExampleBudget(5), TokenBudget(50)])
def test_a_step_ends_with_its_epoch_and_is_full_otherwise(batch):
    lengths = [3, 20, 7, 7, 11, 30, 3, 5, 60, 4, 8, 9]
    source = list_source(lengths, 1)
    steps = steps_of(loader_of(source, batch), 30)
    epoch, seen = 0, 0
    for step, following in itertools.pairwise(steps):
        seen += step.sequences
        assert step.epochs == pytest.approx(epoch + seen / len(lengths))
        if step.cursor.epoch > epoch:
            assert step.cursor == Cursor(epoch + 1)
            assert seen == len(lengths)
            epoch, seen = epoch + 1, 0
            continue
        if isinstance(batch, ExampleBudget):
            assert step.sequences == 5
        else:
            assert step.tokens <= 50 or step.sequences == 1
            plan, _ = next(source.read(step.cursor))
            assert step.tokens + plan.length > 50
        assert following.sequences > 0
    assert epoch >= 2


@functools.cache
def uninterrupted(batch, world):
    return steps_of(
        loader_of(corpus_source(NextSentence(24)), batch, rank=world - 1, world=world), 60
    )


@pytest.mark.parametrize(
    ("batch", "world"), in_turn([(ExampleBudget(4),), (TokenBudget(70),)], [1, 2])
)
@given(start=st.integers(0, 54))
def test_a_resumed_run_reads_the_same_steps(batch, world, start):
    steps = uninterrupted(batch, world)
    cursor = steps[start - 1].cursor if start else Cursor()
    again = steps_of(
        loader_of(corpus_source(NextSentence(24)), batch, rank=world - 1, world=world), 6, cursor
    )
    for expected, step in zip(steps[start : start + 6], again, strict=True):
        before, after = (
            (s.cursor, s.tokens, s.epochs, [[*sequences_of(batch)] for batch in s.microbatches])
            for s in (expected, step)
        )
        assert before == after


def test_static_masks_repeat_with_the_views_and_dynamic_ones_never():
    static = loader_of(corpus_source(FullSentences(24), data_copies=2), ExampleBudget(500))
    steps = steps_of(static, 5)
    assert all(step.cursor == Cursor(epoch + 1) for epoch, step in enumerate(steps))
    epochs = [contents([step]) for step in steps]
    assert epochs[0] == epochs[2] == epochs[4]
    assert epochs[1] == epochs[3] != epochs[0]
    source = list_source([9] * 6, None)
    dynamic = [contents([s]) for s in steps_of(loader_of(source, ExampleBudget(500)), 5)]
    assert len({tuple(epoch) for epoch in dynamic}) == 5
    other_seed = steps_of(loader_of(source, ExampleBudget(500), seed=10), 1)
    assert contents(other_seed) != dynamic[0]


def test_each_place_has_its_own_draws():
    """The same text everywhere: masks differ between items, blocks and epochs."""

    class Blocks(ListSource):
        def read(self, cursor):
            places = [Cursor(e, b, i) for e in range(2) for b in range(2) for i in range(4)] + [
                Cursor(2)
            ]
            for place, after in itertools.pairwise(places):
                assert place >= cursor
                yield next(super().read(Cursor()))[0], after

        def epochs(self, cursor):
            return float(cursor.epoch)

    source = Blocks(list_source([60], None).sequences, None)
    steps = list(loader_of(source, ExampleBudget(1)).steps(Cursor()))
    assert len({step for step in (contents([s])[0] for s in steps)}) == len(steps) == 16


def test_an_epoch_for_evaluation_is_read_once_in_tight_batches():
    lengths = [random.Random(6).randint(3, 50) for _ in range(300)]
    steps = list(loader_of(list_source(lengths, None), ExampleBudget(100), budget=200).epoch())
    assert [step.sequences for step in steps] == [100, 100, 100]
    assert sorted(len(ids) for ids, *_ in contents(steps)) == sorted(lengths)
    for step in steps:
        longest_first = [n for batch in step.microbatches for n in batch.layout.lengths]
        assert longest_first == sorted(longest_first, reverse=True)


# --- lists


def test_a_list_is_read_in_order_or_shuffled_by_epoch():
    lengths = list(range(3, 40))
    ordered = itertools.islice(list_source(lengths, None).read(Cursor()), 80)
    assert [plan.row for plan, _ in ordered] == [*range(37), *range(37), *range(6)]
    source = list_source(lengths, 2)
    stream = list(itertools.islice(source.read(Cursor()), 3 * 37))
    epochs = [[plan.row for plan, _ in stream[at : at + 37]] for at in (0, 37, 74)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(37))]}) == 4
    for at in (0, 1, 36, 37, 50, 100):
        cursor = stream[at - 1][1] if at else Cursor()
        assert list(itertools.islice(list_source(lengths, 2).read(cursor), 111 - at)) == stream[at:]
        assert source.epochs(cursor) == pytest.approx(at / 37)
    assert next(list_source(lengths, 3).read(Cursor())) != stream[0]
    assert all(plan.length == len(source.build(plan)) == lengths[plan.row] for plan, _ in stream)


def test_lists_that_cannot_be_read_are_refused():
    with pytest.raises(DataError, match="no sequences"):
        ListSource([], None)
    for cursor in (Cursor(0, 0, 2), Cursor(0, 1, 0)):
        with pytest.raises(DataError, match="no data at"):
            next(list_source([3, 4], None).read(cursor))


# --- ahead in a thread


def prefetchers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetching_changes_nothing_and_leaves_no_thread():
    for depth in (1, 3, 50):
        assert list(prefetch(range(20), depth)) == list(range(20))
        assert list(prefetch([], depth)) == []
        assert not prefetchers()


def test_items_are_made_ahead_in_another_thread_but_not_too_many():
    made = []

    def items():
        for item in range(100):
            made.append((item, threading.current_thread()))
            yield item

    early = prefetch(items(), 3)
    assert next(early) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert [item for item, _ in made] == [0, 1, 2, 3]
    assert threading.current_thread() not in {thread for _, thread in made}
    early.close()
    assert not prefetchers()


def test_closing_early_does_not_wait_for_all_that_was_ordered():
    made = []

    def items():
        for item in range(100):
            time.sleep(0.01)
            made.append(item)
            yield item

    early = prefetch(items(), 50)
    assert next(early) == 0
    early.close()
    assert len(made) < 10
    assert not prefetchers()


def test_an_error_is_raised_in_its_place():
    def items():
        yield 1
        yield 2
        raise DataError("no text", where="corpus")

    early = prefetch(items(), 5)
    assert [next(early), next(early)] == [1, 2]
    with pytest.raises(DataError, match="no text"):
        next(early)
    assert list(early) == []
    assert not prefetchers()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_of_the_reader_ends_the_thread(error):
    items = prefetch(itertools.count(), 2)
    assert next(items) == 0
    assert prefetchers()
    with pytest.raises(error):
        items.throw(error)
    assert not prefetchers()


def test_an_interrupt_while_waiting_ends_the_thread():
    handled = threading.Event()

    def items():
        handled.wait(30)
        yield 0

    def handle(*_):
        handled.set()
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGINT, handle)
    try:
        threading.Timer(
            0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        ).start()
        with pytest.raises(KeyboardInterrupt):
            next(prefetch(items(), 2))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert not prefetchers()


@pytest.mark.parametrize("prepare", [masked, unchanged])
def test_ahead_of_a_gpu_every_tensor_of_a_step_is_pinned(prepare, monkeypatch):
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    loader = loader_of(corpus_source(NextSentence(24)), ExampleBudget(4))
    loader = dataclasses.replace(loader, prepare=prepare)
    usual = steps_of(loader, 3)
    early = ahead(loader, torch.device("cuda"), Cursor())
    for step, same in zip(usual, itertools.islice(early, 3), strict=True):
        assert (step.cursor, step.tokens) == (same.cursor, same.tokens)
        for batch, other in zip(step.microbatches, same.microbatches, strict=True):
            before, after = batch.tensors(), other.tensors()
            assert len(before) == len(after) >= (5 if prepare is unchanged else 8)
            assert {id(tensor) for tensor in after} <= {id(tensor) for tensor in pinned}
            assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
            assert other.layout.lengths == batch.layout.lengths
    early.close()
    assert not prefetchers()
    assert not multiprocessing.active_children()
    assert next(ahead(loader, torch.device("cpu"), Cursor())).cursor == usual[0].cursor


def test_a_ramp_of_budgets_is_straight_in_the_tokens_read():
    ramp = TokenRamp(10, 110, 1000)
    assert [budget_at(ramp, read) for read in (0, 1, 10, 500, 999, 1000, 10**9)] == [
        TokenBudget(n) for n in (10, 10, 11, 60, 109, 110, 110)
    ]
    assert budget_at(ExampleBudget(7), 10**9) == ExampleBudget(7)


@pytest.mark.parametrize("ramp", [TokenRamp(512, 8192, 8_000_000), TokenRamp(300, 300, 50_000)])
def test_steps_and_tokens_of_a_ramp_are_those_of_its_budgets(ramp):
    read, steps = 0, 0
    for target in (ramp.over // 10, ramp.over, 4 * ramp.over):
        while read < target:
            read += budget_at(ramp, read).n
            steps += 1
        assert ramp.steps(read) == pytest.approx(steps, rel=0.01)
        assert ramp.tokens(steps) == pytest.approx(read, rel=0.01)


def test_each_step_of_a_ramp_has_the_budget_of_the_tokens_before_it():
    start, end, over = 20, 200, 2_000
    loader = Loader(
        list_source([1] * 5_000, None), unchanged, TokenRamp(start, end, over), 10**6, 9
    )
    read, sizes, steps = 0, [], loader.steps(Cursor())
    while read < over + 4 * end:
        sizes.append(next(steps).tokens)
        assert sizes[-1] == start + (end - start) * min(read, over) // over
        read += sizes[-1]
    assert sizes[-4:] == [end] * 4


@pytest.mark.parametrize("segments", [NextSentence(24), FullSentences(24)])
def test_a_ramp_continues_from_any_cursor_and_count_on_any_ranks(segments):
    source, ramp = corpus_source(segments), TokenRamp(40, 300, 900)
    whole = steps_of(loader_of(source, ramp), 14)
    assert whole[-1].tokens > 2 * whole[0].tokens
    for done in (1, 4, 9):
        read = sum(step.tokens for step in whole[:done])
        start = whole[done - 1].cursor
        ranks = [loader_of(source, ramp, rank=r, world=2).steps(start, read) for r in range(2)]
        for expected in whole[done : done + 3]:
            step = [next(steps) for steps in ranks]
            assert contents(step) == contents([expected])
            assert step[0].cursor == expected.cursor


@pytest.mark.parametrize(("make", "where"), [
    (lambda: TokenRamp(0, 5, 5), "batch.start"),
    (lambda: TokenRamp(1, 5, 0), "batch.over"),
    (lambda: TokenRamp(512, 256, 1000), "batch.n"),
    (lambda: ExampleBudget(0), "batch.n"),
    (lambda: TokenBudget(0), "batch.n"),
])  # fmt: skip
def test_a_size_out_of_range_is_refused(make, where):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.where == where


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(lengths=LENGTHS, world=st.integers(1, 5), budget=st.integers(1, 120))
def test_every_sequence_is_dealt_once_and_fills_the_budget(lengths, world, budget):
    ranks = deal(lengths, world, budget)
    assert len(ranks) == world
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(len(lengths)))
    assert len({len(microbatches) for microbatches in ranks}) == 1
    assert all(any(microbatches[0] for microbatches in ranks) for _ in ranks)
    totals = []
    for microbatches in ranks:
        sizes = [sum(lengths[place] for place in places) for places in microbatches]
        totals.append(sum(sizes))
        # A microbatch is cut only where the next sequence does not fit.
        for places, size, following in zip(
            microbatches, sizes, [*microbatches[1:], []], strict=True
        ):
            assert len(places) <= 1 or size <= budget
            assert not following or size + lengths[following[0]] > budget
        mine = list(itertools.chain(*microbatches))
        # Longest first, and of equal ones the earlier first.
        assert mine == sorted(mine, key=lambda place: (-lengths[place], place))
    assert max(totals) - min(totals) <= max(lengths)


# --- ahead in processes


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_build_the_same_steps_in_their_order(workers):
    loader = loader_of(corpus_source(NextSentence(24)), TokenRamp(60, 200, over=3000), budget=90)
    start = next(loader.steps(Cursor())).cursor
    whole = [*itertools.islice(loader.steps(start, 50), 25)]
    drawn = torch.get_rng_state()
    steps = by_workers(loader, workers, start, 50)
    assert torch.equal(torch.get_rng_state(), drawn)  # a resumed run draws as one that goes on
    for wanted, found in zip(whole, itertools.islice(steps, 25), strict=True):
        assert (found.cursor, found.tokens) == (wanted.cursor, wanted.tokens)
        for one, other in zip(wanted.microbatches, found.microbatches, strict=True):
            assert all(map(torch.equal, one.tensors(), other.tensors()))
            assert one.layout.lengths == other.layout.lengths
    processes = multiprocessing.active_children()
    assert len(processes) == workers
    for process, number in itertools.product(processes, END_SIGNALS):
        os.kill(process.pid, number)  # the reader alone decides
    following = next(itertools.islice(loader.steps(start, 50), 25, None))
    assert next(steps).cursor == following.cursor
    processes[0].terminate()  # as Python ends them with the program: in a while, not never
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    del steps
    assert not multiprocessing.active_children()


def test_an_error_of_a_process_is_raised_here():
    def refuse(sequence, rng):
        raise DataError("no text", where="corpus")

    loader = dataclasses.replace(
        loader_of(corpus_source(FullSentences(24)), TokenBudget(90)), prepare=refuse
    )
    with pytest.raises(DataError, match="no text"):
        next(by_workers(loader, 2, Cursor()))
