"""The two stages of a corpus: documents → shards of sentences and ids, in any process, which are
joined into flat arrays, without the documents that the cleaning leaves out.

Where shards begin depends only on the documents, so the number of processes cannot change a byte. A
shard's file is named after a digest of everything that it is made from. The existence of the file
marks the work as done, so an interrupted build continues with the missing shards.

A shard has these arrays, of D documents as S sentences and T tokens:

    ids         `(T)`
    lengths     `(S)` tokens of each sentence, none of them 0
    counts      `(D)` sentences of each document
    sizes       `(D)` tokens of each document
    digests     `(D, 16)` digests of the sentences of each document
    bytes       `(D)` bytes of each document in UTF-8, without lines that were removed
    words       `(D)` words of each document, separated by white space, without these lines
    fates       `(D)` 0, or 1 + the index of the rule that rejects the document
    removed     `(L, 2)` lines and bytes that each rule for lines removed
    begins      `(T)` True where a word begins; only if words are stored
    signatures, shingles, shingle_counts
                of the `SignedTexts`; only if near-duplicates are searched for

Exact de-duplication by a 128-bit digest of a document's sentences; the first occurrence stays. A
digest takes 16 bytes, and sixteen passes over a sixteenth of the digests each need little more:
about 20 bytes a document in all, 40 for a moment. Near-duplicates are searched for among the rest
(`cleaning.near_duplicates`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bothways.core.config.reader import fingerprint
from bothways.core.errors import DataError, argument, render, setting
from bothways.core.files import replace_file, without_surrogates
from bothways.core.progress import SILENT, Progress
from bothways.data import manifest
from bothways.data.cleaning.config import Cleaning, clean_texts
from bothways.data.cleaning.near_duplicates import SignedTexts, find_near_duplicates
from bothways.data.documents import Document
from bothways.data.sentences import AUTO, Words, detect_language, encode_words, split_sentences
from bothways.text.tokenizer import Tokenizer

SHARD_CHARACTERS = 2**22
"""A shard ends with the document that reaches this many characters."""

DIGEST_BYTES = 16
_LAYOUT = "3"  # of the files: those of another layout are made again

Shard = dict[str, Any]


class Job(NamedTuple):
    """A shard to make: the name of its file, and the texts of its documents."""

    name: str
    texts: list[str]


def token_type(size: int) -> Literal["uint16", "uint32"]:
    """Return the NumPy type in which the ids of a vocabulary of this size are stored."""
    return "uint16" if size <= 2**16 else "uint32"


def cut_shards(documents: Iterable[Document], settings: manifest.CorpusSettings) -> Iterator[Job]:
    """Group documents into jobs of about four million characters each, in order."""
    words = [] if settings.words is None else [settings.words]
    # Fewer tokens than a number are counted when the shards are joined.
    steps = fingerprint(dataclasses.replace(settings.cleaning, min_tokens=1))
    fields = [_LAYOUT, settings.tokenizer, settings.language, settings.splitter, *words, steps]
    key = "\0".join(fields).encode()
    texts, size, number = list[str](), 0, 0
    for document in itertools.chain(documents, [None]):
        if document is not None:
            texts.append(document.text)
            size += len(document.text)
        if texts and (document is None or size >= SHARD_CHARACTERS):
            digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES)
            for text in texts:
                raw = text.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "little"))
                digest.update(raw)
            yield Job(f"{number:07d}-{digest.hexdigest()}.npz", texts)
            texts, size, number = [], 0, number + 1


def encode_shard(
    tokenizer: Tokenizer, words: Words | None, settings: manifest.CorpusSettings, job: Job
) -> tuple[str, Shard]:
    """Split and encode the documents of a job; return the name of its file and its contents.

    Example: the texts ["A b. C.", "D."] → sentences A b. | C. | D.; lengths [3, 2, 2]; counts
    [2, 1]; sizes [5, 2].
    """
    texts = [without_surrogates(text) for text in job.texts]
    detected = settings.language == AUTO
    languages = [detect_language(text) if detected else settings.language for text in texts]
    split = functools.cache(split_sentences)  # a rule may have counted the sentences
    cleaned = clean_texts(texts, languages, settings.cleaning, split)
    # Documents that a rule rejects have no sentences.
    documents = [
        [] if fate else split(text, language)
        for text, language, fate in zip(cleaned.texts, languages, cleaned.fates, strict=True)
    ]
    flat = [*itertools.chain.from_iterable(documents)]
    shard: Shard = {}
    if words is None:
        ids, lengths = tokenizer.encode_flat(flat)
    else:
        flat, ids, lengths, shard["begins"] = encode_words(tokenizer, flat, words)
    sizes = [*map(len, documents)]
    owners = np.repeat(np.arange(len(documents)), sizes)
    filled = lengths > 0  # a sentence of control characters has no tokens
    sentences = iter(flat)
    documents_text = ("\n".join(itertools.islice(sentences, size)).encode() for size in sizes)
    digests = b"".join(
        hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest() for text in documents_text
    )
    shard |= {
        "ids": ids.astype(token_type(tokenizer.size)),
        "lengths": lengths[filled].astype(np.uint32),
        "counts": np.bincount(owners[filled], minlength=len(documents)).astype(np.uint32),
        "sizes": np.bincount(owners, lengths, len(documents)).astype(np.uint32),
        "digests": np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        "bytes": np.array([len(text.encode()) for text in cleaned.texts], dtype=np.uint64),
        "words": np.array([len(text.split()) for text in cleaned.texts], dtype=np.uint64),
        "fates": cleaned.fates,
        "removed": cleaned.removed,
    }
    if signed := cleaned.signed:
        shard |= {"signatures": signed.signatures, "shingles": signed.shingles}
        shard["shingle_counts"] = signed.counts
    return job.name, shard


def store_shard(path: Path, shard: Shard) -> None:
    """Write a shard. Raises ResourceError if the disk is full or the folder cannot be written."""
    replace_file(path, lambda file: np.savez(file, **shard))


def read_shard(path: Path, *names: str) -> Shard:
    """Read some arrays of a shard.

    Raises:
        DataError: it is damaged; it is deleted, to be made again.
    """
    try:
        # The zip format's checksums are verified while reading.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
        path.unlink()
        fix = "Run the same command again: only this part is made again."
        raise DataError("was damaged on disk after it was written", where=path, fix=fix) from error


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
        stays, or 1 + the index of the step that leaves it out.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        DataError: a shard is damaged.
    """
    near = [NEAR] if cleaning.near_duplicates else []
    steps = (*cleaning.document_rules, SHORT, DUPLICATE, *near)
    fate = {name: np.uint8(number) for number, name in enumerate(steps, 1)}
    digests, shard_fates = [np.zeros((0, 16), dtype=np.uint8)], [np.zeros(0, dtype=np.uint8)]
    for path in shards:
        shard = read_shard(path, "sizes", "digests", "fates")
        short = (shard["sizes"] < cleaning.min_tokens) & (shard["fates"] == 0)
        shard_fates.append(np.where(short, fate[SHORT], shard["fates"]))
        digests.append(shard["digests"])
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
            shard = read_shard(path, "signatures", "shingles", "shingle_counts")
            mask = fates[offset : offset + len(shard["signatures"])] == 0
            signatures.write(shard["signatures"][mask].data)
            shingles.write(shard["shingles"][np.repeat(mask, shard["shingle_counts"])].data)
            counts.append(shard["shingle_counts"][mask])
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
_MAJORITY = 0.5


