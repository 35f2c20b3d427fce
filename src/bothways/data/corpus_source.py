"""Corpora as a stream of sequences, planned from offsets and read from memory-mapped tokens.

The documents of an epoch have a keyed order, and so have the sequences of a block; every draw is
keyed by (seed, epoch, block). The data at a cursor depends on nothing read before it, and a
resumed run plans one window and one block again. `bothways.data.epoch_order` states the memory.
Static data, such as Google's duplicated instances, is the same stream with a period of
`data_copies` epochs.

Of several corpora, the share of each is its fraction of the drawn sequences. Sizes are counted in
tokens, not in documents or lines, which differ in length between languages. The corpus of the n-th
sequence is a draw keyed by (seed, n), and each corpus has its own cursor and its own epochs: ranks
and resumed runs read the same sequences. Memory grows with the number of corpora, not with their
sizes.

Smoothing: mBERT samples with α = 0.7 (google-research/bert, multilingual.md), XLM-R with 0.3
(Conneau et al. 2020, section 3.1).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.config.values import require_at_least
from bothways.core.errors import AGAIN, ConfigError, DataError
from bothways.core.files import local_path
from bothways.core.source import Cursor, Sequence, rng
from bothways.data.corpus import Corpus
from bothways.data.epoch_order import BLOCKS, DocumentIds, Selection
from bothways.data.segments import PairPlan, Segments, SpanPlan
from bothways.data.sentences import unpack_words
from bothways.text.template import Template, assemble
from bothways.text.trainers import smoothed_shares

if TYPE_CHECKING:
    from bothways.text.tokenizer import Tokenizer

CHUNK = 4096
"""Sequences whose corpora are drawn at a time."""


class CorpusSource:
    """Chosen documents of a corpus as an endless stream of sequences (a `core.source.Source`)."""

    def __init__(
        self,
        corpus: Corpus,
        template: Template,
        segments: Segments,
        ids: DocumentIds,
        seed: int,
        data_copies: int | None = None,
    ) -> None:
        """Plan the documents `ids` in each epoch, with the period of `data_copies` epochs.

        Raises:
            ConfigError: `data_copies` is below 1, or the template does not fit the segments.
            DataError: the documents have no text, or are too few for the segments.
        """
        require_at_least(1, data_copies=data_copies)
        self.template = template
        self.segments = segments
        self.seed = seed
        self.data_copies = data_copies
        self._corpus = corpus
        self._tokens = np.asarray(corpus.tokens)
        selection = self._selection = Selection(corpus, ids)
        self._plans = functools.lru_cache(maxsize=2)(
            lambda view, block: segments.plan(
                selection.open(seed, view, block),
                selection,
                rng(seed, "segments", epoch=view, index=block),
            )
        )
        segments.require(self._selection, template)

    def read(self, cursor: Cursor) -> Iterator[tuple[PairPlan | SpanPlan, Cursor]]:
        """Yield plans from `cursor` on, each with the cursor of the next.

        Raises:
            DataError: the cursor is of another corpus, or no sequence can be made of these
                documents.
        """
        epoch, block, item, _ = cursor
        _check_whole(self._corpus.sentences, self._corpus.documents)
        view, (window, index) = self._view(epoch), divmod(block, BLOCKS)
        if index >= self._selection.blocks(self.seed, view, window) or (
            item and item >= len(self._plans(view, block))
        ):
            message = f"no data at block {block}, item {item} of epoch {epoch}"
            fix = "Continue with the same corpus, split, seed and segments as the run."
            raise DataError(message, fix=fix)
        while True:
            if block == 0 and self.is_empty(epoch):  # which would repeat for ever
                message = f"no {self.segments.kind} sequence can be made of the chosen documents"
                raise DataError(message, where="segments", fix="Use other segments or more text.")
            view = self._view(epoch)
            numbers = self._selection.block_numbers(self.seed, view, block)
            following = next(numbers, None)
            while following is not None:
                _check_whole(self._corpus.sentences, self._corpus.documents)
                block, plans = following, self._plans(view, following)
                following = next(numbers, None)
                next_block = Cursor(epoch + 1) if following is None else Cursor(epoch, following)
                for index in range(item, len(plans)):
                    is_last = index + 1 == len(plans)
                    yield plans[index], next_block if is_last else Cursor(epoch, block, index + 1)
                item = 0
            epoch, block = epoch + 1, 0

    def is_empty(self, epoch: int) -> bool:
        """Return True if no sequence can be made of the documents in an epoch."""
        view = self._view(epoch)
        numbers = self._selection.block_numbers(self.seed, view)
        return not any(self._plans(view, block) for block in numbers)

    def build(self, plan: PairPlan | SpanPlan) -> Sequence:
        """Return the sequence of a plan; a pair has its label as `targets["pair"]`.

        Raises:
            DataError: a file of the corpus is shorter than when it was opened.
        """
        from bothways.core.batch import LabelTargets

        _check_whole(self._corpus.tokens, self._corpus.words)
        sequence = self._assembled(plan, lambda start, stop: self._tokens[start:stop])
        if (words := self._corpus.words) is not None:
            starts = self._assembled(plan, functools.partial(unpack_words, words))
            sequence = dataclasses.replace(sequence, word_starts=starts.ids.astype(np.bool_))
        if not isinstance(plan, PairPlan):
            return sequence
        label = LabelTargets(np.array([plan.label], dtype=np.int64))
        return dataclasses.replace(sequence, targets={"pair": label})

    def _assembled(
        self, plan: PairPlan | SpanPlan, read_slice: Callable[[int, int], NDArray[Any]]
    ) -> Sequence:
        """Return the texts of a plan with the special tokens around them."""
        match plan:
            case PairPlan(a, a_stop, b, b_stop):
                return assemble(read_slice(a, a_stop), read_slice(b, b_stop), self.template)
            case SpanPlan():
                first_document, *documents = (read_slice(*document) for document in plan.ranges)
                separator = self.template.after.ids
                separated = (x for document in documents for x in (separator, document))
                return assemble(np.concatenate([first_document, *separated]), None, self.template)
            case _:
                assert_never(plan)

    def key(self, cursor: Cursor) -> tuple[int, int]:
        return self._view(cursor.epoch), cursor.number

    def epochs(self, cursor: Cursor) -> float:
        """Return the epochs before this cursor, as `Selection.share_before` counts."""
        epoch, block, item, _ = cursor
        view = self._view(epoch)
        done = item / len(self._plans(view, block)) if item else 0.0
        return epoch + self._selection.share_before(self.seed, view, block, done)

    def unread(self, cursor: Cursor) -> tuple[DocumentIds, float]:
        """Return the ids of the documents unread before the cursor, in its epoch, and their share
        of the epoch.
        """
        view, selection, begun = self._view(cursor.epoch), self._selection, np.zeros(0, np.int64)
        if cursor.item:
            block = selection.open(self.seed, view, cursor.block)
            # A part of a document is contiguous: it holds the tokens from its first sentence on.
            order = np.argsort(block.starts[block.edges[:-1]])
            starts = block.starts[block.edges[:-1]][order]
            plans = self._plans(view, cursor.block)[: cursor.item]
            # The first token of each document that a plan reads in order, not at random.
            firsts = list[int]()
            for plan in plans:
                firsts += [plan.a] if isinstance(plan, PairPlan) else [a for a, _ in plan.ranges]
            documents = np.searchsorted(starts, firsts, side="right") - 1
            begun = block.owners[order[documents]]
        return selection.unread(self.seed, view, cursor.block, begun)

    def restricted(self, ids: DocumentIds) -> CorpusSource:
        """Return the same stream over other documents."""
        settings = (self.segments, ids, self.seed, self.data_copies)
        return CorpusSource(self._corpus, self.template, *settings)

    def _view(self, epoch: int) -> int:
        return epoch if self.data_copies is None else epoch % self.data_copies


class ContinuedSource:
    """A stream that continues the epoch in which another one ended, with segments of its own.

    The rest of that epoch has the documents of which the other one has read nothing; the epochs
    after it have all. The sequences of a block are shuffled, so that of an open block nearly all
    documents are begun: hardly any is left of a corpus of one block. The rest therefore counts as
    the share of an epoch that its documents are, and the next epoch begins where it ends.

    Args:
        previous: the stream of the phase before.
        end: where it ended.
        following: the stream of this phase over all documents.
    """

    def __init__(
        self, previous: CorpusSource | ContinuedSource, end: Cursor, following: CorpusSource
    ) -> None:
        self._first, self._after = end.epoch, following
        self._done = previous.epochs(end)
        unread, share = previous.unread(end)
        # Next sentence prediction needs two documents; a pair may need two tokens or sentences,
        # which documents that are never begun have not.
        remaining = following.restricted(unread) if len(unread) > 1 else None
        has_pairs = remaining is not None and not remaining.is_empty(end.epoch)
        self._rest = remaining if has_pairs else None
        self._share = share if self._rest else 0.0

    def read(self, cursor: Cursor) -> Iterator[tuple[PairPlan | SpanPlan, Cursor]]:
        """Yield plans from `cursor` on, each with the cursor of the next."""
        if cursor.epoch == self._first:
            for plan, following in self._rest.read(cursor) if self._rest else ():
                yield plan, following
                if following.epoch > self._first:
                    break
            cursor = Cursor(self._first + 1)
        yield from self._after.read(cursor)

    def build(self, plan: PairPlan | SpanPlan) -> Sequence:
        return self._after.build(plan)

    def key(self, cursor: Cursor) -> tuple[int, int]:
        return self._after.key(cursor)

    def epochs(self, cursor: Cursor) -> float:
        """Return the epochs before this cursor, the other stream's included."""
        if cursor.epoch > self._first:
            return self._done + self._share + self._after.epochs(cursor) - self._first - 1
        fraction = 0.0 if self._rest is None else self._rest.epochs(cursor) - self._first
        return self._done + self._share * fraction

    def unread(self, cursor: Cursor) -> tuple[DocumentIds, float]:
        """Return the ids of the documents of which nothing was read, in the cursor's epoch, and
        their share of an epoch.
        """
        source = self._rest if cursor.epoch == self._first else self._after
        if source is None:
            return np.zeros(0, np.int64), 0.0
        ids, share = source.unread(cursor)
        return ids, share * (self._share if source is self._rest else 1.0)


def _check_whole(*arrays: NDArray[Any] | None) -> None:
    """Raise DataError if a file was cut short: reading what is gone would end the process."""
    for array in arrays:
        mapped = getattr(array, "_mmap", None)  # None in a copy
        if isinstance(array, np.memmap) and mapped is not None and mapped.size() < array.nbytes:
            message = "is shorter than when it was opened: something has written to it"
            fix = f"Restore it, then {AGAIN}; a corpus must stay as it is."
            raise DataError(message, where=str(array.filename), fix=fix)


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
            require_at_least(0, "mixture", **{f"weights.{name}": weight})
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
            total = math.fsum(weights.values())  # `sum` differs between Pythons
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

    @functools.cached_property
    def token_counts(self) -> NDArray[np.int64]:
        """The occurrences of each token of the vocabulary, `(V)`, as often as training reads it."""
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
        """Return the number of the stream that the sequence at this index is from."""
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
