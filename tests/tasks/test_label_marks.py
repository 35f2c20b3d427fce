"""Marks for rows without a label: one rule for files, rows in memory and data sets."""

from collections.abc import Sequence

import pytest

from bothways.core.errors import DataError
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.columns import unlabelled_marks
from bothways.tasks.multilabel.task import MultilabelTask
from bothways.tasks.text_task import TextColumns, TextExample


@pytest.mark.parametrize(
    ("labels", "marks"),
    [
        ("- entailment neutral contradiction", "-"),
        ("? yes no", "?"),
        ("N/A yes no", "N/A"),
        ("NULL a b", "NULL"),
        ("-1 0 1 2", "-1"),
        ("-1 a b", "-1"),
        ("-1", "-1"),
        ("-100 0 1", "-100"),
        ("-1 0 1", ""),
        ("-2 -1 0 1 2", ""),
        ("- +", ""),
        ("? ! .", ""),
        ("none favor against", ""),
        ("0 1 2", ""),
    ],
)
def test_marks_depend_on_the_other_labels(labels, marks):
    assert unlabelled_marks(labels.split()) == {*marks.split()}


def findings_of(labels: Sequence[str | None]) -> list[str]:
    examples = [
        TextExample(f"text {number}", label=label, where=f"row {number}")
        for number, label in enumerate(labels)
    ]
    found = ClassificationTask().check(examples, [])
    return [finding.what for finding in found if finding.severity != "note"]


def test_a_marked_row_is_refused_like_an_empty_one():
    (marked,) = findings_of(["-", "a", "b"] + ["a", "b"] * 20)
    (empty,) = findings_of([None, "a", "b"] + ["a", "b"] * 20)
    assert "1 example has no label" in marked
    assert "'-'" in marked
    assert marked.endswith(": row 0")
    assert empty.endswith(": row 0")


def test_minus_one_beside_0_and_1_is_a_class_and_named():
    (warning,) = findings_of(["-1", "0", "1"] * 5)
    assert "-1" in warning


def test_test_data_without_labels_has_none():
    (error,) = findings_of(["-1"] * 5)
    assert "no example has a label" in error


JIGSAW = TextColumns("comment_text", None, "toxic,obscene,threat")


def test_a_column_for_each_label_is_read_in_files_and_rows(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "id,comment_text,toxic,obscene,threat\n1,one,1,0,1.0\n2,two,0,0,0\n3,three,-1,-1,-1\n"
    )
    reading = MultilabelTask().read(str(path), JIGSAW)
    examples = list(reading.examples)
    assert [example.labels for example in examples] == [("toxic", "threat"), (), None]
    rows = [
        {"comment_text": "one", "toxic": True, "obscene": 0, "threat": 1},
        {"comment_text": "two", "toxic": 0, "obscene": False, "threat": 0.0},
    ]
    task = MultilabelTask(columns=JIGSAW)
    assert [task.example(row).labels for row in rows] == [("toxic", "threat"), ()]
    absent = [finding.what for finding in reading.task.check(examples[:2], [])]
    assert any("obscene" in what and "left out" in what for what in absent)


def test_wrong_columns_of_labels_are_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("comment_text,toxic,obscene\none,1,0\ntwo,0.5,0\n")
    asked = TextColumns("comment_text", None, "toxic,treat")
    with pytest.raises(DataError, match="'treat'"):
        MultilabelTask().read(str(path), asked)
    with pytest.raises(DataError, match="'toxic,obscene'"):
        ClassificationTask().read(str(path), TextColumns("comment_text", None, "toxic,obscene"))
    reading = MultilabelTask().read(str(path), TextColumns("comment_text", None, "toxic,obscene"))
    with pytest.raises(DataError, match=r"'0\.5', not 0 or 1") as caught:
        list(reading.examples)
    assert str(caught.value.where).endswith(":3")
    with pytest.raises(DataError, match="NAME,NAME"):
        MultilabelTask().read(str(path), TextColumns("comment_text"))


@pytest.mark.parametrize(
    "pair", ["pos \u200bpos", "caf\u00e9 cafe\u0301", "1 01", "1 1.0", "Yes yes"]
)
def test_labels_that_look_alike_are_named(pair):
    (warning,) = findings_of(pair.split(" ") * 5)
    assert "learned as different ones" in warning


def test_errors_of_a_spreadsheet_are_named():
    examples = [
        TextExample(text, label=text[-1]) for text in ("#NAME?", "a ?", "b ?", "c !", "d !")
    ]
    found = ClassificationTask().check(examples, [])
    assert [f.what for f in found if f.check == "rows"] == [
        "1 text has an error of a spreadsheet: an example"
    ]
