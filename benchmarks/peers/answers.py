"""Answers in texts: AutoModelForQuestionAnswering, prepared and decoded as transformers' example run_qa does it.

What differs from this library, as the example has it: windows overlap by 128 tokens (here each begins 128 after the one
before); questions are read whole (here 64 tokens); of each window the 20 best starts meet the 20 best ends; all windows that
have a span compete with it, without the rule of the most context. The example pads all sequences to 384 tokens unless told
otherwise; here it is, which is faster, but for runs by the defaults. Both sides are scored by the formula of SQuAD 1.1
(Rajpurkar et al. 2016).
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, DataCollatorWithPadding

from bothways.finetuning.data import LabelledData
from bothways.tasks.question_answering.examples import Question
from peers.peer import Peer, Plan, Trained, train

OVERLAP, N_BEST, LONGEST = 128, 20, 30
CONTEXT = 1
"""What the tokenizer calls the second text of a pair."""


def answers(data: LabelledData, plan: Plan) -> Trained:
    """A text for each question."""
    tokenizer = AutoTokenizer.from_pretrained(plan.folder)
    windows, asked = (
        _windows(tokenizer, examples, plan.length)
        for examples in (data.train_examples, data.dev_examples)
    )
    rows = [
        _row(windows, place) | _target(windows, place, data.train_examples)
        for place in range(len(windows["input_ids"]))
    ]

    model = functools.partial(AutoModelForQuestionAnswering.from_pretrained, plan.folder)
    places = range(len(asked["input_ids"]))
    scores, seconds, tokens = train(
        model, rows, [_row(asked, place) for place in places], plan, DataCollatorWithPadding
    )
    owned: list[list[int]] = [[] for _ in data.dev_examples]
    for place in places:
        owned[asked["overflow_to_sample_mapping"][place]].append(place)
    answers = [
        _best(example.context, asked, own, scores)
        for example, own in zip(data.dev_examples, owned, strict=True)
    ]
    return Trained(answers, seconds, tokens)


def _windows(tokenizer: Any, examples: Many[Question], length: int) -> Any:
    """The windows of all questions, each with its question's place in the list."""
    return tokenizer(
        [example.question.lstrip() for example in examples],
        [example.context for example in examples],
        truncation="only_second",
        max_length=length,
        stride=OVERLAP,
        padding=False,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def _row(windows: Any, place: int) -> dict[str, Any]:
    return {name: windows[name][place] for name in ("input_ids", "token_type_ids")}


def _target(windows: Any, place: int, examples: Many[Question]) -> dict[str, int]:
    """First and last token of the first answer; [CLS], the first token, where the window does not hold it whole."""
    example = examples[windows["overflow_to_sample_mapping"][place]]
    text, start = example.answers[0]
    offsets, owners = windows["offset_mapping"][place], windows.sequence_ids(place)
    context = [at for at, owner in enumerate(owners) if owner == CONTEXT]
    end = start + len(text)
    if not context or offsets[context[0]][0] > start or offsets[context[-1]][1] < end:
        return {"start_positions": 0, "end_positions": 0}
    return {
        "start_positions": max(at for at in context if offsets[at][0] <= start),
        "end_positions": min(at for at in context if offsets[at][1] >= end),
    }


def _best(text: str, windows: Any, own: Many[int], scores: Many[NDArray[np.float32]]) -> str:
    """The best span of all windows of a question; "empty" where there is none, as in the example."""
    found: list[tuple[float, int, int]] = []
    for place in own:
        offsets, owners = windows["offset_mapping"][place], windows.sequence_ids(place)
        starts, ends = scores[0][place], scores[1][place]
        allowed = {at for at, owner in enumerate(owners) if owner == CONTEXT}
        for first in (at for at in _most(starts) if at in allowed):
            for last in (
                at for at in _most(ends) if at in allowed and first <= at < first + LONGEST
            ):
                found.append(
                    (float(starts[first] + ends[last]), offsets[first][0], offsets[last][1])
                )
    ordered = sorted(found, key=lambda span: -span[0])[:N_BEST]
    return next((text[start:end] for _, start, end in ordered if start < end), "empty")


def _most(scores: NDArray[np.float32]) -> list[int]:
    """The places of the best scores, best first; those of padding are among them, and stand for nothing."""
    return np.argsort(-scores, kind="stable")[:N_BEST].tolist()  # type: ignore[no-any-return]


def score_answers(examples: Many[Question], answers: list[Any], metric: str) -> float:
    """Mean over the questions of the F1, or the exact match, with the nearest right answer."""
    formula = {"f1": _f1, "em": lambda found, right: float(_words(found) == _words(right))}[metric]
    nearest = [
        max(formula(text, right) for right, _ in example.answers)
        for example, text in zip(examples, answers, strict=True)
    ]
    return float(np.mean(nearest))


def _words(text: str) -> list[str]:
    """Lower-cased, without punctuation and articles."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _f1(found: str, right: str) -> float:
    words, gold = _words(found), _words(right)
    shared = sum((Counter(words) & Counter(gold)).values())
    return 2 * shared / (len(words) + len(gold)) if shared else 0.0


ANSWERS = Peer(answers, lambda prediction: prediction.text, score_answers, padded=384)
