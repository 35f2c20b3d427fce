"""Checks of labels: every finding is reached by data that deserves it, and by none that does not; odd data has one message."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bothways.core.errors import DataError, Finding
from bothways.tasks.choice.task import ChoiceExample, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.columns import unlabelled_marks
from bothways.tasks.multilabel.task import MultilabelExample, MultilabelTask
from bothways.tasks.predictions import ScorePrediction
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RankExample, RerankingTask
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns, TextExample


def fair_texts(count: int, start: int = 0) -> list[MultilabelExample]:
    return [
        MultilabelExample(f"text {n}", None, (("x",), ("x", "y"), (), ("y",))[n % 4], f"a:{n}")
        for n in range(start, start + count)
    ]


def fair_questions(count: int, start: int = 0) -> list[ChoiceExample]:
    return [
        ChoiceExample(f"text {n}", ("a", "b", "c"), n % 3, f"a:{n}")
        for n in range(start, start + count)
    ]


def labelled(*labels: str | None, text: str = "t") -> list[MultilabelExample]:
    return [MultilabelExample(text, None, None if labels == (None,) else labels, "b:1")]


def choice(*endings: str, label: int | None = 0, text: str = "t") -> list[ChoiceExample]:
    return [ChoiceExample(text, endings, label, "b:1")]


def check(found: Sequence[Finding], expected: str, message: str) -> None:
    """Find one of `expected`, a check and how grave it is."""
    said = [finding.what for finding in found if f"{finding.check} {finding.severity}" == expected]
    assert any(re.search(message, text) for text in said), found


def test_good_data_gets_a_note_and_no_complaint():
    (note,) = MultilabelTask().check(fair_texts(40), fair_texts(8, 40))
    assert note.what == "a training example has 1.00 of 2 labels on average; 10 have none"
    (note,) = ChoiceTask().check(fair_questions(30), fair_questions(6, 30))
    assert note.what == "always answering 0 would be right for 33.3% of the training data"


def test_many_balanced_classes_are_not_rare():
    texts = [TextExample(f"text {n}", None, f"c{n % 200}", f"a:{n}") for n in range(1000)]
    found = ClassificationTask().check(texts, [])
    assert [finding.severity for finding in found] == ["note"]
    few = [*texts * 3, TextExample("more", None, "z", "a:z")]
    check(ClassificationTask().check(few, []), "balance warning", r"less than 0\.1% .*: z \(1\)")


def ranked(*labels: float, text: str = "a") -> list[RankExample]:
    return [RankExample("q", (text,) * len(labels), labels, "b:1")]


def scored(*labels: str | None) -> list[TextExample]:
    return [TextExample(f"new {n}", None, label, "b:1") for n, label in enumerate(labels)]


QUERIES = [RankExample(f"q{n}", ("a", "b"), (1.0, 0.0), f"t:{n}") for n in range(4)]
GRADED = RankExample("new", ("a", "b"), (3.0, 0.0), "d:1")
SCORES = [TextExample(f"t{n}", None, str(n / 2), f"a:{n}") for n in range(9)]
SEVERAL, CHOICES = fair_texts(40), fair_questions(30)
SPREADSHEET = [TextExample(text, label=text[-1]) for text in ("#NAME?", "a ?", "b ?", "c !", "d !")]
UNEVEN = [TextExample(f"text {n}", None, "x" if n else "y") for n in range(20)]
TWICE = [TextExample("t", None, label, f"c:{n}") for n, label in enumerate("xxxy")]
PIPED = [MultilabelExample(f"x{n}", None, (name,)) for n, name in enumerate(("a|b", "a|c", "b"))]
LISTED = [replace(example, labels=(example.labels[0].replace("|", "\u3001"),)) for example in PIPED]
AGAIN = [RankExample(query, ("a", "b"), (1.0, 0.0), joined=True) for query in ("x", "y", "x")]


@pytest.mark.parametrize(
    ("task", "train", "dev", "expected", "message"),
    [
        (MultilabelTask(), SEVERAL + labelled("x", text=" "), [], "rows error", "1 example has an empty text: b:1"),
        (MultilabelTask(), SEVERAL + labelled(None), [], "labels error", "1 example has no label .*: b:1"),
        (MultilabelTask(), SEVERAL + labelled("N/A"), [], "labels error", "1 example has no label .*'N/A'.*: b:1"),
        (MultilabelTask(), SEVERAL, labelled("z"), "labels error", r"has no training example: b:1 \('z'\)"),
        (MultilabelTask(), SEVERAL + labelled("z"), fair_texts(4, 900), "labels warning", "no dev example has .* labels z"),
        (MultilabelTask(), fair_texts(200) + labelled("z"), [], "balance warning", r"less than 1% .*: z \(1\)"),
        (MultilabelTask(), SEVERAL, labelled(text="text 3"), "overlap warning", "1 of 1 dev examples is also in the"),
        (MultilabelTask(), PIPED, [], "labels warning", r"'\|'"),
        (MultilabelTask(), LISTED, [], "labels warning", "'\u3001'"),
        (ChoiceTask(), CHOICES + choice("a"), [], "rows error", "1 example has fewer than two endings: b:1"),
        (ChoiceTask(), CHOICES + choice("a", " "), [], "rows error", "1 example has an empty .*: b:1"),
        (ChoiceTask(), CHOICES + choice("a", "b", text=""), [], "rows error", "1 example has an empty .*: b:1"),
        (ChoiceTask(), CHOICES + choice("a", "a"), [], "rows warning", "1 example has the same ending twice.*: b:1"),
        (ChoiceTask(), CHOICES + choice("a", "b", label=None), [], "labels error", "1 example has no label .*: b:1"),
        (ChoiceTask(), CHOICES + choice("a", "b", label=2), [], "labels error", r"out of range: b:1 \(2 of 2\)"),
        (ChoiceTask(), CHOICES, choice("a", "b", label=-1), "labels error", r"out of range: b:1 \(-1 of 2\)"),
        (ChoiceTask(), CHOICES, fair_questions(1), "overlap warning", "1 of 1 dev examples is also in .*: a:0"),
        (ClassificationTask(), TWICE, [], "labels warning", "^1 training example has the text of .* another label: c:3$"),
        (ClassificationTask(), UNEVEN, [], "balance warning", "95.0% of the training examples are 'x': accuracy says"),
        (ClassificationTask(), SPREADSHEET, [], "rows warning", "^1 text has an error of a spreadsheet: an example$"),
        (RerankingTask(), AGAIN, [], "rows warning", "earlier"),
        (RerankingTask(), [*QUERIES, GRADED], [], "labels error", "1 training example has labels above 1: d:1"),
        (RerankingTask(), QUERIES, ranked(0.0), "balance warning", "1 dev query has no relevant document, .*: b:1"),
        (RerankingTask(), QUERIES, QUERIES[1:2], "overlap warning", "1 of 1 dev queries is also in .*: t:1"),
        (RerankingTask(), QUERIES + ranked(), [], "rows error", "1 example has no document: b:1"),
        (RerankingTask(), QUERIES + ranked(1.0, text=" "), [], "rows error", "empty text: b:1"),
        (RerankingTask(), [*QUERIES, RankExample("q", ("a",))], [], "labels error", "1 example has no label"),
        (RerankingTask(), ranked(1.0), [], "balance error", "^all training documents have the label 1:"),
        (RegressionTask(), [*SCORES, *scored("x", "nan")], [], "labels error", r"^2 .* not numbers: b:1 .'x'., b:1 .'nan'.$"),
        (RegressionTask(), [*SCORES, TextExample(" ", None, "1", "b:3")], [], "rows error", "an empty text: b:3$"),
        (RegressionTask(), [*SCORES, *scored(None)], [], "labels error", "^1 example has no label"),
        (RegressionTask(), SCORES, SCORES[3:5], "overlap warning", "also in the training data"),
        (RegressionTask(), scored("2", "2.0"), [], "balance error", "all training examples have the score 2"),
        (RegressionTask(), SCORES, scored("2", "2.0"), "balance warning", "all dev examples have the score 2"),
    ],
)  # fmt: skip
def test_each_flaw_is_found(task, train, dev, expected, message):
    check(task.check(train, dev), expected, message)


def test_what_is_no_flaw_is_not_reported():
    dev = [replace(CHOICES[0], endings=("new", "newer")), replace(CHOICES[1], context="another")]
    assert "overlap" not in {finding.check for finding in ChoiceTask().check(CHOICES, dev)}
    assert not any("'|'" in f.what for f in MultilabelTask(separator="|").check(PIPED, []))
    lists = [replace(ranks, joined=False) for ranks in AGAIN]  # whatever their order
    assert RerankingTask().check(lists, []) == []
    assert RerankingTask().check(QUERIES, [GRADED]) == RerankingTask().check(QUERIES, []) == []
    assert RegressionTask().check(SCORES, scored("1.5", "2")) == []


def test_no_label_and_a_label_of_all_are_told():
    for dev in ([], labelled("x")):  # what the dev data has is nothing more to mend
        found = MultilabelTask().check(labelled(), dev)
        check(found, "labels error", "no training example has a label")
        assert [finding.severity for finding in found].count("error") == 1
    always = MultilabelTask().check(labelled("x"), [])
    check(always, "balance warning", "all training examples have these labels, .*: x")
    same = ChoiceTask().check(choice("a", "b"), [])
    check(same, "balance warning", "always answering 0 would be right for 100.0%")
    alone = ChoiceTask().check([ChoiceExample("t", ("a", "b"))], [])
    assert "balance" not in {finding.check for finding in alone}


def test_marks_depend_on_the_other_labels():
    """A column whose first label is a mark, and one that has none."""
    for labels in (
        "- entailment neutral contradiction", "? yes no", "N/A yes no", "NULL a b", "-1 0 1 2",
        "-1 a b", "-1", "-100 0 1",
    ):  # fmt: skip
        assert unlabelled_marks(labels.split()) == {labels.split()[0]}
    for labels in ("-1 0 1", "-2 -1 0 1 2", "- +", "? ! .", "none favor against", "0 1 2"):
        assert unlabelled_marks(labels.split()) == set()


def findings_of(labels: Sequence[str | None]) -> list[str]:
    rows = enumerate(labels)
    examples = [TextExample(f"text {n}", label=label, where=f"row {n}") for n, label in rows]
    found = ClassificationTask().check(examples, [])
    return [finding.what for finding in found if finding.severity != "note"]


def test_a_marked_row_is_refused_like_an_empty_one():
    for mark, message in (("-", "1 example has no label .*'-'.*: row 0$"), (None, ": row 0$")):
        (error,) = findings_of([mark, "a", "b"] + ["a", "b"] * 20)
        assert re.search(message, error)
    (warning,) = findings_of(["-1", "0", "1"] * 5)
    assert "the label -1 is learned as a class" in warning
    (error,) = findings_of(["-1"] * 5)  # test data
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
    one = MultilabelTask(columns=TextColumns("text", None, "a,b"))
    assert one.example({"text": "one", "a,b": "red"}).labels == ("red",)
    check(reading.task.check(examples[:2], []), "labels warning", "obscene.* left out")


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
    with pytest.raises(DataError, match=r"'\.0', not 0 or 1"):
        MultilabelTask(columns=JIGSAW).example(
            {"comment_text": "one", "toxic": ".0", "obscene": 0, "threat": 1}
        )


@pytest.mark.parametrize(
    "pair",
    [
        "pos \u200bpos", "caf\u00e9 cafe\u0301", "1 01", "1 1.0", "Yes yes", f"1 1.0 {'2' * 5000}",
        "True 1", "0 false",
    ],
)  # fmt: skip
def test_labels_that_look_alike_are_named(pair):
    labels = pair.split(" ")
    (warning,) = findings_of(labels * 5)
    assert "learned as different ones" in warning
    assert {"\u200b", "\u0301"}.isdisjoint(warning)  # which no one would see
    words = [TagExample(tuple("abc"[: len(labels)]), tuple(f"B-{name}" for name in labels))]
    for found in (MultilabelTask().check(labelled(*labels), []), TaggingTask().check(words, [])):
        check(found, "labels warning", "learned as different ones")


ROWS = "a good film\tpos\na bad play\tneg\n" * 4


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
        list(ClassificationTask().read(str(tmp_path / name)).examples)


def test_a_score_whose_square_overflows_is_refused():
    examples = [TextExample("a", None, "1e308", "s:1"), TextExample("b", None, "-2e18", "s:2")]
    found = RegressionTask().check([*examples, TextExample("c", None, "3")], [])
    check(found, "labels error", r"^2 labels are beyond ±1e\+18: s:1, s:2$")
    with pytest.raises(DataError, match=r"s:1: label '1e308' is beyond ±1e\+18"):
        RegressionTask().score([(examples[0], ScorePrediction(1.0))], [])


def test_endings_are_ordered_by_their_number():
    row = {"context": "x", "ending0": "a", "ending10": "k", "ending2": "c", "ending1": "b"}
    assert ChoiceTask().example(row).endings == ("a", "b", "c", "k")
