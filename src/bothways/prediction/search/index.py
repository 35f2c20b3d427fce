"""An index: a folder with the vectors and texts of documents, searched exactly.

    index.json                   what the others are, the model, prompts, one scale; replaced last
    vectors-3.npy signs-3.npy    vectors of the third change, signs if they are binary
    codes-3.npy scales-3.npy     if they are many and in fp32: the same in a byte a component
    ids-3.npy offsets-3.npy      ids, and where the lines of texts begin
    texts-3.jsonl                {"id": …, "text": …} of each document
    graph-3.usearch bm25-3       a graph for approximate search; the words of all documents
    deleted-3.npy                rows that do not count

Files are never changed: a change writes new ones and replaces index.json, so that a process that is
killed leaves the old index or the new one. The next change removes what no index.json names. Small
segments are joined, so that there are some log N of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray

from bothways.core.config import reader as configs
from bothways.core.config.values import checked, require_at_least, require_choice
from bothways.core.errors import ConfigError, DataError, FolderError, argument, call, optional
from bothways.core.files import local_path, near_path, read_object
from bothways.data.tables import iter_rows
from bothways.hub.provenance import digest_of_model
from bothways.prediction import PredictPrecision
from bothways.prediction.opening import open_task, rebound
from bothways.prediction.predictor import Predictor
from bothways.prediction.search import Mode, Stored, ranking
from bothways.tasks.sentence_embedding.vectors import (
    ARRAY_FAULTS,
    Found,
    Nearest,
    check_widths,
    dot_products,
    top_k,
)

RECORD = "index.json"
FUSED = 60
"""Reciprocal rank fusion: Σ 1 / (60 + rank) (Cormack et al. 2009)."""
DEPTH = 100
"""Documents of each ranking that are fused."""
_BUILD = call("index", "TEXTS", out="FOLDER", model="MODEL")
_FIX = f"Build the index again: {_BUILD}."
_FAULTS = (*ARRAY_FAULTS, LookupError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Hit:
    """A document that was found: its id, its score in the last stage, and its text."""

    id: str
    score: float
    text: str


@dataclass(frozen=True)
class Segment:
    """The documents of a change: the number in the names of its files, and their rows.

    `error` is that of `ranking.CodedVectors`; None without codes.
    """

    number: int
    rows: int
    graph: bool = False
    error: float | None = None


@dataclass(frozen=True)
class IndexRecord:
    """What index.json holds.

    Attributes:
        model, digest, settings, length: the model, the SHA-256 of its files, and the changed
            settings that it was opened with.
        width: components of a vector.
        normalised: whether vectors have length 1, so that scores are cosines.
        stored, scale: see `ranking`.
        prompts: before a query and before a document.
        deleted, bm25: the numbers of the newest files of these, if there are any.
        next_id: of a text that has none.
    """

    model: str
    digest: str
    width: int
    normalised: bool
    stored: Stored = "fp32"
    scale: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    length: int | None = None
    prompts: tuple[str, str] = ("", "")
    segments: tuple[Segment, ...] = ()
    deleted: int | None = None
    bm25: int | None = None
    changes: int = 0
    next_id: int = 1
    format: Literal[1] = 1


class Index:
    """An index as it was when it was opened; later changes of the folder do not reach it.

    The model, the words for BM25 and the graphs are opened by the first search that needs them.

    Args:
        folder: that `bothways.build_index` has made.
        record: to read in place of index.json.

    Attributes:
        embedders: models that are open, by name (None for that of the index), precision and device.

    Raises:
        FolderError: it is not an index, or damaged.

    Examples:
        >>> index = bothways.build_index(["a good film", "a bad play"], "my-bert", out="plays")
        >>> bothways.Index("plays").search("a bad play", k=1)[0].text
        'a bad play'
    """

    def __init__(self, folder: str | Path, record: IndexRecord | None = None) -> None:
        self.folder = local_path(folder)
        if record is None:
            if not (self.folder / RECORD).is_file():
                near = near_path(self.folder, lambda path: (path / RECORD).is_file())
                fix = f"Did you mean {near}?" if near else f"Build one: {_BUILD}."
                message = f"is not an index: it has no {RECORD}"
                raise FolderError(message, where=self.folder, fix=fix)
            values = read_object(self.folder / RECORD, FolderError, _FIX)
            try:
                record = configs.read(IndexRecord, values)
            except ConfigError as error:
                raise self._damaged(f"{RECORD}: {error.where}: {error.what}") from error
        # Words and graphs are opened later, perhaps in another process or working folder.
        self.folder, self.record = self.folder.absolute(), record
        if record.width < 1 or not math.isfinite(record.scale):
            raise self._damaged(f"{RECORD} has width {record.width} and scale {record.scale}")
        self._graphs = dict[int, Any]()
        self.embedders = dict[tuple[str | None, PredictPrecision, str], Predictor]()
        segments, width = record.segments, record.width
        # Rows of all files of a segment must agree, or a text would get another's vector.
        vectors = [
            self._array("vectors", s.number, ranking.DTYPES[record.stored], s.rows, width)
            for s in segments
        ]
        self.vectors = ranking.StoredVectors(vectors, width, record.scale)
        ids = [self._array("ids", s.number, np.bytes_, s.rows) for s in segments]
        self.ids = np.concatenate([np.empty(0, "S1"), *ids])
        self.offsets = [self._array("offsets", s.number, np.integer, s.rows + 1) for s in segments]
        self._texts = [self._mapped(f"texts-{s.number}.jsonl") for s in segments]
        self._signs = [
            self._array("signs", s.number, np.uint64, -(-width // 64), s.rows)
            for s in (segments if record.stored == "binary" else ())
        ]
        self._codes = [self._codes_of(segment) for segment in segments]
        self.deleted = np.zeros(len(self.ids), bool)
        if record.deleted is not None:
            rows = self._array("deleted", record.deleted, np.integer, None)
            with self._reading(f"deleted-{record.deleted}.npy"):
                self.deleted[rows] = True

    def __len__(self) -> int:
        return int(len(self.deleted) - self.deleted.sum())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name of the folder and the record, by which its files are opened again."""
        return Index, (self.folder, self.record)

    def __repr__(self) -> str:
        return f"Index({str(self.folder)!r}, documents={len(self):,}, model={self.record.model!r})"

    def _damaged(self, fault: str) -> FolderError:
        return FolderError(f"the index is damaged: {fault}", where=self.folder, fix=_FIX)

    @contextlib.contextmanager
    def _reading(self, file: str, faults: tuple[type[Exception], ...] = _FAULTS) -> Iterator[None]:
        """Turn what numpy, usearch and bm25s raise for a damaged file into a FolderError."""
        try:
            yield
        except faults as error:
            raise self._damaged(f"{file}: {error}") from error

    def _array(self, name: str, number: int, kind: type, *shape: int | None) -> NDArray[Any]:
        """Open an array of the folder, of a type and a shape, in which None is any length."""
        file = f"{name}-{number}.npy"
        with self._reading(file):
            array: NDArray[Any] = np.lib.format.open_memmap(self.folder / file, mode="r")
        fits = len(array.shape) == len(shape) and all(
            expected in (None, size) for size, expected in zip(array.shape, shape, strict=True)
        )
        if not fits or not np.issubdtype(array.dtype, kind) or not array.dtype.isnative:
            raise self._damaged(f"{file} has {array.shape} numbers of type {array.dtype}")
        return array

    def _codes_of(self, segment: Segment) -> ranking.CodedVectors | None:
        if segment.error is None:
            return None
        codes = self._array("codes", segment.number, np.int8, segment.rows, self.record.width)
        scales = self._array("scales", segment.number, np.float32, segment.rows)
        # The kernel reads one row after the other.
        return ranking.CodedVectors(np.ascontiguousarray(codes), scales, segment.error)

    def _mapped(self, name: str) -> mmap.mmap:
        """Open a file of the folder, which stays readable when a change removes it."""
        with self._reading(name), (self.folder / name).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def texts(self, rows: Iterable[int]) -> list[str]:
        """Return the texts of documents by row."""
        texts = list[str]()
        for row in rows:
            position = int(np.searchsorted(self.vectors.starts, row, "right")) - 1
            inner = row - int(self.vectors.starts[position])
            begin, end = map(int, self.offsets[position][inner : inner + 2])
            with self._reading(f"texts-{self.record.segments[position].number}.jsonl"):
                texts.append(json.loads(self._texts[position][begin:end])["text"])
        return texts

    # ---- search ----

    def nearest(
        self, queries: Float32[np.ndarray, "queries width"], k: int, *, exact: bool = False
    ) -> Found:
        """Return the scores and rows of the k documents nearest to vectors, best first.

        Args:
            exact: use no graph.

        Raises:
            DataError: the width is another one, or a number is not finite.
        """
        check_widths(queries.shape[1], self.record.width)
        if not np.isfinite(queries).all():
            fix = "Embed them by the model of the index."
            raise DataError("are not finite", where="queries", fix=fix)
        k = min(k, len(self))
        if not k or not len(queries):
            return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        if not exact and any(segment.graph for segment in self.record.segments):
            return self._approximate(queries, k)
        # Of vectors with infinite components fewer than k have a score.
        with self._reading("vectors", (ValueError,)):
            if self.record.stored == "binary":
                return ranking.search_signs(
                    queries, self._signs, self.vectors, k, self.ids, self.deleted
                )
            if ranking.reads_codes(len(queries)) and any(self._codes):
                return ranking.search_codes(
                    queries, self._codes, self.vectors, k, self.ids, self.deleted
                )
            return top_k(queries, self.vectors, k, names=self.ids, deleted=self.deleted)

    def _approximate(self, queries: NDArray[np.float32], k: int) -> Found:
        """Search graphs, and segments without one exactly; all candidates are scored exactly.

        A graph does not reach all of many equal documents: where it finds too few, search exactly.
        """
        score = dot_products(queries, self.vectors)
        nearest = Nearest(k, score, np.zeros(len(queries)), self.ids)
        for position, segment in enumerate(self.record.segments):
            start, gone = int(self.vectors.starts[position]), self.deleted_in(position)
            rows = np.tile(np.arange(segment.rows), (len(queries), 1))
            with self._reading(f"graph-{segment.number}.usearch"):
                if segment.graph:
                    # Approximate, and without knowledge of deletions: more candidates for both.
                    depth = min(segment.rows, 2 * k + int(gone.sum()))
                    matches = self._graph(segment.number).search(queries, depth)
                    rows = matches.keys.reshape(len(queries), -1).astype(np.int64)
                    # Of several queries one may have fewer: the rest of its keys are no matches.
                    counts = np.reshape(getattr(matches, "counts", rows.shape[1]), (-1, 1))
                    rows = np.where(np.arange(rows.shape[1]) < counts, rows, -1)
                numbers, columns = np.nonzero((rows >= 0) & ~gone[rows])
            indices = rows[numbers, columns] + start
            nearest.queries = np.concatenate([nearest.queries, numbers])
            nearest.rows = np.concatenate([nearest.rows, indices])
        if np.bincount(nearest.queries, minlength=len(queries)).min() < k:
            return self.nearest(queries, k, exact=True)
        return nearest.result()

    def _graph(self, number: int) -> Any:
        if number in self._graphs:
            return self._graphs[number]
        with optional("search", "a graph of vectors"):
            from usearch.index import Index as Graph
        graph = Graph.restore(self.folder / f"graph-{number}.usearch", view=True)
        return self._graphs.setdefault(number, graph)

    @functools.cached_property
    def words(self) -> Any:
        """The scorer of bm25s for the words of all documents, with its arrays memory-mapped.

        Raises:
            ConfigError: the index was built without them.
            ResourceError: bm25s is not installed.
        """
        if self.record.bm25 is None:
            fix = f"Build the index with {argument(bm25=True)}."
            raise ConfigError("the index was built without BM25", where="mode", fix=fix)
        bm25s = ranking.load_bm25s()
        # numba, which the file could ask for, reads beyond the ends of arrays.
        folder = self.folder / f"bm25-{self.record.bm25}"
        return bm25s.BM25.load(folder, mmap=True, backend="numpy")

    @checked
    def search(  # noqa: PLR0913 – one option per question
        self,
        queries: str | Iterable[str],
        k: int = 10,
        *,
        mode: Mode = "vectors",
        exact: bool = False,
        rerank: str | Path | Predictor | None = None,
        depth: int = DEPTH,
        model: str | Path | Predictor | None = None,
        precision: PredictPrecision = "fp32",
        device: str = "auto",
    ) -> list[Any]:
        """Return the k best documents for a text, or a list of these for several; see `search`.

        The model of the index stays open for the next search.
        """
        require_at_least(1, k=k, depth=depth)
        require_choice(Mode, "mode", mode)
        if depth != DEPTH and mode != "hybrid" and rerank is None:
            fix = f"Add {argument(mode='hybrid')} or {argument(rerank='FOLDER')}, or leave it out."
            raise ConfigError("is for fused or reranked searches", where="depth", fix=fix)
        for name, value in {"exact": exact, "model": model}.items():
            if value and mode == "bm25":
                fix = "Leave it out: words are ranked without a model."
                raise ConfigError("is for vectors", where=name, fix=fix)
        texts = [queries] if isinstance(queries, str) else list(iter_rows(queries, "queries"))
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                message = f"is of type {type(text).__name__}, not a text"
                raise DataError(message, where=f"query {number}")
        if isinstance(rerank, Predictor):
            _check_task(rerank, "rerank", "rerank")
        elif rerank is not None:
            rerank = open_task(rerank, "rerank", precision=precision, device=device)
        vectors = None
        if mode != "bm25":
            vectors = self.embedder(model, precision, device).encode(
                texts, prompt=self.record.prompts[0], normalize_embeddings=self.record.normalised
            )
        hits = self.ranked(texts, vectors, k, mode, exact=exact, reranker=rerank, depth=depth)
        return hits[0] if isinstance(queries, str) else hits

    def embedder(
        self, model: str | Path | Predictor | None, precision: PredictPrecision, device: str
    ) -> Predictor:
        """Return the model of the index as it was when it was built; FolderError for another."""
        if isinstance(model, Predictor):
            return open_embedder(model, self.record)
        key = (None if model is None else str(model), precision, device)
        if key not in self.embedders:
            name = key[0] or self.record.model
            self.embedders[key] = open_embedder(name, self.record, None, precision, device)
        return self.embedders[key]

    def ranked(
        self,
        queries: Many[str],
        vectors: NDArray[np.float32] | None,
        k: int = 10,
        mode: Mode = "vectors",
        *,
        exact: bool = False,
        reranker: Predictor | None = None,
        depth: int = DEPTH,
    ) -> list[list[Hit]]:
        """Return the best documents for queries with their vectors, best first.

        Args:
            vectors: of the queries; None if `mode` is "bm25".
            depth: documents of each ranking that are fused, and that a reranker scores.
        """
        count = k if mode != "hybrid" and reranker is None else max(k, depth)
        rankings = list[list[list[tuple[float, int]]]]()
        if mode != "bm25":
            assert vectors is not None
            scores, rows = self.nearest(vectors, count, exact=exact)
            pairs = zip(scores.tolist(), rows.tolist(), strict=True)
            rankings.append([list(zip(*pair, strict=True)) for pair in pairs])
        if mode != "vectors":
            rankings.append([self.by_words(query, count) for query in queries])
        hits = list[list[Hit]]()
        for query, *lists in zip(queries, *rankings, strict=True):
            best = lists[0]
            if len(lists) > 1:  # of unlike scores: fused by their places alone
                fused = dict[int, float]()
                for position, (_, row) in itertools.chain(*(enumerate(x, 1) for x in lists)):
                    fused[row] = fused.get(row, 0.0) + 1 / (FUSED + position)
                ids, sums = self.ids, ((score, row) for row, score in fused.items())
                best = sorted(sums, key=lambda pair: (pair[0], ids[pair[1]]), reverse=True)
            texts = self.texts([row for _, row in best[: count if reranker else k]])
            documents = zip(best, texts, strict=False)
            with self._reading("ids"):
                ranked = [Hit(self.ids[row].decode(), x, text) for (x, row), text in documents]
            if reranker and ranked:
                scored = reranker((query, [hit.text for hit in ranked]))
                ranked = ordered(ranked, scored.logits)[:k]
            hits.append(ranked)
        return hits

    def by_words(self, query: str, count: int) -> list[tuple[float, int]]:
        names = self.ids[self.live]
        with self._reading(f"bm25-{self.record.bm25}"):
            scores, rows = ranking.search_bm25(self.words, query, count, names)
            return list(zip(scores.tolist(), self.live[rows].tolist(), strict=True))

    @functools.cached_property
    def live(self) -> NDArray[np.int64]:
        """The rows of documents that count, in the order of `words`."""
        return np.flatnonzero(~self.deleted)

    def deleted_in(self, position: int) -> NDArray[np.bool_]:
        """Return True for the deleted rows of a segment."""
        start, stop = self.vectors.starts[position : position + 2]
        return self.deleted[start:stop]

    def documents(self, position: int) -> Iterator[tuple[str, str]]:
        """Yield ids and texts of the documents of a segment that count."""
        number, deleted = self.record.segments[position].number, self.deleted_in(position)
        name = f"texts-{number}.jsonl"
        with self._reading(name), (self.folder / name).open("rb") as file:
            for line, gone in zip(file, deleted, strict=True):
                if not gone:
                    values = json.loads(line)
                    yield values["id"], values["text"]


