"""Calibrate a classifier on labelled data that it has not seen: `bothways calibrate`.

The calibration becomes part of the last layer's weights (`tasks.metrics`), so predictions, the
server, exported graphs and other programs that open the folder have it without knowing of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError, DataError, argument, render
from bothways.core.files import check_not_input
from bothways.core.terminal import result_line
from bothways.hub.model_card import UNSEEN, Card
from bothways.hub.model_folder import check_replaceable, read_record, save_model
from bothways.hub.resolve import resolve, resolve_run
from bothways.prediction.analysis.base import Calibration
from bothways.prediction.analysis.evaluation import EvaluationData
from bothways.prediction.opening import open_finetuned
from bothways.prediction.predictor import Predictor
from bothways.tasks import metrics
from bothways.tasks.base import Metrics, TaskModel, examples_fingerprint, required, softmax
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.metrics import TINY, sigmoid
from bothways.tasks.multilabel.task import LEAST, MultilabelTask

FEWEST = 10
"""Examples that a calibration needs: half of them measure it."""


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated model.

    Attributes:
        before, after: "loss" and "calibration_error" (15 bins of equal width), measured on halves
            of the data that a calibration on the other half has not seen.
        temperature: of a classifier; None where each label has a scale and an offset.
        set_threshold: the least probability of a label in a conformal set, if there are sets.
        record: what the folder keeps of the calibration.
    """

    folder: Path
    before: Metrics
    after: Metrics
    temperature: float | None = None
    set_threshold: float | None = None
    record: dict[str, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return result_line(
            "CalibrationResult", self.after, temperature=self.temperature, folder=self.folder
        )


def calibrate(
    labelled: EvaluationData, out: Path, error: float | None = None, device: str = "auto"
) -> CalibrationResult:
    """Calibrate a model, and save it in `out`; errors as `bothways.calibrate`."""
    source = resolve(resolve_run(labelled.folder))
    check_not_input(out, [source])
    check_replaceable(out)
    task_model, record = open_finetuned(source, device), read_record(source)
    task = task_model.task
    if not isinstance(task, ClassificationTask | MultilabelTask) or (
        error is not None and isinstance(task, MultilabelTask)
    ):
        message = (
            f"{'probabilities' if error is None else 'sets'} of {task.name} are not calibrated"
        )
        fix = "Calibrate a model for classify or multilabel; sets (error) are of classify alone."
        raise ConfigError(message, where="model", fix=fix)
    predictor = Predictor(task_model, batch_invariant=True)
    with labelled.opened(predictor) as (reading, counts):
        pairs = list(predictor.predict_examples(reading, counts=counts))
    examples = [example for example, _ in pairs]
    data = {"name": labelled.name, "examples": len(pairs), "sha256": examples_fingerprint(examples)}
    _check_data(data, record, labelled)
    logits, truth = _arrays(task_model, pairs)
    several = isinstance(task, MultilabelTask)
    # By a seed, not by order: rows are often sorted by class.
    order = np.random.default_rng(0).permutation(len(pairs))
    halves = order[::2], order[1::2]

    def fit(rows: NDArray[np.int64]) -> metrics.Scale:
        """Fit a scale and an offset of each label, or one temperature of all classes."""
        if several:
            return metrics.fit_scales(logits[rows], truth[rows])
        temperature = metrics.fit_temperature(logits[rows], truth[rows])
        return metrics.Scale(np.array(1 / temperature), np.array(0.0))

    scores = [logits, logits.copy()]
    for rows, fitted_rows in (halves, halves[::-1]):
        scale = fit(fitted_rows)
        scores[1][rows] = scale.factor * logits[rows] + scale.offset
    before, after = (_measure(values, truth, several) for values in scores)
    if after["loss"] >= before["loss"]:
        labelled.progress.message(
            "warning: calibration does not lower the loss on examples that did not fit it: the "
            "model's probabilities are as good as they were, or its answers are near chance"
        )
    # The guarantee of sets holds for examples that have not chosen the temperature.
    scale = fit(order if error is None else halves[0])
    _fold(task_model, scale)
    threshold = None
    if isinstance(task, ClassificationTask):
        if error is None and task.conformal is not None:
            labelled.progress.message(
                "note: the sets of the calibrated model are left out; "
                + render(f"add {argument(error=0.1)} for new ones")
            )
        if error is not None:
            # Predicted again: weights in fp32 round a temperature.
            held_out = [examples[row] for row in halves[1]]
            predicted = Predictor(task_model, batch_invariant=True).predict_examples(iter(held_out))
            chances = [prediction.probabilities[example.label] for example, prediction in predicted]
            # The threshold is the probability of one of these texts: in a batch of another shape
            # the same text is a few ulp away and must stay in its set.
            threshold = metrics.conformal_threshold(np.array(chances), error) * (1 - 1e-5)
        task_model.task = dataclasses.replace(task, conformal=threshold)
    else:
        # σ(a z + b) keeps the order, so moved thresholds assign the same labels.
        limits = task.limits(task_model.labels).clip(TINY, 1 - LEAST)
        moved = sigmoid(scale.factor * np.log(limits / (1 - limits)) + scale.offset)
        task_model.task = dataclasses.replace(task, thresholds=tuple(moved.tolist()))
    temperature = None if several else 1 / float(scale.factor)
    kept = {
        "factor": scale.factor.tolist(), "offset": scale.offset.tolist(), "error": error,
        "data": data, "before": before, "after": after,
    }  # fmt: skip
    done = CalibrationResult(out, before, after, temperature, threshold, kept)
    _save(done, task_model, source.name, record)
    return done


def _check_data(data: dict[str, Any], record: dict[str, Any], labelled: EvaluationData) -> None:
    """Raise DataError for too few examples or the training data; note data that chose weights."""
    if data["examples"] < FEWEST:
        message = f"has {data['examples']} examples, and a calibration needs at least {FEWEST}"
        raise DataError(message, where=labelled.name, fix="Give more labelled data.")
    sources = record.get("data", {})
    # By digest: a copy of the file under another name is the same data.
    seen = [name for name in sources if sources[name].get("sha256") == data["sha256"]]
    if "train" in seen or record.get("split", {}).get("sha256") == data["sha256"]:
        message = "is what the model was trained on, where it is surer than elsewhere"
        raise DataError(message, where=labelled.name, fix="Give data that it has not seen.")
    if seen:
        labelled.progress.message(
            "note: this data chose the model's weights, which are a little too good on it: data "
            "that it has not seen calibrates better"
        )


def _arrays(
    task_model: TaskModel[Any, Any], pairs: list[tuple[Any, Any]]
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return the logits of predictions `(examples, labels)`, and what is true of each example."""
    index = {label: number for number, label in enumerate(task_model.labels)}
    chances = np.array([[*prediction.probabilities.values()] for _, prediction in pairs])
    several = isinstance(task_model.task, MultilabelTask)
    for example, _ in pairs:
        required(example.labels if several else example.label, example.where)
    where = getattr(pairs[0][0], "where", None)
    if several:
        truth = np.array([[name in example.labels for name in index] for example, _ in pairs])
        if truth.all() or not truth.any():
            message = "every example has all labels, or none: nothing says how sure to be"
            raise DataError(message, where=where, fix="Give data with and without the labels.")
        chances = chances.clip(LEAST, 1 - LEAST)
        return np.log(chances) - np.log1p(-chances), truth
    truth = np.array([index[example.label] for example, _ in pairs])
    if len({*truth.tolist()}) == 1:
        message = f"all {len(pairs)} examples have the label {pairs[0][0].label!r}"
        raise DataError(message, where=where, fix="Give data of two classes or more.")
    # softmax(log p) = p: logits up to one number for each example.
    return np.log(np.maximum(chances, TINY)), truth


def _measure(logits: NDArray[np.float64], truth: NDArray[Any], several: bool) -> dict[str, float]:
    """Return the cross-entropy and the expected calibration error, of labels over all decisions."""
    counts = Calibration()
    if several:
        chances = sigmoid(logits).reshape(-1)
        confidences, hits = chances, truth.reshape(-1)
        true = np.where(hits, chances, 1 - chances)
    else:
        shares = softmax(logits)
        confidences, hits = shares.max(1), shares.argmax(1) == truth
        true = shares[np.arange(len(truth)), truth]
    counts.add(confidences, hits)
    loss = -float(np.log(np.maximum(true, TINY)).mean())
    return {"loss": loss, "calibration_error": counts.error}


def _fold(task_model: TaskModel[Any, Any], scale: metrics.Scale) -> None:
    """Make a scale of logits part of the layer that computes them: a W x + a b + c."""
    layer = task_model.model.heads["labels"].dense
    assert isinstance(layer, torch.nn.Linear)
    weight, bias = (tensor.detach().cpu().double().numpy() for tensor in (layer.weight, layer.bias))
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(scale.factor.reshape(-1, 1) * weight))
        layer.bias.copy_(torch.from_numpy(scale.factor * bias + scale.offset))


def _save(
    done: CalibrationResult, task_model: TaskModel[Any, Any], name: str, record: dict[str, Any]
) -> None:
    """Save the model with its task, and what its folder recorded."""
    data = done.record["data"]
    card = Card(
        title=f"{name}, calibrated",
        summary=f"The classifier {name}, whose probabilities were calibrated on {data['name']}. "
        "Its answers are the same.",
        metrics={f"{metric} before": value for metric, value in done.before.items()}
        | {**done.after},
        data={"calibration": f"{data['examples']:,} examples, sha256 {data['sha256']}"},
        limits=(UNSEEN, "Its probabilities are calibrated for data like that."),
    )
    task, model, tokenizer = task_model.task, task_model.model, task_model.tokenizer
    settings = {"task": configs.to_dict(task), "length": task_model.length}
    extra = {**record, **settings, "calibration": done.record}
    options: Any = {"labels": task_model.labels, "problem": task.problem}
    save_model(done.folder, model, tokenizer, card=card, extra=extra, **options)
