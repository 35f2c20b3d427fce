"""Each kind of prediction looked at: kinds of errors on constructed cases, figures against scikit-learn, and whole pages."""

import html
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import f1_score, precision_recall_fscore_support

from bothways.core.errors import ConfigError
from bothways.core.report import sections as s
from bothways.core.report.html import write_html
from bothways.prediction.analysis import analyses
from bothways.prediction.analysis.base import TaskAnalysis, clip, guesses
from bothways.prediction.analysis.report import analyse, analysis_of, analysis_report, is_analysed
from bothways.tasks import predictions
from bothways.tasks.catalogue import TASKS
from bothways.tasks.choice.task import ChoiceExample
from bothways.tasks.multilabel.task import MultilabelExample
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.reranking.task import RankExample, RerankingTask
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import Chunk, EntityCounts, chunks
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextExample
from toy_task import bind_small, make_tokenizer
from toy_tasks import TAGS, TOY_TASKS, make_sentences


def test_what_is_said_of_calibration_is_of_predictions_and_not_of_bins():
    """Eight are right and say 0.9, one is wrong and says 0.5: less sure than they could be, by (8 · 0.1 − 0.5) / 9."""
    analysis = TaskAnalysis[Any, Any]()
    for confidence, right in [(0.9, True)] * 8 + [(0.5, False)]:
        analysis.calibration.add(confidence, right)
    curve, details = analysis.reliability()
    assert curve.lines[0].x == pytest.approx([0.5, 0.9])
    assert curve.lines[0].y == [0.0, 1.0]
    assert curve.lines[1] == s.Line("perfectly calibrated", [0.0, 1.0], [0.0, 1.0])
    note = "equal width): 14.4 %. On average the model is 3.3 % less confident than right."
    assert note in curve.note
    (table,) = details.sections
    assert table.rows == [[1, "50.0 %", "0.0 %"], [8, "90.0 %", "100.0 %"]]
    analysis.calibration.add(1.0, False)
    (curve, _) = analysis.reliability()
    assert "the model is 7.0 % more confident than right." in curve.note


def answers_of(shown: Sequence[s.ReportGuess]) -> list[tuple[str, bool]]:
    return [(guess.answer, guess.right) for guess in shown]


def test_the_right_answer_is_shown_though_it_is_improbable():
    chances = {"a": 0.1, "b": 0.4, "c": 0.05, "d": 0.25, "e": 0.2}
    expected = [("b", False), ("d", False), ("e", False), ("c", True)]
    assert answers_of(guesses(chances, "c")) == expected
    assert [guess.answer for guess in guesses(chances, None)] == ["b", "d", "e"]


@pytest.mark.parametrize(
    ("truth", "predicted", "kinds"),
    [
        ([("PER", 0, 2)], [("PER", 0, 2)], ["right"]),
        ([("PER", 0, 2)], [("LOC", 0, 2)], ["other type"]),
        ([("PER", 0, 2)], [("PER", 1, 2)], ["other boundary"]),
        ([("PER", 0, 2)], [("LOC", 1, 4)], ["other type and boundary"]),
        ([("PER", 0, 2)], [], ["missed"]),
        ([], [("PER", 0, 2)], ["spurious"]),
        ([("PER", 0, 2)], [("PER", 2, 4)], ["missed", "spurious"]),
        ([("PER", 0, 4)], [("PER", 0, 1), ("PER", 2, 4)], ["other boundary", "spurious"]),
        ([("PER", 0, 2), ("LOC", 2, 3)], [("PER", 0, 3)], ["other boundary", "missed"]),
        ([("PER", 0, 2), ("LOC", 2, 3)], [("LOC", 0, 3), ("LOC", 2, 3)], ["right", "other type and boundary"]),
    ],
)  # fmt: skip
def test_what_becomes_of_entities(truth, predicted, kinds):
    true, other = ([Chunk(*chunk) for chunk in row] for row in (truth, predicted))
    assert [kind for _, kind in analyses.outcomes(true, other)] == kinds


