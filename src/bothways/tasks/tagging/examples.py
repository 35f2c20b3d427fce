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
from bothways.core.terminal import counted
from bothways.core.urls import local_path
from bothways.data.hub_rows import HUB
from bothways.data.tables import Table, open_table
from bothways.data.text_io import (
    COMPRESSED,
    STANDARD_INPUT,
    STDIN,
    BytesRead,
    file_at,
    is_stream,
    read_lines,
    standard_input,
)
from bothways.tasks.base import Row
from bothways.tasks.columns import (
    cell_of,
    describe_columns,
    guess_column,
    require_columns,
    usual_columns,
)
from bothways.tasks.tagging.conll import ColumnSentence, are_columns, read_columns
from bothways.tasks.tagging.word_splitter import Splitter, split_words

WORDS = ("words", "tokens")
TAGS = ("tags", "ner_tags", "labels", "ner")
TEXTS = ("text", "sentence", "content")

TABLES = (".jsonl", ".parquet", ".csv")
"""Suffixes of tables. All others are columns; .tsv too, unless it is predicted and holds texts."""

_HEAD = 100
"""Number of lines from which the content of a file is detected."""

NEIGHBOURS = 512
"""Number of words of context on each side of a sentence: BERT's maximum length."""

_HOW = f"Name the columns: {argument(text='NAME', label='NAME')}."

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
            what = f"has {counted(len(self.words), 'words')} and {counted(len(self.tags), 'tags')}"
            raise DataError(what, where=self.where, fix="Give each word one tag.")

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


@dataclass(frozen=True)
class TagColumns:
    """Names of columns in tables; in columns of words, numbers from 0.

    None: guess; in columns of words, the first and the last.

    Attributes:
        text: the words; for prediction, possibly a text.
        label: the tags.
        document: in tables, a value that is equal in all sentences of a document.
    """

    text: str | None = None
    label: str | None = None
    document: str | None = None

    def __str__(self) -> str:
        return describe_columns(**vars(self))


