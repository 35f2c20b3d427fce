"""Answering: windows as Google feeds them, losses and gradients as transformers has them, packed as alone, and every answer
found again from ideal scores, in every script."""

import dataclasses
import itertools
import re
import unicodedata
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import models, pre_tokenizers

from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError
from bothways.core.source import Sequence
from bothways.finetuning import data as labelled
from bothways.finetuning.data import examine
from bothways.model.config import EncoderConfig
from bothways.model.heads import SpanHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction import engine
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.predictions import AnswerPrediction
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnswerer, QuestionAnsweringTask
from bothways.tasks.text_task import windows
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_classes import Specials
from bothways.text.tokenizer_files import finish
from bothways.text.trainers import ByteBPE, train_vocabulary
from toy_task import VOCABULARY, bind_small, make_tokenizer
from toy_tasks import make_questions

LENGTH, ALWAYS = 24, QuestionAnsweringTask()
SPECIALS = VOCABULARY[:5]


def make_task(
    tokenizer: Tokenizer, definition: QuestionAnsweringTask = ALWAYS, length: int = LENGTH
) -> QuestionAnswerer:
    return bind_small(definition, tokenizer, (), length, seed=3, dropout=0.1)


def targets_of(sequence: Sequence) -> tuple[int, int, float]:
    targets = sequence.targets["span"]
    return int(targets.start[0]), int(targets.end[0]), float(targets.weight[0])


def test_questions_become_what_google_feeds(tokenizer):
    """As convert_examples_to_features of run_squad.py has it; its windows are in `test_spans.py`."""
    definition, questions = QuestionAnsweringTask(query=5, stride=6), make_questions(60)
    inputs = definition.encode(questions, tokenizer, (), 20)
    for example, item in zip(questions, inputs, strict=True):
        texts = example.question.split(), example.context.split()
        query, context = ([tokenizer.id(word) for word in words] for words in texts)
        read = query[:5]
        begin = len(read) + 2  # of the context, behind [CLS] and [SEP]
        span = (-1, -1)
        for text, start in example.answers:
            first = len(example.context[:start].split())
            span = (first, first + len(text.split()) - 1)
        parts = windows(len(context), 20 - begin - 1, 6)
        for sequence, part in zip(item.sequences, parts, strict=True):
            ids = [2, *read, 3, *context[part.start : part.stop], 3]
            assert sequence.ids.tolist() == ids
            assert sequence.segments.tolist() == [0] * begin + [1] * (len(ids) - begin)
            assert sequence.global_attention_mask.tolist() == [
                n < begin - 1 for n in range(len(ids))
            ]
            whole = part.start <= span[0] and span[1] < part.stop
            places = [place - part.start + begin if whole else 0 for place in span]
            assert targets_of(sequence) == (*places, 1.0)
        assert (item.tokens, item.cut) == (len(query) + len(context), max(0, len(query) - 5))


def test_what_is_not_known_has_no_weight(tokenizer):
    context = "ape bee \u200d cat bee"
    for text, known, expected in (
        (context, (), (0, 0, 0.0)),
        (context, (("fox", 0),), (0, 0, 0.0)),
        (context, (("\u200d", 8),), (0, 0, 0.0)),  # no token has it
        (context, (("bee", 0),), (4, 4, 1.0)),  # not where it should be; the nearest one
        (context, (("bee", 12),), (6, 6, 1.0)),
        (context, ((" cat ", 9), ("ape", 0)), (5, 5, 1.0)),  # the first, without white space
        (context, (("at be", 11),), (5, 6, 1.0)),  # the tokens that share a character
        ("bee   bee", (("   bee", 3),), (4, 4, 1.0)),  # behind the white space
    ):
        question = Question("q", "dog", text, known)
        (item,) = QuestionAnsweringTask().encode([question], tokenizer, (), 20)
        assert targets_of(item.sequences[0]) == expected
    long = Question("q", "ape " * 50, "bee " * 9)  # leaves half of the room to the context
    (item,) = QuestionAnsweringTask().encode([long], tokenizer, (), 13)
    assert ([len(sequence) for sequence in item.sequences], item.cut) == ([13, 12], 45)


def ideal(sequences: tuple[Sequence, ...]) -> list[np.ndarray]:
    """What a perfect model says of each window."""
    outputs = []
    for sequence in sequences:
        start, end, _ = targets_of(sequence)
        draw = np.random.default_rng(len(sequence))
        scores = draw.uniform(-1, 0, (len(sequence), 2)).astype(np.float32)
        scores[start, 0] = scores[end, 1] = 9.0
        outputs.append(scores)
    return outputs


