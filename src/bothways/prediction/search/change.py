"""Changes of an index: documents that are added, replaced or deleted, at once or not at all.

A change writes a segment of the new documents. Segments before it that are not much larger are
joined with it, without their deleted documents; vectors are copied.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray

from bothways.core import files
from bothways.core.config import reader as configs
from bothways.core.errors import DataError, FolderError, optional
from bothways.core.progress import Progress
from bothways.core.terminal import listed, quantity
from bothways.prediction.search import ranking
from bothways.prediction.search.index import RECORD, Index, IndexRecord, Segment

Embed = Callable[[list[str]], Float32[np.ndarray, "texts width"]]
WINDOW = 4096
"""Texts that are embedded at once."""
LONGEST_ID = 255
"""Bytes of an id in UTF-8."""
GRAPH_ROWS = 30_000
"""Smaller segments are searched exactly: it takes milliseconds, and a graph misses documents."""
_FILES = re.compile(
    rf"(?:{re.escape(files.HIDDEN)}\w+-)?"
    r"(vectors|signs|codes|scales|ids|offsets|texts|graph|bm25|deleted)-(\d+)(\.\w+)?"
)


def change_index(
    folder: Path,
    record: IndexRecord,
    documents: Iterable[tuple[str | None, str]],
    embed: Embed,
    progress: Progress,
    *,
    delete: Many[str] = (),
    bm25: bool = False,
    graph: bool = False,
) -> Index:
    """Build an index, or add documents to it and delete others; a killed change leaves it as it is.

    Args:
        record: of the index, or of one to build.
        documents: ids and texts; an id that is in the index is replaced.
        embed: returns the vectors of documents.
        delete: ids in the index.
        bm25, graph: add the words of all documents, a graph of large segments.

    Raises:
        DataError: an id occurs twice, is unknown, empty or too long.
        ResourceError: another process changes the index, no space, or a package is missing.
        FolderError: the folder holds other files, or a damaged index.
    """
    with files.lock_folder(folder):
        index = Index(folder) if (folder / RECORD).exists() else None
        names = (path.name for path in folder.iterdir() if not path.name.startswith("."))
        if index is None and not all(map(_FILES.fullmatch, names)):
            fix = "Name a new folder."
            raise FolderError("holds other files than an index", where=folder, fix=fix)
        record = record if index is None else index.record
        # Files of earlier changes that were replaced, or killed.
        numbers = {segment.number for segment in record.segments}
        for path in list(folder.iterdir()):
            if (match := _FILES.fullmatch(path.name)) is None:
                continue
            current = {"deleted": {record.deleted}, "bm25": {record.bm25}}.get(match[1], numbers)
            if int(match[2]) not in current or path.name.startswith(files.HIDDEN):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        record = dataclasses.replace(record, changes=record.changes + 1)
        change = _Change(folder, record, index, progress)
        change.write(documents, embed, frozenset(delete), graph)
        if bm25 or record.bm25 is not None:
            # The weight of each word depends on all documents.
            index = Index(folder, change.record)
            positions = range(len(change.record.segments))
            texts = [text for position in positions for _, text in index.documents(position)]
            progress.stage("counting words", len(texts))
            # An index without documents keeps its words, so that the next ones are counted, too.
            scorer = ranking.build_bm25(texts or [""])
            scorer.save(folder / f"bm25-{record.changes}", show_progress=False)
            change.record = dataclasses.replace(change.record, bm25=record.changes)
        files.replace_text(folder / RECORD, json.dumps(configs.to_dict(change.record), indent=1))
        return Index(folder)


@dataclass
class _Change:
    """A change that is being written; `record` is the index after it."""

    folder: Path
    record: IndexRecord
    index: Index | None
    progress: Progress
    added: int = 0

    def path(self, name: str, suffix: str = "npy") -> Path:
        """Return the path of a file of this change."""
        return self.folder / f"{name}-{self.record.changes}.{suffix}"

    def save(self, name: str, array: NDArray[Any]) -> None:
        """Write an array."""
        files.replace_file(self.path(name), lambda path: np.save(path, array))

    def write(
        self,
        documents: Iterable[tuple[str | None, str]],
        embed: Embed,
        delete: frozenset[str],
        graph: bool,
    ) -> None:
        """Write the segment and what is deleted of the others."""
        ids, offsets, joined = list[bytes](), [0], list[int]()

        def rows() -> Iterator[tuple[str, str]]:
            """Yield new documents, and after them the documents of the joined segments."""
            yield from self._named(documents)
            joined.extend(self._delete(ids, delete))
            self.added = len(ids)
            for position in joined:
                assert self.index is not None
                yield from self.index.documents(position)

        def write_texts(path: Path) -> None:
            with path.open("wb") as file:
                for name, text in rows():
                    values = {"id": name, "text": text}
                    line = json.dumps(values, ensure_ascii=False).encode() + b"\n"
                    file.write(line)
                    ids.append(name.encode())
                    offsets.append(offsets[-1] + len(line))

        files.replace_file(self.path("texts", "jsonl"), write_texts)
        segments = [s for n, s in enumerate(self.record.segments) if n not in joined]
        if ids:
            self.save("ids", np.array(ids, dtype="S"))
            self.save("offsets", np.array(offsets))
            files.replace_file(
                self.path("vectors"),
                lambda path: self._write_vectors(path, len(ids), joined, embed),
            )
            if graph and len(ids) < GRAPH_ROWS:
                few = quantity(len(ids), "document(s)")
                message = f"note: no graph for {few}, searched exactly; it begins at {GRAPH_ROWS:,}"
                self.progress.message(message)
            graph = (graph or any(s.graph for s in self.record.segments)) and len(ids) >= GRAPH_ROWS
            if graph:
                self._build_graph()
            coded = self.record.stored == "fp32" and len(ids) >= ranking.CODED_ROWS
            error = self._write_codes() if coded else None
            segments.append(Segment(self.record.changes, len(ids), graph, error))
        deleted = np.empty(0, np.bool_)
        if self.index is not None:
            # Rows are numbered again from 0 over the segments that stay.
            stay = [n for n in range(len(self.record.segments)) if n not in joined]
            deleted = np.concatenate([deleted, *map(self.index.deleted_in, stay)])
        number = self.record.changes if deleted.any() else None
        if number is not None:
            self.save("deleted", np.flatnonzero(deleted))
        self.record = dataclasses.replace(self.record, segments=tuple(segments), deleted=number)

    def _named(self, documents: Iterable[tuple[str | None, str]]) -> Iterator[tuple[str, str]]:
        """Yield documents with ids, each once."""
        names, numbers = set[str](), self._numbers()
        self.progress.stage("reading")
        for id, text in documents:
            name = next(x for x in numbers if x not in names) if id is None else id
            fault = None
            if not name or "\0" in name or files.surrogate_in(name + text) is not None:
                fault = "is empty, or it or its text has characters that UTF-8 does not have"
            elif len(name.encode()) > LONGEST_ID:
                fault = f"has more than {LONGEST_ID} bytes"
            elif name in names:
                fault = "occurs twice"
            if fault is not None:
                message = f"the id {name!r:.300} {fault}"
                raise DataError(message, where="texts", fix="Give each text a short id of its own.")
            names.add(name)
            yield name, text
            self.progress.advance(len(names))

    def _numbers(self) -> Iterator[str]:
        """Yield ids that the index does not have, for texts without one: the next numbers."""
        ids = () if self.index is None else self.index.ids[~self.index.deleted]
        taken = {int(name) for name in ids if name.isdigit() and int(name) >= self.record.next_id}
        while True:
            number = self.record.next_id
            self.record = dataclasses.replace(self.record, next_id=number + 1)
            if number not in taken:
                yield str(number)

    def _delete(self, added: list[bytes], delete: frozenset[str]) -> list[int]:
        """Mark replaced and deleted rows, and return the places of segments to join."""
        gone, stored = ranking.encode_ids(delete), ranking.encode_ids(())
        if self.index is not None:
            stored = self.index.ids[~self.index.deleted]
        known = {name.decode() for name in stored[np.isin(stored, gone)].tolist()}
        if unknown := delete - known:
            message = f"there is no document {listed(map(repr, sorted(unknown)), 5)} to delete"
            raise DataError(message, where="delete", fix="Name ids of the index.")
        if self.index is None:
            return []
        self.index.deleted |= np.isin(self.index.ids, np.array([*added, *gone], "S"))
        positions = range(len(self.record.segments))
        live = [int((~self.index.deleted_in(position)).sum()) for position in positions]
        joined, size = list[int](), len(added)
        for position in reversed(positions):
            # A document is copied again only when its segment has doubled.
            mostly_deleted = 2 * live[position] < self.record.segments[position].rows
            if mostly_deleted or (added and live[position] <= size):
                joined.append(position)
                size += live[position]
        return joined

    def _write_vectors(self, path: Path, rows: int, joined: list[int], embed: Embed) -> None:
        """Embed the new documents, and copy the vectors of the others."""
        record = self.record
        shape, dtype = (rows, record.width), ranking.DTYPES[record.stored]
        codes = files.create_array(path, dtype, shape)
        self.progress.stage("embedding", self.added)
        signs, cut = list[NDArray[np.uint64]](), 0
        with self.path("texts", "jsonl").open("rb") as file:
            texts = (json.loads(line)["text"] for line in file)
            for start in range(0, self.added, WINDOW):
                vectors = embed([next(texts) for _ in range(min(WINDOW, self.added - start))])
                # The first window chooses the scale of int8, for good: codes stay comparable.
                if not record.scale:
                    scale = ranking.choose_scale(vectors)
                    self.record = record = dataclasses.replace(record, scale=scale)
                stored = ranking.compress(vectors, record.stored, record.scale)
                if stored.dtype == np.int8:
                    cut += int((np.abs(vectors).max(1) > 127.5 * record.scale).sum())
                codes[start : start + len(vectors)] = stored
                if record.stored == "binary":
                    signs.append(ranking.signs(vectors))
                self.progress.advance(start + len(vectors))
        # Of vectors like the first ones, one in 4,096 has a larger component than all of these.
        if cut > self.added / 100:
            message = f"note: {quantity(cut, 'vector(s)')} had components beyond the range of "
            message += f"{record.stored}, which the first {WINDOW:,} documents chose, and were "
            message += "cut: scores differ. Build the index again, in another order or as bf16."
            self.progress.message(message)
        start = self.added
        for position in joined:
            assert self.index is not None
            keep = np.flatnonzero(~self.index.deleted_in(position))
            codes[start : start + len(keep)] = self.index.vectors.segments[position][keep]
            start += len(keep)
            if record.stored == "binary":
                number = record.segments[position].number
                signs.append(np.load(self.folder / f"signs-{number}.npy")[:, keep])
        codes.flush()
        if signs:
            self.save("signs", np.concatenate(signs, axis=1))

    def _write_codes(self) -> float:
        """Write the vectors of this segment in a byte a component; return their error."""
        vectors, error = np.load(self.path("vectors"), mmap_mode="r"), 0.0
        scales = np.empty(len(vectors), np.float32)
        self.progress.stage("coding vectors", len(vectors))

        def write(path: Path) -> None:
            nonlocal error
            codes = files.create_array(path, np.int8, vectors.shape)
            for start in range(0, len(vectors), WINDOW):
                coded = ranking.CodedVectors.of(vectors[start : start + WINDOW])
                codes[start : start + WINDOW] = coded.codes
                scales[start : start + WINDOW] = coded.scales
                error = max(error, coded.error)
                self.progress.advance(start + len(coded.codes))
            codes.flush()

        files.replace_file(self.path("codes"), write)
        self.save("scales", scales)
        return error

    def _build_graph(self) -> None:
        """Write a graph of the vectors of this segment (HNSW, Malkov and Yashunin 2016)."""
        with optional("search", "a graph of vectors"):
            from usearch.index import Index as Graph
        codes = np.load(self.path("vectors"), mmap_mode="r")
        vectors = ranking.StoredVectors([codes], self.record.width, self.record.scale)
        graph = Graph(ndim=self.record.width, metric="ip", dtype="bf16")
        self.progress.stage("building the graph", len(vectors))
        for start in range(0, len(vectors), WINDOW):
            block = vectors[start : start + WINDOW]
            graph.add(np.arange(start, start + len(block)), block)
            self.progress.advance(start + len(block))
        files.replace_file(self.path("graph", "usearch"), lambda path: graph.save(str(path)))
