"""BERT's tokenizer in C (`kernels/csrc/wordpiece.c`): the ids, offsets and words of `tokenizers`.

It is exact because BERT's normaliser works on single code points: it drops, replaces or surrounds
them (`clean_text`, `handle_chinese_chars`), decomposes them and drops nonspacing marks
(`strip_accents`), and lower-cases what is left. Only the decomposition looks at neighbours: it
sorts marks by their combining class. All marks that are sorted and not dropped then, some twenty,
are left to `tokenizers`. So what becomes of a code point alone is what becomes of it everywhere,
and the installed `tokenizers` is asked for it, 256 code points at a time, when one of them is first
met: there is no table of Unicode here that could be of another version.

The pre-tokenizer looks at single characters, too, and WordPiece at one word. Added tokens come
first, and are found in the raw text; one that is found after normalisation, or absorbs white space,
sends the texts that contain it to `tokenizers`, or all texts.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import unicodedata
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bothways.core.jobs.process_pool import NUMBER
from bothways.core.runtime.process import usable_cores
from bothways.model.kernels import abi

PAGES, MAX_CHARACTERS, MAX_ADDED = 0x1100, 256, 255
_FLAGS = {"lstrip", "rstrip", "single_word"}
_SPLIT, _MARK, _ELSEWHERE = b"\xff", b"\xfe", b"\xfd"
_BLOCK = 2**22
"""Characters that are read at once: what is joined for it should stay in the processor's cache."""
_THREAD = 2**18
"""Characters from which on another thread is worth starting."""
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class Strings(ctypes.Structure):
    """Strings end to end, their lengths in bytes, and an id of each."""

    _fields_ = [
        ("text", ctypes.c_char_p),
        ("lengths", _POINTER),
        ("ids", _POINTER),
        ("bytes", _INT64),
        ("count", _INT64),
    ]


class WordPieceVocabulary(ctypes.Structure):
    """The vocabulary of a WordPiece tokenizer."""

    _fields_ = [
        ("tokens", Strings),
        ("added", Strings),
        ("prefix", ctypes.c_char_p),
        ("prefix_length", _INT64),
        ("seed", ctypes.c_uint64),
        ("unknown", _INT32),
        ("max_characters", _INT32),
    ]


class WordPieceBatch(ctypes.Structure):
    """Texts in UTF-8, and room for their tokens."""

    _fields_ = [
        ("text", ctypes.c_char_p),
        ("bytes", _INT64),
        ("texts", _INT64),
        *((name, _POINTER) for name in ("starts", "lengths", "ids", "spans", "words", "missing")),
        ("tokens", _INT64),
        ("left", _INT64),
    ]


@functools.cache
def load() -> abi.Loaded:
    """Return the library, unless it is missing or belongs to another version of the package."""
    kernels = abi.library_file()
    signatures = {
        "bothways_wordpiece_new": (_POINTER, _POINTER),
        "bothways_wordpiece_free": (_POINTER,),
        "bothways_wordpiece_page": (_POINTER, _INT32, _POINTER, ctypes.c_char_p),
        "bothways_wordpiece_encode": (_POINTER, _POINTER, _INT32),
    }
    file = kernels.with_stem(f"{kernels.stem}_wordpiece")
    structs = (Strings, WordPieceVocabulary, WordPieceBatch)
    return abi.load_library(file, signatures, "bothways_wordpiece_abi", 1, structs)


class WordPieceTokens(NamedTuple):
    """The tokens of several texts, end to end.

    Attributes:
        lengths: `(texts)` the number of tokens of each text.
        columns: ids `(tokens)`; if requested, also begin and end in characters `(tokens, 2)`, and
            the word of its text that each token belongs to `(tokens)`.
    """

    lengths: NDArray[np.int64]
    columns: list[NDArray[np.int32]]


