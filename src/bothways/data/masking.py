"""Masked tokens: the predicted positions and their replacements (Devlin et al. 2018, section 3.1).

Two questions are separate: which tokens are predicted (`Masking.unit`) and what the model sees in
their place (`mask`, `random`, `decided_by`, `replacements`).

The number of predictions is exact, as in Google's instance builder: a sequence of n tokens,
specials included, has min(max_predictions, max(1, round(rate · n))) predictions, rounded half to
even. Special tokens are never predicted. Whole words and n-grams that exceed the rest are skipped,
so that there may be a few predictions less. One point differs: a piece that opens a segment whose
front was cut off is a word of its own here, where Google joins it to the last word before the
[SEP].

Masks are a pure function of the sequence and the generator: dynamic masking uses a generator keyed
by the epoch, static masking one keyed by the epoch modulo the number of data copies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError
from bothways.core.source import Ids, Sequence
from bothways.text.tokenizer import Tokenizer

Positions = NDArray[np.int64]
Shares = NDArray[np.float64]


@dataclass(frozen=True)
class SingleTokens:
    """Each token is chosen on its own."""

    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class WholeWords:
    """All pieces of a word are chosen, or none."""

    kind: Literal["whole_words"] = "whole_words"


@dataclass(frozen=True)
class NGrams:
    """One to `longest` consecutive words are chosen; n words with a probability ∝ 1/n.

    Source: Lan et al. 2019, section 4.2, and google-research/albert, create_pretraining_data.py:
    every word in random order begins an n-gram, which is shortened if it exceeds the rest of the
    predictions and left out if it overlaps another. DeBERTa masks n-grams of the same lengths.
    """

    longest: int = 3
    kind: Literal["ngrams"] = "ngrams"

    def __post_init__(self) -> None:
        require_at_least(1, "masking.unit", longest=self.longest)

    @property
    def lengths(self) -> Shares:
        """The probabilities of 1 … `longest` words."""
        weights = 1 / np.arange(1, self.longest + 1)
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class Spans:
    """Spans of words are chosen, whose length follows a geometric distribution up to `longest`.

    n words with a probability ∝ stop · (1 − stop)ⁿ⁻¹. A span begins with the word of a random
    token; spans that meet are one span. The last one may end inside a word, so that the number of
    predictions is exact.

    Source: Joshi et al. 2019 (SpanBERT), section 3.1.
    """

    stop: float = 0.2
    longest: int = 10
    kind: Literal["spans"] = "spans"

    def __post_init__(self) -> None:
        require_at_least(1, "masking.unit", longest=self.longest)
        require_range("(0, 1]", "masking.unit", stop=self.stop)

    @property
    def lengths(self) -> Shares:
        """The probabilities of 1 … `longest` words."""
        weights = (1 - self.stop) ** np.arange(self.longest)
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class RareTokens:
    """Single tokens with a probability ∝ count⁻ᵖᵒʷᵉʳ, by their count in the corpus.

    Source: DistilBERT's training code (power 0.7) and XLM's; these draw over a whole batch, this
    one within each sequence.
    """

    power: float = 0.7
    kind: Literal["rare_tokens"] = "rare_tokens"

    def __post_init__(self) -> None:
        require_at_least(0, "masking.unit", power=self.power)


Unit = SingleTokens | WholeWords | NGrams | Spans | RareTokens


@dataclass(frozen=True)
class AnyToken:
    """The whole vocabulary, special and unused tokens included, as in google-research/bert."""

    kind: Literal["any"] = "any"


@dataclass(frozen=True)
class OrdinaryToken:
    """The vocabulary without its special tokens and [UNK], as in RoBERTa's code (fairseq).

    [UNK] hardly occurs in a text, so a model would only learn that it is never right.
    """

    kind: Literal["ordinary"] = "ordinary"


@dataclass(frozen=True)
class CorpusToken:
    """Ordinary tokens in proportion to their count in the corpus, as in SpanBERT."""

    kind: Literal["corpus"] = "corpus"


@dataclass(frozen=True)
class Masking:
    """Selection and replacement of predicted tokens.

    Attributes:
        rate: predictions per token of the sequence, specials included.
        unit: the unit of selection.
        mask: the share of chosen tokens that become [MASK].
        random: the share that becomes a random token; the rest is unchanged.
        max_predictions: maximum number of predictions per sequence, or `None`.
        replacements: the distribution of random tokens.
        decided_by: "token" masks, replaces or keeps each token on its own; "unit" treats all
            tokens of a word, n-gram or span alike, as SpanBERT does.
    """

    rate: float = 0.15
    unit: Unit = SingleTokens()
    mask: float = 0.8
    random: float = 0.1
    max_predictions: int | None = None
    replacements: AnyToken | OrdinaryToken | CorpusToken = OrdinaryToken()
    decided_by: Literal["token", "unit"] = "token"

    def __post_init__(self) -> None:
        require_range("(0, 1]", "masking", rate=self.rate)
        require_range("[0, 1]", "masking", mask=self.mask, random=self.random)
        # Sums of floating-point numbers may exceed 1 by a rounding error.
        if self.mask + self.random > 1 + 1e-9:
            message = f"mask {self.mask} and random {self.random} are more than 1 together"
            fix = "They are shares of the chosen tokens; what they leave is kept unchanged."
            raise ConfigError(message, where="masking", fix=fix)
        fix = "Write none for no limit."
        require_range("[1, inf)", "masking", max_predictions=self.max_predictions, fix=fix)

    @property
    def needs_counts(self) -> bool:
        """True if `Vocabulary.counts` is read."""
        return isinstance(self.unit, RareTokens) or isinstance(self.replacements, CorpusToken)

    def count(self, length: int) -> int:
        """Return the number of predictions of a sequence of `length` tokens."""
        # Python rounds half to even, as Google's code does: 10 · 0.15 = 1.5 → 2, 30 · 0.15 → 4.
        predictions = max(1, round(length * self.rate))
        return min(predictions, self.max_predictions or predictions)


@dataclass(frozen=True)
class Vocabulary:
    """What masking knows of a vocabulary of V tokens.

    Attributes:
        special: `(V)`, True for control tokens, which are never predicted.
        continues: `(V)`, True where a token continues the word before it.
        mask: the id of [MASK].
        ends: `(V)`, True for tokens after which a word begins, whatever follows; None for none.
        unknown: the id of [UNK]; None if there is none. It is predicted, like any token of a text.
        counts: `(V)`, how often each token occurs in the corpus; None if it was not counted.
    """

    special: NDArray[np.bool_]
    continues: NDArray[np.bool_]
    mask: int
    ends: NDArray[np.bool_] | None = None
    unknown: int | None = None
    counts: Positions | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, counts: Positions | None = None) -> Vocabulary:
        """Return the vocabulary of a tokenizer."""
        continues, ends = tokenizer.word_pieces
        specials = tokenizer.specials
        return cls(tokenizer.special, continues, specials.mask, ends, specials.unknown, counts)

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, V."""
        return len(self.special)

    @functools.cached_property
    def ordinary(self) -> Positions:
        """The ids that are neither special nor [UNK], ascending."""
        ordinary = ~self.special
        if self.unknown is not None:
            ordinary[self.unknown] = False
        return np.flatnonzero(ordinary)

    @functools.cached_property
    def frequencies(self) -> Shares:
        """The cumulative share of each token among the ordinary tokens of the corpus, `(V)`."""
        assert self.counts is not None, "the objective's masking needs counts"
        ordinary = np.zeros(self.size)
        ordinary[self.ordinary] = self.counts[self.ordinary]
        shares = np.cumsum(ordinary)
        return np.asarray(shares / shares[-1])


