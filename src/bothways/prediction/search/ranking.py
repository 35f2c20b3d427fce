"""What an index ranks by: the vectors of documents, and their words.

Vectors are files in one of four precisions, memory-mapped, in one segment or several:

| precision | bytes a component | scores |
|---|---|---|
| fp32 | 4, of long segments 1 more | exact |
| bf16 | 2 | exact products of the rounded vectors |
| int8 | 1 | the same, of scale · code with one symmetric scale for all |
| binary | 1 + 1/8 | signs choose candidates by their Hamming distance, int8 codes order them |

Of binary vectors a search reads the signs alone, and the codes of the candidates. Of fp32 vectors a
search for few queries reads all codes, and then the vectors of the rows that these leave in doubt,
some tens. So the result is exact for a quarter of the reading, which is what takes the time. Words
are ranked by bm25s (Lù 2024), in Lucene's form of BM25.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import unicodedata
from collections.abc import Iterable, Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from numpy.typing import NDArray

from bothways.core.errors import optional
from bothways.model.kernels.library import call_kernel, runs_on
from bothways.prediction.search import Stored
from bothways.tasks.sentence_embedding.vectors import (
    BLOCK_ROWS,
    Found,
    Nearest,
    dot_products,
    rounding,
)

DTYPES = {"fp32": np.float32, "bf16": np.uint16, "int8": np.int8, "binary": np.int8}
OVERSAMPLING = 20
"""Candidates of binary vectors for each result; 20 keep 0.99 of the best ten of MiniLM-L6."""


class StoredVectors:
    """The vectors of all segments as one matrix in fp32, of which slices and rows are decoded.

    Args:
        segments: `(rows, width)` arrays as `encode` returns them, memory-mapped.
        scale: the value of the code 1 of int8.

    Attributes:
        longest: the length of the longest vector, once `top_k` has seen all.
    """

    longest: float | None = None

    def __init__(self, segments: Many[NDArray[np.generic]], width: int, scale: float) -> None:
        self.segments, self.scale = list(segments), scale
        self.starts = np.cumsum([0, *map(len, segments)])
        self.shape = int(self.starts[-1]), width

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | NDArray[np.int64]) -> Float32[np.ndarray, "rows width"]:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            slices = [
                segment[max(0, start - first) : max(0, stop - first)]
                for first, segment in zip(self.starts.tolist(), self.segments, strict=False)
                if first < stop and start < first + len(segment)
            ]
            return self._decode(slices[0] if len(slices) == 1 else np.concatenate(slices))
        result = np.empty((len(index), self.shape[1]), np.float32)
        # The segment of each row is the last one that starts at the row or before it.
        numbers = np.searchsorted(self.starts, index, "right") - 1
        for number in np.unique(numbers).tolist():
            rows = numbers == number
            codes = self.segments[number][index[rows] - self.starts[number]]
            result[rows] = self._decode(codes)
        return result

    def _decode(self, codes: NDArray[np.generic]) -> NDArray[np.float32]:
        decoded: NDArray[np.float32] = codes.astype(np.float32, copy=False)
        if codes.dtype == np.uint16:  # bf16: the upper half of fp32
            decoded = (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif codes.dtype == np.int8:
            decoded *= np.float32(self.scale)
        return decoded


def compress(
    vectors: Float32[np.ndarray, "rows width"], stored: Stored, scale: float
) -> NDArray[np.generic]:
    """Return vectors as they are stored."""
    match stored:
        case "fp32":
            return vectors
        case "bf16":
            # To the nearest, ties to even: the last bit that stays decides.
            bits = vectors.view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.clip(np.rint(vectors / scale), -127, 127).astype(np.int8)


def choose_scale(vectors: Float32[np.ndarray, "rows width"]) -> float:
    """Return the scale of int8 from the first vectors; of a few the largest may be small."""
    largest = max(float(np.abs(vectors).max()), 5 * float(np.sqrt(np.square(vectors).mean())))
    return (largest or 1.0) / 127


def encode_ids(ids: Iterable[str]) -> Shaped[np.ndarray, " ids"]:
    """Return ids as an array of bytes."""
    return np.array([name.encode() for name in ids], "S")


CODED_ROWS = 30_000
"""Rows of a segment of fp32 vectors from which it has codes; others are read in milliseconds."""
CODED_QUERIES = 4
"""Queries that read codes one after the other; more read the vectors once for all."""


class CodedVectors(NamedTuple):
    """The vectors of a segment in a byte a component, read before the vectors themselves.

    Attributes:
        codes: `(rows, width)` of int8.
        scales: the value of the code 1, by row.
        error: the largest difference of a product with the codes from that with the vectors, for a
            query of length 1.
    """

    codes: Shaped[np.ndarray, "rows width"]
    scales: Float32[np.ndarray, " rows"]
    error: float

    @classmethod
    def of(cls, vectors: Float32[np.ndarray, "rows width"]) -> CodedVectors:
        """Return the codes of vectors, at least one."""
        scales = np.abs(vectors).max(axis=1) / np.float32(127)
        steps = np.where(scales == 0, np.float32(1), scales)[:, None]
        codes = np.clip(np.rint(vectors / steps), -127, 127).astype(np.int8)
        differences = vectors - scales[:, None].astype(np.float64) * codes
        error = float(np.linalg.norm(differences, axis=1).max())  # |q·v − q·c| ≤ |q||v − c|
        max_length = float(np.linalg.norm(vectors.astype(np.float64), axis=1).max()) + error
        unit = np.ones((1, 1)), max_length * vectors.shape[1]  # `rounding` has n = 1
        return cls(codes, scales, error + float(rounding(*unit)[0]))

    def products(self, query: Float32[np.ndarray, " width"]) -> Float32[np.ndarray, " rows"]:
        """Return the product of a query with each row."""
        rows, width = self.codes.shape
        result = np.empty(rows, np.float32)
        arrays = (self.codes, self.scales, np.ascontiguousarray(query))
        inputs = (array.ctypes.data for array in arrays)
        call_kernel("bothways_code_products", *inputs, rows, width, result.ctypes.data)
        return result


def reads_codes(queries: int) -> bool:
    """Return True if a search for so many queries reads codes, where there are any."""
    return queries <= CODED_QUERIES and runs_on(torch.device("cpu"))


def search_codes(
    queries: Float32[np.ndarray, "queries width"],
    segments: Many[CodedVectors | None],
    vectors: StoredVectors,
    k: int,
    names: Shaped[np.ndarray, " rows"],
    deleted: Shaped[np.ndarray, " rows"],
) -> Found:
    """Return the result of `vectors.top_k`. Segments without codes are read as they are."""
    results = list[Found]()
    for query in queries.astype(np.float32, copy=False):
        length = np.linalg.norm(query.astype(np.float64))
        slack = max(length * segment.error for segment in segments if segment is not None)
        nearest = Nearest(k, dot_products(query[None], vectors), np.zeros(1), names)
        bounds = itertools.pairwise(vectors.starts.tolist())
        for (start, stop), segment in zip(bounds, segments, strict=True):
            if segment is None:
                block = vectors[start:stop]
                scores = block @ query
                max_length = float(np.sqrt(np.einsum("ij,ij->i", block, block).max(initial=0.0)))
                slack = max(slack, rounding(query[None], max_length)[0])
            else:
                scores = segment.products(query)
            scores[deleted[start:stop]] = -np.inf
            nearest.slack = np.array([slack])
            for offset in range(0, len(scores), 8 * BLOCK_ROWS):
                nearest.add(start + offset, scores[None, offset : offset + 8 * BLOCK_ROWS])
        results.append(nearest.result())
    scores, rows = (np.concatenate(values) for values in zip(*results, strict=True))
    return scores, rows


def signs(vectors: Float32[np.ndarray, "rows width"]) -> Shaped[np.ndarray, "words rows"]:
    """Return the signs of vectors, 64 components a word; the words of a component together."""
    bits = np.packbits(vectors > 0, axis=1)
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))
    return np.ascontiguousarray(padded.view(np.uint64).T)


def search_signs(
    queries: Float32[np.ndarray, "queries width"],
    segments: Many[Shaped[np.ndarray, "words _"]],
    vectors: StoredVectors,
    k: int,
    names: Shaped[np.ndarray, " rows"],
    deleted: Shaped[np.ndarray, " rows"],
) -> Found:
    """Return the k best of the rows whose signs are nearest to those of a query."""
    count, starts = min(len(vectors), k * OVERSAMPLING), vectors.starts.tolist()
    words = signs(queries).T
    candidates = [_nearest_signs(query, segments, starts, count, deleted) for query in words]
    nearest = Nearest(k, dot_products(queries, vectors), np.zeros(len(queries)), names)
    # The true dot products decide among candidates; signs only choose them.
    nearest.queries = np.repeat(np.arange(len(queries)), [len(rows) for rows in candidates])
    nearest.rows = np.concatenate(candidates)
    return nearest.result()


def _count_bits(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return the number of bits that are set in each word."""
    counts: NDArray[np.uint8]
    if hasattr(np, "bitwise_count"):  # since NumPy 2
        counts = np.bitwise_count(words)
        return counts
    table = np.array([number.bit_count() for number in range(256)], np.uint8)
    bits = table[words.view(np.uint8)].reshape(-1, 8)
    counts = bits.sum(axis=1, dtype=np.uint8)
    return counts


