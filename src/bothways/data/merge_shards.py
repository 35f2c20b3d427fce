"""The second stage of a corpus: shards are joined into flat arrays, without the documents that are
left out, which are counted by the step that leaves them out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.progress import SILENT, Progress
from bothways.core.sequence import Ids
from bothways.data.cleaning.apply import EXCERPT, LeftOutExample, choose_examples
from bothways.data.encode_shards import Shard, load_shard
from bothways.data.left_out import LeftOut, choose_documents
from bothways.data.manifest import (
    DOCUMENTS,
    SENTENCES,
    TOKENS,
    WORDS,
    CorpusSettings,
    Counts,
    StepCounts,
    Stored,
    TextRead,
)


@dataclass(frozen=True)
class Merged:
    """What the shards gave: counts, what was read, what each step left out, files, examples."""

    counts: Counts
    read: TextRead
    steps: tuple[StepCounts, ...]
    files: dict[str, Stored]
    examples: list[LeftOutExample]


class _Column:
    """An array that is written piece by piece, with its digest."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self._digest, self._bytes = file, hashlib.sha256(), 0

    def append(self, values: NDArray[Any]) -> None:
        """Write the next piece."""
        raw = np.ascontiguousarray(values).view(np.uint8).data
        self._file.write(raw)
        self._digest.update(raw)
        self._bytes += len(raw)

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
        bytes_end = len(values) // 8 * 8
        super().append(np.packbits(values[:bytes_end]))
        self._rest = values[bytes_end:]

    def finish(self) -> Stored:
        """Write the values that are left, and zeros to the end of their byte."""
        super().append(np.packbits(self._rest))
        return super().finish()


def merge_shards(
    shards: Sequence[Path],
    folder: Path,
    settings: CorpusSettings,
    decode: Callable[[Ids], str],
    progress: Progress = SILENT,
) -> Merged:
    """Join shards into `tokens.bin`, `sentences.bin` and `documents.bin` in `folder`, and
    `words.bin` if they hold words.

    Args:
        decode: returns the text of ids, for the examples.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        DataError: a shard is damaged.
    """
    left_out = choose_documents(shards, folder, settings.cleaning, progress)
    tally = _Tally(list(settings.cleaning.line_rules), left_out, decode)
    progress.stage("merging", len(shards))
    tokens = sentences = documents = 0
    with contextlib.ExitStack() as open_files:
        columns = {
            name: _Column(open_files.enter_context((folder / name).open("wb")))
            for name in (TOKENS, SENTENCES, DOCUMENTS)
        }
        if settings.words is not None:
            columns[WORDS] = _BitColumn(open_files.enter_context((folder / WORDS).open("wb")))
        columns[SENTENCES].append(np.zeros(1, dtype=np.uint64))
        columns[DOCUMENTS].append(np.zeros(1, dtype=np.uint64))
        for number, path in enumerate(shards, 1):
            shard = load_shard(path)
            ids, lengths, counts, begins = _keep(shard, tally.add(shard) == 0)
            columns[TOKENS].append(ids)
            if begins is not None:
                columns[WORDS].append(begins)
            columns[SENTENCES].append(tokens + np.cumsum(lengths, dtype=np.uint64))
            columns[DOCUMENTS].append(sentences + np.cumsum(counts, dtype=np.uint64))
            tokens, sentences = tokens + len(ids), sentences + len(lengths)
            documents += len(counts)
            progress.advance(number)
        files = {name: column.finish() for name, column in columns.items()}
    counts_of_all = Counts(documents, sentences, tokens)
    return Merged(counts_of_all, tally.read, tally.steps, files, tally.examples)


class _Tally:
    """What the steps left out, counted shard by shard.

    Args:
        line_rules: the names of the rules for lines.
        left_out: the fates of all documents.
        decode: returns the text of ids.
    """

    def __init__(
        self, line_rules: Sequence[str], left_out: LeftOut, decode: Callable[[Ids], str]
    ) -> None:
        self._line_rules, self._left_out, self._decode = line_rules, left_out, decode
        self._removed = np.zeros((len(line_rules), 2), dtype=np.int64)
        self._counts = np.zeros((len(left_out.steps) + 1, 2), dtype=np.int64)
        self._examples, self._texts = list[LeftOutExample](), dict[int, str]()
        self._shown = {n for e in left_out.near for n in (e.document, e.like) if n is not None}
        self._seen = 0

    def add(self, shard: Shard) -> NDArray[np.uint8]:
        """Count the next shard, keep the examples in it, and return the fates of its documents."""
        fates = self._left_out.fates[self._seen : self._seen + len(shard.counts)]
        self._removed += shard.removed
        self._counts[:, 0] += np.bincount(fates, minlength=len(self._counts))
        np.add.at(self._counts[:, 1], fates, shard.bytes)
        moved = [
            dataclasses.replace(example, document=example.document + self._seen)
            for example in shard.examples
        ]
        self._examples = choose_examples([*self._examples, *moved])
        edges = np.concatenate([[0], np.cumsum(shard.sizes, dtype=np.int64)])
        for number in self._shown:
            at = number - self._seen
            if not 0 <= at < len(fates):
                continue
            ids = shard.ids[edges[at] : edges[at + 1]][:EXCERPT].astype(np.int32)
            self._texts[number] = self._decode(ids)[:EXCERPT]
        self._seen += len(fates)
        return fates

    @property
    def read(self) -> TextRead:
        """The documents of the inputs, and their bytes."""
        return TextRead(self._seen, int(self._counts[:, 1].sum() + self._removed[:, 1].sum()))

    @property
    def steps(self) -> tuple[StepCounts, ...]:
        """The counts of each step, in their order."""
        lines = [
            StepCounts(name, 0, int(size), int(count))
            for name, (count, size) in zip(self._line_rules, self._removed, strict=True)
        ]
        documents = [
            StepCounts(name, int(count), int(size))
            for name, (count, size) in zip(self._left_out.steps, self._counts[1:], strict=True)
        ]
        return (*lines, *documents)

    @property
    def examples(self) -> list[LeftOutExample]:
        """Dropped lines and documents, step by step."""
        near = [
            dataclasses.replace(e, text=self._texts[e.document], like_text=self._texts[e.like])
            for e in self._left_out.near
            if e.like is not None
        ]
        order = [*self._line_rules, *self._left_out.steps]
        return sorted([*self._examples, *near], key=lambda e: (order.index(e.step), e.document))


def _keep(
    shard: Shard, remaining: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.bool_] | None]:
    if remaining.all():
        return shard.ids, shard.lengths, shard.counts, shard.begins
    sentences = np.repeat(remaining, shard.counts)
    tokens = np.repeat(sentences, shard.lengths)
    return (
        shard.ids[tokens],
        shard.lengths[sentences],
        shard.counts[remaining],
        None if shard.begins is None else shard.begins[tokens],
    )
