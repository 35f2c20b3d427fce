"""Sentences with a tag for each word: from columns, from tables, or from running text.

Columns (`conll`) are files of any suffix but those of tables: .jsonl, .parquet and Hub data sets hold a list of words and
one of tags in each row. To predict, .txt files hold a text a line, and tables may hold texts: their words are found by `words`.
A .tsv is a table then, if its first line names a column of texts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bothways.core.errors import DataError
from bothways.data.tables import HUB, Table, TableRow, open_table
from bothways.data.text_io import (
    COMPRESSED,
    STANDARD_INPUT,
    STDIN,
    BytesRead,
    file_at,
    read_lines,
    standard_input,
)
from bothways.tasks.tagging.conll import Lines, are_columns, read_columns
from bothways.tasks.tagging.word_splitter import split_words
from bothways.tasks.text_examples import cell_of

WORDS = ("words", "tokens")
TAGS = ("tags", "ner_tags", "labels", "ner")
TEXTS = ("text", "sentence", "content")

TABLES = (".jsonl", ".parquet", ".csv")
"""Suffixes of tables; all others are of columns, .tsv too, unless it is to predict and holds texts."""

_HEAD = 100
"""Lines of a file by which it is told what it holds."""

NEIGHBOURS = 512
"""Words before and after a sentence that are kept as its context: no encoder of BERT's reads more."""

Sentence = tuple[str, ...]


@dataclass(frozen=True)
class TagExample:
    """A sentence.

    Attributes:
        words: of the sentence.
        tags: one a word, in the scheme of the data.
        where: file and line.
        text: what the words are slices of; none means the words with a blank between.
        starts: where in the text each word begins.
        before, after: sentences of its document, for context.
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
            what = f"has {len(self.words)} words and {len(self.tags)} tags"
            raise DataError(what, where=self.where, fix="Give each word one tag.")

    @property
    def whole(self) -> str:
        """The text."""
        return " ".join(self.words) if self.text is None else self.text

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each word in `whole`, in characters."""
        if self.text is None:
            starts: Iterable[int] = itertools.accumulate(
                (len(word) + 1 for word in self.words), initial=0
            )
        else:
            starts = self.starts
        return [(start, start + len(word)) for start, word in zip(starts, self.words, strict=False)]


@dataclass(frozen=True)
class TagColumns:
    """Which columns hold what: by name in tables, by number from 0 in columns. None: guess, or the first and the last column.

    Attributes:
        text: the words; to predict, maybe a text.
        label: the tags.
        document: what is equal in all sentences of a document, in tables.
    """

    text: str | None = None
    label: str | None = None
    document: str | None = None

    def __str__(self) -> str:
        named = {"text": self.text, "label": self.label, "document": self.document}
        return ", ".join(f"{role} = {name!r}" for role, name in named.items() if name is not None)


FIRST_AND_LAST = TagColumns()

Numbered = Iterator[tuple[Any, TagExample]]
"""Examples, each with what is equal in all of its document; none where there are no documents."""


@dataclass(frozen=True)
class TaggedFile:
    """A source of sentences.

    Attributes:
        columns: that are read, as a definition keeps them.
        examples: once through.
        share: how much has been read, from 0 to 1; none where nobody knows.
    """

    columns: TagColumns
    examples: Numbered
    share: Callable[[], float] | None


def open_tagged(source: str, asked: TagColumns, usual: TagColumns, *, labelled: bool) -> TaggedFile:
    """A file, a Hub data set or ("-") the standard input.

    Args:
        asked: the columns that are asked for.
        usual: what columns that are not asked for are called, if the data has them.
        labelled: whether tags are wanted.

    Raises:
        DataError: as `open_table`, for columns that are not there, and to predict for texts that are columns, or the reverse;
            while reading, for a line without a word and a tag, and for lists that are not of one length.
    """
    path = Path(source).expanduser()
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    if not labelled and asked.text is None and (suffix == ".txt" or source == STDIN):
        table = open_table(source)
        _check_lines(source, path)
        return TaggedFile(usual, _from_table(table, TagColumns("text"), lines=True), table.share)
    objects = source == STDIN and asked.text is not None and not asked.text.isdecimal()
    texts = not labelled and suffix == ".tsv" and path.is_file() and _has_texts(path, asked.text)
    if source.startswith(HUB) or suffix in TABLES or objects or texts:
        table = open_table(source, [] if asked.text is None else [asked.text])
        columns = _columns(asked, usual, table, labelled=labelled)
        return TaggedFile(columns, _from_table(table, columns, lines=False), table.share)
    return _open_columns(source, path, asked, usual, labelled=labelled)


def _head(path: Path) -> list[str]:
    with contextlib.closing(read_lines(path)) as lines:
        return [line for _, line in itertools.islice(lines, _HEAD)]


def _check_lines(source: str, path: Path) -> None:
    """DataError: the lines are words with tags. Of the standard input nobody knows before it is read."""
    if source != STDIN and are_columns(_head(path)):
        what = "holds a word with its tag in each line, where each line is to be a text"
        raise DataError(
            what,
            where=source,
            fix="Name the column of the words, --text 0, or call the file .conll.",
        )


def _has_texts(path: Path, asked: str | None) -> bool:
    """Whether a .tsv is a table with a column of texts: of this name, or of one that its first line has."""
    if asked is not None:
        return not asked.isdecimal()
    return any(name in TEXTS for line in _head(path)[:1] for name in line.split("\t"))