class Chosen(NamedTuple):
    """Positions to predict, ascending `(n)`, and the number of the unit of each `(n)`."""

    positions: Positions
    unit: Positions


def mask_tokens(
    sequence: Sequence, masking: Masking, vocabulary: Vocabulary, rng: np.random.Generator
) -> Sequence:
    """Return the sequence with masked tokens, and their ids as `targets["masked"]`.

    Positions ascend. A sequence of special tokens only has no predictions. The input is not
    changed.

        ids [CLS] a b c d [SEP] → [CLS] a [MASK] c d [SEP], targets: index [2], ids [b]
    """
    selection = choose_positions(sequence.ids, masking, vocabulary, rng, sequence.word_starts)
    return hide(sequence, selection, masking, vocabulary, rng)


def hide(
    sequence: Sequence,
    selection: Chosen,
    masking: Masking,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
) -> Sequence:
    """Return the sequence with the chosen tokens replaced, and their ids as `targets["masked"]`."""
    from bothways.core.batch import TokenTargets

    hidden = sequence.ids[selection.positions]
    # One uniform draw per token decides: [0, mask) → [MASK], then `random` → a random token, the
    # rest is unchanged. Random tokens are drawn for all, so that the draws do not depend on fates.
    match masking.decided_by:
        case "token":
            fate = rng.random(len(hidden))
        case "unit":
            fate = rng.random(selection.unit[-1] + 1 if len(selection.unit) else 0)[selection.unit]
        case _:
            assert_never(masking.decided_by)
    match masking.replacements:
        case AnyToken():
            strangers = rng.integers(vocabulary.size, size=len(hidden))
        case OrdinaryToken():
            draws = rng.integers(len(vocabulary.ordinary), size=len(hidden))
            strangers = vocabulary.ordinary[draws]
        case CorpusToken():
            shares = rng.random(len(hidden))
            strangers = np.searchsorted(vocabulary.frequencies, shares, side="right")
        case _:
            assert_never(masking.replacements)
    changed = np.where(fate < masking.mask + masking.random, strangers, hidden)
    ids = sequence.ids.copy()
    ids[selection.positions] = np.where(fate < masking.mask, vocabulary.mask, changed)
    targets = TokenTargets(selection.positions, hidden.astype(np.int64))
    return dataclasses.replace(sequence, ids=ids, targets={**sequence.targets, "masked": targets})


