"""A toy writer of TensorFlow's checkpoint format."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from protobuf_writer import field, varint

MAGIC = 0xDB4775248B80FB57
TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}


def masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def shape_of(*sizes: int) -> bytes:
    return b"".join(field(2, field(1, size)) for size in sizes)


def entry(dtype: int, shape: bytes, shard: int, offset: int, size: int, crc: int) -> bytes:
    return (
        field(1, dtype) + field(2, shape) + field(3, shard) + field(4, offset) + field(5, size)
        + varint(6 << 3 | 5) + struct.pack("<I", crc)
    )  # fmt: skip


def header(shards: int = 1, endianness: int = 0) -> bytes:
    """As TensorFlow writes it: a field with 0 is left out, and a version follows."""
    return field(1, shards) + (field(2, endianness) if endianness else b"") + field(3, field(1, 1))


@dataclass
class Table:
    """Bytes of an index, with the places that a test wants to spoil."""

    data: bytes = b""

    def block(
        self, entries: Iterable[tuple[bytes, bytes]], interval: int = 16, compression: int = 0
    ) -> bytes:
        """Appends a block; gives its handle."""
        content, restarts, before = b"", [], b""
        for at, (key, value) in enumerate(entries):
            if at % interval == 0:
                restarts.append(len(content))
            shared = len(commonprefix([key, before])) if at % interval else 0  # noqa: RUF071 – no paths
            sizes = shared, len(key) - shared, len(value)
            content += b"".join(map(varint, sizes)) + key[shared:] + value
            before = key
        starts = restarts or [0]
        content += struct.pack(f"<{len(starts) + 1}I", *starts, len(starts))
        return self.raw_block(content, compression)

    def raw_block(self, content: bytes, compression: int = 0) -> bytes:
        handle = varint(len(self.data)) + varint(len(content))
        body = content + bytes([compression])
        self.data += body + struct.pack("<I", masked_crc(body))
        return handle

    def finish(self, blocks: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The whole file, of (last key, handle) of its blocks."""
        meta = self.block([])
        index = self.block(blocks, interval=1)
        return self.data + (meta + index).ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def table(entries: Mapping[bytes, bytes], size: int = 7) -> bytes:
    """The index of these entries, in blocks of `size` entries."""
    items, made = sorted(entries.items()), Table()
    parts = [items[at : at + size] for at in range(0, len(items), size)]
    return made.finish([(part[-1][0], made.block(part, interval=3)) for part in parts])


def write_checkpoint(prefix: Path, tensors: Mapping[str, NDArray[Any]], shards: int = 1) -> None:
    """`prefix.index` and its data files, the tensors spread over these."""
    entries = {b"": header(shards)}
    data = [b""] * shards
    for at, (name, array) in enumerate(sorted(tensors.items())):
        shard, content = at % shards, np.ascontiguousarray(array).tobytes()
        place = (shard, len(data[shard]), len(content), masked_crc(content))
        entries[name.encode()] = entry(TYPES[str(array.dtype)], shape_of(*array.shape), *place)
        data[shard] += content
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(entries))
