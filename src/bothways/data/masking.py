"""Masked tokens: the predicted positions and their replacements (Devlin et al. 2018, section 3.1).

The number of predictions is exact, as in Google's instance builder: a sequence of n tokens,
specials included, has min(max_predictions, max(1, round(rate · n))) predictions, rounded half to
even. Special tokens are never predicted; whole words that exceed the rest are skipped. One point
differs: a piece that opens a segment whose front was cut off is a word of its own here, where
Google joins it to the last word before the [SEP].

Masks are a pure function of the sequence and the generator: dynamic masking uses a generator keyed
by the epoch, static masking one keyed by the epoch modulo the number of data copies.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.errors import ConfigError
from bothways.core.sequence import Ids, Sequence
from bothways.text.tokenizer import Tokenizer

Places = NDArray[np.int64]


@dataclass(frozen=True)
class SingleTokens:
    """Each token is chosen on its own."""

    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class WholeWords:
    """All pieces of a word are chosen, or none."""

    kind: Literal["whole_words"] = "whole_words"


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
class Masking:
    """Selection and replacement of predicted tokens.

    Attributes:
        rate: predictions per token of the sequence, specials included.
        unit: the unit of selection.
        mask: the share of chosen tokens that become [MASK].
        random: the share that becomes a random token; the rest is unchanged.
        max_predictions: maximum number of predictions per sequence, or `None`.
        replacements: the distribution of random tokens.
    """

    rate: float = 0.15
    unit: SingleTokens | WholeWords = SingleTokens()
    mask: float = 0.8
    random: float = 0.1
    max_predictions: int | None = None
    replacements: AnyToken | OrdinaryToken = OrdinaryToken()

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"must be in (0, 1], not {self.rate}", where="masking.rate")
        for name in ("mask", "random"):
            if not 0 <= getattr(self, name) <= 1:
                what = f"must be in [0, 1], not {getattr(self, name)}"
                raise ConfigError(what, where=f"masking.{name}")
        # Sums of floating-point numbers may exceed 1 by a rounding error.
        if self.mask + self.random > 1 + 1e-9:
            what = f"mask {self.mask} and random {self.random} are more than 1 together"
            fix = "They are shares of the chosen tokens; what they leave is kept unchanged."
            raise ConfigError(what, where="masking", fix=fix)
        if self.max_predictions is not None and self.max_predictions < 1:
            what = f"must be at least 1, or absent for no limit, not {self.max_predictions}"
            raise ConfigError(what, where="masking.max_predictions")

    def count(self, length: int) -> int:
        """Return the number of predictions of a sequence of `length` tokens."""
        # Python rounds half to even, as Google's code does: 10 · 0.15 = 1.5 → 2, 30 · 0.15 → 4.
        wanted = max(1, round(length * self.rate))
        return wanted if self.max_predictions is None else min(self.max_predictions, wanted)


@dataclass(frozen=True)
class Vocabulary:
    """What masking knows of a vocabulary of V tokens.

    Attributes:
        special: `(V)`, True for control tokens, which are never predicted.
        continues: `(V)`, True where a token continues the word before it.
        mask: the id of [MASK].
        ends: `(V)`, True for tokens after which a word begins, whatever follows; None for none.
        unknown: the id of [UNK]; None if there is none. It is predicted, like any token of a text.
    """

    special: NDArray[np.bool_]
    continues: NDArray[np.bool_]
    mask: int
    ends: NDArray[np.bool_] | None = None
    unknown: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Return the vocabulary of a tokenizer."""
        continues, ends = tokenizer.word_pieces
        specials = tokenizer.specials
        return cls(tokenizer.special, continues, specials.mask, ends, specials.unknown)

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, V."""
        return len(self.special)

    @functools.cached_property
    def ordinary(self) -> Places:
        """The ids that are neither special nor [UNK], ascending."""
        ordinary = ~self.special
        if self.unknown is not None:
            ordinary[self.unknown] = False
        return np.flatnonzero(ordinary)


def mask_tokens(
    sequence: Sequence, masking: Masking, vocabulary: Vocabulary, rng: np.random.Generator
) -> Sequence:
    """Return the sequence with masked tokens, and their ids as `targets["masked"]`.

    Positions ascend. A sequence of special tokens only has no predictions. The input is not
    changed.

        ids [CLS] a b c d [SEP] → [CLS] a [MASK] c d [SEP], targets: index [2], ids [b]
    """
    from bothways.core.targets import TokenTargets

    index = _choose(sequence.ids, masking, vocabulary, rng)
    hidden = sequence.ids[index]
    ids = sequence.ids.copy()
    ids[index] = _replace(hidden, masking, vocabulary, rng)
    targets = TokenTargets(index, hidden.astype(np.int64))
    return dataclasses.replace(sequence, ids=ids, targets={**sequence.targets, "masked": targets})


def _choose(ids: Ids, masking: Masking, vocabulary: Vocabulary, rng: np.random.Generator) -> Places:
    """Choose the positions to predict, ascending."""
    special = vocabulary.special[ids]
    candidates = np.flatnonzero(~special)
    count = masking.count(len(ids))
    match masking.unit:
        case SingleTokens():
            # The start of a random order is a random set without repetition.
            chosen = rng.permutation(candidates)[:count]
        case WholeWords():
            # opens[i]: a word begins at token i. [CLS] un ##able to [SEP] ##s
            #                                        1    1    0   1    1    1
            # A piece after a special token is a word: its beginning was cut off.
            opens = word_starts(ids, vocabulary)
            opens[1:] |= special[:-1]
            chosen = _whole_words(candidates, opens[candidates], count, rng)
        case _:
            assert_never(masking.unit)
    chosen.sort()
    return chosen


def word_starts(ids: Ids, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return `(tokens)`: True where a word begins, by the tokens of a text without special ones."""
    opens = ~vocabulary.continues[ids]
    if vocabulary.ends is not None:
        opens[1:] |= vocabulary.ends[ids[:-1]]
    return opens