SENTENCES = st.lists(
    st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1, max_size=12
)


@settings(max_examples=100)
@given(SENTENCES)
def test_kinds_add_up_to_the_counts_of_the_scores(pairs):
    truth, predicted = (chunks([pair[at] for pair in pairs]) for at in (0, 1))
    counts, found = EntityCounts(), [kind for _, kind in analyses.outcomes(truth, predicted)]
    counts.add(truth, predicted)
    assert found.count("right") == counts.right.total()
    assert len(found) - found.count("spurious") == counts.expected.total()
    assert len(found) - found.count("missed") == counts.predicted.total()


def tagged(tags: Sequence[str], chance: float = 0.9) -> predictions.TagPrediction:
    rows = np.full((len(tags), len(TAGS)), (1 - chance) / (len(TAGS) - 1))
    rows[np.arange(len(tags)), [TAGS.index(tag) for tag in tags]] = chance
    return predictions.TagPrediction(("Ada", "in", "Oslo")[: len(tags)], tuple(tags), rows)


def test_tags_are_counted_and_shown():
    tags = analyses.TagAnalysis(TaggingTask(), TAGS)
    example = TagExample(("Ada", "in", "Oslo"), ("B-PER", "O", "B-LOC"), "made:1")
    right, wrong = tagged(["B-PER", "O", "B-LOC"]), tagged(["B-LOC", "O", "O"])
    for prediction in (right, wrong):
        tags.add(example, prediction)
    kinds, confusions, by_tag, curve, _ = tags.sections()
    *_, total = kinds.rows
    assert kinds.rows[:2] == [["LOC", 1, 0, 0, 0, 1, 0], ["PER", 1, 1, 0, 0, 0, 0]]
    assert total == ["all", 2, 1, 0, 0, 1, 0]
    assert (list(kinds.columns), kinds.total) == (["type", *analyses.OUTCOMES], True)
    assert tags.baseline() == {"accuracy": pytest.approx(1 / 3), "f1": 0.0}
    assert confusions.counts[1] == [1, 1, 0, 0, 0]
    assert isinstance(by_tag, s.TableSection)
    assert curve.lines[0].y == pytest.approx([4 / 6])
    assert tags.add(example, wrong).cost == pytest.approx(-np.log([0.025, 0.9, 0.025]).sum())
    assert tags.add(example, wrong).doubt == pytest.approx(0.875)
    assert tags.add(example, right).doubt is None
    assert tags.add(example, tagged(["B-LOC", "O", "O"], 0.6)).doubt is None
    shown = tags.show(example, wrong)
    assert shown.parts == [s.Marked("Ada"), " ", "in", " ", s.Marked("Oslo"), " "]
    assert shown.truth == "Ada: B-PER, Oslo: B-LOC"
    assert [guess.answer for guess in shown.guesses] == ["Ada: B-LOC", "Oslo: O"]
    assert tags.show(example, right).truth == "as predicted"


def test_of_wrong_tags_the_surest_are_shown_first():
    words, chances = tuple("abcde"), (0.5, 0.9, 0.99, 0.7, 0.6)
    rows = np.array([[chance, *[(1 - chance) / 4] * 4] for chance in chances])
    shown = analyses.TagAnalysis(TaggingTask(), TAGS).show(
        TagExample(words, ("B-LOC", "B-LOC", "O", "B-LOC", "B-LOC"), "made:2"),
        predictions.TagPrediction(words, ("O",) * 5, rows),
    )
    surest = [(guess.answer, guess.probability) for guess in shown.guesses]
    assert surest == [("b: O", 0.9), ("d: O", 0.7), ("e: O", 0.6)]
    assert shown.truth == "b: B-LOC, d: B-LOC, e: B-LOC"
    assert [part.text for part in shown.parts if isinstance(part, s.Marked)] == ["a", "b", "d", "e"]


