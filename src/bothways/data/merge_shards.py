"""The second stage of a corpus: shards are joined into flat arrays, without the documents that are
left out, which are counted by the step that leaves them out."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.progress import SILENT, Progress
from bothways.data import manifest
from bothways.data.encode_shards import load_shard
from bothways.data.left_out import choose_documents


@dataclass(frozen=True)
class Merged:
    """What the shards gave: counts, what was read, what each step left out, files."""

    counts: manifest.Counts
    read: manifest.TextRead
    steps: tuple[manifest.StepCounts, ...]
    files: dict[str, manifest.Stored]


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

    def finish(self) -> manifest.Stored:
        """Flush the file to disk; return its size and digest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return manifest.Stored(self._bytes, self._digest.hexdigest())


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

    def finish(self) -> manifest.Stored:
        """Write the values that are left, and zeros to the end of their byte."""
        super().append(np.packbits(self._rest))
        return super().finish()


def merge_shards(
    shards: Sequence[Path],
    folder: Path,
    settings: manifest.CorpusSettings,
    progress: Progress = SILENT,
) -> Merged:
    """Join shards into `tokens.bin`, `sentences.bin` and `documents.bin` in `folder`, and
    `words.bin` if they hold words.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        DataError: a shard is damaged.
    """
    step_names, all_fates = choose_documents(shards, folder, settings.cleaning, progress)
    removed = np.zeros((len(settings.cleaning.line_rules), 2), dtype=np.int64)
    # Documents and bytes by fate: 0 for those that stay, then a row for each step.
    by_fate = np.zeros((len(step_names) + 1, 2), dtype=np.int64)
    progress.stage("merging", len(shards))
    tokens = sentences = documents_read = words = 0
    with contextlib.ExitStack() as open_files:
        columns = {
            name: _Column(open_files.enter_context((folder / name).open("wb")))
            for name in (manifest.TOKENS, manifest.SENTENCES, manifest.DOCUMENTS)
        }
        if settings.words is not None:
            columns[manifest.WORDS] = _BitColumn(
                open_files.enter_context((folder / manifest.WORDS).open("wb"))
            )
        columns[manifest.SENTENCES].append(np.zeros(1, dtype=np.uint64))
        columns[manifest.DOCUMENTS].append(np.zeros(1, dtype=np.uint64))
        for number, path in enumerate(shards, 1):
            shard = load_shard(path)
            fates = all_fates[documents_read : documents_read + len(shard.counts)]
            documents_read += len(fates)
            removed += shard.removed
            by_fate[:, 0] += np.bincount(fates, minlength=len(by_fate))
            np.add.at(by_fate[:, 1], fates, shard.bytes)
            ids, lengths, counts, begins = shard.ids, shard.lengths, shard.counts, shard.begins
            remaining = fates == 0
            if not remaining.all():
                # One mark for each document becomes one for each of its sentences, then of their
                # tokens.
                marks = np.repeat(remaining, counts)
                token_marks = np.repeat(marks, lengths)
                ids, lengths, counts = ids[token_marks], lengths[marks], counts[remaining]
                begins = None if begins is None else begins[token_marks]
            columns[manifest.TOKENS].append(ids)
            if begins is not None:
                columns[manifest.WORDS].append(begins)
            columns[manifest.SENTENCES].append(tokens + np.cumsum(lengths, dtype=np.uint64))
            columns[manifest.DOCUMENTS].append(sentences + np.cumsum(counts, dtype=np.uint64))
            tokens, sentences = tokens + len(ids), sentences + len(lengths)
            words += int(shard.words[remaining].sum())
            progress.advance(number)
        files = {name: column.finish() for name, column in columns.items()}
    text_read = manifest.TextRead(documents_read, int(by_fate[:, 1].sum() + removed[:, 1].sum()))
    lines = (
        manifest.StepCounts(name, 0, int(size), int(count))
        for name, (count, size) in zip(settings.cleaning.line_rules, removed, strict=True)
    )
    steps = (
        manifest.StepCounts(name, int(count), int(size))
        for name, (count, size) in zip(step_names, by_fate[1:], strict=True)
    )
    counted = manifest.Counts(int(by_fate[0, 0]), sentences, tokens, words)
    return Merged(counted, text_read, (*lines, *steps), files)