def masked_share(
    ids: Ids, length: int, masking: Masking, vocabulary: Vocabulary, rng: np.random.Generator
) -> float:
    """Return the predictions of a text as a share of those that `masking.rate` asks for.

    Whole words that exceed the rest of a sequence are skipped: where words are long, few are
    chosen.

    Args:
        ids: tokens of the text; cut into sequences of `length`, special tokens included.
    """
    asked = chosen = 0
    room, control = length - 2, np.array([vocabulary.mask], dtype=ids.dtype)
    for start in range(0, len(ids), room):
        sequence = np.concatenate([control, ids[start : start + room], control])
        asked += masking.count(len(sequence))
        chosen += len(_choose(sequence, masking, vocabulary, rng))
    return chosen / asked if asked else 1.0


def _whole_words(
    candidates: Places, opens: NDArray[np.bool_], count: int, rng: np.random.Generator
) -> Places:
    """Choose random words that fit in `count`; return their positions, unordered."""
    if len(candidates) == 0:
        return candidates
    # Word w is candidates[starts[w] : stops[w]]. opens 1 1 0 1 → words [0, 1), [1, 3), [3, 4).
    opens[0] = True
    starts = np.flatnonzero(opens)
    stops = np.append(starts[1:], len(candidates))
    order = rng.permutation(len(starts))
    taken, room = [], count
    for word, size in zip(order.tolist(), (stops - starts)[order].tolist(), strict=True):
        # A word that does not fit is skipped, not cut: a shorter one may still fit.
        if size <= room:
            taken.append(candidates[starts[word] : stops[word]])
            room -= size
            if room == 0:
                break
    return np.concatenate(taken) if taken else candidates[:0]


def _replace(
    hidden: Ids, masking: Masking, vocabulary: Vocabulary, rng: np.random.Generator
) -> Ids:
    """Return the replacements: [MASK], random tokens, or the tokens themselves."""
    # One uniform draw per token decides: [0, mask) → [MASK], then `random` → a random token, the
    # rest is unchanged. Random tokens are drawn for all, so that the draws do not depend on fates.
    fate = rng.random(len(hidden))
    match masking.replacements:
        case AnyToken():
            strangers = rng.integers(vocabulary.size, size=len(hidden))
        case OrdinaryToken():
            strangers = vocabulary.ordinary[
                rng.integers(len(vocabulary.ordinary), size=len(hidden))
            ]
        case _:
            assert_never(masking.replacements)
    changed = np.where(fate < masking.mask + masking.random, strangers, hidden)
    return np.where(fate < masking.mask, vocabulary.mask, changed).astype(hidden.dtype)