def test_plain_tags_have_no_kinds_of_errors():
    tags = analyses.TagAnalysis(TaggingTask(scheme="plain"), TAGS)
    tags.add(TagExample(("Ada",), ("O",)), tagged(["O"]))
    kinds = [s.ConfusionMatrix, s.TableSection, s.Curves, s.Details]
    assert [type(part) for part in tags.sections()] == kinds
    assert tags.baseline() == {"accuracy": 1.0}


CONTEXT = "The big cat sat on a mat in Oslo."


def answered(text: str, confidence: float = 0.9) -> predictions.AnswerPrediction:
    at = CONTEXT.index(text) if text else None
    spans = (
        predictions.AnswerSpan("cat", 8, 11, 1.0, 0.5),
        predictions.AnswerSpan("mat", 21, 24, 0.5, 0.25),
        predictions.AnswerSpan("Oslo", 28, 32, 0.2, 0.1),
    )
    end = None if at is None else at + len(text)
    return predictions.AnswerPrediction("q", text, at, end, confidence, 0.0, spans)


KNOWN = Question("q", "Who sat?", CONTEXT, (("big cat", 4), ("cat", 8)), False, "made:q")
UNKNOWN = Question("q", "Who ran?", CONTEXT, (), True)


@pytest.mark.parametrize(
    ("question", "text", "kind"),
    [
        (KNOWN, "cat", "right"),
        (KNOWN, "The big cat", "right"),  # articles do not count
        (KNOWN, "cat sat", "boundary wrong"),
        (KNOWN, "Oslo", "another place"),
        (KNOWN, "", "no answer given"),
        (UNKNOWN, "", "right to give none"),
        (UNKNOWN, "Oslo", "answer though there is none"),
    ],
)
def test_what_becomes_of_questions(question, text, kind):
    answers = analyses.AnswerAnalysis()
    answers.add(question, answered(text))
    assert answers.kinds == {kind: 1}
    assert answers.baseline() == {}  # where all have an answer, or none has


def test_answers_are_counted_and_shown():
    answers = analyses.AnswerAnalysis()
    for question, text in ((KNOWN, "cat"), (KNOWN, "Oslo"), (KNOWN, "cat sat"), (UNKNOWN, "")):
        answers.add(question, answered(text))
    table, curve, _ = answers.sections()
    assert [row[2:] for row in table.rows] == [[1, "25.0 %"]] * 4 + [[0, "0.0 %"]] * 2
    assert curve.lines[0].y == [0.5]
    assert answers.baseline() == {"em": 0.25, "f1": 0.25, "f1_best": 0.25}
    assert answers.add(KNOWN, answered("Oslo", 0.6)).cost == pytest.approx(0.6)
    assert answers.add(KNOWN, answered("cat sat", 0.6)).cost == pytest.approx(0.6 * (1 - 2 / 3))
    assert answers.add(KNOWN, answered("Oslo")).doubt == 0.9
    assert answers.add(KNOWN, answered("Oslo", 0.6)).doubt is None
    assert answers.add(KNOWN, answered("cat sat")).doubt is None
    shown = answers.show(KNOWN, answered("Oslo"))
    pieces = [part if isinstance(part, str) else f"[{part.text}]" for part in shown.parts]
    assert "".join(pieces) == "Who sat? ‖ The big cat sat on a mat in [Oslo]."
    assert answers_of(shown.guesses) == [("Oslo", False), ("cat", True), ("mat", False)]
    assert shown.truth == "big cat / cat"
    named = Question("q", "who", "the Broncos won", (("the Broncos", 0),), False)
    broncos = predictions.AnswerPrediction("q", "Broncos", 4, 11, 0.9, 0.0, ())
    assert answers_of(answers.show(named, broncos).guesses) == [("Broncos", True)]  # no article
    best = answers.show(KNOWN, answered("cat"))  # the first of the spans, which is shown once
    assert answers_of(best.guesses) == [("cat", True), ("mat", False), ("Oslo", False)]
    nothing = answers.show(UNKNOWN, answered(""))
    assert nothing.truth == analyses.NONE
    assert nothing.guesses[0] == s.ReportGuess(analyses.NONE, 0.9, True)


