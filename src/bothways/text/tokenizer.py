"""A tokenizer: texts → ids, with the tables that maskers and models need.

It wraps the `tokenizers` library: ids and offsets are the backend's, which are those of
transformers' BertTokenizer (WordPiece: Wu et al. 2016). They differ from google-research/bert in
four corners, kept because everyone's models and files have them: a word over 100 characters is
unknown (Google: 200), the ideographs U+2B820–U+2B91F are not separated, private-use characters are
dropped, and the text "[MASK]" in the input is the special token. See docs/guide/tokenizer.md.

BERT's tokenizers are in C (`wordpiece`). In byte-level BPE words repeat, so each is tokenized once
and then looked up (`PieceTable`); where neither is proved exact, the backend reads the whole text.
`template.assemble` puts special tokens around texts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, DataError, TokenizerError, os_errors
from bothways.core.files import local_path, surrogate_in
from bothways.core.source import Ids
from bothways.text.template import AGAIN, Template, assemble, foreign
from bothways.text.tokenizer_classes import JapaneseWords, Specials
from bothways.text.tokenizer_files import load_backend, tokenizer_config
from bothways.text.wordpiece import compile_wordpiece

if TYPE_CHECKING:
    from bothways.core.batch import Batch

__all__ = ["Encoded", "Specials", "Tokenizer"]

# "Ġ": byte-level BPE's space, then its line feed, tab, carriage return; "▁": SentencePiece's space.
_SPACE_MARKS = ("Ġ", "Ċ", "ĉ", "č", "▁")
# Scripts that write no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, ideographs.
_NO_SPACES = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"
    "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


_REPLACED = {"tokenizer.json", "vocab.txt", "special_tokens_map.json", "added_tokens.json"}
"""Files of a tokenizer that are replaced or deleted where another one is saved."""


def is_spaceless(word: str) -> bool:
    """Return True if all characters are of scripts without spaces between words."""
    return all(map(_NO_SPACES.match, word))


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


_SPACED = re.compile(r" *[^ ]+(?:(?<=\s) +[^ ]+)*| +")

MEMORY = 64 * 2**20
"""The approximate size of the cache in bytes, at `_ENTRY` a piece and 8 a character; a full cache
is cleared."""
_ENTRY = 200


def is_cuttable(spec: Mapping[str, Any]) -> bool:
    """Return True if a `tokenizer.json` is proved to treat pieces independently."""
    match spec["normalizer"], spec["pre_tokenizer"], spec["model"]:
        case None, {"type": "ByteLevel", "use_regex": True}, {"type": "BPE", "dropout": None}:
            # A token with white space inside would be cut in two.
            return not any(
                token["rstrip"] or re.search(r"\s", token["content"])
                for token in spec["added_tokens"]
            )
        case _:
            return False


class PieceTable(dict[str, bytes]):
    """A cache of words for byte-level BPE: pieces and their ids, as bytes of native int32.

    A missing piece is tokenized. This is exact only if a tokenizer never looks across the
    boundaries of pieces, as one without a normaliser, with ByteLevel and GPT-2's expression, and
    with BPE without dropout. A piece begins at a run of spaces that follows a visible character. No
    alternative of the expression matches a space after a visible character, and the only one with
    lookahead ("white space not before a visible character") looks no further than its own run of
    white space, which is within one piece. A prefix space is added only to a text that does not
    begin with white space: to its first piece.

    The backend finds added tokens in the raw text first. They must not contain white space, nor
    absorb what follows them.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._room = MEMORY
        self._backend = backend

    def rows(self, texts: list[str]) -> list[bytes]:
        """Return the ids of each text, as bytes of native int32."""
        return [b"".join(map(self.__getitem__, _SPACED.findall(text))) for text in texts]

    def __missing__(self, piece: str) -> bytes:
        # A text without repetition would otherwise fill the memory with its words
        self._room -= _ENTRY + 8 * len(piece)
        if self._room < 0:
            self.clear()
            self._room = MEMORY
        tokens = self._backend.encode(piece, add_special_tokens=False).ids
        ids = self[piece] = array("i", tokens).tobytes()
        return ids


