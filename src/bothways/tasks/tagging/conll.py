"""Columns of words and tags, as in CoNLL: a word a line, empty lines between sentences.

Fields are separated by tabs if the line has one, else by blanks. A line "-DOCSTART-" or "# newdoc"
begins a document; comments such as "# sent_id = 3" precede a sentence. Any other line that begins
with "#" is a word, as in tweets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bothways.core.advice import argument
from bothways.core.errors import DataError
from bothways.core.terminal import counted

DOCSTART = "-DOCSTART-"
_COMMENT = re.compile(r"#\s+(newdoc\b|newpar\b|id\s|[\w.]+ = )")
_DOCUMENT = re.compile(r"#\s+newdoc\b")
_ENTITY_TAG = re.compile(r"O|[BIESLUM]-.+")


@dataclass(frozen=True)
class ColumnSentence:
    """One sentence.

    Attributes:
        words: of the sentence.
        tags: one a word; None if they are not read.
        line: its first line.
        document: the number of its document.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    line: int
    document: int


def read_columns(
    lines: Iterable[tuple[int, str]], where: str, word: int = 0, tag: int | None = -1
) -> Iterator[ColumnSentence]:
    """Yield the sentences of numbered lines.

    Args:
        where: the file, for messages.
        word, tag: the fields of a line, from 0, or from the end below 0; no `tag` to read none.

    Raises:
        DataError: a line without that field, or whose tag is its word; lines of different numbers
            of fields, if fields are counted from the end; no line with a word.
    """
    sentences = _sentences(lines, where, word, tag)
    first = next(sentences, None)
    if first is None:
        raise DataError("has no word", where=where, fix="Give a file with at least one sentence.")
    yield first
    yield from sentences


def are_columns(lines: Iterable[str]) -> bool:
    """Return whether all lines are words with entity tags, and at least two are."""
    rows = [
        _fields(line)
        for line in lines
        if line.strip() and not line.startswith(DOCSTART) and not _COMMENT.match(line)
    ]
    return len(rows) > 1 and all(
        len(fields) > 1 and _ENTITY_TAG.fullmatch(fields[-1]) for fields in rows
    )


def _sentences(
    lines: Iterable[tuple[int, str]], where: str, word: int, tag: int | None
) -> Iterator[ColumnSentence]:
    rows: list[tuple[str, ...]] = []
    first = document = width = 0
    for number, line in lines:
        fields = _fields(line)
        begins = fields[0] == DOCSTART or (not rows and _DOCUMENT.match(line) is not None)
        if not (begins or not line.strip() or (not rows and _COMMENT.match(line))):
            chosen = _chosen(fields, word, tag, f"{where}:{number}")
            first, width = first if rows else number, width or len(fields)
            if tag is not None and min(word, tag) < 0 and len(fields) != width:
                found = f"{counted(len(fields), 'columns')} ({' | '.join(fields)[:60]})"
                what = f"has {found}, and the first line "
                numbers = argument(text="0", label="1")
                fix = f"Give all lines the same columns, or name two by number: {numbers}."
                raise DataError(f"{what}{width}", where=f"{where}:{number}", fix=fix)
            rows.append(chosen)
            continue
        if rows:
            yield _sentence(rows, first, document, tag)
            rows = []
        document += begins
    if rows:
        yield _sentence(rows, first, document, tag)


def _fields(line: str) -> list[str]:
    if "\t" in line:
        return [field.strip(" ") for field in line.rstrip().split("\t")]
    return [field for field in line.split(" ") if field] or [""]


def _chosen(fields: list[str], word: int, tag: int | None, where: str) -> tuple[str, ...]:
    wanted = [word] if tag is None else [word, tag]
    count = len(fields)
    if any(not -count <= place < count for place in wanted) or (
        tag is not None and word % count == tag % count
    ):
        what = f"has {count} column{'s' * (count > 1)} ({' | '.join(fields)[:60]}); "
        what += f"the word is to be column {word}"
        if tag is not None:
            what += f" and its tag {'the last one' if tag < 0 else f'column {tag}'}"
        fix = (
            "Each line is a word and its tag, separated by a tab or blanks; name other columns by "
            f"number: {argument(text='1', label='3')}."
        )
        raise DataError(what, where=where, fix=fix)
    return tuple(fields[place] for place in wanted)


def _sentence(
    rows: list[tuple[str, ...]], first: int, document: int, tag: int | None
) -> ColumnSentence:
    words = tuple(fields[0] for fields in rows)
    tags = None if tag is None else tuple(fields[1] for fields in rows)
    return ColumnSentence(words, tags, first, document)
