"""The analysis of an evaluation: the same metrics, exact slices, the right examples, a page with all of it."""

import html
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from bothways.core.errors import BothwaysError, ResourceError
from bothways.core.report import sections as s
from bothways.core.report.html import write_html
from bothways.core.source import Sequence
from bothways.hub.model_folder import load_model, save_model
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.model import Model
from bothways.prediction.analysis import base, report as survey
from bothways.prediction.analysis.analyses import ClassAnalysis
from bothways.prediction.analysis.report import SHOWN, AnalysisResult, analyse, analysis_report
from bothways.prediction.engine import PredictionCounts, evaluate_task, predict
from bothways.prediction.opening import open_task
from bothways.prediction.predictor import Predictor
from bothways.tasks.base import EncodedExample
from bothways.tasks.metrics import Confusion
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.text_task import TextExample
from commands import run_line
from toy_folder import make_examples, make_folder, make_tokenizer, write_tsv


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("analysed")
    bert = load_model(make_folder(folder / "bert", seed=3, initializer_range=0.4))
    model = Model(bert.model.config, (PoolerHead(), LabelHead(2)))
    model.load_state_dict(bert.model.state_dict(), strict=False)
    model.heads["labels"].dense.weight.data.mul_(8)  # so that it is sure of something
    tokenizer = make_tokenizer(folder / "vocabulary")
    save_model(folder / "model", model, tokenizer, labels=("neg", "pos"))
    return folder / "model"


@pytest.fixture(scope="module")
def opened(source) -> Predictor:
    return open_task(str(source), device="cpu", length=12)


PAIRED = make_examples(40, 2)
EXAMPLES = [
    *make_examples(60, 1),
    *(TextExample(e.text, e.text[::-1], e.label, f"pair:{n}") for n, e in enumerate(PAIRED)),
]


@pytest.fixture(scope="module")
def analysed(opened) -> AnalysisResult:
    return analyse(opened.task_model, EXAMPLES)


@pytest.fixture(scope="module")
def pairs(opened) -> list[tuple[TextExample, ClassPrediction]]:
    """The examples with their predictions."""
    return list(predict(opened.task_model, EXAMPLES))


def find(sections: tuple[s.Section, ...], kind: type, title: str) -> s.Section:
    (found,) = [part for part in sections if isinstance(part, kind) and part.title == title]
    return found


def test_metrics_and_the_count_of_what_was_cut_are_those_of_an_evaluation(opened, monkeypatch):
    monkeypatch.setattr(type(opened.task_model.task), "window", 16)
    tallies = PredictionCounts(), PredictionCounts()
    plain = evaluate_task(opened.task_model, EXAMPLES, counts=tallies[0])
    analysis = analyse(opened.task_model, iter(EXAMPLES), tallies[1])
    assert analysis.metrics == plain
    assert analysis.examples == 100
    assert tallies[0] == tallies[1]
    assert tallies[0].cut > 0


def test_confusions_and_classes_are_scikit_learns(analysed, pairs):
    truth = [example.label for example in EXAMPLES]
    predicted = [prediction.label for _, prediction in pairs]
    counts = find(analysed.sections, s.ConfusionMatrix, "Confusion matrix").counts
    assert counts == confusion_matrix(truth, predicted).tolist()
    scores = np.array(precision_recall_fscore_support(truth, predicted, zero_division=0.0)[:3])
    table = find(analysed.sections, s.TableSection, "Each class")
    for row, expected in zip(table.rows, scores.T, strict=True):
        assert row[1:3] == [truth.count(row[0]), predicted.count(row[0])] != [0, 0]
        assert row[3:] == [s.percentage(value) for value in expected]


