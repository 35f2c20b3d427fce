"""Bytes and lines of files, plain or compressed, as streams that report their position.

A damaged or wrongly encoded file raises an error that names the line. Memory is bounded by the
longest line, which is bounded by `max_line_bytes`: a few kilobytes of a compressed file can expand
to gigabytes without a line end.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import io
import logging
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from typing_extensions import Buffer

from bothways.core import errors
from bothways.core.errors import ConfigError, DataError, ResourceError, optional, read_errors
from bothways.core.files import is_url, local_path, near_path
from bothways.core.terminal import quantity, write_stderr

COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
"""Suffixes of compressed files."""
STDIN, STANDARD_INPUT = "-", "standard input"
"""The name of standard input on the command line, and in messages."""
MAX_LINE = "BOTHWAYS_MAX_LINE_BYTES"
"""The environment variable that sets the longest line, in bytes."""
DEFAULT_MAX_LINE = 2**23
"""A line of this length takes about 1 GB of memory when it is tokenized."""

logger = logging.getLogger(__name__)

_CONVERT = (
    "Convert it: iconv -f ENCODING -t UTF-8. Chinese text is usually in GB18030, which includes "
    "GBK, or in BIG5, Japanese in CP932, Korean in CP949, Russian in CP1251, English in LATIN1."
)
_NULS = 0.1
"""The share of NUL characters in a line, beyond three, above which it is not text; fewer are left
out with a warning."""
_HEAD = 8192
_BLOCK = 1 << 17
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
SAVED_DATASET = ("state.json", "dataset_dict.json")
"""Files that datasets' `save_to_disk` writes."""
SPREADSHEETS = (".xlsx", ".xls", ".ods")
SAVE_AS_CSV = "Of a spreadsheet, save each table as CSV UTF-8, with commas."
"""Advice for files of Excel, whatever their name."""
_BINARY = {
    b"\x1f\x8b": ("compressed by gzip", "Add .gz to its name."),
    b"\xfd7zXZ": ("compressed by xz", "Add .xz to its name."),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "Add .zst to its name."),
    b"BZh": ("compressed by bzip2", "Add .bz2 to its name."),
    b"PAR1": ("a Parquet file", "Name it .parquet."),
    b"PK\x03\x04": ("a spreadsheet or another zip archive", f"Unpack it. {SAVE_AS_CSV}"),
    b"\xd0\xcf\x11\xe0": ("a file of Office, such as a spreadsheet", SAVE_AS_CSV),
}
"""What begins with these bytes, and how to make it readable."""


@dataclass
class BytesRead:
    """Bytes read from the files on disk, before decompression."""

    finished: int = 0
    current: io.BufferedReader | None = None

    @property
    def position(self) -> int:
        """Bytes so far, including the open file."""
        return self.finished + (self.current.tell() if self.current is not None else 0)


def suffix_of(name: str | Path) -> str:
    """Return the suffix of a file without that of its compression: "A.CSV.gz" → ".csv"."""
    path = Path(str(name).lower())  # as file systems and spreadsheets of Windows write it
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def max_line_bytes() -> int:
    """Return the longest line that is read, in bytes.

    Raises:
        ConfigError: the environment variable `BOTHWAYS_MAX_LINE_BYTES` is not a positive integer.
    """
    value = os.environ.get(MAX_LINE, str(DEFAULT_MAX_LINE))
    if not value.isdecimal() or len(value) > 18 or int(value) < 1:
        fix = f"Set it to a number of bytes, such as {DEFAULT_MAX_LINE}, or unset it."
        raise ConfigError(f"{value!r} is not a positive integer", where=MAX_LINE, fix=fix)
    return int(value)


