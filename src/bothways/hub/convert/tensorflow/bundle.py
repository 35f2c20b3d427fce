"""TensorFlow's checkpoint format, the tensor bundle, read without TensorFlow.

`NAME.index` is a sorted table in LevelDB's format: blocks of entries, each block with a checksum,
and a footer with the offset of the index block. A key omits the prefix that it shares with the
previous one. The empty key holds the bundle's header; every other key is the name of a tensor, with
its type, shape and place. `NAME.data-00000-of-00001` and so on hold the bytes of the tensors.

Notable choices. Files are not trusted: every length is checked before it is used, keys must
increase, tensors must not overlap, and all checksums (CRC-32C) are compared. Opening reads only the
index; tensors are read on demand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bothways.core.errors import FolderError, optional
from bothways.core.files import check_regular
from bothways.hub.weight_files import AGAIN, Weights
from bothways.model.families.weight_names import Shape
from bothways.text.protobuf import Fixed, MalformedError, fields, varint

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_MOST_INDEX = 1 << 22
_MOST_NAME = 512
_MOST_AXES = 8
"""Limits of the index and of a name, in bytes, and of the axes of a tensor. The index of BERT-large
with its optimizer's state has 0.1 MB."""

_TYPES: Mapping[int, torch.dtype] = {
    1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 5: torch.int16,
    6: torch.int8, 9: torch.int64, 10: torch.bool, 14: torch.bfloat16, 19: torch.float16,
}  # fmt: skip
"""TensorFlow's type numbers; the other types, such as strings, are not numbers."""


@dataclass(frozen=True)
class BundleEntry:
    """The place of a tensor.

    Attributes:
        dtype: the type of its little-endian numbers.
        shape: its shape; empty for a scalar.
        shard: the number of the data file.
        offset: the first byte in the data file.
        size: the number of bytes.
        checksum: the masked checksum of its bytes.
    """

    dtype: torch.dtype
    shape: Shape
    shard: int
    offset: int
    size: int
    checksum: int


def open_bundle(index: Path) -> Weights:
    """Open a checkpoint; its tensors have TensorFlow's names.

    Args:
        index: the `.index` file, in the folder of its data files.

    Raises:
        FolderError: a file is missing, truncated, corrupt or of another kind. Reading a tensor
            raises it for a wrong checksum.
    """
    try:
        shards, entries = _read_index(_content(index))
    except MalformedError as error:
        message = f"is not a complete TensorFlow checkpoint: {error}"
        raise FolderError(message, where=index, fix=AGAIN) from error
    files = {}
    for shard in sorted({entry.shard for entry in entries.values()}):
        file = index.with_name(
            f"{index.name.removesuffix('.index')}.data-{shard:05d}-of-{shards:05d}"
        )
        files[shard] = file
        if not file.is_file():
            message = f"needs {file.name}, which is not in its folder"
            raise FolderError(message, where=index, fix="Fetch all files of the checkpoint.")
        size, end, previous = file.stat().st_size, 0, ""
        tensors = [(name, entry) for name, entry in entries.items() if entry.shard == shard]
        for name, entry in sorted(tensors, key=lambda pair: (pair[1].offset, pair[1].size)):
            if entry.offset < end:
                message = f"the bytes of {name} and {previous} overlap"
                raise FolderError(message, where=file, fix=AGAIN)
            end, previous = entry.offset + entry.size, name
            if end > size:
                message = f"has {size:,} bytes, and {name} ends at {end:,}"
                raise FolderError(message, where=file, fix=AGAIN)

    def read(name: str) -> Tensor:
        """Return a tensor, whose checksum is compared."""
        entry = entries[name]
        file = files[entry.shard]
        try:
            with file.open("rb") as stream:
                stream.seek(entry.offset)
                data = stream.read(entry.size)
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            raise FolderError(message, where=file, fix="Check the permissions.") from error
        if len(data) != entry.size or _masked(data) != entry.checksum:
            message = f"the bytes of {name} do not match their checksum"
            raise FolderError(message, where=file, fix=AGAIN)
        if not data:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(bytearray(data), dtype=entry.dtype).reshape(entry.shape)

    return Weights(index, {name: entry.shape for name, entry in entries.items()}, read)


def _content(index: Path) -> bytes:
    check_regular(index, FolderError)
    try:
        size = index.stat().st_size
        if size > _MOST_INDEX:
            message = (
                f"an index of {size:,} bytes is longer than that of any model, {_MOST_INDEX:,}"
            )
            raise MalformedError(message)
        return index.read_bytes()
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise FolderError(message, where=index, fix="Check the permissions.") from error


