"""Tables of tagged sentences: the columns that are read, and rows that become one example each.

A row is a sentence with a list of words and one of tags, or a text with a list of character spans
(`spans`). Some rows are brought into this form first:

- [text, {"entities": …}], as for spaCy;
- {"data": {"text": …}, "annotations": […]}, as Label Studio exports it;
- a word and its tag in each row, with the number of the sentence in a column of its own, which may
  be empty after the first row of a sentence.

Rows that their annotator skipped, rejected or did not reach are dropped from labelled data.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

from bothways.core.errors import DataError
from bothways.core.terminal import quantity
from bothways.data.tables import RowError, TableRow
from bothways.tasks.base import Row
from bothways.tasks.columns import (
    Column,
    Columns,
    cell_of,
    columns_advice,
    guess_column,
    is_absent,
    label_of,
    require_columns,
    usual_columns,
)

WORDS = ("words", "tokens")
TAGS = ("tags", "ner_tags", "labels", "ner")
TEXTS = ("text", "sentence", "content")
SPANS = ("entities", "spans", "label", "labels")
WORD, TAG = ("word", "token", "form"), ("tag", "ner_tag", "label", "entity")
"""Common aliases of columns with one word and one tag."""

_SENTENCE = re.compile(r"sent(ence)?s?[ _.-]*(#|id|idx|index|number|num|no|nr)?", re.IGNORECASE)
"""Common aliases of a column that numbers sentences."""
_NOBODY = object()
"""The entities of a text that nobody annotated."""
_TEXT, _LABEL = Column("text", "words"), Column("label", "tags")


@dataclass(frozen=True)
class TagColumns(Columns):
    """Names of columns in tables; in columns of words, numbers from 0, or names of the format.

    None: guess; in columns of words by their content, see `conll`.

    Attributes:
        text: the words, or a text.
        label: the tags, or the character spans of entities in the text.
        document: in tables, a value that is equal in all sentences of a document.
        sentence: in tables with a word in each row, a value that is equal in all words of a
            sentence, or absent after its first word.
    """

    text: str | None = None
    label: str | None = None
    document: str | None = None
    sentence: str | None = None


def choose_tag_columns(
    row: Row, where: str, requested: TagColumns, defaults: TagColumns, labelled: bool | None
) -> TagColumns:
    """Return the columns to read from a table; see `columns.choose_columns`.

    Args:
        row: the first row: its values decide between words and texts.
    """
    names = tuple(row)
    label = requested.label if labelled is not False else None
    columns = (requested.text, label, requested.document, requested.sentence)
    require_columns(columns, names, where, columns_advice([_TEXT, _LABEL]))
    text = next((name for name in (requested.text, defaults.text) if name in names), None)
    if text is None:
        words = [  # lists of objects, such as the tokens of Prodigy, are no words
            name
            for name in usual_columns((*WORDS, *WORD), names)
            if not isinstance(value := row[name], list | tuple)
            or not any(isinstance(item, Mapping) for item in value)
        ]
        # Words win over the text that they come from, unless there are no tags for them.
        if labelled is not False and usual_columns(TEXTS, names) and not usual_columns(TAGS, names):
            words = []
        text = guess_column(_TEXT, words[:1] or TEXTS, names, where)
    remaining, spans = [name for name in names if name != text], list[str]()
    if isinstance(row.get(text), str):
        spans = [
            name for name in usual_columns(SPANS, remaining) if isinstance(row[name], list | tuple)
        ]
    tag_names = spans or usual_columns(TAGS, remaining) or usual_columns(TAG, remaining)
    if labelled is None:
        labelled = defaults.label in names or bool(tag_names)
    if labelled:
        label = next((name for name in (requested.label, defaults.label) if name in names), None)
        label = label or guess_column(_LABEL, tag_names or TAGS, names, where)
    document, sentence = (
        getattr(requested, role) or (usual if (usual := getattr(defaults, role)) in names else None)
        for role in ("document", "sentence")
    )
    return TagColumns(text, label, document, sentence)


class ArrangedRows(NamedTuple):
    """Rows with one example each.

    Attributes:
        rows: an iterator.
        notes: for the user, complete after the last row.
        sentence: the column that numbers the sentences, if several rows were joined.
    """

    rows: Iterator[TableRow]
    notes: list[str]
    sentence: str | None = None


def arrange_rows(
    rows: Iterable[TableRow], requested: TagColumns, defaults: TagColumns, *, labelled: bool
) -> ArrangedRows:
    """Return rows with one example each.

    Args:
        rows: of a file, or in memory, where other things than rows pass unchanged.
        labelled: whether answers are read.

    Raises:
        DataError: a column that is asked for is missing; while reading, a row of a known form with
            a value that the form does not have.
    """
    notes = list[str]()
    rows = map(_plain_row, rows)
    if labelled:
        rows = _without_skipped(rows, notes)
    head_row = next(rows, None)
    if head_row is None:
        return ArrangedRows(iter(()), notes)
    all_rows = itertools.chain([head_row], rows)  # unlike a generator, goes on after an error
    columns = _word_columns(head_row, requested, defaults, labelled=labelled)
    if columns is None:
        return ArrangedRows(all_rows, notes)
    return ArrangedRows(_joined_rows(all_rows, columns), notes, columns.sentence)


def _plain_row(row: TableRow) -> TableRow:
    match row.values:
        case [str(text), Mapping() as rest]:
            return TableRow({"text": text, **rest}, row.where)
        case {"data": Mapping() as data, "annotations": list() as done}:
            texts = [name for name, value in data.items() if isinstance(value, str)]
            name = "text" if "text" in texts else texts[0] if len(texts) == 1 else None
            if name is None:
                message = f"has {quantity(len(texts), 'text(s)')} in its data "
                message += f"({', '.join(texts) or 'none'})"
                raise DataError(message, where=row.where, fix='Call the text "text".')
            complete = [a for a in done if isinstance(a, Mapping) and not a.get("was_cancelled")]
            try:
                results = [
                    [x["value"] for x in a.get("result") or () if "labels" in x.get("value", {})]
                    for a in complete
                ]
            except (AttributeError, TypeError) as error:
                message = 'has an annotation whose "result" is not a list of objects'
                fix = "Export the texts again, as JSON."
                raise DataError(message, where=row.where, fix=fix) from error
            if any(result != results[0] for result in results):
                message = f"has {len(results)} annotations that differ"
                fix = "Export one annotation of each text."
                raise DataError(message, where=row.where, fix=fix)
            entities = results[0] if results else _NOBODY
            return TableRow({**data, "text": data[name], "entities": entities}, row.where)
        case _:
            return row


def _without_skipped(rows: Iterator[TableRow], notes: list[str]) -> Iterator[TableRow]:
    """Yield the rows that are annotated and accepted; a note counts the others."""
    skipped = Counter[str]()
    for row in rows:
        reason = None  # to skip the row, as tools of annotation mark it
        if isinstance(row.values, Mapping):
            if row.values.get("answer") in ("reject", "ignore") and "text" in row.values:
                reason = f'their "answer" is {row.values["answer"]}'
            elif row.values.get("entities") is _NOBODY:
                reason = "nobody annotated them"
        if reason is None:
            yield row
            continue
        skipped[reason] += 1
        notes[:] = [
            f"{quantity(count, 'row(s)')} left out: {reason}" for reason, count in skipped.items()
        ]


def _word_columns(
    head_row: TableRow, requested: TagColumns, defaults: TagColumns, *, labelled: bool
) -> TagColumns | None:
    """Return the columns of a table with a word in each row; None for another table."""
    row = head_row.values
    if not isinstance(row, Mapping):
        return None
    names = [*row]

    def choose(primary: str | None, other: str | None, known: Many[str]) -> str | None:
        """Return the column that is asked for, or usual, or has a known name."""
        exact = [name for name in (primary, other) if name in names]
        return next(iter((*exact, *usual_columns(known, names))), None)

    numbers = [name for name in names if _SENTENCE.fullmatch(name.strip())]
    sentence = choose(requested.sentence, defaults.sentence, numbers)
    word = choose(requested.text, defaults.text, (*WORDS, *WORD))
    tag = choose(requested.label, defaults.label, (*TAGS, *TAG)) if labelled else None
    if sentence is None or word is None or word == sentence or not isinstance(row[word], str):
        return None
    if labelled and (tag is None or not isinstance(row[tag], str | int)):
        return None
    explicit = sentence in (requested.sentence, defaults.sentence)
    if not labelled and not explicit and word.lower() not in (*WORDS, *WORD):
        return None
    return TagColumns(word, tag, sentence=sentence)


def _joined_rows(rows: Iterator[TableRow], columns: TagColumns) -> Iterator[TableRow]:
    """Yield a row for each sentence, with the lists of its words and tags."""
    group, current = list[TableRow](), None
    try:
        for row in rows:
            value = row.values.get(columns.sentence or "")
            # The number may stand in the first row of a sentence only: 1, empty, empty, 2 …
            begins = not is_absent(value) and value != ""
            if group and begins and value != current:
                yield _joined(group, columns)
                group = []
            current = value if begins else current
            group.append(row)
    except RowError as error:  # a sentence without one of its words
        raise DataError(error.what, where=error.where, fix=error.fix) from error
    if group:
        yield _joined(group, columns)


def _joined(group: list[TableRow], columns: TagColumns) -> TableRow:
    assert columns.text is not None
    words = list[str]()
    for row in group:
        value = cell_of(row.values, columns.text, row.where)
        if not isinstance(value, str | int):
            message = f"column {columns.text!r} holds {type(value).__name__}, not a word"
            fix = "Write the word. pandas reads NA as missing: read_csv(…, keep_default_na=False)."
            raise DataError(message, where=row.where, fix=fix)
        words.append(str(value))
    lists = {columns.text: words}
    if columns.label is not None:
        lists[columns.label] = [
            label_of(cell_of(row.values, columns.label, row.where), columns.label, row.where) or ""
            for row in group
        ]
    return TableRow({**group[0].values, **lists}, group[0].where)