class Tokenizer:
    """Texts → ids and back. Its backend must not be changed once it is in here.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        specials: ids of the special tokens.
        flat: whether all tokens are of one segment, whatever the backend's post-processor says.
        words: the division into Japanese words, which the backend does not contain.
        where: the folder or file that it was read from.

    Examples:
        >>> tokenizer = bothways.Tokenizer.load("tokenizer")
        >>> tokenizer.encode("the dog").shape
        (2,)
    """

    where: str | Path | None = None

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        specials: Specials,
        flat: bool = False,
        words: JapaneseWords | None = None,
    ) -> None:
        self.backend = backend
        self.specials = specials
        self.flat = flat
        self.words = words
        self._spec: Mapping[str, Any] = json.loads(backend.to_str())
        if words is not None:
            self._spec = {**self._spec, "words": words.settings}
        self._compiled = compile_wordpiece(backend, self._spec)
        cuttable = self._compiled is None and is_cuttable(self._spec)
        self._pieces = PieceTable(backend) if cuttable else None

    def __repr__(self) -> str:
        return f"Tokenizer({self._spec['model']['type']}, size={self.size:,})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.backend, self.specials, self.flat, self.words)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer from a folder, or from one of its files, such as `vocab.txt`.

        The `tokenizer_config.json` of the folder is followed. If its `model_input_names` omit
        segments, all tokens are of segment 0, as in transformers.

        Raises:
            TokenizerError: no such file, no tokenizer, missing special tokens, or a file that no
                trainer writes: ids far beyond the number of tokens, a normaliser that multiplies
                the text, a template without the text or with unknown ids.
            ResourceError: a file that cannot be read.
            ConfigError: no path, such as a tokenizer of transformers.
        """
        if not isinstance(path, str | os.PathLike):
            message = f"must be a folder or a file, not {type(path).__name__}"
            fix = "Save it, such as by save_pretrained(FOLDER), and name the folder."
            raise ConfigError(message, where="tokenizer", fix=fix)
        with foreign(path):
            tokenizer = cls(*load_backend(local_path(path)))
            tokenizer.where = path
            tokenizer._divided.get_vocab_size()  # MeCab and its dictionary are installed, if needed
            try:
                ids = [id for gap in tokenizer.template.gaps for id in gap.ids.tolist()]
            except (ValueError, IndexError, StopIteration, OverflowError) as error:
                message = "its post-processor does not keep the text between special tokens"
                raise TokenizerError(message, where=path, fix=AGAIN) from error
        if any(not 0 <= id < tokenizer.size for id in ids):
            message = f"its post-processor adds the id {max(ids)}, which no token has"
            raise TokenizerError(message, where=path, fix=AGAIN)
        return tokenizer

    def for_segments(self, count: int) -> Tokenizer:
        """Return the tokenizer for a model with `count` segments.

        With fewer than the template uses, all tokens are of segment 0, as in transformers.
        """
        template = self.template
        segments = {*template.segments, *(id for gap in template.gaps for id in gap.segments)}
        if max(segments) < max(1, count):
            return self
        return Tokenizer(self.backend, self.specials, True, self.words)

    def difference(self, other: Tokenizer) -> str | None:
        """Describe the difference to another vocabulary with examples; None if they are equal.

        Example: "2 tokens differ, such as '##ab' (7, not 9), '##ac' (9, not 7)".
        """
        vocabulary, other_ids = self.backend.get_vocab(), other.backend.get_vocab()
        tokens = vocabulary | other_ids
        differs = [token for token in tokens if vocabulary.get(token) != other_ids.get(token)]
        if not differs:
            return None
        differs.sort(key=lambda token: (vocabulary.get(token, other_ids.get(token)), token))
        examples = ", ".join(
            f"{token!r} ({vocabulary.get(token, 'absent')}, not {other_ids.get(token, 'absent')})"
            for token in differs[:3]
        )
        return f"{len(differs):,} tokens differ, such as {examples}"

    def save(
        self, folder: str | Path, *, positions: int | None = None, segments: bool = True
    ) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and, for WordPiece, `vocab.txt`.

        transformers opens the folder.

        Args:
            positions: the longest input of the model, to which other programs truncate.
            segments: whether the model takes segment ids; a flat tokenizer has none.

        Raises:
            ResourceError: the folder cannot be written.
        """
        config = tokenizer_config(self.backend, self.specials)
        if positions is not None:
            config["model_max_length"] = positions
        # Always explicit: transformers' AlbertTokenizer omits segments, but ALBERT has them.
        types = ["token_type_ids"] if segments and not self.flat else []
        config["model_input_names"] = ["input_ids", *types, "attention_mask"]
        files = {"tokenizer.json": self.backend.to_str(pretty=True)}
        if self.words is not None:
            # The class reads vocab.txt alone, and transformers takes a tokenizer.json for whole.
            config |= self.words.settings
            config["added_tokens_decoder"] = {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in self._spec["added_tokens"]
            }
            files = {}
        files["tokenizer_config.json"] = json.dumps(config, ensure_ascii=False, indent=2)
        if self.kind == "WordPiece":
            files["vocab.txt"] = "".join(f"{token}\n" for token in self._tokens)
        path = local_path(folder)
        with os_errors(path, "Free some space, or choose another folder."):
            path.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (path / name).write_text(content, encoding="utf-8", newline="\n")
            # Those of another tokenizer would be read with these.
            for name in _REPLACED - files.keys():
                (path / name).unlink(missing_ok=True)

    @functools.cached_property
    def _tokens(self) -> list[str]:
        """The token of each id; empty for an id without a token."""
        return [self.backend.id_to_token(id) or "" for id in range(self.size)]

    @functools.cached_property
    def size(self) -> int:
        """The rows of an embedding: the largest id plus one."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    @functools.cached_property
    def named(self) -> NDArray[np.bool_]:
        """`(size)`: True for ids that have a token; a vocabulary may have gaps."""
        return np.array([token != "" for token in self._tokens], dtype=np.bool_)

    @functools.cached_property
    def special(self) -> NDArray[np.bool_]:
        """`(size)`: True for tokens that are not text: padding, [CLS], [MASK] …, not [UNK]."""
        table = np.zeros(self.size, dtype=np.bool_)
        added = self.backend.get_added_tokens_decoder().items()
        table[[id for id, token in added if token.special]] = True
        table[self.specials.unknown] = False
        return table

    @functools.cached_property
    def continues(self) -> NDArray[np.bool_]:
        """`(size)`: True for tokens that continue the word before them.

        WordPiece marks these ("##ing"). Byte-level BPE and Unigram mark white space instead, so
        every token without that mark is True: punctuation after a word, too, and the first word of
        a text unless it gets a prefix space. For whole words see `word_pieces`.
        """
        match self._spec["model"]:
            case {"continuing_subword_prefix": str(prefix)} if prefix:
                table = [token.startswith(prefix) for token in self._tokens]
            case {"type": "BPE", "end_of_word_suffix": str(suffix)} if suffix:
                table = [token != "" for token in self._tokens]
            case {"type": "BPE" | "Unigram"}:
                table = [token != "" and token[0] not in _SPACE_MARKS for token in self._tokens]
            case _:
                table = [False] * self.size
        result = np.array(table, dtype=np.bool_)
        result[self.special] = result[self.specials.unknown] = False
        return result

    @functools.cached_property
    def word_pieces(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """`(size)` twice: tokens that continue a word, and tokens after which a word begins.

        For whole-word masking. WordPiece marks continuations itself. In byte-level BPE and Unigram
        a token of punctuation, or of a script without spaces between words, is a word of its own:
        ▁the ▁dog , ▁数学 课 → the | dog | , | 数学 | 课.
        """
        continues, ends = self.continues.copy(), np.zeros(self.size, dtype=np.bool_)
        model = self._spec["model"]
        if self.kind not in {"BPE", "Unigram"} or model.get("continuing_subword_prefix"):
            return continues, ends
        if suffix := model.get("end_of_word_suffix"):
            ends[:] = [token.endswith(suffix) for token in self._tokens]
            return continues, ends & ~self.special
        bytewise = "Ġ" in self.backend.get_vocab() or self.kind == "BPE"
        for id in np.flatnonzero(self.named & ~self.special).tolist():
            token, begins, complete = self._tokens[id], False, True
            text = token.lstrip("▁")
            if bytewise and (raw := bytes_in(token)) is not None:
                characters = raw.decode("utf-8", "ignore")
                # The first byte of a three-byte ideograph or kana is 0xE3 to 0xE9. A token may hold
                # a part of a character.
                begins = raw != b"" and 0xE3 <= raw[0] <= 0xE9
                text, complete = characters.strip(), characters.encode() == raw
            letters = any(map(str.isalnum, text))
            is_word = bool(text) and (not letters or bool(_NO_SPACES.search(text)))
            continues[id] &= not (is_word or begins)
            ends[id] = is_word and complete
        continues[self.specials.unknown] = False
        return continues, ends

    @functools.cached_property
    def template(self) -> Template:
        """The special tokens around one text, and around two."""
        template = Template.of(self.backend)
        return template.flat() if self.flat else template

    @property
    def kind(self) -> str:
        """The model of the vocabulary: "WordPiece", "BPE", "Unigram" …"""
        return str(self._spec["model"]["type"])

    @functools.cached_property
    def lowercase(self) -> bool:
        """True if texts are converted to lower case."""
        normalizer = self.backend.normalizer
        return normalizer is not None and "A" not in normalizer.normalize_str("A")

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of everything that decides the ids; the file's formatting does not matter."""
        # The last digits of scores change when tokenizers reads what it wrote.
        text = json.dumps(self._spec)
        spec = json.loads(text, parse_float=lambda digits: round(float(digits), 6))
        canonical = json.dumps(spec, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @overload
    def encode(self, texts: str) -> Ids: ...
    @overload
    def encode(self, texts: list[str] | tuple[str, ...]) -> list[Ids]: ...
    def encode(self, texts: str | list[str] | tuple[str, ...]) -> Ids | list[Ids]:
        """Return the ids of a text, or a list with the ids of each text, without special tokens.

        Raises:
            DataError: a text that is not a str, or holds half of a surrogate pair.
        """
        if isinstance(texts, str):
            return self.encode_flat([texts])[0]
        ids, lengths = self.encode_flat(_items(texts, "texts"))
        ends = np.cumsum(lengths).tolist()
        return [ids[begin:end].copy() for begin, end in pairwise([0, *ends])]

    def encode_flat(self, texts: list[str]) -> tuple[Ids, NDArray[np.int64]]:
        """Return the ids `(tokens)` of all texts end to end, and the length `(texts)` of each."""
        try:
            with foreign(self.where):
                if self._compiled is not None:
                    counts, (flat,) = self._compiled.encode(texts)
                    return flat, counts
                if self._pieces is not None:
                    rows = self._pieces.rows(texts)
                else:
                    encodings = self._divided.encode_batch_fast(texts, add_special_tokens=False)
                    rows = [np.array(encoding.ids, np.int32).tobytes() for encoding in encodings]
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_text(texts) from error
        # Four bytes are one id.
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)) // 4
        return np.frombuffer(b"".join(rows), dtype=np.int32).copy(), lengths

    @functools.cached_property
    def _divided(self) -> tokenizers.Tokenizer:
        """The backend, with the division into words that it does not contain."""
        return self.backend if self.words is None else self.words.attach(self.backend)

    def batch(
        self,
        texts: str | tuple[str, str] | Iterable[str | tuple[str, str]],
        *,
        length: int | None = None,
    ) -> Batch:
        """Return texts, and pairs of texts as tuples, as one batch, with special tokens.

        Args:
            texts: one or several.
            length: maximum length in tokens, special tokens included; longer texts are cut at
                their ends, of a pair the longer one first. None for no limit.

        Raises:
            DataError: there is no text, or something else among them.
            ConfigError: a length without room for a token.

        Examples:
            >>> tokenizer = bothways.Tokenizer.load("tokenizer")
            >>> tokenizer.batch(["the dog", ("the dog", "a cat")]).layout.lengths
            [4, 7]
        """
        from bothways.core.batch import pack  # which imports torch

        items = [texts] if isinstance(texts, str | tuple) else _items(texts, "texts")
        pairs = [text if isinstance(text, tuple) and len(text) == 2 else (text,) for text in items]
        if not pairs:
            raise DataError("there is no text", fix="Give one or more.")
        has_pair = any(len(pair) == 2 for pair in pairs)
        special = self.template.pair if has_pair else self.template.single
        require_at_least(special + 1, length=length)  # the special tokens, and one of the text
        rows = iter(self.encode([text for pair in pairs for text in pair]))
        encoded = ((next(rows), next(rows) if len(pair) == 2 else None) for pair in pairs)
        return pack([assemble(a, b, self.template, length) for a, b in encoded])

    def encode_with_offsets(self, texts: list[str]) -> list[Encoded]:
        """Return ids, character offsets and words of each text; errors as `encode`."""
        texts = _items(texts, "texts")
        try:
            with foreign(self.where):
                if self._compiled is not None:
                    lengths, columns = self._compiled.encode(texts, spans=True)
                    ends = [0, *np.cumsum(lengths).tolist()]
                    rows: list[list[Any]] = [[x[a:b] for x in columns] for a, b in pairwise(ends)]
                else:
                    encodings = self._divided.encode_batch(texts, add_special_tokens=False)
                    rows = [[e.ids, e.offsets, e.word_ids] for e in encodings]
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_text(texts) from error
        return [
            Encoded(
                np.array(ids, dtype=np.int32),
                np.array(offsets, dtype=np.int64).reshape(-1, 2),
                np.array(words, dtype=np.int32),
            )
            for ids, offsets, words in rows
        ]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of these ids, special tokens by their names.

        White space follows the tokenizer, not the original text.

        Raises:
            DataError: the ids are not a list of integers.
            TokenizerError: an id without a token.
        """
        plain = [_integer(id) for id in _items(ids, "ids")]
        for id in set(plain):
            self.token(id)
        with foreign(self.where):
            return self.backend.decode(plain, skip_special_tokens=False)

    def token(self, id: SupportsIndex) -> str:
        """Return the token of an id. Raises TokenizerError if it has none."""
        row = _integer(id)
        token = self._tokens[row] if 0 <= row < self.size else ""
        if token == "":
            message = f"no token has id {row}; ids run from 0 to {self.size - 1}"
            raise TokenizerError(message, fix="Use the tokenizer that the ids were made with.")
        return token

    def id(self, token: str) -> int | None:
        """Return the id of a token; None if it is not in the vocabulary."""
        return self.backend.token_to_id(token)


def _items(values: Iterable[Any], name: str) -> list[Any]:
    """Return values as a list; raise a DataError for a value that is none."""
    if not isinstance(values, Iterable):
        message = f"is of type {type(values).__name__}, not a list"
        raise DataError(message, where=name, fix=f"Give a list of {name}.")
    return list(values)


def _integer(id: SupportsIndex) -> int:
    """Return an id as an int; raise a DataError for something else."""
    try:
        return operator.index(id)
    except TypeError:
        message = f"an id is of type {type(id).__name__}, not int"
        raise DataError(message, fix="Give the ids of one text.") from None


def _not_text(texts: list[str]) -> DataError:
    """Return the error for the first of the texts that is not made of characters."""
    fix = 'Remove halves of pairs with text.encode("utf-8", "ignore").decode("utf-8")'
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            message = f"text {number} is of type {type(text).__name__}, not str"
            pair = "Give two texts as a tuple, to `batch`."
            return DataError(message, fix=pair if isinstance(text, list | tuple) else "Give str.")
        if half := surrogate_in(text):
            break
    return DataError(f"text {number} holds {half}", fix=fix)


@functools.cache
def byte_of() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE represents (Radford et al. 2019).

    Visible characters represent themselves; the others come in order from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = [*visible, *range(0x100, 0x100 + len(hidden))]
    return dict(zip(map(chr, characters), visible + hidden, strict=True))


def bytes_in(token: str) -> bytes | None:
    """Return the bytes that a token of byte-level BPE represents; None for another token."""
    table = byte_of()
    return bytes(map(table.__getitem__, token)) if all(map(table.__contains__, token)) else None
