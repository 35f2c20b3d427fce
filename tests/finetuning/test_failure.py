"""Failed runs: each sign on a case that is made for it, and none on a run that learns."""

import dataclasses
import math

import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, f1_score, log_loss

from bothways.core.batch import pack
from bothways.core.errors import DivergedError
from bothways.finetuning import run as failure
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import LabelledData, label
from bothways.finetuning.prepare import start_from
from bothways.finetuning.run import (
    Failure,
    distinct_answers,
    signs_of_scores,
    signs_of_training,
    training_loss,
)
from bothways.model.config import EncoderConfig
from bothways.model.positions import Learned
from bothways.prediction.analysis.report import analyse
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.text_task import TextExample
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Epochs
from toy_folder import VOCABULARY, make_data, make_examples
from toy_task import fit_task

SMALL = EncoderConfig(len(VOCABULARY), 32, 2, 2, 64, position=Learned(32), initial_range=0.1)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> LabelledData:
    return make_data(tmp_path_factory.mktemp("tokenizer"), 160, 60)


def method(rate: float, epochs: float) -> FinetuneConfig:
    changes = {"until": Epochs(epochs), "optimizer": AdamW(lr=rate), "precision": "fp32"}
    training = dataclasses.replace(finetune_adam(), **changes)
    return FinetuneConfig(training, 16)


def test_a_rate_that_is_far_too_high_is_found_out(data):
    """The dev data has as many of each label, so that whichever it answers for all is no better than the other."""
    examples = make_examples(100, 1)
    of_labels = ([item for item in examples if item.label == name] for name in data.labels)
    dev = [item for items in of_labels for item in items[:30]]
    even = label(data.task, data.tokenizer, data.train_examples, dev, 16)
    done = fit_task(SMALL, even, method(3.0, 2.0), device="cpu")
    text = str(done.failure)
    assert text.startswith("this run has probably failed: it answers '")
    assert "for all 60 dev examples; its accuracy on the dev data, 0." in text
    assert "its training loss, " in text
    fix = "Try other seeds (seed=1), a lower rate (training.optimizer.lr) or more epochs."
    assert text.endswith(fix)


def test_the_baseline_of_a_run_is_that_of_its_report(data):
    """The most frequent class of the dev data, which is rare in the training data."""
    often, rarely = (
        [example for example in make_examples(160, 0) if example.label == name]
        for name in data.labels
    )
    train, dev = [*often[:40], *rarely[:10]], [*often[40:43], *rarely[10:30]]
    skewed = label(data.task, data.tokenizer, train, dev, 16)
    done = fit_task(SMALL, skewed, method(1e-9, 1.0), device="cpu")
    baseline = analyse(done.task_model, dev).baseline
    assert baseline["accuracy"] == pytest.approx(20 / 23)
    assert {name: done.baseline[name] for name in baseline} == baseline


def test_without_dev_data_the_training_loss_speaks(data):
    bare = dataclasses.replace(data, dev=(), dev_examples=())
    done = fit_task(SMALL, bare, method(1e-9, 1.0), device="cpu")
    (reason,) = done.failure.reasons
    assert reason.startswith("its training loss, ")


def labelled(*counts: int) -> list[TextExample]:
    names = "".join(name * count for name, count in zip("abc", counts, strict=False))
    return [TextExample("x", None, name) for name in names]


