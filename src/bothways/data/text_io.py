"""Bytes and lines of files, plain or compressed, as streams that know how far they are.

A damaged or wrongly encoded file is an error that names the line it was found in.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Buffer

from bothways.core.errors import DataError, ResourceError

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj

COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
"""Suffixes of compressed files."""
STDIN, STANDARD_INPUT = "-", "standard input"
"""What it is called on a command line, and in messages."""

_HEAD = 8192
_BLOCK = 1 << 17
_ZSTANDARD_BLOCK = 1 << 14  # text takes some ten times the room when it is out
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@dataclass
class BytesRead:
    """How many bytes of the files, as they lie on the disk, have been read."""

    finished: int = 0
    current: io.BufferedReader | None = None

    @property
    def position(self) -> int:
        """Bytes so far, those of the open file included."""
        return self.finished + (self.current.tell() if self.current is not None else 0)


class _Zstandard(io.RawIOBase):
    """A .zst file, of one frame or several; unlike the library's own reader it notices a file that is cut short."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw
        self._frame: ZstdDecompressionObj | None = None
        self._rest = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        while not self._ready:
            block = self._rest or self._raw.read(_ZSTANDARD_BLOCK)
            if not block:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return 0
            self._ready, self._rest = self._decompress(block)
        view = memoryview(buffer)
        count = min(len(view), len(self._ready))
        view[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, block: bytes) -> tuple[bytes, bytes]:
        import zstandard

        frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            ready = frame.decompress(block)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        self._frame = None if frame.eof else frame
        return ready, frame.unused_data


def _decompressed(raw: io.BufferedReader, suffix: str) -> io.BufferedReader:
    match suffix:
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(fileobj=raw), _BLOCK)
        case ".xz":
            return io.BufferedReader(lzma.LZMAFile(raw), _BLOCK)
        case ".bz2":
            return io.BufferedReader(bz2.BZ2File(raw), _BLOCK)
        case ".zst":
            return io.BufferedReader(_Zstandard(raw), _BLOCK)
        case _:
            return raw


@contextmanager
def check_readable(place: Path | str) -> Iterator[None]:
    """What the operating system refuses inside is a ResourceError at `place`: no permission, a failing disk.

    Errors without a number of its own are those of decompressors, and stay as they are.
    """
    try:
        yield
    except PermissionError as error:
        raise ResourceError(
            "may not be read by this user", where=place, fix="Give read permission."
        ) from error
    except OSError as error:
        if error.errno is None:
            raise
        what = f"cannot be read: {error.strerror}"
        raise ResourceError(
            what, where=place, fix="Check the name, and the disk that it lies on."
        ) from error


def file_at(name: Path | str, fix: str = "Check the name.") -> Path:
    """The path of a file that is there.

    Args:
        fix: what to do if there is none.

    Raises:
        DataError: there is no such file, or it is a folder.
        ResourceError: it may not be looked at.
    """
    path = Path(name).expanduser()
    with check_readable(name):
        if path.is_dir():
            raise DataError("is a folder", where=name, fix="Name a file in it.")
        if not path.is_file():
            raise DataError("no such file", where=name, fix=fix)
    return path


@contextmanager
def open_bytes(path: Path, bytes_read: BytesRead | None = None) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed where its suffix says so; `bytes_read` counts along.

    Raises:
        ResourceError: the file cannot be opened or read.
    """
    bytes_read = bytes_read or BytesRead()
    with check_readable(path), path.open("rb") as raw:
        bytes_read.current = raw
        try:
            yield _decompressed(raw, path.suffix)
        finally:
            if (
                not raw.closed
            ):  # a reader that nobody closed is collected in any order, its file perhaps first
                bytes_read.finished = bytes_read.position
            bytes_read.current = None


def _check_head(place: Path | str, head: bytes) -> None:
    for mark, name in _OTHER_MARKS.items():
        if head.startswith(mark):
            raise DataError(
                f"is {name} text, and UTF-8 is read",
                where=place,
                fix=f"Convert it: iconv -f {name} -t UTF-8.",
            )
    if b"\0" in head:
        fix = (
            "Give text files; compressed ones need one of the suffixes "
            + ", ".join(COMPRESSED)
            + "."
        )
        raise DataError("is a binary file, not text", where=place, fix=fix)


def decoded(lines: Iterable[bytes], name: Path | str) -> Iterator[tuple[int, str]]:
    """Lines of UTF-8 with their numbers from 1, without line ends, byte-order mark and NUL characters.

    Args:
        name: of the file, for messages.

    Raises:
        DataError: binary, another encoding, a byte that is not UTF-8.
    """
    for number, raw in enumerate(lines, 1):
        line = raw
        if number == 1:
            _check_head(name, raw[:_HEAD])
            line = raw.removeprefix(codecs.BOM_UTF8)
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            what = f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8"
            fix = "Convert it: iconv -f LATIN1 -t UTF-8 (or the encoding that it has); binary files cannot be read."
            raise DataError(what, where=f"{name}:{number}", fix=fix) from error
        yield number, text.replace("\0", "") if "\0" in text else text


def standard_input() -> Iterator[tuple[int, str]]:
    """Lines of the standard input, as `decoded`."""
    return decoded(sys.stdin.buffer, STANDARD_INPUT)


def read_lines(
    path: Path, bytes_read: BytesRead | None = None
) -> Generator[tuple[int, str], None, None]:
    """Lines of a file, as `decoded`; `bytes_read` counts along.

    Raises:
        DataError: see `decoded`; a damaged compressed file.
        ResourceError: see `open_bytes`.
    """
    number = 0
    with open_bytes(path, bytes_read) as stream:
        try:
            for number, text in decoded(stream, path):
                yield number, text
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if (
                isinstance(error, OSError) and error.errno is not None
            ):  # the disk's error, not the decompressor's
                raise
            what = f"the compressed file is damaged or cut short after line {number} ({error})"
            raise DataError(what, where=path, fix="Fetch or compress it again.") from error
