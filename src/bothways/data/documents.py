"""Files, folders, globs, files at URLs and Hub data sets → one stream of documents.

The suffix gives the kind: plain text (.txt, .text, .docs), the tables of `data.tables` with one
document per row, and wiki_00, as wiki-extractor names its files, which hold text or JSON lines. The
order follows the inputs, and is by name within a folder or glob: the same inputs give the same
stream.

In the text of a document a newline ends a paragraph. Memory is bounded by one document, and a
document by `max_line_bytes`: a longer one is read as several.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from bothways.core.errors import ConfigError, DataError, argument, read_errors
from bothways.core.files import is_url, local_path, read_object, replace_text, surrogate_in
from bothways.core.terminal import listed, quantity
from bothways.data import tables, text_io
from bothways.data.tables import HUB, HubData, parse_hub_name

SNIFFED = 2**21
"""Characters that are examined to decide what ends a document."""

_VERSIONS = "versions.json"
_TEXT = (".txt", ".text", ".docs")
_TABLES = (".jsonl", ".json", ".csv", ".tsv")
_KINDS = (
    f"{', '.join(_TEXT + _TABLES)} (each also with {', '.join(text_io.COMPRESSED)}), .parquet, "
    "or wiki-extractor's wiki_00"
)
_WIKI_NAME = re.compile(r"wiki_\d+$")
# A title's quotes are as they are: it ends before the next attribute, or at the end of the tag.
_DOC_TITLE = re.compile(r'\btitle="(.*?)"(?=\s+\w+="|\s*>)')
# A line end inside a sentence: the line does not end the sentence, and the next line begins in
# lower case, or this one is 50 to 100 characters long, as wrapped lines are. Headings and list
# items are mostly shorter, and paragraphs on one line longer. The newline comes first in the
# expression, so that the search is one for a character.
_WRAP = re.compile(r"\n(?<=[\w,;]\n)(?=(\w))")

Lines = Iterator[tuple[int, str]]


@dataclass(frozen=True)
class Document:
    """A text whose sentences belong together, in reading order, and its file and line."""

    text: str
    where: str


class Boundary(Enum):
    """What ends a document in a plain text file.

    AUTO: blank lines if there is one in the first two million characters, else each line is a
        document.
    BLANK: a blank line. Each line is a paragraph or a sentence, as google-research/bert has it.
    LINE: the end of the line.
    FILE: the end of the file. Blank lines separate paragraphs, and lines wrapped inside a sentence
        are joined.
    """

    AUTO = "auto"
    BLANK = "blank"
    LINE = "line"
    FILE = "file"


@dataclass(frozen=True)
class Origin:
    """A source of documents: a file or a data set of the Hub.

    Attributes:
        size: in bytes; 0 if it is unknown, as of a file at a URL.
        modified: the time of its change in ns, 0 at a URL; of a data set of the Hub, its commit.
    """

    name: str
    size: int = 0
    modified: int | str = 0


@dataclass(frozen=True)
class DocumentReader(Iterator[Document]):
    """Documents, to be read once: those of some inputs, or any others.

    Attributes:
        origins: every file and data set, in reading order; none of other documents.
        settings: the other settings that decide which documents come out.
        notes: messages about files in the folders that are not read.
    """

    stream: Iterator[Document]
    origins: tuple[Origin, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bytes_read: text_io.BytesRead = field(default_factory=text_io.BytesRead)

    @property
    def total(self) -> int:
        """The size of all files in bytes; 0 if it is unknown."""
        return sum(origin.size for origin in self.origins)

    @property
    def position(self) -> int:
        """Bytes read so far, of `total`."""
        return self.bytes_read.position

    def __next__(self) -> Document:
        return next(self.stream)


def read_documents(
    inputs: Sequence[str], *, column: str = "text", boundary: Boundary = Boundary.AUTO
) -> DocumentReader:
    """Read the documents of files, globs, folders (recursively) and Hub data sets.

    All names are checked before the first document is read.

    Args:
        inputs: names, in reading order; a file that occurs twice is read once. A file may be at a
            URL that fsspec opens, such as "s3://bucket/wiki.txt.zst". A Hub data set is
            "hub:owner/name@revision:configuration:split".
        column: the column with the text, in tables.
        boundary: what ends a document in plain text files.

    Raises:
        ConfigError: a column for plain text alone, or a boundary for tables alone.
        DataError: no such file, a glob or folder without a readable file, an unsupported kind, an
            empty file; while reading: a damaged, binary or wrongly encoded file, bad JSON, a wrong
            column, with file and line.
        ResourceError: a file, folder or URL that cannot be read.
    """
    notes = list[str]()
    names = _files_of(inputs, notes)
    tabular = [*map(_is_table, names)]
    if boundary is not Boundary.AUTO and tabular and all(tabular):
        message, fix = "does nothing with tables, where a row is a document", "Leave it out."
        raise ConfigError(message, where="boundary", fix=fix)
    if column != "text" and not any(tabular) and not any(map(_is_wiki, names)):
        message, fix = "does nothing with plain text, which has no columns", "Leave it out."
        raise ConfigError(message, where="column", fix=fix)
    origins, bytes_read = tuple(map(origin_of, names)), text_io.BytesRead()
    stream = (
        document
        for origin in origins
        for document in _read_unchanged(origin, column, boundary, bytes_read)
    )
    settings = {"column": column, "boundary": boundary.value}
    return DocumentReader(stream, origins, settings, tuple(notes), bytes_read)


def have_columns(inputs: Sequence[str]) -> bool:
    """Return True if a file of these inputs has columns; errors as `read_documents`."""
    return any(_is_table(name) or _is_wiki(name) for name in _files_of(inputs, []))


def unwrap(text: str) -> str:
    """Join the lines of a hard-wrapped text; other line ends stay.

    Small and capital letters tell them apart: in scripts without both, such as Chinese, all stay.
    """

    def join(line_end: re.Match[str]) -> str:
        """Return a space for a line end inside a sentence."""
        width = line_end.start() - (text.rfind("\n", 0, line_end.start()) + 1)
        letter = line_end[1]
        return " " if letter.islower() or (letter.isupper() and 50 <= width <= 100) else "\n"

    return _WRAP.sub(join, text)


# Names


def _files_of(inputs: Sequence[str], notes: list[str]) -> list[str]:
    """Return the files and Hub data sets of the inputs, each once; add a note of other files."""
    names = dict[str, None]()
    for name in inputs:
        with read_errors(name):
            names |= dict.fromkeys(_resolve(name, notes))
    return [*names]


def _resolve(name: str, notes: list[str]) -> list[str]:
    """Return the files that a name refers to, or the Hub data set itself; notes as `_files_of`."""
    if name == text_io.STDIN:
        fix = "Save it to a file first, or use a pipe: <(command)."
        raise DataError("reading documents from standard input is not supported", fix=fix)
    if name.startswith(HUB):
        parse_hub_name(name)
        return [name]
    location = local_path(name)
    if is_url(name):
        if "*" in name:
            fix = "Name each file, or download them first."
            raise DataError("is a pattern of URLs, which is not read", where=name, fix=fix)
        return [_file(name)]
    if (location / "tokens.bin").is_file():
        fix = "Give the text that it was built from, or the corpus alone where one is read."
        raise DataError("is a built corpus, not text", where=name, fix=fix)
    if location.is_dir():
        files = _files_in(location)
        readable = [_file(str(path)) for path in files if _is_readable(str(path))]
        if readable:
            # Such as README.md, but also text with a suffix that is not known: book.asc.
            if others := [path.name for path in files if not _is_readable(str(path))]:
                count = quantity(len(others), "file(s)")
                notes.append(f"note: {name}: {count} not read: {listed(others, 5)}")
            return readable
        fix = f"Check the name. Supported are {_KINDS}."
        raise DataError("names no file that can be read", where=name, fix=fix)
    if location.exists():
        return [_file(str(location))]
    if glob.has_magic(name):
        return [_file(str(match)) for match in text_io.matching_files(name)]
    fix = f"Check the name; a Hub data set is {HUB}owner/name."
    raise DataError("no such file or folder", where=name, fix=fix)


def _files_in(folder: Path) -> list[Path]:
    """Return the files in a folder, by name; links to folders are followed, hidden ones skipped."""

    def fail(error: OSError) -> None:
        with read_errors(error.filename):
            raise error

    visited, files = set[str](), list[Path]()
    for name, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
        if (real := os.path.realpath(name)) in visited:  # such as a link to a folder above
            folders.clear()
            continue
        visited.add(real)
        paths = (Path(name, entry) for entry in names if not entry.startswith("."))
        files += filter(Path.is_file, paths)
    return sorted(files)


def _file(name: str) -> str:
    if not _is_readable(name):
        suffix = Path(name).suffix.lower()
        message, fix = f"unsupported file type {suffix!r}", f"Supported are {_KINDS}."
        if suffix in text_io.SPREADSHEETS:
            fix += f" {text_io.SAVE_AS_CSV}"
        raise DataError(message, where=name, fix=fix)
    if surrogate_in(name) is not None:
        message = "has a name that is not UTF-8, which the record of a corpus cannot hold"
        raise DataError(message, where=name, fix="Rename it, or the folder that it is in.")
    if Path(name).is_file() and not Path(name).stat().st_size:
        raise DataError("is an empty file", where=name, fix="Leave it out, or download it again.")
    return name


def _is_readable(name: str) -> bool:
    has_kind = text_io.suffix_of(name) in _TEXT or _is_table(name) or _is_wiki(name)
    return has_kind or text_io.is_pipe(name)  # which is read as text


def _is_table(name: str) -> bool:
    suffix = text_io.suffix_of(name)
    return name.startswith(HUB) or name.lower().endswith(".parquet") or suffix in _TABLES


def _is_wiki(name: str) -> bool:
    path = Path(name)
    return bool(
        _WIKI_NAME.match(path.stem if path.suffix.lower() in text_io.COMPRESSED else path.name)
    )


def origin_of(name: str) -> Origin:
    """Return a source as it is now.

    Raises:
        DataError: there is no such data set of the Hub.
        ResourceError: it cannot be reached.
    """
    if name.startswith(HUB):
        return Origin(name, modified=HubData(name).version)
    if is_url(name):
        return Origin(name)
    status = local_path(name).stat()
    return Origin(name, status.st_size, status.st_mtime_ns)


def check_versions(folder: Path, origins: Iterable[Origin]) -> None:
    """Compare the versions of sources with those when a work began; note them if it begins now.

    Files only have a time of change: they may have been copied.

    Args:
        folder: where the work keeps what it knows of them.

    Raises:
        DataError: a data set of the Hub has changed.
    """
    record = folder / _VERSIONS
    versions = {
        origin.name: origin.modified for origin in origins if isinstance(origin.modified, str)
    }
    stored = read_object(record) if record.exists() else {}
    for name, version in versions.items():
        if stored.get(name, version) != version:
            raise _change(name, stored[name], version, f"Delete {folder} to begin again with it")
    if versions:
        replace_text(record, json.dumps(stored | versions))


def _change(name: str, stored: int | str, current: int | str, fix: str) -> DataError:
    fix += ", or name the earlier revision: hub:owner/name@revision."
    message = f"has changed since this work began: it was {stored} and is {current}"
    return DataError(message, where=name, fix=fix)


# Contents


def _read_unchanged(
    origin: Origin, column: str, boundary: Boundary, bytes_read: text_io.BytesRead
) -> Iterator[Document]:
    """Yield the documents of a source; raise DataError if it is a data set of the Hub that has
    another version, when it is open, than its origin.
    """
    name = origin.name
    if not _is_table(name):
        yield from _text_documents(name, column, boundary, bytes_read)
        return
    table = tables.open_table(
        name, [column], only=[column], allow_empty=True, bytes_read=bytes_read
    )
    with contextlib.closing(table):  # now, not when the traceback of an error is collected
        if isinstance(origin.modified, str) and (current := origin_of(name)) != origin:
            raise _change(name, origin.modified, current.modified, "Run the same command again")
        for row in table.rows:
            yield row_document(row, column)


def row_document(row: tables.TableRow, column: str) -> Document:
    """Return the text in a column of a row; null and NaN count as empty.

    Raises:
        DataError: the row lacks the column, or its value is not a text.
    """
    tables.require_column(column, row.values, row.where)
    value = tables.plain_value(row.values[column])
    if isinstance(value, float) and math.isnan(value):  # as pandas marks an absent text
        value = None
    if value is not None and not isinstance(value, str):
        message = f"column {column!r} holds {type(value).__name__}, not text"
        fix = f"Name a column that holds text: {argument(column='NAME')}."
        raise DataError(message, where=row.where, fix=fix)
    return Document(value or "", row.where)


def _text_documents(
    path: str, column: str, boundary: Boundary, bytes_read: text_io.BytesRead
) -> Iterator[Document]:
    """Read a plain text file, or one of wiki-extractor's, which begins with `<doc ` or `{`."""
    with contextlib.closing(text_io.read_lines(path, bytes_read, split=True)) as lines:
        head, size = list[tuple[int, str]](), 0
        for number, line in lines:
            head.append((number, line))
            size += len(line) + 1
            if size >= SNIFFED:
                break
        # The form is recognised by the first lines, which are then read again from memory.
        numbered = itertools.chain(head, lines)
        first_line = next((line for _, line in head if line.strip()), "")
        if first_line.startswith("<doc "):
            yield from _wiki_documents(path, numbered)
            return
        # With --json wiki-extractor writes JSON lines, under the same names.
        if _is_wiki(path) and first_line.lstrip().startswith("{"):
            for row in tables.json_rows(path, numbered):
                yield row_document(row, column)
            return
        if boundary is Boundary.AUTO:
            inner = "\n".join(line.strip() for _, line in head).strip()
            boundary = Boundary.BLANK if "\n\n" in inner else Boundary.LINE
        match boundary:
            case Boundary.BLANK:
                blocks = itertools.groupby(numbered, key=lambda pair: bool(pair[1].strip()))
                texts = (pair for filled, block in blocks if filled for pair in _bounded(block))
            case Boundary.LINE:
                texts = (pair for pair in numbered if pair[1].strip())
            case _:
                texts = ((number, unwrap(text)) for number, text in _bounded(numbered))
        for number, text in texts:
            yield Document(text, f"{path}:{number}")


