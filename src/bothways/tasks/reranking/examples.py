"""Queries with documents: from the columns of a table, or made in memory.

Read without naming columns: a row for each document (query, document, label), where neighbouring
rows of a query become one example; a row for each query with lists of documents and labels; and a
query with its relevant and its other documents (positive and negative, as texts or lists).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from bothways.core.advice import argument
from bothways.core.errors import DataError
from bothways.core.finding import Finding
from bothways.core.terminal import quantity
from bothways.data.tables import TableRow
from bothways.tasks.base import Row
from bothways.tasks.columns import Column, cell_of, describe_columns, is_absent, text_of
from bothways.tasks.text_checks import COMPLETE, check_answered, check_overlap, report_rows
from bothways.tasks.text_examples import TextColumns

QUERIES = ("query", "question", "anchor", "claim", "sentence1", "text_a", "text1")
DOCUMENTS = (
    "documents", "document", "passages", "passage", "texts", "text", "candidates", "docs", "doc",
    "answers", "answer", "sentence2", "text_b", "text2",
)  # fmt: skip
RELEVANT = ("positive", "positives", "pos")
OTHERS = ("negative", "negatives", "neg")
LABELS = (
    "label", "labels", "relevance", "relevances", "score", "scores", "grade", "grades", "target",
)  # fmt: skip

HOW = (
    f"Name the columns: {argument(text='QUERY', text_b='DOCUMENTS', label='LABEL')} (in a file "
    "without a header by number, from 0)."
)


@dataclass(frozen=True)
class RankExample:
    """A query with documents, how relevant each is (0: not at all) if known, and its source."""

    query: str
    documents: tuple[str, ...]
    labels: tuple[float, ...] | None = None
    where: str = "an example"


@dataclass(frozen=True)
class RankColumns(TextColumns):
    """Names of columns; numbers from 0 in a file without a header. None: guess, if it is clear.

    Attributes:
        text: the query.
        text_b: the document, or a list of documents.
        label: the relevance, or a list with that of each document.
        negatives: documents that are not relevant, where those of `text_b` all are; a text or a
            list. There is no label then.
    """

    negatives: str | None = None

    def __str__(self) -> str:
        names = {"query": self.text, "documents": self.text_b, "label": self.label}
        return describe_columns(**names, negatives=self.negatives)


NO_RANK_COLUMNS = RankColumns()

TABLE = (
    Column("text", "query", QUERIES),
    Column(
        "text_b", "documents", DOCUMENTS, companion="negatives",
        pairs=[*itertools.product(RELEVANT, OTHERS)],
    ),
    Column("label", "label", LABELS, answer=True, replaced_by="negatives"),
)  # fmt: skip


def rank_example(row: Row, columns: RankColumns, where: str) -> RankExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, or its value is not a text, a list of texts, or the labels
            of the documents.
    """
    assert columns.text is not None
    assert columns.text_b is not None
    query = text_of(row, columns.text, where, HOW)
    documents = _texts(row, columns.text_b, where)
    labels: tuple[float, ...] | None = None
    if columns.negatives is not None:
        remaining = _texts(row, columns.negatives, where)
        labels = (*(1.0 for _ in documents), *(0.0 for _ in remaining))
        documents += remaining
    elif columns.label is not None:
        labels = _labels(row, columns.label, len(documents), where)
    return RankExample(query, documents, labels, where)


def _texts(row: Row, column: str, where: str) -> tuple[str, ...]:
    value = cell_of(row, column, where)
    many = list(value) if isinstance(value, list | tuple) else [value]
    wrong_item = next((item for item in many if not isinstance(item, str)), None)
    if not all(isinstance(item, str) for item in many):
        kind = "a null" if wrong_item is None else f"a value of type {type(wrong_item).__name__}"
        message = f"column {column!r} holds {kind}, where a document or a list of documents must be"
        raise DataError(message, where=where, fix=HOW)
    return tuple(many)


