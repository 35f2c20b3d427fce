"""Sequences planned from a corpus: Google's pairs as distributions, full sentences exactly, and places one can return to."""

import itertools
import random
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from bothways.core.errors import ConfigError, DataError
from bothways.core.source import Cursor, rng
from bothways.data import epoch_order as selection
from bothways.data.corpus_source import ContinuedSource, CorpusSource
from bothways.data.epoch_order import AllExcept, Selection
from bothways.data.segments import FullSentences, NextSentence, PairPlan, SentenceOrder
from bothways.text.template import Gap
from toy_corpora import corpus_of
from toy_template import TEMPLATE

# A p-value below this at a fixed seed is a difference, not bad luck.
SURE = 1e-3


def source_of(sizes, segments, *, seed=1, chosen=None, data_copies=None):
    corpus = corpus_of(sizes)
    chosen = np.arange(len(sizes)) if chosen is None else np.array(chosen)
    return CorpusSource(corpus, TEMPLATE, segments, chosen, seed, data_copies)


def epoch_of(source, number=0):
    """All plans of one epoch."""
    plans, after = [], Cursor(number)
    stream = source.read(after)
    while after.epoch == number:
        plan, after = next(stream)
        plans.append(plan)
    assert after == Cursor(number + 1)
    return plans


def some_sizes(seed, documents=150, most=12, longest=40):
    r = random.Random(seed)
    return [[r.randint(1, longest) for _ in range(r.randint(1, most))] for _ in range(documents)]


def plain_pairs(sizes, length, short, r):
    """Google's instance builder as plain loops over lists of tokens: (A, B, label), where token t stands at place t."""
    counter = itertools.count()
    documents = [[[next(counter) for _ in range(n)] for n in document] for document in sizes]
    made = []
    for number, document in enumerate(documents):
        room = length - 3
        goal = r.randint(2, room) if r.random() < short else room
        chunk, at = [], 0
        while at < len(document):
            chunk.append(document[at])
            if at == len(document) - 1 or sum(map(len, chunk)) >= goal:
                split = r.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
                a = list(itertools.chain(*chunk[:split]))
                if len(chunk) == 1 or r.random() < 0.5:
                    for _ in range(10):
                        other = r.randint(0, len(documents) - 1)
                        if other != number:
                            break
                    b = []
                    for sentence in documents[other][r.randint(0, len(documents[other]) - 1) :]:
                        b += sentence
                        if len(b) >= goal - len(a):
                            break
                    at -= len(chunk) - split
                    label = 1
                else:
                    b, label = list(itertools.chain(*chunk[split:])), 0
                while len(a) + len(b) > room:
                    longer = a if len(a) > len(b) else b
                    longer.pop(0 if r.random() < 0.5 else -1)
                made.append((a[0], a[-1] + 1, b[0], b[-1] + 1, label))
                chunk = []
            at += 1
    return made


def features(pairs, bounds, room):
    """What one pass over a corpus looks like, as a row of numbers."""
    a, a_stop, b, b_stop, label = np.array(pairs).T
    size_a, size_b = a_stop - a, b_stop - b
    used = np.zeros(bounds[-1], dtype=bool)
    for start, stop in zip(a, a_stop, strict=True):
        used[start:stop] = True
    sentences_a = np.searchsorted(bounds, a_stop, "left") - np.searchsorted(bounds, a, "right") + 1
    return {
        "pairs": len(a),
        "random": label.mean(),
        "size of A": size_a.mean(),
        "size of B": size_b.mean(),
        "size of A in next": size_a[label == 0].mean(),
        "size of B in next": size_b[label == 0].mean(),
        "spread of A": size_a.std(),
        "spread of B": size_b.std(),
        "sentences of A": sentences_a.mean(),
        "full": (size_a + size_b == room).mean(),
        "half": (size_a + size_b < room / 2).mean(),
        "A is longer": (size_a > size_b).mean(),
        "A and B equal": (size_a == size_b).mean(),
        "A whole in front": np.isin(a, bounds).mean(),
        "A whole behind": np.isin(a_stop, bounds).mean(),
        "B whole in front": np.isin(b, bounds).mean(),
        "B whole behind": np.isin(b_stop, bounds).mean(),
        "text in A": used.mean(),
    }