def unsuited_steps(settings: manifest.CorpusSettings) -> Iterator[str]:
    """Yield a note for each step that does nothing for documents of a language, or too little."""
    cleaning, language = settings.cleaning, settings.language
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
    settings: manifest.CorpusSettings, documents: int, steps: Sequence[manifest.StepCounts]
) -> Iterator[str]:
    """Yield a note for each rule that left out more than half of the documents.

    Args:
        documents: the number of documents of the inputs.
    """
    for step in steps:
        if step.name in settings.cleaning.document_rules and step.documents > _MAJORITY * documents:
            note = f"{step.name} left out {step.documents / documents:.0%} of the documents"
            if step.name == "stop_words" and settings.language == AUTO:
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
    dropping = [step for step in steps if step.documents or step.lines]
    if not dropping:
        return DataError("the inputs have no document", where=folder, fix="Give other inputs.")
    if [step.name for step in dropping] == [SHORT]:
        least, short = cleaning.min_tokens, dropping[0].documents
        message = f"the inputs have no document with {least:,} tokens or more; {short:,} have fewer"
        fix = "Give other inputs."
        if least > 1:
            fix = f"Set a lower {argument(min_tokens='N')}, or give other inputs."
        return DataError(message, where=folder, fix=fix)
    reasons = ", ".join(
        f"{step.name} {f'{step.lines:,} lines' if step.lines else f'{step.documents:,}'}"
        for step in dropping
    )
    message = f"the cleaning left out all {documents:,} documents: {reasons}"
    rules = cleaning.line_rules | cleaning.document_rules
    worst = max((step for step in dropping if step.name in rules), key=lambda step: step.bytes)
    fix = "Change the settings of these steps, or leave some out, such as "
    fix += f"{setting(worst.name, 'none')}."
    return DataError(message, where=folder, fix=fix)


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


