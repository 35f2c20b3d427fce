"""Questions on texts: files in the form of SQuAD 1.1 and 2.0 (CMRC 2018, DRCD and XQuAD share it), or tables, a question a row.

An answer is a text and the character that it begins at, counted in code points. Files are not always right about the second: an
answer that does not stand where it should is looked for, and the occurrence next to that place is taken (`located`).

Source: Rajpurkar et al. 2016 and 2018. Rows are as the Hub has them: {"id", "question", "context", "answers": {"text": […],
"answer_start": […]}}, where no text means that the context does not tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bothways.core.errors import DataError
from bothways.data.tables import HUB, open_table
from bothways.data.text_io import COMPRESSED, file_at, read_lines
from bothways.tasks.text_examples import check_characters
from bothways.text.tokenizer import Encoded, Tokenizer

Answers = tuple[tuple[str, int], ...]

ANYWHERE = -1
"""Where an answer begins whose place the data does not tell: its first occurrence counts."""

_IMPOSSIBLE = "is_impossible"


@dataclass(frozen=True)
class Question:
    """A question on a text.

    Attributes:
        id: what predictions are known by.
        question, context: the texts.
        answers: right answers with the characters that they begin at; empty where there are none, or none are known.
        impossible: whether the context does not answer it; none where nobody has said.
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
        """Whether it is known what is right."""
        return bool(self.answers) or self.impossible is True


@dataclass(frozen=True)
class QuestionColumns:
    """What the columns of a table of questions are called; a file in SQuAD's form needs none.

    Attributes:
        question, context, answers: as in `Question`.
        id: a table without it numbers its rows.
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    id: str = "id"

    def __str__(self) -> str:
        return ", ".join(f"{role} = {name!r}" for role, name in vars(self).items())


SQUAD = QuestionColumns()
"""The names in SQuAD's own form."""


