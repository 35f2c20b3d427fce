"""Character spans: entities as a range of characters and a type, as annotation tools write them.

    [0, 9, "PER"]                                              doccano, spaCy
    {"start": 0, "end": 9, "label": "PER"}                     Prodigy; Label Studio has "labels"
    {"start_offset": 0, "end_offset": 9, "label": "PER"}       doccano with relations
    {"start": 0, "end": 9, "entity_group": "PER"}              pipelines of Hugging Face
    {"start": 0, "end": 9, "type": "PER", "text": "Anna Berg"} predictions of this library

Offsets count characters (Unicode code points) from 0, and the end is the one after the last. White
space at the ends of a span belongs to no word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any

from bothways.core.errors import DataError
from bothways.tasks.tagging.schemes import OUTSIDE

_STARTS, _ENDS = ("start", "start_offset", "begin"), ("end", "end_offset", "stop")
_TYPES = ("type", "label", "labels", "entity_group", "entity", "tag")
FORM = 'Spans are like {"text": "Anna sings", "spans": [{"start": 0, "end": 4, "label": "PER"}]}.'
_OFFSETS = (
    "Offsets count characters (Unicode code points) from 0; the end is the one after the last."
)


@dataclass(frozen=True)
class CharacterSpan:
    """An entity: its characters `[start, end)`, its type, and its text if the data repeats it."""

    start: int
    end: int
    type: str
    text: str | None = None

    def __str__(self) -> str:
        return f"{self.start}–{self.end} ({self.type})"


def read_spans(values: Any, column: str, location: str) -> list[CharacterSpan]:
    """Return the spans in a value of a table, in their order in the text.

    Raises:
        DataError: it is not a list of spans.
    """
    if not isinstance(values, list | tuple):
        display = json.dumps(values, default=str)[:60]
        message = f"column {column!r} holds {display}, not a list of spans"
        raise DataError(message, where=location, fix=f"{FORM} Without an entity: [].")
    spans = []
    for value in values:
        match value:
            case [_, _, _]:
                start, end, kind, text = *value, None
            case Mapping():
                keys = (_STARTS, _ENDS, _TYPES, ("text",))
                start, end, kind, text = (
                    next((value[key] for key in names if key in value), None) for names in keys
                )
            case _:
                start = end = kind = text = None
        kind = kind[0] if isinstance(kind, list | tuple) and len(kind) == 1 else kind
        begin, stop = _offset(start), _offset(end)
        if begin is None or stop is None or not isinstance(kind, str) or not kind.strip():
            display = json.dumps(value, ensure_ascii=False, default=str)[:80]
            message = f"column {column!r} holds {display}, not a span"
            raise DataError(message, where=location, fix=FORM)
        if isinstance(value, Mapping) and value.get("entity") == kind and kind[1:2] == "-":
            message = f"column {column!r} holds {kind!r}, the tag of a token, not of an entity"
            fix = 'Join the tokens of each entity: pipeline(…, aggregation_strategy="simple").'
            raise DataError(message, where=location, fix=fix)
        text = text if isinstance(text, str) else None
        spans.append(CharacterSpan(begin, stop, kind.strip(), text))
    return sorted(spans, key=lambda span: (span.start, span.end))


def _offset(value: Any) -> int | None:
    """Return a whole number, which tables may write as a float; None for other values."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def tags_from_spans(
    text: str, words: Many[tuple[int, int]], spans: Many[CharacterSpan], location: str
) -> tuple[str, ...]:
    """Return the IOB2 tags of words, given the spans of a text in order.

    Args:
        words: begin and end of each, in characters.

    Raises:
        DataError: a span is empty, is not in the text, has another text than it says, overlaps
            another one, or cuts a word.
    """
    tags = [OUTSIDE] * len(words)
    starts = {start: number for number, (start, _) in enumerate(words)}
    ends = {end: number for number, (_, end) in enumerate(words, 1)}
    preceding = None
    for span in spans:
        first, last = _borders(text, span, location)
        if preceding is not None and span.start < preceding.end:
            message = f"the spans {preceding} and {span} overlap"
            fix = "Keep one of them: each word has one tag."
            raise DataError(message, where=location, fix=fix)
        if first not in starts or last not in ends:
            # Words that share a character with the span.
            touched = [
                (start, end) for start, end in words if start < span.end and end > span.start
            ]
            borders = slice(touched[0][0], touched[-1][1])
            message = f"the span {span} {text[span.start : span.end][:40]!r} cuts a word; "
            nearest = f"{borders.start}–{borders.stop} ({text[borders][:40]!r})"
            message += f"the nearest borders of words are {nearest}"
            fix = "Correct the span, or split all texts at every mark: task.splitter=punctuation "
            fix += "(or characters, for Chinese)."
            raise DataError(message, where=location, fix=fix)
        begin, end, preceding = starts[first], ends[last], span
        # "Anna Berg sings", 0–9 PER → B-PER I-PER O
        tags[begin:end] = [f"B-{span.type}", *[f"I-{span.type}"] * (end - begin - 1)]
    return tuple(tags)


def _borders(text: str, span: CharacterSpan, location: str) -> tuple[int, int]:
    """Return the first character of a span and the one after its last, without white space."""
    inside = text[span.start : span.end] if 0 <= span.start <= span.end else ""
    if not 0 <= span.start <= span.end <= len(text):
        message = f"the span {span} is not in the text of {len(text):,} characters"
        raise DataError(message, where=location, fix=_OFFSETS)
    if not inside.strip():
        message = f"the span {span} is empty" if not inside else f"the span {span} is white space"
        raise DataError(message, where=location, fix=f"Remove it, or correct it. {_OFFSETS}")
    if span.text is not None and span.text.split() != inside.split():
        message = f"the span {span} is {inside[:40]!r} in the text, {span.text[:40]!r} in the data"
        # JavaScript counts in UTF-16: letters beyond the first plane are two there.
        units = text.encode("utf-16-le", "surrogatepass")[2 * span.start : 2 * span.end]
        if units.decode("utf-16-le", "replace").split() == span.text.split():
            message += ", by offsets in UTF-16"
        raise DataError(message, where=location, fix=_OFFSETS)
    return (
        span.start + len(inside) - len(inside.lstrip()),
        span.end - len(inside) + len(inside.rstrip()),
    )
