"""Exact match, F1 and thresholds against the official formulas, written again from their description."""

import math
import random
import re
import string

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bothways.tasks.predictions import AnswerPrediction, AnswerSpan
from bothways.tasks.question_answering import examples as metrics
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnsweringTask


def english(*answers: str, impossible: bool | None = None) -> Question:
    pairs = tuple((answer, 0) for answer in answers)
    return Question("q", "Who?", "The cat sat on a mat.", pairs, impossible)


def chinese(*answers: str) -> Question:
    pairs = tuple((answer, 0) for answer in answers)
    return Question("q", "谁？", "大莱龙铁路位于山东省 Shandong。", pairs)


def official_words(text: str) -> list[str]:
    """Lower case; without punctuation; without articles; split at white space."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return [word for word in re.sub(r"\b(a|an|the)\b", " ", kept).split() if word]


def official_f1(text: str, right: str) -> float:
    found, wanted = official_words(text), official_words(right)
    if not found or not wanted:
        return float(found == wanted)
    shared = sum(min(found.count(word), wanted.count(word)) for word in set(found))
    if shared == 0:
        return 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def test_normalised():
    """Marks beyond ASCII's stay; for all others see `official_words`."""
    texts = {"«the» cat": "« » cat", "Ünter\tden\nLinden ": "ünter den linden", "the_end": "theend"}
    assert {text: metrics.normalised(text) for text in texts} == texts


WORDS = ["the", "a", "cat", "Cat!", "dog,", "theatre", "sat-on", "U.S.", "an", "42"]


WORD_LISTS = st.lists(st.sampled_from(WORDS), max_size=6)


@given(WORD_LISTS, st.lists(WORD_LISTS, max_size=3))
def test_grades_equal_the_official_formulas(found, rights):
    text, answers = " ".join(found), [" ".join(right) for right in rights]
    golds = [answer for answer in answers if official_words(answer)] or [""]
    exact = any(official_words(text) == official_words(gold) for gold in golds)
    f1 = max(official_f1(text, gold) for gold in golds)
    result = metrics.grade_answer(text, english(*answers))
    assert (result.exact, result.f1) == (exact, pytest.approx(f1))


@pytest.mark.parametrize(
    ("text", "answers", "exact", "f1"),
    [
        ("山东省", ("山东省",), 1, 1),
        ("《山东省》。", ("山东，省",), 1, 1),
        ("山东", ("山东省",), 0, 2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3)),
        ("东山省", ("山东省",), 0, 1 / 3),  # runs, not sets
        ("山西东省", ("山东省",), 0, 2 * 2 / 7),
        ("北京", ("山东省",), 0, 0),
        ("北京", ("山东省", "北京市"), 0, 0.8),
        ("1998年", ("1998",), 0, 2 / 3),
        ("SHANDONG province", ("Shandong",), 0, 2 / 3),
        ("shandong", (" Shandong ",), 1, 1),
        ("", ("山东",), 0, 0),
        ("", (), 1, 1),
        ("山", (), 0, 0),
        ("，", ("。",), 1, 1),
    ],
)
def test_grades_of_characters(text, answers, exact, f1):
    found = metrics.grade_answer(text, chinese(*answers))
    assert (found.exact, found.f1) == (exact, pytest.approx(f1))


@given(st.text("山东省市京", max_size=7), st.text("山东省市京", max_size=7))
def test_runs_are_the_longest(text, right):
    pieces = {text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    run = max((len(piece) for piece in pieces if piece in right), default=0)
    expected = float(text == right) if not text or not right else 2 * run / (len(text) + len(right))
    assert metrics.grade_answer(text, chinese(right)).f1 == pytest.approx(expected)


def test_texts_without_spaces():
    assert all(map(metrics.unspaced, ["大莱龙铁路 SD", "これはペンです", "𠀀𠀁"]))
    assert not any(map(metrics.unspaced, ["The cat sat.", "大莱龙铁路 in Shandong", "1998", ""]))


def scored(*rows: tuple[Question, str, str, float]) -> dict[str, float]:
    """The metrics of a question, a prediction, the best answer and a difference in each row."""
    results = [
        (question, AnswerPrediction("q", text, None, None, 1.0, difference, (AnswerSpan(best, 0, 0, 0.0, 1.0),)))
        for question, text, best, difference in rows
    ]  # fmt: skip
    return dict(QuestionAnsweringTask().score(results, ()))


@given(st.integers(1, 10), st.booleans(), st.integers(0, 9999))
def test_the_best_threshold_is_the_best_of_all(count, ties, seed):
    rng, rows = random.Random(seed), []
    for _ in range(count):
        answered = english("black cat", "dog", impossible=False)
        question = rng.choice([english(impossible=True), answered])
        best = rng.choice(["black cat", "cat", "mouse", *([""] if ties else [])])
        difference = float(rng.randint(-3, 3)) if ties else rng.uniform(-5, 5)
        rows.append((question, best if rng.random() < 0.7 else "", best, difference))

    def f1_at(limit: float) -> float:
        answers = [(q, "" if d > limit else best) for q, _, best, d in rows]
        return float(np.mean([metrics.grade_answer(answer, q).f1 for q, answer in answers]))

    differences = [difference for *_, difference in rows]
    best_f1 = [metrics.grade_answer(best, question).f1 for question, _, best, _ in rows]
    none_f1 = [metrics.grade_answer("", question).f1 for question, *_ in rows]
    threshold, best = metrics.best_threshold(differences, best_f1, none_f1)
    assert f1_at(threshold) == pytest.approx(best)
    assert best == pytest.approx(max(f1_at(place) for place in (-math.inf, *differences)))
    assert threshold not in differences


def test_metrics_are_means_over_their_questions():
    none = english(impossible=True)
    rows = [
        (english("black cat"), "black cat", "black cat", -4.0),
        (english("black cat"), "cat", "cat", -1.0),
        (english("black cat"), "", "black cat", 0.5),
        (none, "", "mouse", 3.0),
        (none, "mouse", "mouse", -2.0),
    ]
    f1, f1_best = (1 + 2 / 3 + 0 + 1 + 0) / 5, (1 + 2 / 3 + 1 + 1 + 0) / 5  # answer up to 0.5
    assert scored(*rows) == pytest.approx({
        "em": 2 / 5, "f1": f1, "f1_best": f1_best, "em_best": 3 / 5, "threshold_best": 1.75,
        "em_no": 1 / 2, "em_has": 1 / 3, "f1_has": (1 + 2 / 3) / 3,
    })  # fmt: skip


def test_metrics_where_every_question_has_an_answer_and_where_none_has():
    rows = [(english("cat"), text, text, d) for text, d in (("cat", 5.0), ("black cat", -5.0))]
    assert scored(*rows) == pytest.approx({"em": 0.5, "f1": 5 / 6, "f1_best": 5 / 6})
    unanswerable = (english(impossible=True), "cat", "cat", 1.5)
    expected = {"em": 0.0, "f1": 0.0, "f1_best": 1.0, "em_best": 1.0, "em_no": 0.0}
    expected["threshold_best"] = 0.5
    assert scored(unanswerable) == pytest.approx(expected)