# Letters with marks composed and not, from right to left, without spaces; joined emoji, a flag, a mark of direction.
LETTERS = [
    *"aBéßİñяלم7½.-，語中ष",
    *("e\u0301", "q\u0308\u0323", "ש\u05c1", "ر\u064e", "क\u094d", "ก\u0e49", "か\u3099"),
    *("👩\u200d🚀", "❤\ufe0f", "🇩🇪", "\u200f"),
]


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, int, int]:
    """A context of words in any script, and the first and the last character of some of them."""
    word_of_letters = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4).map("".join)
    words = draw(st.lists(word_of_letters, min_size=1, max_size=14))
    context, places = "", []
    for word in words:
        context += draw(st.sampled_from(["", " ", "  ", "\n", "\u00a0"]))
        places.append((len(context), len(context) + len(word)))
        context += word
    first = draw(st.integers(0, len(words) - 1))
    last = draw(st.integers(first, len(words) - 1))
    return context, places[first][0], places[last][1]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> list[Tokenizer]:
    """WordPiece cased and uncased, byte-level BPE and Unigram, each with every letter."""
    folder = tmp_path_factory.mktemp("scripts")
    characters = {character for letter in LETTERS for character in (*letter, *letter.lower())}
    letters = sorted(characters - {"\u200f", "\u200d"})
    tokens = (*SPECIALS, *letters, *(f"##{letter}" for letter in letters))
    made = [make_tokenizer(folder / str(lower), tokens, lower) for lower in (True, False)]
    return [*made, train_vocabulary(["a b"], ByteBPE(270)), unigram(letters)]


def unigram(letters: list[str]) -> Tokenizer:
    pieces = [(token, 0.0) for token in SPECIALS]
    backend = tokenizers.Tokenizer(
        models.Unigram([*pieces, ("▁", -2.0), *((letter, -3.0) for letter in letters)], unk_id=1)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = Specials(0, 1, 2, 3, 4)
    return Tokenizer(finish(backend, specials), specials)


@given(texts(), st.integers(0, 3), st.integers(6, 40), st.integers(1, 12), st.integers(1, 12))
def test_every_answer_is_found_again(scripts, drawn, which, length, stride, longest):
    """An answer that is in a window, and not too long, is the best span by far; what it lacks is what no token has."""
    context, start, end = drawn
    definition = QuestionAnsweringTask(query=3, stride=stride, longest=longest)
    tokenizer = scripts[which]
    question = Question("q", "a", context, ((context[start:end], start),))
    (item,) = definition.encode([question], tokenizer, (), length)
    (encoded,) = tokenizer.encode_with_offsets([context])
    own = [place for place, (a, b) in enumerate(encoded.offsets.tolist()) if b > start and a < end]
    places = [targets_of(sequence)[:2] for sequence in item.sequences]
    inside = any(first > 0 for first, _ in places)
    for sequence, (first, last) in zip(item.sequences, places, strict=True):
        assert first == 0 or sequence.ids[first : last + 1].tolist() == encoded.ids[own].tolist()
    config = EncoderConfig(tokenizer.size, 8, 1, 1, 8, position=Learned(64))
    task = definition.bind(Model(config, (SpanHead(),)), tokenizer, (), length)
    found = task.decode(question, item, ideal(item.sequences))
    for span in found.spans:
        assert context[span.start : span.end] == span.text == span.text.strip()
    best = max((span.score for span in found.spans), default=0.0)
    if not inside or len(own) > longest:
        assert best <= 9
        return
    assert found.start is not None
    assert found.end is not None
    assert best == 18
    begin, stop = encoded.offsets[own[0], 0], encoded.offsets[own[-1], 1]
    assert context[begin:stop].strip() in found.text
    if start <= begin and stop <= end:
        assert start <= found.start < found.end <= end
        lacking = context[start : found.start] + context[found.end : end]
        assert all(unicodedata.category(character)[0] in "CZ" for character in lacking)


CONTEXT = "ape bee ape cat"
ONE = Question("q7", "dog", CONTEXT, (("bee", 4),), False)
ROWS = [(1.0, 1.0), (0, 0), (0, 0), (3, 1), (0, 2.5), (2, 3.5), (-9, -9), (0, 0)]
SCORES = [np.array(ROWS, dtype=np.float32)]
"""[CLS] dog [SEP] ape bee ape cat [SEP]: the best are "ape bee ape" with 6.5, "ape bee" and "ape" (5.5; the second one)."""


def test_predictions_have_their_probabilities(tokenizer):
    task = make_task(tokenizer, QuestionAnsweringTask(n_best=4))
    found = task.decode(ONE, task.encode([ONE])[0], SCORES)
    spans = [(span.text, span.start, span.end, span.score) for span in found.spans]
    # The fourth best is the other "ape" (4), which is that text again.
    assert spans == [("ape bee ape", 0, 11, 6.5), ("ape bee", 0, 7, 5.5), ("ape", 8, 11, 5.5)]
    weights = np.exp([6.5, 5.5, 5.5])
    chances = [span.probability for span in found.spans]
    assert chances == pytest.approx((weights / weights.sum()).tolist())
    assert (found.id, found.text, found.start, found.end) == ("q7", "ape bee ape", 0, 11)
    assert found.confidence == found.spans[0].probability
    assert found.null_difference == 2.0 - 6.5
    assert task.grade(ONE, found) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("threshold", "text"), [(-4.6, ""), (-4.5, "ape bee ape"), (0.0, "ape bee ape")]
)
def test_no_answer_is_given_above_the_threshold(tokenizer, threshold, text):
    task = make_task(tokenizer, QuestionAnsweringTask(threshold=threshold))
    found = task.decode(ONE, task.encode([ONE])[0], SCORES)
    assert found.text == text
    assert found.best == "ape bee ape"
    weights = np.exp([*(span.score for span in found.spans), 2.0])
    expected = weights[0 if text else -1] / weights.sum()
    assert found.confidence == pytest.approx(expected, rel=1e-5)
    assert (found.start is None, found.end is None) == (not text, not text)


