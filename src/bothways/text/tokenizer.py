"""A tokenizer: texts → ids, with tables that maskers and models need, over the `tokenizers` library.

Ids and offsets are those of the backend, which are those of transformers' BertTokenizer (WordPiece: Wu et al. 2016). They
differ from google-research/bert in four corners, kept because everyone's models and files have them: a word over 100 characters
is unknown (Google: 200), the ideographs U+2B820–U+2B91F are not set apart, private-use characters are dropped, and the text
"[MASK]" in the input is the special token. See docs/guide/tokenizer.md.

Notable choices. Words repeat, so each is tokenized once and then looked up (`pieces`); where that is not proved exact, the
backend reads the whole text. Special tokens are put around texts by `template.assemble`, not here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bothways.core.errors import DataError, ResourceError, TokenizerError
from bothways.core.sequence import Ids
from bothways.text.special_tokens import Specials
from bothways.text.template import Template
from bothways.text.tokenizer_files import load_backend, tokenizer_config
from bothways.text.word_cache import PieceTable, cutter

__all__ = ["Encoded", "Specials", "Tokenizer"]

# "Ġ": byte-level BPE's space, then its line feed, tab, carriage return; "▁": SentencePiece's space.
_SPACE_MARKS = ("Ġ", "Ċ", "ĉ", "č", "▁")


@dataclass(frozen=True)
class Encoded:
    """A text as `n` tokens.

    Attributes:
        ids: `(n)` token ids.
        offsets: `(n, 2)` begin and end of each token in the text, in characters.
        words: `(n)` the word each token belongs to, as the pre-tokenizer cut them, from 0.
    """

    ids: Ids
    offsets: NDArray[np.int64]
    words: NDArray[np.int32]


class Tokenizer:
    """Texts → ids and back. Its backend must not be changed once it is in here.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        specials: ids of the special tokens.
        flat: whether all tokens are of one segment, whatever the backend's post-processor says.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, specials: Specials, flat: bool = False
    ) -> None:
        self.backend = backend
        self.specials = specials
        self.flat = flat
        self._spec: Mapping[str, Any] = json.loads(backend.to_str())
        cut = cutter(self._spec)
        self._rows_of = self._backend_rows if cut is None else PieceTable(backend, cut).rows

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.backend, self.specials, self.flat)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a folder, or one of `files.FILES` with the `tokenizer_config.json` beside it if there is one.

        Where that lists `model_input_names` without segments, all is of one, as transformers has it.

        Raises:
            TokenizerError: no such file, no tokenizer, special tokens missing.
            ResourceError: a file that cannot be read.
        """
        return cls(*load_backend(Path(path)))

    def for_segments(self, count: int) -> Tokenizer:
        """For a model with so many segments: with fewer than it tells apart, all is of one, as transformers would have it."""
        return (
            Tokenizer(self.backend, self.specials, flat=True)
            if self.template.most >= max(1, count)
            else self
        )

    def save(
        self, folder: str | Path, *, positions: int | None = None, segments: bool = True
    ) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and, for WordPiece, `vocab.txt`; transformers opens the folder.

        Args:
            positions: the longest input of the model that it is for, where others shall truncate.
            segments: whether that model takes segment ids; a flat tokenizer has none to give.

        Raises:
            ResourceError: the folder cannot be written.
        """
        config = tokenizer_config(self.backend, self.specials)
        if positions is not None:
            config["model_max_length"] = positions
        # Said either way: transformers' AlbertTokenizer leaves them out, and ALBERT was trained with them.
        types = ["token_type_ids"] if segments and not self.flat else []
        config["model_input_names"] = ["input_ids", *types, "attention_mask"]
        files = {
            "tokenizer.json": self.backend.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2),
        }
        if self.kind == "WordPiece":
            files["vocab.txt"] = "".join(f"{token}\n" for token in self._tokens)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (Path(folder) / name).write_text(content, encoding="utf-8", newline="\n")
        except OSError as error:
            fix = "Free some room, or choose another folder."
            raise ResourceError(
                f"cannot be written: {error.strerror}", where=folder, fix=fix
            ) from error

    @functools.cached_property
    def _tokens(self) -> list[str]:
        """The token of each id; empty where no token has it."""
        tokens = [""] * self.size
        for token, id in self.backend.get_vocab().items():
            tokens[id] = token
        return tokens

    @functools.cached_property
    def size(self) -> int:
        """Rows that an embedding needs: the largest id, plus one."""
        return max(self.backend.get_vocab().values()) + 1

    @functools.cached_property
    def named(self) -> NDArray[np.bool_]:
        """`(size)`: True where a token has the id; a vocabulary may leave some out."""
        return np.array([token != "" for token in self._tokens], dtype=np.bool_)

    @functools.cached_property
    def special(self) -> NDArray[np.bool_]:
        """`(size)`: True for control tokens, which stand for no text: padding, [CLS], [SEP], [MASK] and the like, not [UNK]."""
        table = np.zeros(self.size, dtype=np.bool_)
        table[
            [id for id, token in self.backend.get_added_tokens_decoder().items() if token.special]
        ] = True
        table[self.specials.unknown] = False
        return table

    @functools.cached_property
    def continues(self) -> NDArray[np.bool_]:
        """`(size)`: True where the token goes on with the word before it.

        WordPiece marks these ("##ing"). Byte-level BPE and Unigram mark white space instead, so here every token without that
        mark is True: punctuation after a word, too, and the first word of a text unless it gets a prefix space.
        """
        match self._spec["model"]:
            case {"continuing_subword_prefix": str(prefix)} if prefix:
                table = [token.startswith(prefix) for token in self._tokens]
            case {"type": "BPE" | "Unigram"}:
                table = [
                    token != "" and not token.startswith(_SPACE_MARKS) for token in self._tokens
                ]
            case _:
                table = [False] * self.size
        result = np.array(table, dtype=np.bool_)
        result[self.special] = result[self.specials.unknown] = False
        return result

    @functools.cached_property
    def template(self) -> Template:
        """What stands around a text, and around two."""
        template = Template.of(self.backend, self.specials.cls, self.specials.sep)
        return template.flat() if self.flat else template

    @property
    def kind(self) -> str:
        """The model of the vocabulary: "WordPiece", "BPE", "Unigram" …"""
        return str(self._spec["model"]["type"])

    @functools.cached_property
    def lowercase(self) -> bool:
        """Whether texts are lower-cased."""
        return (
            self.backend.normalizer is not None
            and "A" not in self.backend.normalizer.normalize_str("A")
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids, in hexadecimal; formatting of the file does not enter."""
        # The last digits of scores change when tokenizers reads what it wrote.
        spec = json.loads(
            json.dumps(self._spec), parse_float=lambda digits: round(float(digits), 6)
        )
        canonical = json.dumps(spec, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[Ids]:
        """Ids of each text, without special tokens around it.

        Raises:
            DataError: a text that is not a str, or holds half of a surrogate pair, which is no character.
        """
        return [np.frombuffer(row, dtype=np.int32).copy() for row in self._rows(texts)]

    def encode_flat(self, texts: list[str]) -> tuple[Ids, NDArray[np.int64]]:
        """Ids `(tokens)` of all texts end to end, and the number of tokens `(texts)` of each; else as `encode`."""
        rows = self._rows(texts)
        lengths = (
            np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
            // np.dtype(np.int32).itemsize
        )
        return np.frombuffer(b"".join(rows), dtype=np.int32).copy(), lengths

    def _rows(self, texts: list[str]) -> list[bytes]:
        """For each text its ids, as bytes of native 32-bit integers."""
        try:
            return self._rows_of(texts)
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_text(texts) from error

    def _backend_rows(self, texts: list[str]) -> list[bytes]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32).tobytes() for encoding in encodings]

    def encode_with_offsets(self, texts: list[str]) -> list[Encoded]:
        """Ids, character offsets and words of each text, without special tokens around it; errors as `encode`."""
        try:
            encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        except TypeError as error:
            raise _not_text(texts) from error
        return [
            Encoded(
                np.array(encoding.ids, dtype=np.int32),
                np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2),
                np.array(encoding.word_ids, dtype=np.int32),
            )
            for encoding in encodings
        ]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text that these ids stand for, special tokens by their names. White space is that of the tokenizer.

        Raises:
            TokenizerError: an id that no token has.
        """
        plain = [int(id) for id in ids]
        for id in set(plain):
            self.token(id)
        return self.backend.decode(plain, skip_special_tokens=False)

    def token(self, id: SupportsIndex) -> str:
        """The token of an id.

        Raises:
            TokenizerError: no token has it.
        """
        row = operator.index(id)
        token = self._tokens[row] if 0 <= row < self.size else ""
        if token == "":
            what = f"no token has id {row}; ids run from 0 to {self.size - 1}"
            raise TokenizerError(what, fix="Use the tokenizer that the ids were made with.")
        return token

    def id(self, token: str) -> int | None:
        """The id of a token, if it is one."""
        found: int | None = self.backend.token_to_id(token)
        return found


def _not_text(texts: list[str]) -> DataError:
    """The error for the first of the texts that is not made of characters."""
    number, text = next(
        (number, text) for number, text in enumerate(texts) if _flaw(text) is not None
    )
    fix = 'Give str; halves of pairs go with text.encode("utf-8", "ignore").decode("utf-8")'
    return DataError(f"text {number} {_flaw(text)}", fix=fix)


def _flaw(text: object) -> str | None:
    if not isinstance(text, str):
        return f"is of type {type(text).__name__}, not str"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds U+{ord(text[error.start]):04X} at character {error.start}, half of a surrogate pair"
    return None
