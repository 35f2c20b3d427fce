"""Hard negatives: documents that an index ranks high for a query, and that do not answer it.

    pairs ─▶ ranking of each query ─▶ without its positives ─▶ without likely positives ─▶ negatives

A candidate whose cosine is near that of a positive is often right and not labelled; it teaches the
opposite of what it should. Such likely positives are written to a file of their own.

Source: Moreira et al. 2024, "NV-Retriever", section 3.1: positive-aware mining.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError, ResourceError, argument
from bothways.core.files import replace_text
from bothways.core.progress import Progress
from bothways.prediction.search import CandidateChoice, MiningMode
from bothways.prediction.search.index import Index
from bothways.tasks.sentence_embedding.examples import VectorExample, text_key

Embed = Callable[[list[str]], Float32[np.ndarray, "texts width"]]
WINDOW = 256
"""Queries that are embedded and searched at once."""


@dataclass(frozen=True)
class Mining:
    """How negatives are chosen.

    Attributes:
        negatives: the number for each query, at most.
        skip: candidates at the top that are passed over.
        depth: documents of a ranking that are read.
        margin: a candidate with a score above p − margin · |p| is a likely positive, where p is
            the lowest score of a positive of the row; None keeps it.
        absolute_margin: the same with p − absolute_margin.
        choose: the best candidates, or random ones of the ranking.
        mode: ranks by vectors, or by BM25; margins are of vectors in both.
        seed: of random candidates.
    """

    negatives: int = 3
    skip: int = 0
    depth: int = 100
    margin: float | None = 0.05
    absolute_margin: float | None = None
    choose: CandidateChoice = "best"
    mode: MiningMode = "vectors"
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, negatives=self.negatives)
        require_at_least(0, skip=self.skip, seed=self.seed)
        if self.seed and self.choose != "random":
            fix = f"Add {argument(choose='random')}, or leave it out."
            raise ConfigError("is of random candidates", where="seed", fix=fix)
        if self.depth < self.skip + self.negatives:
            message = f"must be at least skip + negatives, {self.skip + self.negatives}"
            raise ConfigError(message, where="depth", fix="Read more of each ranking.")
        require_range("[0, inf]", margin=self.margin, absolute_margin=self.absolute_margin)

    def bar(self, positive: float) -> float:
        """Return the score above which a candidate is a likely positive."""
        relative = np.inf if self.margin is None else positive - self.margin * abs(positive)
        absolute = np.inf if self.absolute_margin is None else positive - self.absolute_margin
        return min(relative, absolute)


Mined = tuple[dict[str, Any], list[dict[str, Any]]]
"""The line of a row with its negatives, and a line for each of its likely positives."""


class Answers:
    """The positives of each query in all rows, by the keys of their texts; 16 bytes a pair.

    Attributes:
        digest: the SHA-256 of all pairs in order.
    """

    def __init__(self, examples: Iterable[VectorExample]) -> None:
        queries, positives, self.rows = array("q"), array("q"), 0
        for self.rows, example in enumerate(examples, 1):
            texts = example.all_texts[1 : len(example.all_texts) - len(example.negatives)]
            queries.extend([text_key(example.text)] * len(texts))
            positives.extend(map(text_key, texts))
        self.digest = hashlib.sha256(queries.tobytes() + positives.tobytes()).hexdigest()
        keys = np.array(queries, np.int64)
        # Sorted by anchor, so that `searchsorted` finds the positives of one; the first stay first.
        order = keys.argsort(kind="stable")
        self._queries, self._positives = keys[order], np.array(positives, np.int64)[order]

    def __getitem__(self, query: str) -> set[int]:
        key = text_key(query)
        start = np.searchsorted(self._queries, key)
        end = np.searchsorted(self._queries, key, "right")
        return {*self._positives[start:end].tolist()}


def mine_window(
    examples: Many[VectorExample],
    first: int,
    index: Index,
    embed_queries: Embed,
    embed_documents: Embed,
    answers: Answers,
    mining: Mining,
) -> Iterator[Mined]:
    """Yield the lines of rows of pairs.

    Args:
        first: the number of the first row, by which random candidates are drawn.
        answers: to all queries.
    """
    queries = embed_queries([example.text for example in examples])
    positives = [[*example.all_texts[1 : 2 + len(example.positives)]] for example in examples]
    vectors = embed_documents([text for texts in positives for text in texts])
    ends = np.cumsum([len(texts) for texts in positives])
    # Positives and negatives of a row are dropped: the search goes deeper by their number.
    excluded = [
        answers[example.text] | {*map(text_key, (example.text, *example.negatives))}
        for example in examples
    ]
    depth = mining.depth + max(map(len, excluded))
    nearest = index.nearest(queries, depth) if mining.mode == "vectors" else None
    for number, (example, query) in enumerate(zip(examples, queries, strict=True)):
        anchor = example.text
        row_vectors = vectors[ends[number] - len(positives[number]) : ends[number]]
        # The least similar positive: what is nearer to the query than it may be a positive.
        positive = float((row_vectors @ query).min())
        if nearest is None:
            rows = np.array([row for _, row in index.by_words(anchor, depth)], np.int64)
            scores = index.vectors[rows] @ query
        else:
            scores, rows = (array[number] for array in nearest)
        bar, seen = mining.bar(positive), excluded[number]
        near, far = scores > bar, scores <= bar
        likely: list[dict[str, Any]] = [
            {
                "row": first + number, "anchor": anchor, "candidate": text, "score": score,
                "positive_score": positive,
            }
            for text, score in _unseen(index, rows[near], scores[near], seen)
        ]  # fmt: skip
        rows, scores = rows[far], scores[far]
        skip = mining.skip
        if mining.choose == "random":
            # The skipped ones are the best ranked: they are cut off before the draw, which is
            # seeded by the row, so that a resumed run draws the same.
            draw = np.random.default_rng((mining.seed, first + number))
            order = draw.permutation(np.arange(len(rows))[skip : mining.depth])
            rows, scores, skip = rows[order], scores[order], 0
        candidates = _unseen(index, rows, scores, seen)
        chosen = [text for text, _ in itertools.islice(candidates, mining.negatives + skip)][skip:]
        negatives = [*example.negatives, *chosen]
        yield {"anchor": anchor, "positive": positives[number], "negative": negatives}, likely


def _unseen(
    index: Index, rows: NDArray[np.int64], scores: NDArray[np.float32], seen: set[int]
) -> Iterator[tuple[str, float]]:
    """Yield the texts of rows with their scores, each once; a text is read when it is due."""
    for row, score in zip(rows.tolist(), scores.tolist(), strict=True):
        [text] = index.texts([row])
        if (key := text_key(text)) not in seen:
            seen.add(key)
            yield text, score


@dataclass(frozen=True)
class MiningReport:
    """What was mined.

    Attributes:
        file: rows with their negatives.
        likely_file: the likely positives that were dropped, with their scores.
        rows, negatives: the numbers of them.
        short: rows with fewer negatives than wanted.
        with_likely: rows that had one.
    """

    file: Path
    likely_file: Path
    rows: int
    negatives: int
    short: int
    likely: int
    with_likely: int


def likely_file(out: Path) -> Path:
    """Return the file of the likely positives next to the file of the rows."""
    return out.with_name(f"{out.stem}.likely.jsonl")


def write_mined(
    examples: Iterable[VectorExample],
    rows: int,
    mine: Callable[[Many[VectorExample], int], Iterator[Mined]],
    out: Path,
    settings: Mapping[str, Any],
    progress: Progress,
) -> MiningReport:
    """Write rows with their negatives to a file, which appears when it is complete.

    Windows of rows are appended to OUT.part, from which a stopped run goes on.

    Args:
        rows: the number of examples.
        mine: returns what is found for a window that begins at a row.
        settings: that decide the rows, with `negatives`.

    Raises:
        ResourceError: OUT.part holds rows of other settings.
    """
    likely_out = likely_file(out)
    part, likely_part = (path.with_name(f"{path.name}.part") for path in (out, likely_out))
    record = out.with_name(f"{out.name}.settings")
    if record.exists() and json.loads(record.read_text(encoding="utf8")) != settings:
        fix = f"Give the settings in {record.name}, or delete it to begin again."
        raise ResourceError("holds rows of other settings", where=part, fix=fix)
    if not (record.exists() and part.exists() and likely_part.exists()):
        part.write_bytes(b"")
        likely_part.write_bytes(b"")
        replace_text(record, json.dumps(settings, indent=1) + "\n")
    first = _keep_lines(part, lambda number, line: True)
    first -= first % WINDOW if first < rows else 0  # a window is whole or mined again
    _keep_lines(part, lambda number, line: number < first)
    _keep_lines(likely_part, lambda number, line: line["row"] < first)
    progress.stage("mining", rows)
    progress.advance(first)
    remaining = itertools.islice(examples, first, None)
    with part.open("ab") as file, likely_part.open("ab") as likely:
        while window := list(itertools.islice(remaining, WINDOW)):
            for row, likely_rows in mine(window, first):
                for line in likely_rows:
                    _write(likely, line)
                likely.flush()
                _write(file, row)
            file.flush()
            first += len(window)
            progress.advance(first)
    part.replace(out)
    likely_part.replace(likely_out)
    record.unlink()
    counts = [len(line["negative"]) for line in _lines(out)]
    with_likely = [line["row"] for line in _lines(likely_out)]
    short = sum(count < settings["negatives"] for count in counts)
    return MiningReport(
        out, likely_out, rows, sum(counts), short, len(with_likely), len({*with_likely})
    )


def _write(file: BinaryIO, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        yield from map(json.loads, file)


def _keep_lines(path: Path, keep: Callable[[int, Mapping[str, Any]], bool]) -> int:
    """Cut a file before its first line that is not whole or not to keep; return how many stay."""
    end = count = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or not keep(count, json.loads(line)):
                break
            end, count = end + len(line), count + 1
        file.truncate(end)
    return count
