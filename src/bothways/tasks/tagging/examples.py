"""Sentences with a tag for each word: from columns, from tables, or from running text.

Files are read as columns (`conll`), except tables: .jsonl, .parquet and Hub data sets hold a list
of words and a list of tags in each row. For prediction, .txt files hold a text a line, unless they
are columns, and tables may hold texts, which `word_splitter` splits. A .tsv is then a table if its
first line names a column of texts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bothways.core.advice import argument
from bothways.core.errors import DataError
from bothways.core.terminal import quantity
from bothways.core.urls import local_path
from bothways.data import text_io
from bothways.data.hub_rows import HUB
from bothways.data.tables import Table, open_table
from bothways.tasks.base import Row
from bothways.tasks.columns import cell_of
from bothways.tasks.tagging import conll, table_rows
from bothways.tasks.tagging.spans import read_spans, tag_words
from bothways.tasks.tagging.word_splitter import Splitter, split_words

TABLES = (".jsonl", ".json", ".parquet", ".csv")
"""Suffixes of tables. All others are columns; .tsv too, unless it is predicted and holds texts."""

_HEAD = 100
"""Number of lines from which the content of a file is detected."""

NEIGHBOURS = 512
"""Number of words of context on each side of a sentence: BERT's maximum length."""

Sentence = tuple[str, ...]


