"""Sentences with a tag for each word: from columns, from tables, or from running text.

Files are read as columns (`conll`), except tables: .jsonl, .parquet and Hub data sets. For
prediction, .txt files hold a text a line, unless they are columns, and tables may hold texts, which
`running_text` splits. A .tsv is then a table if its first line names a column of texts.

A row of a table is a sentence with a list of words and one of tags, or a text with a list of
character spans (`running_text`). Some rows are brought into this form first:

- [text, {"entities": …}], as for spaCy;
- {"data": {"text": …}, "annotations": […]}, as Label Studio exports it;
- a word and its tag in each row, with the number of the sentence in a column of its own, which may
  be empty after the first row of a sentence.

Rows that their annotator skipped, rejected or did not reach are dropped from labelled data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

from bothways.core.errors import DataError, argument, setting
from bothways.core.files import local_path
from bothways.core.terminal import quantity
from bothways.data import tables, text_io
from bothways.tasks.base import Columns, Reading, Row
from bothways.tasks.columns import (
    Column,
    asked_columns,
    cell_of,
    columns_advice,
    guess_column,
    is_absent,
    label_of,
    require_columns,
    usual_columns,
)
from bothways.tasks.tagging import conll, running_text

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
            if not isinstance(value := tables.plain_value(row[name]), list | tuple)
            or not any(isinstance(item, Mapping) for item in value)
        ]
        # Words win over the text that they come from, unless there are no tags for them. Rows with
        # a word each have been joined to lists: "sentence" is the number of a sentence there.
        joined = any(isinstance(row[name], list) for name in usual_columns(WORD, names))
        tagged = labelled is False or joined or usual_columns(TAGS, names)
        if not tagged and usual_columns(TEXTS, names):
            words = []
        text = guess_column(_TEXT, words[:1] or TEXTS, names, where)
    remaining, spans = [name for name in names if name != text], list[str]()
    if isinstance(row.get(text), str):
        spans = [
            name
            for name in usual_columns(SPANS, remaining)
            if isinstance(tables.plain_value(row[name]), list | tuple | Mapping)
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


def arrange_rows(
    rows: Iterable[tables.TableRow], requested: TagColumns, defaults: TagColumns, *, labelled: bool
) -> tuple[Iterator[tables.TableRow], list[str], str | None]:
    """Return an iterator over rows with one example each.

    Also notes for the user, complete after the last row, and the column that numbers the sentences,
    if several rows were joined.

    Args:
        rows: of a file, or in memory, where other things than rows pass unchanged.

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
        return iter(()), notes, None
    all_rows = itertools.chain([head_row], rows)  # unlike a generator, goes on after an error
    columns = _word_columns(head_row, requested, defaults, labelled=labelled)
    if columns is None:
        return all_rows, notes, None
    return _joined_rows(all_rows, columns), notes, columns.sentence


def _plain_row(row: tables.TableRow) -> tables.TableRow:
    match row.values:
        case [str(text), Mapping() as rest]:
            return tables.TableRow({"text": text, **rest}, row.where)
        case {"data": Mapping() as data, "annotations": list() as done}:
            texts = [name for name, value in data.items() if isinstance(value, str)]
            name = "text" if "text" in texts else texts[0] if len(texts) == 1 else None
            if name is None:
                message = f"has {len(texts)} texts in its data ({', '.join(texts) or 'none'})"
                raise DataError(message, where=row.where, fix='Call the text "text".')
            try:
                results = [
                    [x["value"] for x in a.get("result") or () if "labels" in x.get("value", {})]
                    for a in done
                    if not a.get("was_cancelled")
                ]
            except (AttributeError, TypeError) as error:
                message = 'has an annotation that is not an object with a list "result" of objects'
                fix = "Export the texts again, as JSON."
                raise DataError(message, where=row.where, fix=fix) from error
            if any(result != results[0] for result in results):
                message = f"has {len(results)} annotations that differ"
                fix = "Export one annotation of each text."
                raise DataError(message, where=row.where, fix=fix)
            entities = results[0] if results else _NOBODY
            return tables.TableRow({**data, "text": data[name], "entities": entities}, row.where)
        case _:
            return row