def _labels(row: Row, column: str, documents: int, where: str) -> tuple[float, ...] | None:
    """Return the labels in a row; None if one is absent."""
    value = cell_of(row, column, where)
    many = list(value) if isinstance(value, list | tuple) else [value]
    if all(is_absent(item) or item == "" for item in many):
        return None
    if len(many) != documents:
        counts = f"{quantity(len(many), 'label(s)')} for {quantity(documents, 'document(s)')}"
        message = f"column {column!r} holds {counts}"
        raise DataError(message, where=where, fix="Give each document one label.")
    return tuple(_label(item, column, where) for item in many)


def _label(value: Any, column: str, where: str) -> float:
    words = {"true": 1.0, "false": 0.0}
    try:
        number = words.get(str(value).strip().lower(), math.nan)
        number = float(value) if math.isnan(number) else number
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        message = f"column {column!r} holds {value!r:.80}, which is not a relevance"
        fix = "Write a number from 0: 0 for not relevant, 1 for relevant, or a grade such as 3."
        raise DataError(message, where=where, fix=fix)
    return number


def joined_rows(rows: Iterable[TableRow], columns: RankColumns) -> Iterator[RankExample]:
    """Yield the examples of a table; neighbouring rows with one document each of a query are one.

    Rows with lists are examples by themselves.
    """
    group: list[RankExample] = []
    for row in rows:
        example = rank_example(row.values, columns, row.where)
        assert columns.text_b is not None
        single = columns.negatives is None and isinstance(row.values[columns.text_b], str)
        if group and not (single and _continues(group[-1], example)):
            yield _join(group)
            group = []
        group.append(example)
        if not single:
            yield _join(group)
            group = []
    if group:
        yield _join(group)


def _continues(last: RankExample, example: RankExample) -> bool:
    alike = (last.labels is None) == (example.labels is None)
    return alike and last.query == example.query


def _join(group: Many[RankExample]) -> RankExample:
    if len(group) == 1:
        return group[0]
    documents = tuple(text for example in group for text in example.documents)
    labels = tuple(label for example in group for label in example.labels or ())
    group_labels = labels if group[0].labels is not None else None
    return RankExample(group[0].query, documents, group_labels, group[0].where)


def check_rankings(train: Many[RankExample], dev: Many[RankExample]) -> list[Finding]:
    """Return the problems of queries with documents; `dev` may be empty."""
    examples = (*train, *dev)
    empty = [e.where for e in examples if not all(text.strip() for text in (e.query, *e.documents))]
    without = [e.where for e in examples if not e.documents]
    high = [e.where for e in train if any(label > 1 for label in e.labels or ())]
    fix = "Divide them by the highest grade; dev data may keep its grades."
    return [
        *report_rows("rows", without, "example(s) has|have no document", COMPLETE),
        *report_rows("rows", empty, "example(s) has|have an empty query or document", COMPLETE),
        *check_answered([e.where for e in examples if e.labels is None], len(examples)),
        *report_rows("labels", high, "training example(s) has|have labels above 1", fix),
        *_check_queries(train),
        *_check_queries(dev),
        *_check_balance(train, dev),
        *check_overlap(train, dev, lambda example: example.query, "queries"),
    ]


def _check_queries(examples: Many[RankExample]) -> list[Finding]:
    """Report queries that come again later: their documents are ranked by themselves."""
    seen, again = set[str](), list[str]()
    for example in examples:
        if example.query in seen:
            again.append(example.where)
        seen.add(example.query)
    fault = "example(s) has|have the query of an earlier one, and is|are ranked by themselves"
    return report_rows("rows", again, fault, "Sort the rows by query.", "warning")


def _check_balance(train: Many[RankExample], dev: Many[RankExample]) -> list[Finding]:
    labels = {label for e in train for label in e.labels or ()}
    findings = []
    if len(labels) == 1:
        message = (
            f"all training documents have the label {labels.pop():g}: there is nothing to learn"
        )
        fix = "Add documents that are not relevant (0), or relevant ones."
        findings.append(Finding("balance", "error", message, fix=fix))
    relevant = {e.query for e in dev if any(label > 0 for label in e.labels or ())}
    without = list({e.query: e.where for e in dev if e.query not in relevant}.values())
    fault = "dev query|queries has|have no relevant document, and count 0 in each metric"
    return findings + report_rows("balance", without, fault, severity="warning")
