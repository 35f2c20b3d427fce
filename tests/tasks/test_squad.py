"""Questions from files in SQuAD's form and from tables; answers that do not stand where they should; every mistake named."""

import contextlib
import gzip
import json
import lzma
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from bothways.core.errors import DataError
from bothways.data.tables import RowError
from bothways.tasks.question_answering.examples import Question, QuestionColumns, located
from bothways.tasks.question_answering.task import QuestionAnsweringTask

TASK = QuestionAnsweringTask()
CONTEXT = "The cat sat on the mat. The cat slept."


def squad(*qas: Any, context: Any = CONTEXT) -> dict[str, Any]:
    paragraphs = [{"context": context, "qas": list(qas)}]
    return {"version": "v2.0", "data": [{"title": "Cats", "paragraphs": paragraphs}]}


def write(file: Path, tree: Any) -> Path:
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(file.suffix, bytes)
    file.write_bytes(compress(json.dumps(tree).encode()))
    return file


ANSWER = {"text": "cat", "answer_start": 4}
FLEW = {"answers": [], "is_impossible": True, "plausible_answers": [ANSWER]}
SAT = [ANSWER, {"text": "The cat", "answer_start": 0}]
SLEPT = {"answers": [{**ANSWER, "answer_start": 28}], "is_impossible": False}
TREE = squad(
    {"id": "a", "question": "Who sat?", "answers": SAT},
    {"id": "b", "question": "Who flew?", **FLEW},
    {"id": 3, "question": "Who slept?", **SLEPT},
    {"id": "d", "question": "Who ran?", "answers": []},
    {"question": "Who?"},
)


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".json.xz"])
def test_files_in_squads_form(tmp_path, suffix):
    file = write(tmp_path / f"dev{suffix}", TREE)
    place = f"{file}:data[0].paragraphs[0]"
    reading = TASK.read(str(file))
    assert reading.share is None
    assert list(reading.examples) == [
        Question("a", "Who sat?", CONTEXT, (("cat", 4), ("The cat", 0)), False, f"{place}:a"),
        Question("b", "Who flew?", CONTEXT, (), True, f"{place}:b"),
        Question("3", "Who slept?", CONTEXT, (("cat", 28),), False, f"{place}:3"),
        Question("d", "Who ran?", CONTEXT, (), True, f"{place}:d"),
        Question("5", "Who?", CONTEXT, (), None, f"{place}:5"),
    ]
    assert reading.unused == ["title", "plausible_answers"]
    bare = list(TASK.read(str(file), labelled=False).examples)
    assert all((question.answers, question.impossible) == ((), None) for question in bare)
    annotated = [question.annotated for question in TASK.read(str(file)).examples]
    assert annotated == [True] * 4 + [False]


def test_named_fields_of_squads_form_are_read(tmp_path):
    tree = squad({"id": "a", "question": "Who?", "frage": "Wer?", "antworten": [ANSWER]})
    file, columns = str(write(tmp_path / "a.json", tree)), QuestionColumns("frage")
    (question,) = TASK.read(file, replace(columns, answers="antworten")).examples
    assert (question.question, question.answers) == ("Wer?", (("cat", 4),))
    (question,) = TASK.read(file, columns, labelled=False).examples
    assert (question.question, question.answers) == ("Wer?", ())
    with pytest.raises(DataError, match=r":a: the row has no column 'page'; it has id, question"):
        list(TASK.read(file, replace(columns, context="page")).examples)


