"""A corpus: documents as sentences as token ids, in memory-mapped arrays that every objective reads.

    manifest.json    what the rest is; written last, so a folder without it is no corpus
    tokens.bin       ids, one document after the other; uint16, or uint32 for more than 65,536 of them
    sentences.bin    where each sentence begins among the tokens, and the end; uint64
    documents.bin    where each document begins among the sentences, and the end; uint64
    tokenizer.json   the tokenizer that made the ids, with its other files

`build` works in two stages (`shards`, `join`). The same documents and settings give the same bytes with any number of
processes. A build that was stopped, by whatever, goes on where it was; one that is done is not done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import ConfigError, DataError, os_errors
from bothways.core.folder_lock import LOCK, OWNER, lock_folder
from bothways.core.keyed_rng import rng
from bothways.core.sequence import Ids
from bothways.data.documents import Document, DocumentReader, Origin
from bothways.data.encode_shards import (
    Job,
    Recipe,
    cut,
    encode_shard,
    splitter_version,
    store,
    token_type,
)
from bothways.data.manifest import (
    MANIFEST,
    CorpusSettings,
    Manifest,
    check_file,
    describe_file,
    read_manifest,
    write_manifest,
)
from bothways.data.merge_shards import DOCUMENTS, SENTENCES, TOKENS, merge_shards
from bothways.data.process_pool import map_in_order, usable_cores
from bothways.data.sentences import AUTO, check_language
from bothways.text.tokenizer import Tokenizer

WORK = ".building"
"""Where a build keeps what is done; gone when the corpus is whole."""


class Stage(Enum):
    """What a build is doing: reading and encoding (in bytes of the input), or joining (in shards)."""

    ENCODING = "encoding"
    JOINING = "joining"


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")

_RESUME = (
    "Mend that and run the same again: what is done is kept, and the build goes on with the rest."
)

OnProgress = Callable[[Stage, int, int], object]
"""Told the stage, how much is done, and how much there is (0 if unknown)."""


def _in_silence(stage: Stage, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Corpus:
    """D documents of S sentences of T tokens.

    Attributes:
        folder: where it lies.
        manifest: counts, settings, fingerprints.
        tokenizer: what made the ids.
        tokens: `(T)` ids, memory-mapped.
        sentences: `(S+1)`, sentence s is tokens `[sentences[s], sentences[s+1])`; none is empty.
        documents: `(D+1)`, document d is sentences `[documents[d], documents[d+1])`; none is empty.
    """

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    tokens: NDArray[Any]
    sentences: NDArray[np.uint64]
    documents: NDArray[np.uint64]

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Opens a corpus; sizes of all files are checked, and the contents of the small ones.

        Raises:
            DataError: no corpus, one of another version, or files that are not those of the manifest.
        """
        place = Path(folder)
        manifest = read_manifest(place)
        for name, stored in manifest.files.items():
            check_file(place / name, stored)
        return cls(
            place,
            manifest,
            Tokenizer.load(place),
            _map(place / TOKENS, manifest.token_type),
            _map(place / SENTENCES, "uint64"),
            _map(place / DOCUMENTS, "uint64"),
        )

    def verify(self) -> None:
        """Compares every byte with the manifest; `open` leaves out the contents of large files. DataError if one differs."""
        for name, stored in self.manifest.files.items():
            check_file(self.folder / name, stored, up_to=math.inf)

    def __len__(self) -> int:
        return len(self.documents) - 1

    def sentences_of(self, document: int) -> list[Ids]:
        """The ids of each sentence of a document."""
        first, stop = (int(edge) for edge in self.documents[document : document + 2])
        edges = self.sentences[first : stop + 1].astype(np.int64)
        return [self.tokens[start:end].astype(np.int32) for start, end in itertools.pairwise(edges)]

    def split(self, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids of the documents to train on and of those held out, ascending.

        On each side is at least one; of four or more documents two, as next sentence prediction wants them.

        Args:
            share: of the documents, to hold out.
            seed: decides which.

        Raises:
            ConfigError: a share outside of (0, 1).
            DataError: fewer than two documents.
        """
        if not 0 < share < 1:
            raise ConfigError(
                f"must lie between 0 and 1, not {share}",
                where="held_out",
                fix="0.01 holds out one in a hundred.",
            )
        if len(self) < 2:
            what = (
                f"{len(self)} documents cannot be split into some to train on and some to hold out"
            )
            fix = "Give more documents; in a .txt file a blank line ends one (see the boundary setting)."
            raise DataError(what, where=self.folder, fix=fix)
        least = 2 if len(self) >= 4 else 1
        count = min(max(round(share * len(self)), least), len(self) - least)
        held = np.zeros(len(self), dtype=np.bool_)
        held[rng(seed, "held-out").choice(len(self), count, replace=False, shuffle=False)] = True
        return np.flatnonzero(~held), np.flatnonzero(held)


def build_corpus(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    language: str = AUTO,
    min_tokens: int = 1,
    workers: int | None = None,
    on_progress: OnProgress = _in_silence,
) -> Corpus:
    """Builds a corpus, goes on with a build that was stopped, or opens the corpus that these inputs have already given.

    Memory holds a few shards of four million characters for each worker, and 20 bytes a document at the end. On the disk
    the tokens lie twice until the corpus is whole.

    Args:
        documents: in their order; `read_documents(…)` gives them with fingerprints of the files, else they are read to see
            whether they are the same.
        folder: new, empty, or of an earlier build.
        language: of the sentences, as in `split_sentences`; "auto" tells English from Chinese for each document.
        min_tokens: documents with fewer are left out.
        workers: processes; one per core unless given. The corpus does not depend on it.
        on_progress: told how far the build is.

    Raises:
        ConfigError: a setting that cannot be.
        DataError: the folder holds something else; what reading the documents raises.
        ResourceError: another process builds there, no room, no permission, a worker was killed.
    """
    check_language(language)
    for name, value in (("min_tokens", min_tokens), ("workers", workers)):
        if value is not None and value < 1:
            raise ConfigError(
                f"must be at least 1, not {value}", where=name, fix="Leave it out for the default."
            )
    place = Path(folder)
    settings = CorpusSettings(tokenizer.fingerprint, language, min_tokens, splitter_version())
    _check_free(place)
    with lock_folder(place):
        if (place / MANIFEST).exists():
            _check_same(place, settings, documents)
        else:
            _prepare(place, tokenizer)
            names = _encode_all(place, settings, documents, workers or usable_cores(), on_progress)
            _finish(place, settings, documents, names, tokenizer.size, on_progress)
    return Corpus.open(place)


def _map(path: Path, dtype: str) -> NDArray[Any]:
    return (
        np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
    )


def _sources(documents: Iterable[Document]) -> tuple[tuple[Origin, ...], dict[str, str]]:
    """Where the documents come from, and how they are read, as far as is known."""
    return (
        (documents.origins, documents.settings)
        if isinstance(documents, DocumentReader)
        else ((), {})
    )


def _recipe(place: Path, settings: CorpusSettings) -> Recipe:
    return Recipe(str(place), settings.tokenizer, settings.language)


def _text_digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _check_same(place: Path, settings: CorpusSettings, documents: Iterable[Document]) -> None:
    """Raises DataError unless the corpus that lies there is what these inputs give."""
    built = read_manifest(place)
    given, had = dataclasses.asdict(settings), dataclasses.asdict(built.settings)
    differing = [
        f"{name} {had[name]!r}, not {given[name]!r}" for name in given if given[name] != had[name]
    ]
    fix = "Choose another folder, or delete this one."
    if differing:
        raise DataError(
            f"holds a corpus that was built with {'; '.join(differing)}", where=place, fix=fix
        )
    origins, reading = _sources(documents)
    unchanged = bool(origins) and (origins, reading) == (built.origins, built.reading)
    # Files that were only copied or touched hold the same text; reading them is quick beside encoding them.
    if (
        not unchanged
        and _text_digest(job.name for job in cut(documents, _recipe(place, settings))) != built.text
    ):
        raise DataError("holds a corpus of other documents", where=place, fix=fix)
    shutil.rmtree(
        place / WORK, ignore_errors=True
    )  # of a build that was killed with its last breath


def _check_free(place: Path) -> None:
    """Raises DataError if the folder holds something else than a corpus or a build; not even a lock is left in it then."""
    with os_errors(place, "Choose another folder."):
        held = {path.name for path in place.iterdir()} - {LOCK, OWNER} if place.is_dir() else set()
    if held and held.isdisjoint({WORK, MANIFEST}):
        what = (
            f"is not empty, and not the folder of a corpus: it holds {', '.join(sorted(held)[:3])}"
        )
        raise DataError(what, where=place, fix="Choose another folder.")


def _prepare(place: Path, tokenizer: Tokenizer) -> None:
    """Makes the folder ready for the first stage."""
    with os_errors(place, _RESUME):
        (place / WORK).mkdir(exist_ok=True)
    Tokenizer(tokenizer.backend, tokenizer.specials).save(
        place
    )  # segments are for the model that will be trained to say


def _encode_all(
    place: Path,
    settings: CorpusSettings,
    documents: Iterable[Document],
    workers: int,
    on_progress: OnProgress,
) -> list[str]:
    """The first stage → the names of all shards, in order; those that an earlier build has left are not made again."""
    recipe, names = _recipe(place, settings), list[str]()

    def missing() -> Iterator[Job]:
        """Those that are to be made; the names of all are noted."""
        for job in cut(documents, recipe):
            names.append(job.name)
            if not (place / WORK / job.name).exists():
                yield job

    with contextlib.closing(
        map_in_order(functools.partial(encode_shard, recipe), missing(), workers)
    ) as results:
        for name, shard in results:
            with os_errors(place, _RESUME):
                store(place / WORK / name, shard)
            done, total = (
                (documents.position, documents.total)
                if isinstance(documents, DocumentReader)
                else (0, 0)
            )
            on_progress(Stage.ENCODING, done, total)
    return names


def _finish(
    place: Path,
    settings: CorpusSettings,
    documents: Iterable[Document],
    names: list[str],
    size: int,
    on_progress: OnProgress,
) -> None:
    """The second stage, then the manifest, then nothing is left of the work."""
    work, arrays = place / WORK, (TOKENS, SENTENCES, DOCUMENTS)
    with os_errors(place, _RESUME):
        try:
            shards = [work / name for name in names]
            counts, files = merge_shards(
                shards,
                work,
                settings.min_tokens,
                lambda done: on_progress(Stage.JOINING, done, len(shards)),
            )
        except OSError:
            for name in arrays:
                (work / name).unlink(missing_ok=True)
            raise
        if not counts.documents:
            short = (
                f" with {settings.min_tokens:,} tokens or more; {counts.short:,} have fewer"
                if counts.short
                else ""
            )
            what = f"the inputs have no document{short}"
            raise DataError(
                what, where=place, fix="Set min_tokens (--min-tokens) lower, or give other inputs."
            )
        for name in arrays:
            (work / name).replace(place / name)
        files |= {
            name: describe_file(place / name) for name in TOKENIZER if (place / name).exists()
        }
        write_manifest(
            place,
            Manifest(
                counts, token_type(size), settings, *_sources(documents), _text_digest(names), files
            ),
        )
        shutil.rmtree(work)
