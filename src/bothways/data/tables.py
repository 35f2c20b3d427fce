"""Files and Hub data sets as rows with named columns: one reader for examples and for documents.

    .csv              RFC 4180
    .tsv              split at tabs only, as GLUE's files are written: a quote is a character
    .jsonl            one object per line
    .json             one array of objects, read whole
    .parquet          row group by row group
    .txt              one text per line, in the column "text"
    hub:owner/name[@revision][:configuration][:split]
    -                 standard input

All but .parquet may be compressed, and a file may be at a URL. All but .json are streamed, and each
row has its location. The columns of a .csv or .tsv file without a header are "0", "1", "2" …
"""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any

from bothways.core.advice import argument
from bothways.core.errors import DataError, optional
from bothways.core.json_reader import parse_json
from bothways.core.paths import is_url
from bothways.core.terminal import listed, quantity
from bothways.data import text_io
from bothways.data.hub_rows import HUB, HubData

KINDS = (
    f".csv, .tsv, .jsonl, .json, .txt (each also with {', '.join(text_io.COMPRESSED)}), .parquet, "
    f"or {HUB}owner/name:configuration:split"
)
_TAGS = f" For words with their tags: {argument(task='tag')}."
_OTHER_TASKS = {".conll": _TAGS, ".bio": _TAGS, ".iob": _TAGS}

MAX_ARRAY = 2**30
"""Maximum number of characters of a JSON array."""
SAMPLE = 100
"""Rows that are examined to decide whether a file has a header."""
_LONG_NAME = 80
# Customary names of columns: a first line with one of these is a header.
_COLUMN_NAMES = frozenset(
    """
    text text_a text_b sentence sentence1 sentence2 premise hypothesis question question1 question2
    context answers answer title passage query document content body review comment tweet message
    tokens words tags ner_tags label labels class category target score rating stars id idx index
    """.split()  # noqa: SIM905
)


class RowError(DataError):
    """A row that cannot be read; the rows after it can."""


Lines = Iterable[tuple[int, str]]
Records = Iterator[tuple[int, list[str]]]


@dataclass(frozen=True)
class TableRow:
    """A row: its values by column, and its file and line for messages."""

    values: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class Table:
    """Rows with named columns.

    Attributes:
        where: the file or data set.
        names: the columns.
        rows: an iterator, to be read once; it goes on after a `RowError`.
        share: returns the fraction of the file that has been read; None if it is unknown.
        close: closes the file.
        classes: the classes that the source lists for a column, with or without rows of them.
    """

    where: str
    names: tuple[str, ...]
    rows: Iterator[TableRow]
    share: Callable[[], float] | None = None
    close: Callable[[], None] = lambda: None
    classes: Mapping[str, Many[str]] = field(default_factory=dict)


def open_table(
    source: str,
    columns: Iterable[str] = (),
    *,
    only: Many[str] | None = None,
    allow_empty: bool = False,
    bytes_read: text_io.BytesRead | None = None,
) -> Table:
    """Open a file, a Hub data set or standard input as a table.

    Args:
        source: a name, whose suffix gives the kind. Standard input ("-") and pipes without a suffix
            are JSON lines if columns are asked for, else lines of text.
        columns: required columns. A first line that has one of them is a header; a number that is
            not in the first line means that there is no header.
        only: the columns to read from a Parquet file; None for all.
        allow_empty: accept a source without rows.
        bytes_read: counts the bytes of a file.

    Raises:
        DataError: no such file, an unknown kind, no row; while reading: a damaged, binary or
            wrongly encoded file, a row that does not fit, with its line.
        ResourceError: permission denied, or a package for this kind is not installed.
    """
    columns, bytes_read = tuple(columns), bytes_read or text_io.BytesRead()
    if source.startswith(HUB):
        hub = HubData(source)
        numbered = enumerate(hub.rows(), 1)
        rows = (TableRow(values, f"{source}:row {number}") for number, values in numbered)
        table = Table(source, (), rows, classes=hub.classes)
    elif source == text_io.STDIN:
        table = _pipe(text_io.STANDARD_INPUT, text_io.standard_input(), columns)
    else:
        table = _open_file(source, columns, only, bytes_read)
    try:
        first_row = next(table.rows, None)
    except BaseException:
        table.close()  # now, not when the traceback of the error is collected
        raise
    if first_row is None:
        if allow_empty:
            return table
        fix = "Give a file with at least one example."
        raise DataError("holds no row", where=table.where, fix=fix)
    names = table.names or tuple(first_row.values)
    return replace(table, names=names, rows=itertools.chain([first_row], table.rows))