@pytest.mark.parametrize(
    ("given", "answers", "impossible"),
    [
        ({"text": ["cat", "mat"], "answer_start": [4, 19]}, (("cat", 4), ("mat", 19)), False),
        ({"text": [], "answer_start": []}, (), True),
        ([{"text": "cat", "answer_start": 4}], (("cat", 4),), False),
        ([{"text": "cat"}], (("cat", -1),), False),
        (["cat", " "], (("cat", -1),), False),
        ("cat", (("cat", -1),), False),
        ("", (), None),
        (None, (), None),
        (float("nan"), (), None),
        ([], (), True),
    ],
)
def test_rows_of_any_form(tmp_path, given, answers, impossible):
    row = {"frage": "Who?", "context": CONTEXT, "answers": given}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "id": "x"}) + "\n", encoding="utf8")
    reading = TASK.read(str(file), QuestionColumns(question="frage"))
    assert reading.task == QuestionAnsweringTask(QuestionColumns(question="frage"))
    first, second = reading.examples
    assert first == Question("1", "Who?", CONTEXT, answers, impossible, f"{file}:1")
    assert second == replace(first, id="x", where=f"{file}:2")
    assert reading.share() == 1


@pytest.mark.parametrize("absent", [None, math.nan, np.float32("nan")])
def test_rows_in_memory_mark_absent_values_as_in_a_table(absent):
    row = {"question": "Who?", "context": CONTEXT, "answers": absent, "is_impossible": absent}
    question = QuestionAnsweringTask().example(row)
    assert (question.answers, question.impossible) == ((), None)
    assert QuestionAnsweringTask().example({**row, "answers": "nan"}).answers == (("nan", -1),)


@pytest.mark.parametrize("name", ["id", "answers", "is_impossible"])
def test_values_that_no_message_can_show_are_refused(name):
    row = {"question": "Who?", "context": CONTEXT, "answers": "cat", name: 10**5000}
    with pytest.raises(DataError, match=f"'{name}' holds a number with too many digits"):
        TASK.example(row)


def test_answers_in_arrays_as_pandas_reads_parquet():
    texts, starts = np.array(["cat"], dtype=object), np.array([4], dtype=np.int32)
    row = {"question": "Who?", "context": CONTEXT}
    for answers in ({"text": texts, "answer_start": starts}, np.array([ANSWER], dtype=object)):
        question = QuestionAnsweringTask().example({**row, "answers": answers})
        assert question.answers == (("cat", 4),)