def _without_skipped(
    rows: Iterator[tables.TableRow], notes: list[str]
) -> Iterator[tables.TableRow]:
    """Yield the rows that are annotated and accepted; a note counts the others."""
    skipped = Counter[str]()
    for row in rows:
        reason = None  # to skip the row, as tools of annotation mark it
        if isinstance(row.values, Mapping):
            answer = tables.plain_value(row.values.get("answer"))
            if answer in ("reject", "ignore") and "text" in row.values:
                reason = f'their "answer" is {answer}'
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
    head_row: tables.TableRow, requested: TagColumns, defaults: TagColumns, *, labelled: bool
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


def _joined_rows(rows: Iterator[tables.TableRow], columns: TagColumns) -> Iterator[tables.TableRow]:
    """Yield a row for each sentence, with the lists of its words and tags."""
    group, current = list[tables.TableRow](), None
    try:
        for row in rows:
            value = tables.plain_value(row.values.get(columns.sentence or ""))
            # The number may stand in the first row of a sentence only: 1, empty, empty, 2 …
            begins = not is_absent(value) and value != ""
            if group and begins and value != current:
                yield _joined(group, columns)
                group = []
            current = value if begins else current
            group.append(row)
    except tables.RowError as error:  # a sentence without one of its words
        raise DataError(error.what, where=error.where, fix=error.advice) from error
    if group:
        yield _joined(group, columns)


def _joined(group: list[tables.TableRow], columns: TagColumns) -> tables.TableRow:
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
    return tables.TableRow({**group[0].values, **lists}, group[0].where)


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


