"""Questions on texts: files in the form of SQuAD 1.1 and 2.0, or tables with a question a row.

CMRC 2018, DRCD and XQuAD share SQuAD's form. Rows are as on the Hub: {"id", "question", "context",
"answers": {"text": […], "answer_start": […]}}, where no text means that the context has no answer.

An answer is a text and the character at which it begins, counted in code points. Files are not
always right about the second: the occurrence nearest to the given place is used (`located`).

Source: Rajpurkar et al. 2016 and 2018.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bothways.core.errors import DataError
from bothways.core.files import local_path
from bothways.data.tables import HUB, plain_value, read_json_text
from bothways.data.text_io import file_at, suffix_of
from bothways.tasks.base import Row
from bothways.tasks.columns import Column, Columns, text_of

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
        question, context: the texts.
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
    """The columns of a table of questions; a file in SQuAD's form has these names.

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


def squad_form(source: str) -> bool:
    """Return True for a file in SQuAD's form."""
    return not source.startswith(HUB) and suffix_of(local_path(source)) == ".json"


def located(context: str, text: str, start: int) -> int | None:
    """Return the occurrence of an answer nearest to `start` (of two, the earlier), if any."""
    preceding = context.rfind(text, 0, max(start, 0) + len(text))
    following = context.find(text, max(start, 0))
    positions = [position for position in (preceding, following) if position >= 0]
    return min(positions, key=lambda position: abs(position - start), default=None)


def read_squad(source: str, labelled: bool, unused: list[str]) -> Iterator[Question]:
    """Yield the questions of a file in SQuAD's form.

    Args:
        labelled: whether answers are read.
        unused: receives the names of fields that are not read.

    Raises:
        DataError: the file cannot be read or has another form.
        ResourceError: no permission to read the file.
    """
    path, count = local_path(source), 0
    file_at(path, "Check the name; .json is read in SQuAD's form, .jsonl as rows.")
    fix = "For one object a line use the suffix .jsonl."
    tree = read_json_text(str(path), fix, unique=True)
    columns = QuestionColumns(answers="answers" if labelled else None)
    for index, article in enumerate(_list(_object(tree, str(path)), "data", str(path))):
        location = f"{path}:data[{index}]"
        paragraphs = _list(_object(article, location), "paragraphs", location)
        for number, paragraph in enumerate(paragraphs):
            inner = f"{location}.paragraphs[{number}]"
            fields = _object(paragraph, inner)
            context = {"context": fields["context"]} if "context" in fields else {}
            unused += [name for name in (*article, *fields) if name not in (*_FIELDS, *unused)]
            for position, values in enumerate(_list(fields, "qas", inner)):
                count += 1
                row = {"id": str(count), **context, **_object(values, f"{inner}.qas[{position}]")}
                unused += [name for name in row if name not in (*_FIELDS, *unused)]
                yield question_of(row, columns, f"{inner}:{row['id']}")
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
    answers: Answers | None = None
    impossible: bool | None = None
    if columns.answers is not None:
        answers, flag = _answers(row.get(columns.answers), where), row.get(_IMPOSSIBLE)
        if flag is not None and not isinstance(flag, bool):
            message = f"{_IMPOSSIBLE!r} holds {flag!r}"
            raise DataError(message, where=where, fix="It must be true or false.")
        # There is no answer by a flag or by an empty list.
        if flag or (flag is None and answers == ()):
            answers, impossible = (), True
        elif answers is not None:
            impossible = False
    key = str(row.get(columns.id, "1"))
    return Question(key, question, context, answers or (), impossible, where)


def _answers(value: Any, location: str) -> Answers | None:
    """Return answers in any of their forms; None if they are unknown. Blank answers are dropped."""
    if isinstance(value, Mapping):  # of arrays, as pandas reads Parquet
        value = {name: plain_value(item) for name, item in value.items()}
    match plain_value(value):
        case None | "":
            return None
        case str(text):
            pairs = [(text, ANYWHERE)]
        case {"text": list(texts), "answer_start": list(starts)} if len(texts) == len(starts):
            pairs = list(zip(texts, starts, strict=True))
        case [*items]:
            entries = (item if isinstance(item, dict) else {"text": item} for item in items)
            pairs = [(x.get("text"), x.get("answer_start", ANYWHERE)) for x in entries]
        case _:
            raise _unknown_form(value, location)
    if not all(isinstance(text, str) and type(start) is int for text, start in pairs):
        raise _unknown_form(value, location)
    return tuple((text, start) for text, start in pairs if text.strip())


def _unknown_form(value: Any, location: str) -> DataError:
    fix = 'Write {"text": ["…"], "answer_start": [0]}, a list of {"text": "…"}, or one text.'
    message = f"answers of an unknown form: {json.dumps(value, default=str)[:80]}"
    return DataError(message, where=location, fix=fix)