FIRST_AND_LAST = TagColumns()

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
    """

    columns: TagColumns
    examples: Numbered
    share: Callable[[], float] | None
    table: Table | None = None
    fields: TagColumns = TagColumns()


def open_tagged(
    source: str,
    asked: TagColumns,
    usual: TagColumns,
    *,
    labelled: bool,
    splitter: Splitter = "rules",
) -> TaggedFile:
    """Open a file, a Hub data set or the standard input ("-").

    Args:
        asked: columns that the user asks for.
        usual: columns to read where none are asked for, if the data has them.
        labelled: whether tags are read.
        splitter: how texts are split into words.

    Raises:
        DataError: as `open_table`; a column is missing; for prediction, texts that are read as
            columns; while reading, a line without a word and a tag, lists of different lengths.
    """
    path = local_path(source)
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    if not labelled and asked.text is None and _is_lines(source, path, suffix):
        table = open_table(source)
        fields = TagColumns("text")
        examples = _lines_of_text(table, fields, splitter)
        return TaggedFile(usual, examples, table.share, table, fields)
    objects = is_stream(source) and asked.text is not None and not asked.text.isdecimal()
    texts = not labelled and suffix == ".tsv" and path.is_file() and _has_texts(path, asked.text)
    if source.startswith(HUB) or suffix in TABLES or objects or texts:
        table = open_table(source, [] if asked.text is None else [asked.text])
        columns = choose_columns(table.names, table.where, asked, usual, labelled)
        examples = _from_table(table, columns, splitter)
        return TaggedFile(columns, examples, table.share, table, columns)
    return _open_columns(source, path, asked, usual, labelled=labelled)


def _head(path: Path) -> list[str]:
    with contextlib.closing(read_lines(path)) as lines:
        return [line for _, line in itertools.islice(lines, _HEAD)]


def _is_lines(source: str, path: Path, suffix: str) -> bool:
    """Return whether a source to predict has a text in each line."""
    if is_stream(source):
        return True
    return suffix == ".txt" and not (path.is_file() and are_columns(_head(path)))


def _has_texts(path: Path, asked: str | None) -> bool:
    """Return whether a .tsv is a table with a column of texts."""
    if asked is not None:
        return not asked.isdecimal()
    return any(name in TEXTS for line in _head(path)[:1] for name in line.split("\t"))


def _open_columns(
    source: str, path: Path, asked: TagColumns, usual: TagColumns, *, labelled: bool
) -> TaggedFile:
    word = _number("text", asked.text, usual.text, source)
    tag = _number("label", asked.label, usual.label, source) if labelled else None
    where, lines, share = _lines(source, path)
    field = (-1 if tag is None else int(tag)) if labelled else None
    sentences = read_columns(lines, where, int(word or 0), field)
    if not labelled:
        sentences = _checked(sentences, where)
    examples = (
        (item.document, TagExample(item.words, item.tags, f"{where}:{item.line}"))
        for item in sentences
    )
    return TaggedFile(TagColumns(word, tag) if labelled else usual, examples, share)


def _checked(sentences: Iterator[ColumnSentence], where: str) -> Iterator[ColumnSentence]:
    """Yield the sentences; DataError if most words of the first one have blanks, as texts do."""
    first = next(sentences)
    blank = [word for word in first.words if len(word.split()) > 1]
    if 2 * len(blank) > len(first.words):
        what = f"{len(blank)} of the first {len(first.words)} words have blanks, as texts do: "
        fix = (
            "Texts are read from a .txt, one a line, or from a column with a name, such as "
            f'"text": {argument(text="NAME")}.'
        )
        raise DataError(what + repr(blank[0][:40]), where=f"{where}:{first.line}", fix=fix)
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
        for place, example in enumerate(sentences):
            before = _within(reversed(words[max(0, place - NEIGHBOURS) : place]))[::-1]
            after = _within(words[place + 1 : place + 1 + NEIGHBOURS])
            yield replace(example, before=before, after=after)


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
    if source == STDIN:
        return STANDARD_INPUT, standard_input(), None
    file_at(source, "Check the name; readable are columns of words and tags, .jsonl, .parquet.")
    bytes_read, size = BytesRead(), max(1, path.stat().st_size)
    return str(path), read_lines(path, bytes_read), lambda: bytes_read.position / size


def _number(role: str, asked: str | None, usual: str | None, source: str) -> str | None:
    """Return the number of a column; None for the default one."""
    if asked is not None and not asked.isdecimal():
        what = f"its columns have numbers, and {role} = {asked!r} is a name"
        fix = f"Name columns by their number, from 0: {argument(text='0', label='3')}."
        raise DataError(what, where=source, fix=fix)
    return asked or (usual if usual is not None and usual.isdecimal() else None)


def choose_columns(
    names: Many[str], where: str, asked: TagColumns, usual: TagColumns, labelled: bool | None
) -> TagColumns:
    """Return the columns to read from a table; see `text_examples.choose_columns`."""
    label = asked.label if labelled is not False else None
    require_columns((asked.text, label, asked.document), names, where, _HOW)
    if labelled is None:
        labelled = usual.label in names or any(name in names for name in TAGS)
    text = next((name for name in (asked.text, usual.text) if name in names), None)
    if text is None:
        # Words win over the text that they come from.
        words = usual_columns(WORDS, names)
        known = words[:1] or (() if labelled else TEXTS)
        text = guess_column("words", known, names, where, _HOW)
    if labelled:
        label = next((name for name in (asked.label, usual.label) if name in names), None)
        label = label or guess_column("tags", TAGS, names, where, _HOW)
    document = asked.document or (usual.document if usual.document in names else None)
    return TagColumns(text, label, document)


def _lines_of_text(table: Table, columns: TagColumns, splitter: Splitter) -> Numbered:
    """Yield lines of text; an empty line ends a document."""
    document = 0
    for row in table.rows:
        example = example_of(row.values, columns, row.where, splitter)
        document += not example.words
        yield document, example


def _from_table(table: Table, columns: TagColumns, splitter: Splitter) -> Numbered:
    for row in table.rows:
        document = None if columns.document is None else row.values.get(columns.document)
        yield document, example_of(row.values, columns, row.where, splitter)


def example_of(row: Row, columns: TagColumns, where: str, splitter: Splitter) -> TagExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, or its value is not a list of words or of tags.
    """
    assert columns.text is not None
    words = cell_of(row, columns.text, where)
    if isinstance(words, str) and columns.label is None:
        spans = split_words(words, splitter)
        slices, starts = tuple(words[a:b] for a, b in spans), tuple(a for a, _ in spans)
        return TagExample(slices, None, where, words, starts)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        what = f"column {columns.text!r} holds {_kind(words)}, not a list of words"
        fix = 'Each row is like {"words": ["In", "Oslo"], "tags": ["O", "B-LOC"]}.'
        raise DataError(what, where=where, fix=fix)
    tags = None if columns.label is None else _tags(row, columns.label, where)
    return TagExample(tuple(words), tags, where)


def _tags(row: Row, column: str, where: str) -> Sentence:
    values = cell_of(row, column, where)
    if not isinstance(values, list) or not all(isinstance(value, str | int) for value in values):
        what = f"column {column!r} holds {_kind(values)}, not a list of tags"
        raise DataError(what, where=where, fix="Give each word a tag, such as O.")
    return tuple(str(value).strip() for value in values)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list with {' and '.join(sorted({type(item).__name__ for item in value}))}"
    return "a text" if isinstance(value, str) else type(value).__name__
