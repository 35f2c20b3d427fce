"""SentencePiece's `.model` file: pieces with scores, and normalisation (Kudo & Richardson 2018).

The file is a Protocol Buffers message; three of its fields are read. The field numbers are those of
`sentencepiece_model.proto` in google/sentencepiece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.text.protobuf import Fixed, fields

Kind = Literal["unigram", "bpe", "word", "char"]

_KINDS: dict[int, Kind] = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# Field numbers: of the model, of a piece, of the trainer's and of the normaliser's settings.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE = 1, 2
_MODEL_TYPE = 3
_CHARSMAP = 2


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of the file.

    Attributes:
        pieces: (piece, score) by id.
        kind: the model that the pieces were trained for.
        charsmap: the compiled normalisation; None without one.
    """

    pieces: tuple[tuple[str, float], ...]
    kind: Kind
    charsmap: bytes | None


def read_sentencepiece(content: bytes) -> SentencePieceModel:
    """Read the content of a `.model` file.

    Raises:
        ValueError: the bytes are not such a message.
    """
    pieces, kind, charsmap = list[tuple[str, float]](), 1, b""
    for number, value in fields(content):
        message = value if isinstance(value, bytes) else b""
        if number == _PIECES:
            values = dict(fields(message))
            text, score = values.get(_PIECE), values.get(_SCORE)
            if not isinstance(text, bytes) or not (score is None or isinstance(score, Fixed)):
                raise ValueError("a piece has no text, or its score is not a number")
            pieces.append((text.decode("utf-8"), 0.0 if score is None else score.real))
        elif number == _TRAINER:
            types = (v for at, v in fields(message) if at == _MODEL_TYPE and isinstance(v, int))
            kind = next(types, kind)
        elif number == _NORMALIZER:
            maps = (v for at, v in fields(message) if at == _CHARSMAP and isinstance(v, bytes))
            charsmap = next(maps, b"")
    if not pieces or kind not in _KINDS:
        raise ValueError(
            "it holds no pieces" if not pieces else f"its model is of the unknown kind {kind}"
        )
    return SentencePieceModel(tuple(pieces), _KINDS[kind], charsmap or None)
