"""Files, Hub data sets and data in Python as rows with named columns: the one reader of rows.

    .csv              RFC 4180
    .tsv              split at tabs only, as GLUE's files are written: a quote is a character
    .jsonl            one object per line
    .json             the same, or one array of objects, read whole
    .parquet          row group by row group
    .txt              one text per line, in the column "text"
    hub:owner/name[@revision][:configuration][:split]
    -                 standard input

All but .parquet may be compressed, and a file may be at a URL. All but arrays are streamed, and
each row has its location. The columns of a .csv or .tsv file without a header are "0", "1", "2" …

Data sets of the Hub, or folders of the same form, are streamed from the files of the revision that
was opened; a request that fails is repeated by the library datasets.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import itertools
import logging
import re
import threading
from collections import UserDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bothways.core import errors
from bothways.core.errors import DataError, ResourceError, argument, optional, render
from bothways.core.files import is_url, parse_json
from bothways.core.terminal import listed, quantity
from bothways.data import text_io

logger = logging.getLogger(__name__)
HUB = "hub:"
"""The beginning of the name of a data set."""
SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".txt", ".parquet")
"""Suffixes of files that are read as tables."""
KINDS = (
    f"{', '.join(SUFFIXES[:-1])} (each also with {', '.join(text_io.COMPRESSED)}), .parquet, "
    f"or {HUB}owner/name:configuration:split"
)
_TAGS = f" For words with their tags: {argument(task='tag')}."
_ADVICE = {
    **dict.fromkeys((".conll", ".bio", ".iob"), _TAGS),
    ".parquet": " Unpack it: a Parquet file is compressed inside.",
    ".arrow": f" Of a data set that datasets saved, name the folder: {HUB}FOLDER.",
    **dict.fromkeys(text_io.SPREADSHEETS, f" {text_io.SAVE_AS_CSV}"),
}
"""What else to do with a file of this suffix."""

MAX_ARRAY = 2**30
"""Maximum number of characters of a JSON array."""
SAMPLE = 100
"""Rows that are examined to decide whether a file has a header."""
_LONG_NAME = 80
# Customary names of columns: a first line with one of these is a header.
COLUMN_NAMES = frozenset(
    """
    text text_a text_b sentence sentence1 sentence2 premise hypothesis question question1 question2
    context answers answer title passage query document content body review comment tweet message
    utterance headline tokens words tags ner_tags label labels class category target sentiment
    intent emotion topic score rating stars id idx index
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


class WatchedRow(UserDict[str, Any]):
    """The values of a row by column, which records which of them have been read, in order."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read = dict[str, None]()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read[name] = None
        return value


@dataclass(frozen=True)
class Table:
    """Rows with named columns.

    Attributes:
        rows: an iterator, to be read once; it goes on after a `RowError`.
        share: returns the fraction of the file that has been read; None if it is unknown.
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
        columns: required columns. A first line that has one of them is a header; the number of a
            column means that there is none, unless all columns are named by their numbers.
        only: the columns to read from a Parquet file; None for all.

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
    else:
        table = _open_file(source, columns, only, bytes_read)
    with closed_on_error(table.close):
        first_row = next(table.rows, None)
    if first_row is None:
        if allow_empty:
            return table
        fix = "Give a file with at least one example."
        raise DataError("holds no row", where=table.where, fix=fix)
    names = table.names or tuple(first_row.values)
    return replace(table, names=names, rows=itertools.chain([first_row], table.rows))


@contextlib.contextmanager
def closed_on_error(close: Callable[[], None]) -> Iterator[None]:
    """Close a file at an error, not when the traceback of the error is collected."""
    try:
        yield
    except BaseException:
        close()
        raise


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
    fix = f"Check the name. Supported are {KINDS}."
    source, lines, share, close = open_lines(source, fix, bytes_read)
    if source.lower().endswith(".parquet"):
        return _parquet(source, only, bytes_read)
    suffix = text_io.suffix_of(source)
    if suffix == ".json" and holds_lines(source):
        suffix = ".jsonl"
    if suffix == ".json":
        return Table(source, (), _array_rows(source, bytes_read))
    if source == text_io.STANDARD_INPUT or (not suffix and text_io.is_pipe(source)):
        suffix = ".jsonl" if columns else ".txt"  # a pipe is such as /dev/fd/63
    with closed_on_error(close):
        match suffix:
            case ".csv":
                table = _delimited(source, _csv_records(source, lines), columns)
            case ".tsv":
                records = ((number, _cells(source, number, line)) for number, line in lines)
                table = _delimited(source, records, columns)
            case ".jsonl":
                table = Table(source, (), json_rows(source, lines))
            case ".txt":  # an empty line is a row, too: predictions stay aligned with lines
                table = Table(source, ("text",), _text_rows(source, lines))
            case _:
                fix = f"Supported are {KINDS}.{_ADVICE.get(suffix, '')}"
                raise DataError(f"unsupported file type {suffix!r}", where=source, fix=fix)
    return replace(table, share=share, close=close)