def _nearest_signs(
    query: Shaped[np.ndarray, " words"],
    segments: Many[Shaped[np.ndarray, "words _"]],
    starts: Many[int],
    count: int,
    deleted: Shaped[np.ndarray, " rows"],
) -> Int64[np.ndarray, " candidates"]:
    """Return the rows with the fewest different signs, the first of equals."""
    rows, distances = np.empty(0, np.int64), np.empty(0, np.uint16)
    limit = np.uint16(2**16 - 1)
    for first, segment in zip(starts, segments, strict=False):
        for start in range(0, segment.shape[1], 4 * BLOCK_ROWS):
            block = segment[:, start : start + 4 * BLOCK_ROWS]
            different = np.zeros(block.shape[1], np.uint16)
            for word, bits in zip(query, block, strict=True):
                different += _count_bits(bits ^ word)
            different[deleted[first + start : first + start + len(different)]] = limit
            # Strictly below the worst candidate: of equal distances the earlier row stays.
            near = np.flatnonzero(different < limit)
            rows = np.concatenate([rows, near + first + start])
            distances = np.concatenate([distances, different[near]])
            if len(rows) > count:
                best = np.argsort(distances, kind="stable")[:count]
                rows, distances = rows[best], distances[best]
                limit = distances[-1]
    return rows


