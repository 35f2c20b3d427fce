"""What questions can have wrong, each in one finding."""

from dataclasses import replace

from bothways.core.errors import Finding
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnsweringTask

CONTEXT = "The cat sat on the mat. The cat slept."
GOOD = Question("a", "Who sat?", CONTEXT, (("cat", 4),), False, "t.json:a")
OTHER = Question("a", "Who slept?", CONTEXT, (("cat", 28),), False, "d.json:a")
NONE = Question("n", "Who flew?", CONTEXT, (), True, "t.json:n")


def check(
    train: list[Question],
    dev: list[Question],
    definition: QuestionAnsweringTask = QuestionAnsweringTask(),  # noqa: B008
) -> list[Finding]:
    return definition.check(train, dev)


def test_nothing_is_said_of_good_data():
    assert check([GOOD], [OTHER]) == []
    assert check([GOOD], []) == []


def test_rows_that_cannot_be_used():
    train = [
        GOOD,
        replace(GOOD, where="t.json:again"),
        replace(GOOD, id="e", question=" "),
        replace(GOOD, id="f", context=""),
    ]
    findings = check(train, [replace(OTHER, answers=())])
    assert [(item.check, item.severity) for item in findings[:3]] == [("rows", "error")] * 3
    assert [finding.what for finding in findings[:3]] == [
        "2 examples have an empty text: t.json:a, t.json:a",
        "2 questions share their id with others: t.json:a, t.json:again",
        "1 question has no answer and is not marked as impossible: d.json:a",
    ]


def test_answers_that_are_not_where_they_should_be():
    away = replace(GOOD, id="b", where="t.json:b", answers=(("dog", 4), ("cat", 4)))
    moved = replace(GOOD, id="c", where="t.json:c", answers=(("cat", 5),))
    anywhere = replace(GOOD, id="d", answers=((" cat ", 3), ("dog", 1)))
    nowhere = replace(GOOD, id="e", answers=(("cat", -1),))
    skipped, shifted, lost = check(
        [GOOD, away, moved, anywhere, nowhere],
        [replace(OTHER, id="z", answers=(("cow", 4),)), OTHER],
    )
    assert (skipped.check, skipped.severity, skipped.fix) == ("labels", "warning", None)
    assert skipped.what.startswith(
        "1 of 5 training questions have an answer that is not in their context and are skipped"
    )
    assert skipped.what.endswith("skipped: t.json:b ('dog')")
    assert shifted.severity == "note"
    assert shifted.what.startswith(
        "1 training answer does not begin at the given character; the nearest"
    )
    assert shifted.what.endswith("t.json:c ('cat')")
    assert lost == Finding(
        "labels",
        "warning",
        "1 of 2 dev questions has no answer in their context, but count: d.json:a ('cow')",
    )


def test_where_no_answer_stands_in_its_context_there_is_nothing_to_learn():
    away = replace(GOOD, id="b", where="t.json:b", answers=(("dog", 4),))
    (refused,) = check([away], [])
    assert (refused.severity, refused.fix) == (
        "error",
        "Fix these answers; there is nothing else to learn.",
    )
    assert refused.what == (
        "1 of 1 training questions have an answer that is not in their context: t.json:b ('dog')"
    )
    assert [
        finding.severity
        for finding in check([away, NONE], [], QuestionAnsweringTask(threshold=0.0))
    ] == ["warning", "note"]
    several = replace(OTHER, answers=(("dog", 4), ("cat", 28)))  # one of them can be given
    assert check([GOOD], [several]) == []


def test_questions_without_an_answer():
    other = replace(NONE, question="Who barked?")
    (note,) = check([GOOD, NONE], [OTHER, other])
    assert note == Finding(
        "balance",
        "note",
        "no answer is right for 50.0% of the training questions and 50.0% of the dev questions",
    )
    for dev in ([], [OTHER]):
        _, warning = check([GOOD, NONE], dev)
        assert (warning.check, warning.severity, warning.where) == (
            "labels",
            "warning",
            "task.threshold",
        )
        assert [
            finding.severity
            for finding in check([GOOD, NONE], dev, QuestionAnsweringTask(threshold=0.0))
        ] == ["note"]
    _, hard = check([GOOD], [OTHER, other])
    assert hard.what.startswith(
        "there are dev questions without an answer, but no such training questions"
    )


def test_where_no_question_has_an_answer_there_is_nothing_to_learn():
    findings = check([NONE], [OTHER])
    assert [finding.what for finding in findings if finding.severity == "error"] == [
        "no training question has an answer"
    ]


def test_questions_that_training_and_dev_data_share():
    (finding,) = check([GOOD], [replace(GOOD, id="z", where="d.json:z"), OTHER])
    assert (finding.check, finding.severity) == ("overlap", "warning")
    assert finding.what == "1 of 2 dev questions is also in the training data: d.json:z"
    assert check([GOOD], [replace(OTHER, question=GOOD.question, context=f"{CONTEXT} So.")]) == []
