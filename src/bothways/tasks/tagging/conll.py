"""Columns of words and tags, as in CoNLL: a word a line, empty lines between sentences.

Fields are separated by tabs if the line has one, else by blanks. The first lines of a file show
what its columns are:

    counter      1, 2, 3 … in each sentence, or the number of the sentence: no words. Rows such as
                 2-3 and 3.1 (CoNLL-U) are not words either
    word         the first column after the counters
    tag          the first column of entity tags, other than chunks such as B-NP: others hold nested
                 ones; entity tags in attributes (name=B-PER|SpaceAfter=No) or in brackets ((PER*
                 and *)); else UPOS in CoNLL-U; else the last column

Other columns are named by number, from 0. CoNLL-U, CoNLL-2012, "# global.columns" and a first line
with the name of the words name theirs, and an attribute is named by its key. A line "-DOCSTART-",
"# newdoc" or "#begin document" begins a document. A line that begins with "#" is a comment if it is
like "# sent_id = 3", or if it precedes a sentence and does not fit the columns; else it is a word.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

from bothways.core.config.values import is_integer
from bothways.core.errors import DataError, argument
from bothways.core.terminal import listed, quantity
from bothways.tasks.tagging.schemes import OUTSIDE, tag_part

DOCSTART = "-DOCSTART-"
SAMPLE = 1000
"""Number of lines that show the layout of a file."""

_COMMENT = re.compile(r"#\s+(newdoc\b|newpar\b|id\s|[\w.]+ = )|#(begin|end) document\b")
_DOCUMENT = re.compile(r"#\s+newdoc\b|#begin document\b")
_GLOBAL_COLUMNS = re.compile(r"#\s*global\.columns\s*=\s*(.+)")
_ENTITY_TAG = re.compile(r"O|[BIESLUM]-.+")
_NO_WORD = re.compile(r"\d+[-–]\d+|\d+\.\d+")
_BRACKETS = re.compile(r"(?=.)((?:\([^()*|\s]+)*)\*?(\)*)")
_WORD_NAMES = {"word", "words", "token", "tokens", "form"}
_CHUNKS = {"NP", "VP", "PP", "ADJP", "ADVP", "SBAR", "PRT", "CONJP", "INTJ", "LST", "UCP"}
"""The types of CoNLL-2000's chunks."""
_CONLL_U = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_CONLL_2009 = (
    "id", "form", "lemma", "plemma", "pos", "ppos", "feat", "pfeat", "head", "phead", "deprel",
    "pdeprel", "fillpred", "pred",
)  # fmt: skip
"""A column for the arguments of each predicate of the sentence follows."""
_CONLL_2012 = (
    "document", "part", "id", "form", "pos", "parse", "lemma", "frameset", "sense", "speaker",
    "ner",
)  # fmt: skip