def test_the_least_score_of_all_windows_is_that_of_no_answer(tokenizer):
    task = make_task(tokenizer, QuestionAnsweringTask(stride=2), length=8)
    question = Question("q", "dog", "ape bee cat dog elk fox", (), True)
    outputs = [*np.zeros((2, 8, 2), dtype=np.float32)]
    outputs[0][0], outputs[1][0] = (1.0, 4.0), (-3.0, 1.0)
    outputs[1][4, 0] = outputs[1][5, 1] = 2.0
    found = task.decode(question, task.encode([question])[0], outputs)
    assert (found.text, found.null_difference) == ("dog elk", -6.0)


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_a_context_without_a_token_has_no_answer(tokenizer, threshold):
    task = make_task(tokenizer, QuestionAnsweringTask(threshold=threshold))
    questions = [Question("q", "", context) for context in ("", "  ", "\u200d")]
    for _, found in predict(task, questions):
        assert found == AnswerPrediction("q", "", None, None, 1.0, 0.0, ())
        assert found.best == ""


def test_the_threshold_is_chosen_where_questions_have_no_answer(tokenizer):
    task, questions = make_task(tokenizer), make_questions(30, 5)
    results = list(predict(task, questions))
    metrics = task.score(iter(results))
    tuned = task.tuned(iter(results))
    assert tuned == dataclasses.replace(task.task, threshold=metrics["threshold_best"])
    assert configs.read(QuestionAnsweringTask, configs.to_dict(tuned)) == tuned
    task.task = tuned
    after = evaluate_task(task, questions)
    assert after["f1"] == pytest.approx(metrics["f1_best"]) == pytest.approx(after["f1_best"])
    assert metrics["f1"] < after["f1"]
    assert task.tuned(predict(task, questions)) == tuned
    answered = [question for question in questions if question.answers]
    task.task = QuestionAnsweringTask()
    assert task.tuned(predict(task, answered)) is task.task
    assert task.score(predict(task, answered)).keys() == {"em", "f1", "f1_best"}


def test_settings_that_cannot_be_are_refused():
    for name in ("query", "stride", "longest", "n_best"):
        with pytest.raises(ConfigError, match=rf"^{name}: must be at least 1, not 0"):
            QuestionAnsweringTask(**{name: 0})
    with pytest.raises(ConfigError, match=r"^dropout: the head of this task has none"):
        ALWAYS.heads((), 0.1)


def test_what_no_answer_reaches():
    none = Question("q", "dog", CONTEXT, (), True)
    assert ALWAYS.baseline([ONE, none, none, none]) == {"f1": 0.75, "em": 0.75, "f1_best": 0.75}
    assert ALWAYS.baseline([ONE]) == ALWAYS.baseline([none]) == {}