@pytest.mark.parametrize("answers", [{"text": ["cat"], "answer_start": [4]}, [ANSWER], ["cat"]])
def test_answers_in_a_cell_are_json(tmp_path, answers):
    """A cell as Python prints it was one answer, which no prediction equals."""
    frame = pandas.DataFrame(
        [{"question": "Who?", "context": CONTEXT, "answers": json.dumps(answers)}]
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    (question,) = TASK.read(str(tmp_path / "a.csv")).examples
    assert [text for text, _ in question.answers] == ["cat"]
    frame.assign(answers=str(answers)).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(DataError, match=r"a\.csv:2: answers of an unknown form: "):
        list(TASK.read(str(tmp_path / "a.csv")).examples)


def test_an_empty_list_in_a_cell_is_no_answer(tmp_path):
    (tmp_path / "a.csv").write_text(f'question,context,answers\nWho?,"{CONTEXT}",[]\n')
    (question,) = TASK.read(str(tmp_path / "a.csv")).examples
    assert (question.answers, question.impossible) == ((), True)


def test_questions_alone(tmp_path):
    file = tmp_path / "new.jsonl"
    file.write_text(json.dumps({"question": "Who?", "context": None}) + "\n")
    (question,) = TASK.read(str(file), labelled=False).examples
    assert question == Question("1", "Who?", "", where=f"{file}:1")
    with file.open("a") as stream:
        stream.write(json.dumps({"question": "Who?"}) + "\n")
    message = r"new\.jsonl:2: the row has no column 'context'; it has id, question\n"
    with pytest.raises(DataError, match=message):
        list(TASK.read(str(file), labelled=False).examples)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], r"bad\.json: is a JSON list, not an object"),
        ({"rows": []}, r"bad\.json: has no list 'data'; it has rows"),
        ({}, r"bad\.json: has no list 'data'; it has nothing"),
        ({"data": [1]}, r"data\[0\]: is a JSON int, not an object"),
        ({"data": [{"paragraphs": ["x"]}]}, r"data\[0\]\.paragraphs\[0\]: is a JSON str"),
        ({"data": [{"paragraphs": [{}]}]}, r"data\[0\]\.paragraphs\[0\]: has no list 'qas'"),
        ({"data": []}, r"bad\.json: has no question"),
        (squad("x"), r"paragraphs\[0\]\.qas\[0\]: is a JSON str"),
        (squad({"question": 3, "id": "a"}), r"paragraphs\[0\]:a: column 'question' holds int"),
        (squad({"question": "Who?", "id": "a"}, context=["x"]), r":a: column 'context' holds list"),
        (squad({"id": "a", "answers": []}), r":a: .* no column 'question'; it has id, context, "),
        ({"data": [{"paragraphs": [{"qas": [{"question": "Who?"}]}]}]}, r":1: .* no column 'context'"),
        (squad({"question": "Who?", "answers": 3}), r":1: answers of an unknown form: 3"),
        (squad({"question": "Who?", "answers": [3]}), r":1: answers of an unknown form: \[3\]"),
        (squad({"question": "Who?", "answers": {"答案": "a"}}), "of an unknown form: {'答案': 'a'}"),
        (squad({"question": "Who?", "answers": {"text": ["a"], "answer_start": []}}), "of an unkn"),
        (squad({"question": "Who?", "answers": [{**ANSWER, "answer_start": True}]}), "of an unkn"),
        (squad({"question": "Who?", "is_impossible": "no"}), r":1: 'is_impossible' holds 'no'"),
        (squad({"question": "W \ud83d?", "id": "a"}), r":a: .* 'question' holds U\+D83D at character 2"),
    ],
)  # fmt: skip
def test_strange_files_are_refused(tmp_path, tree, message):
    with pytest.raises(DataError, match=message):
        list(TASK.read(str(write(tmp_path / "bad.json", tree))).examples)


def test_json_may_have_a_question_per_line(tmp_path):
    rows = '{"id": "%d", "question": "Who?", "context": "Anna."}\n'
    (tmp_path / "rows.json").write_text(rows % 1 + rows % 2)
    read = TASK.read(str(tmp_path / "rows.json"), labelled=False)
    assert [question.context for question in read.examples] == ["Anna.", "Anna."]


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "bad.json").write_text('{"data":\n [}')
    for name, message in (
        ("bad.json", r"bad\.json: is not JSON: .* at line 2 column 3\n"),
        ("none.json", r"none\.json: no such file"),
    ):
        with pytest.raises(DataError, match=message):
            list(TASK.read(str(tmp_path / name)).examples)
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "text": "x"}\n')
    message = r"rows\.jsonl: .* the context \(question, text\); use .*columns\.context\": NAME"
    with pytest.raises(DataError, match=message):
        TASK.read(str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"rows\.jsonl: .* the answers \(question, text\)"):
        TASK.read(str(tmp_path / "rows.jsonl"), QuestionColumns(context="text"))


def test_answers_are_found_where_they_are():
    places = {4: 4, 0: 4, 15: 4, 17: 28, 16: 4, 99: 28, -1: 4}
    assert {start: located(CONTEXT, "cat", start) for start in places} == places
    assert located(CONTEXT, "dog", 4) is None


def test_rows_go_on_and_are_numbered_after_a_broken_one(tmp_path):
    lines = [json.dumps({"question": name, "context": "c"}) for name in "ab"]
    (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], "{broken", lines[1]]))
    reading = TASK.read(str(tmp_path / "rows.jsonl"), labelled=False)
    found = list[tuple[str, str]]()
    for _ in range(3):
        with contextlib.suppress(RowError):
            question = reading.parse(next(reading.table.rows))
            found.append((question.id, question.question))
    assert found == [("1", "a"), ("2", "b")]
