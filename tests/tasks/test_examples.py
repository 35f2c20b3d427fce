"""Examples: columns found or asked for by name, labels of any type as one text."""

import hashlib
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from bothways.core.errors import ConfigError, DataError
from bothways.tasks.base import examples_fingerprint
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.reranking.task import RerankingTask
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns, TextExample, in_order

NOT_NAMED = TextColumns()


def read_examples(
    source: str,
    columns: TextColumns = NOT_NAMED,
    *,
    usual: TextColumns = NOT_NAMED,
    labelled: bool = True,
) -> SimpleNamespace:
    reading = ClassificationTask(usual).read(source, columns, labelled=labelled)
    return SimpleNamespace(columns=reading.task.columns, examples=reading.examples)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return str(path)


def write_columns(path: Path, *names: str) -> str:
    rows = names, [f"<{name}>" for name in names]
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf8")
    return str(path)


@pytest.mark.parametrize(
    ("names", "text", "text_b", "label"),
    [
        (("sentence", "label"), "sentence", None, "label"),
        (("id", "text", "class"), "text", None, "class"),
        (("index", "sentence1", "sentence2", "label"), "sentence1", "sentence2", "label"),
        (("index", "question", "sentence", "label"), "question", "sentence", "label"),
        (("premise", "hypothesis", "gold_label"), "premise", "hypothesis", "gold_label"),
        (("text", "text_b", "label", "idx"), "text", "text_b", "label"),
        (("text", "text_pair", "label"), "text", "text_pair", "label"),
        (("review", "sentiment"), "review", None, "sentiment"),
        (("subject", "body", "topic"), "body", None, "topic"),
        (("text", "comment", "label", "topic"), "text", None, "label"),
        (("Text", "Label"), "Text", None, "Label"),
        (("Sentence", "Text", "text", "Label"), "text", None, "Label"),
        (("Premise", "Hypothesis", "LABEL"), "Premise", "Hypothesis", "LABEL"),
    ],
)
def test_columns_are_guessed_where_that_is_clear(tmp_path, names, text, text_b, label):
    source = write_columns(tmp_path / "a.tsv", *names)
    reading = read_examples(source)
    assert reading.columns == TextColumns(text, text_b, label)
    second = None if text_b is None else f"<{text_b}>"
    expected = TextExample(f"<{text}>", second, f"<{label}>", f"{source}:2")
    assert list(reading.examples) == [expected]
    unlabelled = read_examples(source, labelled=False)
    assert unlabelled.columns == TextColumns(text, text_b)
    assert [example.label for example in unlabelled.examples] == [None]


@pytest.mark.parametrize(
    ("mark", "name"),
    [(";", "semicolons"), ("\t", "tabs"), ("|", "bars"), ("\uff0c", "full-width commas")],
)
@pytest.mark.parametrize(
    ("columns", "text"),
    [(TextColumns(), "Hello, Ann"), (TextColumns("Message", label="Team"), "Hello")],
)
def test_another_separator_is_named_wherever_it_is_noticed(tmp_path, mark, name, columns, text):
    """As Excel writes where the comma is the decimal mark."""
    rows = [("id", "Message", "Team"), ("1", text, "Card"), ("2", text, "Cash")]
    (tmp_path / "a.csv").write_text("".join(f"{mark.join(row)}\n" for row in rows))
    with pytest.raises(DataError, match=rf"a\.csv.*\n  Its columns seem separated by {name}: use"):
        list(read_examples(str(tmp_path / "a.csv"), columns).examples)


def test_a_column_is_not_the_text_and_its_own_label(tmp_path):
    source = write_columns(tmp_path / "a.tsv", "text", "label")
    with pytest.raises(DataError, match=r"a\.tsv: column 'text' is named as the label"):
        read_examples(source, TextColumns("text", label="text"))