@pytest.mark.parametrize(
    ("longest", "most_sentences"),
    [(40, 12), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((12, 30), (90, 3)))],
)
def test_pairs_are_distributed_as_googles(longest, most_sentences):
    sizes = some_sizes(3, 60, most_sentences, longest)
    bounds = np.cumsum([0, *itertools.chain(*sizes)])
    source, length, passes = source_of(sizes, NextSentence(64, 0.2)), 64, 150
    r = random.Random(4)
    ours = [[tuple(plan) for plan in epoch_of(source, epoch)] for epoch in range(passes)]
    plain = [plain_pairs(sizes, length, 0.2, r) for _ in range(passes)]
    rows = [features(pairs, bounds, length - 3) for pairs in ours]
    expected = [features(pairs, bounds, length - 3) for pairs in plain]
    for name in rows[0]:
        samples = ([row[name] for row in side] for side in (rows, expected))
        p = stats.ttest_ind(*samples, equal_var=False).pvalue
        # Not a number where the feature is the same in every pass.
        assert p > SURE or rows[0][name] == expected[0][name], name
    # The sizes of A, of B, and of both.
    for sign in ([-1, 1, 0, 0, 0], [0, 0, -1, 1, 0], [-1, 1, -1, 1, 0]):
        sizes = [np.concatenate(side) @ np.array(sign) for side in (ours, plain)]
        table = np.stack([np.bincount(size // 4, minlength=16) for size in sizes])
        assert stats.chi2_contingency(table[:, table.sum(0) > 10]).pvalue > SURE


def test_no_token_is_lost_or_read_twice_when_nothing_is_cut():
    """Sentences of one token never overshoot: what is put back after a random pair opens the next one."""
    sizes = [[1] * n for n in (1, 2, 3, 50, 200, 61)]
    for epoch in range(20):
        read = Counter()
        for plan in epoch_of(source_of(sizes, NextSentence(64, 0.5)), epoch):
            read.update(range(plan.a, plan.a_stop))
            if plan.label == 0:
                assert plan.a_stop == plan.b
                read.update(range(plan.b, plan.b_stop))
        assert read == Counter(range(sum(map(len, sizes))))


def test_labels_tell_what_the_text_says():
    sizes = some_sizes(5)
    bounds = np.cumsum([0, *itertools.chain(*sizes)])
    owner = np.repeat(np.arange(len(sizes)), [sum(document) for document in sizes])
    source = source_of(sizes, NextSentence(64))
    plans = [plan for epoch in range(5) for plan in epoch_of(source, epoch)]
    assert {plan.label for plan in plans} == {0, 1}
    for plan in plans:
        assert plan.a < plan.a_stop
        assert plan.b < plan.b_stop
        assert plan.length <= 64
        same = owner[plan.a] == owner[plan.b]
        assert same == (plan.label == 0)
        assert owner[plan.a] == owner[plan.a_stop - 1]
        assert owner[plan.b] == owner[plan.b_stop - 1]
        if plan.label == 0:
            # Between the two lies nothing but what was cut from the end of A and the front of B, next to one sentence's end.
            between = (bounds >= plan.a_stop) & (bounds <= plan.b)
            assert between.any()
            assert plan.length == 64 or plan.a_stop == plan.b


def test_the_tenth_draw_of_a_random_document_counts_even_if_it_is_the_same():
    source = source_of([[4] * 3000] * 2, NextSentence(16, 0.0))
    random_pairs = [p for epoch in range(30) for p in epoch_of(source, epoch) if p.label]
    assert len(random_pairs) > 25_000
    same = sum((plan.a < 12_000) == (plan.b < 12_000) for plan in random_pairs)
    assert stats.binomtest(same, len(random_pairs), 0.5**10).pvalue > SURE


def test_random_segments_start_anywhere_in_any_other_document():
    source = source_of([[30], [5] * 10, [5] * 2, [5] * 3], NextSentence(63, 0.0))
    starts = Counter(p.b for epoch in range(600) for p in epoch_of(source, epoch) if p.a < 30)
    expected = {
        30 + 5 * s: 600 / 3 / n
        for first, n in ((0, 10), (10, 2), (12, 3))
        for s in range(first, first + n)
    }
    # Six sentences fill the room exactly: nothing is cut in front.
    assert starts.keys() == expected.keys()
    assert stats.chisquare([starts[s] for s in expected], list(expected.values())).pvalue > SURE


def test_the_longer_segment_loses_tokens_from_either_end():
    source = source_of([[100, 100]] * 40, NextSentence(128, 0.0))
    plans = [p for epoch in range(60) for p in epoch_of(source, epoch) if p.label == 0]
    assert {(p.a_stop - p.a, p.b_stop - p.b) for p in plans} == {(63, 62)}
    for lost, front in ((37, [p.a % 200 for p in plans]), (38, [p.b % 200 - 100 for p in plans])):
        bins = np.array([0, *range(13, 26), lost + 1])
        expected = np.diff(stats.binom.cdf(bins - 1, lost, 0.5)) * len(plans)
        assert stats.chisquare(np.histogram(front, bins - 0.5)[0], expected).pvalue > SURE


@pytest.mark.parametrize(("room", "short"), [(29, 0.3), (4, 1.0)])
def test_some_documents_are_read_with_a_shorter_target(room, short):
    passes, size = 50, 8 * room
    source = source_of([[1] * size] * 50, NextSentence(room + 3, short))
    goals = []
    for epoch in range(passes):
        longest = Counter()
        for plan in epoch_of(source, epoch):
            longest[plan.a // size] = max(longest[plan.a // size], plan.length - 3)
        goals += longest.values()
    assert len(goals) == 50 * passes
    counts = np.bincount(goals, minlength=room + 1)[2:]
    expected = np.full(room - 1, short / (room - 1))
    expected[-1] += 1 - short
    assert stats.chisquare(counts, expected * len(goals)).pvalue > SURE


def test_pairs_only_come_from_the_chosen_documents():
    sizes = some_sizes(8, 40)
    owner = np.repeat(np.arange(40), [sum(document) for document in sizes])
    plans = epoch_of(source_of(sizes, NextSentence(64), chosen=[3, 30, 7, 11]))
    assert {int(owner[t]) for plan in plans for t in (plan.a, plan.b_stop - 1)} == {3, 7, 11, 30}


# --- full sentences


def plain_spans(documents, length, cross):
    """Sentences (start, stop) by document, in order → sequences as lists of ranges, filled one sentence at a time."""
    sequences, ranges, size = [], [], 1
    for document in documents:
        opened = False
        for start, stop in document:
            for begin in range(start, stop, length - 2):
                end = min(begin + length - 2, stop)
                if ranges and size + end - begin + (0 if opened else 1) > length:
                    sequences.append(tuple(ranges))
                    ranges, size, opened = [], 1, False
                if opened:
                    ranges[-1] = (ranges[-1][0], end)
                    size += end - begin
                else:
                    ranges.append((begin, end))
                    size += end - begin + 1
                    opened = True
        if not cross and ranges:
            sequences.append(tuple(ranges))
            ranges, size = [], 1
    return [*sequences, tuple(ranges)] if ranges else sequences


@given(
    sizes=st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=8), min_size=1, max_size=8),
    length=st.integers(3, 40),
    cross=st.booleans(),
    seed=st.integers(0, 5),
)
def test_full_sentences_fill_sequences_as_a_plain_loop_does(sizes, length, cross, seed):
    source = source_of(sizes, FullSentences(length, cross), seed=seed)
    block = Selection(corpus_of(sizes), np.arange(len(sizes))).open(seed, 0, 0)
    sentences = list(zip(block.starts.tolist(), block.stops.tolist(), strict=True))
    documents = [sentences[first:stop] for first, stop in itertools.pairwise(block.edges.tolist())]
    plans = epoch_of(source)
    assert sorted(plan.ranges for plan in plans) == sorted(plain_spans(documents, length, cross))
    assert all(plan.length == len(source.build(plan)) <= length for plan in plans)
    read = Counter(t for plan in plans for start, stop in plan.ranges for t in range(start, stop))
    assert read == Counter(range(sum(map(sum, sizes))))


# --- building


def test_a_pair_is_built_with_its_label():
    source = source_of([[3, 2], [4]], NextSentence(16))
    built = source.build(PairPlan(a=0, a_stop=3, b=5, b_stop=9, label=1))
    assert built.ids.tolist() == [2, 5, 6, 7, 3, 10, 11, 12, 13, 3]
    assert built.segments.tolist() == [0] * 5 + [1] * 5
    assert built.ids.dtype == np.int32
    assert built.targets["pair"].labels.tolist() == [1]
    assert built.targets["pair"].labels.dtype == np.int64


def test_documents_of_one_sequence_are_parted_by_a_separator():
    source = source_of([[3, 2], [4]], FullSentences(16))
    (plan,) = epoch_of(source)
    ids = {(2, 5, 6, 7, 8, 9, 3, 10, 11, 12, 13, 3), (2, 10, 11, 12, 13, 3, 5, 6, 7, 8, 9, 3)}
    assert tuple(source.build(plan).ids.tolist()) in ids
    assert not source.build(plan).segments.any()
    assert source.build(plan).targets == {}


# --- epochs, blocks and places


SEGMENTS = [NextSentence(24, 0.3), FullSentences(24), FullSentences(24, cross=False)]


def taken(source, cursor, count):
    return list(itertools.islice(source.read(cursor), count))


@pytest.mark.parametrize("segments", SEGMENTS)
@given(start=st.integers(0, 700), window=st.sampled_from([2**22, 8]))
def test_any_place_can_be_returned_to(segments, start, window):
    with mock.patch.multiple(selection, BLOCK=40, WINDOW=window, RUN=2):
        sizes = some_sizes(10, 30)
        stream = taken(source_of(sizes, segments), Cursor(), start + 300)
        assert stream[-1][1].epoch >= 1
        assert max(cursor.block for _, cursor in stream) >= 3
        cursor = stream[start - 1][1] if start else Cursor()
        assert taken(source_of(sizes, segments), cursor, 300) == stream[start:]


def test_each_epoch_has_its_own_order_and_each_block_its_own_draws():
    with mock.patch.object(selection, "BLOCK", 40):
        source = source_of([[1] * 40] * 6, NextSentence(16, 0.5))
        orders = [
            [source._selection.open(1, epoch, block).owners.item() for block in range(6)]
            for epoch in range(4)
        ]
        splits = Counter(
            tuple(plan.a % 40 for plan in source._plans(0, block)) for block in range(6)
        )
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert len(splits) == 6


@pytest.mark.parametrize("window", [2**22, 8])
def test_epochs_before_a_cursor_grow_steadily(window):
    with mock.patch.multiple(selection, BLOCK=40, WINDOW=window, RUN=2):
        source = source_of(some_sizes(10, 30), FullSentences(24))
        stream = taken(source, Cursor(), 1000)
        before = [source.epochs(cursor) for _, cursor in stream]
    assert all(low < high for low, high in itertools.pairwise(before))
    whole = {at: cursor.epoch for at, (_, cursor) in enumerate(stream) if cursor[1:3] == (0, 0)}
    assert {at: before[at] for at in whole} == whole
    assert before[-1] > 2


@pytest.mark.parametrize("cross", [True, False])
def test_a_document_longer_than_a_block_is_read_in_parts(cross):
    with mock.patch.object(selection, "BLOCK", 16):
        source = source_of([[2] * 100, [3] * 5, [1] * 16, [2] * 17], FullSentences(12, cross))
        blocks = source._selection.blocks(1, 0)
        opened = [source._selection.open(1, 0, block) for block in range(blocks)]
        plans = epoch_of(source)
        pairs = epoch_of(source_of([[1] * 100, [1] * 5], NextSentence(12)))
    assert max(len(block.starts) for block in opened) < 32
    starts = np.concatenate([block.starts for block in opened])
    assert len(np.unique(starts)) == len(starts)
    read = Counter(t for plan in plans for start, stop in plan.ranges for t in range(start, stop))
    assert read == Counter(range(200 + 15 + 16 + 34))
    # The parts of one document are still one document where a random segment has to come from another.
    assert all((plan.a < 100) != (plan.b < 100) for plan in pairs if plan.label == 1)


def test_empty_documents_are_passed_over():
    full = epoch_of(source_of([[], [3], [], [], [4], []], FullSentences(12, cross=False)))
    assert sorted(plan.ranges for plan in full) == [((0, 3),), ((3, 7),)]
    pairs = epoch_of(source_of([[], [3], [], [], [4], []], NextSentence(12)))
    assert sorted((plan.a, plan.b, plan.label) for plan in pairs) == [(0, 3, 1), (3, 0, 1)]


def opened(chosen, seed, epoch):
    """The places of the documents that an epoch opens, block by block."""
    return [chosen.open(seed, epoch, n).owners for n in chosen.block_numbers(seed, epoch)]


def test_windows_hold_runs_from_everywhere():
    corpus = corpus_of([[1, 1]] * 1000)
    chosen = AllExcept(1000, np.arange(3, 1000, 100))
    with mock.patch.multiple(selection, BLOCK=50, WINDOW=256, RUN=8):
        picked = Selection(corpus, chosen)
        assert picked.windows == 4
        epochs = [opened(picked, 1, epoch) for epoch in range(2)]
        places = selection._positions(990, selection._runs(990, 4, 1, 0, 2, 3))
    assert sorted(np.concatenate(epochs[0])) == list(range(990))
    assert max(len(block) for block in epochs[0]) == 25
    assert np.concatenate(epochs[0]).tolist() != np.concatenate(epochs[1]).tolist()
    runs = np.unique(places // 8)
    assert 30 <= len(runs) <= 32
    assert np.diff(runs).max() > 3, "not neighbours"
    assert len(places) in (8 * len(runs), 8 * len(runs) - 2)


def test_the_rest_of_an_epoch_takes_no_memory_for_later_windows():
    with mock.patch.multiple(selection, BLOCK=50, WINDOW=256, RUN=8):
        picked = Selection(corpus_of([[1, 1]] * 1000), AllExcept(1000, np.arange(3, 1000, 100)))
        blocks, block = opened(picked, 1, 0), selection.BLOCKS + 3
        begun = picked.open(1, 0, block).owners[:2]
        rest, share = picked.unread(1, 0, block, begun)
        first = len(np.concatenate(blocks)) - len(rest)
        assert len(rest.open_window) < 256
        assert len(rest.runs) in range(60, 66)
        later = np.concatenate(opened(Selection(corpus_of([[1, 1]] * 1000), rest), 1, 0))
        assert len(rest) == len(np.asarray(rest)) == len(set(rest))
        read = np.concatenate(blocks)[: first - 2].tolist() + begun.tolist()
        assert sorted([*picked.ids[np.array(read)], *rest]) == picked.ids[:].tolist()
        assert sorted(later) == list(range(len(rest)))
        assert share == pytest.approx(len(rest) / 990, abs=0.01)


def test_one_window_has_the_order_of_a_plain_permutation():
    sizes = some_sizes(12, 300)
    order = np.arange(300, dtype=np.uint32)
    rng(7, "documents", epoch=3).shuffle(order)
    with mock.patch.object(selection, "BLOCK", 40):
        blocks = opened(Selection(corpus_of(sizes), np.arange(300)), 7, 3)
    assert np.concatenate(blocks).tolist() == order.tolist()


@given(data=st.data(), total=st.integers(1, 60))
def test_all_but_some_documents_are_an_array(data, total):
    without = data.draw(st.sets(st.integers(0, total - 1), max_size=total - 1))
    ids = AllExcept(total, np.array(sorted(without), dtype=np.int64))
    plain = np.setdiff1d(np.arange(total), [*without])
    assert (len(ids), list(ids), ids[:].tolist()) == (len(plain), plain.tolist(), plain.tolist())
    places = data.draw(st.lists(st.integers(0, len(plain) - 1)))
    assert ids[np.array(places, dtype=np.int64)].tolist() == plain[places].tolist()
    assert np.concatenate([ids, [total]]).tolist() == [*plain, total]
    for place in (-1, len(plain)):
        with pytest.raises(IndexError):
            ids[place]


def test_a_million_documents_take_little_memory_and_time():
    corpus = SimpleNamespace(
        words=None,
        tokens=np.zeros(90_000_000, dtype=np.uint16),
        sentences=np.arange(0, 90_000_001, 9, dtype=np.uint64),
        documents=np.arange(0, 10_000_001, 10, dtype=np.uint64),
    )
    chosen = np.arange(1_000_000)
    tracemalloc.start()
    began = time.process_time()
    source = CorpusSource(corpus, TEMPLATE, NextSentence(128), chosen, 1)
    first = [plan for plan, _ in taken(source, Cursor(), 1000)]
    took, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({plan.a for plan in first}) > 900
    assert peak < 70 * 1_000_000
    assert took < 10


# --- what cannot be


@pytest.mark.parametrize(("make", "path"), [
    (lambda: NextSentence(4), "length"),
    (lambda: NextSentence(128, 1.5), "segments.short"),
    (lambda: FullSentences(2), "length"),
    (lambda: source_of([[1]], FullSentences(8), data_copies=0), "data_copies"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(make, path):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.where == path


def test_pairs_need_a_second_document():
    for sizes, chosen in (([[5, 5, 5]], [0]), ([[], [5, 5, 5]], [0, 1]), ([[5], [5]], [1])):
        with pytest.raises(DataError, match="only one document has text") as caught:
            source_of(sizes, NextSentence(16), chosen=chosen)
        assert 'objective="masked_lm"' in caught.value.fix
    assert epoch_of(source_of([[5, 5, 5]], FullSentences(16)))


def test_pairs_need_the_special_tokens_of_bert():
    four, chosen = (
        replace(TEMPLATE, between=Gap(np.array([3, 3], np.int32), np.zeros(2, np.int8))),
        np.arange(4),
    )
    with pytest.raises(ConfigError, match="tokenizer has 4 special tokens there") as caught:
        CorpusSource(corpus_of([[5, 5]] * 4), four, NextSentence(16), chosen, 1)
    assert caught.value.where == "segments"


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("sizes", "chosen"), [([[], []], [0, 1]), ([[3], []], [1]), ([[3]], [])])
def test_a_selection_without_text_is_refused(segments, sizes, chosen):
    with pytest.raises(DataError, match="has a sentence"):
        source_of(sizes, segments, chosen=np.array(chosen, dtype=np.int64))


def test_an_empty_sentence_is_named():
    with pytest.raises(DataError, match="sentence 2 "):
        epoch_of(source_of([[3, 4], [0, 5]], FullSentences(16)))


def test_a_place_of_another_corpus_is_refused():
    source = source_of([[3], [4]], NextSentence(16))
    assert len(taken(source, Cursor(5, 0, 1), 3)) == 3
    for cursor in (Cursor(0, 1, 0), Cursor(0, 0, 2)):
        with pytest.raises(DataError, match="no data at"):
            next(source.read(cursor))


@pytest.fixture(params=[2**22, 32])
def windows(request, monkeypatch):
    """Windows of so many documents, in runs of four."""
    monkeypatch.setattr(selection, "WINDOW", request.param)
    monkeypatch.setattr(selection, "RUN", 4)


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("first", [FullSentences(16), NextSentence(16)])
@pytest.mark.parametrize("steps", [0, 7, 40, 400])
def test_a_stream_continues_an_epoch_with_the_documents_that_were_not_read(first, steps):
    sizes = [[3, 4, 5, 2]] * 90
    before, after = source_of(sizes, first), source_of(sizes, FullSentences(32))
    owner = np.repeat(np.arange(90), 14)
    cursor, read = Cursor(), set()
    for plan, cursor in itertools.islice(before.read(Cursor()), steps):
        if cursor.epoch == 0 or cursor == Cursor(1):
            starts = [plan.a] if isinstance(plan, PairPlan) else [start for start, _ in plan.ranges]
            read |= set(owner[starts].tolist())
    within = not cursor.epoch and len(read) < 89  # else nothing is left of the epoch
    source = ContinuedSource(before, cursor, after)
    begin = Cursor(cursor.epoch)
    if within or cursor.epoch:
        assert source.epochs(begin) == pytest.approx(before.epochs(cursor), abs=1e-9)
    rest, epochs = set(), [source.epochs(begin)]
    for plan, following in source.read(begin):
        rest |= {int(owner[at]) for start, stop in plan.ranges for at in (start, stop - 1)}
        epochs.append(source.epochs(following))
        if following.epoch > cursor.epoch:
            break
    if within:
        assert rest == set(range(90)) - read
    assert epochs == sorted(epochs)


def test_documents_that_make_no_pair_are_no_rest_of_an_epoch():
    """Nothing of them is read, so that they are left when all others are begun."""
    sizes = [[3, 4, 5] * 3] * 6 + [[1]] * 4
    before, after = (source_of(sizes, SentenceOrder(length, 0)) for length in (12, 24))
    cursors = map(itemgetter(1), before.read(Cursor()))
    *_, end = itertools.takewhile(lambda following: not following.epoch, cursors)
    assert len(before.unread(end)[0]) > 1
    source = ContinuedSource(before, end, after)
    assert source.epochs(Cursor(0)) == before.epochs(end)
    plans = list(itertools.islice(source.read(Cursor(0)), 6))
    assert plans == list(itertools.islice(after.read(Cursor(1)), 6))
    with pytest.raises(DataError, match="no sentence_order sequence can be made"):
        next(source_of([[1]] * 4, SentenceOrder(12)).read(Cursor()))


@pytest.mark.usefixtures("windows")
def test_a_phase_lasts_its_share_of_the_text_though_all_documents_are_begun(monkeypatch):
    """A block of many sentences, whose sequences are shuffled, begins all of its documents at once."""
    for block in (2**16, 200):
        monkeypatch.setattr(selection, "BLOCK", block)
        sizes = [[3, 4, 5, 2] * 5] * 90
        streams = [source_of(sizes, FullSentences(length)) for length in (8, 16, 32)]
        source, cursor, read = streams[0], Cursor(), []
        for end, following in zip((0.4, 0.7, 1.3), [*streams[1:], None], strict=True):
            tokens = 0
            for plan, after in source.read(cursor):
                tokens += sum(stop - start for start, stop in plan.ranges)
                if source.epochs(after) >= end:
                    break
            read.append(tokens / (90 * 70))
            if following is not None:
                source = ContinuedSource(source, after, following)
                cursor = after.at_next_phase()
                assert source.epochs(cursor) == pytest.approx(end, abs=0.01)
        np.testing.assert_allclose(read, [0.4, 0.3, 0.6], atol=0.03)


@pytest.mark.parametrize("documents", [45, 80])
def test_the_share_of_an_epoch_is_that_of_its_text(documents):
    """A last block of few sentences is no large part of an epoch."""
    with mock.patch.object(selection, "BLOCK", 40 * 4):
        source, read = source_of([[3, 4, 5, 2]] * documents, FullSentences(16)), 0
        for plan, cursor in source.read(Cursor()):
            read += sum(stop - start for start, stop in plan.ranges)
            assert source.epochs(cursor) == pytest.approx(read / (14 * documents), abs=0.02)
            if cursor.epoch:
                break


@pytest.mark.parametrize("name", ["tokens", "sentences", "documents"])
def test_a_file_that_is_cut_short_while_it_is_read_is_one_message(tmp_path, name):
    """Reading what is gone would end the process by SIGBUS, without a word."""
    columns = corpus_of([[5, 6], [7, 8], [9, 4]])
    for each in ("tokens", "sentences", "documents"):
        getattr(columns, each).tofile(tmp_path / each)
        mapped = np.memmap(tmp_path / each, getattr(columns, each).dtype, "r")
        setattr(columns, each, mapped)
    source = CorpusSource(columns, TEMPLATE, FullSentences(16), np.arange(3), 1)
    stream = source.read(Cursor())
    plan, _ = next(stream)
    source.build(plan)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"is shorter than .*\n.*repeat the same call") as caught:
        source.build(plan) if name == "tokens" else next(source.read(Cursor(1)))
    assert caught.value.where == str(tmp_path / name)
