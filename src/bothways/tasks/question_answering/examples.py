"""Questions on texts in files as SQuAD's or tables, and the exact match and F1 of their answers.

CMRC 2018, DRCD and XQuAD share SQuAD's form. Rows are as on the Hub: {"id", "question", "context",
"answers": {"text": […], "answer_start": […]}}, where no text means that the context has no answer.

An answer is a text and the character at which it begins, counted in code points. Files are not
always right about the second: the occurrence nearest to the given place is used (`located`).

Metrics of words: the formulas of SQuAD 2.0's official script (Rajpurkar et al. 2018), which equal
those of 1.1 wherever an answer has a word. Lower-cased, without ASCII punctuation and the words a,
an, the, two answers match exactly or share words (F1); of several right answers the nearest counts.

Of characters: in a text without spaces between words these formulas would compare whole sentences.
There (`unspaced`) the formulas of CMRC 2018's official script apply (Cui et al. 2019): a token is
an ideograph, and F1 counts the longest run of tokens that both answers have. Differences: kana
count as ideographs, and words in Latin letters are split at white space and symbols, where that
script calls NLTK.

All values are shares from 0 to 1.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np

from bothways.core.errors import DataError
from bothways.core.files import local_path
from bothways.data.tables import plain_value, read_json_text
from bothways.data.text_io import file_at
from bothways.tasks.base import Columns, Row
from bothways.tasks.columns import Column, cell_of, text_of

Answers = tuple[tuple[str, int], ...]

ANYWHERE = -1
"""The begin of an answer whose place the data does not give: its first occurrence is used."""

_IMPOSSIBLE = "is_impossible"
_FIELDS = ("paragraphs", "context", "qas", "id", "question", "answers", _IMPOSSIBLE)
"""The fields of SQuAD's form that are read."""
_FORM = (
    'SQuAD\'s form is {"data": [{"paragraphs": [{"context": "…", "qas": [{"id": "…", '
    '"question": "…", "answers": […]}]}]}]}.'
)


@dataclass(frozen=True)
class Question:
    """A question on a text.

    Attributes:
        id: the key of its prediction.
        answers: right answers with the characters at which they begin; empty where there are none,
            or none are known.
        impossible: whether the context does not answer it; None where this is unknown.
        where: file, paragraph and id.
    """

    id: str
    question: str
    context: str
    answers: Answers = ()
    impossible: bool | None = None
    where: str = "a question"

    @property
    def annotated(self) -> bool:
        """True if the right answer is known."""
        return bool(self.answers) or self.impossible is True


@dataclass(frozen=True)
class QuestionColumns(Columns):
    """The columns of a table of questions, or the fields of a file in SQuAD's form.

    Attributes:
        question, context, answers: as in `Question`; no answers to read none.
        id: a table without it numbers its rows.
    """

    question: str = "question"
    context: str = "context"
    answers: str | None = "answers"
    id: str = "id"


TABLE = (
    Column("question", "question", ("question", "query")),
    Column("context", "context", ("context", "passage", "paragraph", "document")),
    Column("answers", "answers", ("answers", "answer", "answer_text"), answer=True),
)


def located(context: str, text: str, start: int) -> int | None:
    """Return the occurrence of an answer nearest to `start` (of two, the earlier), if any."""
    preceding = context.rfind(text, 0, max(start, 0) + len(text))
    following = context.find(text, max(start, 0))
    positions = [position for position in (preceding, following) if position >= 0]
    return min(positions, key=lambda position: abs(position - start), default=None)


def read_squad(source: str, columns: QuestionColumns, unused: list[str]) -> Iterator[Question]:
    """Yield the questions of a file in SQuAD's form.

    Args:
        columns: the names of the fields.
        unused: receives the names of fields that are not read.

    Raises:
        DataError: the file cannot be read or has another form.
        ResourceError: no permission to read the file.
    """
    path, count = local_path(source), 0
    file_at(path, "Check the name; .json is read in SQuAD's form, .jsonl as rows.")
    fix = "For one object a line use the suffix .jsonl."
    tree = read_json_text(str(path), fix)
    read_fields = {*_FIELDS, *vars(columns).values()}
    for index, article in enumerate(_list(_object(tree, str(path)), "data", str(path))):
        location = f"{path}:data[{index}]"
        paragraphs = _list(_object(article, location), "paragraphs", location)
        for number, paragraph in enumerate(paragraphs):
            inner = f"{location}.paragraphs[{number}]"
            fields = _object(paragraph, inner)
            context = {name: fields[name] for name in [columns.context] if name in fields}
            unused += [name for name in (*article, *fields) if name not in {*read_fields, *unused}]
            for position, values in enumerate(_list(fields, "qas", inner)):
                count += 1
                question = _object(values, f"{inner}.qas[{position}]")
                row = {columns.id: str(count), **context, **question}
                unused += [name for name in row if name not in {*read_fields, *unused}]
                yield question_of(row, columns, f"{inner}:{row[columns.id]}")
    if count == 0:
        raise DataError("has no question", where=path, fix="Give a file with at least one.")


