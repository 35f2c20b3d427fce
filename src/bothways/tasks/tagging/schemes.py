"""How tags of words spell entities: IOB1, IOB2, BIOES; and the entities that a sequence means.

A tag is "O", or a prefix and a type, such as B-PER. The prefixes mean:

    IOB1    I inside; B only where an entity directly follows one of its type (Ramshaw 1995)
    IOB2    B begins every entity, I continues it (CoNLL 2002, Devlin et al. 2018)
    BIOES   as IOB2, with E for the last word and S for the only one; BILOU and BMES use
            other letters

CoNLL's evaluation script, conlleval, finds the entities of all three by one rule: a word continues
an entity if it is I or E and follows B or I of its own type; else, unless it is O, it begins one.
So tags are converted to another scheme without knowing their own, and invalid sequences are read as
everyone scores them. The scheme of data is detected only to report the sequences that break it.

An entity is right if its type, its first and its last word are. Predicted entities follow one of
two rules:

- conlleval (Tjong Kim Sang and Buchholz 2000): every tag but O belongs to an entity, even in an
  invalid sequence. Papers report this, and it is seqeval's default.
- strict: no tag of an entity breaks the scheme of the labels. In IOB2, the scheme of every model
  trained here, an entity begins with B, so a lone I-PER is not one. In seqeval: mode="strict",
  scheme=IOB2. Labels of other models may spell IOB1, BIOES or BILOU.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from typing_extensions import assert_never

Spelling = Literal["iob1", "iob2", "bioes"]
Scheme = Literal["auto", "iob1", "iob2", "bioes", "plain"]
"""Plain tags are those of single words, such as parts of speech."""

OUTSIDE = "O"
UNNAMED = "_"
"""The type of entities whose tags have none: B, I, O."""

_TAG = re.compile(r"([BIESLUM])(?:-(.+))?")
_SAME = {"L": "E", "U": "S", "M": "I"}
PREFIXES: dict[Spelling, str] = {"iob1": "OBI", "iob2": "OBI", "bioes": "OBIES"}


class TagPart(NamedTuple):
    """A tag in its parts: O, B, I, E or S, and the type (empty for O)."""

    prefix: str
    type: str


_OUTSIDE = TagPart(OUTSIDE, "")


class Chunk(NamedTuple):
    """An entity: its type, its first word, and the word after its last."""

    type: str
    begin: int
    end: int


@functools.lru_cache(maxsize=4096)
def tag_part(tag: str) -> TagPart | None:
    """Return the parts of a tag; None for one that does not spell entities."""
    if tag == OUTSIDE:
        return _OUTSIDE
    match = _TAG.fullmatch(tag)
    return None if match is None else TagPart(_SAME.get(match[1], match[1]), match[2] or UNNAMED)


def spells_entities(tags: Iterable[str]) -> bool:
    """Return True if all tags are "O" or a prefix with a type."""
    return all(tag_part(tag) is not None for tag in tags)


def chunks(tags: Iterable[str]) -> list[Chunk]:
    """Return the entities of a sequence by conlleval's rule. Tags that spell none count as O."""
    result: list[Chunk] = []
    before = _OUTSIDE
    for position, tag in enumerate(tags):
        part = tag_part(tag) or _OUTSIDE
        if _continues(before, part):
            result[-1] = result[-1]._replace(end=position + 1)
        elif part.prefix != OUTSIDE:
            result.append(Chunk(part.type, position, position + 1))
        before = part
    return result


def _continues(preceding: TagPart, current: TagPart) -> bool:
    return current.prefix in "IE" and preceding.prefix in "BI" and current.type == preceding.type


def respell(tags: Many[str], scheme: Spelling) -> tuple[str, ...]:
    """Return the same entities in a scheme; tags that are not all of entities are unchanged."""
    if not spells_entities(tags):
        return tuple(tags)
    result, before = [OUTSIDE] * len(tags), Chunk("", 0, 0)
    for chunk in chunks(tags):
        # The entity directly follows one of its type.
        touches = (chunk.type, chunk.begin) == (before.type, before.end)
        inside = "I" * (chunk.end - chunk.begin - 1)
        match scheme:
            case "iob1":
                prefixes = ("B" if touches else "I") + inside
            case "iob2":
                prefixes = "B" + inside
            case "bioes":
                prefixes = "B" + inside[1:] + "E" if inside else "S"
            case _:
                assert_never(scheme)
        result[chunk.begin : chunk.end] = [f"{prefix}-{chunk.type}" for prefix in prefixes]
        before = chunk
    return tuple(result)