def choose_positions(
    ids: Ids,
    masking: Masking,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    opens: NDArray[np.bool_] | None = None,
) -> Chosen:
    """Choose the positions to predict.

    Args:
        opens: True where a word begins `(tokens)`; None for the words that the vocabulary shows.
    """
    candidates = np.flatnonzero(~vocabulary.special[ids])
    count = masking.count(len(ids))
    match masking.unit:
        case SingleTokens():
            # The beginning of a permutation is a draw without replacement.
            index = np.sort(rng.permutation(candidates)[:count])
            return Chosen(index, np.arange(len(index)))
        case RareTokens(power=power):
            assert vocabulary.counts is not None, "the objective's masking needs counts"
            # The largest of log w + Gumbel noise are a draw without replacement (Vieira 2014).
            weights = -power * np.log(np.maximum(vocabulary.counts[ids[candidates]], 1))
            index = candidates[np.argsort(-weights - rng.gumbel(size=len(candidates)))[:count]]
            return Chosen(np.sort(index), np.arange(len(index)))
        case unit:
            opens = word_starts(ids, vocabulary) if opens is None else opens
            starts, stops = _words(candidates, opens)
    match unit:
        case WholeWords():
            units = _whole_words(starts, stops, count, rng)
        case NGrams():
            units = _ngrams(starts, stops, unit.lengths, count, rng)
        case Spans():
            units = _spans(candidates, starts, stops, unit.lengths, count, rng)
        case _:
            assert_never(unit)
    units.sort()
    index = np.concatenate([np.arange(*unit) for unit in units] or [candidates[:0]])
    return Chosen(index, np.repeat(np.arange(len(units)), [end - start for start, end in units]))


