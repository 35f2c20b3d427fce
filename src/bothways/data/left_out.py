"""Which documents of all shards a corpus leaves out, and by which step, with notes about it.

Exact de-duplication by a 128-bit digest of a document's sentences; the first occurrence stays. A
digest takes 16 bytes, and sixteen passes over a sixteenth of the digests each need little more:
about 20 bytes a document in all, 40 for a moment. Near-duplicates are searched for among the rest
(`cleaning.near_duplicates`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError, argument, render
from bothways.core.progress import SILENT, Progress
from bothways.data.cleaning.config import Cleaning
from bothways.data.cleaning.near_duplicates import SignedTexts, find_near_duplicates
from bothways.data.cleaning.shingles import ShingleTable
from bothways.data.encode_shards import load_index, load_signed
from bothways.data.manifest import StepCounts, map_array
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
            shingles.write(signed.shingles.values[np.repeat(mask, signed.shingles.counts)].data)
            counts.append(signed.shingles.counts[mask])
            offset += len(mask)
    texts = SignedTexts(
        ShingleTable(map_array(folder / SHINGLES, "uint32"), np.cumsum(np.concatenate(counts))),
        map_array(folder / SIGNATURES, "uint16").reshape(-1, cleaning.near_duplicates.permutations),
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
    cleaning: Cleaning, language: str, documents: int, steps: Sequence[StepCounts]
) -> Iterator[str]:
    """Yield a note for each rule that left out more than half of the documents.

    Args:
        documents: the number of documents of the inputs.
        steps: counts of dropped documents and lines, by step.
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
    folder: Path, cleaning: Cleaning, documents: int, steps: Sequence[StepCounts]
) -> DataError:
    """Return the error about a corpus without documents, which names what left them out.

    Args:
        folder: the folder.
        cleaning: the steps that were taken.
        documents: the number of documents of the inputs.
        steps: counts of dropped documents and lines, by step.
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
