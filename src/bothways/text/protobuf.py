"""A reader of the Protocol Buffers wire format, without that library.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass


class MalformedError(ValueError):
    """Invalid bytes; the message continues a sentence that begins with their source."""


@dataclass(frozen=True)
class Fixed:
    """A little-endian number of four or eight bytes; the schema decides if it is an integer."""

    data: bytes

    @property
    def whole(self) -> int:
        """The bytes as an unsigned integer."""
        return int.from_bytes(self.data, "little")

    @property
    def real(self) -> float:
        """The bytes as a float."""
        value: float = struct.unpack("<f" if len(self.data) == 4 else "<d", self.data)[0]
        return value


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset of its end.

    Each byte holds seven bits, the lowest first; a set eighth bit means that more bytes follow.
    Example: b"\\xac\\x02" → 0x2c + (2 << 7) = 300.

    Raises:
        MalformedError: the number does not end within ten bytes.
    """
    result = shift = 0
    while at < len(data) and shift < 70:
        result |= (data[at] & 127) << shift
        if data[at] < 128:
            return result, at + 1
        at, shift = at + 1, shift + 7
    raise MalformedError("a number has no end")


def fields(message: bytes) -> Iterator[tuple[int, int | bytes | Fixed]]:
    """Yield (number, value) of the fields of a message, in order; texts and messages are bytes.

    Raises:
        MalformedError: the bytes are not a message.
    """
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        match key & 7:
            case 0:
                number, at = varint(message, at)
                yield key >> 3, number
                continue
            case 1:
                size = 8
            case 2:
                size, at = varint(message, at)
            case 5:
                size = 4
            case wire:
                raise MalformedError(f"a field has the unknown wire type {wire}")
        if at + size > len(message):
            raise MalformedError(f"a field of {size} bytes has only {len(message) - at} left")
        data, at = message[at : at + size], at + size
        yield key >> 3, data if key & 7 == 2 else Fixed(data)
