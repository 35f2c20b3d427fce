"""Near-duplicates against texts compared by hand, pair by pair."""

import re

import numpy as np
import pytest

from bothways.core.errors import ConfigError
from bothways.core.source import rng
from bothways.data.cleaning import near_duplicates


def plain_shingles(text: str, size: int) -> set[tuple[str, ...]]:
    """Return the shingles of an English or Chinese text as tuples of words."""
    words = re.findall(r"[a-z0-9]+|[一-鿿]", text.lower())
    if not words:
        return set()
    return {tuple(words[at : at + size]) for at in range(max(1, len(words) - size + 1))}


def similarity(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    return len(one & other) / len(one | other) if one | other else 0.0


def plain_search(texts: list[str], settings: near_duplicates.NearDuplicates) -> list[int]:
    """Compare each text with all earlier ones that stay."""
    kept, left = list[set[tuple[str, ...]]](), list[int]()
    for number, text in enumerate(texts):
        own = plain_shingles(text, settings.shingle)
        if any(similarity(own, other) >= settings.threshold for other in kept):
            left.append(number)
        else:
            kept.append(own)
    return left


def changed(words: list[str], rate: float, rng: np.random.Generator) -> list[str]:
    """Replace a share of the words."""
    return [f"x{rng.integers(10**6)}" if rng.random() < rate else word for word in words]


def some_texts(count: int, seed: int, letters: bool) -> list[str]:
    """Return texts, many of them changed copies of earlier ones, and copies of these."""
    rng = np.random.default_rng(seed)
    texts = list[list[str]]()
    for _ in range(count):
        if texts and rng.random() < 0.6:
            source = texts[rng.integers(len(texts))]
            texts.append(changed(source, rng.choice([0.001, 0.01, 0.03, 0.1]), rng))
        else:
            ids = rng.integers(3000, size=rng.integers(1, 400))
            texts.append([chr(0x4E00 + n) if letters else f"w{n}" for n in ids])
    return [("" if letters else " ").join(words) for words in texts]


def left_out(texts: list[str], settings: near_duplicates.NearDuplicates) -> list[int]:
    """Return the texts left out; each is similar to an earlier one that stays."""
    documents: list[int] = near_duplicates.find_near_duplicates(
        near_duplicates.sign_texts(texts, settings), settings
    ).tolist()
    shingles = [plain_shingles(text, settings.shingle) for text in texts]
    for document in documents:
        staying = set(range(document)) - set(documents)
        similarities = (similarity(shingles[document], shingles[other]) for other in staying)
        assert max(similarities) >= settings.threshold
    return documents


@pytest.mark.parametrize("chinese", [False, True])
def test_the_texts_left_out_are_those_of_a_search_of_all_pairs(chinese, monkeypatch):
    monkeypatch.setattr(near_duplicates, "RECALL", 1 - 1e-9)  # bands that lose no pair
    monkeypatch.setattr(near_duplicates, "ROWS", 40)  # several chunks
    settings = near_duplicates.NearDuplicates(0.5, shingle=3, permutations=256)
    texts = some_texts(150, 3, chinese)
    found = left_out(texts, settings)
    assert found == plain_search(texts, settings)
    assert 20 < len(found) < 130


def test_the_usual_bands_lose_few():
    texts = some_texts(130, 5, letters=False)
    settings = near_duplicates.NearDuplicates()
    found, expected = left_out(texts, settings), plain_search(texts, settings)
    assert len(set(found) ^ set(expected)) <= 0.03 * len(expected)
    assert len(expected) > 40


@pytest.mark.parametrize("size", [2, 10, 300])
def test_an_estimate_has_the_binomial_distribution_of_its_similarity(size):
    rng, permutations, sets, similarities = np.random.default_rng(size), 128, [], []
    for _ in range(300):
        pool = np.unique(rng.integers(2**32, size=size + 5, dtype=np.uint32))
        union = rng.permutation(pool)[:size]
        common = int(rng.integers(1, size))
        cut = int(rng.integers(common, size + 1))
        sets += [np.sort(union[:cut]), np.sort(np.append(union[:common], union[cut:]))]
        similarities.append(common / size)
    offsets = np.cumsum([0, *map(len, sets)])
    shingles = np.concatenate(sets)
    signatures = near_duplicates.sign(shingles, offsets, permutations)
    means = permutations * np.array(similarities)
    texts = near_duplicates.SignedTexts(shingles, offsets, signatures)
    assert [texts.similarity(2 * n, 2 * n + 1) for n in range(300)] == similarities
    equal = (signatures[::2] == signatures[1::2]).sum(axis=1)
    variances = means * (1 - np.array(similarities))
    # Four standard deviations of the sum of all, and of the mean square of a standard score.
    assert abs((equal - means).sum()) < 4 * np.sqrt(variances.sum())
    square = float(((equal - means) ** 2 / variances).mean())
    kurtosis = 2 + (1 / variances).mean()  # at most, of a squared binomial score
    assert abs(square - 1) < 4 * np.sqrt(kurtosis / 300)


def test_the_signature_of_a_set_does_not_depend_on_the_others():
    texts = some_texts(60, 9, letters=False)
    texts[7:7] = ["", "!?"]
    longer_than_a_chunk = range(3 * near_duplicates.CHUNK // 2)
    texts.append(" ".join(f"w{n}" for n in longer_than_a_chunk))
    together = near_duplicates.sign(*near_duplicates.find_shingles(texts, 5), 16)
    for number, text in enumerate(texts):
        alone = near_duplicates.sign(*near_duplicates.find_shingles([text], 5), 16)[0]
        assert (together[number] == alone).all()
    draw = rng(0, "minhash")
    factors, terms = (draw.integers(2**32, size=16, dtype=np.uint32) for _ in range(2))
    last = near_duplicates.find_shingles(texts[-1:], 5)[0].astype(np.uint64)
    pairs = zip((factors | 1).tolist(), terms.tolist(), strict=True)
    for column, (factor, term) in enumerate(pairs):
        least = min((factor * value + term) % 2**32 for value in last.tolist())
        assert together[-1, column] == least % 2**16


def test_case_punctuation_and_width_do_not_matter_and_texts_without_words_stay():
    settings = near_duplicates.NearDuplicates()
    texts = [
        *("The cat sat on the mat, and slept!", "the CAT sat (on the mat) and slept", "The cat."),
        *("the cat", "!!", "??", "", "", "床前明月光,疑是地上霜。", "床前明月光 疑是地上霜"),
    ]
    assert left_out(texts, settings) == [1, 3, 9]
    wide = "ＡＢＣ one two three four five six"
    signed = near_duplicates.sign_texts([wide, wide.replace("ＡＢＣ", "abc")], settings)
    assert near_duplicates.find_near_duplicates(signed, settings).tolist() == [1]


def test_each_text_that_is_left_out_has_a_similar_one_that_stays():
    """A chain of small changes: the last differs from the first, and stays."""
    words = [f"w{n}" for n in range(200)]
    chain = [" ".join([f"v{n}" for n in range(step)] + words[step:]) for step in range(0, 200, 10)]
    found = left_out(chain, near_duplicates.NearDuplicates())
    assert found == plain_search(chain, near_duplicates.NearDuplicates())
    assert 0 < len(found) < len(chain) - 5


def test_a_band_that_many_dissimilar_texts_share_is_limited(monkeypatch):
    monkeypatch.setattr(near_duplicates, "LIMIT", 2)
    # Sets of one common and nine own shingles; by the signatures all are candidates.
    own = np.arange(9 * 6, dtype=np.uint32).reshape(6, 9) + 1
    rows = np.array([0, 1, 2, 3, 2, 0])  # the fifth is the third again, the sixth the first
    values = np.concatenate([np.append(np.uint32(0), own[row]) for row in rows])
    texts = near_duplicates.SignedTexts(
        values, np.arange(7) * 10, np.zeros((6, 128), dtype=np.uint16)
    )
    found = near_duplicates.find_near_duplicates(texts, near_duplicates.NearDuplicates())
    assert found.tolist() == [5]


@pytest.mark.parametrize(("name", "value"), [
    ("threshold", 0.0), ("threshold", 1.5), ("threshold", 0.01), ("shingle", 0), ("permutations", 5000)
])  # fmt: skip
def test_wrong_settings_are_refused(name, value):
    with pytest.raises(ConfigError) as caught:
        near_duplicates.NearDuplicates(**{name: value})
    assert caught.value.where == name


def test_bands_find_a_pair_at_the_threshold():
    for threshold in (0.1, 0.5, 0.8, 0.95, 1.0):
        bands, rows = near_duplicates.NearDuplicates(threshold).bands
        assert bands * rows <= 128
        assert 1 - (1 - threshold**rows) ** bands >= 0.95
    assert near_duplicates.NearDuplicates(0.8).bands == (18, 7)