def test_slices_hold_what_they_say(opened, analysed, pairs):
    table = find(analysed.sections, s.TableSection, "Parts of the data")
    inputs = opened.task_model.encode(EXAMPLES)
    right = np.array([prediction.label == example.label for example, prediction in pairs])
    losses = -np.log([prediction.probabilities[example.label] for example, prediction in pairs])
    rows = {(row[0], row[1]): row for row in table.rows}
    assert table.columns[3:] == ["accuracy", "±", "cross-entropy", "±"]
    cut = np.array([item.cut > 0 for item in inputs])
    for name, chosen in (("truncated", cut), ("whole", ~cut)):
        row = rows["truncation", name]
        assert row[2] == chosen.sum()
        assert row[3] == s.percentage(right[chosen].mean())
        assert row[5] == pytest.approx(losses[chosen].mean(), rel=1e-5)
        error = losses[chosen].std(ddof=1) / math.sqrt(chosen.sum())
        assert row[6] == pytest.approx(1.96 * error, rel=1e-4)
    for by in {row[0] for row in table.rows} - {"words that a pair shares"}:
        assert sum(row[2] for row in table.rows if row[0] == by) == 100
    assert sum(row[2] for row in table.rows if row[0] == "words that a pair shares") == 40
    unknown = opened.task_model.tokenizer.specials.unknown
    known = sum(unknown not in item.sequences[0].ids for item in inputs)
    assert sum(row[2] for row in table.rows if row[1] == "none") == known


def test_the_hardest_are_those_with_the_greatest_loss(analysed, pairs):
    ordered = sorted(pairs, key=lambda pair: pair[1].probabilities[pair[0].label])[:SHOWN]
    shown = find(analysed.sections, s.ExampleSection, "The hardest examples").examples
    assert [example.where for example in shown] == [example.where for example, _ in ordered]
    assert shown[0].parts[0] == ordered[0][0].text
    assert {guess.answer for guess in shown[0].guesses} == {"neg", "pos"}


def test_labels_are_doubted_by_how_far_the_model_is_from_them(analysed, pairs):
    doubts = []
    for example, prediction in pairs:
        top = max(prediction.probabilities.values())
        if prediction.label != example.label and top >= base.SURE:
            doubts.append((prediction.probabilities[example.label] - top, example.where))
    assert len({doubt for doubt, _ in doubts}) > 1
    shown = find(analysed.sections, s.ExampleSection, "Examples that may be mislabelled").examples
    surest = sorted(doubts, key=lambda pair: pair[0])[:SHOWN]
    assert [example.where for example in shown] == [where for _, where in surest]


def test_of_equally_hard_examples_the_first_are_shown(opened, monkeypatch):
    class Even(ClassAnalysis):
        """Finds all examples equal, but for the last one."""

        def add(self, example: TextExample, prediction: ClassPrediction) -> base.Judgement:
            super().add(example, prediction)
            last = example is EXAMPLES[-1]
            return base.Judgement(1.0 + last, 0.5 if last else None)

    monkeypatch.setattr(survey, "analysis_of", lambda task_model: Even(task_model.classes))
    found = analyse(opened.task_model, EXAMPLES).sections
    shown = find(found, s.ExampleSection, "The hardest examples").examples
    first = [EXAMPLES[-1], *EXAMPLES[: SHOWN - 1]]
    assert [example.where for example in shown] == [example.where for example in first]
    doubted = find(found, s.ExampleSection, "Examples that may be mislabelled").examples
    assert [example.where for example in doubted] == [EXAMPLES[-1].where]


def prediction(label: str, **probabilities: float) -> ClassPrediction:
    return ClassPrediction(label, list(probabilities).index(label), probabilities)


def test_only_a_sure_and_wrong_prediction_casts_doubt_on_a_label():
    classes = ClassAnalysis(("a", "b"))
    a, b = (TextExample("x", label=label) for label in "ab")
    assert classes.add(b, prediction("a", a=0.9, b=0.1)).doubt == pytest.approx(0.8)
    assert classes.add(b, prediction("a", a=0.7, b=0.3)).doubt is None
    assert classes.add(a, prediction("a", a=0.9, b=0.1)).doubt is None
    assert classes.add(b, prediction("a", a=1.0, b=0.0)).cost > 700