LineFile = tuple[str, Iterator[tuple[int, str]], Callable[[], float] | None, Callable[[], None]]
"""The name of a file, its numbered lines, and `share` and `close` of a `Table`."""


def open_lines(source: str, fix: str, bytes_read: text_io.BytesRead | None = None) -> LineFile:
    """Open a file, a URL or standard input as lines, of which none is read yet.

    Args:
        fix: advice if there is no such file.

    Raises:
        DataError: no such file, or a folder.
        ResourceError: permission denied.
    """
    if source == text_io.STDIN:
        return text_io.STANDARD_INPUT, text_io.standard_input(), None, lambda: None
    counted, size = bytes_read or text_io.BytesRead(), 0
    if not is_url(source):
        path = text_io.file_at(source, fix)
        source, size = str(path), path.stat().st_size
    lines = text_io.read_lines(source, counted)
    return source, lines, lambda: counted.position / max(size, 1), lines.close


def _text_rows(location: str, lines: Lines) -> Iterator[TableRow]:
    """Yield each line as a text. A warning is logged if the first one is a JSON object."""
    for number, line in lines:
        if number == 1 and line.lstrip().startswith("{"):
            with contextlib.suppress(DataError):
                parse_json(line, location)
                is_file = text_io.suffix_of(location) == ".txt"
                fix = "name the file .jsonl" if is_file else f"use {argument(text='NAME')}"
                message = f"is a JSON object, and is read as a text; to read a field, {fix}"
                logger.warning("%s:%s: %s", location, number, render(message))
        yield TableRow({"text": line}, f"{location}:{number}")


# Delimited text


_CSV_LIMIT = threading.Lock()
_QUOTED = re.compile(r'"[^"]*(?:""[^"]*)+"')
"""A value that CSV's rules have quoted, since it has quotes, which they double."""
_LINE_ENDS = "Write line ends as \\n or \\r\\n, such as: tr '\\r' '\\n'."


def _cells(location: str, number: int, line: str) -> list[str]:
    """Split a line at tabs; an empty line has no value."""
    if "\r" in line:
        raise DataError("holds a carriage return", where=f"{location}:{number}", fix=_LINE_ENDS)
    return line.split("\t") if line else []


def _csv_records(location: str, lines: Lines) -> Records:
    """Yield records with the line they begin on; a quoted value may extend over several lines."""
    limit, first_line = text_io.max_line_bytes(), ""

    def read() -> Iterator[str]:
        nonlocal first_line
        for _, line in lines:
            first_line = first_line or line
            yield line + "\n"

    texts, begin = read(), 1
    for text in texts:  # before the lock: a pipe or URL may let this reader wait
        reader = csv.reader(itertools.chain([text], texts), strict=True)
        # The limit belongs to the process: it is set for one record, then restored. It keeps a
        # quote that is never closed from reading the whole file into one value.
        with _CSV_LIMIT:
            previous_limit = csv.field_size_limit(limit)
            try:
                record = next(reader)
            except csv.Error as error:
                where = f"{location}:{begin}"
                if str(error).startswith("new-line"):
                    message = "holds a carriage return"
                    raise DataError(message, where=where, fix=_LINE_ENDS) from error
                fix = (
                    "Quote values with a comma or a line end, close each quote, and write a quote "
                )
                fix += f'in a value as "". Longer values need a larger {text_io.MAX_LINE}.'
                if "," not in first_line:
                    fix = separator_advice([first_line]) or fix
                raise DataError(f"is not CSV: {error}", where=where, fix=fix) from error
            finally:
                csv.field_size_limit(previous_limit)
        yield begin, record
        begin += reader.line_num


