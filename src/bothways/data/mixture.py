"""Several corpora as one stream: which corpus the next sequence is from, and how often.

The share of a corpus is its fraction of the drawn sequences. Sizes are counted in tokens, not in
documents or lines, which differ in length between languages. The corpus of the n-th sequence is a
draw keyed by (seed, n), and each corpus has its own cursor and its own epochs: ranks and resumed
runs read the same sequences. Memory grows with the number of corpora, not with their sizes.

Smoothing: mBERT samples with α = 0.7 (google-research/bert, multilingual.md), XLM-R with 0.3
(Conneau et al. 2020, section 3.1).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.errors import ConfigError, DataError
from bothways.core.files import local_path
from bothways.core.source import Cursor, Sequence, rng
from bothways.data.corpus import Corpus
from bothways.data.segments import PairPlan, SpanPlan
from bothways.text.trainers import smoothed_shares

if TYPE_CHECKING:
    from bothways.data.corpus_source import ContinuedSource, CorpusSource
    from bothways.text.tokenizer import Tokenizer

CHUNK = 4096
"""Sequences whose corpora are drawn at a time."""


@dataclass(frozen=True)
class Smoothed:
    """Shares proportional to size^alpha: 1 for the sizes as they are, 0 for equal shares."""

    alpha: float = 0.7
    kind: Literal["smoothed"] = "smoothed"

    def __post_init__(self) -> None:
        smoothed_shares({}, self.alpha)  # raises ConfigError


@dataclass(frozen=True)
class ByWeight:
    """Shares in proportion to given weights, by the name of the corpus; 0 to skip it in a phase."""

    weights: Mapping[str, float | int]
    kind: Literal["by_weight"] = "by_weight"

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not 0 <= weight < math.inf:
                message = f"must be at least 0 and finite, not {weight:g}"
                raise ConfigError(message, where=f"mixture.weights.{name}")
        if self.weights and not any(self.weights.values()):
            fix = "Give the corpora that are to be read a weight above 0."
            raise ConfigError("are all 0", where="mixture.weights", fix=fix)


Mixture = Smoothed | ByWeight


def shares_of(
    mixture: Mixture, sizes: Mapping[str, int], where: str = "mixture"
) -> dict[str, float]:
    """Return the share of each name; the shares add up to 1.

    Raises:
        ConfigError: the weights are not those of exactly these names.
        DataError: a size is 0.
    """
    smoothed = smoothed_shares(sizes, mixture.alpha if isinstance(mixture, Smoothed) else 1.0)
    match mixture:
        case Smoothed():
            return smoothed
        case ByWeight(weights):
            if weights.keys() != sizes.keys():
                actual, expected = (", ".join(sorted(names)) for names in (weights, sizes))
                message = f"has weights for {actual or 'none'}, and there are {expected or 'none'}"
                fix = "Give each corpus a weight, by its name."
                raise ConfigError(message, where=f"{where}.weights", fix=fix)
            total = sum(weights.values())
            return {name: weights[name] / total for name in sizes}
        case _:
            assert_never(mixture)


@dataclass(frozen=True)
class Corpora:
    """Corpora with one tokenizer, by name, and the share of the sequences drawn from each.

    They are in the order of their names. A single corpus has the name "".
    """

    parts: Mapping[str, Corpus]
    shares: Mapping[str, float]

    @classmethod
    def of(cls, corpora: Corpus | Mapping[str, Corpus], mixture: Mixture | None) -> Corpora:
        """Return the corpora with the shares of a mixture; None means `Smoothed()`.

        Raises:
            ConfigError: the corpora have different tokenizers, or the weights do not fit.
            DataError: there is no corpus, or one without text.
        """
        if isinstance(corpora, Corpus):
            if mixture is not None:
                message = "there is one corpus, and a mixture is of several"
                raise ConfigError(message, where="mixture", fix="Leave it out.")
            return cls({"": corpora}, {"": 1.0})
        if not corpora:
            raise DataError("there is no corpus", fix="Give one or more.")
        # Draws and cursors count the corpora: in whatever order they are given, it is one run.
        corpora = dict(sorted(corpora.items()))
        (first_name, reference), *remaining = corpora.items()
        for name, corpus in remaining:
            if corpus.tokenizer.fingerprint != reference.tokenizer.fingerprint:
                names = f"{first_name!r} ({reference.folder}) and {name!r} ({corpus.folder})"
                message = f"the corpora {names} were built with different tokenizers"
                fix = "Build all of them with one: train it on text of all of them."
                raise ConfigError(message, where="corpus", fix=fix)
        return cls(corpora, shares_of(mixture or Smoothed(), _sizes(corpora)))

    def shares_with(self, mixture: Mixture | None, where: str = "mixture") -> Mapping[str, float]:
        """Return the shares of the sequences in a phase with this mixture; None for `shares`.

        Raises:
            ConfigError: the weights do not fit the corpora; `where` is the setting.
        """
        if mixture is None:
            return self.shares
        return shares_of(mixture, _sizes(self.parts), where)

    @property
    def first(self) -> Corpus:
        """The first corpus, whose tokenizer is that of all."""
        return next(iter(self.parts.values()))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids of all corpora."""
        return self.first.tokenizer

    @property
    def tokens(self) -> int:
        """The number of tokens of all corpora."""
        return sum(corpus.manifest.counts.tokens for corpus in self.parts.values())

    @property
    def documents(self) -> int:
        """The number of documents of all corpora."""
        return sum(len(corpus) for corpus in self.parts.values())

    @functools.cached_property
    def token_counts(self) -> NDArray[np.int64]:
        """The occurrences of each token of the vocabulary, `(V)`, as often as training reads it."""
        if len(self.parts) == 1:
            return self.first.token_counts
        # A corpus that is read r times in an epoch counts each of its tokens r times.
        scaled = (
            corpus.token_counts * (self.shares[name] * self.tokens / corpus.manifest.counts.tokens)
            for name, corpus in self.parts.items()
        )
        counts: NDArray[np.int64] = np.rint(np.sum(list(scaled), axis=0)).astype(np.int64)
        return counts

    def fingerprint(self) -> str:
        """Return the SHA-256 of the arrays and tokenizers, and of the names if there are several.

        The shares are settings of the run, which its checkpoints compare by themselves.
        """
        digests = {name: corpus.fingerprint for name, corpus in self.parts.items()}
        if len(digests) == 1:
            return digests.popitem()[1]
        return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def _sizes(corpora: Mapping[str, Corpus]) -> dict[str, int]:
    return {name: corpus.manifest.counts.tokens for name, corpus in corpora.items()}


