"""One reader per kind of file: lines, JSON lines, Parquet, wiki-extractor output, Hub data sets → documents.

In the text of a document a newline ends a paragraph. Everything streams: no more than one document, or one Parquet batch, is in
memory.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from typing_extensions import assert_never

from bothways.core.errors import DataError
from bothways.data.text_io import BytesRead, open_bytes, read_lines

SNIFFED = 2**21
"""Characters of a file that are looked at before its kind is settled."""


@dataclass(frozen=True)
class Document:
    """A text whose sentences belong together, in reading order. `where`: file and line, for messages."""

    text: str
    where: str


class Boundary(Enum):
    """What ends a document in a plain text file.

    AUTO: blank lines if there is one in the first two million characters, else every line is a document.
    BLANK: a blank line. Each line is a paragraph or a sentence, as google-research/bert wants it.
    LINE: the end of the line.
    FILE: the end of the file. Blank lines separate paragraphs, and lines broken inside a sentence are joined again.
    """

    AUTO = "auto"
    BLANK = "blank"
    LINE = "line"
    FILE = "file"


# A line end inside a sentence: the line does not end one, and the next goes on in lower case or this one is 50 to 100
# characters long, as wrapped lines are. Headings and list items are mostly shorter, paragraphs on one line longer.
# The newline stands first in the expression, so that the search is one for a character.
_WRAP = re.compile(r"\n(?<=[\w,;]\n)(?:(?=[a-z])|(?<=[^\n]{50}\n)(?<![^\n]{101}\n)(?=[A-Z]))")
_DOC_TITLE = re.compile(r'\btitle="([^"]*)"')


def unwrap(text: str) -> str:
    """Joins the lines of a hard-wrapped text; all other line ends stay."""
    return _WRAP.sub(" ", text)


def read_text(path: Path, boundary: Boundary, bytes_read: BytesRead) -> Iterator[Document]:
    """Documents of a plain text file; one that begins with `<doc ` is read as wiki-extractor's.

    Raises:
        DataError, ResourceError: see `read_lines`; a `<doc>` that does not end.
    """
    lines = read_lines(path, bytes_read)
    head = _head(lines)
    numbered = itertools.chain(head, lines)
    if next((line for _, line in head if line.strip()), "").startswith("<doc "):
        return _wiki_documents(path, numbered)
    match boundary:
        case Boundary.AUTO:
            inner = "\n".join(line.strip() for _, line in head).strip()
            return (
                _block_documents(path, numbered)
                if "\n\n" in inner
                else _line_documents(path, numbered)
            )
        case Boundary.BLANK:
            return _block_documents(path, numbered)
        case Boundary.LINE:
            return _line_documents(path, numbered)
        case Boundary.FILE:
            return _whole_file(path, numbered)
        case _:
            assert_never(boundary)


def read_extracted(
    path: Path, column: str, boundary: Boundary, bytes_read: BytesRead
) -> Iterator[Document]:
    """Documents of a file that is named as wiki-extractor names them: of JSON lines if it begins with `{`, as with --json.

    Raises:
        DataError, ResourceError: see `read_json_lines` and `read_text`.
    """
    first = next((line for _, line in read_lines(path) if line.strip()), "")
    if first.lstrip().startswith("{"):
        return read_json_lines(path, column, bytes_read)
    return read_text(path, boundary, bytes_read)


def _head(lines: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    head, size = [], 0
    for number, line in lines:
        head.append((number, line))
        size += len(line) + 1
        if size >= SNIFFED:
            break
    return head


def _line_documents(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Document]:
    return (Document(line, f"{path}:{number}") for number, line in lines if line.strip())


def _block_documents(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Document]:
    for filled, group in itertools.groupby(lines, key=lambda numbered: bool(numbered[1].strip())):
        if filled:
            number, first = next(group)
            yield Document("\n".join([first, *(line for _, line in group)]), f"{path}:{number}")


def _whole_file(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Document]:
    yield Document(unwrap("\n".join(line for _, line in lines)), f"{path}:1")


def _wiki_documents(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Document]:
    """`<doc …>` to `</doc>`. The title line is left out: it is a heading, and the first sentence says it again."""
    start, title, body = 0, "", list[str]()
    number = 0
    for number, line in lines:
        if start and line.startswith("</doc>"):
            yield Document(unwrap("\n".join(body)), f"{path}:{start}")
            start = 0
        elif start and line.startswith("<doc "):
            raise _doc_error(
                "begins before the one of line " + str(start) + " has ended", path, number
            )
        elif line.startswith("<doc "):
            found = _DOC_TITLE.search(line)
            start, title, body = number, found.group(1) if found else "", []
        elif start:
            if body or (line.strip() and line.strip() != title):
                body.append(line)
        elif line.strip():
            raise _doc_error("is text outside of <doc …> and </doc>", path, number)
    if start:
        raise _doc_error(f"ends inside the <doc …> of line {start}", path, number)


def _doc_error(what: str, path: Path, line: int) -> DataError:
    return DataError(
        what,
        where=f"{path}:{line}",
        fix="Each document is a line <doc …>, its text and a line </doc>.",
    )


def read_json_lines(path: Path, column: str, bytes_read: BytesRead) -> Iterator[Document]:
    """Documents of a .jsonl file: the text in `column` of the object on each line; null counts as empty.

    Raises:
        DataError: a line that is no JSON object, that lacks the column, or has something else than text in it.
    """
    for number, line in read_lines(path, bytes_read):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = json_object(
            line, where, f'like {{"{column}": "…"}}; for plain text use the suffix .txt'
        )
        yield Document(_text_of(row, column, where), where)


def json_object(line: str, where: str, meant: str) -> dict[str, Any]:
    """The object on a line of a .jsonl file. DataError if there is none; `meant` tells what it is to be like."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        what = f"is not JSON: {error.msg} at column {error.colno}"
        raise DataError(
            what, where=where, fix="Each line of a .jsonl file is one JSON object."
        ) from error
    except (ValueError, RecursionError) as error:
        what = "holds a number with too many digits, or brackets too deep in each other"
        raise DataError(what, where=where, fix="Take it out, or leave the line out.") from error
    if not isinstance(row, dict):
        raise DataError(
            f"holds a JSON {type(row).__name__}, not an object",
            where=where,
            fix=f"Each line is an object {meant}.",
        )
    return row


