"""Several labels: equal to transformers' multi-label class, thresholds from development data, lists read from any file."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from sklearn.utils.class_weight import compute_class_weight

from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError, DataError
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.base import EncodedExample
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelClassifier, MultilabelExample, MultilabelTask
from bothways.tasks.predictions import MultilabelPrediction
from bothways.tasks.text_task import TextColumns, TextExample
from bothways.text.tokenizer import Tokenizer
from parity import batch_of, check_sum
from toy_task import bind_small, make_examples
from toy_tasks import LABELS, make_labelled

PLAIN = MultilabelTask()


def make_labeller(tokenizer: Tokenizer, definition: MultilabelTask = PLAIN) -> MultilabelClassifier:
    return bind_small(definition, tokenizer, LABELS, seed=7)


def truth_of(examples: list[MultilabelExample]) -> np.ndarray:
    return np.array([[label in (e.labels or ()) for label in LABELS] for e in examples])


def test_predictions_are_scored_as_by_sklearn(tokenizer):
    task, examples = make_labeller(tokenizer), make_labelled(50, 3)
    alone = [made for _, made in predict(task, examples)]
    truth, p = truth_of(examples), np.array([[*made.probabilities.values()] for made in alone])
    assert [made.labels for made in alone] == [tuple(np.array(LABELS)[row >= 0.5]) for row in p]
    found = evaluate_task(task, iter(examples))
    expected = {
        "f1_micro": sklearn.f1_score(truth, p >= 0.5, average="micro"),
        "f1_macro": sklearn.f1_score(truth, p >= 0.5, average="macro"),
        "exact": sklearn.accuracy_score(truth, p >= 0.5),
        "loss": np.mean([sklearn.log_loss(truth[:, at], p[:, at]) for at in range(3)]),
    }
    assert found == pytest.approx(expected, rel=1e-4)
    assert {*MultilabelTask().directions(LABELS)} == {*found}
    batch = batch_of(task.encode(examples))
    mean = task(batch)["label"].total / task.weights(batch)["label"]
    assert found["loss"] == pytest.approx(mean.item(), rel=1e-4)
    grades = [task.grade(*pair) for pair in zip(examples, alone, strict=True)]
    assert np.mean(grades) == pytest.approx(found["exact"])


def test_thresholds_are_tuned_and_used(tokenizer):
    task, examples = make_labeller(tokenizer), make_labelled(15, 4)
    before = evaluate_task(task, examples)
    task.task = task.tuned(predict(task, examples), "f1_macro")
    assert len(task.task.thresholds) == 3
    after, truth = evaluate_task(task, examples), truth_of(examples)
    p = np.array([[*made.probabilities.values()] for _, made in predict(task, examples)])
    columns = zip(truth.T, p.T, strict=True)
    best = [max(sklearn.f1_score(held, x >= cut) for cut in x) for held, x in columns]
    assert after["f1_macro"] == pytest.approx(np.mean(best))
    assert after["f1_macro"] > before["f1_macro"]
    saved = json.loads(json.dumps(configs.to_dict(task.task)))
    assert configs.read(MultilabelTask, saved) == task.task
    assert make_labeller(tokenizer).tuned([]) == MultilabelTask()
    strict = make_labeller(tokenizer, MultilabelTask(thresholds=(0.0, 1.0, 1.0)))
    assert {made.labels for _, made in predict(strict, examples)} == {("x",)}


def test_a_label_is_given_from_its_threshold_on(tokenizer):
    logits = np.array([0.0, -1e-3, 1e-3], dtype=np.float32)
    encoded, example = EncodedExample((), 0, 0), MultilabelExample("t")
    assert make_labeller(tokenizer).decode(example, encoded, [logits]).labels == ("x", "z")
    certain = make_labeller(tokenizer, MultilabelTask(thresholds=(1.0, 1.0, 0.0)))
    logits = np.array([99, 9, -9999], dtype=np.float32)
    assert certain.decode(example, encoded, [logits]).labels == ("x", "z")
    rare = certain.decode(example, encoded, [np.full(3, -30, dtype=np.float32)])
    assert rare.to_json()["probabilities"]["x"] == 9.35762e-14  # e^-30 / (1 + e^-30)


def test_a_certain_mistake_costs_much_and_not_everything(tokenizer):
    made = MultilabelPrediction(("x",), {"x": 1.0, "y": 0.0, "z": 0.0})
    metrics = make_labeller(tokenizer).score([(MultilabelExample("t", None, ()), made)])
    assert metrics["loss"] == pytest.approx(36.84 / 3, abs=0.01)


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        (["b", "a", "b"], ("a", "b")), ([], ()), ("", ()), ("b, a", ("a", "b")), ("a", ("a",)), (None, None),
        ([2, 10, "x"], ("2", "10", "x")), (3, ("3",)), (" , ", ()), ([None, "a"], ("a",)), ("1, 0", ("0", "1")), ("1.5", ("1.5",)), ([2.0], ("2",)),
        ("nan", None), (" NaN ", None), (float("nan"), None), ("nan, a", ("a",)), (["NaN"], ()),
        ('["b, c", "a"]', ("a", "b, c")), (" [] ", ()), ("[2, 10]", ("2", "10")), ("[a", ("[a",)),
    ],
)  # fmt: skip
def test_labels_of_any_form(tmp_path, value, labels):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "t", "labels": value}))
    (example,) = MultilabelTask().read(str(tmp_path / "a.jsonl")).examples
    assert example.labels == labels


@pytest.mark.parametrize(
    "printed",
    [
        "['b', 'a']", "['b' 'a']", "[b, a]", "['b']", "[0 1 0]", "[nan]", "[True False]", "[None]", "[spam]",
        "[" * 100_000 + "]" * 100_000, "{a, b}", "{'a': 1}", "('a', 'b')",
    ],
    ids=lambda printed: printed[:12],
)  # fmt: skip
def test_lists_as_python_and_numpy_print_them_are_refused(tmp_path, printed):
    (tmp_path / "a.csv").write_text(f'text,labels\nt,"{printed}"\n')
    what = rf"a\.csv:2: column 'labels' holds ['\"]{re.escape(printed[:60])}['\"], a printed "
    with pytest.raises(DataError, match=what):
        list(MultilabelTask().read(str(tmp_path / "a.csv")).examples)


@pytest.mark.parametrize(
    "printed", ["0,1,0", "0 1 1", "[0.0, 1.0, 0.0]", "[true, false, true]", "[0.3, 1]"]
)
def test_vectors_of_numbers_are_no_labels(tmp_path, printed):
    (tmp_path / "a.csv").write_text(f'text,labels\nt,"{printed}"\n')
    with pytest.raises(DataError, match=r"a\.csv:2: column 'labels' holds [23] numbers"):
        list(MultilabelTask().read(str(tmp_path / "a.csv")).examples)


def test_0_and_1_are_separated_as_other_labels(tmp_path):
    (tmp_path / "a.csv").write_text("text,labels\na,0|3\nb,0|1\n")
    for separator, labels in ((",", [("0|3",), ("0|1",)]), ("|", [("0", "3"), ("0", "1")])):
        examples = MultilabelTask(separator=separator).read(str(tmp_path / "a.csv")).examples
        assert [example.labels for example in examples] == labels


def test_files_of_every_kind(tmp_path):
    (tmp_path / "a.tsv").write_text("text\ttext_b\tlabels\nape\tbee\tred;blue\ncat\tdog\t\n")
    reading = MultilabelTask(separator=";").read(str(tmp_path / "a.tsv"))
    assert reading.task == MultilabelTask(TextColumns("text", "text_b", "labels"), separator=";")
    first, second = reading.examples
    assert first == MultilabelExample("ape", "bee", ("blue", "red"), f"{tmp_path}/a.tsv:2")
    assert second.labels == ()
    assert MultilabelTask().labels([first, second, MultilabelExample("t")]) == ("blue", "red")
    bare = MultilabelTask().read(str(tmp_path / "a.tsv"), labelled=False).examples
    assert [example.labels for example in bare] == [None, None]
    (tmp_path / "b.jsonl").write_text('{"text": "t", "labels": [["a"]]}')
    with pytest.raises(DataError, match=r"b\.jsonl:1: column 'labels' holds list, not a label"):
        list(MultilabelTask().read(str(tmp_path / "b.jsonl")).examples)


def test_what_cannot_be_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"^separator: must not be empty"):
        MultilabelTask(separator="")
    with pytest.raises(ConfigError, match=r"^thresholds: must be from 0 to 1, not 1\.5"):
        MultilabelTask(thresholds=(0.5, 1.5))
    with pytest.raises(ConfigError, match=r"^task\.thresholds: there are 2 for 3 labels"):
        make_labeller(tokenizer, MultilabelTask(thresholds=(0.5, 0.5)))


def test_the_baseline_is_the_best_constant_answer(tmp_path):
    train = make_labelled(40, 5)
    for at in filter(lambda at: at % 3, range(40)):  # of the answers with "x" alone is the best
        train[at] = dataclasses.replace(train[at], labels=("x",))

    def scored(chances: Iterable[float]) -> dict[str, float]:
        """The metrics of one answer for all; chances of 0 and 1 are labels at any threshold."""
        made = MultilabelPrediction((), dict(zip(LABELS, chances, strict=True)))
        return dict(PLAIN.score([(example, made) for example in train], LABELS))

    answers = [scored(chances) for chances in itertools.product((0.0, 1.0), repeat=3)]
    expected = max(answers, key=lambda metrics: metrics["f1_micro"])
    expected["loss"] = scored(truth_of(train).mean(0).tolist())["loss"]
    assert MultilabelTask().baseline(train) == pytest.approx(expected)
    bare = [dataclasses.replace(e, labels=()) for e in train]  # as few dev data may be
    assert MultilabelTask().baseline(bare) == {}


def test_weights_are_selected_at_the_best_thresholds(tokenizer):
    """Early in training no probability reaches 0.5, and F1 there tells no two checkpoints apart."""
    labeller, examples = make_labeller(tokenizer), make_labelled(40)
    truth = truth_of(examples)

    def results(lead: float) -> list[tuple[MultilabelExample, MultilabelPrediction]]:
        chances = 0.1 + lead * truth + 0.01 * np.random.default_rng(0).random(truth.shape)
        made = [dict(zip(LABELS, row, strict=True)) for row in chances.tolist()]
        return list(zip(examples, [MultilabelPrediction((), p) for p in made], strict=True))

    early, late = results(0.005), results(0.02)
    assert labeller.score(early)["f1_micro"] == labeller.score(late)["f1_micro"] == 0
    before, after = labeller.score_tuned(early), labeller.score_tuned(late)
    by_label_before = labeller.score_tuned(early, "f1_macro")
    assert 0 < before["f1_micro"] < after["f1_micro"] == 1
    assert labeller.task.thresholds == ()
    assert labeller.tuned(late).score(late, LABELS) == after
    assert labeller.tuned(early, "f1_macro").score(early, LABELS) == by_label_before
    assert by_label_before["f1_macro"] > before["f1_macro"]


WEIGHTS = (0.5, 2.0, 1.25)


@pytest.mark.parametrize(
    "definition",
    [ClassificationTask(smoothing=0.1), ClassificationTask(smoothing=0.2, weighting=WEIGHTS)],
)
def test_losses_are_torchs_mean_however_the_batch_is_cut(tokenizer, definition):
    task = bind_small(definition, tokenizer, LABELS)
    examples = [*make_examples(11), TextExample("ape", None, None)]
    inputs = task.encode(examples)
    index, batch = {None: -100, "x": 0, "y": 1, "z": 2}, batch_of(inputs)
    labels = torch.tensor([index[example.label] for example in examples])
    weights = None if definition.weighting == "equal" else torch.tensor(WEIGHTS)
    expected = torch.nn.functional.cross_entropy(
        task.scores(batch), labels, weights, label_smoothing=definition.smoothing
    )
    loss = task(batch)["label"]
    mean = loss.total.item() / task.weights(batch)["label"]
    assert mean == pytest.approx(expected.item(), rel=1e-5)
    assert (loss.hits is None) == (weights is not None)
    check_sum(task, inputs)


def test_balanced_weights_are_scikit_learns_of_the_training_data():
    train = [*make_examples(50), *make_examples(30, labels=("y",), seed=2)]
    task = ClassificationTask(weighting="balanced").adapted([*train, TextExample("t")])
    known = np.array([example.label for example in train])
    expected = compute_class_weight("balanced", classes=np.array(LABELS), y=known)
    assert task.weighting == pytest.approx(tuple(expected))
    assert task.adapted(train[1:]) == task  # development data changes nothing
    plain = json.loads(json.dumps(configs.to_dict(task)))
    assert configs.read(ClassificationTask, plain) == task
    for text, weighting in (("[1, 2.5]", (1.0, 2.5)), ("balanced", "balanced")):
        loaded = configs.load(ClassificationTask, overrides=[f"weighting={text}"])
        assert loaded.weighting == weighting


def test_the_baseline_knows_no_loss_that_is_smoothed_or_weighed():
    train = make_examples(30)
    plain = dict(ClassificationTask().baseline(train))
    del plain["loss"]
    for definition in (ClassificationTask(smoothing=0.1), ClassificationTask(weighting=WEIGHTS)):
        assert definition.baseline(train) == plain


def test_weights_that_cannot_be_are_refused(tokenizer):
    for smoothing in (-0.1, 1.0):
        with pytest.raises(
            ConfigError, match=rf"^smoothing: must be at least 0 and below 1, not {smoothing}"
        ):
            ClassificationTask(smoothing=smoothing)
    for weights in ((1.0, 0.0), (float("nan"), 1.0), (float("inf"),)):
        with pytest.raises(ConfigError, match=r"^weighting: must be above 0"):
            ClassificationTask(weighting=weights)
    with pytest.raises(ConfigError, match=r"^task\.weighting: there are 2 for 3 labels \(x, y"):
        bind_small(ClassificationTask(weighting=(1.0, 1.0)), tokenizer, LABELS)
    with pytest.raises(ConfigError, match=r"^task\.weighting: balanced weights are counted"):
        bind_small(ClassificationTask(weighting="balanced"), tokenizer, LABELS)