def corpus_names(folders: Many[str | Path]) -> list[str]:
    """Return a name for each folder: its own, after those around it where two are equal.

    Example: en/corpus and zh/corpus → en-corpus and zh-corpus. Dots, which separate the keys of
    settings, become hyphens.

    Raises:
        ConfigError: a folder is given twice.
    """
    path_parts = [local_path(folder).absolute().parts[1:] for folder in folders]
    for depth in range(1, max(map(len, path_parts), default=0) + 1):
        names = ["-".join(folder_path[-depth:]).replace(".", "-") for folder_path in path_parts]
        if len(set(names)) == len(names):
            return names
    message = f"{', '.join(map(str, folders))}: a corpus is given twice"
    raise ConfigError(message, where="corpus", fix="Give each once, and its share in mixture.")


class MixedPlan(NamedTuple):
    """A plan of one of the streams."""

    number: int
    plan: PairPlan | SpanPlan

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.plan.length


class MixedSource:
    """Sequences drawn from several streams, in shares, without end (a `core.source.Source`).

    It has one endless epoch, so that steps cross the ends of the epochs of the corpora. `epochs`
    is their mean by size: one epoch is as much text as all corpora hold.

    Args:
        shares: the probability of each stream, which add up to 1.
        sizes: the tokens of each, for `epochs`.
    """

    def __init__(
        self,
        sources: Many[CorpusSource | ContinuedSource],
        shares: Many[float],
        sizes: Many[int],
        seed: int,
    ) -> None:
        self._sources = sources
        self._weights = np.array(sizes) / sum(sizes)
        probabilities = np.array(shares)
        # The streams of the sequences of a chunk.
        self._chunk = functools.lru_cache(maxsize=2)(
            lambda chunk: rng(seed, "mixture", index=chunk).choice(
                len(probabilities), CHUNK, p=probabilities
            )
        )

    def source_at(self, index: int) -> int:
        """Return the number of the stream that the sequence at this place is from."""
        return int(self._chunk(index // CHUNK)[index % CHUNK])

    def read(self, cursor: Cursor) -> Iterator[tuple[MixedPlan, Cursor]]:
        """Yield plans from `cursor` on, each with the cursor of the next.

        Raises:
            DataError: the cursor is of other corpora.
        """
        cursors = self._parts(cursor)
        streams: dict[int, Iterator[tuple[Any, Cursor]]] = {}
        for index in itertools.count(cursor.item):
            number = self.source_at(index)
            if number not in streams:
                streams[number] = self._sources[number].read(cursors[number])
            plan, next_cursor = next(streams[number])
            cursors = (*cursors[:number], next_cursor, *cursors[number + 1 :])
            yield MixedPlan(number, plan), Cursor(0, 0, index + 1, cursors)

    def build(self, plan: MixedPlan) -> Sequence:
        return self._sources[plan.number].build(plan.plan)

    def key(self, cursor: Cursor) -> tuple[int, int]:
        """Return the key of the draws for the sequence at a cursor; no two corpora share one."""
        number = self.source_at(cursor.item)
        epoch, index = self._sources[number].key(self._parts(cursor)[number])
        return epoch * len(self._sources) + number, index

    def epochs(self, cursor: Cursor) -> float:
        """Return the epochs before this cursor: the mean over the corpora, by size."""
        pairs = zip(self._sources, self._parts(cursor), strict=True)
        return float(self._weights @ [source.epochs(part) for source, part in pairs])

    def _parts(self, cursor: Cursor) -> tuple[Cursor, ...]:
        cursors = cursor.parts or (Cursor(),) * len(self._sources)
        if len(cursors) != len(self._sources) or cursor.epoch or cursor.block:
            message = f"no data at {cursor} of a mixture of {len(self._sources)} corpora"
            raise DataError(message, fix="Continue with the corpora of the run.")
        return cursors