def _object(values: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        message = f"is a JSON {type(values).__name__}, not an object"
        raise DataError(message, where=location, fix=_FORM)
    return values


def _list(values: Mapping[str, Any], key: str, location: str) -> list[Any]:
    if not isinstance(values.get(key), list):
        message = f"has no list {key!r}; it has {', '.join(values) or 'nothing'}"
        raise DataError(message, where=location, fix=_FORM)
    return list(values[key])


def question_of(row: Row, columns: QuestionColumns, where: str) -> Question:
    """Return the question in a row.

    Raises:
        DataError: the row lacks the question or the context, or a value has another type.
    """
    question, context = (text_of(row, name, where) for name in (columns.question, columns.context))

    def value(name: str) -> Any:
        return cell_of(row, name, where) if name in row else None

    answers: Answers | None = None
    impossible: bool | None = None
    if columns.answers is not None:
        # NaN marks an absent value, as pandas writes it.
        cells = (value(name) for name in (columns.answers, _IMPOSSIBLE))
        cell, flag = (None if isinstance(x, float) and math.isnan(x) else x for x in cells)
        answers = _answers(cell, where)
        if flag is not None and not isinstance(flag, bool):
            message = f"{_IMPOSSIBLE!r} holds {flag!r}"
            raise DataError(message, where=where, fix="It must be true or false.")
        # There is no answer by a flag or by an empty list.
        if flag or (flag is None and answers == ()):
            answers, impossible = (), True
        elif answers is not None:
            impossible = False
    # In memory it has its number: "input 3"
    key = where.rpartition(" ")[2] if (cell := value(columns.id)) is None else str(cell)
    return Question(key, question, context, answers or (), impossible, where)


_PRINTED = re.compile(r"\s*(?:[\[{][\s{]*['\"]|\[\s*\]\s*$)")
"""The beginning of a list or dict as text, in JSON or as Python prints it, or an empty list."""


def _answers(value: Any, location: str) -> Answers | None:
    """Return answers in any of their forms; None if they are unknown. Blank answers are dropped."""
    if isinstance(value, Mapping):  # of arrays, as pandas reads Parquet
        value = {name: plain_value(item) for name, item in value.items()}
    if is_printed := isinstance(value, str) and _PRINTED.match(value) is not None:  # in .csv files
        with contextlib.suppress(ValueError, RecursionError):
            value, is_printed = json.loads(value), False
    match plain_value(value):
        case None | "":
            return None
        case str(text) if not is_printed:
            pairs: list[tuple[Any, Any]] = [(text, ANYWHERE)]
        case {"text": list(texts), "answer_start": list(starts)} if len(texts) == len(starts):
            pairs = list(zip(texts, starts, strict=True))
        case [*items]:
            entries = (item if isinstance(item, dict) else {"text": item} for item in items)
            pairs = [(x.get("text"), x.get("answer_start", ANYWHERE)) for x in entries]
        case _:
            pairs = [(None, None)]
    if not all(isinstance(text, str) and type(start) is int for text, start in pairs):
        fix = 'Write {"text": ["…"], "answer_start": [0]}, a list of {"text": "…"}, or one text.'
        message = f"answers of an unknown form: {repr(value)[:80]}"
        raise DataError(message, where=location, fix=fix)
    return tuple((text, start) for text, start in pairs if text.strip())


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SYMBOLS = str.maketrans("", "", "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_UNSPACED = re.compile(f"[{_IDEOGRAPH}]")
_TOKEN = re.compile(rf"[{_IDEOGRAPH}]|[^\W{_IDEOGRAPH}]+|[^\w\s]")
_LETTER = re.compile(r"[^\W\d_]")


def normalised(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def unspaced(context: str) -> bool:
    """Return True if at least half of the letters of a text are ideographs or kana."""
    count = len(_UNSPACED.findall(context))
    return count > 0 and 2 * count >= len(_LETTER.findall(context))


@dataclass(frozen=True)
class Grade:
    """The quality of an answer: exact match (0 or 1) and F1, each with the nearest right answer."""

    exact: float
    f1: float


def grade_answer(text: str, question: Question) -> Grade:
    """Compare an answer with the right ones; "" means unanswerable."""
    characters = unspaced(question.context)
    text, *answers = (
        each.lower().strip().translate(_SYMBOLS) if characters else normalised(each)
        for each in (text, *(correct for correct, _ in question.answers))
    )
    if not characters:  # an answer of articles and punctuation counts only if all are such
        answers = [*filter(None, answers)]
    split: Callable[[str], list[str]] = _TOKEN.findall if characters else str.split
    tokens, grades = split(text), list[Grade]()
    for answer in answers or [""]:
        expected = split(answer)
        f1 = float(tokens == expected)
        if tokens and expected:
            words = (Counter(tokens) & Counter(expected)).total()
            runs = difflib.SequenceMatcher(None, tokens, expected, autojunk=False)
            shared = runs.find_longest_match().size if characters else words
            f1 = 2 * shared / (len(tokens) + len(expected))
        grades.append(Grade(float(text == answer), f1))
    return Grade(max(grade.exact for grade in grades), max(grade.f1 for grade in grades))


def best_threshold(
    differences: Many[float], predicted: Many[float], none: Many[float]
) -> tuple[float, float]:
    """Return the difference above which no answer is given, and the resulting mean grade.

    As SQuAD 2.0's official script searches: from no answer at all, question after question by its
    difference. There are two differences: questions of equal difference change together, since no
    threshold separates them; and the threshold is halfway to the next difference (beyond the ends,
    1 away), where rounding does not flip a question. Of equal grades the lowest threshold wins.

    Args:
        differences: score of no answer minus the best answer's, for each question; at least
            one.
        predicted: the grade of its best answer.
        none: the grade of no answer.
    """
    order = np.argsort(differences, kind="stable")
    values, first = np.unique(np.asarray(differences, dtype=np.float64)[order], return_index=True)
    gains = np.add.reduceat((np.asarray(predicted) - np.asarray(none))[order], first)
    grades = np.concatenate([[0.0], np.cumsum(gains)]) + np.sum(none)
    at = int(np.argmax(grades))
    edges = np.concatenate([[values[0] - 2], values, [values[-1] + 2]])
    return float(edges[at] + edges[at + 1]) / 2, float(grades[at]) / len(order)