def read_parquet(path: Path, column: str, bytes_read: BytesRead) -> Iterator[Document]:
    """Documents of a Parquet file, row group by row group; null counts as empty.

    Raises:
        DataError: not a Parquet file, a damaged one, no such column, or it does not hold text.
        ResourceError: see `open_bytes`.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with open_bytes(path, bytes_read) as stream:
            file = parquet.ParquetFile(stream)
            check_column(column, file.schema_arrow.names, path)
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    where = f"{path}:row {row}"
                    yield Document(_text_of({column: value}, column, where), where)
    except (
        pyarrow.ArrowException,
        OSError,
        UnicodeDecodeError,
    ) as error:  # of the latter two, a damaged page's
        what = f"is not a whole Parquet file ({str(error).splitlines()[0]})"
        raise DataError(what, where=path, fix="Fetch or write it again.") from error


def read_hub(name: str, column: str) -> Iterator[Document]:
    """Documents of a Hugging Face Hub data set, streamed: `owner/name[:configuration][:split]`, split `train` by default.

    Raises:
        DataError: no such data set, configuration, split or column; the Hub cannot be reached.
    """
    from datasets import load_dataset

    repository, config, split = parse_hub_name(name)
    where = f"hub:{name}"
    try:
        rows = load_dataset(repository, config, split=split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield Document(_text_of(row, column, f"{where}:row {number}"), f"{where}:row {number}")
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # the last for data sets that are programs, which are not run
        what = f"cannot be read: {str(error).splitlines()[0]}"
        fix = "Check the name, hub:owner/name[:configuration][:split], and the connection."
        raise DataError(what, where=where, fix=fix) from error


def parse_hub_name(name: str) -> tuple[str, str | None, str]:
    """`owner/name[:config][:split]` → (repository, configuration, split)."""
    repository, *rest = name.split(":")
    if not repository or len(rest) > 2:
        fix = "Write hub:owner/name, hub:owner/name:configuration or hub:owner/name:configuration:split."
        raise DataError("is not the name of a Hub data set", where=f"hub:{name}", fix=fix)
    match rest:
        case [config, split]:
            return repository, config or None, split or "train"
        case [config]:
            return repository, config or None, "train"
        case _:
            return repository, None, "train"


def check_column(column: str, names: list[str], where: str | Path) -> None:
    """Raises DataError naming the columns there are, if `column` is not one."""
    if column not in names:
        fix = "Name the column that holds the text, with --column."
        raise DataError(
            f"has no column {column!r}; it has {', '.join(names) or 'none'}", where=where, fix=fix
        )


def _text_of(row: dict[str, object], column: str, where: str) -> str:
    check_column(column, list(row), where)
    value = row[column]
    if value is not None and not isinstance(value, str):
        fix = "Name a column that holds text, with --column."
        raise DataError(
            f"column {column!r} holds {type(value).__name__}, not text", where=where, fix=fix
        )
    return value or ""
