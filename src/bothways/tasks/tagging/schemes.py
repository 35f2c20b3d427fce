"""How tags of words spell entities: IOB1, IOB2, BIOES; and the entities that a sequence of tags means.

A tag is "O", or a prefix and a type, such as B-PER. What the prefixes say:

    IOB1    I inside; B only where an entity directly follows one of its type         (Ramshaw and Marcus 1995)
    IOB2    B begins every entity, I goes on                                          (CoNLL 2002, Devlin et al. 2018)
    BIOES   as IOB2, with E for the last word and S for the only one; BILOU and BMES are the same in other letters

CoNLL's evaluation script, conlleval, finds the entities of all three by one rule: a word goes on with an entity if it is I or E
and stands after B or I of its own type; else, unless it is O, it begins one. So tags are turned into another scheme without
knowing their own, and broken sequences are read in the way in which everyone scores them. The scheme of data is found for one
purpose alone: to say which sequences break it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Literal, NamedTuple

from typing_extensions import assert_never

Spelling = Literal["iob1", "iob2", "bioes"]
Scheme = Literal["auto", "iob1", "iob2", "bioes", "plain"]
"""Plain tags stand for single words, such as parts of speech."""

OUTSIDE = "O"
UNNAMED = "_"
"""The type of entities whose tags are bare: B, I, O."""

_TAG = re.compile(r"([BIESLUM])(?:-(.+))?")
_SAME = {"L": "E", "U": "S", "M": "I"}
_PREFIXES: dict[Spelling, str] = {"iob1": "OBI", "iob2": "OBI", "bioes": "OBIES"}


class TagPart(NamedTuple):
    """A tag in its parts: O, B, I, E or S, and the type (empty for O)."""

    prefix: str
    type: str


class Chunk(NamedTuple):
    """An entity: its type, its first word, and the word after its last."""

    type: str
    begin: int
    end: int


@functools.lru_cache(maxsize=4096)
def tag_part(tag: str) -> TagPart | None:
    """The parts of a tag; none for one that spells no entities."""
    if tag == OUTSIDE:
        return TagPart(OUTSIDE, "")
    match = _TAG.fullmatch(tag)
    return None if match is None else TagPart(_SAME.get(match[1], match[1]), match[2] or UNNAMED)


def spells_entities(tags: Iterable[str]) -> bool:
    """Whether these are all "O" or a prefix with a type."""
    return all(tag_part(tag) is not None for tag in tags)


def chunks(tags: Iterable[str]) -> list[Chunk]:
    """The entities that a sequence of tags means to conlleval. Tags that spell none count as O."""
    result: list[Chunk] = []
    before = TagPart(OUTSIDE, "")
    for place, tag in enumerate(tags):
        part = tag_part(tag) or TagPart(OUTSIDE, "")
        if _goes_on(before, part):
            result[-1] = result[-1]._replace(end=place + 1)
        elif part.prefix != OUTSIDE:
            result.append(Chunk(part.type, place, place + 1))
        before = part
    return result


def _goes_on(before: TagPart, part: TagPart) -> bool:
    return part.prefix in "IE" and before.prefix in "BI" and part.type == before.type


def respell(tags: Many[str], scheme: Spelling) -> tuple[str, ...]:
    """The same entities in a scheme; tags that are not all of entities stay as they are."""
    if not spells_entities(tags):
        return tuple(tags)
    result, before = [OUTSIDE] * len(tags), Chunk("", 0, 0)
    for chunk in chunks(tags):
        touches = (chunk.type, chunk.begin) == (before.type, before.end)
        result[chunk.begin : chunk.end] = [
            f"{p}-{chunk.type}" for p in _prefixes(chunk.end - chunk.begin, scheme, touches)
        ]
        before = chunk
    return tuple(result)


def _prefixes(words: int, scheme: Spelling, touches: bool) -> str:
    """Those of an entity of so many words, which may directly follow one of its type."""
    match scheme:
        case "iob1":
            return ("B" if touches else "I") + "I" * (words - 1)
        case "iob2":
            return "B" + "I" * (words - 1)
        case "bioes":
            return "S" if words == 1 else "B" + "I" * (words - 2) + "E"
        case _:
            assert_never(scheme)


def scheme_of(labels: Iterable[str]) -> Spelling:
    """The scheme that a model with these labels spells: BIOES has E or S. In IOB2 every type has B, and the first tag of a type
    that occurs is B: so a type without B is IOB1's, and so are labels that list the I of every type before its B."""
    places = {part: place for place, part in enumerate(map(tag_part, labels)) if part is not None}
    if any(part.prefix in "ES" for part in places):
        return "bioes"
    pairs = [
        (place, places.get(TagPart("B", part.type)))
        for part, place in places.items()
        if part.prefix == "I"
    ]
    lacking, late = (
        any(begin is None for _, begin in pairs),
        all(begin is None or begin > place for place, begin in pairs),
    )
    return "iob1" if lacking or (pairs and late) else "iob2"


def as_labels(tags: Many[str], labels: Many[str]) -> tuple[str, ...]:
    """The same entities in the scheme and in the letters of labels; a tag that they lack has its usual name."""
    names = {tag_part(label): label for label in labels}
    return tuple(names.get(tag_part(tag), tag) for tag in respell(tags, scheme_of(labels)))


def find_scheme(sentences: Iterable[Many[str]]) -> Spelling | Literal["plain"]:
    """The scheme that these tags break least; of IOB1 and IOB2 where neither is broken, IOB2."""
    broken: dict[Spelling, int] = {"iob2": 0, "iob1": 0}
    wide = False
    for tags in sentences:
        if not spells_entities(tags):
            return "plain"
        wide = wide or any(tag_part(tag)[0] in "ES" for tag in tags)  # type: ignore[index]
        for scheme in broken:
            broken[scheme] += len(flaws(tags, scheme))
    return "bioes" if wide else "iob2" if broken["iob2"] <= broken["iob1"] else "iob1"


def strangers(tags: Iterable[str], scheme: Spelling) -> set[str]:
    """Tags that the scheme does not have."""
    parts = {tag: tag_part(tag) for tag in set(tags)}
    return {
        tag for tag, part in parts.items() if part is None or part.prefix not in _PREFIXES[scheme]
    }


def flaws(tags: Many[str], scheme: Spelling) -> list[int]:
    """The words, from 0, whose tags cannot stand where they do: I after O in IOB2, B where IOB1 has no need of it, an entity
    without end in BIOES."""
    parts = [tag_part(tag) or TagPart(OUTSIDE, "") for tag in tags]
    edge = TagPart(OUTSIDE, "")
    places = range(len(parts))
    match scheme:
        case "iob2":
            return [
                p
                for p in places
                if parts[p].prefix == "I" and not _goes_on(parts[p - 1] if p else edge, parts[p])
            ]
        case "iob1":
            return [
                p
                for p in places
                if parts[p].prefix == "B" and (not p or parts[p].type != parts[p - 1].type)
            ]
        case "bioes":
            return [
                p
                for p in places
                if _breaks(
                    parts[p - 1] if p else edge,
                    parts[p],
                    parts[p + 1] if p + 1 < len(parts) else edge,
                )
            ]
        case _:
            assert_never(scheme)


def _breaks(before: TagPart, part: TagPart, after: TagPart) -> bool:
    """Whether a BIOES tag goes on with nothing, or is left open."""
    lost = part.prefix in "IE" and not _goes_on(before, part)
    return lost or (part.prefix in "BI" and not _goes_on(part, after))