class _Decompressed(io.RawIOBase):
    """The contents of a file of compressed streams, end to end, as `cat a.gz b.gz` writes them.

    The libraries' readers end in silence at a stream that does not begin as one (lzma, bz2) or that
    is cut short (zstandard). Here every byte is read, except for zeros after a stream, or refused.
    """

    def __init__(
        self, raw: io.BufferedReader, block: int, begin: Callable[[], Any], error: type[Exception]
    ) -> None:
        self._raw, self._block, self._begin, self._error = raw, block, begin, error
        # Decompressors of zlib, lzma, bz2 and zstandard are alike: decompress, eof, unused_data.
        self._stream: Any = None
        self._rest = b""
        self._read = self._start = 0  # bytes of the file; where the current stream begins
        self._ready = memoryview(b"")  # a view, because cutting bytes would copy the remainder

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer with decompressed bytes; return their number."""
        while not self._ready:
            block = self._rest or self._raw.read(self._block)
            self._read += 0 if self._rest else len(block)
            self._rest = b""
            if not block:
                if self._stream is not None:
                    raise EOFError(f"the stream from byte {self._start:,} on is not complete")
                return 0
            if self._stream is None:
                if self._read > len(block):  # not at the beginning of the file
                    block = block.lstrip(b"\0")
                if not block:
                    continue
                self._start = self._read - len(block)
                self._stream = self._begin()
            try:
                self._ready = memoryview(self._stream.decompress(block))
            except (self._error, EOFError) as error:
                message = f"the stream from byte {self._start:,} on cannot be read: {error}"
                raise EOFError(message) from error
            if self._stream.eof:  # a stream ends in this block
                self._rest, self._stream = self._stream.unused_data, None
        view = memoryview(buffer)
        count = min(len(view), len(self._ready))
        view[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _decompressed(raw: io.BufferedReader, suffix: str) -> io.BufferedReader:
    # The bytes that are decompressed at once: a few can expand to 128 KiB (zstd), a thousand to one
    # (gzip), 7,000 to one (xz) or 900 kB (bz2), and what they expand to is held.
    kinds: dict[str, tuple[int, Callable[[], Any], type[Exception]]] = {
        ".gz": (1 << 12, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), zlib.error),
        ".xz": (1 << 8, lzma.LZMADecompressor, lzma.LZMAError),
        ".bz2": (1 << 9, bz2.BZ2Decompressor, OSError),
    }
    if suffix == ".zst":
        with optional("data", "reading .zst files"):
            import zstandard
        begin = lambda: zstandard.ZstdDecompressor().decompressobj()  # noqa: E731
        kinds[suffix] = (1 << 10, begin, zstandard.ZstdError)
    if suffix not in kinds:
        return raw
    return io.BufferedReader(_Decompressed(raw, *kinds[suffix]), _BLOCK)


def file_at(name: Path | str, fix: str = "Check the name.") -> Path:
    """Return the path of an existing file; pipes such as `/dev/fd/63` count.

    Args:
        fix: what to do if there is no such file.

    Raises:
        DataError: there is no such file, or it is a folder.
        ResourceError: permission denied.
    """
    path = local_path(name)
    with read_errors(name):
        if path.is_dir():
            is_saved = any((path / file).is_file() for file in SAVED_DATASET)
            advice = f"Of a data set that datasets saved, write hub:{name}."
            raise DataError(
                "is a folder", where=name, fix=advice if is_saved else "Name a file in it."
            )
        if not path.exists():
            near = near_path(path)
            fix = "Download it: here files at URLs are not read." if is_url(name) else fix
            fix = f"Did you mean {near}?" if near else fix
            raise DataError("no such file", where=name, fix=fix)
    return path


def matching_files(pattern: str) -> list[Path]:
    """Return the files that a glob matches, in the order of their names; ** matches folders.

    Raises:
        DataError: there are none.
    """
    paths = map(Path, sorted(glob.glob(str(local_path(pattern)), recursive=True)))
    if files := [path for path in paths if path.is_file()]:
        return files
    raise DataError("matches no file", where=pattern, fix="Check the pattern; ** matches folders.")


def is_pipe(name: str | Path) -> bool:
    """Return True for what exists but is not a file, such as /dev/fd/63."""
    return not is_url(name) and not local_path(name).is_file()


def is_stream(source: str) -> bool:
    """Return True for standard input, and for a pipe without a suffix: <(command) is /dev/fd/63.

    Neither has a name that says what its lines are.
    """
    path = local_path(source)
    exists = os.path.exists(path) and not path.is_dir()
    return source == STDIN or (not path.suffix and exists and is_pipe(source))


@contextmanager
def _open_url(url: str) -> Iterator[io.BufferedReader]:
    """Open a file at a URL by fsspec, which reads ahead."""
    import fsspec  # which torch needs, too

    try:
        with fsspec.open(url, "rb") as stream:
            yield io.BufferedReader(stream, _BLOCK)
    except (errors.BothwaysError, EOFError):
        raise
    except Exception as error:  # every store has errors of its own
        fix = "Check the URL, the connection and the rights, or download the file first."
        if isinstance(error, ImportError):
            fix = 'Install it; for s3:// and https:// by: pip install "bothways[remote]"'
        message = f"cannot be read: {error or type(error).__name__}"
        raise ResourceError(message, where=url, fix=fix) from error


@contextmanager
def open_bytes(
    name: str | Path, bytes_read: BytesRead | None = None
) -> Iterator[io.BufferedReader]:
    """Open a file or a URL, decompressing it by its suffix; `bytes_read` is kept up to date.

    Raises:
        ResourceError: it cannot be opened or read.
    """
    bytes_read, path = bytes_read or BytesRead(), local_path(name)
    with read_errors(name), _open_url(str(name)) if is_url(name) else path.open("rb") as raw:
        # Neither a pipe nor a file at a URL has a position.
        bytes_read.current = None if is_url(name) or not raw.seekable() else raw
        try:
            yield _decompressed(raw, path.suffix.lower())
        finally:
            # The garbage collector may close the file before an abandoned reader ends.
            if not raw.closed:
                bytes_read.finished = bytes_read.position
            bytes_read.current = None


def _check_head(location: str | Path, head: bytes) -> None:
    for mark, name in _OTHER_MARKS.items():
        if head.startswith(mark):
            fix = f"Convert it: iconv -f {name} -t UTF-8."
            raise DataError(f"is {name} text; only UTF-8 is supported", where=location, fix=fix)
    for mark, (name, fix) in _BINARY.items():
        if head.startswith(mark) and (0 in head or not mark.isascii()):
            raise DataError(f"is not text, but {name}", where=location, fix=fix)
    if 0 in head:
        message = "is a binary file, or UTF-16 text without a byte-order mark; only UTF-8 is read"
        fix = "Convert text: iconv -f UTF-16LE -t UTF-8, or -f UTF-16BE. Compressed files need a "
        fix += f"suffix {', '.join(COMPRESSED)}."
        raise DataError(message, where=location, fix=fix)


def _raw_lines(
    stream: IO[bytes] | io.BufferedReader, name: str | Path, *, split: bool
) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers; a line that is too long is an error, or comes in pieces."""
    limit, number, pending = max_line_bytes(), 1, b""
    while line := pending + stream.readline(limit + 1 - len(pending)):
        if len(line) <= limit or line.endswith(b"\n"):
            yield number, line
            number, pending = number + 1, b""
        elif split:
            # The index to cut a long line at: after its last space, else before a character.
            end = line.rfind(b" ", 0, limit) + 1
            if not end:
                end = limit
                while end > max(limit - 4, 1) and line[end] & 0xC0 == 0x80:  # a continuation byte
                    end -= 1
            yield number, line[:end]
            pending = line[end:]
        else:
            fix = f"Break the line, or set the environment variable {MAX_LINE} to a larger number."
            raise DataError(f"is longer than {limit:,} bytes", where=f"{name}:{number}", fix=fix)