def _bounded(lines: Lines) -> Iterator[tuple[int, str]]:
    """Join lines to one text, or to several if they are longer than `max_line_bytes`."""
    limit, begin, size, pending = text_io.max_line_bytes(), 1, 0, list[str]()
    for number, line in lines:
        if pending and size + len(line) > limit:
            yield begin, "\n".join(pending)
            size, pending = 0, []
        if not pending:
            begin = number
        pending.append(line)
        size += len(line) + 1
    if pending:
        yield begin, "\n".join(pending)


def _wiki_documents(path: str, lines: Lines) -> Iterator[Document]:
    """Read `<doc …>` to `</doc>`, without the title line, which the first sentence repeats."""
    start, title, body = 0, "", list[str]()
    number = 0
    for number, line in lines:
        if start and line.startswith("</doc>"):
            yield Document(unwrap("\n".join(body)), f"{path}:{start}")
            start = 0
        elif start and line.startswith("<doc "):
            raise _doc_error(f"begins before the document of line {start} has ended", path, number)
        elif line.startswith("<doc "):
            match = _DOC_TITLE.search(line)
            start, title, body = number, match.group(1) if match else "", []
        elif start:
            # Before the body, blank lines and the repeated title are skipped.
            if body or (line.strip() and line.strip() != title):
                body.append(line)
        elif line.strip():
            raise _doc_error("is text outside of <doc …> and </doc>", path, number)
    if start:
        raise _doc_error(f"ends inside the <doc …> of line {start}", path, number)


def _doc_error(message: str, path: str, line: int) -> DataError:
    fix = "Each document is a line <doc …>, its text and a line </doc>."
    return DataError(message, where=f"{path}:{line}", fix=fix)