def test_who_was_trained_on_pairs_does_not_read_single_texts(tmp_path):
    usual = TextColumns("sentence1", "sentence2", "label")
    source = write_columns(tmp_path / "a.tsv", "sentence1", "sentence_2", "label")
    message = r"two texts are read, 'sentence1' and 'sentence2'; it has sentence1, sentence_2, label\n  Name the"
    with pytest.raises(DataError, match=message):
        read_examples(source, usual=usual)
    named = read_examples(source, TextColumns("sentence1", "sentence_2"), usual=usual)
    assert named.columns.text_b == "sentence_2"
    names = ("premise", "hypothesis", "label")
    other = write_columns(tmp_path / "b.tsv", *names)
    assert read_examples(other, usual=usual).columns == TextColumns(*names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("text", "sentence", "label"), r"a\.tsv: cannot tell which column is the text \(text"),
        (("text", "sentence1", "sentence2", "label"), "is the text"),
        (("text", "premise", "hypothesis", "label"), r"is the text \(premise, hypothesis, text\)"),
        (("words", "label"), r"a\.tsv: cannot tell which column is the text \(words, label\)"),
        (("text", "label", "class"), r"the label \(label, class\)"),
        (("text", "opinion"), r"the label \(text, opinion\); .*\n  Or rename it to 'label'\.$"),
        (("a good film",), r"\(a good film\); .*\n  Or rename .* Without a header .*: text=.0"),
        (("text", "sentiment", "topic"), r"the label \(sentiment, topic\)"),
        (("sentence_A", "sentence_B", "judgement"), "the label .*; use label=NAME\n"),
    ],
)
def test_columns_that_are_not_clear_are_asked_for(tmp_path, names, message):
    with pytest.raises(DataError, match=message):
        read_examples(write_columns(tmp_path / "a.tsv", *names))


@pytest.mark.parametrize("row", [{"a": "x", "b": "y"}, {"a": "x"}, {"text": "x"}])
@pytest.mark.parametrize("columns", [None, TextColumns("w", None, "1"), TextColumns("1")])
def test_advice_on_rows_in_memory_speaks_of_no_file(row, columns):
    with pytest.raises(DataError) as error:
        ClassificationTask().example(row, columns, labelled=True, where="train row 1")
    assert not re.search(r"\bfile|header|\.(csv|tsv|txt|jsonl)", str(error.value))


def test_columns_by_name_and_by_number(tmp_path):
    source = write_columns(tmp_path / "a.tsv", "x", "y", "z")
    assert [e.text for e in read_examples(source, TextColumns("y", label="z")).examples] == ["<y>"]
    (example, second) = read_examples(source, TextColumns("1", "0", "2")).examples
    assert (example.text, example.text_b, example.label) == ("y", "x", "z")
    assert second.where == f"{source}:2"
    for columns, message in (
        (TextColumns("w", label="z"), r"a\.tsv: has no column 'w'; it has x, y, z"),
        (TextColumns("3", label="1"), r"has no column '3'; it has 0, 1, 2"),
        (TextColumns("x", label="w"), "has no column 'w'"),
    ):
        with pytest.raises(DataError, match=message):
            read_examples(source, columns)
    (bare,) = read_examples(source, TextColumns("x", label="w"), labelled=False).examples
    assert bare.text == "<x>"
    (tmp_path / "b.tsv").write_text("a fine film\tgood\na poor film\tbad\na fine play\tgood\n")
    with pytest.raises(DataError, match='text=NUMBER, label=NUMBER, such as text="0"'):
        read_examples(str(tmp_path / "b.tsv"))


def test_usual_columns_are_taken_where_the_table_has_them(tmp_path):
    usual = TextColumns("x", None, "z")
    source = write_columns(tmp_path / "a.tsv", "text", "x", "z")
    assert read_examples(source, usual=usual).columns == usual
    named = read_examples(source, TextColumns("text"), usual=usual)
    assert named.columns == TextColumns("text", None, "z")
    other = write_columns(tmp_path / "b.tsv", "text", "label")
    assert read_examples(other, usual=usual).columns == TextColumns("text", None, "label")
    pair = write_columns(tmp_path / "c.tsv", "one", "two")
    numbered = read_examples(pair, usual=TextColumns("1", None, "0"))
    assert [(e.text, e.label) for e in numbered.examples] == [("two", "one"), ("<two>", "<one>")]


def test_a_second_text_needs_a_first():
    with pytest.raises(ConfigError, match=r"^columns\.text_b: is given without a first text"):
        TextColumns(text_b="y")


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ("spam", "spam"), (" spam ", "spam"), (1, "1"), ("1", "1"), (1.0, "1"), (-3, "-3"), (2.5, "2.5"),
        (1e20, "1" + 20 * "0"), (True, "True"), (False, "False"), (None, None), ("", None), ("  ", None),
        ("nan", None), ("NaN", None), (float("nan"), None), (-0.0, "0"),
    ],
)  # fmt: skip
def test_labels_of_any_type_are_texts(tmp_path, value, label):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "t", "label": value}])
    assert [e.label for e in read_examples(source).examples] == [label]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "t", "label": [1]}, r"a\.jsonl:2: column 'label' holds list, not a label"),
        ({"text": 3, "label": 1}, r"a\.jsonl:2: column 'text' holds int, not text"),
        ({"text": "a \ud83d", "label": 1}, r"a\.jsonl:2: column 'text' holds U\+D83D at character"),
        ({"text": "a", "label": "\udc00"}, r"a\.jsonl:2: column 'label' holds U\+DC00"),
        ({"text": "t"}, r"a\.jsonl:2: the row has no column 'label'; it has text"),
        ({"label": 1}, r"a\.jsonl:2: the row has no column 'text'; it has label"),
    ],
)
def test_rows_that_do_not_fit_are_named(tmp_path, row, message):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "t", "label": 1}, row])
    with pytest.raises(DataError, match=message):
        list(read_examples(source).examples)