def test_of_a_long_context_what_is_near_the_answer_is_shown():
    context = "x" * 300 + "cat" + "y" * 300
    question = Question("q", "Who?", context, (("cat", 300),), False)
    cat = predictions.AnswerPrediction("q", "cat", 300, 303, 0.9, 0.0, ())
    none = predictions.AnswerPrediction("q", "", None, None, 0.9, 0.0, ())
    surroundings = ["… " + "x" * 200, s.Marked("cat"), "y" * 200 + " …"]
    assert analyses.AnswerAnalysis().show(question, cat).parts[1:] == surroundings
    assert analyses.AnswerAnalysis().show(question, none).parts[1:] == [clip(context)]


def test_residuals_are_numpys():
    rng = np.random.default_rng(0)
    truth, predicted = rng.normal(size=(2, analyses.POINTS + 500))
    scores = analyses.ScoreAnalysis()
    for a, b in zip(truth.tolist(), predicted.tolist(), strict=True):
        scores.add(TextExample("x", label=repr(a)), predictions.ScorePrediction(b))
    cloud, rest, table = scores.sections()
    assert cloud.x == truth[::2].tolist()
    assert rest.y == (predicted - truth)[::2].tolist()
    assert "750 of 1,500 examples" in rest.note
    low, high = min(*truth, *predicted), max(*truth, *predicted)
    assert cloud.line == ((low, low), (high, high))
    assert rest.line == ((truth.min(), 0.0), (truth.max(), 0.0))
    left = predicted - truth
    expected = [left.mean(), abs(left).mean(), (left**2).mean() ** 0.5]
    expected += [*np.quantile(left, [0.05, 0.5, 0.95]), abs(left).max()]
    assert [row[1] for row in table.rows] == pytest.approx(expected)
    baseline = {"spearman": 0.0, "pearson": 0.0, "mse": pytest.approx(truth.var())}
    assert scores.baseline() == baseline
    pair, one = TextExample("x", "y", "2.5"), predictions.ScorePrediction(1.0)
    assert scores.add(pair, one).cost == 2.25
    assert "2.500, predicted 1.000" in scores.show(pair, one).truth


def test_each_label_is_scikit_learns():
    rng = np.random.default_rng(0)
    names = ("a", "b", "c")
    truth, chances = rng.random((80, 3)) < 0.4, rng.random((80, 3))
    labels = analyses.LabelSetAnalysis(names)
    for row, probabilities in zip(truth, chances, strict=True):
        held, given = (tuple(itertools.compress(names, x)) for x in (row, probabilities >= 0.5))
        by_name = dict(zip(names, probabilities.tolist(), strict=True))
        prediction = predictions.MultilabelPrediction(given, by_name)
        labels.add(MultilabelExample("x", None, held), prediction)
    table, curve, _ = labels.sections()
    held, mean = calibration_curve(truth.ravel(), chances.ravel(), n_bins=15)
    assert [part.confidence for part in labels.calibration.bins] == pytest.approx(mean)
    assert [part.accuracy for part in labels.calibration.bins] == pytest.approx(held)
    assert curve.lines[0].x == [part.confidence for part in labels.calibration.groups]
    constants = [
        f1_score(truth, np.broadcast_to(answer, truth.shape), average="micro")
        for answer in itertools.product((False, True), repeat=3)
        if any(answer)
    ]
    assert labels.baseline()["f1_micro"] == pytest.approx(max(constants))
    scores = np.array(precision_recall_fscore_support(truth, chances >= 0.5)[:3]).T
    assert [row[3:] for row in table.rows] == [[*map(s.percentage, row)] for row in scores]
    assert sum(part.examples for part in labels.calibration.bins) == 240


