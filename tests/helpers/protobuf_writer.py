"""Fields of Protocol Buffers, written by the rules of the wire format."""

import struct


def varint(number: int) -> bytes:
    groups = [number >> shift & 127 for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def field(number: int, value: int | bytes | float) -> bytes:
    match value:
        case int():
            return varint(number << 3) + varint(value)
        case bytes():
            return varint(number << 3 | 2) + varint(len(value)) + value
        case float():
            return varint(number << 3 | 5) + struct.pack("<f", value)
