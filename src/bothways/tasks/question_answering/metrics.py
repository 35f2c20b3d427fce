"""Exact match and F1 of answers, and the best threshold for giving no answer.

Words: the formulas of SQuAD 2.0's official script (Rajpurkar et al. 2018), which equal those of 1.1
wherever an answer has a word. Lower-cased, without ASCII punctuation and the words a, an, the, two
answers match exactly or share words (F1); of several right answers the nearest counts.

Characters: in a text without spaces between words these formulas would compare whole sentences.
There (`unspaced`) the formulas of CMRC 2018's official script apply (Cui et al. 2019): a token is
an ideograph, and F1 counts the longest run of tokens that both answers have. Differences: kana
count as ideographs, and words in Latin letters are split at white space and symbols, where that
script calls NLTK.

All values are shares from 0 to 1.
"""

from __future__ import annotations

import re
import string
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bothways.tasks.question_answering.examples import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SYMBOLS = str.maketrans("", "", "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_UNSPACED = re.compile(f"[{_IDEOGRAPH}]")
_TOKEN = re.compile(rf"[{_IDEOGRAPH}]|[^\W{_IDEOGRAPH}]+|[^\w\s]")
_LETTER = re.compile(r"[^\W\d_]")


def normalised(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def unspaced(context: str) -> bool:
    """Return True if at least half of the letters of a text are ideographs or kana."""
    count = len(_UNSPACED.findall(context))
    return count > 0 and 2 * count >= len(_LETTER.findall(context))


@dataclass(frozen=True)
class Grade:
    """The quality of an answer: exact match (0 or 1) and F1, each with the nearest right answer."""

    exact: float
    f1: float


def grade_answer(text: str, question: Question) -> Grade:
    """Compare an answer with the right ones; "" means unanswerable."""
    characters = unspaced(question.context)
    text, *answers = (
        each.lower().strip().translate(_SYMBOLS) if characters else normalised(each)
        for each in (text, *(correct for correct, _ in question.answers))
    )
    if not characters:  # an answer of articles and punctuation counts only if all are such
        answers = [*filter(None, answers)]
    split: Callable[[str], list[str]] = _TOKEN.findall if characters else str.split
    tokens, grades = split(text), list[Grade]()
    for answer in answers or [""]:
        expected = split(answer)
        f1 = float(tokens == expected)
        if tokens and expected:
            words = (Counter(tokens) & Counter(expected)).total()
            shared = _longest_run(tokens, expected) if characters else words
            f1 = 2 * shared / (len(tokens) + len(expected))
        grades.append(Grade(float(text == answer), f1))
    return Grade(max(grade.exact for grade in grades), max(grade.f1 for grade in grades))


def _longest_run(a: Many[str], b: Many[str]) -> int:
    """Return the length of the longest run of tokens that both have."""
    best, above = 0, [0] * (len(b) + 1)
    for token in a:
        row = [0] * (len(b) + 1)
        for position, other in enumerate(b):
            if token == other:
                row[position + 1] = above[position] + 1
        best, above = max(best, *row), row
    return best


class ScoredAnswers(NamedTuple):
    """The scores of answers, each an array over questions.

    Attributes:
        exact, f1: of the prediction.
        given_exact, given_f1: of the best answer, whether it was given or not.
        none: of no answer: 1 where that is right.
        difference: score of no answer minus the best answer's.
        impossible: 1 where the question has no answer.
    """

    exact: Any
    f1: Any
    given_exact: Any
    given_f1: Any
    none: Any
    difference: Any
    impossible: Any


class AnswerScores:
    """Scores of answers; memory: seven numbers a question."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def add(self, question: Question, text: str, best: str, difference: float) -> None:
        """Add a question.

        Args:
            text: the prediction; "" for no answer.
            best: the best answer; `text` is that or "".
        """
        best_grade, none = grade_answer(best, question), grade_answer("", question)
        exact, f1 = (best_grade.exact, best_grade.f1) if text else (none.exact, none.f1)
        impossible = float(question.impossible is True)
        of_best = best_grade.exact, best_grade.f1
        self._numbers.extend(ScoredAnswers(exact, f1, *of_best, none.f1, difference, impossible))

    @property
    def columns(self) -> ScoredAnswers:
        """The scores of all questions."""
        return ScoredAnswers(*np.array(self._numbers).reshape(-1, 7).T)

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics.

        Returns:
            "em" and "f1" of the predictions, and "f1_best", the F1 at the best threshold. With
            questions without an answer also "em_best", "threshold_best" (for F1), and the metrics
            of questions with ("_has") and without an answer ("_no").
        """
        exact, f1, given_exact, given_f1, none, difference, impossible = self.columns
        # The threshold may deny an answer that was given, so it searches among the best answers
        no, (threshold, best) = impossible > 0, best_threshold(difference, given_f1, none)
        metrics = {"em": float(exact.mean()), "f1": float(f1.mean()), "f1_best": best}
        if not no.any():
            return metrics
        metrics["em_best"] = best_threshold(difference, given_exact, none)[1]
        metrics["threshold_best"] = threshold
        metrics["em_no"] = float(exact[no].mean())
        if not no.all():
            metrics |= {"em_has": float(exact[~no].mean()), "f1_has": float(f1[~no].mean())}
        return metrics


def best_threshold(
    differences: Many[float], predicted: Many[float], none: Many[float]
) -> tuple[float, float]:
    """Return the difference above which no answer is given, and the resulting mean grade.

    As SQuAD 2.0's official script searches: from no answer at all, question after question by its
    difference. There are two differences: questions of equal difference change together, since no
    threshold separates them; and the threshold is halfway to the next difference (beyond the ends,
    1 away), where rounding does not flip a question. Of equal grades the lowest threshold wins.

    Args:
        differences: score of no answer minus the best answer's, for each question; at least
            one.
        predicted: the grade of its best answer.
        none: the grade of no answer.
    """
    order = np.argsort(differences, kind="stable")
    values, first = np.unique(np.asarray(differences, dtype=np.float64)[order], return_index=True)
    gains = np.add.reduceat((np.asarray(predicted) - np.asarray(none))[order], first)
    grades = np.concatenate([[0.0], np.cumsum(gains)]) + np.sum(none)
    at = int(np.argmax(grades))
    edges = np.concatenate([[values[0] - 2], values, [values[-1] + 2]])
    return float(edges[at] + edges[at + 1]) / 2, float(grades[at]) / len(order)
