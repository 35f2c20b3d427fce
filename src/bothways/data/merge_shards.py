"""The second stage of a corpus: shards are joined into flat arrays, without the documents that are
left out, which are counted by the step that leaves them out, with notes about it.

Exact de-duplication by a 128-bit digest of a document's sentences; the first occurrence stays. A
digest takes 16 bytes, and sixteen passes over a sixteenth of the digests each need little more:
about 20 bytes a document in all, 40 for a moment. Near-duplicates are searched for among the rest
(`cleaning.near_duplicates`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError, argument, render
from bothways.core.progress import SILENT, Progress
from bothways.data import manifest
from bothways.data.cleaning.config import Cleaning
from bothways.data.cleaning.near_duplicates import SignedTexts, find_near_duplicates
from bothways.data.encode_shards import load_index, load_shard, load_signed
from bothways.data.sentences import AUTO

SIGNATURES, SHINGLES = "signatures.bin", "shingles.bin"
"""Files next to the shards, as long as near-duplicates are searched for."""

SHORT, DUPLICATE, NEAR = "min_tokens", "duplicates", "near_duplicates"
"""The names of the steps that follow the rules."""


def choose_documents(
    shards: Sequence[Path], folder: Path, cleaning: Cleaning, progress: Progress = SILENT
) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    """Decide which of the D documents of all shards stay.

    Args:
        folder: for files that are deleted afterwards.

    Returns:
        The names of the steps that leave out documents, in their order; `(D)` 0 for a document that
        stays, or 1 + the place of the step that leaves it out.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        DataError: a shard is damaged.
    """
    near = [NEAR] if cleaning.near_duplicates else []
    steps = (*cleaning.document_rules, SHORT, DUPLICATE, *near)
    fate = {name: np.uint8(number) for number, name in enumerate(steps, 1)}
    digests, shard_fates = [np.zeros((0, 16), dtype=np.uint8)], [np.zeros(0, dtype=np.uint8)]
    for path in shards:
        sizes, shard_digests, stored_fates = load_index(path)
        short = (sizes < cleaning.min_tokens) & (stored_fates == 0)
        shard_fates.append(np.where(short, fate[SHORT], stored_fates))
        digests.append(shard_digests)
    fates, rows = np.concatenate(shard_fates), np.concatenate(digests)
    fates[(fates == 0) & ~first_occurrences(rows)] = fate[DUPLICATE]
    if cleaning.near_duplicates is None:
        return steps, fates
    remaining = np.flatnonzero(fates == 0)
    # What is compared of the documents that stay so far is written to files, which are mapped.
    offset, counts = 0, [np.zeros(1, dtype=np.int64)]
    with contextlib.ExitStack() as files:
        signatures, shingles = (
            files.enter_context((folder / name).open("wb")) for name in (SIGNATURES, SHINGLES)
        )
        for path in shards:
            signed = load_signed(path)
            mask = fates[offset : offset + len(signed.signatures)] == 0
            signatures.write(signed.signatures[mask].data)
            shingles.write(signed.shingles[np.repeat(mask, signed.counts)].data)
            counts.append(signed.counts[mask])
            offset += len(mask)
    permutations = cleaning.near_duplicates.permutations
    texts = SignedTexts(
        manifest.map_array(folder / SHINGLES, "uint32"),
        np.cumsum(np.concatenate(counts)),
        manifest.map_array(folder / SIGNATURES, "uint16").reshape(-1, permutations),
    )
    del counts
    # Only documents that are still there are compared: `repeated` counts among them.
    repeated = find_near_duplicates(texts, cleaning.near_duplicates, progress)
    for name in (SIGNATURES, SHINGLES):
        (folder / name).unlink()
    fates[remaining[repeated]] = fate[NEAR]
    return steps, fates


def first_occurrences(digests: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return `(D)`, True where no earlier row of the `(D, 16)` digests is equal.

    Example: the rows a, b, a, c, b → True, True, False, True, False.
    """
    is_first = np.ones(len(digests), dtype=np.bool_)
    words = digests.view(np.uint64)
    part_of = digests[:, 0] >> 4
    for sixteenth in range(16):
        rows = np.flatnonzero(part_of == sixteenth)
        # Stable: of equal digests the earliest comes first.
        order = rows[np.lexsort((words[rows, 1], words[rows, 0]))]
        repeated = (words[order[1:]] == words[order[:-1]]).all(axis=1)
        is_first[order[1:][repeated]] = False
    return is_first


_UNSPACED = ("zh", "ja", "th", "lo", "my", "km")
_MOST = 0.5


def unsuited_steps(cleaning: Cleaning, language: str) -> Iterator[str]:
    """Yield a note for each step that does nothing for documents of a language, or too little."""
    if language == AUTO:
        return
    stop_words = cleaning.stop_words
    if stop_words and stop_words.language != language:
        yield (
            f"stop_words is a list for {stop_words.language}: it leaves out no document in "
            f"{language}. For a list of your own set stop_words.words and stop_words.language."
        )
    if cleaning.unwanted_lines and language != "en":
        yield f"unwanted_lines looks for English phrases; the documents are in {language}."
    if cleaning.mean_word_length and language in _UNSPACED:
        yield f"mean_word_length does not apply to {language}, where words have no spaces."


def large_steps(
    cleaning: Cleaning, language: str, documents: int, steps: Sequence[manifest.StepCounts]
) -> Iterator[str]:
    """Yield a note for each rule that left out more than half of the documents.

    Args:
        documents: the number of documents of the inputs.
    """
    for step in steps:
        if step.name in cleaning.document_rules and step.documents > _MOST * documents:
            note = f"{step.name} left out {step.documents / documents:.0%} of the documents"
            if step.name == "stop_words" and language == AUTO:
                setting = render(argument(language="CODE"))
                yield f"{note}. If they are not English, give their {setting}."
            else:
                yield f"{note}: are its settings right for them?"


def nothing_left(
    folder: Path, cleaning: Cleaning, documents: int, steps: Sequence[manifest.StepCounts]
) -> DataError:
    """Return the error about a corpus without documents, which names what left them out.

    Args:
        documents: the number of documents of the inputs.
    """
    left = [step for step in steps if step.documents]
    if not left:
        return DataError("the inputs have no document", where=folder, fix="Give other inputs.")
    if [step.name for step in left] == [SHORT]:
        least, short = cleaning.min_tokens, left[0].documents
        message = f"the inputs have no document with {least:,} tokens or more; {short:,} have fewer"
        fix = f"Set a lower {argument(min_tokens='N')}, or give other inputs."
        return DataError(message, where=folder, fix=fix)
    reasons = ", ".join(f"{step.name} {step.documents:,}" for step in left)
    message = f"the cleaning left out all {documents:,} documents: {reasons}"
    fix = "Change the settings of these steps, or leave some out, such as word_count=none."
    return DataError(message, where=folder, fix=fix)


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
