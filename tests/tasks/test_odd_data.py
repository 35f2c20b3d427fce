"""Labelled data that is odd in a way that would be learned silently: each has one message."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

import bothways
from bothways.cli.main import app
from bothways.core.errors import BothwaysError, DataError
from bothways.data.text_io import read_lines
from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelExample, MultilabelTask
from bothways.tasks.predictions import ScorePrediction
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RankExample, RerankingTask
from bothways.tasks.tagging.checks import check_tagged
from bothways.tasks.tagging.conll import ColumnLayout, read_columns
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.text_task import TextExample
from toy_folder import make_folder

ROWS = "a good film\tpos\na bad play\tneg\n" * 4


def rows_of(file: Path) -> list[Any]:
    return list(ClassificationTask().read(str(file)).examples)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cr.tsv", f"text\tlabel\n{ROWS}".replace("\n", "\r").encode(), r"cr\.tsv:1: holds a carriage return\n"),
        ("le.tsv", f"text\tlabel\n{ROWS}".encode("utf-16-le"), r"UTF-16 text without.*\n.*-f UTF-16LE"),
        ("be.tsv", f"text\tlabel\n{ROWS}".encode("utf-16-be"), r"UTF-16 text without.*\n.*-f UTF-16BE"),
        ("bin.tsv", f"text\tlabel\n{ROWS}\0\0\1\2\0\0\n".encode(), r"bin\.tsv:10: is a binary file"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_of_texts_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / name)


def test_a_nul_in_a_text_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"first\na long line with one \0 in it\n")
    assert [text for _, text in read_lines(tmp_path / "a.txt")][1] == "a long line with one  in it"


def test_columns_are_guessed_in_any_case_and_exactly_first(tmp_path):
    (tmp_path / "a.tsv").write_text(f"Text\tLabel\n{ROWS}")
    first = rows_of(tmp_path / "a.tsv")[0]
    assert (first.text, first.label) == ("a good film", "pos")
    (tmp_path / "b.tsv").write_text("Sentence\tText\ttext\tLabel\n" + "x\ty\tz\tpos\n" * 3)
    assert rows_of(tmp_path / "b.tsv")[0].text == "z"
    (tmp_path / "c.tsv").write_text("Premise\tHypothesis\tLABEL\n" + "x\ty\tpos\n" * 3)
    pair = rows_of(tmp_path / "c.tsv")[0]
    assert (pair.text, pair.text_b, pair.label) == ("x", "y", "pos")


def test_labels_that_differ_in_case_only_are_warned_of():
    texts = [TextExample(f"text {n}", None, label) for n, label in enumerate(("pos", "Pos", "neg"))]
    sets = [MultilabelExample("a", None, ("pos", "Pos"))]
    words = [TagExample(("a", "b", "c"), ("B-pos", "B-Pos", "O"))]
    for findings in (
        ClassificationTask().check(texts, []),
        MultilabelTask().check(sets, []),
        check_tagged(words, [], "auto"),
    ):
        alike = [f.severity for f in findings if f.what.endswith("'Pos' and 'pos'")]
        assert alike == ["warning"]


def test_a_score_whose_square_overflows_is_refused():
    examples = [TextExample("a", None, "1e308", "s:1"), TextExample("b", None, "-2e18", "s:2")]
    found = RegressionTask().check([*examples, TextExample("c", None, "3")], [])
    assert [(f.severity, f.what) for f in found if f.check == "labels"] == [
        ("error", "2 labels are beyond ±1e+18: s:1, s:2")
    ]
    with pytest.raises(DataError, match=r"s:1: label '1e308' is beyond ±1e\+18"):
        RegressionTask().score([(examples[0], ScorePrediction(1.0))], [])


def test_lines_of_words_have_the_same_columns():
    lines = [(1, "ape NN O"), (2, "bee B-X"), (3, ""), (4, "cat O")]
    with pytest.raises(DataError, match=r"^f:2: has 2 columns \(bee \| B-X\), and most lines 3\n"):
        list(read_columns(lines, "f", ColumnLayout(0, 2, 3, fixed=True)))
    assert [each.tags for each in read_columns(lines, "f", ColumnLayout(0, 1))] == [
        ("NN", "B-X"),
        ("O",),
    ]
    assert [each.words for each in read_columns(lines, "f", ColumnLayout())] == [
        ("ape", "bee"),
        ("cat",),
    ]


def test_evaluate_reads_standard_input(tmp_path, monkeypatch, capsys):
    model = make_folder(tmp_path / "bert")
    rows = [{"text": text, "label": label} for text, label in (("a film", "x"), ("a play", "y"))]
    bothways.finetune(model, rows * 4, epochs=1, progress=False).save(tmp_path / "tuned")
    table = "".join(f'{{"text": "{row["text"]}", "label": "{row["label"]}"}}\n' for row in rows)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table.encode())))
    line = ["evaluate", str(tmp_path / "tuned"), "-", "--label", "label", "--device", "cpu"]
    app(line, result_action="return_value")
    assert "accuracy" in capsys.readouterr().out
    with pytest.raises(BothwaysError):
        app(["evaluate", str(tmp_path / "tuned"), "--nonsense"], result_action="return_value")


def test_endings_are_ordered_by_their_number():
    row = {"context": "x", "ending0": "a", "ending10": "k", "ending2": "c", "ending1": "b"}
    assert ChoiceTask().example(row).endings == ("a", "b", "c", "k")


def test_numbers_with_underscores_are_no_scores():
    examples = [TextExample(f"text {n}", None, label) for n, label in enumerate(("1_0", "2", "3"))]
    (error,) = [f for f in RegressionTask().check(examples, []) if f.severity == "error"]
    assert "'1_0'" in error.what


@pytest.mark.parametrize("text", ["{a, b}", "{'a': 1}", "('a', 'b')"])
def test_printed_sets_are_no_labels(text):
    with pytest.raises(DataError):
        MultilabelTask().example({"text": "x", "labels": text})


def test_another_separator_of_labels_is_named():
    sets = [
        MultilabelExample(f"x{n}", None, (label,)) for n, label in enumerate(("a|b", "a|c", "b"))
    ]
    found = [f for f in MultilabelTask().check(sets, []) if "'|'" in f.what]
    assert [f.severity for f in found] == ["warning"]
    assert not [f for f in MultilabelTask(separator="|").check(sets, []) if "'|'" in f.what]


def test_a_query_that_comes_again_is_named():
    ranks = [RankExample(query, ("a", "b"), (1.0, 0.0)) for query in ("x", "y", "x")]
    found = [f for f in RerankingTask().check(ranks, []) if "earlier" in f.what]
    assert [f.severity for f in found] == ["warning"]
