"""What is masked, how often, and what stands there instead; against Google's procedure as plain loops."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from bothways.core.batch import LabelTargets
from bothways.core.errors import ConfigError
from bothways.core.source import Sequence, rng
from bothways.data.masking import (
    AnyToken,
    CorpusToken,
    Masking,
    NGrams,
    OrdinaryToken,
    RareTokens,
    SingleTokens,
    Spans,
    Vocabulary,
    WholeWords,
    choose_positions,
    hide,
    mask_tokens,
)

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
SIZE = 60
# A p-value below this at a fixed seed is a difference, not bad luck.
SURE = 1e-3


def vocabulary(**settings):
    """Ids 0 to 4 are special but for [UNK]; from 40 on they continue words."""
    special = np.isin(np.arange(SIZE), [PAD, CLS, SEP, MASK])
    return Vocabulary(special, np.arange(SIZE) >= 40, MASK, **settings)


def sequence_of(*ids, targets=None):
    return Sequence(np.array(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.int8), targets or {})


def some_sequence(draw):
    """[CLS] words of one to four pieces [SEP] and, at times, a second segment, which may begin inside a word."""
    ids = [CLS]
    for _ in range(draw.integers(1, 3)):
        if draw.random() < 0.3:
            ids += draw.integers(40, SIZE, size=2).tolist()
        for _ in range(draw.integers(1, 30)):
            ids += [
                int(draw.integers(5, 40)),
                *draw.integers(40, SIZE, size=max(0, draw.integers(-3, 4))).tolist(),
            ]
        ids.append(SEP)
    return sequence_of(*ids)


def words_of(ids):
    """Positions of each word, by a plain loop: a continuation joins the token right before it, unless that is special."""
    words = []
    for at, token in enumerate(ids):
        if token in (PAD, CLS, SEP, MASK):
            continue
        if token >= 40 and ids[at - 1] not in (PAD, CLS, SEP, MASK) and at > 0:
            words[-1].append(at)
        else:
            words.append([at])
    return words


def plain_mask(ids, masking, r):
    """Google's procedure: {position: (what stood there, what stands there now)}."""
    words = words_of(ids)
    if isinstance(masking.unit, SingleTokens):
        words = [[at] for word in words for at in word]
    r.shuffle(words)
    room = min(masking.max_predictions or len(ids), max(1, round(len(ids) * masking.rate)))
    done = {}
    for word in words:
        if len(done) >= room:
            break
        if len(done) + len(word) > room:
            continue
        for at in word:
            if r.random() < masking.mask:
                done[at] = ids[at], MASK
            elif r.random() * (1 - masking.mask) < masking.random:
                done[at] = ids[at], r.randint(0, SIZE - 1)
            else:
                done[at] = ids[at], ids[at]
    return done


def masked_at(sequence):
    return sequence.targets["masked"].index.tolist()


def test_the_number_of_predictions_is_googles():
    limited = Masking(max_predictions=20)
    # 1.5 → 2, 4.5 → 4, 7.5 → 8 and 10.5 → 10: halves go to the even number.
    counts = {3: 1, 4: 1, 10: 2, 30: 4, 50: 8, 70: 10, 64: 10, 128: 19, 200: 20, 512: 20}
    assert {length: limited.count(length) for length in counts} == counts
    assert Masking().count(512) == 77
    assert Masking(rate=0.3).count(512) == 154
    assert Masking(rate=1.0).count(7) == 7


@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(0.01, 1.0),
    most=st.none() | st.integers(1, 30),
    words=st.booleans(),
    anything=st.booleans(),
)
def test_what_is_hidden_is_told_and_the_rest_is_left(seed, rate, most, words, anything):
    replacements = AnyToken() if anything else OrdinaryToken()
    unit = WholeWords() if words else SingleTokens()
    masking = Masking(rate, unit, max_predictions=most, replacements=replacements)
    sequence = some_sequence(np.random.default_rng(seed))
    before = sequence.ids.copy()
    masked = mask_tokens(sequence, masking, vocabulary(), rng(seed, "mask"))
    targets, ids = masked.targets["masked"], before.tolist()
    assert (sequence.ids == before).all()
    assert masked.ids.dtype == np.int32
    assert targets.index.dtype == targets.ids.dtype == np.int64
    assert (np.diff(targets.index) > 0).all()
    assert (targets.ids == before[targets.index]).all()
    assert not {PAD, CLS, SEP, MASK} & set(targets.ids.tolist())
    kept = np.delete(np.arange(len(ids)), targets.index)
    assert (masked.ids[kept] == before[kept]).all()
    room = min(most or len(ids), max(1, round(len(ids) * rate)))
    if words:
        chosen, left = set(targets.index.tolist()), room - len(targets.index)
        assert left >= 0
        assert all(chosen.issuperset(word) or chosen.isdisjoint(word) for word in words_of(ids))
        assert all(len(word) > left for word in words_of(ids) if chosen.isdisjoint(word))
    else:
        assert len(targets.index) == min(room, sum(map(len, words_of(ids))))
    again = mask_tokens(sequence, masking, vocabulary(), rng(seed, "mask"))
    assert (again.ids == masked.ids).all()