def test_a_label_set_is_shown_by_what_is_furthest_from_the_truth():
    labels = analyses.LabelSetAnalysis(("a", "b"))
    example = MultilabelExample("x", "y", ("b",))
    prediction = predictions.MultilabelPrediction(("a", "b"), {"a": 0.9, "b": 0.7})
    assert labels.add(example, prediction).cost == pytest.approx(-(np.log(0.1) + np.log(0.7)) / 2)
    assert labels.add(example, prediction).doubt == pytest.approx(0.9)
    unsure = predictions.MultilabelPrediction(("b",), {"a": 0.3, "b": 0.7})
    assert labels.add(example, unsure).doubt is None
    shown = [s.ReportGuess("a", 0.9, False), s.ReportGuess("b", 0.7, True)]
    assert labels.show(example, prediction).guesses == shown
    assert labels.show(MultilabelExample("x", None, ()), prediction).truth == "no label"


def test_choices_are_counted_and_shown():
    choices = analyses.ChoiceAnalysis()
    example = ChoiceExample("It", ("rains", "snows", "ends"), 1)
    wrong = predictions.ChoicePrediction(0, "rains", (0.85, 0.1, 0.05))
    right = predictions.ChoicePrediction(1, "snows", (0.1, 0.8, 0.1))
    for prediction in (wrong, right, right):
        choices.add(example, prediction)
    confusions, _, curve, _ = choices.sections()
    assert confusions.counts == [[0, 0], [1, 2]]
    assert choices.baseline() == {"accuracy": 1.0}
    assert curve.lines[0].x == pytest.approx([0.8, 0.85])
    assert curve.lines[0].y == [1.0, 0.0]
    assert choices.add(example, wrong).cost == pytest.approx(-np.log(0.1))
    assert choices.add(example, wrong).doubt == pytest.approx(0.75)
    assert choices.add(example, right).doubt is None
    beyond = predictions.ChoicePrediction(2, "ends", (0.1, 0.2, 0.7))
    choices.add(example, beyond)  # an ending that was never right
    confusions, *_ = choices.sections()
    assert list(confusions.labels) == ["ending 1", "ending 2", "ending 3"]
    assert confusions.counts == [[0, 0, 0], [3, 3, 1], [0, 0, 0]]
    shown = choices.show(example, wrong)
    assert (shown.truth, shown.guesses[1]) == ("2. snows", s.ReportGuess("2. snows", 0.1, True))


def ranked(query: str, labels: list[float], logits: list[float]) -> tuple[Any, Any]:
    """A query with documents named d0, d1, …, and their scores."""
    documents = tuple(f"d{at}" for at in range(len(labels)))
    example = RankExample(query, documents, tuple(map(float, labels)), f"made:{query}")
    return example, predictions.RankPrediction(query, documents, tuple(logits), tuple(logits))