def _delimited(location: str, records: Records, columns: Many[str]) -> Table:
    first_record = next((record for record in records if record[1]), None)
    if first_record is None:
        return Table(location, (), iter(()))
    line, names = first_record
    records = _without_blanks(records, len(names))
    sample = list(itertools.islice(records, SAMPLE))
    records = itertools.chain(sample, records)
    quoted = (number for number, values in sample if any(map(_QUOTED.fullmatch, values)))
    if text_io.suffix_of(location) == ".tsv" and (number := next(quoted, None)) is not None:
        message = "holds a value that is quoted as in a .csv; here its quotes are characters"
        logger.warning("%s:%s: %s", location, number, message)
    header = is_header(names, [values for _, values in sample], columns)
    if not header:
        names, records = list(map(str, range(len(names)))), itertools.chain([first_record], records)
    fix = "Rename one; if the file has no header, name its columns by their numbers: 0, 1 …"
    _require_distinct(filter(None, names), f"{location}:{line}", fix)

    def parse(record: tuple[int, list[str]]) -> TableRow:
        """Name the values of a row; a short row lacks its last columns, a long one is an error."""
        row_location, values = f"{location}:{record[0]}", record[1]
        if header and len(names) > 1 and values == names:
            fix = "Remove the line; were files joined?"
            raise RowError("repeats the header", where=row_location, fix=fix)
        short = len(values) < len(names)
        is_open = short and values[-1].startswith('"') and values[-1].count('"') % 2
        if is_open and text_io.suffix_of(location) == ".tsv":
            message = "holds a quoted value that goes on in the next line"
            fix = "Write it as .csv: in a .tsv file a quote is a character, and a line is a row."
            raise RowError(message, where=row_location, fix=fix)
        if len(values) > len(names):
            titles = f"{quantity(len(names), 'column(s)')} ({listed(names, 20)})"
            message = f"has {quantity(len(values), 'value(s)')} for {titles}"
            fix = separator_advice(names) or (
                "Remove tabs within values, or write the table as .csv, which has quotes."
                if text_io.suffix_of(location) == ".tsv"
                else "Quote values that hold the separator, or remove the row."
            )
            raise RowError(message, where=row_location, fix=fix)
        return TableRow(dict(zip(names, values, strict=False)), row_location)

    # Unlike a generator, `map` goes on after an error.
    return Table(location, tuple(names), map(parse, records))


def _require_distinct(names: Iterable[str], location: str, fix: str = "Rename one.") -> None:
    distinct = set[str]()
    for name in names:
        if name in distinct:
            raise DataError(f"two columns are called {name!r}", where=location, fix=fix)
        distinct.add(name)


def is_header(record: Many[str], sample: Many[Many[str]], columns: Iterable[str] = ()) -> bool:
    """Decide whether the first record of a file names its columns.

    It does if it has a customary name, or one that was asked for and is not the number of a column.
    It does not if it looks like the rows of `sample`: a number in a column of numbers, a value that
    occurs again in its column (a label), or a long text.

    Example: ["A fine film.", "positive"] before ["Dull.", "positive"] → False.
    """
    columns, numbered = tuple(columns), [*map(str, range(len(record)))]
    if any(name.isdecimal() and name not in record for name in columns):
        return False
    customary = not COLUMN_NAMES.isdisjoint(name.strip().lower() for name in record)
    if customary or list(record) == numbered:
        return True
    # The label of the first row may be 1, where column 1 is asked for.
    if any(name in numbered for name in columns):
        return False
    if any(name in record for name in columns):
        return True
    for index, name in enumerate(record):
        column = [values[index] for values in sample if index < len(values)]
        # A name that occurs again below is a value, as is a number among numbers.
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


_SEPARATORS = (
    (";", "semicolons"),
    ("\t", "tabs"),
    (",", "commas"),
    ("|", "bars"),
    ("\uff0c", "full-width commas"),  # typed in Chinese and Japanese text
    ("\uff1b", "full-width semicolons"),
)


def separator_advice(names: Many[str]) -> str | None:
    """Return advice for a table whose only column looks like several; None for any other."""
    for mark, separator in _SEPARATORS:
        if len(names) == 1 and mark in names[0]:
            return f"Its columns seem separated by {separator}: use commas in .csv, tabs in .tsv."
    return None


# JSON


def holds_lines(source: str) -> bool:
    """Return True for a .json file with an object per line, as pandas and datasets write it."""
    with contextlib.closing(text_io.read_lines(source, split=True)) as lines:
        filled = (line.strip() for _, line in lines if line.strip())
        first, second = next(filled, ""), next(filled, "")
    # No JSON value goes on with an object after a line that ends with one.
    return first[:1] == "{" and first[-1:] == "}" and second[:1] == "{"


