"""Checks of tagged sentences: rows, tags and their scheme, balance, and overlap of train and dev.

Columns of words and tags have no header, so any table of two columns can be read as such: one of
texts with labels would be learned as one long sentence. Three signs reveal this: blanks in the
words, a first line of names, and tags that hardly recur.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence as Many

from bothways.core.errors import Finding, argument, places
from bothways.tasks import text_checks
from bothways.tasks.tagging import schemes
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import types_of
from bothways.tasks.tagging.table_rows import TAGS, WORDS
from bothways.tasks.text_task import LABELS, PAIRS, TEXTS

FEW = 10
"""Number of entities of a type below which it is hardly learned."""
MANY = 100
"""Number of words from which tags that are nearly all different are suspicious."""
SHOWN = 40
"""Number of characters of a word or a tag in a message."""
_SINGULAR = ("id", "idx", "index", "word", "token", "form", "tag", "pos", "upos", "xpos", "score")
_HEADER = {name.lower() for name in itertools.chain(TEXTS, LABELS, WORDS, TAGS, *PAIRS, _SINGULAR)}
"""Common aliases of columns in headers."""
_OUTSIDE_MARKS = {"0", "o", "_", "-", "OUT", "OUTSIDE", "NONE", "None"}
_SPELLINGS = (
    re.compile(r"(?P<prefix>[BIESLUMbieslum])[-_:.+/](?P<type>.+)"),
    re.compile(r"(?P<type>.+)[-_:.+/](?P<prefix>[BIESLUM])"),
)
_POSITION = re.compile(r"[\u3400-\u9fff\uff00-\uffef\u3000-\u30ff]\d|[!-~]\d")
_BRACKETS = re.compile(r"\([^()]+\*|\*\)")
_INLINE = re.compile(r"\S+[/|_](O|[BIES]-\S+)|\[[^\]]+\]\(\w+\)")
"""A word with its tag: `Anna/B-PER`, `[Anna](PER)`."""
_FORM = "For tags each line is a word and its tag, and an empty line ends a sentence."


def check_tagged(
    train: Many[TagExample], dev: Many[TagExample], scheme: schemes.Scheme
) -> list[Finding]:
    """Return the problems of tagged sentences; `dev` may be empty."""
    findings = _check_rows([*train, *dev])
    for name, examples in (("training", train), ("dev", dev)):
        if any(example.tags for example in examples):
            findings += _check_table(examples, name)
            findings += _check_scheme(examples, scheme, name)
    findings += _check_labels(train, dev, scheme)
    tags = Counter(tag for example in train for tag in example.tags or ())
    if len(tags) > 1:
        findings += text_checks.check_constant(tags, "words")
        if scheme != "plain" and schemes.spells_entities(tags) and schemes.OUTSIDE in tags:
            counts = Counter(
                chunk.type for example in train for chunk in schemes.chunks(example.tags or ())
            )
            rare = [f"{kind} ({count})" for kind, count in counts.items() if count < FEW]
            if rare:
                message = f"types with fewer than {FEW} training entities are hardly learned: "
                findings.append(Finding("balance", "warning", message + places(rare)))
    overlap = text_checks.check_overlap(train, dev, lambda example: example.words, "sentences")
    return findings + overlap


def _check_rows(examples: Many[TagExample]) -> list[Finding]:
    several = [e for e in examples if len(e.words) > 1]
    lone = [e.where for e in examples if len(e.words) == 1]
    positions = [e.where for e in examples if all(map(_POSITION.fullmatch, e.words))]
    counts = [e.where for e in several if e.words in (_numbers(0, e.words), _numbers(1, e.words))]
    white = [_at(e, n) for e in examples for n, word in enumerate(e.words) if not word.strip()]
    limits = {  # what a few sentences may be, but not most of them
        "sentence(s) has|have a single word": (
            lone, 10 < len(examples) < 1.1 * len(lone), "Join the words of each.",
        ),
        "sentence(s) has|have a digit after each character, as in Weibo's data, unlike texts": (
            positions, 2 * len(positions) > len(examples), "Remove the digits.",
        ),
        "sentence(s) has|have the numbers of their words as words": (
            counts, 2 * len(counts) >= len(several), "Name the column of words.",
        ),
    }  # fmt: skip
    findings = list[Finding]()
    for fault, (locations, are_most, fix) in limits.items():
        if are_most:
            findings += text_checks.report_rows("rows", locations, fault, fix, "warning")
    empty, bare = "sentence(s) has|have no word", "sentence(s) has|have words without a tag"
    findings += text_checks.check_rows(examples, empty, lambda e: not e.words, "Remove them.")
    fix = "Tag all of their words or remove them."
    findings += text_checks.check_rows(
        examples, bare, lambda e: e.tags is None or not all(e.tags), fix, check="labels"
    )
    fault = "word(s) is|are empty or white space, and read as unknown"
    return findings + text_checks.report_rows("rows", white, fault, severity="warning")


def _numbers(first: int, words: Many[str]) -> tuple[str, ...]:
    """Return numbers, one for each word."""
    return tuple(map(str, range(first, first + len(words))))


def _check_table(examples: Many[TagExample], name: str) -> list[Finding]:
    """Report texts with a label each, a header, and tags that are hardly tags."""
    rows = [
        (e.where, number, word, tag)
        for e in examples
        for number, (word, tag) in enumerate(zip(e.words, e.tags or (), strict=False), 1)
    ]
    blank = [row for row in rows if any(len(field.split()) > 1 for field in row[2:])]
    inline = [row for row in rows if any(map(_INLINE.fullmatch, row[2:]))]
    texts = f"For labels of texts set {argument(task='classify')}."
    for faulty, fault, fix in (
        (blank, "have blanks, like texts with a label each", texts),
        (inline, "hold a word with its tag", "Write each word on its own line."),
    ):
        if 2 * len(faulty) > len(rows):
            where, number, *pair = faulty[0]
            message = f"{len(faulty)} of {len(rows)} words of the {name} data or their tags {fault}"
            message += f": {where} word {number} {_shown(*pair)}"
            return [Finding("rows", "error", message, fix=f"{fix} {_FORM}")]
    tags = Counter(tag for *_, tag in rows)
    where, _, *pair = rows[0]
    if all(field.lower() in _HEADER for field in pair) and tags[pair[1]] == 1:
        message = f"the {name} data begins with a header, which would be learned: {where} "
        fix = f"Remove that line if words and tags follow. {texts} {_FORM}"
        return [Finding("rows", "error", message + _shown(*pair), fix=fix)]
    same = [f"{where} {word!r}" for where, _, word, tag in rows if word == tag]
    if len(rows) >= FEW and 2 * len(same) > len(rows):
        message = f"most tags of the {name} data are the words themselves: {places(same)}"
        fix = f"Name the column of tags: {argument(label='3')}."
        return [Finding("labels", "warning", message, fix=fix)]
    if len(rows) >= MANY and 2 * len(tags) > len(rows):
        message = f"the {len(rows)} words of the {name} data have {len(tags)} different tags"
        message += f", such as {_shown(*pair)}"
        fix = f"Check the order of the columns. {_FORM}"
        return [Finding("labels", "warning", message, fix=fix)]
    return []


def _shown(*pair: str) -> str:
    word, tag = (field if len(field) <= SHOWN else f"{field[:SHOWN]}…" for field in pair)
    return f"{word!r} with the tag {tag!r}"


def _check_scheme(examples: Many[TagExample], scheme: schemes.Scheme, name: str) -> list[Finding]:
    """Report the scheme of the tags and where they break its rules."""
    tags = [example.tags or () for example in examples]
    actual = schemes.find_scheme(tags) if scheme == "auto" else scheme
    if actual == "plain":
        return _check_mixed(examples, name) if scheme == "auto" else []
    foreign = schemes.foreign_tags((tag for row in tags for tag in row), actual)
    if foreign:
        message = f"the {name} data has tags that {actual.upper()} lacks: {places(sorted(foreign))}"
        fix = "Set task.scheme=auto, or plain for tags of single words."
        return [Finding("labels", "error", message, "task.scheme", fix)]
    findings = []
    if actual != "iob2":
        message = f"the tags of the {name} data are {actual.upper()}; they are read as IOB2"
        findings.append(Finding("labels", "note", message))
    flaws = ((e, n) for e in examples for n in schemes.flaws(e.tags or (), actual))
    broken = [f"{_at(e, n)} {(e.tags or ())[n]}" for e, n in flaws]
    fault = f"tag(s) of the {name} data breaks|break the rules of {actual.upper()}"
    fix = "They are read as by conlleval: a tag that continues nothing begins an entity."
    return findings + text_checks.report_rows("labels", broken, fault, fix, "warning")


def _check_mixed(examples: Many[TagExample], name: str) -> list[Finding]:
    """Report plain tags that are likely something else: entities spelled in another way, …."""
    rows = [(example, tag) for example in examples for tag in dict.fromkeys(example.tags or ())]
    tags = Counter(tag for example in examples for tag in example.tags or ())
    likely = {tag: _likely_tag(tag) for tag in tags}
    changed = [f"{new} for {tag}" for tag, new in likely.items() if new != tag]
    remaining = [
        f"{example.where} ({tag!r})" for example, tag in rows if not schemes.spells_entities([tag])
    ]
    so = "so all are read as tags of single words"
    if any("-" in tag for tag in likely.values()) and schemes.spells_entities(likely.values()):
        message = f"the {name} data seems to have tags of entities in another spelling, {so}: "
        fix = f"If entities are meant, write {places(changed)}."
    elif any("-" in tag and schemes.spells_entities([tag]) for tag in tags):
        message = f"the {name} data has tags of entities, such as B-PER, and others, {so}: "
        fix = "Correct these tags if entities are meant."
    elif any(_BRACKETS.match(tag) for tag in tags):
        message = f"the {name} data has brackets that nest or do not close as tags, {so}: "
        fix = "Name another column of tags."
    elif 2 * tags[schemes.OUTSIDE] > tags.total() and len(tags) > 1:
        message = f"the {name} data has the tag O and types without B and I, {so}: "
        fix = "If they mark entities, write I-PER for PER, and B-PER where one follows another."
    elif len(tags) > 1 and all(tag.lstrip("-").isdecimal() for tag in tags):
        message = f"the {name} data has numbers as tags, {so}: "
        fix = "If they are tags, write the tags, such as B-PER."
    elif len(tags) > 1 and 2 * tags["_"] > tags.total():
        message = f"the {name} data has the tag _, which marks empty fields of CoNLL-U, {so}: "
        remaining = [f"{example.where} ({tag!r})" for example, tag in rows if tag == "_"]
        fix = "Name another column of tags, such as upos."
    else:
        return []
    return [Finding("labels", "warning", message + places(remaining), fix=fix)]


def _likely_tag(tag: str) -> str:
    """Return the tag of an entity that another spelling probably means, or the tag.

    Examples: B_PER, PER-B and b-PER → B-PER; 0, o, OUT and "-" → O.
    """
    if tag in _OUTSIDE_MARKS:
        return schemes.OUTSIDE
    if schemes.spells_entities([tag]):
        return tag
    for pattern in _SPELLINGS:
        if match := pattern.fullmatch(tag):
            return f"{match['prefix'].upper()}-{match['type']}"
    return tag


def _at(example: TagExample, position: int) -> str:
    return f"{example.where} word {position + 1} {example.words[position]!r}"


def _check_labels(
    train: Many[TagExample], dev: Many[TagExample], scheme: schemes.Scheme
) -> list[Finding]:
    """Report missing types of entities or tags, and those that only the dev data has."""
    train_tags, dev_tags = (
        Counter(tag for example in examples for tag in example.tags or ())
        for examples in (train, dev)
    )
    entities = scheme != "plain" and schemes.spells_entities(train_tags)
    train_types, dev_types = (
        set(types_of(some)) if entities else set(some) for some in (train_tags, dev_tags)
    )
    kind = "types of entities" if entities else "tags"
    findings = text_checks.check_case(sorted(train_types))
    if len(train_types) < (1 if entities else 2):
        predicted = ", ".join(map(repr, train_tags)) or "all absent"
        message = f"there is nothing to learn: the tags of the training data are {predicted}"
        fix = "Name another column of tags, or give more data."
        findings.append(Finding("labels", "error", message, fix=fix))
    plain = {tag for tag in dev_tags if not schemes.spells_entities([tag])} if entities else set()
    unknown = dev_types - train_types | plain
    if unknown:
        faulty = {t for t in dev_tags if t in unknown}
        faulty |= {t for t in dev_tags if entities and not unknown.isdisjoint(types_of([t]))}
        where = [e.where for e in dev if not faulty.isdisjoint(e.tags or ())]
        message = f"the dev data has {kind} that training data lacks, {places(sorted(unknown))}: "
        fix = f"Those of the training data are {places(sorted(train_types))}."
        findings.append(Finding("labels", "error", message + places(where), fix=fix))
    if dev and train_types - dev_types:
        message = f"the dev data has none of the {kind} {places(sorted(train_types - dev_types))}"
        findings.append(Finding("labels", "warning", message))
    return findings