@dataclass(frozen=True)
class TagExample:
    """A sentence.

    Attributes:
        words: of the sentence.
        tags: one a word, in the scheme of the data.
        where: file and line.
        text: the text whose slices the words are; None for the words joined by blanks.
        starts: where each word begins in the text.
        before, after: neighbouring sentences of its document, for context.
    """

    words: Sentence
    tags: Sentence | None = None
    where: str = "an example"
    text: str | None = None
    starts: tuple[int, ...] = ()
    before: tuple[Sentence, ...] = ()
    after: tuple[Sentence, ...] = ()

    def __post_init__(self) -> None:
        if self.tags is not None and len(self.tags) != len(self.words):
            words, tags = quantity(len(self.words), "word(s)"), quantity(len(self.tags), "tag(s)")
            message = f"has {words} and {tags}"
            raise DataError(message, where=self.where, fix="Give each word one tag.")

    @property
    def whole(self) -> str:
        """The text."""
        return " ".join(self.words) if self.text is None else self.text

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each word in `whole`, in characters."""
        starts: Iterable[int] = self.starts
        if self.text is None:
            starts = itertools.accumulate((len(word) + 1 for word in self.words), initial=0)
        return [(start, start + len(word)) for start, word in zip(starts, self.words, strict=False)]


Numbered = Iterator[tuple[Any, TagExample]]
"""Examples, each with the key of its document; the key is None where there are no documents."""


@dataclass(frozen=True)
class TaggedFile:
    """An open source of sentences.

    Attributes:
        columns: the columns that are read.
        examples: an iterator over the sentences.
        share: returns how much has been read, from 0 to 1; None where this is unknown.
        table: the table that is read; None for columns of words.
        fields: its columns.
        notes: sentences for the user about what is read.
        unused: columns of words and tags that are not read.
    """

    columns: table_rows.TagColumns
    examples: Numbered
    share: Callable[[], float] | None
    table: Table | None = None
    fields: table_rows.TagColumns = table_rows.TagColumns()
    notes: Many[str] = ()
    unused: Many[str] = ()


def open_tagged(
    source: str,
    requested: table_rows.TagColumns,
    defaults: table_rows.TagColumns,
    *,
    labelled: bool,
    splitter: Splitter = "auto",
) -> TaggedFile:
    """Open a file, a Hub data set or the standard input ("-").

    Args:
        requested: columns that the user asks for.
        defaults: columns to read where none are asked for, if the data has them.
        labelled: whether tags are read.
        splitter: how texts are split into words.

    Raises:
        DataError: as `open_table`; a column is missing; for prediction, texts that are read as
            columns; while reading, a line without a word and a tag, lists of different lengths.
    """
    path = local_path(source)
    suffix = path.with_suffix("").suffix if path.suffix in text_io.COMPRESSED else path.suffix
    if not labelled and requested.text is None and _is_lines(source, path, suffix):
        table = open_table(source)
        fields = table_rows.TagColumns("text")
        examples = _lines_of_text(table, fields, splitter)
        return TaggedFile(defaults, examples, table.share, table, fields)
    objects = (
        text_io.is_stream(source) and requested.text is not None and not requested.text.isdecimal()
    )
    texts = (
        not labelled and suffix == ".tsv" and path.is_file() and _has_texts(path, requested.text)
    )
    if source.startswith(HUB) or suffix in TABLES or objects or texts:
        table = open_table(source, [] if requested.text is None else [requested.text])
        arranged = table_rows.arrange_rows(table.rows, requested, defaults, labelled=labelled)
        first = next(arranged.rows, None)
        if first is None:
            raise DataError("holds no annotated row", where=table.where, fix="Annotate its texts.")
        values = {**dict.fromkeys(table.names), **first.values}
        columns = table_rows.choose_columns(values, table.where, requested, defaults, labelled)
        columns = replace(columns, sentence=arranged.sentence)
        table = replace(table, rows=itertools.chain([first], arranged.rows))
        examples = _from_table(table, columns, splitter)
        return TaggedFile(columns, examples, table.share, table, columns, arranged.notes)
    return _open_columns(source, path, requested, defaults, labelled=labelled)


def _head(path: Path) -> list[str]:
    with contextlib.closing(text_io.read_lines(path)) as lines:
        return [line for _, line in itertools.islice(lines, _HEAD)]


def _is_lines(source: str, path: Path, suffix: str) -> bool:
    """Return True if a source to predict has a text in each line."""
    if text_io.is_stream(source):
        return True
    return suffix == ".txt" and not (path.is_file() and conll.are_columns(_head(path)))


def _has_texts(path: Path, requested: str | None) -> bool:
    """Return True if a .tsv is a table with a column of texts."""
    if requested is not None:
        return not requested.isdecimal()
    return any(name in table_rows.TEXTS for line in _head(path)[:1] for name in line.split("\t"))


def _open_columns(
    source: str,
    path: Path,
    requested: table_rows.TagColumns,
    defaults: table_rows.TagColumns,
    *,
    labelled: bool,
) -> TaggedFile:
    where, lines, share = _lines(source, path)
    head = list(itertools.islice(lines, conll.SAMPLE))
    layout, columns = _layout(
        [line for _, line in head], where, requested, defaults, labelled=labelled
    )
    sentences = conll.read_columns(itertools.chain(head, lines), where, layout)
    if not labelled:
        sentences = _checked(sentences, where)
    examples = (
        (item.document, TagExample(item.words, item.tags, f"{where}:{item.line}"))
        for item in sentences
    )
    notes = [f"{where}: {layout.note}"] if layout.note else []
    selected = columns if labelled else defaults
    return TaggedFile(selected, examples, share, notes=notes, unused=layout.unused)


def _layout(
    head: list[str],
    where: str,
    requested: table_rows.TagColumns,
    defaults: table_rows.TagColumns,
    *,
    labelled: bool,
) -> tuple[conll.ColumnLayout, table_rows.TagColumns]:
    """Return the layout of columns, and those that are asked for or usual.

    Usual columns with names count if the file has them.
    """
    text, label = requested.text, requested.label if labelled else None
    layout = conll.find_layout(head, where, text, label, labelled=labelled)
    usual_text, usual_label = (
        name if name is not None and (name.isdecimal() or name in layout.known) else None
        for name in (defaults.text, defaults.label if labelled else None)
    )
    columns = table_rows.TagColumns(text or usual_text, label or usual_label)
    if (columns.text, columns.label) != (text, label):
        layout = conll.find_layout(head, where, columns.text, columns.label, labelled=labelled)
    return layout, columns


def _checked(
    sentences: Iterator[conll.ColumnSentence], where: str
) -> Iterator[conll.ColumnSentence]:
    """Yield the sentences; DataError if most words of the first one have blanks, as texts do."""
    first = next(sentences)
    blank = [word for word in first.words if len(word.split()) > 1]
    if 2 * len(blank) > len(first.words):
        message = f"{len(blank)} of the first {len(first.words)} words have blanks, as texts do: "
        fix = (
            "Texts are read from a .txt, one a line, or from a column with a name, such as "
            f'"text": {argument(text="NAME")}.'
        )
        raise DataError(message + repr(blank[0][:40]), where=f"{where}:{first.line}", fix=fix)
    yield first
    yield from sentences


def with_context(examples: Numbered) -> Iterator[TagExample]:
    """Yield each example with its neighbours in the document as context.

    One document is in memory at a time.
    """
    for document, group in itertools.groupby(examples, key=lambda pair: pair[0]):
        sentences = [example for _, example in group]
        if document is None:
            yield from sentences
            continue
        words = [example.words for example in sentences]
        for position, example in enumerate(sentences):
            preceding = _within(reversed(words[max(0, position - NEIGHBOURS) : position]))[::-1]
            following = _within(words[position + 1 : position + 1 + NEIGHBOURS])
            yield replace(example, before=preceding, after=following)


def _within(sentences: Iterable[Sentence]) -> tuple[Sentence, ...]:
    """Return the first sentences, until they have `NEIGHBOURS` words."""
    result, count = [], 0
    for words in sentences:
        if count >= NEIGHBOURS:
            break
        result.append(words)
        count += len(words)
    return tuple(result)


def _lines(
    source: str, path: Path
) -> tuple[str, Iterator[tuple[int, str]], Callable[[], float] | None]:
    if source == text_io.STDIN:
        return text_io.STANDARD_INPUT, text_io.standard_input(), None
    text_io.file_at(
        source, "Check the name; readable are columns of words and tags, .jsonl, .parquet."
    )
    bytes_read, size = text_io.BytesRead(), max(1, path.stat().st_size)
    return str(path), text_io.read_lines(path, bytes_read), lambda: bytes_read.position / size


def _lines_of_text(table: Table, columns: table_rows.TagColumns, splitter: Splitter) -> Numbered:
    """Yield lines of text; an empty line ends a document."""
    document = 0
    for row in table.rows:
        example = example_of(row.values, columns, row.where, splitter)
        document += not example.words
        yield document, example


def _from_table(table: Table, columns: table_rows.TagColumns, splitter: Splitter) -> Numbered:
    for row in table.rows:
        document = None if columns.document is None else row.values.get(columns.document)
        yield document, example_of(row.values, columns, row.where, splitter)


def example_of(
    row: Row, columns: table_rows.TagColumns, where: str, splitter: Splitter
) -> TagExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, or its value is not a list of words or of tags.
    """
    assert columns.text is not None
    words, label = cell_of(row, columns.text, where), columns.label
    if isinstance(words, str) and (label is None or not _are_tags(row.get(label))):
        spans = split_words(words, splitter)
        slices, starts = tuple(words[a:b] for a, b in spans), tuple(a for a, _ in spans)
        tags = None
        if label is not None:
            entities = read_spans(cell_of(row, label, where), label, where)
            tags = tag_words(words, spans, entities, where, splitter)
        return TagExample(slices, tags, where, words, starts)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise table_rows.not_words(columns.text, words, where, labelled=label is not None)
    return TagExample(tuple(words), None if label is None else _tags(row, label, where), where)


def _are_tags(value: Any) -> bool:
    """Return True if a value is a tag or a list of tags, not of spans."""
    if isinstance(value, list | tuple):
        return any(isinstance(item, str | int) for item in value)
    return isinstance(value, str | int)


def _tags(row: Row, column: str, where: str) -> Sentence:
    values = cell_of(row, column, where)
    if not isinstance(values, list) or not all(isinstance(value, str | int) for value in values):
        message = f"column {column!r} holds {table_rows.kind_of(values)}, not a list of tags"
        raise DataError(message, where=where, fix="Give each word a tag, such as O.")
    return tuple(str(value).strip() for value in values)
