"""Running text: its words, and the character spans of entities as annotation tools write them.

No character is changed or lost: words are slices of the text, found by a splitter:

    auto         rules; a model that is trained on single characters of a script without blanks has
                 characters
    rules        words as in CoNLL data and spaCy: "U.N.", "O'Neil", "well-known" and "1,000"
                 stay whole, the clitic of "Germany's", emoji and other marks are separate
    punctuation  every punctuation mark is separate: BERT's `BasicTokenizer`, without its
                 lower-casing, which is left to the model's tokenizer
    whitespace   separated by white space only
    characters   each character is a word, as in most Chinese data

Ideographs are words of their own, except with "whitespace". Every splitter takes time linear in the
length of the text.

A span is a range of characters and a type:

    [0, 9, "PER"]                                              doccano, spaCy
    {"start": 0, "end": 9, "label": "PER"}                     Prodigy; Label Studio has "labels"
    {"start_offset": 0, "end_offset": 9, "label": "PER"}       doccano with relations
    {"start": 0, "end": 9, "entity_group": "PER"}              pipelines of Hugging Face
    {"start": 0, "end": 9, "type": "PER", "text": "Anna Berg"} predictions of this library

or all of a text by type and characters, with inclusive ends: {"PER": {"Anna Berg": [[0, 8]]}}
(CLUENER).

Offsets count characters (Unicode code points) from 0, and the end is the one after the last. White
space at the ends of a span belongs to no word.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal

from bothways.core.errors import DataError, setting
from bothways.tasks.tagging.schemes import OUTSIDE

Splitter = Literal["auto", "rules", "punctuation", "whitespace", "characters"]

_IDEOGRAPHS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
"""Han only, as in BERT: neither kana nor hangul."""

_CLITIC = re.compile(r"(?<=\w)['’](?:s|re|ve|ll|d|m)\b", re.IGNORECASE)
_URL = re.compile(r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?'’)\]}]")
_HOST = re.compile(r"(?<=[\w.+-])@\w[\w-]*(?:\.\w[\w-]*)+")
"""The end of an e-mail address. The name before it is searched for backwards, from "@": a search
from each character for a name with an "@" after it takes quadratic time."""
_NAME = re.compile(r"[\w.+-]")
_TITLE = re.compile(r"(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Corp|Gen|Gov|Sen|Rep|Rev|vs)\.(?=\s)")
_SHAPE = re.compile(
    r"I"
    r"|s(?:[jz]|(?<=z)s)*"  # €, →, 😍, 👍🏽, 👨‍👩‍👧
    r"|(?:[aA]\.)+[aA](?![aA0])\.?"  # U.N., e.g.
    r"|A\.(?= +A)"  # the initial in J. Smith
    r"|[aA0jz]+(?:(?:['&-]|\.(?=[a0])|(?<=0)[,:/](?=0))[aA0jz]+)*"  # O'Neil, AT&T, 1-0, a.com
    r"|`[aA]+"  # a clitic
    r"|[^ ]"
)
"""Words in the shape of a text: each letter is "a" or "A", each digit "0", each ideograph "I", each
sign beyond ASCII "s"; "j" joins the emoji before it, "z" those on both sides."""
_JOINERS = "\u200d\ufe0e\ufe0f🏻🏼🏽🏾🏿"
"""Characters within emoji: the zero-width joiner, variation selectors and tones of skin. The
first is within words, too, of Hindi for example."""


def split_words(text: str, splitter: Splitter = "auto") -> list[tuple[int, int]]:
    """Return begin and end of each word, in characters, in order."""
    match splitter:
        case "whitespace":
            words = re.finditer(r"\S+", text)
        case "characters":
            words = re.finditer(r"\S", text)
        case "punctuation":
            words = re.finditer(r"[aA0sjz]+|[^ ]", "".join(map(_kind, text)))
        case "rules" | "auto":
            return _split_by_rules(text)
    return [word.span() for word in words]


def choose_splitter(words: Iterable[str]) -> Splitter:
    """Return the splitter that gives words like these: characters or auto.

    The words of Chinese data are often single characters, also the digits and letters in between.
    """
    counts = Counter(words)
    single = {word: count for word, count in counts.items() if len(word) == 1}
    # Ideographs, kana and hangul.
    wide = sum(
        count
        for word, count in single.items()
        if unicodedata.east_asian_width(word) in "WF" and unicodedata.category(word) == "Lo"
    )
    characters = sum(single.values()) > 0.98 * counts.total() and 2 * wide > counts.total()
    return "characters" if characters else "auto"


def _split_by_rules(text: str) -> list[tuple[int, int]]:
    letters = [_kind(character) for character in text]
    addresses = list[tuple[int, int, int]]()  # the name of an e-mail address, its "@" and its end
    for host in _HOST.finditer(text):
        start = at = host.start()
        while start and _NAME.match(text, start - 1):
            start -= 1
        addresses.append((start, at, host.end()))
    # The apostrophe of a clitic begins a word: it's → it 's.
    for clitic in _CLITIC.finditer(text):
        letters[clitic.start()] = "`"
    following = itertools.chain(addresses, [(len(text), len(text), len(text))])
    shape, spans, position, address = "".join(letters), [], 0, next(following)
    while position < len(text):
        while address[1] <= position < len(text):
            address = next(following)
        if (word := _URL.match(text, position)) is not None:
            spans.append(word.span())
        elif address[0] <= position:
            spans.append((position, address[2]))
        elif (word := _TITLE.match(text, position) or _SHAPE.match(shape, position)) is not None:
            spans.append(word.span())
        # Behind the word that was found here, or one character on.
        position = spans[-1][1] if spans and spans[-1][0] == position else position + 1
    return spans


@functools.lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    """Return the shape of a character; marks that may join words represent themselves."""
    if character.isspace():
        return " "
    if character in ".,:/&-":
        return character
    if character in "'’":
        return "'"
    if character.isdecimal():
        return "0"
    if any(first <= ord(character) <= last for first, last in _IDEOGRAPHS):
        return "I"
    if character in _JOINERS:
        return "z" if character == "\u200d" else "j"
    category = unicodedata.category(character)
    if category.startswith("P") or (
        character.isascii() and not character.isalnum() and character.isprintable()
    ):
        return "!"
    if category in ("So", "Sm", "Sc"):
        return "s"
    return "A" if character.isupper() else "a"


_STARTS, _ENDS = ("start", "start_offset", "begin"), ("end", "end_offset", "stop")
_TYPES = ("type", "label", "labels", "entity_group", "entity", "tag")
FORM = 'Spans are like {"text": "Anna sings", "spans": [{"start": 0, "end": 4, "label": "PER"}]}.'
_OFFSETS = "Offsets count characters (Unicode code points) from 0; the end is after the last."


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
    if isinstance(values, Mapping):
        values = _spans_by_type(values)
    if not isinstance(values, list | tuple):
        message = f"column {column!r} holds {repr(values)[:60]}, not a list of spans"
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
            message = f"column {column!r} holds {repr(value)[:80]}, not a span"
            raise DataError(message, where=location, fix=FORM)
        if isinstance(value, Mapping) and value.get("entity") == kind and kind[1:2] == "-":
            message = f"column {column!r} holds {kind!r}, the tag of a token, not of an entity"
            fix = 'Join the tokens of each entity: pipeline(…, aggregation_strategy="simple").'
            raise DataError(message, where=location, fix=fix)
        text = text if isinstance(text, str) else None
        spans.append(CharacterSpan(begin, stop, kind.strip(), text))
    return sorted(spans, key=lambda span: (span.start, span.end))


def _spans_by_type(types: Mapping[str, Any]) -> Any:
    """Return CLUENER's spans as a list with exclusive ends; a mapping of another form as it is.

    In a Parquet file each row has the types and the texts of all rows, without offsets (None).
    """
    try:
        return [
            {"start": start, "end": end + 1, "label": kind, "text": text}
            for kind, texts in types.items()
            for text, offsets in ({} if texts is None else texts).items()
            for start, end in (() if offsets is None else offsets)
        ]
    except (AttributeError, TypeError, ValueError):
        return types


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
        inside = text[span.start : span.end] if 0 <= span.start <= span.end else ""
        if not 0 <= span.start <= span.end <= len(text):
            message = f"the span {span} is not in the text of {len(text):,} characters"
            raise DataError(message, where=location, fix=_OFFSETS)
        if not inside.strip():
            message = f"the span {span} is {'white space' if inside else 'empty'}"
            raise DataError(message, where=location, fix=f"Remove it, or correct it. {_OFFSETS}")
        if span.text is not None and span.text.split() != inside.split():
            message = f"the span {span} is {inside[:40]!r} in the text, {span.text[:40]!r} in the "
            # JavaScript counts in UTF-16: letters beyond the first plane are two there.
            units = text.encode("utf-16-le", "surrogatepass")[2 * span.start : 2 * span.end]
            is_utf16 = units.decode("utf-16-le", "replace").split() == span.text.split()
            message += "data, by offsets in UTF-16" if is_utf16 else "data"
            raise DataError(message, where=location, fix=_OFFSETS)
        first = span.start + len(inside) - len(inside.lstrip())
        last = span.end - len(inside) + len(inside.rstrip())
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
            borders_of = {border for word in split_words(text, "punctuation") for border in word}
            fix = f"Correct the span, or set {setting('task.splitter', 'punctuation')}."
            if not {first, last} <= borders_of:
                splitter = setting("task.splitter", "characters")
                fix = (
                    f"Correct the span, or set {splitter} (for Chinese, Japanese, Korean or Thai)."
                )
            raise DataError(message, where=location, fix=fix)
        begin, end, preceding = starts[first], ends[last], span
        # "Anna Berg sings", 0–9 PER → B-PER I-PER O
        tags[begin:end] = [f"B-{span.type}", *[f"I-{span.type}"] * (end - begin - 1)]
    return tuple(tags)