def require_column(column: str, names: Iterable[str], where: str) -> None:
    """Raise DataError, naming the existing columns, if `column` is not one of them."""
    names = list(names)
    if column not in names:
        fix = f"Name the column that holds the text: {argument(column='NAME')}."
        message = f"has no column {column!r}; it has {listed(names, 20) or 'none'}"
        raise DataError(message, where=where, fix=fix)


def _open_file(
    source: str, columns: Many[str], only: Many[str] | None, bytes_read: text_io.BytesRead
) -> Table:
    size = 0
    if not is_url(source):
        path = text_io.file_at(source, f"Check the name. Supported are {KINDS}.")
        source, size = str(path), path.stat().st_size
    if source.endswith(".parquet"):
        return _parquet(source, only, bytes_read)
    if text_io.suffix_of(source) == ".json":
        return Table(source, (), _array_rows(source, bytes_read))
    lines = text_io.read_lines(source, bytes_read)
    try:
        table = _line_table(source, columns, lines)
    except BaseException:
        lines.close()  # now, not when the error's traceback is collected
        raise
    share = lambda: bytes_read.position / size if size else 0.0  # noqa: E731
    return replace(table, share=share, close=lines.close)


def _line_table(location: str, columns: Many[str], lines: Lines) -> Table:
    match text_io.suffix_of(location):
        case ".csv":
            return _delimited(location, _csv_records(location, lines), columns)
        case ".tsv":
            records = ((number, _cells(location, number, line)) for number, line in lines)
            return _delimited(location, records, columns)
        case ".jsonl":
            return Table(location, (), json_rows(location, lines))
        case ".txt":
            return _plain_lines(location, lines)
        case "" if text_io.is_pipe(location):  # such as /dev/fd/63
            return _pipe(location, lines, columns)
        case suffix:
            fix = f"Supported are {KINDS}.{_OTHER_TASKS.get(suffix, '')}"
            raise DataError(f"unsupported file type {suffix!r}", where=location, fix=fix)


def _pipe(location: str, lines: Lines, columns: Many[str]) -> Table:
    return (
        Table(location, (), json_rows(location, lines))
        if columns
        else _plain_lines(location, lines)
    )


def _plain_lines(location: str, lines: Lines) -> Table:
    """Make each line a row, an empty one too: predictions stay aligned with lines."""
    rows = (TableRow({"text": line}, f"{location}:{number}") for number, line in lines)
    return Table(location, ("text",), rows)


# Delimited text


def _cells(location: str, number: int, line: str) -> list[str]:
    """Split a line at tabs; an empty line has no value."""
    if "\r" in line:
        fix = "Write line ends as \\n or \\r\\n, such as: tr '\\r' '\\n'."
        raise DataError("holds a carriage return", where=f"{location}:{number}", fix=fix)
    return line.split("\t") if line else []


def _csv_records(location: str, lines: Lines) -> Records:
    """Yield records with the line they begin on; a quoted value may extend over several lines."""
    limit = text_io.max_line_bytes()
    reader, begin = csv.reader((line + "\n" for _, line in lines), strict=True), 1
    while True:
        # The limit belongs to the process: it is set for one record, then restored. It keeps a
        # quote that is never closed from reading the whole file into one value.
        previous_limit = csv.field_size_limit(limit)
        try:
            record = next(reader, None)
        except csv.Error as error:
            fix = (
                "Quote values that hold a comma or a line end, close each quote, and write a quote "
                f'inside a value as "". Longer values need a larger {text_io.MAX_LINE}.'
            )
            raise DataError(f"is not CSV: {error}", where=f"{location}:{begin}", fix=fix) from error
        finally:
            csv.field_size_limit(previous_limit)
        if record is None:
            return
        yield begin, record
        begin = reader.line_num + 1


