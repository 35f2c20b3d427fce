"""Tasks as values: names, rows, and use from several threads."""

import dataclasses
import io
import json
import sys

import pytest

from bothways.core.errors import ConfigError
from bothways.tasks.base import did_you_mean, unknown_label
from bothways.tasks.catalogue import ALIASES, ALL_TASKS, task_kind
from bothways.tasks.choice.task import ChoiceExample, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RankExample, RerankingTask
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns, TextExample


def test_tasks_are_known_by_their_usual_names():
    assert {ALIASES[name] for name in ALIASES} <= {*ALL_TASKS}
    assert not {*ALIASES} & {*ALL_TASKS}
    for name, kind in (("ner", "tag"), ("QA", "answer"), ("sentiment", "classify")):
        assert task_kind(name) == kind
    assert task_kind("token_classification") == task_kind("Token classification") == "tag"
    assert all(task_kind(kind) == kind for kind in ALL_TASKS)
    with pytest.raises(ConfigError, match=r"'clasify' is not a task; did you mean 'classify'\?"):
        task_kind("clasify")


def test_an_unknown_label_does_not_list_all_labels():
    labels = [f"intent {number}" for number in range(77)]
    error = str(unknown_label("label 'intnt 7'", "intnt 7", labels, "dev.tsv:3"))
    assert "dev.tsv:3: label 'intnt 7' is not among the 77 labels; did you mean" in error
    assert "intent 76" not in error
    assert did_you_mean("qqq", labels) == ""


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        (ClassificationTask(), {"text": "good", "label": 1}, TextExample("good", None, "1")),
        (RegressionTask(), {"sentence1": "a", "sentence2": "b", "score": 2.5}, TextExample("a", "b", "2.5")),
        (ClassificationTask(TextColumns("body")), {"body": "good", "text": "bad"}, TextExample("good")),
        (
            TaggingTask(), {"text": "In Oslo."},
            TagExample(("In", "Oslo", "."), None, text="In Oslo.", starts=(0, 3, 7)),
        ),
        (
            QuestionAnsweringTask(), {"id": "7", "query": "Who?", "passage": "A cat.", "answer_text": "cat"},
            Question("7", "Who?", "A cat.", (("cat", -1),), False),
        ),
        (ChoiceTask(), {"context": "c", "endings": ["a", "b"]}, ChoiceExample("c", ("a", "b"))),
        (RerankingTask(), {"query": "q", "documents": ["a"]}, RankExample("q", ("a",))),
    ],
)  # fmt: skip
def test_a_row_is_an_example(task, row, expected, monkeypatch):
    assert task.example(row, where="input 3") == dataclasses.replace(expected, where="input 3")
    if isinstance(task, ChoiceTask | RerankingTask):  # whose standard input is JSON objects
        lines = io.BytesIO(json.dumps(row).encode() + b"\n")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines))
        (example,) = task.read("-", labelled=False).examples
        assert example == dataclasses.replace(expected, where="standard input:1")
