"""Preflight of several labels and of choices: every finding is reached by data that deserves it, and by none that does not."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bothways.core.errors import Finding
from bothways.tasks.choice.task import ChoiceExample, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelExample, MultilabelTask
from bothways.tasks.text_task import TextExample


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


def check(found: Sequence[Finding], expected: tuple[str, str], message: str) -> None:
    assert any((f.check, f.severity) == expected and re.search(message, f.what) for f in found), (
        found
    )


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
    check(
        ClassificationTask().check(few, []), ("balance", "warning"), r"less than 0\.1% .*: z \(1\)"
    )


@pytest.mark.parametrize(
    ("train", "dev", "expected", "message"),
    [
        (
            [MultilabelExample(" ", None, ("x",), "b:1")],
            [],
            ("rows", "error"),
            "1 example has an empty text: b:1",
        ),
        (
            [MultilabelExample("t", None, None, "b:2")],
            [],
            ("labels", "error"),
            "1 example has no label .*: b:2",
        ),
        (
            [],
            [MultilabelExample("t", None, ("z",), "d:1")],
            ("labels", "error"),
            r"has no training example: d:1 \('z'\)",
        ),
        (
            [MultilabelExample("t", None, ("z",))],
            fair_texts(4, 900),
            ("labels", "warning"),
            "no dev example has .* labels z",
        ),
        (
            [MultilabelExample("t", None, ("z",)), *fair_texts(200, 100)],
            [],
            ("balance", "warning"),
            r"less than 1% .*: z \(1\)",
        ),
        (
            [],
            [MultilabelExample("text 3", None, ())],
            ("overlap", "warning"),
            "1 of 1 dev examples is also in the training data",
        ),
    ],
)
def test_flaws_of_several_labels_are_found(train, dev, expected, message):
    check(MultilabelTask().check([*fair_texts(40), *train], dev), expected, message)


def test_no_label_and_a_label_of_all_are_told():
    for dev in (
        [],
        [MultilabelExample("u", None, ("x",))],
    ):  # what the dev data has is nothing more to mend
        found = MultilabelTask().check([MultilabelExample("t", None, ())], dev)
        check(found, ("labels", "error"), "no training example has a label")
        assert [finding.severity for finding in found].count("error") == 1
    always = [MultilabelExample(f"t{n}", None, ("x",)) for n in range(3)]
    check(
        MultilabelTask().check(always, []),
        ("balance", "warning"),
        "all training examples have these labels, .*: x",
    )


@pytest.mark.parametrize(
    ("train", "dev", "expected", "message"),
    [
        (
            [ChoiceExample("t", ("a",), 0, "b:1")],
            [],
            ("rows", "error"),
            "1 example has fewer than two endings: b:1",
        ),
        (
            [ChoiceExample("t", ("a", " "), 0, "b:2")],
            [],
            ("rows", "error"),
            "1 example has an empty .*: b:2",
        ),
        (
            [ChoiceExample("", ("a", "b"), 0, "b:3")],
            [],
            ("rows", "error"),
            "1 example has an empty .*: b:3",
        ),
        (
            [ChoiceExample("t", ("a", "a"), 0, "b:4")],
            [],
            ("rows", "warning"),
            "1 example has the same ending twice.*: b:4",
        ),
        (
            [ChoiceExample("t", ("a", "b"), None, "b:5")],
            [],
            ("labels", "error"),
            "1 example has no label .*: b:5",
        ),
        (
            [ChoiceExample("t", ("a", "b"), 2, "b:6")],
            [],
            ("labels", "error"),
            r"out of range: b:6 \(2 of 2\)",
        ),
        (
            [],
            [ChoiceExample("t", ("a", "b"), -1, "d:1")],
            ("labels", "error"),
            r"out of range: d:1 \(-1 of 2\)",
        ),
        (
            [],
            fair_questions(1),
            ("overlap", "warning"),
            "1 of 1 dev examples is also in the training data: a:0",
        ),
    ],
)
def test_flaws_of_choices_are_found(train, dev, expected, message):
    check(ChoiceTask().check([*fair_questions(30), *train], dev), expected, message)


def test_an_answer_that_always_stands_in_one_place_is_told():
    same = [ChoiceExample(f"t{n}", ("a", "b"), 0) for n in range(4)]
    check(
        ChoiceTask().check(same, []),
        ("balance", "warning"),
        "always answering 0 would be right for 100.0%",
    )
    assert "balance" not in {
        f.check for f in ChoiceTask().check([ChoiceExample("t", ("a", "b"))], [])
    }


def test_choices_that_differ_in_context_or_endings_are_no_overlap():
    train = fair_questions(9)
    dev = [replace(train[0], endings=("new", "newer")), replace(train[1], context="another")]
    assert "overlap" not in {finding.check for finding in ChoiceTask().check(train, dev)}
