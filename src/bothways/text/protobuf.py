"""Protocol Buffers' wire format, read without that library: numbers in groups of seven bits, and messages as their fields.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass


class MalformedError(ValueError):
    """What is wrong with the bytes, as the rest of a sentence that begins with where they are from."""


@dataclass(frozen=True)
class Fixed:
    """Four or eight bytes: a number, little-endian, of which only the message's definition says whether it is whole."""

    data: bytes

    @property
    def whole(self) -> int:
        """As an integer without a sign."""
        return int.from_bytes(self.data, "little")

    @property
    def real(self) -> float:
        """As a float of four bytes or eight."""
        value: float = struct.unpack("<f" if len(self.data) == 4 else "<d", self.data)[0]
        return value


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, where a set eighth bit means that more follow; and where it ends.

    Raises:
        MalformedError: it has no end, or one after ten bytes.
    """
    result = shift = 0
    while at < len(data) and shift < 70:
        result |= (data[at] & 127) << shift
        if data[at] < 128:
            return result, at + 1
        at, shift = at + 1, shift + 7
    raise MalformedError("a number has no end")


def fields(message: bytes) -> Iterator[tuple[int, int | bytes | Fixed]]:
    """(number, value) of the fields of a message, in order; bytes stand for texts and messages, too.

    Raises:
        MalformedError: the bytes are no message.
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
            raise MalformedError(f"{size} bytes are announced where {len(message) - at} are left")
        part, at = message[at : at + size], at + size
        yield key >> 3, part if key & 7 == 2 else Fixed(part)
