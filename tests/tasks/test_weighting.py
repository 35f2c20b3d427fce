"""Smoothed targets and weighed classes: torch's mean over a step, however it is cut; balanced weights as scikit-learn's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError
from bothways.tasks.classification.task import ClassificationTask, TextClassifier, balanced
from bothways.tasks.text_task import TextExample
from parity import batch_of, check_sum
from toy_task import make_examples, make_task

WEIGHTS = (0.5, 2.0, 1.25)


def make_weighed(folder: Path, definition: ClassificationTask) -> TextClassifier:
    plain = make_task(folder, dropout=0.0)
    return definition.bind(plain.model, plain.tokenizer, plain.labels, 16)


@pytest.mark.parametrize(
    "definition",
    [ClassificationTask(smoothing=0.1), ClassificationTask(smoothing=0.2, weighting=WEIGHTS)],
)
def test_losses_are_torchs_mean_however_the_batch_is_cut(tmp_path, definition):
    task = make_weighed(tmp_path, definition)
    examples = [*make_examples(11), TextExample("ape", None, None)]
    inputs = task.encode(examples)
    labels = torch.tensor(
        [-100 if e.label is None else task.labels.index(e.label) for e in examples]
    )
    weights = None if definition.weighting == "equal" else torch.tensor(WEIGHTS)
    logits = task.scores(batch_of(inputs))
    expected = torch.nn.functional.cross_entropy(
        logits, labels, weights, label_smoothing=definition.smoothing
    )
    loss = task(batch_of(inputs))["label"]
    assert loss.total.item() / task.weights(batch_of(inputs))["label"] == pytest.approx(
        expected.item(), rel=1e-5
    )
    assert (loss.hits is None) == (weights is not None)
    check_sum(task, inputs)


def test_balanced_weights_are_scikit_learns():
    examples = [
        *make_examples(50),
        *make_examples(30, labels=("y",), seed=2),
        TextExample("t", None, None),
    ]
    known = [e.label for e in examples if e.label is not None]
    expected = compute_class_weight(
        "balanced", classes=np.array(["x", "y", "z"]), y=np.array(known)
    )
    assert balanced(examples) == pytest.approx(tuple(expected))


def test_balanced_weights_are_counted_in_training_data():
    train = [TextExample(text, label=label) for text, label in zip("abcd", "xxxy", strict=True)]
    task = ClassificationTask(weighting="balanced").adapted(train)
    assert task.weighting == pytest.approx((4 / 6, 2.0))
    assert task.adapted(train[1:]) == task  # development data changes nothing
    plain = json.loads(json.dumps(configs.to_dict(task)))
    assert configs.read(ClassificationTask, plain) == task
    assert configs.load(ClassificationTask, overrides=["weighting=[1, 2.5]"]).weighting == (
        1.0,
        2.5,
    )
    assert (
        configs.load(ClassificationTask, overrides=["weighting=balanced"]).weighting == "balanced"
    )


def test_the_baseline_knows_no_loss_that_is_smoothed_or_weighed():
    train = make_examples(30)
    plain = ClassificationTask().baseline(train)
    for definition in (ClassificationTask(smoothing=0.1), ClassificationTask(weighting=WEIGHTS)):
        assert definition.baseline(train) == {
            name: value for name, value in plain.items() if name != "loss"
        }


def test_weights_that_cannot_be_are_refused(tmp_path):
    for smoothing in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=rf"^smoothing: must be in \[0, 1\), not {smoothing}"):
            ClassificationTask(smoothing=smoothing)
    for weights in ((1.0, 0.0), (float("nan"), 1.0), (float("inf"),)):
        with pytest.raises(ConfigError, match=r"^weighting: must be numbers above 0, not "):
            ClassificationTask(weighting=weights)
    with pytest.raises(ConfigError, match=r"^task\.weighting: there are 2 for 3 labels \(x, y"):
        make_weighed(tmp_path, ClassificationTask(weighting=(1.0, 1.0)))
    with pytest.raises(ConfigError, match=r"^task\.weighting: balanced weights are counted"):
        make_weighed(tmp_path, ClassificationTask(weighting="balanced"))
