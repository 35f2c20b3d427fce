"""Retrieval data in folders as BEIR's, and the metrics of rankings as trec_eval computes them.

    corpus.jsonl     {"_id": "d1", "title": "…", "text": "…"}
    queries.jsonl    {"_id": "q1", "text": "…"}
    qrels/test.tsv   query-id, corpus-id, score; or without a header query, 0, document, score

A document is read as its title, a space and its text, as `mteb` reads it. All files may be
compressed.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bothways.core.errors import DataError
from bothways.core.terminal import listed
from bothways.data.tables import open_table
from bothways.data.text_io import COMPRESSED, read_lines
from bothways.tasks.columns import text_of

Grades = Mapping[str, Mapping[str, int]]
"""The relevance of documents by query: 0 or less for those that do not fit."""
Run = Mapping[str, Mapping[str, float]]
"""The scores of the documents that were found, by query."""


@dataclass(frozen=True)
class RetrievalData:
    """Queries with relevant documents among those of a corpus.

    Attributes:
        folder: that it was read from.
        documents, queries: texts by id; queries without a grade are dropped.
        grades: by query and document.
    """

    folder: Path
    documents: Mapping[str, str]
    queries: Mapping[str, str]
    grades: Grades


def corpus_file(folder: Path) -> Path | None:
    """Return the file with the documents of a folder as BEIR's; None for any other folder."""
    return _file(folder / "corpus.jsonl")


def splits_of(folder: Path) -> dict[str, Path]:
    """Return the files with grades by the name of their split, such as "test"."""
    files = sorted((folder / "qrels").glob("*.tsv*"))
    return {file.name.partition(".")[0]: file for file in files}


def read_beir(folder: Path, split: str = "test") -> RetrievalData:
    """Read a folder as BEIR's; the texts of all documents are held in memory.

    Raises:
        DataError: a file is missing or cannot be read; an id occurs twice, or is not there.
    """
    corpus, queries = corpus_file(folder), _file(folder / "queries.jsonl")
    grades, missing = splits_of(folder), "corpus.jsonl" if corpus is None else "queries.jsonl"
    if corpus is None or queries is None or split not in grades:
        missing = missing if corpus is None or queries is None else f"qrels/{split}.tsv"
        splits = f"; there are grades for {listed(grades)}" if corpus and queries and grades else ""
        fix = "A folder as BEIR's has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."
        raise DataError(f"has no {missing}{splits}", where=folder, fix=fix)
    graded, documents, texts = read_grades(grades[split]), _texts(corpus), _texts(queries)
    unknown = [name for name in graded if name not in texts]
    if unknown or not any(name in documents for rows in graded.values() for name in rows):
        what = f"{listed(unknown, 5)} of no query" if unknown else "no document of the corpus"
        fix = "Take all files from one source."
        raise DataError(f"grades {what}", where=grades[split], fix=fix)
    return RetrievalData(folder, documents, {name: texts[name] for name in graded}, graded)


def read_grades(file: Path) -> dict[str, dict[str, int]]:
    """Read grades by query and document, with three columns as BEIR's or four as TREC's.

    Raises:
        DataError: a line has other columns, or a grade that is not a whole number.
    """
    grades = dict[str, dict[str, int]]()
    for number, line in read_lines(str(file)):
        fields = line.split("\t") if "\t" in line else line.split()
        if number == 1 and fields and not fields[-1].lstrip("+-").isdecimal():
            continue  # the header
        try:
            query, document, grade = (fields[0], *fields[-2:]) if len(fields) in (3, 4) else ()
            grades.setdefault(query, {})[document] = int(grade)
        except ValueError:
            message = f"is not a query, a document and a whole number: {line:.80}"
            raise DataError(message, where=f"{file}:{number}") from None
    if not grades:
        raise DataError("holds no grade", where=file)
    return grades


def _file(path: Path) -> Path | None:
    names = (path.with_name(path.name + suffix) for suffix in ("", *COMPRESSED))
    # Not `Path.is_file`, which raises OSError for the text that was meant by a long name.
    return next((name for name in names if os.path.isfile(name)), None)


def _texts(file: Path) -> dict[str, str]:
    """Return the texts of a file by id; before each its title, if it has one."""
    texts = dict[str, str]()
    for row in open_table(str(file)).rows:
        name, title = (row.values.get(column) for column in ("_id", "title"))
        if not isinstance(name, str | int) or str(name) in texts:
            message = f'has an "_id" that is {"missing" if name is None else "used before"}'
            raise DataError(message, where=row.where, fix="Give each text an id of its own.")
        texts[str(name)] = f"{title or ''} {text_of(row.values, 'text', row.where)}".strip()
    return texts


def score_run(run: Run, grades: Grades, cutoffs: Many[int] = (10, 100)) -> dict[str, float]:
    """Return the mean over the queries of nDCG, MRR, recall and MAP among the first documents.

    As trec_eval: scores are compared in fp32, and of equal ones the highest id is first; the gain
    is the grade. As BEIR: a document with the id of the query is dropped. A query that is not in
    the run counts 0.

    Args:
        cutoffs: numbers of first documents; names are such as "ndcg@10".

    Examples:
        >>> score_run({"q": {"a": 0.5, "b": 0.7}}, {"q": {"a": 1}}, cutoffs=[10])
        {'ndcg@10': 0.6309297535714575, 'mrr@10': 0.5, 'recall@10': 1.0, 'map@10': 0.5}
    """
    rankings = ((ranked(run.get(query, {}), query), graded) for query, graded in grades.items())
    values = [_metrics(*ranking, cutoffs) for ranking in rankings]
    pairs = itertools.product(("ndcg", "mrr", "recall", "map"), cutoffs)
    names = [f"{name}@{k}" for name, k in pairs]
    return dict(zip(names, np.mean(values, axis=0).tolist(), strict=True))


def ranked(scores: Mapping[str, float], query: str | None = None) -> list[str]:
    """Return the documents of a query, best first; see `score_run`."""
    items = ((np.float32(score), name) for name, score in scores.items() if name != query)
    return [name for _, name in sorted(items, reverse=True)]


def _metrics(
    documents: Many[str], grades: Mapping[str, int], cutoffs: Iterable[int]
) -> list[float]:
    """Return the four metrics of one ranking at each number of first documents."""
    # Documents without a grade are not relevant, nor those graded below 0.
    gains = [max(0, grades.get(name, 0)) for name in documents]
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    hits = [rank for rank, gain in enumerate(gains, 1) if gain]
    if not ideal:
        return [0.0] * 4 * len(list(cutoffs))

    def dcg(values: Many[int]) -> float:
        """Return Σ gain / log2(place + 1)."""
        return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(values, 1))

    precisions = [number / rank for number, rank in enumerate(hits, 1)]
    columns = [
        (
            dcg(gains[:k]) / dcg(ideal[:k]),
            1 / hits[0] if hits and hits[0] <= k else 0.0,
            (relevant := sum(rank <= k for rank in hits)) / len(ideal),
            sum(precisions[:relevant]) / len(ideal),
        )
        for k in cutoffs
    ]
    return [value for row in zip(*columns, strict=True) for value in row]