class CompiledWordPiece:
    """A BERT tokenizer in C. Several threads may use it."""

    def __init__(
        self, backend: tokenizers.Tokenizer, spec: Mapping[str, Any], library: ctypes.CDLL
    ) -> None:
        self._backend, self._library = backend, library
        norm, model = spec["normalizer"], spec["model"]
        strips = norm["lowercase"] if norm["strip_accents"] is None else norm["strip_accents"]
        self._sorts_marks: bool = strips
        # Those of one first byte together, and the longest first.
        added = sorted(
            (token["content"].encode(), -1 if _FLAGS & {*filter(token.get, token)} else token["id"])
            for token in spec["added_tokens"]
        )
        added.sort(key=lambda pair: (pair[0][0], -len(pair[0])))
        tokens = [(token.encode(), id) for token, id in model["vocab"].items()]
        prefix = model["continuing_subword_prefix"].encode()
        # Each has the strings of the vocabulary and the arrays that it points to.
        (token_strings, _tokens), (added_strings, _added) = map(_strings, (tokens, added))
        vocabulary = WordPieceVocabulary(
            token_strings, added_strings, prefix, len(prefix), secrets.randbits(64),
            model["vocab"][model["unk_token"]], model["max_input_chars_per_word"],
        )  # fmt: skip
        handle = ctypes.c_void_p()
        self._call("new", ctypes.byref(vocabulary), ctypes.byref(handle))
        self._handle = handle
        self._missing = np.zeros(PAGES, np.uint8)
        weakref.finalize(self, library.bothways_wordpiece_free, handle)
        self._set_page(0)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"bothways_wordpiece_{name}")(*arguments)
        if status == 1:
            raise MemoryError("not enough memory for a tokenizer")
        if status:
            raise ValueError(f"wordpiece {name}: an argument is invalid")

    def _set_page(self, number: int) -> None:
        """Ask the backend what becomes of 256 code points, each between characters that stay."""
        codes = range(256 * number, 256 * number + 256)
        between = "\u2603" if number != 0x26 else "\u2192"
        joined = between.join(map(chr, codes))
        outputs = self._backend.normalizer.normalize_str(joined).split(between)
        distinct = list(dict.fromkeys("".join(outputs)))
        # "a,a" is three words, "a a" two, and "aba" one.
        probe = " ".join(f"a{character}a" for character in distinct)
        words = np.zeros(len(distinct), dtype=np.int64)
        for _, (begin, _) in self._backend.pre_tokenizer.pre_tokenize_str(probe):
            words[begin // 4] += 1
        forms = {
            character: _SPLIT if count == 2 else (_MARK if count == 3 else b"") + character.encode()
            for character, count in zip(distinct, words.tolist(), strict=True)
        }
        moving = {
            character
            for character in distinct
            if self._sorts_marks
            and (unicodedata.combining(character) or unicodedata.category(character) == "Cn")
        }
        rows = [
            # C has room for as many tokens as the code point has bytes.
            b"".join([forms[character] for character in output])
            if len(output) <= 1 + (code > 0x7F) + (code > 0x7FF) and moving.isdisjoint(output)
            else _ELSEWHERE
            for code, output in zip(codes, outputs, strict=True)
        ]
        ends = np.array([*accumulate(map(len, rows))], dtype=np.uint16)
        self._call("page", self._handle, number, ends.ctypes.data, b"".join(rows))

    def encode(self, texts: Sequence[str], spans: bool = False) -> WordPieceTokens:
        """Return the tokens of texts, with spans and words if requested.

        Raises:
            TypeError: a text is not a str.
            UnicodeEncodeError: a text holds half of a surrogate pair.
        """
        sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        if sizes.sum() <= _BLOCK:
            return self._encode(texts, sizes, spans)
        ends, blocks, first = np.cumsum(sizes), list[WordPieceTokens](), 0
        while first < len(texts):
            # Whole texts up to a block of characters, and one at least.
            limit = _BLOCK + (ends[first - 1] if first else 0)
            last = max(first + 1, int(np.searchsorted(ends, limit)))
            blocks.append(self._encode(texts[first:last], sizes[first:last], spans))
            first = last
        lengths, columns = zip(*blocks, strict=True)
        joined = [*map(np.concatenate, zip(*columns, strict=True))]
        return WordPieceTokens(np.concatenate(lengths), joined)

    def _encode(
        self, texts: Sequence[str], sizes: NDArray[np.int64], spans: bool
    ) -> WordPieceTokens:
        text, count = "".join(texts).encode(), len(texts)
        # One piece of memory for all arrays, as to ask NumPy for an address takes a microsecond:
        # starts (count + 1) and lengths (count) of 64 bits, and the rest below.
        first, room = 4 * count + 2, len(text)
        at = [first, first + room, first + 3 * room] if spans else [first, 0, 0]
        memory = np.empty(at[-1 if spans else 0] + room, np.int32)
        lengths = memory[2 * count + 2 : first].view(np.int64)
        lengths[:] = sizes
        start = memory.ctypes.data
        outputs = [start + 4 * offset if offset else None for offset in at]
        missing = self._missing.ctypes.data
        batch = WordPieceBatch(text, room, count, start, start + 8 * (count + 1), *outputs, missing)
        self._call("encode", self._handle, ctypes.byref(batch), _threads(room))
        total = batch.tokens
        blocks = [memory[first : first + total]]
        if spans:
            blocks += [memory[at[1] : at[1] + 2 * total].reshape(-1, 2), memory[at[2] :][:total]]
        if batch.left:
            left = np.flatnonzero(lengths < 0)
            remaining = self._encode_rest([texts[i] for i in left.tolist()], spans)
            lengths[left] = 0
            positions = np.repeat(np.cumsum(lengths)[left], remaining.lengths)
            lengths[left] = remaining.lengths
            blocks = [
                np.insert(column, positions, rest, axis=0)
                for column, rest in zip(blocks, remaining.columns, strict=True)
            ]
        # Copies, which do not keep the memory for texts that are all tokens.
        return WordPieceTokens(lengths.copy(), [column.copy() for column in blocks])

    def _encode_rest(self, texts: list[str], spans: bool) -> WordPieceTokens:
        """Return the tokens of texts that were left: after filling pages, or by the backend."""
        # A page that another thread notes now may be lost: its text then goes to the backend. Of a
        # copy, since NumPy raises where the count changes meanwhile.
        pages = np.flatnonzero(self._missing.copy()).tolist()
        for number in pages:
            self._set_page(number)
            self._missing[number] = 0
        if pages:
            return self.encode(texts, spans)
        encode = self._backend.encode_batch if spans else self._backend.encode_batch_fast
        encodings = encode(texts, add_special_tokens=False)
        rows = [
            np.array([row for encoding in encodings for row in getattr(encoding, name)], np.int32)
            for name in ("ids", "offsets", "word_ids")[: 3 if spans else 1]
        ]
        if spans:
            rows[1] = rows[1].reshape(-1, 2)
        lengths = np.array([len(encoding.ids) for encoding in encodings], np.int64)
        return WordPieceTokens(lengths, rows)


def _strings(pairs: Sequence[tuple[bytes, int]]) -> tuple[Strings, tuple[Any, ...]]:
    """Return strings with ids for C, and the arrays that must live as long."""
    text = b"".join(string for string, _ in pairs)
    lengths = np.array([len(string) for string, _ in pairs], dtype=np.int64)
    ids = np.array([id for _, id in pairs], dtype=np.int32)
    struct = Strings(text, lengths.ctypes.data, ids.ctypes.data, len(text), len(pairs))
    return struct, (text, lengths, ids)


def _threads(size: int) -> int:
    """Return the number of threads for so many bytes; a worker process has its core alone."""
    if size < 2 * _THREAD or NUMBER in os.environ:
        return 1
    setting = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(setting) if setting.isdecimal() and int(setting) else usable_cores()
    return min(cores, size // _THREAD, abi.MAX_THREADS)


def compile_wordpiece(
    backend: tokenizers.Tokenizer, spec: Mapping[str, Any]
) -> CompiledWordPiece | None:
    """Return a tokenizer in C for the content of a `tokenizer.json`.

    None if that is not proved equal, or the library is not compiled.
    """
    library = load().library
    match spec:
        case {
            "normalizer": {"type": "BertNormalizer"},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "model": {
                "type": "WordPiece", "vocab": vocab, "unk_token": unknown,
                "max_input_chars_per_word": int(longest), "continuing_subword_prefix": str(prefix),
            },
            "post_processor": None | {"type": "TemplateProcessing" | "BertProcessing"},
        } if (
            library is not None
            and unknown in vocab
            and 1 <= longest <= MAX_CHARACTERS
            and len(prefix) <= MAX_CHARACTERS
            and len(spec["added_tokens"]) <= MAX_ADDED
            and all(token["content"] and not token["normalized"] for token in spec["added_tokens"])
        ):  # fmt: skip
            return CompiledWordPiece(backend, spec, library)
        case _:
            return None