def open_tagged(task: Any, source: str, requested: TagColumns, *, labelled: bool) -> Reading[Any]:
    """Open a file, a Hub data set or the standard input ("-").

    Args:
        task: the tagging task, whose columns are read where none are asked for, if the data has
            them.
        requested: columns that the user asks for.

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
        name in TEXTS for line in head[:1] for name in line.split("\t")
    )
    lines = stream or (suffix == ".txt" and not conll.are_columns(head))
    lines = lines and not labelled and text is None
    if lines:
        table, columns, notes = tables.open_table(source), task.columns, list[str]()
        fields = TagColumns("text")
    elif (
        source.startswith(tables.HUB)
        or suffix in TABLES
        or (stream and names)
        or (head and suffix == ".tsv" and (names or (text is None and texts)))
    ):
        table = tables.open_table(source, [] if text is None else [text])
        with tables.closed_on_error(table.close):
            arranged = arrange_rows(table.rows, requested, task.columns, labelled=labelled)
            rows, notes, sentence = arranged
            first = next(rows, None)
            if first is None:
                fix = "Annotate its texts."
                raise DataError("holds no annotated row", where=table.where, fix=fix)
            values = {**dict.fromkeys(table.names), **first.values}
            columns = choose_tag_columns(values, table.where, requested, task.columns, labelled)
            fields = columns = replace(columns, sentence=sentence)
            table = replace(table, rows=itertools.chain([first], rows))
    else:
        return _open_columns(task, source, requested, labelled=labelled)

    def parse(row: tables.TableRow) -> TagExample:
        return tag_example(row.values, fields, row.where, task.splitter)

    def numbered() -> Numbered:
        document = 0
        with tables.closed_on_error(table.close):
            for row in table.rows:
                example = parse(row)
                document += not example.words  # an empty line ends a document
                name = fields.document
                yield document if lines else None if name is None else row.values.get(name), example

    used = asked_columns(fields)
    unused = [name for name in table.names if name and name not in used]
    opened = task.with_columns(columns)
    return Reading(opened, numbered(), table.share, table, parse, notes, unused)


def _open_columns(task: Any, source: str, requested: TagColumns, *, labelled: bool) -> Reading[Any]:
    """Open columns of words, and find those that are asked for, or usual if the file has them."""
    fix = "Check the name; readable are columns of words and tags, .jsonl, .parquet."
    location, lines, share, close = tables.open_lines(source, fix)
    with tables.closed_on_error(close):
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
        columns = TagColumns(*(a or b for a, b in zip((text, label), usual, strict=True)))
        if (columns.text, columns.label) != (text, label):
            layout = find(columns.text, columns.label)
        for role, number in (("document", None), ("sentence", layout.sentence)):
            if (name := getattr(requested, role)) is not None and number is None:
                message = f"is read as columns of words, and {name!r} is to number its {role}s"
                fix = "Lines divide it: an empty one ends a sentence, -DOCSTART- begins a document."
                raise DataError(message, where=location, fix=fix)
        sentences = conll.read_columns(itertools.chain(head, lines), location, layout)
        if not labelled:  # texts may be read as columns: most of the first words then have blanks
            first = next(sentences)
            blank = [word for word in first.words if len(word.split()) > 1]
            if 2 * len(blank) > len(first.words):
                message = f"{len(blank)} of the first {len(first.words)} words have blanks"
                message += f", as texts do: {blank[0][:40]!r}"
                column = argument(text="NAME")
                fix = f"Give texts in a .txt, one a line, or in a named column: {column}."
                raise DataError(message, where=f"{location}:{first.line}", fix=fix)
            sentences = itertools.chain([first], sentences)

    def examples() -> Numbered:
        with tables.closed_on_error(close):
            for item in sentences:
                where = f"{location}:{item.line}"
                yield item.document, TagExample(item.words, item.tags, where)

    notes = [f"{location}: {layout.note}"] if layout.note else []
    opened = task.with_columns(columns) if labelled else task
    return Reading(opened, examples(), share, notes=notes, unused=layout.unused)


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
    listed = [*sentences]
    counts = itertools.accumulate(map(len, listed), initial=0)
    return tuple(words for words, count in zip(listed, counts, strict=False) if count < NEIGHBOURS)


def tag_example(
    row: Row, columns: TagColumns, where: str, splitter: running_text.Splitter
) -> TagExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, or its value is not a list of words or of tags.
    """
    assert columns.text is not None
    words, label = cell_of(row, columns.text, where), columns.label
    tags: Sentence | None = None
    answers = None if label is None or label not in row else cell_of(row, label, where)
    items = answers if isinstance(answers, list) else [answers]
    # A text with a tag or a list of tags is an error: a text has a list of spans.
    if isinstance(words, str) and not any(isinstance(item, str | int) for item in items):
        spans = running_text.split_words(words, splitter)
        slices, starts = tuple(words[a:b] for a, b in spans), tuple(a for a, _ in spans)
        if label is not None:
            entities = running_text.read_spans(cell_of(row, label, where), label, where)
            tags = running_text.tags_from_spans(words, spans, entities, where)
        return TagExample(slices, tags, where, words, starts)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        message = f"column {columns.text!r} holds {_kind(words)}, not a list of words"
        fix = 'Each row is like {"words": ["In", "Oslo"], "tags": ["O", "B-LOC"]}.'
        if label is not None and isinstance(words, str):
            sentence = setting("columns.sentence", "NAME")
            fix += (
                f" {running_text.FORM} For a word in each row name the sentences: {sentence}. "
                f"For labels of texts: {argument(task='classify')}."
            )
        raise DataError(message, where=where, fix=fix)
    blank = sum(len(word.split()) > 1 for word in words)
    if columns.text in TEXTS and 2 * blank > len(words):
        message = f"column {columns.text!r} holds a list of texts, not of words: {words[0]!r:.40}"
        fix = 'Give a row for each text: [{"text": "Anna sings"}, {"text": "It rains"}].'
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
