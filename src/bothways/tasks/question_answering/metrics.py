"""Exact match and F1 of answers, and the threshold at which to give none.

Words: the formulas of SQuAD 2.0's official script (Rajpurkar et al. 2018), which are those of 1.1 wherever an answer has a
word. Lower-cased, without ASCII punctuation and the words a, an, the, two answers match exactly or share words (F1); of several
right answers the nearest counts.

Characters: in a text that is written without spaces these formulas would compare whole sentences, so there (`unspaced`) the
ones of CMRC 2018's official script hold (Cui et al. 2019): a token is an ideograph, and F1 is of the longest run of tokens that
both answers have. Differences: kana count as ideographs do, and words in Latin letters are cut at white space and symbols,
where that script calls NLTK.

All values are shares from 0 to 1.
"""

from __future__ import annotations

import re
import string
from array import array
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

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
    """Lower-cased, without ASCII punctuation and English articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def unspaced(context: str) -> bool:
    """Whether at least half of the letters of a text are ideographs or kana."""
    count = len(_UNSPACED.findall(context))
    return count > 0 and 2 * count >= len(_LETTER.findall(context))


@dataclass(frozen=True)
class Grade:
    """How good an answer is: 1 where it is exactly a right one, and the F1 with the nearest right one."""

    exact: float
    f1: float


def grade(text: str, question: Question) -> Grade:
    """An answer against the right ones; "" stands for none. The question must be annotated."""
    if unspaced(question.context):
        return _best([_by_characters(text, right) for right, _ in question.answers or (("", 0),)])
    words = normalised(text)
    rights = [right for right in (normalised(right) for right, _ in question.answers) if right] or [
        ""
    ]
    return _best(
        [
            Grade(float(words == right), _f1_of_words(words.split(), right.split()))
            for right in rights
        ]
    )


def _best(grades: list[Grade]) -> Grade:
    return Grade(max(grade.exact for grade in grades), max(grade.f1 for grade in grades))


def _f1(shared: int, found: int, right: int) -> float:
    return 2 * shared / (found + right) if shared else 0.0


def _f1_of_words(found: list[str], right: list[str]) -> float:
    if not found or not right:
        return float(found == right)
    return _f1((Counter(found) & Counter(right)).total(), len(found), len(right))


def _by_characters(text: str, right: str) -> Grade:
    text, right = (answer.lower().strip().translate(_SYMBOLS) for answer in (text, right))
    a, b = _TOKEN.findall(text), _TOKEN.findall(right)
    return Grade(
        float(text == right), _f1(_longest_run(a, b), len(a), len(b)) if a and b else float(a == b)
    )


def _longest_run(a: Many[str], b: Many[str]) -> int:
    """The length of the longest run of tokens that is in both."""
    best, above = 0, [0] * (len(b) + 1)
    for token in a:
        row = [0] * (len(b) + 1)
        for place, other in enumerate(b):
            if token == other:
                row[place + 1] = above[place] + 1
        best, above = max(best, *row), row
    return best


def _floats() -> array[float]:
    return array("d")


@dataclass
class Graded:
    """What is kept of each question that went by: six numbers.

    Attributes:
        exact, f1: of the prediction.
        given_exact, given_f1: of the best answer, whether it was given or not.
        none: of no answer: 1 where there is none.
        difference: score of no answer, less that of the best answer.
        impossible: 1 where there is no answer.
    """

    exact: array[float] = field(default_factory=_floats)
    f1: array[float] = field(default_factory=_floats)
    given_exact: array[float] = field(default_factory=_floats)
    given_f1: array[float] = field(default_factory=_floats)
    none: array[float] = field(default_factory=_floats)
    difference: array[float] = field(default_factory=_floats)
    impossible: array[float] = field(default_factory=_floats)

    def add(self, question: Question, text: str, best: str, difference: float) -> None:
        """Take in a question.

        Args:
            text: what was predicted; "" for no answer.
            best: the best answer; `text` is that or "".
        """
        given, none = grade(best, question), grade("", question)
        chosen = given if text else none
        numbers = (
            chosen.exact,
            chosen.f1,
            given.exact,
            given.f1,
            none.f1,
            difference,
            float(question.impossible is True),
        )
        for column, number in zip(vars(self).values(), numbers, strict=True):
            column.append(number)

    def __len__(self) -> int:
        return len(self.f1)

    def metrics(self) -> Mapping[str, float]:
        """ "em" and "f1" of the predictions, and "f1_best", the F1 at the best threshold. If there are questions without an
        answer, also "em_best", "threshold_best" (for F1), and what holds of questions with ("_has") and without one ("_no")."""
        exact, f1, no = np.array(self.exact), np.array(self.f1), np.array(self.impossible) > 0
        threshold, best = best_threshold(self.difference, self.given_f1, self.none)
        found = {"em": float(exact.mean()), "f1": float(f1.mean()), "f1_best": best}
        if not no.any():
            return found
        found["em_best"] = best_threshold(self.difference, self.given_exact, self.none)[1]
        found["threshold_best"] = threshold
        found["em_no"] = float(exact[no].mean())
        if not no.all():
            found |= {"em_has": float(exact[~no].mean()), "f1_has": float(f1[~no].mean())}
        return found


def best_threshold(
    differences: Many[float], given: Many[float], none: Many[float]
) -> tuple[float, float]:
    """Above which difference no answer is to be given, and the mean grade that comes of it.

    As SQuAD 2.0's official script searches: from no answer at all, question after question by its difference. Two points are
    other than there: questions of one difference change together, since no threshold parts them; and the threshold is half-way
    to the next difference (beyond the ends, 1 away), where rounding does not flip a question. Of equal grades the lowest one.

    Args:
        differences: score of no answer less that of the best answer, for each question; at least one.
        given: the grade of its best answer.
        none: the grade of no answer.
    """
    order = np.argsort(differences, kind="stable")
    values, first = np.unique(np.asarray(differences, dtype=np.float64)[order], return_index=True)
    gains = np.add.reduceat((np.asarray(given) - np.asarray(none))[order], first)
    grades = np.concatenate([[0.0], np.cumsum(gains)]) + np.sum(none)
    at = int(np.argmax(grades))
    edges = np.concatenate([[values[0] - 2], values, [values[-1] + 2]])
    return float(edges[at] + edges[at + 1]) / 2, float(grades[at]) / len(order)