@pytest.mark.parametrize("mix", [(0.8, 0.1), (0.0, 0.2), (0.5, 0.5), (1.0, 0.0)])
@pytest.mark.parametrize("replacements", [AnyToken(), OrdinaryToken()])
def test_fates_and_replacements_have_their_shares(mix, replacements):
    """google-research/bert draws from all tokens; others draw no special ones and no [UNK]."""
    masking = Masking(0.5, mask=mix[0], random=mix[1], replacements=replacements)
    original, words = sequence_of(CLS, *[9] * 400, SEP), vocabulary(unknown=UNKNOWN)
    now = []
    for index in range(150):
        masked = mask_tokens(original, masking, words, rng(3, "mask", index=index))
        now += masked.ids[masked.targets["masked"].index].tolist()
    drawn = range(SIZE) if isinstance(replacements, AnyToken) else range(5, SIZE)
    shares = np.zeros(SIZE)
    shares[list(drawn)] = mix[1] / len(drawn)
    shares[9] += 1 - sum(mix)
    shares[MASK] += mix[0]
    counts = np.bincount(now, minlength=SIZE)
    possible = shares > 1e-12
    assert not counts[~possible].any()
    expected = shares[possible] / shares[possible].sum() * len(now)
    assert len(expected) == 1 or stats.chisquare(counts[possible], expected).pvalue > SURE


@pytest.mark.parametrize("unit", [SingleTokens(), WholeWords()])
def test_positions_are_chosen_as_google_chooses_them(unit):
    """Which positions, how many, and which replacements, against the plain loops on one sequence with words of all sizes."""
    masking = Masking(0.2, unit, replacements=AnyToken())
    sequence = sequence_of(
        CLS, 5, 6, 41, 42, 43, 7, 44, 8, 9, 10, 45, 46, 47, 48, 49, SEP,
        11, 12, 50, UNKNOWN, 14, 51, 52, SEP,
    )  # fmt: skip
    ids, words, draws, r = sequence.ids, vocabulary(), 3_000, random.Random(5)
    ours, plain = np.full((2, draws, len(ids)), -1)  # what each position became, −1 if not chosen
    for index in range(draws):
        masked = mask_tokens(sequence, masking, words, rng(7, "mask", index=index))
        places = masked.targets["masked"].index
        ours[index, places] = masked.ids[places]
        for at, (_, new) in plain_mask(ids.tolist(), masking, r).items():
            plain[index, at] = new
    for measure in (
        lambda became: (became >= 0).sum(1),
        lambda became: np.nonzero(became >= 0)[1],
        lambda became: np.select([became < 0, became == MASK, became == ids], [0, 1, 2], 3),
    ):
        counts = [np.bincount(measure(became).ravel(), minlength=30) for became in (ours, plain)]
        assert np.array_equal(counts[0] > 0, counts[1] > 0)
        table = np.array(counts)[:, counts[0] > 0]
        assert table.shape[1] == 1 or stats.chi2_contingency(table).pvalue > SURE


def test_a_sequence_that_opens_with_a_continuation_is_masked():
    masking = Masking(0.9, WholeWords())
    sequence = sequence_of(41, 42, SEP, 7, SEP)
    assert masked_at(mask_tokens(sequence, masking, vocabulary(), rng(1, "mask"))) == [0, 1, 3]


@pytest.mark.parametrize("masking", [Masking(), Masking(unit=WholeWords(), decided_by="unit")])
def test_special_tokens_alone_have_no_predictions(masking):
    masked = mask_tokens(sequence_of(CLS, SEP, SEP), masking, vocabulary(), rng(1, "mask"))
    assert masked_at(masked) == []
    assert masked.ids.tolist() == [CLS, SEP, SEP]


