"""Tasks as values: names, rows, and use from several threads."""

import dataclasses

import pytest

from bothways.core.errors import ConfigError, DataError
from bothways.tasks.base import did_you_mean, unknown_label
from bothways.tasks.catalogue import ALIASES, ALL_TASKS, task_kind
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelExample, MultilabelTask
from bothways.tasks.question_answering.examples import Question, QuestionColumns
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.tagging.examples import TagColumns, TagExample
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns, TextExample


def test_tasks_are_known_by_their_usual_names(monkeypatch):
    assert {ALIASES[name] for name in ALIASES} <= {*ALL_TASKS}
    assert not {*ALIASES} & {*ALL_TASKS}
    for name, kind in (("ner", "tag"), ("QA", "answer"), ("sentiment", "classify")):
        assert task_kind(name) == kind
    assert task_kind("token_classification") == task_kind("Token classification") == "tag"
    assert all(task_kind(kind) == kind for kind in ALL_TASKS)

    monkeypatch.setitem(ALL_TASKS, "two_words", ClassificationTask)
    assert task_kind("two_words") == "two_words"
    with pytest.raises(ConfigError, match=r"'clasify' is not a task; did you mean 'classify'\?"):
        task_kind("clasify")


def test_an_unknown_label_does_not_list_all_labels():
    labels = [f"intent {number}" for number in range(77)]
    error = str(unknown_label("label 'intnt 7'", "intnt 7", labels, "dev.tsv:3"))
    assert "dev.tsv:3: label 'intnt 7' is not among the model's 77 labels; did you mean" in error
    assert "intent 76" not in error
    assert did_you_mean("qqq", labels) == ""


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        (ClassificationTask(), {"text": "good", "label": 1}, TextExample("good", None, "1")),
        (ClassificationTask(TextColumns("body")), {"body": "good", "text": "bad"}, TextExample("good")),
        (MultilabelTask(), {"text": "a", "labels": ["x", "y"]}, MultilabelExample("a", None, ("x", "y"))),
        (TaggingTask(), {"words": ["In", "Oslo"]}, TagExample(("In", "Oslo"))),
        (
            TaggingTask(), {"text": "In Oslo."},
            TagExample(("In", "Oslo", "."), None, text="In Oslo.", starts=(0, 3, 7)),
        ),
        (
            QuestionAnsweringTask(), {"id": "7", "question": "Who?", "context": "A cat.", "answers": "cat"},
            Question("7", "Who?", "A cat.", (("cat", -1),), False),
        ),
    ],
)  # fmt: skip
def test_a_row_is_an_example(task, row, expected):
    assert task.example(row, where="input 3") == dataclasses.replace(expected, where="input 3")


@pytest.mark.parametrize(
    ("task", "row", "columns", "expected"),
    [
        (ClassificationTask(), {"label": "y"}, TextColumns("other", None, "gold"), TextExample("bad", None, "x")),
        (
            QuestionAnsweringTask(QuestionColumns(answers="span")), {"question": "Who?", "span": "cat", "id": 3},
            QuestionColumns(context="other"), Question("3", "Who?", "bad", (("cat", -1),), False),
        ),
        (TaggingTask(), {"words": ["In"]}, TagColumns("tokens", "gold"), TagExample(("bad",), ("x",))),
    ],
)  # fmt: skip
def test_columns_of_a_row_are_those_that_are_named(task, row, columns, expected):
    """Others with common names are next to them."""
    values = {"text": "good", "context": "good", "tokens": ["bad"], "other": "bad", **row}
    values["gold"] = ["x"] if isinstance(task, TaggingTask) else "x"
    example = task.example(values, columns, where="input 3")
    assert example == dataclasses.replace(expected, where="input 3")
    values.pop(columns.context if isinstance(columns, QuestionColumns) else columns.text)
    with pytest.raises(DataError, match=r"input 3: has no column '(other|tokens)'"):
        task.example(values, columns, where="input 3")
