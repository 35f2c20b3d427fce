"""A corpus: documents as sentences as token ids, in memory-mapped arrays that every objective
reads.

    manifest.json    describes the rest; written last, so a folder without it is incomplete
    tokens.bin       ids, one document after the other; uint16, or uint32 for more than 65,536 ids
    sentences.bin    where each sentence begins among the tokens, and the end; uint64
    documents.bin    where each document begins among the sentences, and the end; uint64
    words.bin        one bit per token: whether a word begins there; only if words were asked for
    tokenizer.json   the tokenizer that made the ids, with its other files

Example: the documents "A b. C." and "D." → tokens a b . c . d . | sentences 0 3 5 7 |
documents 0 2 3.

`write_corpus` works in two stages (`shards`). The same documents and
settings give the same bytes with any number of processes. An interrupted build continues where it
was; a finished one is not repeated.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.config.reader import config_difference
from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError, DataError, os_errors
from bothways.core.files import LOCK, OWNER, local_path, lock_folder, require_local
from bothways.core.jobs.process_pool import map_in_order
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.process import usable_cores
from bothways.core.source import Ids, rng
from bothways.core.terminal import quantity
from bothways.data import manifest as manifests, shards
from bothways.data.cleaning.config import Cleaning
from bothways.data.documents import Document, DocumentReader, check_versions
from bothways.data.epoch_order import AllExcept
from bothways.data.sentences import AUTO, Words, check_language, words_name
from bothways.text.tokenizer import Tokenizer

WORK = ".building"
"""The folder in which a build keeps finished shards; it is deleted with the end of the build."""
SHARDS = f"{WORK}/[!.]*.npz"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")

CHUNK, COUNTED_CHUNKS = 2**20, 64
"""The size and the highest number of the parts in which unknown tokens are counted."""

HELD_OUT = 2**20
"""Documents that are held out at most: more than evaluations read."""

_RESUME = "Fix that and run the same command again: what is done is kept."


@dataclass(frozen=True)
class Corpus:
    """D documents of S sentences of T tokens.

    Attributes:
        manifest: counts, settings, digests.
        tokenizer: the tokenizer that made the ids.
        tokens: `(T)` ids, memory-mapped.
        sentences: `(S+1)`, sentence s is tokens `[sentences[s], sentences[s+1])`; none is empty.
        documents: `(D+1)`, document d is sentences `[documents[d], documents[d+1])`; none is empty.
        words: `(⌈T/8⌉)`, one bit per token, True where a word begins; None if none are stored.

    Examples:
        >>> corpus = bothways.Corpus.open("corpus")
        >>> len(corpus), corpus.tokenizer.size > 5
        (60, True)
    """

    folder: Path
    manifest: manifests.Manifest
    tokenizer: Tokenizer
    tokens: NDArray[Any]
    sentences: NDArray[Any]
    documents: NDArray[Any]
    words: NDArray[Any] | None = None

    def __repr__(self) -> str:
        counts = self.manifest.counts
        dropped = self.manifest.read.documents - counts.documents  # duplicates, by a cleaning rule
        return (
            f"Corpus({str(self.folder)!r}, documents={counts.documents:,}, "
            f"sentences={counts.sentences:,}, tokens={counts.tokens:,}"
            f"{f', left_out={dropped:,}' if dropped else ''})"
        )

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open a corpus; the sizes of all files are checked, and the contents of small ones.

        Raises:
            ConfigError: the folder is a URL.
            DataError: no corpus, one of another version, files that differ from the manifest, or
                offsets and ids that contradict each other.
        """
        location = local_path(folder)
        require_local(location)
        manifest = manifests.read_manifest(location)
        for name, stored in manifest.files.items():
            manifests.check_file(location / name, stored, manifests.SMALL)
        tokens = manifests.map_array(location / manifests.TOKENS, manifest.token_type)
        sentences = manifests.map_array(location / manifests.SENTENCES, "uint64")
        documents = manifests.map_array(location / manifests.DOCUMENTS, "uint64")
        words = None
        if manifests.WORDS in manifest.files:
            words = manifests.map_array(location / manifests.WORDS, "uint8")
        tokenizer = Tokenizer.load(location)
        corpus = cls(location, manifest, tokenizer, tokens, sentences, documents, words)
        corpus._check(manifests.SMALL)
        return corpus

    def verify(self) -> None:
        """Compare every byte with the manifest, and check all offsets and ids. Raises DataError.

        `open` skips the contents of large files.
        """
        for name, stored in self.manifest.files.items():
            manifests.check_file(self.folder / name, stored, math.inf)
        self._check(math.inf)

    def _check(self, up_to: int | float) -> None:
        """Check the ends of the offsets; in files of at most `up_to` bytes, every offset and id."""
        counts = self.manifest.counts
        for name, offsets, size, end in (
            (manifests.SENTENCES, self.sentences, counts.sentences, len(self.tokens)),
            (manifests.DOCUMENTS, self.documents, counts.documents, counts.sentences),
        ):
            consistent = len(offsets) == size + 1 and (offsets[0], offsets[-1]) == (0, end)
            # Reading all offsets of a large corpus would take longer than its first steps.
            if consistent and offsets.nbytes <= up_to:
                consistent = bool((offsets[1:] > offsets[:-1]).all())
            if not consistent:
                message = "holds offsets that contradict the other files"
                raise DataError(message, where=self.folder / name, fix=manifests.REBUILD)
        if len(self.tokens) != counts.tokens or (
            0 < self.tokens.nbytes <= up_to and int(self.tokens.max()) >= self.tokenizer.size
        ):
            size = self.tokenizer.size
            message = f"holds ids that the tokenizer of {size:,} tokens does not have"
            raise DataError(message, where=self.folder / manifests.TOKENS, fix=manifests.REBUILD)
        if self.words is not None and len(self.words) != -(-counts.tokens // 8):
            message = f"holds {8 * len(self.words):,} bits for {counts.tokens:,} tokens"
            raise DataError(message, where=self.folder / manifests.WORDS, fix=manifests.REBUILD)

    def __len__(self) -> int:
        return len(self.documents) - 1

    def sentences_of(self, document: int) -> list[Ids]:
        """Return the ids of each sentence of a document."""
        begin, stop = (int(edge) for edge in self.documents[document : document + 2])
        edges = self.sentences[begin : stop + 1].astype(np.int64)
        return [self.tokens[start:end].astype(np.int32) for start, end in itertools.pairwise(edges)]

    @functools.cached_property
    def token_counts(self) -> NDArray[np.int64]:
        """The number of occurrences of each token of the vocabulary, `(V)`."""
        counts, chunk = np.zeros(self.tokenizer.size, np.int64), 2**22
        for at in range(0, len(self.tokens), chunk):
            counts += np.bincount(self.tokens[at : at + chunk], minlength=len(counts))
        return counts

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the corpus: equal for equal arrays and tokenizers."""
        stored = sorted((name, file.sha256) for name, file in self.manifest.files.items())
        return hashlib.sha256(repr(stored).encode()).hexdigest()

    @functools.cached_property
    def unknown_share(self) -> float:
        """The fraction of the tokens that are unknown to the tokenizer's vocabulary.

        Of a large corpus, an even sample of `COUNTED_CHUNKS` parts is counted.
        """
        unknown, total = self.tokenizer.specials.unknown, len(self.tokens)
        starts = range(0, total, max(CHUNK, -(-total // COUNTED_CHUNKS)))
        chunks = [self.tokens[at : at + CHUNK] for at in starts]
        hits = sum(int((chunk == unknown).sum()) for chunk in chunks)
        return hits / max(1, sum(map(len, chunks)))

    def split(self, share: float, seed: int) -> tuple[AllExcept, NDArray[np.int64]]:
        """Return the ids of the documents to train on and of those to hold out, ascending.

        Each side has at least one document; of four or more documents, two are held out, because
        next sentence prediction draws from another document; more than `HELD_OUT` never are.

        Args:
            share: the fraction of the documents to hold out.
            seed: decides which.

        Raises:
            ConfigError: a share outside of (0, 1).
            DataError: fewer than two documents.
        """
        require_range("(0, 1)", held_out=share, fix="0.01 holds out one in a hundred.")
        if len(self) < 2:
            count_text = quantity(len(self), "document(s)")
            message = f"{count_text} cannot be split into training and held-out documents"
            fix = "Give more documents; in a .txt file a blank line ends one (see boundary)."
            raise DataError(message, where=self.folder, fix=fix)
        # Pairs of segments draw from a second document, also among the held-out ones.
        least = 2 if len(self) >= 4 else 1
        count = min(max(round(share * len(self)), least), len(self) - least, HELD_OUT)
        drawn = rng(seed, "held-out").choice(len(self), count, replace=False, shuffle=False)
        held_out = np.sort(drawn)
        return AllExcept(len(self), held_out), held_out


def write_corpus(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    language: str = AUTO,
    words: Words | None = None,
    cleaning: Cleaning | None = None,
    workers: int | None = None,
    progress: Progress = SILENT,
) -> Corpus:
    """Build a corpus, continue an interrupted build, or open the corpus that already exists.

    Memory holds a few shards of four million characters for each worker, and 20 bytes a document
    at the end; the search for near-duplicates needs more (`cleaning.near_duplicates`). On disk the
    tokens exist twice until the corpus is complete. `language`, `words` and `workers` are those of
    `bothways.build_corpus`; the corpus does not depend on the number of workers.

    Args:
        documents: in their order; `read_documents(…)` yields them with fingerprints of the files.
            Other documents are read again to find out whether they are the same.
        folder: new, empty, or with an earlier build.
        cleaning: steps that drop text; None drops duplicates and documents without a token.
        progress: receives the stages "encoding" (in bytes of the files) and "merging" (in shards),
            and notes about steps of the cleaning that do not fit the documents, and about files in
            folders that are not read.

    Raises:
        ConfigError: an invalid setting.
        DataError: the folder holds something else; any error while reading the documents.
        ResourceError: another process builds there, no space, no permission, a killed worker.
    """
    check_language(language)
    require_at_least(1, workers=workers)
    if not isinstance(cleaning, Cleaning | None):
        fix = 'Such as bothways.data.cleaning.config.make_cleaning("gopher").'
        raise ConfigError(f"must be a Cleaning, not {cleaning!r:.40}", where="cleaning", fix=fix)
    path = local_path(folder)
    reader = documents if isinstance(documents, DocumentReader) else DocumentReader(iter(documents))
    finder = None if words is None else words_name(words)
    splitter = f"sentencex {importlib.metadata.version('sentencex')}"
    settings = manifests.CorpusSettings(
        tokenizer.fingerprint, language, splitter, finder, cleaning or Cleaning()
    )
    # Before the lock is taken: none is left in a folder of something else.
    with os_errors(path, "Choose another folder."):
        entries = (
            {entry.name for entry in path.iterdir()} - {LOCK, OWNER} if path.is_dir() else set()
        )
    if entries and entries.isdisjoint({WORK, manifests.MANIFEST}):
        contents = ", ".join(sorted(entries)[:3])
        message = f"is not empty, and not the folder of a corpus: it holds {contents}"
        raise DataError(message, where=path, fix="Choose another folder.")
    finished = (manifests.MANIFEST, SHARDS)
    with lock_folder(path, begun=(WORK, *TOKENIZER), finished=finished):
        if (path / manifests.MANIFEST).exists():
            _check_same(path, settings, reader)
        else:
            for note in (*reader.notes, *shards.unsuited_steps(settings)):
                progress.message(note)
            with os_errors(path, _RESUME):
                (path / WORK).mkdir(exist_ok=True)
                check_versions(path / WORK, reader.origins)
            # Without segments: whether a model has them is up to the model.
            Tokenizer(tokenizer.backend, tokenizer.specials, words=tokenizer.words).save(path)
            _build(path, settings, words, reader, workers or usable_cores(), progress)
    return Corpus.open(path)


def length_percentiles(
    offsets: NDArray[Any], points: Iterable[int | float], chunk: int = 2**20
) -> list[int]:
    """Return percentiles of the lengths between `(N+1)` offsets, without holding all lengths.

    Each is a length that occurs; the list is empty if N is 0. Example: the offsets 0, 2, 3, 7 and
    the points 0, 50, 100 → 1, 2, 4.

    Source: the inverse of the empirical distribution function (NumPy's method "inverted_cdf").
    """
    counts = np.zeros(1, dtype=np.int64)  # counts[n]: how many lengths are n
    for start in range(0, len(offsets) - 1, chunk):
        lengths = np.diff(offsets[start : start + chunk + 1]).astype(np.int64)
        chunk_counts = np.bincount(lengths, minlength=len(counts))
        chunk_counts[: len(counts)] += counts
        counts = chunk_counts
    ranks = np.cumsum(counts)
    if ranks[-1] == 0:
        return []
    return [
        int(np.searchsorted(ranks, max(np.ceil(point / 100 * ranks[-1]), 1))) for point in points
    ]


def _text_digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _check_same(folder: Path, settings: manifests.CorpusSettings, reader: DocumentReader) -> None:
    """Raise DataError unless the existing corpus is the one that these inputs give."""
    built = manifests.read_manifest(folder)
    requested, stored = (dict(vars(values)) for values in (settings, built.settings))
    cleaning = config_difference(requested.pop("cleaning"), stored.pop("cleaning"))
    retokenized = requested.pop("tokenizer") != stored.pop("tokenizer")  # fingerprints
    differences = {name: value for name, value in requested.items() if value != stored[name]}
    differing = ["another tokenizer"] * retokenized
    differing += [f"{name} {stored[name]!r}, not {value!r}" for name, value in differences.items()]
    differing += [f"another cleaning (now {'; '.join(cleaning)})"] if cleaning else []
    fix = "Choose another folder, or delete this one."
    if differing:
        message = f"holds a corpus that was built with {'; '.join(differing)}"
        raise DataError(message, where=folder, fix=fix)
    origins = reader.origins
    has_times = bool(origins) and all(origin.modified for origin in origins)  # none is at a URL
    if not has_times or (origins, reader.settings) != (built.origins, built.reading):
        # Files that were only copied or touched hold the same text; reading them is fast
        # compared to encoding them.
        names = (job.name for job in shards.cut_shards(reader, settings))
        if _text_digest(names) != built.text:
            raise DataError("holds a corpus of other documents", where=folder, fix=fix)
    # A build that was killed after it wrote the manifest leaves its work.
    shutil.rmtree(folder / WORK, ignore_errors=True)


def _build(
    folder: Path,
    settings: manifests.CorpusSettings,
    words: Words | None,
    reader: DocumentReader,
    workers: int,
    progress: Progress,
) -> None:
    """Make the shards that are missing, join all, write the manifest, and delete the shards."""
    work, names, tokenizer = folder / WORK, list[str](), Tokenizer.load(folder)
    progress.stage("encoding", reader.total or None)

    def missing() -> Iterator[shards.Job]:
        """Yield the jobs without a shard; note the names of all."""
        # Finished shards of an interrupted build are found by their names, digests of their text.
        for job in shards.cut_shards(reader, settings):
            names.append(job.name)
            if not (work / job.name).exists():
                if len(names) == 1 and any(folder.glob(SHARDS)):
                    message = f"note: {folder} holds an unfinished corpus of other text or settings"
                    progress.message(f"{message}; it is deleted when this one is complete")
                yield job

    encode = functools.partial(shards.encode_shard, tokenizer, words, settings)
    with contextlib.closing(map_in_order(encode, missing(), workers)) as results:
        for name, shard in results:
            shards.store_shard(work / name, shard)
            progress.advance(reader.position)
    with os_errors(folder, _RESUME):
        try:
            merged = shards.merge_shards([work / name for name in names], work, settings, progress)
        # A full disk: without the unfinished arrays there is room to try again; the shards stay.
        except OSError:
            for array in work.glob("*.bin"):
                array.unlink()
            raise
        counts, inputs, steps, files = merged
        if not counts.documents:
            shutil.rmtree(work)  # no other run of this command could use it
            raise shards.nothing_left(folder, settings.cleaning, inputs.documents, steps)
        for name in files:
            (work / name).replace(folder / name)
        present = [name for name in TOKENIZER if (folder / name).exists()]
        files |= {name: manifests.describe_file(folder / name) for name in present}
        for note in shards.large_steps(settings, inputs.documents, steps):
            progress.message(note)
        ids = shards.token_type(tokenizer.size)
        sources = reader.origins, reader.settings
        fields = (settings, *sources, _text_digest(names), inputs, steps, files)
        manifests.write_manifest(folder, manifests.Manifest(counts, ids, *fields))
        shutil.rmtree(work)