def test_the_baseline_is_that_of_sklearns_dummies():
    examples = labelled(5, 9, 2)
    x, truth = [[0]] * len(examples), [e.label for e in examples]
    most, prior = DummyClassifier(strategy="most_frequent"), DummyClassifier(strategy="prior")
    predicted = most.fit(x, truth).predict(x)
    actual = ClassificationTask().baseline(examples)
    assert actual["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    f1 = f1_score(truth, predicted, average="macro", zero_division=0.0)
    assert actual["f1_macro"] == pytest.approx(f1)
    assert actual["mcc"] == 0
    probabilities = prior.fit(x, truth).predict_proba(x)
    assert actual["loss"] == pytest.approx(log_loss(truth, probabilities, labels=list("abc")))


def signs_of(metrics: dict[str, float], baseline, metric, direction, labels):
    results, answers = [("x", ClassPrediction(label, 0, {})) for label in labels], list[str]()
    assert list(distinct_answers(iter(results), answers)) == results
    return signs_of_scores(metrics, baseline, metric, direction, answers, len(labels))


@pytest.mark.parametrize(
    ("value", "baseline", "direction", "answers", "signs"),
    [
        (0.6, {"m": 0.5}, "highest", "ab", 0),
        (0.5, {"m": 0.5}, "highest", "ab", 1),
        (0.6, {"m": 0.5}, "lowest", "ab", 1),
        (0.4, {"m": 0.5}, "lowest", "ab", 0),
        (0.6, {"m": 0.5}, "highest", "aba", 0),  # one between the first and the last differs
        (0.6, {"m": 0.5}, "highest", "aaa", 1),
        (0.5, {"m": 0.5}, "highest", "aaa", 2),
        (0.5, {}, "highest", "ab", 0),  # there is no majority baseline
        (0.5, {}, "highest", "bb", 1),
        (1.0, {"m": 1.0, "accuracy": 1.0}, "highest", "aa", 0),  # one answer is right for all
        (0.5, {"m": 0.4}, "highest", "a", 0),  # a single example
    ],
)
def test_signs_of_scores(value, baseline, direction, answers, signs):
    assert len(signs_of({"m": value}, baseline, "m", direction, answers)) == signs


@pytest.mark.parametrize(
    ("value", "direction", "signs"),
    [(0.4, "highest", 1), (0.5, "highest", 0), (0.6, "lowest", 1), (0.5, "lowest", 0)],
)
def test_a_run_that_is_worse_than_its_start(value, direction, signs):
    found = signs_of_scores({"m": value}, {}, "m", direction, ["a", "b"], 2, {"m": 0.5})
    assert len(found) == signs


@pytest.mark.parametrize("metric", ["accuracy", "em"])
def test_one_answer_that_is_right_for_all_is_none(metric):
    """As for a file that was sorted before it was cut: training says the other label, the model the right one."""
    assert not signs_of({metric: 1.0}, {metric: 0.0}, metric, "highest", "aa")
    assert signs_of({metric: 0.9}, {metric: 0.0}, metric, "highest", "aa")


def test_the_training_loss_is_of_an_even_sample(data, monkeypatch):
    """Of data in the order of its labels the first part would say nothing about the rest."""
    task = start_from(SMALL, data.task.heads(data.labels, None), seed=0)
    task_model = data.task.bind(task, data.tokenizer, data.labels, 16)
    sequences = data.sequences[:40]
    monkeypatch.setattr(failure, "SAMPLE", 8)
    with torch.no_grad():
        loss = task_model.eval()(pack(sequences[::5]))["label"]
    found = training_loss(task_model.train(), sequences, 64)
    assert found == pytest.approx(float(loss.total) / 8, rel=1e-5)
    with torch.no_grad():
        task.heads["labels"].dense.weight.fill_(math.nan)
    with pytest.raises(DivergedError):  # of one run: a series continues
        training_loss(task_model, sequences, 64)


@pytest.mark.parametrize(
    ("loss", "usual", "signs"),
    [(0.69, 0.6931, 1), (0.8, 0.6931, 1), (0.6, 0.6931, 0), (0.1, None, 0), (0.0, 0.0, 0)],
)
def test_signs_of_training(loss, usual, signs):
    found, unfinished = signs_of_training(loss, {} if usual is None else {"loss": usual})
    assert (len(found), unfinished) == (signs, False)


def test_many_classes_that_are_hardly_learned_are_noticed():
    """77 classes at a training loss of 3.9: chance is 4.34, and 41 % are right."""
    usual = {"loss": math.log(77)}
    signs, unfinished = signs_of_training(3.9, usual)
    assert signs == ("its training loss, 3.9000, is near that of the majority baseline, 4.3438",)
    assert unfinished
    assert signs_of_training(4.3, usual)[1] is False
    assert signs_of_training(2.0, usual) == ((), False)
    assert signs_of_training(0.6, {"loss": math.log(2)}) == ((), False)
    weak = Failure(signs, unfinished=True)
    assert weak.failed == ()
    assert str(weak) == (
        f"this run could learn more: {signs[0]}. Try more epochs (training.until) or a higher rate "
        "(training.optimizer.lr)."
    )


def test_a_weak_run_in_memory_is_unfinished(data):
    """Eight classes that no word tells apart from the others, at a rate far below the usual one."""
    names = [f"class {number}" for number in range(8)]
    examples = [
        dataclasses.replace(item, label=names[number % 8])
        for number, item in enumerate(make_examples(160, 0))
    ]
    many = label(ClassificationTask(), data.tokenizer, examples, [], 16)
    done = fit_task(SMALL, many, method(1e-6, 4.0), device="cpu")
    assert done.failure is not None
    assert not done.metrics