def json_rows(location: str, lines: Lines) -> Iterator[TableRow]:
    """Return an iterator over the objects on the lines that are not blank."""
    fix = 'Write one object per line, such as {"text": "…"}; an array of objects has the suffix '
    fix += ".json, plain text .txt."

    def parse(numbered: tuple[int, str]) -> TableRow:
        row_location = f"{location}:{numbered[0]}"
        value = parse_json(numbered[1], row_location, RowError, fix, unique=True)
        return TableRow(_json_row(value, row_location, RowError, fix), row_location)

    return map(parse, filter(lambda numbered: numbered[1].strip(), lines))


def _json_row(value: Any, location: str, error: type[DataError], fix: str) -> dict[str, Any]:
    """Return an object as it is, and [text, object], the form of spaCy, as one with that "text"."""
    match value:
        case dict():
            return value
        case [str(text), dict() as rest]:
            return {"text": text, **rest}
    raise error(f"holds a JSON {type(value).__name__}, not an object", where=location, fix=fix)


def _array_rows(path: str, bytes_read: text_io.BytesRead) -> Iterator[TableRow]:
    """Yield the objects of a JSON array, which is read whole.

    Example: [{"a": 1}, {"a": 2}] → rows {"a": 1} and {"a": 2}.
    """
    fix = 'Write [{"text": "…"}, …], or one object per line in a .jsonl file.'
    values = read_json_text(path, fix, bytes_read)
    if not isinstance(values, list):
        squad = isinstance(values, dict) and "data" in values
        # Such as the dataset_infos.json of a data set that was cloned from the Hub.
        other = " If it holds no rows, name the other files instead of their folder."
        if path.endswith(("dataset_info.json", "dataset_dict.json")):  # of `save_to_disk`
            other = _ADVICE[".arrow"]
        fix += " The form of SQuAD is read by the task answer alone." if squad else other
        raise DataError("is not an array of objects", where=path, fix=fix)
    for number, value in enumerate(values, 1):
        location = f"{path}:record {number}"
        yield TableRow(_json_row(value, location, DataError, fix), location)


def read_json_text(path: str, fix: str, bytes_read: text_io.BytesRead | None = None) -> Any:
    """Return the value in a JSON file, which is read whole.

    Raises:
        DataError: the file is not JSON, has a key twice, or is longer than `MAX_ARRAY`.
    """
    chunks, length, line_count = list[str](), 0, 1
    with contextlib.closing(text_io.read_lines(path, bytes_read, split=True)) as lines:
        for number, line in lines:  # the pieces of a long line have one number
            chunks.append("\n" * (number - line_count) + line)
            length, line_count = length + len(chunks[-1]), number
            if length > MAX_ARRAY:
                message = f"is JSON of more than {MAX_ARRAY:,} characters, held in memory"
                fix = "Write one object per line in a .jsonl file, which is read line by line."
                raise DataError(message, where=path, fix=fix)
    return parse_json("".join(chunks), path, fix=fix, unique=True)


# Parquet


def _parquet(path: str, only: Many[str] | None, bytes_read: text_io.BytesRead) -> Table:
    with optional("data", "reading Parquet files"):
        from pyarrow import parquet

    with text_io.open_bytes(path) as stream, _damage(path):
        file = parquet.ParquetFile(stream)
        names, total = tuple(file.schema_arrow.names), file.metadata.num_rows
    _require_distinct(names, path)
    noted = (file.schema_arrow.metadata or {}).get(b"huggingface", b"")  # by `datasets`
    if only is None and b"ClassLabel" in noted:
        message = "classes are read as numbers; name its folder, hub:FOLDER, to read their names"
        logger.warning("%s: its %s", path, message)
    for name in only or ():
        require_column(name, names, path)
    done = 0

    def rows() -> Generator[TableRow, None, None]:
        nonlocal done
        columns = None if only is None else list(only)
        with text_io.open_bytes(path, bytes_read) as stream, _damage(path):
            # Few rows: a cell that a dictionary repeats is small in the file, not in each row.
            for batch in parquet.ParquetFile(stream).iter_batches(batch_size=128, columns=columns):
                for values in batch.to_pylist():
                    done += 1
                    yield TableRow(values, f"{path}:row {done}")

    numbered = rows()
    return Table(path, names, numbered, lambda: done / max(1, total), numbered.close)


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


