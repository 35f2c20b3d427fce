"""Mixtures of corpora: shares against the closed form, draws keyed by position, exact cursors."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from bothways.core.errors import ConfigError, DataError
from bothways.core.source import Cursor
from bothways.data.corpus_source import (
    ByWeight,
    ContinuedSource,
    CorpusSource,
    MixedSource,
    Smoothed,
    corpus_names,
    shares_of,
)
from bothways.data.loader import ExampleBudget, Loader
from bothways.data.segments import FullSentences
from toy_corpora import corpus_of
from toy_template import TEMPLATE

SIZES = {"en": 1000, "is": 1}


@pytest.mark.parametrize("alpha", [1.0, 0.7, 0.3, 0.0])
def test_smoothed_shares_are_those_of_the_formula(alpha):
    q = np.array([1000 / 1001, 1 / 1001]) ** alpha
    shares = shares_of(Smoothed(alpha), SIZES)
    assert list(shares) == ["en", "is"]
    assert np.allclose(list(shares.values()), q / q.sum(), rtol=1e-12)


def test_weights_are_normalised_and_must_name_each_corpus():
    weights = ByWeight({"is": 1, "en": 9})
    assert shares_of(weights, SIZES) == {"en": pytest.approx(0.9), "is": pytest.approx(0.1)}
    with pytest.raises(ConfigError, match="weights for de, and there are en, is"):
        shares_of(ByWeight({"de": 1.0}), SIZES)
    with pytest.raises(DataError, match="en: has no text"):
        shares_of(weights, {"en": 0, "is": 1})
    for wrong in (-1.0, float("inf")):
        with pytest.raises(ConfigError, match=r"mixture\.weights\.en"):
            ByWeight({"en": wrong})
    assert shares_of(ByWeight({"is": 0, "en": 9}), SIZES) == {"en": 1, "is": 0}
    names = "abcdefghij"  # `sum` of ten times 0.1 is 1 only from Python 3.12 on
    tenths = shares_of(ByWeight(dict.fromkeys(names, 0.1)), dict.fromkeys(names, 1))
    assert {*tenths.values()} == {0.1}
    with pytest.raises(ConfigError, match=r"mixture\.weights: are all 0"):
        ByWeight({"en": 0.0})
    with pytest.raises(ConfigError, match="alpha: must be from 0 to 1"):
        Smoothed(1.5)


def test_folders_get_different_names():
    assert corpus_names([Path("/a/en"), Path("/a/zh.v1")]) == ["en", "zh-v1"]
    assert corpus_names([Path("/a/en/corpus"), Path("/a/zh/corpus")]) == ["en-corpus", "zh-corpus"]
    with pytest.raises(ConfigError, match="given twice"):
        corpus_names([Path("/a/en"), Path("/a/en")])


def source_of(first, documents, *, length=8, seed=3, data_copies=None):
    """Return a corpus whose ids are all `first`, in documents of one sentence of five tokens."""
    corpus = corpus_of([[5]] * documents)
    corpus.tokens[:] = first
    segments = FullSentences(length)
    return CorpusSource(corpus, TEMPLATE, segments, np.arange(documents), seed, data_copies)


def mixed(shares=(0.9, 0.1), sizes=(200, 35), seed=5, **settings):
    sources = [source_of(100 + n, size // 5, **settings) for n, size in enumerate(sizes)]
    return MixedSource(sources, shares, sizes, seed)


def test_sources_of_many_sequences_follow_the_shares():
    source = mixed()
    drawn = np.bincount([source.source_at(place) for place in range(100_000)])
    assert chisquare(drawn, [90_000, 10_000]).pvalue > 1e-3
    assert chisquare(drawn, [89_000, 11_000]).pvalue < 1e-6  # the test can fail


def test_every_corpus_is_read_in_its_own_order_and_its_own_epochs():
    source = mixed((0.5, 0.5))
    read = list(itertools.islice(source.read(Cursor()), 60))
    for number in (0, 1):
        own = [plan.plan for plan, _ in read if plan.number == number]
        alone = (plan for plan, _ in source._sources[number].read(Cursor()))
        assert own == list(itertools.islice(alone, len(own)))
    end = read[-1][1]
    assert end.parts[1].epoch >= 3 > end.parts[0].epoch  # 7 and 40 sequences an epoch
    by_source = [stream.epochs(at) for stream, at in zip(source._sources, end.parts, strict=True)]
    assert source.epochs(end) == pytest.approx((200 * by_source[0] + 35 * by_source[1]) / 235)


def test_any_cursor_continues_the_stream_and_survives_json():
    source = mixed()
    read = list(itertools.islice(source.read(Cursor()), 50))
    for place in (0, 7, 31):
        cursor = Cursor.from_json(read[place][1].to_json())
        assert cursor == read[place][1]
        rest = list(itertools.islice(mixed().read(cursor), 50 - place - 1))
        assert rest == read[place + 1 :]
    with pytest.raises(DataError, match="a mixture of 2 corpora"):
        next(source.read(Cursor(0, 0, 5, (Cursor(), Cursor(), Cursor()))))


def random_tokens(sequence, rng):
    """Return a sequence whose first id shows the draw."""
    sequence.ids[0] = rng.integers(30_000)
    return sequence


def loader(source, rank=0, world=1):
    return Loader(source, random_tokens, ExampleBudget(6), 24, 11, rank, world)


def test_draws_differ_between_corpora_and_repeat_with_static_masks():
    source = mixed((0.5, 0.5), sizes=(40, 40), data_copies=2)
    cursors = [Cursor(), *(after for _, after in itertools.islice(source.read(Cursor()), 64))]
    keys = [source.key(cursor) for cursor in cursors[:64]]
    assert len(set(keys)) == 2 * 2 * 8  # 2 corpora, 2 copies, 8 sequences
    endless = mixed((0.5, 0.5), sizes=(40, 40))
    assert len({endless.key(cursor) for cursor in cursors[:64]}) == 64


def test_ranks_read_the_sequences_of_one_process_and_resume_anywhere():
    def first(*share):
        return list(itertools.islice(loader(mixed(), *share).steps(Cursor()), 9))

    def tokens(*steps):
        return sorted(int(id) for step in steps for b in step.microbatches for id in b.ids)

    whole = first()
    both = [tokens(*pair) for pair in zip(first(0, 2), first(1, 2), strict=True)]
    assert both == [tokens(step) for step in whole]
    again = itertools.islice(loader(mixed()).steps(whole[3].cursor), 5)
    assert [*map(tokens, again)] == both[4:]
    assert all(step.sequences == 6 for step in whole)  # steps cross the ends of epochs


def test_a_phase_continues_the_epoch_of_each_corpus():
    before = mixed((0.5, 0.5))
    _, end = list(itertools.islice(before.read(Cursor()), 9))[-1]
    start = end.at_next_phase()
    assert (start.item, [part.item for part in start.parts]) == (9, [0, 0])
    sources = [
        ContinuedSource(old, at, source_of(100 + n, size // 5, length=12))
        for n, (old, at, size) in enumerate(zip(before._sources, end.parts, (200, 35), strict=True))
    ]
    after = MixedSource(sources, (0.5, 0.5), (200, 35), 5)
    assert after.epochs(start) == pytest.approx(before.epochs(end))
    plan, _ = next(after.read(start))
    assert plan.number == before.source_at(9)