def test_of_many_classes_the_worst_are_shown():
    """77 classes of equal size: the rarest are not of interest, the worst are."""
    size = 77
    names = [f"class {place}" for place in range(size)]
    confused = [(40, 50)] * 8 + [(3, 40)] * 5 + [(60, 61)]
    right = [(place, place) for place in range(size)] * 9 + [(76, 76)] * 90
    matrix, pairs, table = base.confusion_sections(names, Confusion(size, right + confused))
    assert len(matrix.labels) == base.MAX_CLASSES
    assert {names[place] for place in (3, 40, 50, 60, 61)} <= {*matrix.labels}
    assert names[76] not in matrix.labels  # it is the largest, without an error
    at = [*matrix.labels].index
    assert matrix.counts[at("class 40")][at("class 50")] == 8
    assert "20 of 77 classes with the most errors" in matrix.note
    assert pairs.rows == [
        ["class 40", "class 50", 8, "47.1 %"],
        ["class 3", "class 40", 5, "35.7 %"],
        ["class 60", "class 61", 1, "10.0 %"],
    ]
    assert len(table.rows) == size
    assert [row[0] for row in table.rows[:2]] == ["class 40", "class 50"]
    _, small = base.confusion_sections(["a", "b"], Confusion(2, [(1, 0)] * 3))
    assert small.rows[0][3:] == ["0.0 %", None, "0.0 %"]


def test_headline_has_the_majority_baseline(opened, analysed):
    labels = [example.label for example in EXAMPLES]
    share = max(labels.count("neg"), labels.count("pos")) / len(labels)
    assert analysed.baseline["accuracy"] == pytest.approx(share)
    report = analysis_report(opened.task_model, analysed, "m", "d")
    constant = f"majority baseline: {s.readable_number(share)}"
    assert f"({constant})" in report.headline
    figures = report.sections[0]
    assert {figure.label: figure.note for figure in figures.figures}["accuracy"] == constant


def add_traits(
    traits: base.Traits, length: int = 4, cut: int = 0, *, unknown: int = 0, texts: Any = ("x",)
) -> None:
    """Add an example of so many tokens, of which the first are unknown."""
    ids = np.zeros(length, dtype=np.int32)
    ids[:unknown] = 7
    encoded = EncodedExample((Sequence(ids, ids.astype(np.int8)),), length + cut, cut)
    traits.add(encoded, texts, 7, 0.5, 1.0)


def slices_by(traits: base.Traits, name: str) -> dict[str, list[int]]:
    return {x.name: x.members.nonzero()[0].tolist() for x in traits.slices() if x.by == name}


def test_unknown_tokens_are_counted_by_their_share():
    """On the edge of 5 % an example belongs to the lower part."""
    traits = base.Traits()
    for unknown in (0, 1, 5, 6, 100, 0):
        add_traits(traits, 100, unknown=unknown)
    expected = {"none": [0, 5], "up to 5 %": [1, 2], "more than 5 %": [3, 4]}
    assert slices_by(traits, "unknown tokens") == expected


@pytest.mark.parametrize("lengths", [[7, 7, 7], [1, 2, 2, 2, 2, 90], list(range(1, 41))])
def test_quartiles_hold_each_example_once(lengths):
    traits = base.Traits()
    for length in lengths:
        add_traits(traits, length)
    parts = slices_by(traits, "length (quartiles)")
    members = sorted(itertools.chain.from_iterable(parts.values()))
    assert members == ([] if len({*lengths}) == 1 else [*range(len(lengths))])
    if len(lengths) == 40:
        assert [len(part) for part in parts.values()] == [10, 10, 10, 10]
        assert [*parts][1] == "11 to 20 tokens"


def test_of_a_single_example_no_interval_is_known():
    traits = base.Traits()
    for cut in (0, 0, 1):
        add_traits(traits, cut=cut)
    rows = {row[1]: row[2:] for row in traits.table(None, "loss").rows}
    assert rows["truncated"] == [1, 0.5, math.inf]
    assert rows["whole"] == [2, 0.5, 0.0]