def merge_shards(
    shards: Sequence[Path],
    folder: Path,
    settings: manifest.CorpusSettings,
    progress: Progress = SILENT,
) -> tuple[
    manifest.Counts,
    manifest.TextRead,
    tuple[manifest.StepCounts, ...],
    dict[str, manifest.Stored],
]:
    """Join shards into `tokens.bin`, `sentences.bin` and `documents.bin` in `folder`, and
    `words.bin` if they hold words.

    Returns:
        Counts of the corpus, what was read, what each step left out, and the files.

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
    arrays = ["ids", "lengths", "counts", "bytes", "words", "removed"]
    file_names = [manifest.TOKENS, manifest.SENTENCES, manifest.DOCUMENTS]
    if has_words := settings.words is not None:
        arrays.append("begins")
        file_names.append(manifest.WORDS)
    bits = np.zeros(0, dtype=np.bool_)  # of words: up to seven wait for the next shard
    with contextlib.ExitStack() as open_files:
        columns = {
            name: _Column(open_files.enter_context((folder / name).open("wb")))
            for name in file_names
        }
        columns[manifest.SENTENCES].append(np.zeros(1, dtype=np.uint64))
        columns[manifest.DOCUMENTS].append(np.zeros(1, dtype=np.uint64))
        for number, path in enumerate(shards, 1):
            shard = read_shard(path, *arrays)
            ids, lengths, counts = shard["ids"], shard["lengths"], shard["counts"]
            fates = all_fates[documents_read : documents_read + len(counts)]
            documents_read += len(fates)
            removed += shard["removed"]
            by_fate[:, 0] += np.bincount(fates, minlength=len(by_fate))
            np.add.at(by_fate[:, 1], fates, shard["bytes"])
            # One mark for each document becomes one for each of its sentences, then of their
            # tokens.
            remaining = fates == 0
            marks = np.repeat(remaining, counts)
            token_marks = np.repeat(marks, lengths)
            ids, lengths, counts = ids[token_marks], lengths[marks], counts[remaining]
            columns[manifest.TOKENS].append(ids)
            if has_words:
                bits = np.concatenate([bits, shard["begins"][token_marks]])
                full = len(bits) // 8 * 8
                columns[manifest.WORDS].append(np.packbits(bits[:full]))
                bits = bits[full:]
            columns[manifest.SENTENCES].append(tokens + np.cumsum(lengths, dtype=np.uint64))
            columns[manifest.DOCUMENTS].append(sentences + np.cumsum(counts, dtype=np.uint64))
            tokens, sentences = tokens + len(ids), sentences + len(lengths)
            words += int(shard["words"][remaining].sum())
            progress.advance(number)
        if has_words:
            columns[manifest.WORDS].append(np.packbits(bits))
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
    return counted, text_read, (*lines, *steps), files