@pytest.mark.parametrize("absent", [pandas.NA, pandas.NaT, float("nan"), None])
def test_what_pandas_marks_as_absent_is_null(absent):
    row = {"text": "t", "text_b": absent, "label": absent}
    example = ClassificationTask().example(row)
    assert (example.text_b, example.label) == ("", None)
    ranked = {"query": "q", "documents": ["a"], "label": absent}
    assert RerankingTask().example(ranked).labels is None


def test_labels_are_in_the_order_of_numbers_then_of_texts():
    labels = ["10", "9", "-1", "b", "a", None, "9"]
    random.Random(0).shuffle(labels)
    examples = [TextExample("t", label=label) for label in labels]
    assert ClassificationTask().labels(examples) == ("-1", "9", "10", "a", "b")
    # Labels of one number are in the order of their characters.
    zeros = ["-0", *("0" * count for count in range(1, 20))]
    labels = [*zeros, "1", "01", "-1"]
    random.Random(0).shuffle(labels)
    assert in_order(labels) == ("-1", *zeros, "01", "1")
    assert in_order(["2" * 5000, "10", "3"]) == ("3", "10", "2" * 5000)


def test_the_fingerprint_is_of_texts_and_labels_alone():
    one, two = TextExample("a", None, "x", "file:1"), TextExample("a", "b", "x", "file:2")
    lines = b'["a", null, "x"]\n["a", "b", "x"]\n'
    assert examples_fingerprint([one, two]) == hashlib.sha256(lines).hexdigest()
    assert examples_fingerprint([two, one]) != examples_fingerprint([one, two])
    elsewhere = TextExample("a", None, "x", "elsewhere:7")
    assert examples_fingerprint([elsewhere, two]) == examples_fingerprint([one, two])


@pytest.mark.parametrize(
    ("header", "columns", "remedy"),
    [
        ("sentence\tlabel", TextColumns("0", None, "1"), 'text="sentence", label="label"'),
        ("Text\tLabel", TextColumns("0", None, "1"), 'text="Text", label="Label"'),
        ("question1\tquestion2", TextColumns("0", "1"), 'text="question1", text_b="question2"'),
        ("text\tscore", TextColumns("0", None, "1"), 'text="text", label="score"'),
    ],
)
def test_a_header_is_no_example_where_columns_go_by_number(header, columns, remedy, tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text(f"{header}\nThe text is good.\tlabel\n", encoding="utf8")
    message = f"a.tsv:1: is a header, but the columns are given by number\n.*{remedy}"
    with pytest.raises(DataError, match=message):
        read_examples(str(file), columns, labelled=columns.label is not None)
    with pytest.raises(DataError, match="is a header"):  # a model that was trained on numbers
        read_examples(str(file), usual=columns, labelled=columns.label is not None)
    file.write_text("sentence\t1\nThe text is good.\t0\n", encoding="utf8")
    assert next(read_examples(str(file), TextColumns("0", None, "1")).examples).text == "sentence"
    listed = write_rows(tmp_path / "a.jsonl", [{"0": ["text"], "1": "label"}])
    with pytest.raises(DataError, match="column '0' holds list, not text"):
        next(read_examples(listed, TextColumns("0", None, "1")).examples)


@pytest.mark.parametrize(("task", "name", "text"), [
    (ClassificationTask(), "a.jsonl", '{"body": 3}\n' * 9),
    (RerankingTask(), "a.csv", "query,document,label\nq,a,x\n" + "q,a,1\n" * 3_000),
    (TaggingTask(), "a.jsonl", '{"body": 3}\n' * 9),
    (TaggingTask(), "a.conll", "a O\nb O\n\n" * 3_000 + "a O\nb\n\n" + "a O\n" * 3_000),
    (TaggingTask(context="document"), "a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n{"tokens": 3}\n' * 9),
])  # fmt: skip
def test_a_file_that_is_refused_is_closed(task, name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        list(task.read(str(tmp_path / name)).examples)
    assert caught.tb is not None  # it still refers to the readers
    links = Path("/proc/self/fd").glob("*")
    assert str(tmp_path / name) not in {str(link.resolve()) for link in links}