def _delimited(location: str, records: Records, columns: Many[str]) -> Table:
    first_record = next((record for record in records if record[1]), None)
    if first_record is None:
        return Table(location, (), iter(()))
    line, names = first_record
    records = _without_blanks(records, len(names))
    sample = list(itertools.islice(records, SAMPLE))
    records = itertools.chain(sample, records)
    header = is_header(names, [values for _, values in sample], columns)
    if not header:
        names, records = list(map(str, range(len(names)))), itertools.chain([first_record], records)
    distinct = set[str]()
    for name in names:
        if name and name in distinct:
            fix = (
                "Rename one; columns without a header go by number, from 0: "
                f"{argument(text='0', label='1')}."
            )
            raise DataError(f"two columns are called {name!r}", where=f"{location}:{line}", fix=fix)
        distinct.add(name)
    # Unlike a generator, `map` goes on after an error.
    twice = names if header and len(names) > 1 else []
    rows = map(lambda record: _record(location, names, *record, twice=twice), records)
    return Table(location, tuple(names), rows)


def is_header(record: Many[str], sample: Many[Many[str]], columns: Iterable[str] = ()) -> bool:
    """Decide whether the first record of a file names its columns.

    It does if it has a customary name, or one that was asked for. It does not if it looks like the
    rows of `sample`: a number in a column of numbers, a value that occurs again in its column (a
    label), or a long text.

    Example: ["A fine film.", "positive"] before ["Dull.", "positive"] → False.
    """
    columns = tuple(columns)
    if any(name.isdecimal() and name not in record for name in columns):
        return False
    if any(name in record for name in columns) or list(record) == [*map(str, range(len(record)))]:
        return True
    if not _COLUMN_NAMES.isdisjoint(name.strip().lower() for name in record):
        return True
    for index, name in enumerate(record):
        column = [values[index] for values in sample if index < len(values)]
        if len(name) > _LONG_NAME or (name and name in column):
            return False
        if _is_number(name) and column and all(map(_is_number, column)):
            return False
    return True


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _without_blanks(records: Records, columns: int) -> Records:
    """Skip blank lines; in a single column a blank line is a row, unless nothing follows it."""
    blank: list[tuple[int, list[str]]] = []
    for line, values in records:
        if values:
            yield from blank
            yield line, values
            blank = []
        elif columns == 1:
            blank.append((line, [""]))


def separator_advice(names: Many[str]) -> str | None:
    """Return advice for a table whose only column looks like several; None for any other."""
    for mark, separator in ((";", "semicolons"), ("\t", "tabs"), (",", "commas")):
        if len(names) == 1 and mark in names[0]:
            return f"Its columns seem separated by {separator}: use commas in .csv, tabs in .tsv."
    return None


def _record(
    location: str, names: list[str], line: int, values: list[str], twice: list[str]
) -> TableRow:
    """Name the values of a row; a short row lacks its last columns, a long one is an error.

    Args:
        twice: values that are an error, too: the header's, of files that were joined.
    """
    if values == twice:
        fix = "Remove the line; were files joined?"
        raise RowError("repeats the header", where=f"{location}:{line}", fix=fix)
    if len(values) > len(names):
        columns = f"{quantity(len(names), 'column(s)')} ({listed(names, 20)})"
        message = f"has {quantity(len(values), 'value(s)')} for {columns}"
        fix = separator_advice(names) or "Quote values that hold the separator, or remove the row."
        raise RowError(message, where=f"{location}:{line}", fix=fix)
    return TableRow(dict(zip(names, values, strict=False)), f"{location}:{line}")