_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    r"\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)


@functools.cache
def _words() -> re.Pattern[str]:
    """Return the expression for letters of scripts without spaces, such as ideographs, and words of
    two characters or more, in which marks such as the vowel signs of Hindi follow letters.
    """
    characters = map(chr, range(0x300, 0x20000))
    marks = "".join(c for c in characters if unicodedata.category(c).startswith("M"))
    return re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}](?:[^\W{_UNSPACED}]|[{marks}])+")


def search_words(text: str) -> list[str]:
    """Return the words of a text that BM25 counts. Full-width and half-width forms are equal.

    Example: "The cats, 两只猫 of हिन्दी" → ["cats", "两", "只", "猫", "हिन्दी"].
    """
    from bm25s.stopwords import STOPWORDS_EN

    text = unicodedata.normalize("NFKC", text).lower()
    return [word for word in _words().findall(text) if word not in STOPWORDS_EN]


@functools.cache
def load_bm25s() -> Any:
    """Return the module bm25s; ResourceError without it."""
    with optional("search", "BM25"):
        import bm25s
    # It writes each of its steps into the log of every program that has one.
    logging.getLogger("bm25s").setLevel(logging.NOTSET)
    return bm25s


def build_bm25(texts: Iterable[str]) -> Any:
    """Return the indexed scorer of bm25s for at least one text; ResourceError without bm25s."""
    bm25s = load_bm25s()
    ids, documents = dict[str, int](), list[list[int]]()
    for text in texts:
        documents.append([ids.setdefault(word, len(ids)) for word in search_words(text)])
    scorer, ids = bm25s.BM25(), ids or {"": 0}
    with np.errstate(invalid="ignore"):  # the mean length of empty texts is 0
        scorer.index(bm25s.tokenization.Tokenized(documents, ids), show_progress=False)
    return scorer


def search_bm25(
    scorer: Any, query: str, k: int, names: Shaped[np.ndarray, " rows"]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scores and rows of the k best documents that share a word with a query.

    Equal scores are ordered as by `vectors.top_k`.
    """
    words = [word for word in search_words(query) if word in scorer.vocab_dict]
    if not words:
        return np.empty(0, np.float32), np.empty(0, np.int64)
    scores = scorer.get_scores(words).astype(np.float32)
    # Without a shared word the score is 0: such documents are no hits.
    scores[scores <= 0] = -np.inf
    nearest = Nearest(k, lambda _, rows: scores[rows], np.zeros(1), names)
    nearest.add(0, scores[None])
    [best_scores], [rows] = nearest.result()
    return best_scores, rows
