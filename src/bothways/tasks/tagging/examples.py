"""Sentences with a tag for each word: from columns, from tables, or from running text.

Files are read as columns (`conll`), except tables: .jsonl, .parquet and Hub data sets hold a list
of words and a list of tags in each row. For prediction, .txt files hold a text a line, unless they
are columns, and tables may hold texts, which `word_splitter` splits. A .tsv is then a table if its
first line names a column of texts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bothways.core.errors import DataError, argument
from bothways.core.files import local_path
from bothways.core.terminal import quantity
from bothways.data import text_io
from bothways.data.tables import HUB, TableRow, open_lines, open_table
from bothways.tasks.base import Reading, Row
from bothways.tasks.columns import asked_columns, cell_of, unused_columns
from bothways.tasks.tagging import conll, table_rows
from bothways.tasks.tagging.spans import FORM, read_spans, tags_from_spans
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


def open_tagged(
    task: Any, source: str, requested: table_rows.TagColumns, *, labelled: bool
) -> Reading[Any]:
    """Open a file, a Hub data set or the standard input ("-").

    Args:
        task: the tagging task, whose columns are read where none are asked for, if the data has
            them.
        requested: columns that the user asks for.
        labelled: whether tags are read.

    Returns:
        A reading whose examples are `Numbered`.

    Raises:
        DataError: as `open_table`; a column is missing; for prediction, texts that are read as
            columns; while reading, a line without a word and a tag, lists of different lengths.
    """
    path, text = local_path(source), requested.text
    suffix, stream = text_io.suffix_of(path), text_io.is_stream(source)
    names = text is not None and not text.isdecimal()
    head = list[str]()
    if not labelled and suffix in (".txt", ".tsv") and path.is_file():
        with contextlib.closing(text_io.read_lines(path)) as first_lines:
            head = [line for _, line in itertools.islice(first_lines, _HEAD)]
    # A .tsv is a table if its first line names a column of texts.
    texts = suffix == ".tsv" and any(
        name in table_rows.TEXTS for line in head[:1] for name in line.split("\t")
    )
    lines = stream or (suffix == ".txt" and not conll.are_columns(head))
    lines = lines and not labelled and text is None
    if lines:
        table, columns, notes = open_table(source), task.columns, list[str]()
        fields = table_rows.TagColumns("text")
    elif (
        source.startswith(HUB)
        or suffix in TABLES
        or (stream and names)
        or (head and suffix == ".tsv" and (names or (text is None and texts)))
    ):
        table = open_table(source, [] if text is None else [text])
        arranged = table_rows.arrange_rows(table.rows, requested, task.columns, labelled=labelled)
        first, notes = next(arranged.rows, None), arranged.notes
        if first is None:
            raise DataError("holds no annotated row", where=table.where, fix="Annotate its texts.")
        values = {**dict.fromkeys(table.names), **first.values}
        columns = table_rows.choose_tag_columns(
            values, table.where, requested, task.columns, labelled
        )
        fields = columns = replace(columns, sentence=arranged.sentence)
        table = replace(table, rows=itertools.chain([first], arranged.rows))
    else:
        return _open_columns(task, source, requested, labelled=labelled)

    def parse(row: TableRow) -> TagExample:
        return tag_example(row.values, fields, row.where, task.splitter)

    def numbered() -> Numbered:
        document = 0
        for row in table.rows:
            example = parse(row)
            document += not example.words  # an empty line ends a document
            name = fields.document
            yield document if lines else None if name is None else row.values.get(name), example

    unused = unused_columns(table.names, asked_columns(fields))
    opened = task.with_columns(columns)
    return Reading(opened, numbered(), table.share, table, parse, notes, unused)


def _open_columns(
    task: Any, source: str, requested: table_rows.TagColumns, *, labelled: bool
) -> Reading[Any]:
    """Open columns of words, and find those that are asked for, or usual if the file has them."""
    fix = "Check the name; readable are columns of words and tags, .jsonl, .parquet."
    location, lines, share, _ = open_lines(source, fix)
    head = list(itertools.islice(lines, conll.SAMPLE))
    find = functools.partial(
        conll.find_layout, [line for _, line in head], location, labelled=labelled
    )
    text, label = requested.text, requested.label if labelled else None
    layout = find(text, label)
    usual = (
        name if name is not None and (name.isdecimal() or name in layout.known) else None
        for name in (task.columns.text, task.columns.label if labelled else None)
    )
    columns = table_rows.TagColumns(*(a or b for a, b in zip((text, label), usual, strict=True)))
    if (columns.text, columns.label) != (text, label):
        layout = find(columns.text, columns.label)
    sentences = conll.read_columns(itertools.chain(head, lines), location, layout)
    if not labelled:
        sentences = _checked(sentences, location)
    examples = (
        (item.document, TagExample(item.words, item.tags, f"{location}:{item.line}"))
        for item in sentences
    )
    notes = [f"{location}: {layout.note}"] if layout.note else []
    opened = task.with_columns(columns) if labelled else task
    return Reading(opened, examples, share, notes=notes, unused=layout.unused)


def _checked(
    sentences: Iterator[conll.ColumnSentence], location: str
) -> Iterator[conll.ColumnSentence]:
    """Yield the sentences; DataError if most words of the first one have blanks, as texts do."""
    first = next(sentences)
    blank = [word for word in first.words if len(word.split()) > 1]
    if 2 * len(blank) > len(first.words):
        message = f"{len(blank)} of the first {len(first.words)} words have blanks, as texts do: "
        fix = f"Give texts in a .txt, one a line, or in a named column: {argument(text='NAME')}."
        raise DataError(message + repr(blank[0][:40]), where=f"{location}:{first.line}", fix=fix)
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


def tag_example(
    row: Row, columns: table_rows.TagColumns, where: str, splitter: Splitter
) -> TagExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, or its value is not a list of words or of tags.
    """
    assert columns.text is not None
    words, label = cell_of(row, columns.text, where), columns.label
    tags: Sentence | None = None
    answers = None if label is None else row.get(label)
    items = answers if isinstance(answers, list | tuple) else [answers]
    # A text with a tag or a list of tags is an error: a text has a list of spans.
    if isinstance(words, str) and not any(isinstance(item, str | int) for item in items):
        spans = split_words(words, splitter)
        slices, starts = tuple(words[a:b] for a, b in spans), tuple(a for a, _ in spans)
        if label is not None:
            entities = read_spans(cell_of(row, label, where), label, where)
            tags = tags_from_spans(words, spans, entities, where)
        return TagExample(slices, tags, where, words, starts)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        message = f"column {columns.text!r} holds {_kind(words)}, not a list of words"
        fix = 'Each row is like {"words": ["In", "Oslo"], "tags": ["O", "B-LOC"]}.'
        if label is not None and isinstance(words, str):
            fix += (
                f" {FORM} For a word in each row name the sentences: task.columns.sentence=NAME. "
                f"For labels of texts: {argument(task='classify')}."
            )
        raise DataError(message, where=where, fix=fix)
    if label is not None:
        values = cell_of(row, label, where)
        if not isinstance(values, list) or not all(isinstance(tag, str | int) for tag in values):
            message = f"column {label!r} holds {_kind(values)}, not a list of tags"
            raise DataError(message, where=where, fix="Give each word a tag, such as O.")
        tags = tuple(str(tag).strip() for tag in values)
    return TagExample(tuple(words), tags, where)


def _kind(value: Any) -> str:
    """Return the kind of a value, for messages."""
    if isinstance(value, list):
        return f"a list with {' and '.join(sorted({type(item).__name__ for item in value}))}"
    return "a text" if isinstance(value, str) else type(value).__name__