# JSON


def json_rows(location: str, lines: Lines) -> Iterator[TableRow]:
    """Return an iterator over the objects on the lines that are not blank."""
    fix = (
        'Each line of a .jsonl file is one JSON object, such as {"text": "…"}. '
        "For plain text use the suffix .txt."
    )

    def parse(numbered: tuple[int, str]) -> TableRow:
        """Return the row on a line."""
        row_location = f"{location}:{numbered[0]}"
        try:
            value = parse_json(numbered[1], row_location, fix=fix, unique=True)
            return TableRow(_json_row(value, row_location, fix), row_location)
        except DataError as error:
            raise RowError(error.what, where=error.where, fix=error.fix) from error

    return map(parse, filter(lambda numbered: numbered[1].strip(), lines))


def _json_row(value: Any, location: str, fix: str) -> dict[str, Any]:
    """Return an object as it is, and [text, object], the form of spaCy, as one with that "text"."""
    match value:
        case dict():
            return value
        case [str(text), dict() as rest]:
            return {"text": text, **rest}
    message = f"holds a JSON {type(value).__name__}, not an object"
    raise DataError(message, where=location, fix=fix)


def _array_rows(path: str, bytes_read: text_io.BytesRead) -> Iterator[TableRow]:
    """Yield the objects of a JSON array, which is read whole.

    Example: [{"a": 1}, {"a": 2}] → rows {"a": 1} and {"a": 2}.
    """
    fix = (
        'Write [{"text": "…"}, …], or one object per line in a .jsonl file. '
        f"For questions as in SQuAD: {argument(task='answer')}."
    )
    chunks, length, last = list[str](), 0, 1
    with contextlib.closing(text_io.read_lines(path, bytes_read, split=True)) as lines:
        for number, line in lines:  # the pieces of a long line have one number
            chunks.append("\n" * (number - last) + line)
            length, last = length + len(chunks[-1]), number
            if length > MAX_ARRAY:
                message = f"is a JSON array of more than {MAX_ARRAY:,} characters, held in memory"
                fix = "Write one object per line in a .jsonl file, which is read line by line."
                raise DataError(message, where=path, fix=fix)
    values = parse_json("".join(chunks), path, fix=fix, unique=True)
    if not isinstance(values, list):
        raise DataError("is not an array of objects", where=path, fix=fix)
    for number, value in enumerate(values, 1):
        location = f"{path}:record {number}"
        yield TableRow(_json_row(value, location, fix), location)


# Parquet


def _parquet(path: str, only: Many[str] | None, bytes_read: text_io.BytesRead) -> Table:
    with optional("data", "reading Parquet files"):
        from pyarrow import parquet

    with _damage(path), text_io.open_bytes(path) as stream:
        file = parquet.ParquetFile(stream)
        names, total = tuple(file.schema_arrow.names), file.metadata.num_rows
    for name in only or ():
        require_column(name, names, path)
    done = 0

    def rows() -> Iterator[TableRow]:
        """Yield the rows and count them."""
        nonlocal done
        for row in _parquet_rows(path, only, bytes_read):
            done += 1
            yield row

    return Table(path, names, rows(), lambda: done / max(1, total))


def _parquet_rows(
    path: str, only: Many[str] | None, bytes_read: text_io.BytesRead
) -> Iterator[TableRow]:
    from pyarrow import parquet

    number = 0
    with _damage(path), text_io.open_bytes(path, bytes_read) as stream:
        columns = None if only is None else list(only)
        for batch in parquet.ParquetFile(stream).iter_batches(batch_size=1024, columns=columns):
            for values in batch.to_pylist():
                number += 1
                yield TableRow(values, f"{path}:row {number}")


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    # A damaged page raises any of these.
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        message = f"is not a complete Parquet file ({str(error).splitlines()[0]})"
        raise DataError(message, where=path, fix="Download or write it again.") from error