def test_rankings_are_counted_and_shown():
    first, split, rest, tied, none = (
        ranked("a", [0, 2, 1], [-1.0, 3.0, 0.5]),  # relevant documents on places 1 and 2
        ranked("b", [0, 0], [4.0, 2.0]),
        ranked("b", [1], [1.0]),  # the same query: its only relevant document is the third
        ranked("c", [1, 0], [1.0, 1.0]),  # equal scores: the relevant one stands last
        ranked("d", [0], [0.0]),
    )
    rankings = analyses.RankingAnalysis()
    for pair in (first, split, rest, tied, none):
        rankings.add(*pair)
    curves, table, _, details = rankings.sections()
    places = ["1", "2", "3", "no relevant document"]
    assert table.rows == [[place, 1, "25.0 %"] for place in places]
    hits, recall, chance = (line.y for line in curves.lines)
    assert hits == pytest.approx([1 / 3, 2 / 3, 1])
    assert recall == pytest.approx([0.5 / 3, 2 / 3, 1])
    assert chance == pytest.approx([(1 / 3 + 1 / 3 + 1 / 2) / 3, (2 / 3 + 2 / 3 + 1) / 3, 1])
    assert isinstance(details, s.Details)
    assert sum(part.examples for part in rankings.calibration.bins) == 9
    task_model = RerankingTask()
    even = [ranked(e.query, list(e.labels), [0.0] * len(e.labels)) for e, _ in (first, tied, none)]
    known = task_model.score([*even, ranked("b", [0, 0, 1], [0.0] * 3)], ())
    assert rankings.baseline() == pytest.approx(known)
    assert rankings.add(*first).cost == 0
    assert rankings.add(*none).cost == 0  # no order is better
    late = ranked("e", [0, 0, 0, 1], [4.0, 3.0, 2.0, 1.0])
    assert rankings.add(*late).cost == pytest.approx(1 - 1 / np.log2(5))
    assert rankings.add(*late).doubt == pytest.approx(1 / (1 + np.exp(-4)) - 1 / (1 + np.exp(-1)))
    assert rankings.add(*first).doubt is None  # the first one is relevant
    assert rankings.add(*ranked("f", [0, 1], [1.0, 0.0])).doubt is None  # not sure
    shown = rankings.show(*late)
    assert shown.truth == "d3 (place 4 of 4)"
    firsts = [(f"d{place}", False) for place in range(3)]
    assert answers_of(shown.guesses) == [*firsts, ("d3", True)]
    assert rankings.show(*none).truth == "no relevant document"


def test_without_a_relevant_document_there_are_no_curves():
    rankings = analyses.RankingAnalysis()
    rankings.add(*ranked("a", [0, 0], [1.0, 2.0]))
    table, *_ = rankings.sections()
    assert table.rows == [["no relevant document", 1, "100.0 %"]]


PAGES = {
    "tag": "Outcomes of entities",
    "regress": "Residuals",
    "multilabel": "Each label",
    "choice": "ending 2",
    "answer": "another place",
    "rerank": "The first relevant document",
}
"""What the page of a task has, and no other."""


@pytest.mark.parametrize("name", PAGES)
def test_every_trainable_task_has_a_page(tmp_path, name):
    task = TOY_TASKS[name].bind(make_tokenizer(tmp_path))
    analysis = analyse(task, TOY_TASKS[name].make(15, 3))
    assert analysis.examples == 15
    write_html(analysis_report(task, analysis, "toy", "made"), tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf8"))
    shown = page[page.index('class="figures"') : page.index("</dl>")]
    assert all((name.replace("_", " ") in shown) == ("/" not in name) for name in analysis.metrics)
    assert all(name in page for name in analysis.metrics)
    for part in (PAGES[name], "toy on made", "The hardest examples", f"task {name}"):
        assert part in page


def test_a_sentence_without_words_has_no_decisions(tmp_path):
    task, (sentence,) = TOY_TASKS["tag"].bind(make_tokenizer(tmp_path)), make_sentences(1)
    alone = analyse(task, [sentence])
    both = analyse(task, [sentence, TagExample((), (), "made:2")])
    assert both.examples == 2
    assert both.metrics == alone.metrics


def test_no_trainable_task_is_left_out():
    """A fine-tuning run writes a page at its end; that of classify is tested in test_report.py."""
    analysed = {name for name, task in TASKS.items() if is_analysed(task())}
    assert {*PAGES, "classify"} == analysed
    assert TASKS.keys() - analysed == {"embed"}


def test_a_task_without_right_and_wrong_has_no_report(tmp_path):
    with pytest.raises(ConfigError, match="there is no report on the task embed"):
        analysis_of(bind_small(SentenceEmbeddingTask(), make_tokenizer(tmp_path)))