def _open_columns(
    source: str, path: Path, asked: TagColumns, usual: TagColumns, *, labelled: bool
) -> TaggedFile:
    word = _number("text", asked.text, usual.text, source)
    tag = _number("label", asked.label, usual.label, source) if labelled else None
    where, lines, share = _lines(source, path)
    found = read_columns(
        lines, where, int(word or 0), (-1 if tag is None else int(tag)) if labelled else None
    )
    found = found if labelled else _words(found, where)
    examples = (
        (item.document, TagExample(item.words, item.tags, f"{where}:{item.line}")) for item in found
    )
    return TaggedFile(TagColumns(word, tag) if labelled else usual, examples, share)


def _words(sentences: Iterator[Lines], where: str) -> Iterator[Lines]:
    """The same sentences; DataError if the first one has blanks in most of its words, as texts have."""
    first = next(sentences)
    blank = [word for word in first.words if len(word.split()) > 1]
    if 2 * len(blank) > len(first.words):
        what = f"{len(blank)} of the first {len(first.words)} words hold blanks, as texts do: {blank[0][:40]!r}"
        fix = 'Texts are read from a .txt, one a line, or from a column with a name, such as "text": --text NAME.'
        raise DataError(what, where=f"{where}:{first.line}", fix=fix)
    yield first
    yield from sentences


def with_neighbours(examples: Numbered) -> Iterator[TagExample]:
    """Each example with the sentences around it in its document as context; holds one document at a time."""
    for document, group in itertools.groupby(examples, key=lambda pair: pair[0]):
        found = [example for _, example in group]
        if document is None:
            yield from found
            continue
        words = [example.words for example in found]
        for place, example in enumerate(found):
            before = _within(reversed(words[max(0, place - NEIGHBOURS) : place]))[::-1]
            yield replace(
                example, before=before, after=_within(words[place + 1 : place + 1 + NEIGHBOURS])
            )


def _within(sentences: Iterable[Sentence]) -> tuple[Sentence, ...]:
    """The first sentences, until there are enough words."""
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
    """The number of a column; none for the usual place."""
    if asked is not None and not asked.isdecimal():
        fix = "Name columns by their number, from 0: --text 0 --label 3."
        raise DataError(
            f"has columns by number, and {role} = {asked!r} is none", where=source, fix=fix
        )
    return asked or (usual if usual is not None and usual.isdecimal() else None)


def _columns(asked: TagColumns, usual: TagColumns, table: Table, *, labelled: bool) -> TagColumns:
    for name in (asked.text, asked.label if labelled else None, asked.document):
        if name is not None and name not in table.names:
            raise DataError(
                f"has no column {name!r}; it has {', '.join(table.names)}",
                where=table.where,
                fix=_HOW,
            )
    text = _one(asked.text, usual.text, WORDS if labelled else (*WORDS, *TEXTS), table, "words")
    label = _one(asked.label, usual.label, TAGS, table, "tags") if labelled else None
    document = asked.document or (usual.document if usual.document in table.names else None)
    return TagColumns(text, label, document)


_HOW = "Name the columns: --text NAME --label NAME."


def _one(asked: str | None, usual: str | None, known: Many[str], table: Table, what: str) -> str:
    if asked is not None:
        return asked
    if usual is not None and usual in table.names:
        return usual
    found = [name for name in known if name in table.names]
    # Words win over the text that they come from.
    if len(found) == 1 or (what == "words" and found and found[0] in WORDS):
        return found[0]
    many = f"several columns may hold the {what}" if found else f"no column is called like {what}"
    raise DataError(f"{many}; there are {', '.join(table.names)}", where=table.where, fix=_HOW)


def _from_table(table: Table, columns: TagColumns, *, lines: bool) -> Numbered:
    """Where each row is a line of text, an empty one ends a document; else documents are told by their column."""
    document = 0
    for row in table.rows:
        example = _example(row, columns)
        document += not example.words
        yield (
            (
                document
                if lines
                else None
                if columns.document is None
                else row.values.get(columns.document)
            ),
            example,
        )


def _example(row: TableRow, columns: TagColumns) -> TagExample:
    assert columns.text is not None
    words = cell_of(row, columns.text)
    if isinstance(words, str) and columns.label is None:
        spans = split_words(words)
        return TagExample(
            tuple(words[a:b] for a, b in spans), None, row.where, words, tuple(a for a, _ in spans)
        )
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        what = f"column {columns.text!r} holds {_kind(words)}, not a list of words"
        raise DataError(
            what,
            where=row.where,
            fix='Each row is like {"words": ["In", "Oslo"], "tags": ["O", "B-LOC"]}.',
        )
    tags = None if columns.label is None else _tags(row, columns.label)
    return TagExample(tuple(words), tags, row.where)


def _tags(row: TableRow, column: str) -> Sentence:
    values = cell_of(row, column)
    if not isinstance(values, list) or not all(isinstance(value, str | int) for value in values):
        what = f"column {column!r} holds {_kind(values)}, not a list of tags"
        raise DataError(what, where=row.where, fix="Give each word a tag, such as O.")
    return tuple(str(value).strip() for value in values)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list with {' and '.join(sorted({type(item).__name__ for item in value}))}"
    return "a text" if isinstance(value, str) else type(value).__name__