def parse_hub_name(name: str) -> tuple[str, str | None, str | None, str]:
    """Parse `"hub:owner/name[@revision][:configuration][:split]"`; the revision is a commit, a
    branch or a tag.

    `"hub:nyu-mll/glue:cola"` gives `("nyu-mll/glue", None, "cola", "train")`.

    Raises:
        DataError: it has another form.
    """
    address, *options = name.removeprefix(HUB).split(":")
    repository, mark, revision = address.partition("@")
    if not repository or (mark and not revision) or len(options) > 2:
        fix = f"Write {HUB}owner/name, {HUB}owner/name:configuration or with :split at the end."
        raise DataError("is not the name of a Hub data set", where=name, fix=fix)
    config, split = [*options, "", ""][:2]
    return repository, revision or None, config or None, split or "train"


def without_revision(name: str) -> str:
    """Return the name of a source without a revision: "hub:a/b@v1:en" → "hub:a/b:en"."""
    if not name.startswith(HUB):
        return name
    address, colon, options = name.removeprefix(HUB).partition(":")
    return f"{HUB}{address.partition('@')[0]}{colon}{options}"


class HubData:
    """A split of a data set, in the revision that it has when it is opened."""

    def __init__(self, source: str) -> None:
        """Open a data set.

        Raises:
            DataError: there is no such data set, or it cannot be read.
            ResourceError: the package datasets is not installed.
        """
        with optional("data", "reading Hub data sets"):
            from datasets import load_dataset_builder

        self.source = source
        repository, revision, config, self._split = parse_hub_name(source)
        with _errors(source):
            self._builder = load_dataset_builder(repository, config, revision=revision)
        splits = map(str, self._builder.config.data_files or ())
        others = [name for name in splits if name != self._split]
        if others and source.removeprefix(HUB).count(":") < 2:
            message = f"no split is named, so train is read; the others are {listed(others)}"
            logger.warning("%s: %s", source, message)

    @property
    def version(self) -> str:
        """The commit, or a digest of what is known of the files; another one if they change."""
        files = self._builder.config.data_files or {}
        origins = sorted({entry for split in files.values() for entry in split.origin_metadata})
        if len(origins) == 1 and len(origins[0]) == 2:  # repository and commit
            return str(origins[0][1])
        return hashlib.sha256(repr(origins).encode()).hexdigest()[:16]

    @functools.cached_property
    def stream(self) -> Any:
        """The rows from the first on, as an IterableDataset.

        Raises:
            DataError: there is no such split.
        """
        with _errors(self.source):
            return self._builder.as_streaming_dataset(split=self._split)

    @property
    def classes(self) -> dict[str, list[str]]:
        """The names of the classes of each column that holds classes."""
        return class_names(getattr(self.stream, "features", None) or {})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows; classes become their names, and negative classes (unknown) None.

        Raises:
            DataError: there is no such split, or a row cannot be read.
            ResourceError: the connection failed.
        """
        classes, number = self.classes, 0
        try:
            for row in self.stream:
                number += 1
                yield named_classes(row, classes)
        except ValueError as error:  # a damaged file
            raise _unreadable(self.source, error) from error
        except Exception as error:  # every store has errors of its own
            message = f"reading row {number + 1:,}: {error or type(error).__name__}"
            fix = "Check the connection, and run the same command again."
            raise ResourceError(message, where=self.source, fix=fix) from error


@contextlib.contextmanager
def _errors(source: str) -> Iterator[None]:
    try:
        yield
    # RuntimeError: a data set that is a program, which is not run.
    except (*errors.hub_errors(), RuntimeError) as error:
        raise _unreadable(source, error) from error


def _unreadable(source: str, error: Exception) -> DataError:
    fix = (
        f"Check the name, {HUB}owner/name[@revision][:configuration][:split], or without a "
        f"configuration {HUB}owner/name::split, and the connection. "
    )
    fix += "Instead of a data set with a loading script, use its Parquet copy."
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"cannot be read: {reason}", where=source, fix=errors.hub_advice(error, fix))


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the classes of each column that holds classes, or lists of them."""
    from datasets import ClassLabel

    kinds = {name: getattr(kind, "feature", kind) for name, kind in features.items()}
    return {name: kind.names for name, kind in kinds.items() if isinstance(kind, ClassLabel)}


def named_classes(row: Mapping[str, Any], classes: Mapping[str, Many[str]]) -> dict[str, Any]:
    """Return a row in which classes are their names, and negative classes (unknown) None."""
    values = {name: _named(row[name], names) for name, names in classes.items() if name in row}
    return {**row, **values}


