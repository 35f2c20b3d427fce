"""SentencePiece's `.model` file: its pieces with their scores, and its normalisation (Kudo & Richardson 2018).

The file is a message of Protocol Buffers, of which only three fields matter here. Their numbers are those of
`sentencepiece_model.proto` of google/sentencepiece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.text.protobuf import Fixed, fields

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
    for number, value in fields(content):
        message = value if isinstance(value, bytes) else b""
        if number == _PIECES:
            pieces.append(_piece(message))
        elif number == _TRAINER:
            kind = next(
                (
                    found
                    for at, found in fields(message)
                    if at == _MODEL_TYPE and isinstance(found, int)
                ),
                kind,
            )
        elif number == _NORMALIZER:
            charsmap = next(
                (
                    found
                    for at, found in fields(message)
                    if at == _CHARSMAP and isinstance(found, bytes)
                ),
                b"",
            )
    if not pieces or kind not in _KINDS:
        raise ValueError(
            "it holds no pieces" if not pieces else f"its model is of the unknown kind {kind}"
        )
    return SentencePieceModel(tuple(pieces), _KINDS[kind], charsmap or None)


def _piece(message: bytes) -> tuple[str, float]:
    found = dict(fields(message))
    match found.get(_PIECE), found.get(_SCORE):
        case bytes(text), Fixed() | None as score:
            return text.decode("utf-8"), 0.0 if score is None else score.real
        case _:
            raise ValueError("a piece has no text, or a score that is no number")