def _read_index(data: bytes) -> tuple[int, dict[str, BundleEntry]]:
    """Return the number of data files, and the tensors by name."""
    if len(data) < _FOOTER or int.from_bytes(data[-8:], "little") != _MAGIC:
        raise MalformedError("it does not end like an index")
    footer = _Bytes(data[-_FOOTER:-8])
    _handle(footer)  # of a block about the blocks, which TensorFlow leaves empty
    index = _block(data, *_handle(footer))
    handles = [_handle(_Bytes(value)) for _, value in _entries(index)]
    if any(
        offset + size > next_offset
        for (offset, size), (next_offset, _) in itertools.pairwise(handles)
    ):
        raise MalformedError("its blocks overlap")
    entries = itertools.chain.from_iterable(_entries(_block(data, *handle)) for handle in handles)
    header_entry = next(entries, None)
    if header_entry is None or header_entry[0]:
        raise MalformedError("it has no header")
    header = _numbers(header_entry[1], shards=1, big_endian=2)
    shards = header["shards"]
    if header["big_endian"]:
        raise MalformedError("its numbers are big-endian")
    if not 1 <= shards <= 99_999:
        raise MalformedError(f"it cannot have {shards} data files")
    tensors, previous = dict[str, BundleEntry](), b""
    for key, value in entries:
        if key <= previous:
            raise MalformedError(f"{key!r} follows {previous!r}: names must increase")
        previous = key
        if key.startswith(b"\0"):
            raise MalformedError("it holds variables in slices, which are not read")
        name = key.decode("latin-1")
        if not name.isascii() or not name.isprintable():
            raise MalformedError(f"{key!r} is not the name of a variable")
        if name == "_CHECKPOINTABLE_OBJECT_GRAPH":
            raise MalformedError(
                "it holds objects, as TensorFlow 2 writes them; "
                "only TensorFlow 1 checkpoints are read"
            )
        tensors[name] = _entry(name, value, shards)
    return shards, tensors


class _Bytes:
    """A part of a file with the position of the next byte to read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes; MalformedError if fewer are left."""
        if count > len(self.data) - self.at:
            message = f"{count} bytes are needed, but only {len(self.data) - self.at} are left"
            raise MalformedError(message)
        self.at += count
        return self.data[self.at - count : self.at]

    def fixed(self, count: int) -> int:
        """Return the next `count` bytes as a little-endian number."""
        return int.from_bytes(self.take(count), "little")

    def varint(self) -> int:
        """Return the next number of variable length."""
        result, self.at = varint(self.data, self.at)
        return result


def _handle(data: _Bytes) -> tuple[int, int]:
    """Read the offset and size of a block."""
    return data.varint(), data.varint()


def _block(data: bytes, offset: int, size: int) -> bytes:
    """Return the entries of a block, without the restart points that follow them."""
    source = _Bytes(data[:-_FOOTER])
    source.take(offset)
    content = source.take(size)
    compression = source.take(1)
    if source.fixed(4) != _masked(content + compression):
        raise MalformedError(f"the block at {offset} does not match its checksum")
    if compression != b"\0":
        raise MalformedError(f"the block at {offset} is compressed, which is not supported")
    # A block ends with the offsets of its restart points, 4 bytes each, and their number.
    restarts = int.from_bytes(content[-4:], "little")
    if len(content) < 4 * (restarts + 1):
        message = f"the block at {offset} is too short for its {restarts} restart points"
        raise MalformedError(message)
    return content[: -4 * (restarts + 1)]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of each entry.

    An entry is (shared, rest, size, suffix, value): after "weight_a", the entry (7, 1, …, "b") has
    the key "weight_b".
    """
    source, key = _Bytes(block), b""
    while source.at < len(block):
        shared, added, size = source.varint(), source.varint(), source.varint()
        if shared > len(key) or shared + added > _MOST_NAME:
            raise MalformedError(
                f"a name shares {shared} bytes with one of {len(key)} and adds {added}; "
                f"{_MOST_NAME} are allowed"
            )
        key = key[:shared] + source.take(added)
        yield key, source.take(size)


def _masked(data: bytes) -> int:
    """Return the CRC-32C, rotated and offset: a CRC of data that contains CRCs would be weak."""
    with optional("tensorflow", "reading a TensorFlow checkpoint"):
        import google_crc32c
    plain: int = google_crc32c.value(data)
    return (((plain >> 15) | (plain << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _numbers(message: bytes, **numbers: int) -> dict[str, int]:
    """Return the integers in fields by name → number; 0, the format's default, if missing."""
    integers = (
        (number, value.whole if isinstance(value, Fixed) else value)
        for number, value in fields(message)
    )
    values = {number: value for number, value in integers if isinstance(value, int)}
    return {name: values.get(number, 0) for name, number in numbers.items()}


def _entry(name: str, message: bytes, shards: int) -> BundleEntry:
    numbers = _numbers(message, dtype=1, shard=3, offset=4, size=5, checksum=6)
    dtype = _TYPES.get(numbers["dtype"])
    if dtype is None:
        description = (
            f"{name} has type {numbers['dtype']}, which is not numeric: one of {list(_TYPES)}"
        )
        raise MalformedError(description)
    shapes = [
        value for number, value in fields(message) if number == 2 and isinstance(value, bytes)
    ]
    shape: Shape = ()
    for number, value in itertools.chain.from_iterable(map(fields, shapes)):
        match number, value:
            case 2, bytes():
                size = _numbers(value, size=1)["size"]
                if size >= 1 << 63:
                    raise MalformedError(f"{name} has a negative size")
                if len(shape) == _MOST_AXES:
                    raise MalformedError(f"{name} has more than {_MOST_AXES} axes")
                shape += (size,)
            case 3, int() if value:
                raise MalformedError(f"{name} has no known shape")
    if math.prod(shape) * dtype.itemsize != numbers["size"]:
        raise MalformedError(
            f"{name} has {numbers['size']} bytes, not those of {list(shape)} numbers "
            f"of {dtype.itemsize} bytes"
        )
    if numbers["shard"] >= shards:
        raise MalformedError(f"{name} is in data file {numbers['shard']} of {shards}")
    return BundleEntry(
        dtype, shape, numbers["shard"], numbers["offset"], numbers["size"], numbers["checksum"]
    )