class ColumnSentence(NamedTuple):
    """A sentence: its words, their tags if they are read, its first line, and its document."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    line: int
    document: int


@dataclass(frozen=True)
class ColumnLayout:
    """The meaning of the columns of a file.

    Attributes:
        word, tag: the fields of a line, from 0; no `tag` to read none.
        width: the usual number of fields of a line; None where it varies.
        fixed: whether every line must have this number.
        counter: the column that counts words; None without one.
        sentence: the column with the number of the sentence; None without one.
        key: the attribute that is the tag, of those in the column; None for all of the column.
        brackets: whether the tags are brackets.
        entities: whether all tags are those of entities.
        names: of the columns, if the format or the first line has some.
        header: the fields of a line that names the columns; empty without one.
        known: all names by which columns can be asked for.
        note: says which columns are read; empty for the first and the last.
        unused: the columns that are not read, by number and name.
    """

    word: int = 0
    tag: int | None = None
    width: int | None = None
    fixed: bool = False
    counter: int | None = None
    sentence: int | None = None
    key: str | None = None
    brackets: bool = False
    entities: bool = False
    names: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    note: str = ""
    unused: tuple[str, ...] = ()

    def named(self, at: int) -> str:
        """Return the number of a column with its name, if it has one."""
        return f"{at} ({self.names[at]})" if at < len(self.names) else str(at)


def find_layout(
    lines: list[str],
    location: str,
    text: str | None = None,
    label: str | None = None,
    *,
    labelled: bool = True,
) -> ColumnLayout:
    """Return the layout of a file from its first lines.

    Args:
        location: the file, for messages.
        text, label: the columns of words and tags that are asked for: a number or a name.

    Raises:
        DataError: a column that is asked for is a name, and the file has no such name.
    """
    header = _header(lines)
    sentences, width, names = _sample([x for x in lines if not header or (*_fields(x),) != header])
    columns = [[[row[at] for row in rows] for rows in sentences] for at in range(width)]
    flat = [[value for values in column for value in values] for column in columns]
    entities = {
        at: types for at, values in enumerate(flat) if (types := _entity_types(values)) is not None
    }
    # A counter or a number of the sentence has a column after it that may hold words.
    before_words = [at for at in range(width - 1) if at + 1 not in entities]
    counter = next((at for at in before_words if _counts(columns[at])), None)
    sentence = next((at for at in before_words if _numbers_sentences(columns[at])), None)
    first = max(-1 if at is None else at for at in (counter, sentence)) + 1
    brackets = [at for at in range(first + 1, width) if _are_brackets(flat[at])]
    attributes = {
        key: at
        for at in reversed(range(first + 1, width))
        for key in reversed(_entity_keys(flat[at]))
    }
    names = names or tuple(name.lower() for name in header)
    if not names and counter == 0:
        names = _CONLL_U if width == len(_CONLL_U) else ()
        if width >= len(_CONLL_2009) and all(value in ("_", "Y") for value in flat[12]):
            names = _CONLL_2009
    usual_width = None if names in (_CONLL_2009, _CONLL_2012) else width
    known = (*names, *attributes)
    word, tag, key, fixed = _index(text, "text", names, location), None, None, False
    if labelled and label in attributes:
        tag, key = attributes[label], label
    elif labelled:
        tag = _index(label, "label", names, location)
        if tag is None:
            fixed = usual_width is not None
            # In the order of the table above.
            tags = [at for at in entities if at > (first if word is None else word)]
            if word is None and width == 2 and [*entities] == [0] and entities[0]:
                word, tag = 1, 0  # tags before their words
            elif attributes and width - 1 not in tags:
                tag = next(iter(attributes.values()))
            elif tags:
                tag = next((at for at in tags if entities[at] - _CHUNKS), tags[-1])
            elif brackets and "ner" not in names:
                tag = brackets[0]
            else:
                speech = [names.index(name) for name in ("ner", "upos", "pos") if name in names]
                tag = speech[0] if speech else width - 1
        key = next((name for name, at in attributes.items() if at == tag), None)
    layout = ColumnLayout(
        word=first if word is None else word, tag=tag, width=usual_width, fixed=fixed,
        counter=counter, sentence=sentence, key=key, brackets=tag in brackets,
        entities=tag is not None and bool(entities.get(tag)), names=names, header=header,
        known=known,
    )  # fmt: skip
    used = (layout.word, tag, counter, sentence)
    unused = tuple(layout.named(at) for at in range(width) if labelled and at not in used)
    note = _note(layout, width, [*entities, *brackets], text is None, label is None)
    return replace(layout, note=note, unused=unused)


def _index(column: str | None, role: str, names: Many[str], location: str) -> int | None:
    """Return the number of a column that is asked for; None if none is."""
    if column is None or column.isdecimal():
        return None if column is None else int(column)
    if column.lower() in names:
        return names.index(column.lower())
    if names:
        message = f"has no column {role} = {column!r}; it has {listed(names, 20)}"
    else:
        message = f"its columns have numbers, and {role} = {column!r} is a name"
    fix = f"Name columns by their number, from 0: {argument(text='0', label='3')}."
    raise DataError(message, where=location, fix=fix)


def _header(lines: list[str]) -> tuple[str, ...]:
    """Return the fields of a first line that names the columns of words and of entity tags."""
    filled = (line for line in lines if line.strip() and not line.startswith(("#", DOCSTART)))
    rows = [tuple(_fields(line)) for line in filled]
    if len(rows) < 2 or not any(name.lower() in _WORD_NAMES for name in rows[0]):
        return ()
    columns = zip(*(row for row in rows[1:] if len(row) == len(rows[0])), strict=True)
    has_tags = any(map(_entity_types, map(list, columns)))
    return rows[0] if has_tags and not any(map(_ENTITY_TAG.fullmatch, rows[0])) else ()


def _sample(lines: list[str]) -> tuple[list[list[list[str]]], int, tuple[str, ...]]:
    """Return the rows of each sentence, their usual width, and the names of the columns.

    Rows that begin with "#" are dropped: they may be comments.
    """
    marked = all(line.startswith("#") for line in lines if line.strip())
    groups = [
        [_fields(line) for line in group if marked or not line.startswith("#")]
        for blank, group in itertools.groupby(
            (line for line in lines if not _COMMENT.match(line)),
            lambda line: not line.strip() or line.startswith(DOCSTART),
        )
        if not blank
    ]
    # The most frequent number of fields: a few lines may be broken or comments
    widths = Counter(len(fields) for group in groups for fields in group)
    width = widths.most_common(1)[0][0] if widths else 1
    header = next((match[1] for line in lines if (match := _GLOBAL_COLUMNS.match(line))), "")
    names = tuple(header.lower().split())
    if not names and any(line.startswith("#begin document") for line in lines):
        names, width = _CONLL_2012, len(_CONLL_2012)
        groups = [[fields[:width] for fields in group] for group in groups]
    sentences = [[fields for fields in group if len(fields) == width] for group in groups]
    return [rows for rows in sentences if rows], width, names


def _entity_types(values: list[str]) -> set[str] | None:
    """Return the types of a column of entity tags; None for another column."""
    tag_parts = [tag_part(value) for value in values]
    recognised = [tag for tag in tag_parts if tag is not None]
    if not values or len(recognised) < 0.98 * len(values):
        return None
    types = {tag.type for tag in recognised if tag.type}
    return types if types != {"_"} or {*values} <= {"B", "I", OUTSIDE} else None


def _counts(sentences: list[list[str]]) -> bool:
    """Return True if a column counts from 0 or 1, in each sentence or in all of them."""
    # 1 2 3 1 2 counts in each sentence, 1 2 3 4 5 in all of them; 1 1 2 does not count
    start, preceding, largest = -1, -1, 0
    for column in sentences:
        is_first = True
        for value in itertools.filterfalse(_NO_WORD.fullmatch, column):
            if not (is_integer(value) and value.isascii()):
                return False
            number = int(value)
            start = number if start < 0 else start
            restarts = number == start < 2 and (is_first or len(sentences) == 1)
            if number != preceding + 1 and not restarts:
                return False
            preceding, largest, is_first = number, max(largest, number), False
    return largest > 1


def _numbers_sentences(sentences: list[list[str]]) -> bool:
    """Return True if a column has the number of the sentence in each row."""
    values = [value for column in sentences for value in column]
    if not all(is_integer(value) and value.isascii() for value in values):
        return False
    numbers = [int(value) for value in values]
    steps = [following - preceding for preceding, following in itertools.pairwise(numbers)]
    constant = len(sentences) == 1 or all(len({*column}) == 1 for column in sentences)
    return constant and {*steps} == {0, 1} and len(numbers) >= 2 * len({*numbers})


def _attributes(value: str) -> Mapping[str, str]:
    return dict(pair.split("=", 1) for pair in value.split("|") if "=" in pair)


def _entity_keys(values: list[str]) -> list[str]:
    """Return the keys of attributes that are entity tags, the most frequent first."""
    found: dict[str, Counter[str]] = {}
    for value in values:
        for key, tag in _attributes(value).items() if "=" in value else ():
            found.setdefault(key, Counter())[tag] += 1
    keys = [key for key, tags in found.items() if all(map(_ENTITY_TAG.fullmatch, tags))]
    return sorted(keys, key=lambda key: -found[key].total())


def _are_brackets(values: list[str]) -> bool:
    """Return True if a column holds spans in brackets, which do not nest."""
    depth, opened = 0, 0
    for value in values:
        match = _BRACKETS.fullmatch(value)
        if match is None:
            return False
        opened += match[1].count("(")
        depth += match[1].count("(")
        if depth > 1 or match[2].count(")") > depth:
            return False
        depth -= match[2].count(")")
    return opened > 0


def _note(
    layout: ColumnLayout, width: int, entities: list[int], text_open: bool, label_open: bool
) -> str:
    """Return a note on the columns that are read; empty for the first and the last one."""
    remarks, tag, named = [], layout.tag, layout.named
    if layout.header:
        remarks.append("the first line names the columns")
    if text_open and layout.word:
        remarks.append(f"words are column {named(layout.word)}")
    counters = [named(at) for at in (layout.counter, layout.sentence) if at is not None]
    if counters:
        numbers = " and ".join(counters)
        remarks.append(f"column {numbers} counts, and rows such as 2-3 and 3.1 are no words")
    if tag is not None and layout.key is not None:
        remarks.append(f"tags are {layout.key}=… in column {named(tag)}")
    elif tag is not None and layout.brackets:
        remarks.append(f"tags are the brackets of column {named(tag)}, such as (PER*")
    elif tag is not None and label_open and tag != width - 1:
        remarks.append(f"tags are column {named(tag)}")
    remaining = [at for at in entities if at not in (tag, layout.word)]
    if remaining and label_open and tag is not None and (tag != width - 1 or layout.brackets):
        columns = " or ".join(argument(label=str(at)) for at in remaining)
        remarks.append(f"other columns of entities: {columns}")
    return "; ".join(remarks)


def are_columns(lines: Iterable[str]) -> bool:
    """Return True if all lines are words with entity tags, and at least two are."""
    rows = [
        _fields(line)
        for line in lines
        if line.strip() and not line.startswith(DOCSTART) and not _COMMENT.match(line)
    ]
    return len(rows) > 1 and all(
        len(fields) > 1 and _ENTITY_TAG.fullmatch(fields[-1]) for fields in rows
    )


_Row = tuple[int, str, str | None]
"""The line of a word, the word, and the field with its tag."""


def read_columns(
    lines: Iterable[tuple[int, str]], where: str, layout: ColumnLayout
) -> Iterator[ColumnSentence]:
    """Yield the sentences of numbered lines of a file.

    Raises:
        DataError: a line without a field of the layout, or whose tag is its word; lines of
            different numbers of fields, if the layout has a width; brackets that nest or do not
            close; no line with a word.
    """
    rows: list[_Row] = []
    document, count, group, empty = 0, -1, "", True
    for number, line in itertools.chain(lines, [(0, "")]):  # an empty line ends the last sentence
        fields = _fields(line)
        begins = fields[0] == DOCSTART or (not rows and _DOCUMENT.match(line) is not None)
        if layout.header and tuple(fields) == layout.header:
            continue
        if begins or not line.strip() or _is_comment(line, fields, layout, begun=bool(rows)):
            if rows and (begins or not line.strip()):
                yield _sentence(rows, document, where, layout)
                rows = []
            document += begins
            continue
        counter = _field(fields, layout.counter)
        if counter is not None and _NO_WORD.fullmatch(counter):
            continue
        selected = _chosen(fields, layout, f"{where}:{number}")
        restarts = counter is not None and is_integer(counter) and int(counter) <= count
        if rows and (restarts or _field(fields, layout.sentence) not in (None, group)):
            yield _sentence(rows, document, where, layout)
            rows = []
        count = int(counter) if counter is not None and is_integer(counter) else -1
        group, empty = _field(fields, layout.sentence) or "", False
        rows.append((number, *selected))
    if empty:
        raise DataError("has no word", where=where, fix="Give a file with at least one sentence.")


def _is_comment(line: str, fields: list[str], layout: ColumnLayout, *, begun: bool) -> bool:
    """Return True if a line is a comment, not a word; `begun` if a word precedes it."""
    counts = 0 in (layout.counter, layout.sentence)
    if begun or counts or not line.startswith("#"):
        return counts and line.startswith("#")
    tag = _field(fields, layout.tag)
    fits = layout.width in (None, len(fields)) and (layout.tag is None or tag is not None)
    return (
        bool(_COMMENT.match(line)) or not fits or (layout.entities and tag_part(tag or "") is None)
    )


def _field(fields: list[str], at: int | None) -> str | None:
    return fields[at] if at is not None and at < len(fields) else None


def _fields(line: str) -> list[str]:
    if "\t" in line:
        return [field.strip(" ") for field in line.rstrip(" \t\r\n").split("\t")]
    return [field for field in line.split(" ") if field] or [""]


def _chosen(fields: list[str], layout: ColumnLayout, location: str) -> tuple[str, str | None]:
    """Return the word and the field of its tag."""
    word, tag, count = layout.word, layout.tag, len(fields)
    description = f"has {quantity(count, 'column(s)')} ({' | '.join(fields)[:60]})"
    if layout.fixed and count != layout.width and count > 1:
        numbers = argument(text="0", label="1")
        fix = f"Give all lines the same columns, or name two by number: {numbers}."
        raise DataError(f"{description}, and most lines {layout.width}", where=location, fix=fix)
    if word >= count or word == tag or (tag is not None and tag >= count):
        message = f"{description}; the word is to be column {word}"
        if tag is not None:
            message += f" and its tag {'the last one' if layout.fixed else f'column {tag}'}"
        columns = argument(text="1", label="3")
        fix = "Each line is a word, a tab or a blank, and its tag. Name other columns by number, "
        fix += f"from 0: {columns}."
        raise DataError(message, where=location, fix=fix)
    return fields[word], None if tag is None else fields[tag]


def _sentence(
    rows: list[_Row], document: int, location: str, layout: ColumnLayout
) -> ColumnSentence:
    words, tags = tuple(word for _, word, _ in rows), None
    if layout.tag is not None:
        fields = [field or "" for _, _, field in rows]
        if layout.key is not None:
            fields = [_attributes(field).get(layout.key, OUTSIDE) for field in fields]
        elif layout.brackets:
            fields = _without_brackets(rows, location)
        tags = tuple(fields)
    return ColumnSentence(words, tags, rows[0][0], document)


def _without_brackets(rows: list[_Row], where: str) -> list[str]:
    """Return the tags of spans in brackets: (PER*, *) and (LOC) become B-PER, I-PER and B-LOC.

    Raises:
        DataError: a field is not a bracket, or brackets nest or are not closed in the sentence.
    """
    tags, kind, begun = list[str](), "", ""
    fix = "Words have *, or (TYPE* and *) around a span, or (TYPE) for one word; spans do not nest."
    for number, _, field in rows:
        match = _BRACKETS.fullmatch(field or "")
        location = f"{where}:{number}"
        if match is None:
            raise DataError(f"{field!r} is no span in brackets", where=location, fix=fix)
        kinds, closed = match[1].split("(")[1:], match[2].count(")")
        if len(kinds) + bool(kind) > 1 or closed > len(kinds) + bool(kind):
            raise DataError(f"{field!r} does not fit the spans before it", where=location, fix=fix)
        prefix, kind = ("B", kinds[0]) if kinds else ("I", kind)
        begun = location if kinds else begun
        tags.append(f"{prefix}-{kind}" if kind else OUTSIDE)
        kind = "" if closed else kind
    if kind:
        raise DataError(f"the span ({kind} is not closed", where=begun, fix=fix)
    return tags