def open_questions(
    source: str, columns: QuestionColumns = SQUAD, *, labelled: bool = True
) -> tuple[Iterator[Question], Callable[[], float] | None]:
    """The questions of a file (.json in SQuAD's form, or a table), a Hub data set, or the standard input (JSON lines).

    Args:
        columns: of a table.
        labelled: whether answers are wanted; without, they are left alone.

    Returns:
        The questions, once through, and how much of them has been read, where that is known.

    Raises:
        DataError: as `tables.open_table`; a .json file that is not in SQuAD's form; a table without a column; while reading: a
            row without a question or a context, or whose texts are none, or whose answers have no form that is known.
        ResourceError: a file that may not be read.
    """
    path = Path(source).expanduser()
    if (
        not source.startswith(HUB)
        and (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix == ".json"
    ):
        return _squad(path, labelled), None
    table = open_table(source, [columns.question])
    for name in (columns.question, columns.context, *((columns.answers,) if labelled else ())):
        if name not in table.names:
            raise DataError(
                f"has no column {name!r}; it has {', '.join(table.names)}",
                where=table.where,
                fix=_NAMES,
            )
    rows = enumerate(table.rows, 1)
    return (
        _question({columns.id: number, **row.values}, columns, labelled, row.where)
        for number, row in rows
    ), table.share


_NAMES = (
    "Name the columns: task.columns.question=NAME task.columns.context=NAME task.columns.answers=NAME "
    "(in predict and evaluate without task.)."
)


def located(context: str, text: str, start: int) -> int | None:
    """Where an answer stands: at `start`, else nearest to that (of two, before it); none if it does not occur."""
    before, after = (
        context.rfind(text, 0, max(start, 0) + len(text)),
        context.find(text, max(start, 0)),
    )
    found = [place for place in (before, after) if place >= 0]
    return min(found, key=lambda place: abs(place - start), default=None)


def _squad(path: Path, labelled: bool) -> Iterator[Question]:
    file_at(path, "Check the name; .json is read in SQuAD's form, .jsonl as rows.")
    count = 0
    for place, context, rows in _paragraphs(_parsed(path), str(path)):
        for number, values in enumerate(rows):
            count += 1
            named = {"id": str(count), **context, **_table(values, f"{place}.qas[{number}]")}
            yield _question(named, SQUAD, labelled, f"{place}:{named['id']}")
    if count == 0:
        raise DataError("holds no question", where=path, fix="Give a file with at least one.")


def _parsed(path: Path) -> Any:
    try:
        return json.loads("\n".join(line for _, line in read_lines(path)))
    except json.JSONDecodeError as error:
        what = f"is not JSON: {error.msg} at column {error.colno}"
        raise DataError(
            what, where=f"{path}:{error.lineno}", fix="For one object a line use the suffix .jsonl."
        ) from error


def _paragraphs(tree: Any, where: str) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """For each paragraph its place, its context by that name, and its questions."""
    for article, values in enumerate(_list(_table(tree, where), "data", where)):
        place = f"{where}:data[{article}]"
        for number, paragraph in enumerate(_list(_table(values, place), "paragraphs", place)):
            inner = f"{place}.paragraphs[{number}]"
            context = {
                name: text for name, text in _table(paragraph, inner).items() if name == "context"
            }
            yield inner, context, _list(paragraph, "qas", inner)


_FORM = 'SQuAD\'s form is {"data": [{"paragraphs": [{"context": "…", "qas": [{"id": "…", "question": "…", "answers": […]}]}]}]}.'


def _table(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise DataError(f"is a JSON {type(values).__name__}, not an object", where=where, fix=_FORM)
    return values


def _list(values: Mapping[str, Any], key: str, where: str) -> list[Any]:
    if not isinstance(values.get(key), list):
        raise DataError(
            f"has no list {key!r}; it has {', '.join(values) or 'nothing'}", where=where, fix=_FORM
        )
    return list(values[key])


def _question(
    values: Mapping[str, Any], columns: QuestionColumns, labelled: bool, where: str
) -> Question:
    question, context = (_text(values, name, where) for name in (columns.question, columns.context))
    answers, impossible = _annotation(values, columns, where) if labelled else ((), None)
    return Question(str(values[columns.id]), question, context, answers, impossible, where)


def _text(values: Mapping[str, Any], name: str, where: str) -> str:
    if name not in values:
        fix = "Complete the question, or take it out."
        raise DataError(f"has no {name!r}; it has {', '.join(values)}", where=where, fix=fix)
    value = values[name]
    if value is not None and not isinstance(value, str):
        raise DataError(f"{name!r} holds {type(value).__name__}, not text", where=where, fix=_NAMES)
    check_characters(value, name, where)
    return value or ""


def _annotation(
    values: Mapping[str, Any], columns: QuestionColumns, where: str
) -> tuple[Answers, bool | None]:
    """The answers, and whether there is none to give: said outright, or by an empty list."""
    answers, said = _answers(values.get(columns.answers), where), values.get(_IMPOSSIBLE)
    if said is not None and not isinstance(said, bool):
        raise DataError(
            f"{_IMPOSSIBLE!r} holds {said!r}", where=where, fix="It must be true or false."
        )
    if said or (said is None and answers == ()):
        return (), True
    return answers or (), None if answers is None else False


def _answers(value: Any, where: str) -> Answers | None:
    """Answers in any of their forms; none if nothing is said. An answer without a character is no answer."""
    match value:
        case None | "":
            return None
        case str():
            found = [(value, ANYWHERE)]
        case {"text": list(texts), "answer_start": list(starts)} if len(texts) == len(starts):
            found = list(zip(texts, starts, strict=True))
        case list():
            found = [(item.get("text"), item.get("answer_start", ANYWHERE)) if isinstance(item, dict) else (item, ANYWHERE)
                     for item in value]  # fmt: skip
        case _:
            raise _strange(value, where)
    if not all(isinstance(text, str) and isinstance(start, int) for text, start in found):
        raise _strange(value, where)
    return tuple((text, start) for text, start in found if text.strip())


def _strange(value: Any, where: str) -> DataError:
    fix = 'Write {"text": ["…"], "answer_start": [0]}, a list of {"text": "…", "answer_start": 0}, or one text.'
    return DataError(
        f"answers that have no form known here: {json.dumps(value, default=str)[:80]}",
        where=where,
        fix=fix,
    )


def tokenized(
    examples: Many[Question],
    tokenizer: Tokenizer,
    known: Mapping[str, Encoded] = MappingProxyType({}),
) -> dict[str, Encoded]:
    """The contexts of some questions in tokens, each once; those that are known are not tokenized again."""
    contexts = dict.fromkeys(example.context for example in examples)
    new = [context for context in contexts if context not in known]
    found = dict(zip(new, tokenizer.encode_with_offsets(new), strict=True))
    return {context: found[context] if context in found else known[context] for context in contexts}