def decode_lines(
    stream: IO[bytes] | io.BufferedReader, name: str | Path, *, split: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield lines with numbers from 1, without line ends, byte-order marks and NUL characters.

    The number of NUL characters is logged.

    Args:
        split: yield a line longer than `max_line_bytes` in pieces instead of raising an error.

    Raises:
        DataError: binary data, another encoding, a byte that is not UTF-8, a line too long, a
            single line with carriage returns in it.
    """
    begun, number, returns, nuls, first_nul = False, 0, 0, 0, 0
    for number, line in _raw_lines(stream, name, split=split):
        if not begun:
            _check_head(name, line[:_HEAD])
            begun = True
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            message = f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8"
            raise DataError(message, where=f"{name}:{number}", fix=_CONVERT) from error
        text = text.lstrip("\ufeff")  # also on later lines, where files were joined
        if "\0" in text:
            if text.count("\0") > 3 + _NULS * len(text):
                _check_head(f"{name}:{number}", line[:_HEAD])
            nuls, first_nul = nuls + text.count("\0"), first_nul or number
            text = text.replace("\0", "")
        if number == 1:
            returns += text.count("\r")
        yield number, text
    if number == 1 and returns:
        fix = "If they end the lines, convert them: tr '\\r' '\\n'."
        message = f"is one line with {quantity(returns, 'carriage return(s)')}"
        raise DataError(message, where=name, fix=fix)
    if nuls:
        logger.warning("%s: %s NUL characters left out, from line %s on", name, nuls, first_nul)


def standard_input() -> Iterator[tuple[int, str]]:
    """Yield the lines of standard input; errors as `decode_lines`.

    Raises:
        ResourceError: standard input is closed.
    """
    if sys.stdin is None:
        raise ResourceError("is closed", where=STANDARD_INPUT, fix="Name a file to read.")
    if sys.stdin.buffer.isatty():  # a program that waits in silence seems to compute
        write_stderr("note: reading the keyboard, one input a line; Ctrl-D ends it")
    return decode_lines(sys.stdin.buffer, STANDARD_INPUT)


def read_lines(
    path: str | Path, bytes_read: BytesRead | None = None, *, split: bool = False
) -> Generator[tuple[int, str], None, None]:
    """Yield the lines of a file or URL as `decode_lines` does; `bytes_read` is kept up to date.

    Raises:
        DataError: see `decode_lines`; a damaged compressed file.
        ResourceError: see `open_bytes`.
    """
    number = 0
    with open_bytes(path, bytes_read) as stream:
        try:
            for number, text in decode_lines(stream, path, split=split):
                yield number, text
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk, not of a decompressor
            message = f"the compressed file is damaged or cut short after line {number} ({error})"
            raise DataError(message, where=path, fix="Download or compress it again.") from error