def word_starts(ids: Ids, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return `(tokens)`: True where a word begins, by the tokens of a text without special ones."""
    opens = ~vocabulary.continues[ids]
    if vocabulary.ends is not None:  # such as a comma, or a character of a script without spaces
        opens[1:] |= vocabulary.ends[ids[:-1]]
    return opens


def masked_share(
    ids: Ids,
    length: int,
    masking: Masking,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    opens: NDArray[np.bool_] | None = None,
) -> float:
    """Return the predictions of a text as a share of those that `masking.rate` asks for.

    Whole words that exceed the rest of a sequence are skipped: where words are long, few are
    chosen.

    Args:
        ids: tokens of the text; cut into sequences of `length`, special tokens included.
        opens: as in `choose_positions`.
    """
    expected = selected = 0
    # Two tokens of a sequence are special: [CLS] and [SEP].
    room, control = length - 2, np.array([vocabulary.mask], dtype=ids.dtype)
    for start in range(0, len(ids), room):
        sequence = np.concatenate([control, ids[start : start + room], control])
        begins = None if opens is None else np.pad(opens[start : start + room], 1)
        expected += masking.count(len(sequence))
        selected += len(choose_positions(sequence, masking, vocabulary, rng, begins).positions)
    return selected / expected if expected else 1.0


def _words(candidates: Positions, opens: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """Return the starts and the stops of the words of the candidates: none crosses a special token.

    A piece after a special token is a word: its beginning was cut off.

    Example: [CLS] play ##ing [SEP] now [SEP] → 1 4 and 3 5.
    """
    if len(candidates) == 0:
        return [], []
    # A gap between candidates is a special token; -2 makes a gap before the first.
    starts = candidates[opens[candidates] | (np.diff(candidates, prepend=-2) > 1)]
    # A word ends where the next one begins, or before a special token.
    following = np.append(starts[1:], candidates[-1] + 1)
    stops = candidates[np.searchsorted(candidates, following) - 1] + 1
    return starts.tolist(), stops.tolist()


def _whole_words(
    starts: list[int], stops: list[int], count: int, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Choose random words that fit in `count`; return the range of each."""
    taken, room = [], count
    for word in rng.permutation(len(starts)).tolist():
        size = stops[word] - starts[word]
        if size <= room:  # else a shorter word may still fit
            taken.append((starts[word], stops[word]))
            room -= size
            if room == 0:
                break
    return taken


def _ngrams(
    starts: list[int], stops: list[int], lengths: Shares, count: int, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Choose n-grams of words that fit in `count` and do not overlap; return their ranges."""
    order, draws = rng.permutation(len(starts)).tolist(), rng.random(len(starts)).tolist()
    free, taken, room = [True] * len(starts), [], count
    below = np.cumsum(lengths)
    for word, draw in zip(order, draws, strict=True):
        # Near the end of a text, n is drawn among the lengths that are left.
        max_words = min(len(lengths), _unbroken(starts, stops, word, len(lengths)))
        n = int(np.searchsorted(below[:max_words], draw * below[max_words - 1], side="right")) + 1
        n = min(n, max_words)
        # An n-gram that exceeds the rest loses words at its end, as in Google's code.
        while n > 0 and stops[word + n - 1] - starts[word] > room:
            n -= 1
        if n == 0 or not all(free[word : word + n]):
            continue
        free[word : word + n] = [False] * n
        taken.append((starts[word], stops[word + n - 1]))
        room -= stops[word + n - 1] - starts[word]
        if room == 0:
            break
    return taken


def _unbroken(starts: list[int], stops: list[int], word: int, max_words: int) -> int:
    """Count the words from `word` on that follow each other without a special token between."""
    n = 1
    while n < max_words and word + n < len(starts) and starts[word + n] == stops[word + n - 1]:
        n += 1
    return n


def _spans(
    candidates: Positions,
    starts: list[int],
    stops: list[int],
    lengths: Shares,
    count: int,
    rng: np.random.Generator,
) -> list[tuple[int, int]]:
    """Choose spans of words with `count` tokens together; return the ranges of merged spans."""
    free, room = candidates, min(count, len(candidates))
    taken = [candidates[:0]]
    while room:
        length = int(rng.choice(len(lengths), p=lengths)) + 1
        # A random token, not a random word: long words begin more spans, as in SpanBERT's code.
        word = bisect_right(starts, rng.choice(free)) - 1
        last_word = word + _unbroken(starts, stops, word, length) - 1
        inside = (free >= starts[word]) & (free < stops[last_word])
        inside &= np.cumsum(inside) <= room  # the last span may be cut
        taken.append(free[inside])
        room -= len(taken[-1])
        free = free[~inside]
    index = np.sort(np.concatenate(taken))
    # 3 4 5 8 9 → a gap after 5 → [3, 6) and [8, 10)
    gaps = np.flatnonzero(np.diff(index, prepend=-2, append=index[-1:] + 2) > 1)
    return [(int(index[a]), int(index[b - 1]) + 1) for a, b in itertools.pairwise(gaps)]
