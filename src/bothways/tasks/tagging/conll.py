"""Columns of words and tags, as the CoNLL shared tasks have them: a word a line, an empty line after each sentence.

Fields stand between tabs if there is one in the line, else between blanks. A line "-DOCSTART-" begins a document, as does
"# newdoc"; comments such as "# sent_id = 3" go before a sentence. Anything else that begins with "#" is a word, as in tweets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bothways.core.errors import DataError

DOCSTART = "-DOCSTART-"
_COMMENT = re.compile(r"#\s+(newdoc\b|newpar\b|id\s|[\w.]+ = )")
_DOCUMENT = re.compile(r"#\s+newdoc\b")
_TAG_OF_ENTITY = re.compile(r"O|[BIESLUM]-.+")


@dataclass(frozen=True)
class Lines:
    """One sentence: words, tags (none if they were not asked for), its first line, and the number of its document."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    line: int
    document: int


def read_columns(
    lines: Iterable[tuple[int, str]], where: str, word: int = 0, tag: int | None = -1
) -> Iterator[Lines]:
    """The sentences of numbered lines, streamed.

    Args:
        where: the file, for messages.
        word, tag: the fields of a line, from 0, or from the end below 0; no tag where none are wanted.

    Raises:
        DataError: a line without that field, or whose tag is its word; no line with a word.
    """
    sentences = _sentences(lines, where, word, tag)
    first = next(sentences, None)
    if first is None:
        raise DataError("holds no word", where=where, fix="Give a file with at least one sentence.")
    yield first
    yield from sentences


def are_columns(lines: Iterable[str]) -> bool:
    """Whether these lines of a .txt file are words with tags of entities, several of them and nothing else."""
    rows = [
        _fields(line)
        for line in lines
        if line.strip() and not line.startswith(DOCSTART) and not _COMMENT.match(line)
    ]
    return len(rows) > 1 and all(
        len(fields) > 1 and _TAG_OF_ENTITY.fullmatch(fields[-1]) for fields in rows
    )


def _sentences(
    lines: Iterable[tuple[int, str]], where: str, word: int, tag: int | None
) -> Iterator[Lines]:
    found: list[tuple[str, ...]] = []
    first = document = 0
    for number, line in lines:
        fields = _fields(line)
        begins = fields[0] == DOCSTART or (not found and _DOCUMENT.match(line) is not None)
        if not (begins or not line.strip() or (not found and _COMMENT.match(line))):
            first = first if found else number
            found.append(_chosen(fields, word, tag, f"{where}:{number}"))
            continue
        if found:
            yield _sentence(found, first, document, tag)
            found = []
        document += begins
    if found:
        yield _sentence(found, first, document, tag)


def _fields(line: str) -> list[str]:
    if "\t" in line:
        return [field.strip(" ") for field in line.rstrip().split("\t")]
    return [field for field in line.split(" ") if field] or [""]


def _chosen(fields: list[str], word: int, tag: int | None, where: str) -> tuple[str, ...]:
    """Word and tag."""
    wanted = [word] if tag is None else [word, tag]
    count = len(fields)
    if any(not -count <= place < count for place in wanted) or (
        tag is not None and word % count == tag % count
    ):
        what = (
            f"has {count} {'column' if count == 1 else 'columns'} ({' | '.join(fields)[:60]}), and "
        )
        what += f"column {word} is to be the word" + (
            "" if tag is None else f", {'the last' if tag < 0 else f'column {tag}'} its tag"
        )
        fix = "Each line is a word and its tag, tab or blanks between; name other columns by number: --text 1 --label 3."
        raise DataError(what, where=where, fix=fix)
    return tuple(fields[place] for place in wanted)


def _sentence(found: list[tuple[str, ...]], first: int, document: int, tag: int | None) -> Lines:
    words = tuple(fields[0] for fields in found)
    return Lines(
        words, None if tag is None else tuple(fields[1] for fields in found), first, document
    )