def test_each_context_is_tokenized_once(tokenizer, monkeypatch):
    task = make_task(tokenizer)
    contexts = ["the cat", "a dog runs"] * 4
    questions = [Question(f"{n}", f"what {n}", text, (), True) for n, text in enumerate(contexts)]
    seen, real = list[str](), Tokenizer.encode_with_offsets

    def counting(self: Tokenizer, texts: Any) -> Any:
        seen.extend(texts)
        return real(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_with_offsets", counting)
    assert len(list(predict(task, questions))) == len(questions)
    assert sorted(seen) == ["a dog runs", "the cat"]
    ordered = sorted(questions, key=lambda q: q.context)  # windows would part them
    monkeypatch.setattr(labelled, "ENCODED", 3)
    for run in (
        lambda: list(predict(make_task(tokenizer), ordered, window=3)),
        lambda: examine(task.task, task.tokenizer, ordered, [], LENGTH),
    ):
        seen.clear()
        run()
        assert sorted(seen) == ["a dog runs", "the cat"]


@given(st.lists(st.sampled_from(["", "a", "b"]), max_size=30), st.integers(1, 5))
def test_windows_part_no_neighbours_that_share_something(items, size):
    found = list(engine.grouped(items, size, lambda item: item or None))
    assert [item for window in found for item in window] == items
    for one, other in itertools.pairwise(found):
        assert other[0] == "" or other[0] != one[-1]
    for window in found:
        assert len(window) <= size or len({*window[size - 1 :]} - {""}) == 1
        assert len(window) >= size or window is found[-1]
    assert all(len(window) == size for window in [*engine.grouped(items, size)][:-1])


CATS = "The cat sat on the mat. The cat slept."
GOOD = Question("a", "Who sat?", CATS, (("cat", 4),), False, "t.json:a")
OTHER = Question("a", "Who slept?", CATS, (("cat", 28),), False, "d.json:a")
NONE = Question("n", "Who flew?", CATS, (), True, "t.json:n")


AWAY = replace(GOOD, id="b", where="t.json:b", answers=(("dog", 4),))
BARKED = replace(NONE, question="Who barked?")
BEGIN = "there are .* without an answer, but no such"


@pytest.mark.parametrize(
    ("train", "dev", "threshold", "expected"),
    [
        ([GOOD], [OTHER], None, []),
        ([GOOD], [], None, []),
        (
            [GOOD, replace(GOOD, where="t.json:again"), replace(GOOD, id="e", question=" "), replace(GOOD, id="f", context="")],
            [replace(OTHER, answers=())], None,
            [
                ("rows error", "^2 examples have an empty text: t.json:a, t.json:a$"),
                ("rows error", "^2 questions share their id with others: t.json:a, t.json:again$"),
                ("rows error", "^1 question has no answer and is not marked as .*: d.json:a$"),
                ("labels warning", "^1 of 4 training answers are not in their context"),
            ],
        ),
        (
            [
                GOOD, replace(AWAY, answers=(("dog", 4), ("cat", 4))),
                replace(GOOD, id="c", where="t.json:c", answers=(("cat", 5),)),
                replace(GOOD, id="d", answers=((" cat ", 3), ("dog", 1))),
                replace(GOOD, id="e", answers=(("cat", -1),)),
            ],
            [replace(OTHER, id="z", answers=(("cow", 4),)), OTHER], None,
            [
                ("labels warning", r"^1 of 5 training .* and are skipped: t.json:b \('dog'\)$"),
                ("labels note", r"^1 training answer does not begin at .*: t.json:c \('cat'\)$"),
                ("labels warning", r"^1 of 2 dev questions has no answer .*: d.json:a \('cow'\)$"),
            ],
        ),
        (
            [AWAY], [], None,
            [("labels error", r"^1 of 1 training answers are not in their context: t.json:b \('dog'\)$")],
        ),
        ([AWAY, NONE], [], 0.0, [("labels warning", "are skipped"), ("balance note", "no answer is")]),
        ([GOOD], [replace(OTHER, answers=(("dog", 4), ("cat", 28)))], None, []),  # one can be given
        ([GOOD, NONE], [OTHER, BARKED], None, [("balance note", "50.0% of .* and 50.0% of the dev")]),
        ([GOOD, NONE], [], None, [("balance note", ""), ("labels warning", f"^{BEGIN} dev")]),
        ([GOOD, NONE], [OTHER], None, [("balance note", ""), ("labels warning", f"^{BEGIN} dev")]),
        ([GOOD, NONE], [OTHER], 0.0, [("balance note", "")]),
        ([GOOD], [OTHER, BARKED], None, [("balance note", ""), ("labels warning", f"^{BEGIN} train")]),
        ([NONE], [OTHER], None, [("balance note", ""), ("labels error", "no training question has")]),
        (
            [GOOD], [replace(GOOD, id="z", where="d.json:z"), OTHER], None,
            [("overlap warning", "^1 of 2 dev questions is also in the training data: d.json:z$")],
        ),
        ([GOOD], [replace(OTHER, question=GOOD.question, context=f"{CATS} So.")], None, []),
    ],
)  # fmt: skip
def test_flaws_of_questions_are_found(train, dev, threshold, expected):
    found = QuestionAnsweringTask(threshold=threshold).check(train, dev)
    assert [f"{item.check} {item.severity}" for item in found] == [kind for kind, _ in expected]
    for item, (_, message) in zip(found, expected, strict=True):
        assert re.search(message, item.what)
        assert item.where == ("task.threshold" if message.endswith("such dev") else None)