def scheme_of(labels: Iterable[str]) -> Spelling:
    """Return the scheme that a model with these labels uses.

    BIOES has E or S. In IOB2 every type has B, and the first tag of a type that occurs is B: so a
    type without B is IOB1's, and so are labels that list the I of every type before its B.
    """
    positions = {
        part: position for position, part in enumerate(map(tag_part, labels)) if part is not None
    }
    if any(part.prefix in "ES" for part in positions):
        return "bioes"
    pairs = [
        (position, positions.get(TagPart("B", part.type)))
        for part, position in positions.items()
        if part.prefix == "I"
    ]
    # IOB1 writes B only between neighbours of a type: B is absent, or was met after I.
    without_b = any(begin is None for _, begin in pairs)
    b_after_i = all(begin is None or begin > position for position, begin in pairs)
    return "iob1" if without_b or (pairs and b_after_i) else "iob2"


def as_labels(tags: Many[str], labels: Many[str]) -> tuple[str, ...]:
    """Return the same entities in the scheme and letters of labels, where they have them."""
    names = {tag_part(label): label for label in labels}
    return tuple(names.get(tag_part(tag), tag) for tag in respell(tags, scheme_of(labels)))


def find_scheme(sentences: Iterable[Many[str]]) -> Spelling | Literal["plain"]:
    """Return the scheme that these tags break least; IOB2 if they break neither IOB1 nor IOB2."""
    # After O, I-PER breaks IOB2, and B-PER breaks IOB1, where I-PER would do
    broken: dict[Spelling, int] = {"iob2": 0, "iob1": 0}
    has_end = False
    for tags in sentences:
        if not spells_entities(tags):
            return "plain"
        has_end = has_end or any(tag_part(tag)[0] in "ES" for tag in tags)  # type: ignore[index]
        for scheme in broken:
            broken[scheme] += len(flaws(tags, scheme))
    return "bioes" if has_end else "iob2" if broken["iob2"] <= broken["iob1"] else "iob1"


def flaws(tags: Many[str], scheme: Spelling) -> list[int]:
    """Return the words, from 0, whose tags are invalid in their place.

    These are I after O in IOB2, B in IOB1 where I would do, an entity without an end in BIOES.
    """
    parts = [_OUTSIDE, *(tag_part(tag) or _OUTSIDE for tag in tags), _OUTSIDE]
    triples = enumerate(zip(parts, parts[1:], parts[2:], strict=False))
    match scheme:
        case "iob2":
            return [p for p, (a, b, _) in triples if b.prefix == "I" and not _continues(a, b)]
        case "iob1":
            return [p for p, (a, b, _) in triples if b.prefix == "B" and b.type != a.type]
        case "bioes":
            return [  # a tag that continues nothing, or is left open
                p
                for p, (a, b, c) in triples
                if (b.prefix in "IE" and not _continues(a, b))
                or (b.prefix in "BI" and not _continues(b, c))
            ]
        case _:
            assert_never(scheme)


def strict_chunks(tags: Many[str], scheme: Spelling) -> list[Chunk]:
    """Return the entities whose tags all follow a scheme: in IOB2, O I-PER I-PER has none."""
    broken = {*flaws(tags, scheme)}
    return [chunk for chunk in chunks(tags) if broken.isdisjoint(range(chunk.begin, chunk.end))]


def types_of(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the entity types that these tags spell, sorted."""
    tag_parts = filter(None, map(tag_part, labels))
    return tuple(sorted({part.type for part in tag_parts if part.type}))


@dataclass
class EntityCounts:
    """The number of true, predicted and rightly predicted entities by type."""

    expected: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)

    def add(self, truth: Iterable[Chunk], predicted: Iterable[Chunk]) -> None:
        """Count one sentence."""
        true, predictions = set(truth), set(predicted)
        self.expected.update(chunk.type for chunk in true)
        self.predicted.update(chunk.type for chunk in predictions)
        self.right.update(chunk.type for chunk in true & predictions)

    def scores(self, suffix: str = "", kind: str | None = None) -> dict[str, float]:
        """Return F1, precision and recall; 0 where a quotient is undefined.

        Args:
            suffix: of each name, such as "_strict" in "f1_strict".
            kind: the type that counts; None for all types.
        """
        counts = (self.right, self.predicted, self.expected)
        correct, predicted, expected = (x.total() if kind is None else x[kind] for x in counts)
        quotients = {
            "f1": (2 * correct, predicted + expected),
            "precision": (correct, predicted),
            "recall": (correct, expected),
        }
        return {f"{name}{suffix}": a / b if b else 0.0 for name, (a, b) in quotients.items()}
