"""Preflight of tagged sentences: empty ones, tables that are none, tags that their scheme does not allow, balance, and what two
files share.

Columns of words and tags have no header, so any table of two columns can be read as such: one of texts with labels would be
learned as one long sentence. That is told by what it holds: blanks in the words, a first line of names, tags that hardly recur.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many

from bothways.core.finding import Finding, places
from bothways.tasks.tagging.examples import TAGS, WORDS, TagExample
from bothways.tasks.tagging.metrics import types_of
from bothways.tasks.tagging.schemes import (
    OUTSIDE,
    Scheme,
    Spelling,
    chunks,
    find_scheme,
    flaws,
    spells_entities,
    strangers,
)
from bothways.tasks.text_checks import check_overlap
from bothways.tasks.text_examples import LABELS, PAIRS, TEXTS

FEW = 10
"""Entities of a type below which it is hardly learned."""
MANY = 100
"""Words from which on tags that are nearly all different tell something."""
SHOWN = 40
"""Characters of a word or a tag in a message."""
SINGULAR = ("id", "idx", "index", "word", "token", "form", "tag", "pos", "upos", "xpos", "score")
NAMES = {
    name.lower()
    for name in (
        *TEXTS,
        *LABELS,
        *WORDS,
        *TAGS,
        *(name for pair in PAIRS for name in pair),
        *SINGULAR,
    )
}
"""What columns are called in headers."""


def check_tagged(train: Many[TagExample], dev: Many[TagExample], scheme: Scheme) -> list[Finding]:
    """Everything that tagged sentences can have wrong; `dev` may be empty."""
    findings = [*_check_rows([*train, *dev])]
    for name, examples in (("training", train), ("dev", dev)):
        if any(example.tags for example in examples):
            findings += _check_table(examples, name)
            findings += _check_scheme(examples, scheme, name)
    return [
        *findings,
        *_check_labels(train, dev, scheme),
        *_check_balance(train, scheme),
        *check_overlap(train, dev, lambda example: example.words, "sentences"),
    ]


def _check_rows(examples: Many[TagExample]) -> list[Finding]:
    empty = [example.where for example in examples if not example.words]
    bare = [example.where for example in examples if example.tags is None or not all(example.tags)]
    white = [
        _at(example, place)
        for example in examples
        for place, word in enumerate(example.words)
        if not word.strip()
    ]
    findings = []
    if empty:
        what = f"{len(empty)} sentences have no word: {places(empty)}"
        findings.append(Finding("rows", "error", what, fix="Take them out."))
    if bare:
        what = f"{len(bare)} sentences have words without a tag: {places(bare)}"
        findings.append(
            Finding("labels", "error", what, fix="Tag all of their words, or take them out.")
        )
    if white:
        what = (
            f"{len(white)} words are empty or white space, and are read as unknown: {places(white)}"
        )
        findings.append(Finding("rows", "warning", what))
    return findings


def _check_table(examples: Many[TagExample], name: str) -> list[Finding]:
    """Whether these are texts with a label each, or begin with a header, or tags are none."""
    places = [
        (example, place)
        for example in examples
        if example.tags
        for place in range(len(example.words))
    ]
    pairs = [(example.words[place], (example.tags or ())[place]) for example, place in places]
    blank = [at for at, pair in enumerate(pairs) if any(len(part.split()) > 1 for part in pair)]
    if 2 * len(blank) > len(pairs):
        what = (
            f"{len(blank)} of {len(pairs)} words of the {name} data or their tags hold blanks, as texts with a label each do: "
            f"{places[blank[0]][0].where} word {places[blank[0]][1] + 1} {_shown(pairs[blank[0]])}"
        )
        return [
            Finding("rows", "error", what, fix=f"For labels of texts set --task classify. {_FORM}")
        ]
    tags = Counter(tag for _, tag in pairs)
    if all(part.lower() in NAMES for part in pairs[0]) and tags[pairs[0][1]] == 1:
        what = f"the {name} data begins with a header, which would be learned: {places[0][0].where} {_shown(pairs[0])}"
        fix = f"Take that line out, if what follows are words and tags; for labels of texts set --task classify. {_FORM}"
        return [Finding("rows", "error", what, fix=fix)]
    if len(pairs) >= MANY and 2 * len(tags) > len(pairs):
        what = f"the {len(pairs)} words of the {name} data have {len(tags)} different tags, such as {_shown(pairs[0])}"
        return [
            Finding("labels", "warning", what, fix=f"See that columns are not mixed up. {_FORM}")
        ]
    return []


_FORM = "For tags each line is a word and its tag, and an empty line ends a sentence."


def _shown(pair: tuple[str, str]) -> str:
    word, tag = (part if len(part) <= SHOWN else f"{part[:SHOWN]}…" for part in pair)
    return f"{word!r} with the tag {tag!r}"


def _check_scheme(examples: Many[TagExample], scheme: Scheme, name: str) -> list[Finding]:
    """What the tags are, and where they break their own rules."""
    tags = [example.tags or () for example in examples]
    known = find_scheme(tags) if scheme == "auto" else scheme
    if known == "plain":
        return [*_check_mixed(examples, name)] if scheme == "auto" else []
    strange = strangers((tag for row in tags for tag in row), known)
    if strange:
        what = f"the {name} data has tags that are none of {known.upper()}'s: {places(sorted(strange))}"
        return [
            Finding(
                "labels",
                "error",
                what,
                "task.scheme",
                "Set task.scheme=auto, or plain for tags of single words.",
            )
        ]
    findings = []
    if known != "iob2":
        findings.append(
            Finding(
                "labels",
                "note",
                f"the tags of the {name} data are {known.upper()}; they are read as IOB2",
            )
        )
    return [*findings, *_check_flaws(examples, known, name)]


def _check_flaws(examples: Many[TagExample], scheme: Spelling, name: str) -> list[Finding]:
    broken = [
        f"{_at(example, place)} {example.tags[place]}"
        for example in examples
        if example.tags
        for place in flaws(example.tags, scheme)
    ]
    if not broken:
        return []
    what = f"{len(broken)} tags of the {name} data break the rules of {scheme.upper()}: {places(broken)}"
    fix = "They are read as conlleval reads them: a tag that goes on with nothing begins an entity."
    return [Finding("labels", "warning", what, fix=fix)]


def _check_mixed(examples: Many[TagExample], name: str) -> list[Finding]:
    """Tags of entities among plain ones are likely a slip."""
    rows = [(example, tag) for example in examples for tag in dict.fromkeys(example.tags or ())]
    spelled = sum("-" in tag and spells_entities([tag]) for _, tag in rows)
    others = [f"{example.where} ({tag!r})" for example, tag in rows if not spells_entities([tag])]
    if not spelled:
        return []
    what = f"the {name} data has tags of entities, such as B-PER, and others, so that all are taken as plain: {places(others)}"
    return [Finding("labels", "warning", what, fix="Correct these tags, if entities are meant.")]


def _at(example: TagExample, place: int) -> str:
    return f"{example.where} word {place + 1} {example.words[place]!r}"


def _check_labels(train: Many[TagExample], dev: Many[TagExample], scheme: Scheme) -> list[Finding]:
    """What is there to be learned, and what the dev data has beyond it: types of entities, or plain tags."""
    tags, others = (
        Counter(tag for example in examples for tag in example.tags or ())
        for examples in (train, dev)
    )
    entities = scheme != "plain" and spells_entities(tags)
    names, seen = (set(types_of(some)) if entities else set(some) for some in (tags, others))
    kind = "types of entities" if entities else "tags"
    findings = []
    if len(names) < (1 if entities else 2):
        what = f"there is nothing to learn: the tags of the training data are {', '.join(map(repr, tags)) or 'all absent'}"
        findings.append(
            Finding("labels", "error", what, fix="Name another column of tags, or give more data.")
        )
    strange = seen - names | (
        {tag for tag in others if not spells_entities([tag])} if entities else set()
    )
    if strange:
        where = [
            example.where
            for example in dev
            if any(_is_of(tag, strange, entities) for tag in example.tags or ())
        ]
        what = f"the dev data has {kind} that no training example has, {places(sorted(strange))}: {places(where)}"
        findings.append(
            Finding(
                "labels",
                "error",
                what,
                fix=f"Those of the training data are {places(sorted(names))}.",
            )
        )
    if dev and names - seen:
        findings.append(
            Finding(
                "labels",
                "warning",
                f"the dev data has none of the {kind} {places(sorted(names - seen))}",
            )
        )
    return findings


def _is_of(tag: str, strange: set[str], entities: bool) -> bool:
    return tag in strange or (entities and not strange.isdisjoint(types_of([tag])))


def _check_balance(train: Many[TagExample], scheme: Scheme) -> list[Finding]:
    tags = Counter(tag for example in train for tag in example.tags or ())
    if len(tags) < 2:
        return []
    top, most = tags.most_common(1)[0]
    findings = [
        Finding(
            "balance",
            "note",
            f"always answering {top!r} would be right on {most / tags.total():.1%} of the words",
        )
    ]
    if scheme != "plain" and spells_entities(tags) and OUTSIDE in tags:
        counts = Counter(chunk.type for example in train for chunk in chunks(example.tags or ()))
        rare = [f"{kind} ({count})" for kind, count in counts.items() if count < FEW]
        if rare:
            what = f"types with fewer than {FEW} entities in the training data, which are hardly learned: {places(rare)}"
            findings.append(Finding("balance", "warning", what))
    return findings
