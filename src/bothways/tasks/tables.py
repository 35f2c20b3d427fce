"""Files and Hub data sets as rows with named columns: .csv, .tsv, .jsonl, .parquet, plain lines.

Everything streams, and each row knows its line. A .tsv file is cut at tabs and nothing else, as GLUE's files are written:
quotes in it are quotes. A .csv file follows RFC 4180. A file without a header has columns "0", "1", "2" …
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bothways.core.errors import DataError
from bothways.data import text_io as streams
from bothways.data.documents import HUB
from bothways.data.readers import json_object, parse_hub_name
from bothways.data.text_io import (
    COMPRESSED,
    STANDARD_INPUT,
    BytesRead,
    file_at,
    open_bytes,
    read_lines,
    standard_input,
)

STDIN = streams.STDIN
"""The name of the standard input."""

_LONGEST = 2**27
"""Characters of a value of .csv: a quote that is not closed does not swallow more."""
_KINDS = f".csv, .tsv, .jsonl, .txt (each also with {', '.join(COMPRESSED)}), .parquet, or {HUB}owner/name:configuration:split"

_TAGS = " Words with their tags: --task tag."
_OTHER_TASKS = {
    ".json": " Questions, as SQuAD has them: --task answer.",
    ".conll": _TAGS,
    ".bio": _TAGS,
    ".iob": _TAGS,
}

Lines = Iterable[tuple[int, str]]
Records = Iterator[tuple[int, list[str]]]


@dataclass(frozen=True)
class TableRow:
    """One row: its values by column, and its file and line, for messages."""

    values: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class Table:
    """Attributes:
    where: the file or data set.
    names: its columns.
    rows: once through.
    share: how much of a file of lines has been read, from 0 to 1; none for others.
    """

    where: str
    names: tuple[str, ...]
    rows: Iterator[TableRow]
    share: Callable[[], float] | None = None


def open_table(source: str, asked: Iterable[str] = ()) -> Table:
    """The table in a file, a Hub data set, or standard input ("-": JSON lines if columns are asked for, else lines of text).

    Args:
        source: its name; the suffix tells the kind.
        asked: columns that are wanted. A number that is no name in the first line means that there is no header.

    Raises:
        DataError: no such file, an unknown kind, no row; while reading: a damaged, binary or wrongly encoded file, a row that
            does not fit, with its line.
        ResourceError: a file that may not be read.
    """
    if source.startswith(HUB):
        return _hub(source)
    if source == STDIN:
        return (_json_lines if list(asked) else _plain_lines)(STANDARD_INPUT, standard_input())
    path = file_at(source, f"Check the name; readable are {_KINDS}.")
    if path.suffix == ".parquet":
        return _parquet(path)
    bytes_read = BytesRead()
    lines = read_lines(path, bytes_read)
    try:
        table = _text_file(path, asked, lines)
    except BaseException:
        lines.close()  # at once, not when somebody collects what the error refers to
        raise
    return dataclasses.replace(table, share=lambda: bytes_read.position / path.stat().st_size)


def _text_file(path: Path, asked: Iterable[str], lines: Iterator[tuple[int, str]]) -> Table:
    match path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix:
        case ".csv":
            return _delimited(str(path), _csv_records(str(path), lines), asked)
        case ".tsv":
            return _delimited(str(path), _tsv_records(lines), asked)
        case ".jsonl":
            return _json_lines(str(path), lines)
        case ".txt":
            return _plain_lines(str(path), lines)
        case suffix:
            fix = f"Readable are {_KINDS}.{_OTHER_TASKS.get(suffix, '')}"
            raise DataError(f"is of no known kind (suffix {suffix!r})", where=path, fix=fix)


def _plain_lines(where: str, lines: Lines) -> Table:
    """Every line is a text, an empty one too: predictions keep in step with lines."""
    return _filled(
        where, ("text",), (TableRow({"text": line}, f"{where}:{number}") for number, line in lines)
    )


def _tsv_records(lines: Lines) -> Records:
    return ((number, line.split("\t") if line else []) for number, line in lines)


def _csv_records(where: str, lines: Lines) -> Records:
    """Records with the line they begin on; a quoted value may go over several lines."""
    csv.field_size_limit(_LONGEST)
    reader, begin = csv.reader((line + "\n" for _, line in lines), strict=True), 1
    try:
        for record in reader:
            yield begin, record
            begin = reader.line_num + 1
    except csv.Error as error:
        fix = 'Quote a value that holds a comma or a line end, close each quote, and write " within as "".'
        raise DataError(f"is not CSV: {error}", where=f"{where}:{begin}", fix=fix) from error


def _delimited(where: str, records: Records, asked: Iterable[str]) -> Table:
    first = next((record for record in records if record[1]), (1, []))
    names = first[1]
    records = _kept(records, len(names))
    if any(
        name.isdecimal() and name not in names for name in asked
    ):  # no header: the first record is a row
        names, records = list(map(str, range(len(names)))), itertools.chain([first], records)
    twice = next((name for place, name in enumerate(names) if name and name in names[:place]), None)
    if twice is not None:
        what = f"two columns are called {twice!r}"
        raise DataError(
            what,
            where=f"{where}:{first[0]}",
            fix="Rename one; without a header, go by number, from 0: --text 0 …",
        )
    return _filled(where, names, (_record(where, names, line, values) for line, values in records))


def _kept(records: Records, columns: int) -> Records:
    """Without lines that are blank; but of a single column such a line is a row, unless nothing follows."""
    blank: list[tuple[int, list[str]]] = []
    for line, values in records:
        if values:
            yield from blank
            yield line, values
            blank = []
        elif columns == 1:
            blank.append((line, [""]))


def _record(where: str, names: list[str], line: int, values: list[str]) -> TableRow:
    """A row that is short lacks its last columns; one that is long is cut wrongly, so nothing in it can be trusted."""
    if len(values) > len(names):
        what = f"has {len(values)} values, but there are {len(names)} columns ({', '.join(names)})"
        raise DataError(
            what,
            where=f"{where}:{line}",
            fix="Quote values that hold the separator, or take the row out.",
        )
    return TableRow(dict(zip(names, values, strict=False)), f"{where}:{line}")


def _filled(where: str, names: Iterable[str] | None, rows: Iterator[TableRow]) -> Table:
    """The table, if it has a row; named as the values of its first row are, if it has no names."""
    first = next(rows, None)
    if first is None:
        raise DataError("holds no row", where=where, fix="Give a file with at least one example.")
    return Table(
        where, tuple(first.values if names is None else names), itertools.chain([first], rows)
    )


def _json_lines(where: str, lines: Lines) -> Table:
    return _filled(where, None, _json_rows(where, lines))


def _json_rows(where: str, lines: Lines) -> Iterator[TableRow]:
    for number, line in lines:
        if not line.strip():
            continue
        place = f"{where}:{number}"
        values = json_object(line, place, 'like {"text": "…", "label": "…"}')
        yield TableRow(values, place)


def _parquet(path: Path) -> Table:
    from pyarrow import parquet

    with _whole(path), open_bytes(path) as stream:
        names = parquet.ParquetFile(stream).schema_arrow.names
    return _filled(str(path), names, _parquet_rows(path))


def _parquet_rows(path: Path) -> Iterator[TableRow]:
    from pyarrow import parquet

    number = 0
    with _whole(path), open_bytes(path) as stream:
        for batch in parquet.ParquetFile(stream).iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield TableRow(values, f"{path}:row {number}")


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (
        pyarrow.ArrowException,
        OSError,
        UnicodeDecodeError,
    ) as error:  # of the latter two, a damaged page's
        what = f"is not a whole Parquet file ({str(error).splitlines()[0]})"
        raise DataError(what, where=path, fix="Fetch or write it again.") from error


def _hub(source: str) -> Table:
    """Rows of a Hub data set, streamed; classes by their names, and a class below 0, which stands for none, as None."""
    return _filled(source, None, _hub_rows(source))


def _hub_rows(source: str) -> Iterator[TableRow]:
    from datasets import ClassLabel, load_dataset

    repository, config, split = parse_hub_name(source.removeprefix(HUB))
    try:
        data = load_dataset(repository, config, split=split, streaming=True)
        features = data.features or {}
        classes = {
            name: kind.names for name, kind in features.items() if isinstance(kind, ClassLabel)
        }
        # A feature of lists of classes, such as tags of words, holds the class as its own feature.
        lists = {
            name: kind.feature.names for name, kind in features.items() if _lists_classes(kind)
        }
        for number, values in enumerate(data, 1):
            named = {name: _class_name(values[name], names) for name, names in classes.items()}
            named |= {name: _class_names(values[name], names) for name, names in lists.items()}
            yield TableRow({**values, **named}, f"{source}:row {number}")
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # the last for data sets that are programs, which are not run
        what = f"cannot be read: {str(error).splitlines()[0]}"
        fix = (
            f"Check the name, {HUB}owner/name[:configuration][:split], and the connection. "
            "Of a data set that is a program, take a Parquet copy."
        )
        raise DataError(what, where=source, fix=fix) from error


def _lists_classes(kind: Any) -> bool:
    from datasets import ClassLabel

    return isinstance(getattr(kind, "feature", None), ClassLabel)


def _class_name(place: int | None, names: list[str]) -> str | None:
    return None if place is None or place < 0 else names[place]


def _class_names(places: list[int | None] | None, names: list[str]) -> list[str | None] | None:
    return None if places is None else [_class_name(place, names) for place in places]