def test_pairs_are_parted_by_the_words_that_they_share():
    """A quarter of the words is of the second part, all of them of the last; a single text is of none."""
    traits = base.Traits()
    for texts in (("a", "b"), ("a b c", "c d"), ("a b", "b a"), ("a",), ("a b c", "b c")):
        add_traits(traits, texts=texts)
    assert slices_by(traits, "words that a pair shares") == {
        "0% to 25% (exclusive)": [0], "25% to 50% (exclusive)": [1], "50% to 75% (exclusive)": [4],
        "75% to 100%": [2],
    }  # fmt: skip


def test_the_page_has_it_all(opened, tmp_path):
    examples = [*EXAMPLES, TextExample("<b>the film</b>", None, "pos", "odd:1")] * 2
    analysis = analyse(opened.task_model, examples)
    report = analysis_report(opened.task_model, analysis, "my model", "dev.tsv")
    write_html(report, tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf8"))
    expected = [
        "my model on dev.tsv", "on 202 examples", "Confusion matrix", "Confidence against accuracy",
        "Expected calibration error", "Parts of the data", "length (quartiles)", "Each class",
        "The hardest examples", "Settings", "task.columns.text", "encoder.width",
    ]  # fmt: skip
    assert [part for part in expected if part not in page] == []
    assert page.count("<svg") == 2
    assert "http" not in page
    assert not re.search(r"<b>the film", (tmp_path / "report.html").read_text(encoding="utf8"))
    with pytest.raises(ResourceError):
        write_html(report, tmp_path / "no" / "r.html")


def test_the_command_writes_it(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, tmp_path / "model")
    write_tsv(tmp_path / "dev.tsv", EXAMPLES[:40])
    words = ["evaluate", "model", "dev.tsv", "--json", "--device", "cpu", "--length", "12"]
    run_line(*words, "--report", "report.html")
    with_report = json.loads(capsys.readouterr().out)
    run_line(*words)
    assert json.loads(capsys.readouterr().out) == with_report
    with pytest.raises(ResourceError, match=r"No space.*; the scores are accuracy \d\.\d{4}, "):
        run_line(*words, "--report", "/dev/full")
    page = (tmp_path / "report.html").read_text(encoding="utf8")
    assert "model on dev.tsv" in page
    assert "computed in" not in page


def test_the_page_says_what_it_is_computed_in(opened, analysed):
    report = analysis_report(opened.task_model, analysed, "m", "d", precision="bf16")
    assert report.lead.endswith("example by example, computed in bf16.")
    details = find(report.sections, s.Details, "All metrics and settings").sections
    assert ["precision", "bf16"] in find(details, s.TableSection, "Settings").rows


def test_a_report_without_a_place_and_a_limit_without_int8_are_refused_at_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("bothways.prediction.opening.open_task", None)
    for words, said in (
        (["--report", str(tmp_path)], "is a folder, not a file"),
        (["--report", str(tmp_path / "no" / "r.html")], "the parent folder does not exist"),
        (["--limit", "1"], "limit: limits the loss of int8, and the precision is fp32"),
    ):
        with pytest.raises(BothwaysError, match=said):
            run_line("evaluate", "model", "dev.tsv", *words)


def test_what_stands_in_brackets_is_shown_as_it_is(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[" / "INST]").mkdir(parents=True)
    loaded, place = load_model(source), tmp_path / "[" / "INST]" / "m"
    save_model(place, loaded.model, loaded.tokenizer, labels=("[/INST]", "pos"))
    labels = {"neg": "[/INST]", "pos": "pos"}
    examples = [TextExample(e.text, None, labels[str(e.label)]) for e in EXAMPLES[:20]]
    write_tsv(tmp_path / "dev.tsv", examples)
    run_line("evaluate", "[/INST]/m", "dev.tsv", "--device", "cpu", "--length", "12")
    assert "[/INST]/m on dev.tsv" in capsys.readouterr().out
    run_line("describe", "[/INST]/m")
    assert "[/INST]/m: bert" in capsys.readouterr().out
