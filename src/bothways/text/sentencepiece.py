"""SentencePiece's `.model` file: its pieces with their scores, and its normalisation (Kudo & Richardson 2018).

The file is a message of Protocol Buffers, of which only three fields matter here, so it is read without that library. Format:
protobuf.dev/programming-guides/encoding; fields: `sentencepiece_model.proto` of google/sentencepiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["unigram", "bpe", "word", "char"]

_KINDS: dict[int, Kind] = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# Numbers of fields: in the whole, in a piece, in the settings of the trainer and of the normaliser.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE = 1, 2
_MODEL_TYPE = 3
_CHARSMAP = 2


@dataclass(frozen=True)
class SentencePieceModel:
    """Attributes:
    pieces: (piece, score) by id.
    kind: the model that the pieces were trained for.
    charsmap: the normalisation, compiled; none for none.
    """

    pieces: tuple[tuple[str, float], ...]
    kind: Kind
    charsmap: bytes | None


def read_sentencepiece(content: bytes) -> SentencePieceModel:
    """Raises ValueError for bytes that are no such message."""
    pieces, kind, charsmap = list[tuple[str, float]](), 1, b""
    for number, value in _fields(content):
        message = value if isinstance(value, bytes) else b""
        if number == _PIECES:
            pieces.append(_piece(message))
        elif number == _TRAINER:
            kind = next((found for at, found in _fields(message) if at == _MODEL_TYPE and isinstance(found, int)), kind)
        elif number == _NORMALIZER:
            charsmap = next((found for at, found in _fields(message) if at == _CHARSMAP and isinstance(found, bytes)), b"")
    if not pieces or kind not in _KINDS:
        raise ValueError("it holds no pieces" if not pieces else f"its model is of the unknown kind {kind}")
    return SentencePieceModel(tuple(pieces), _KINDS[kind], charsmap or None)


def _piece(message: bytes) -> tuple[str, float]:
    fields = dict(_fields(message))
    match fields.get(_PIECE), fields.get(_SCORE, 0.0):
        case bytes(text), float(score):
            return text.decode("utf-8"), score
        case _:
            raise ValueError("a piece has no text, or a score that is no number")


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(number, value) of the fields of a message, in order."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:  # a whole number
                value, at = _varint(message, at)
                yield key >> 3, value
            case 1:  # eight bytes, in no field that matters
                at += 8
            case 2:  # bytes, text, a message
                size, at = _varint(message, at)
                if at + size > len(message):
                    raise ValueError("it ends too early")
                yield key >> 3, message[at : at + size]
                at += size
            case 5:  # four bytes
                if at + 4 > len(message):
                    raise ValueError("it ends too early")
                yield key >> 3, struct.unpack_from("<f", message, at)[0]
                at += 4
            case wire:
                raise ValueError(f"it has a value of the unknown form {wire}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first; and where the next value begins."""
    result = shift = 0
    while at < len(message) and shift < 64:
        result |= (message[at] & 127) << shift
        if message[at] < 128:
            return result, at + 1
        at, shift = at + 1, shift + 7
    raise ValueError("it ends too early")