def open_embedder(
    model: str | Predictor,
    record: IndexRecord | None,
    length: int | None = None,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
    settings: Mapping[str, Any] | None = None,
) -> Predictor:
    """Open the model of an index, as it was when the index was built, or that of a new one.

    Args:
        model: a predictor is taken as it is.

    Raises:
        FolderError: it is another model.
        ConfigError: its similarity is neither the cosine nor the dot product, or the predictor is
            for another task, has other settings than the index, or has no folder.
    """
    if isinstance(model, Predictor):
        embedder = model
        _check_task(model, "embed", "model")
        if record is not None:
            digest, opened_length, opened = model.identity()
            _check_model("model", digest, record)
            # Settings that the index does not name are the folder's; prompts are its own.
            excess = opened.keys() - record.settings.keys() - {"prompts", "prompt_name", "prompt"}
            if excess or opened_length not in (None, record.length):
                message = "was opened with another length or other settings than the index has"
                options = {**record.settings} | ({"length": record.length} if record.length else {})
                words = "".join(f", {key}={value!r}" for key, value in options.items())
                fix = f'Open it by bothways.load({record.model!r}, "embed"{words}).'
                raise ConfigError(message, where="model", fix=fix)
            embedder = Predictor(rebound(model.task_model, record.settings, record.length))
    else:
        if record is not None:
            _check_model(model, digest_of_model(model), record)
            length, settings = record.length, record.settings
        embedder = open_task(
            model, "embed", length=length, precision=precision, device=device,
            settings=settings or {},
        )  # fmt: skip
    if embedder.similarity_name not in ("cosine", "dot"):
        message = f"the model compares by {embedder.similarity_name}"
        fix = "An index has cosines or dot products: choose a model with one of them."
        raise ConfigError(message, where="model", fix=fix)
    return embedder


def _check_task(predictor: Predictor, task: str, where: str) -> None:
    """Raise ConfigError for a predictor of another task."""
    if (name := predictor.task_model.task.name) != task:
        fix = f'Open the model by bothways.load(FOLDER, "{task}").'
        raise ConfigError(f"is for the task {name}", where=where, fix=fix)


def _check_model(name: str, digest: str, record: IndexRecord) -> None:
    """Raise FolderError if a model is not the one that an index was made by."""
    if digest != record.digest:
        message = f"is not the model of the index, which was made by {record.model}"
        fix = "Name that model, or build the index again with this one."
        raise FolderError(message, where=name, fix=fix)


def ordered(hits: Many[Hit], scores: Iterable[float]) -> list[Hit]:
    """Return hits with other scores, best first."""
    scored = [dataclasses.replace(hit, score=float(x)) for hit, x in zip(hits, scores, strict=True)]
    return sorted(scored, key=lambda hit: (hit.score, hit.id), reverse=True)
