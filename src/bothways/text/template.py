"""Templates of inputs: [CLS] A [SEP] B [SEP] in BERT (Devlin et al. 2018, figure 2).

The tokenizer's own post-processor determines the special tokens and the segment of each token:
RoBERTa has `<s> A </s></s> B </s>`, all in one segment.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bothways.core.errors import TokenizerError, call
from bothways.core.source import Ids, Sequence

AGAIN = f"Download it again, or train one: {call('tokenizer train', 'FILES', out='FOLDER')}"


@dataclass(frozen=True)
class Gap:
    """The special tokens in one gap: their ids and their segments, `(n)` each."""

    ids: Ids
    segments: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Template:
    """The special tokens around one text and around two.

    Attributes:
        before, after: those around a single text.
        first, between, last: those around and between the texts of a pair.
        segments: the segments of A and B in a pair.
    """

    before: Gap
    after: Gap
    first: Gap
    between: Gap
    last: Gap
    segments: tuple[int, int] = (0, 1)

    @property
    def single(self) -> int:
        """The number of special tokens around one text."""
        return len(self.before) + len(self.after)

    @property
    def pair(self) -> int:
        """The number of special tokens around two texts."""
        return len(self.first) + len(self.between) + len(self.last)

    def flat(self) -> Template:
        """Return the same template with all tokens in segment 0."""
        before_gap, after_gap, first_gap, between, last_gap = (
            replace(gap, segments=np.zeros_like(gap.segments)) for gap in self.gaps
        )
        return Template(before_gap, after_gap, first_gap, between, last_gap, (0, 0))

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """All five gaps."""
        return self.before, self.after, self.first, self.between, self.last

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Template:
        """Return the template of a backend's post-processor."""
        encode = functools.partial(backend.encode, add_special_tokens=False)
        word = next(token for token in backend.get_vocab() if encode(token).ids)
        single, pair = backend.encode(word), backend.encode(word, word)
        # [CLS] w [SEP] w [SEP] → None 0 None 1 None: before, between and behind the texts.
        one, end = _bounds(single, 0)
        (first, middle), (second, stop) = _bounds(pair, 0), _bounds(pair, 1)
        return cls(
            _gap(single, 0, one),
            _gap(single, end, None),
            _gap(pair, 0, first),
            _gap(pair, middle, second),
            _gap(pair, stop, None),
            (pair.type_ids[first], pair.type_ids[second]),
        )


def assemble(a: Ids, b: Ids | None, template: Template, length: int | None = None) -> Sequence:
    """Join one or two texts `(n)`, `(m)` with their special tokens and segments.

    With a `length` in tokens, the ends of texts that are too long are cut off.
    """
    t = template
    if length is not None:
        room = length - (t.single if b is None else t.pair)
        length_a, length_b = truncated(len(a), 0 if b is None else len(b), room)
        a, b = a[:length_a], None if b is None else b[:length_b]
    if b is None:
        pieces = [t.before.ids, a, t.after.ids]
        segments = [t.before.segments, np.zeros(len(a), dtype=np.int8), t.after.segments]
    else:
        pieces = [t.first.ids, a, t.between.ids, b, t.last.ids]
        sizes = zip((a, b), t.segments, strict=True)
        of_a, of_b = (np.full(len(ids), segment, dtype=np.int8) for ids, segment in sizes)
        segments = [t.first.segments, of_a, t.between.segments, of_b, t.last.segments]
    return Sequence(np.concatenate(pieces).astype(np.int32), np.concatenate(segments))


def truncated(a: int, b: int, room: int) -> tuple[int, int]:
    """Compute the lengths of two truncated texts: the longer loses its last token, of equals B.

    Source: `_truncate_seq_pair` in google-research/bert run_classifier.py, in closed form.
    """
    if a + b <= room:
        return a, b
    if a <= (room + 1) // 2:
        return a, room - a
    if b <= room // 2:
        return room - b, b
    return (room + 1) // 2, room // 2


def _bounds(encoding: tokenizers.Encoding, text: int) -> tuple[int, int]:
    """Return the range of the tokens of a text. Raises ValueError if there are none."""
    owners = encoding.sequence_ids
    return owners.index(text), len(owners) - owners[::-1].index(text)


def _gap(encoding: tokenizers.Encoding, start: int, stop: int | None) -> Gap:
    tokens = slice(start, stop)
    return Gap(
        np.array(encoding.ids[tokens], dtype=np.int32),
        np.array(encoding.type_ids[tokens], dtype=np.int8),
    )


@contextlib.contextmanager
def foreign(location: str | Path | None) -> Iterator[None]:
    """Turn a plain Exception or a panic of the `tokenizers` library into a TokenizerError."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        message = f"makes tokenizers {tokenizers.__version__} fail: {error}"
        raise TokenizerError(message, where=location, fix=AGAIN) from error
