"""The second stage of a corpus: shards are joined into flat arrays, without duplicate documents.

Exact de-duplication by a 128-bit digest of a document's sentences; the first occurrence stays. A
digest takes 16 bytes, and sixteen passes over a sixteenth of the digests each need little more:
about 20 bytes a document in all, 40 for a moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.progress import SILENT, Progress
from bothways.data.encode_shards import Shard, load_index, load_shard
from bothways.data.manifest import DOCUMENTS, SENTENCES, TOKENS, WORDS, Counts, Stored


class _Column:
    """An array that is written piece by piece, with its digest."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._bytes = 0

    def append(self, values: NDArray[Any]) -> None:
        """Write the next piece."""
        raw = np.ascontiguousarray(values).data
        self._file.write(raw)
        self._digest.update(raw)
        self._bytes += values.nbytes

    def finish(self) -> Stored:
        """Flush the file to disk; return its size and digest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return Stored(self._bytes, self._digest.hexdigest())


class _BitColumn(_Column):
    """Truth values that are written piece by piece, eight in a byte, the first one highest."""

    def __init__(self, file: io.BufferedWriter) -> None:
        super().__init__(file)
        self._rest = np.zeros(0, dtype=np.bool_)

    def append(self, values: NDArray[Any]) -> None:
        """Write the next piece; up to seven values wait for the one after it."""
        values = np.concatenate([self._rest, values])
        whole = len(values) // 8 * 8
        super().append(np.packbits(values[:whole]))
        self._rest = values[whole:]

    def finish(self) -> Stored:
        """Write the values that are left, and zeros to the end of their byte."""
        super().append(np.packbits(self._rest))
        return super().finish()


def first_occurrences(digests: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return `(D)`, True where no earlier row of the `(D, 16)` digests is equal.

    Example: the rows a, b, a, c, b → True, True, False, True, False.
    """
    first = np.ones(len(digests), dtype=np.bool_)
    words = digests.view(np.uint64)
    part_of = digests[:, 0] >> 4
    for part in range(16):
        rows = np.flatnonzero(part_of == part)
        # Stable: of equal digests the earliest comes first.
        order = rows[np.lexsort((words[rows, 1], words[rows, 0]))]
        repeated = (words[order[1:]] == words[order[:-1]]).all(axis=1)
        first[order[1:][repeated]] = False
    return first


def merge_shards(
    shards: Sequence[Path],
    folder: Path,
    min_tokens: int,
    progress: Progress = SILENT,
    words: bool = False,
) -> tuple[Counts, dict[str, Stored]]:
    """Join shards into `tokens.bin`, `sentences.bin` and `documents.bin` in `folder`, and
    `words.bin` if they hold words.

    Args:
        min_tokens: documents with fewer tokens are left out.
        words: whether the shards hold words.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        DataError: a shard is damaged.
    """
    progress.stage("merging", len(shards))
    enough, kept = _choose(shards, min_tokens)
    tokens = sentences = documents = seen = 0
    with contextlib.ExitStack() as open_files:
        columns = {
            name: _Column(open_files.enter_context((folder / name).open("wb")))
            for name in (TOKENS, SENTENCES, DOCUMENTS)
        }
        if words:
            columns[WORDS] = _BitColumn(open_files.enter_context((folder / WORDS).open("wb")))
        columns[SENTENCES].append(np.zeros(1, dtype=np.uint64))
        columns[DOCUMENTS].append(np.zeros(1, dtype=np.uint64))
        for number, path in enumerate(shards, 1):
            shard = load_shard(path)
            ids, lengths, counts, begins = _keep(shard, kept[seen : seen + len(shard.counts)])
            columns[TOKENS].append(ids)
            if begins is not None:
                columns[WORDS].append(begins)
            columns[SENTENCES].append(tokens + np.cumsum(lengths, dtype=np.uint64))
            columns[DOCUMENTS].append(sentences + np.cumsum(counts, dtype=np.uint64))
            seen += len(shard.counts)
            tokens, sentences = tokens + len(ids), sentences + len(lengths)
            documents += len(counts)
            progress.advance(number)
        files = {name: column.finish() for name, column in columns.items()}
    short = seen - int(enough.sum())
    return Counts(documents, sentences, tokens, seen - documents - short, short), files


def _choose(shards: Sequence[Path], min_tokens: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return, for each document of all shards, whether it is long enough, and whether it stays."""
    digests, long_enough = [np.zeros((0, 16), dtype=np.uint8)], [np.zeros(0, dtype=np.bool_)]
    for path in shards:
        sizes, own = load_index(path)
        digests.append(own)
        long_enough.append(sizes >= min_tokens)
    enough = np.concatenate(long_enough)
    return enough, enough & first_occurrences(np.concatenate(digests))


def _keep(
    shard: Shard, kept: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.bool_] | None]:
    if kept.all():
        return shard.ids, shard.lengths, shard.counts, shard.begins
    sentences = np.repeat(kept, shard.counts)
    tokens = np.repeat(sentences, shard.lengths)
    return (
        shard.ids[tokens],
        shard.lengths[sentences],
        shard.counts[kept],
        None if shard.begins is None else shard.begins[tokens],
    )