def test_targets_that_are_there_stay():
    label = LabelTargets(np.array([1]))
    sequence = sequence_of(CLS, 7, SEP, targets={"pair": label})
    masked = mask_tokens(sequence, Masking(), vocabulary(), rng(1, "mask"))
    assert masked.targets["pair"] is label
    assert masked.targets.keys() == {"pair", "masked"}


@pytest.mark.parametrize(("make", "path"), [
    (lambda: Masking(rate=0.0), "rate"),
    (lambda: Masking(rate=1.1), "rate"),
    (lambda: Masking(mask=-0.1), "mask"),
    (lambda: Masking(random=1.5), "random"),
    (lambda: Masking(mask=0.8, random=0.3), ""),
    (lambda: Masking(max_predictions=0), "max_predictions"),
    (lambda: NGrams(0), "unit.longest"),
    (lambda: Spans(0.0), "unit.stop"),
    (lambda: Spans(longest=0), "unit.longest"),
    (lambda: RareTokens(-1.0), "unit.power"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(make, path):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.where == f"masking.{path}".removesuffix(".")


def test_a_word_begins_after_a_token_that_ends_one():
    """Of a sentence without spaces, whose tokens all continue, the share that is asked for."""
    sequence = sequence_of(CLS, *(40 + i % 20 for i in range(98)), SEP)
    masking = Masking(unit=WholeWords())
    words = vocabulary(ends=np.arange(SIZE) >= 40)
    assert len(masked_at(mask_tokens(sequence, masking, words, rng(0, "test")))) == 15
    alone = mask_tokens(sequence, masking, vocabulary(), rng(0, "test"))
    assert masked_at(alone) == [], "one word of 98 tokens"


def test_an_unknown_token_of_the_text_is_predicted_like_any_other():
    words = vocabulary(unknown=UNKNOWN)
    sequence = sequence_of(CLS, *[UNKNOWN] * 98, SEP)
    assert len(masked_at(mask_tokens(sequence, Masking(), words, rng(0, "test")))) == 15


def text_of_words(words, pieces=1):
    """[CLS] words of equally many pieces [SEP]."""
    r = np.random.default_rng(1)
    word = lambda: [int(r.integers(5, 40)), *r.integers(40, SIZE, size=pieces - 1).tolist()]  # noqa: E731
    return sequence_of(CLS, *(piece for _ in range(words) for piece in word()), SEP)


def expected_units(probabilities, room):
    """Expected number of units of each length if lengths are drawn until `room` is full, the last one shortened."""
    found = np.zeros((room + 1, len(probabilities)))
    for left in range(1, room + 1):
        for length, p in enumerate(probabilities, 1):
            taken = min(length, left)
            found[left] += p * found[left - taken]
            found[left, taken - 1] += p
    return found[room]


MORE = [
    pytest.param(*case, marks=pytest.mark.slow) for case in ((NGrams(5), 5), (Spans(0.5, 4), 4))
]


@pytest.mark.parametrize(("unit", "longest"), [(NGrams(), 3), (Spans(), 10), *MORE])
def test_lengths_of_ngrams_and_spans_follow_the_formulas(unit, longest):
    """p(n) ∝ 1/n (Lan et al. 2019, section 4.2) and ∝ (1 − p)ⁿ⁻¹ (Joshi et al. 2019, section 3.1)."""
    n = np.arange(1, longest + 1)
    weights = 1 / n if isinstance(unit, NGrams) else (1 - unit.stop) ** (n - 1)
    assert np.allclose(unit.lengths, weights / weights.sum())
    text = text_of_words(1000)  # so long that units hardly ever meet
    masking = Masking(1.0, unit, max_predictions=12)
    drawn = []
    words = vocabulary()
    for seed in range(750):
        chosen = choose_positions(text.ids, masking, words, rng(seed, "test"))
        assert len(chosen.positions) == 12
        drawn.append(np.bincount(np.bincount(chosen.unit), minlength=13)[1 : longest + 1])
    drawn = np.array(drawn)
    difference = drawn.mean(0) - expected_units(weights / weights.sum(), 12)
    assert np.all(np.abs(difference) < 4 * drawn.std(0) / np.sqrt(len(drawn)) + 0.01)


def test_an_ngram_at_the_end_of_a_segment_has_one_of_the_lengths_that_fit():
    """Of two words, the first draws a bigram in one of three cases: it is alone, or left out."""
    text, masking = sequence_of(CLS, 5, 6, SEP), Masking(1.0, NGrams(3))
    alone = sum(
        choose_positions(text.ids, masking, vocabulary(), rng(seed, "test")).unit[-1] == 0
        for seed in range(1500)
    )
    assert stats.binomtest(int(alone), 1500, 1 / 3).pvalue > SURE


@pytest.mark.parametrize("unit", [NGrams(), Spans(), RareTokens()])
def test_units_keep_to_words_segments_and_the_count(unit):
    known = vocabulary(counts=np.arange(1, SIZE + 1))
    for seed in range(150):
        r = np.random.default_rng(seed)
        text = some_sequence(r)
        masking = Masking(float(r.uniform(0.05, 0.9)), unit)
        chosen = choose_positions(text.ids, masking, known, rng(seed, "test"))
        places, count = chosen.positions.tolist(), masking.count(len(text))
        words = words_of(text.ids.tolist())
        assert places == sorted(set(places))
        assert not {int(text.ids[at]) for at in places} & {PAD, CLS, SEP, MASK}
        assert len(places) <= count
        if not isinstance(unit, NGrams):
            assert len(places) == min(count, sum(map(len, words)))
        for number in range(chosen.unit[-1] + 1 if places else 0):
            inside = chosen.positions[chosen.unit == number]
            assert np.all(np.diff(inside) == 1), "a unit has no gap, so it crosses no special token"
            if isinstance(unit, NGrams):
                gram = set(inside.tolist())
                assert sum(not gram.isdisjoint(word) for word in words) <= unit.longest
                assert all(gram.isdisjoint(word) or gram.issuperset(word) for word in words)


def test_spans_begin_with_a_word():
    text = text_of_words(500, pieces=3)
    for seed in range(50):
        chosen = choose_positions(text.ids, Masking(0.1, Spans()), vocabulary(), rng(seed, "test"))
        first = chosen.positions[np.unique(chosen.unit, return_index=True)[1]]
        assert np.all(text.ids[first] < 40)


def test_rare_tokens_are_chosen_by_their_inverse_frequency():
    """With one prediction, the share of each token is count⁻⁰·⁷ over the sum (DistilBERT)."""
    text = sequence_of(CLS, 5, 6, 7, 8, 9, SEP)
    counts = np.ones(SIZE, dtype=np.int64)
    counts[5:10] = [1, 10, 100, 1000, 10_000]
    known = vocabulary(counts=counts)
    masking = Masking(0.1, RareTokens())
    found = np.zeros(5)
    for seed in range(6000):
        found[choose_positions(text.ids, masking, known, rng(seed, "test")).positions[0] - 1] += 1
    expected = counts[5:10] ** -0.7
    assert stats.chisquare(found, expected / expected.sum() * 6000).pvalue > SURE


def test_corpus_tokens_replace_in_proportion_to_their_counts():
    counts = np.zeros(SIZE, dtype=np.int64)
    counts[[MASK, 7, 11, 50]] = [1000, 10, 30, 60]  # a special token is never drawn
    known = vocabulary(counts=counts)
    text = text_of_words(4000)
    masking = Masking(1.0, mask=0.0, random=1.0, replacements=CorpusToken())
    masked = mask_tokens(text, masking, known, rng(3, "test"))
    found = np.bincount(masked.ids[1:-1], minlength=SIZE)
    assert found.sum() == found[[7, 11, 50]].sum()
    assert stats.chisquare(found[[7, 11, 50]], np.array([0.1, 0.3, 0.6]) * 4000).pvalue > SURE


@pytest.mark.parametrize("unit", [WholeWords(), NGrams(), Spans()])
def test_a_unit_shares_its_fate_if_asked(unit):
    text = text_of_words(300, pieces=3)
    masking = Masking(0.3, unit, mask=0.5, random=0.3, decided_by="unit")
    shares = Counter()
    for seed in range(40):
        r = rng(seed, "test")
        chosen = choose_positions(text.ids, masking, vocabulary(), r)
        masked = hide(text, chosen, masking, vocabulary(), r)
        for number in range(chosen.unit[-1] + 1):
            inside = chosen.positions[chosen.unit == number]
            hidden, kept = masked.ids[inside] == MASK, masked.ids[inside] == text.ids[inside]
            if hidden.any():
                assert hidden.all()
                shares["mask"] += 1
            elif kept.all():
                shares["same"] += 1
            else:
                shares["random"] += 1
    expected = {"mask": 0.5, "random": 0.3, "same": 0.2}
    table = [(shares[fate], share * shares.total()) for fate, share in expected.items()]
    assert stats.chisquare(*zip(*table, strict=True)).pvalue > SURE