def _named(value: Any, names: Many[str]) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value  # an array or a tensor
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    return None if value is None or value < 0 else names[value]


@runtime_checkable
class ArrowTable(Protocol):
    """A table or an array of pyarrow, which is not an iterable of rows."""

    def to_pylist(self) -> list[Any]:
        """Return the rows as dicts, or the items."""


TableLike = Iterable[Any] | ArrowTable
"""Data as `iter_rows` takes it."""
FORMS = "a DataFrame, a datasets.Dataset, or a list of dicts"


def iter_rows(data: Any, where: str) -> Iterable[Any]:
    """Return the rows of a table as dicts, or the items of another iterable as they are.

    Iterating over a DataFrame or a mapping would give the names of its columns. Missing values
    become None, and the classes of a `datasets.Dataset` their names, as in a Hub data set.

    Args:
        data: a DataFrame of pandas or polars, a table or an array of pyarrow, a `datasets.Dataset`,
            a mapping from columns to their values, or any iterable.
        where: the name of the data, for messages.

    Raises:
        DataError: it is none of these, or its columns differ in length or share a name.
    """
    match data:
        case Mapping():
            columns = {str(name): plain_value(values) for name, values in data.items()}
            if not columns or not all(isinstance(v, list | tuple) for v in columns.values()):
                items = ", ".join(columns) or "nothing"
                message = f"is a {type(data).__name__} of {items}, not of columns of values"
                raise DataError(message, where=where, fix=f"Give one of its items, or {FORMS}.")
            if len({*map(len, columns.values())}) > 1:
                counts = ", ".join(f"{name} {len(values):,}" for name, values in columns.items())
                raise DataError(f"has columns of different length: {counts}", where=where)
            tuples = zip(*columns.values(), strict=True)
            return [dict(zip(columns, row, strict=True)) for row in tuples]
        case _ if hasattr(data, "to_dicts") or hasattr(data, "to_pylist"):  # polars, pyarrow
            rows = data.to_dicts() if hasattr(data, "to_dicts") else data.to_pylist()
            return list(rows)
        case _ if hasattr(data, "to_dict") and hasattr(data, "columns"):
            names = [str(name) for name in data.columns]
            _require_distinct(names, where)
            table = data.astype(object).where(data.notna(), None)
            rows = table.itertuples(index=False, name=None)
            return [dict(zip(names, row, strict=True)) for row in rows]
        case bytes() | str():
            pass
        case Iterable() if getattr(data, "ndim", 1):  # an array of no dimension has no rows
            features = getattr(data, "features", None)
            classes = class_names(features) if isinstance(features, Mapping) else {}
            return (named_classes(row, classes) for row in data) if classes else data
    fix = "Give a list, a DataFrame or a datasets.Dataset."
    raise DataError(f"is of type {type(data).__name__}, which has no rows", where=where, fix=fix)


def plain_value(value: Any) -> Any:
    """Return numbers and arrays of NumPy, PyTorch or pyarrow as values and lists of Python, also
    those in dicts and in arrays of objects, as pandas reads nested columns.

    Decimal numbers are whole numbers or floats. What pandas calls NA or NaT is None.
    """
    if type(value).__name__ in ("NAType", "NaTType"):  # without an import of pandas
        return None
    if isinstance(value, Decimal):  # of a database
        is_whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim:
        return [item if type(item) is str else plain_value(item) for item in value]
    if isinstance(value, np.generic | np.ndarray) or hasattr(value, "tolist"):
        return value.tolist()
    return value.as_py() if hasattr(value, "as_py") else value


def listed_classes(data: Any) -> dict[str, list[str]]:
    """Return the classes that data lists for its columns, with or without rows of them.

    A `datasets.Dataset` lists them in its features. Of the categories of a column of pandas, only
    those without rows count: in labels 1.0 is "1", and several labels may be one category.
    """
    features, kinds = getattr(data, "features", None), getattr(data, "dtypes", ())
    if isinstance(features, Mapping):
        return class_names(features)
    pairs = kinds.items() if hasattr(kinds, "items") else ()
    return {
        str(name): [*map(str, kind.categories.difference(data[name], sort=False))]
        for name, kind in pairs
        if hasattr(kind, "categories")
    }


def is_example(value: Any) -> bool:
    """Return True for an example of a task: an instance of a dataclass that says where it is from.

    A dataclass of the calling program has other fields than a task reads.
    """
    return dataclasses.is_dataclass(type(value)) and hasattr(value, "where")
