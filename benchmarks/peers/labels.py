"""Classes and scores of texts: AutoModelForSequenceClassification on the very ids that this library reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence as Many
from typing import Any

from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from bothways.finetuning.data import LabelledData
from bothways.tasks.base import EncodedExample
from peers.peer import Peer, Plan, Rows, Trained, train


def classes(data: LabelledData, plan: Plan) -> Trained:
    """A label for each text."""
    logits, seconds, tokens = _train(data, plan)
    return Trained([data.labels[place] for place in logits.argmax(1)], seconds, tokens)


def numbers(data: LabelledData, plan: Plan) -> Trained:
    """A number for each text: with one output, transformers learns squared errors."""
    logits, seconds, tokens = _train(data, plan)
    return Trained(logits[:, 0].tolist(), seconds, tokens)


def _train(data: LabelledData, plan: Plan) -> tuple[Any, float, int]:
    load, labels = AutoModelForSequenceClassification.from_pretrained, len(data.labels)
    model = functools.partial(load, plan.folder, num_labels=labels)
    return train(model, _rows(data.train), _rows(data.dev), plan, DataCollatorWithPadding)


def _rows(inputs: Many[EncodedExample]) -> Rows:
    """Ids, segments and label of each example."""
    sequences = [sequence for item in inputs for sequence in item.sequences]
    return [
        {
            "input_ids": sequence.ids.tolist(),
            "token_type_ids": sequence.segments.tolist(),
            "labels": sequence.targets["label"].labels[0].item(),  # type: ignore[attr-defined]
        }
        for sequence in sequences
    ]


def score_classes(examples: Many[Any], answers: list[Any], metric: str) -> float:
    """By scikit-learn."""
    gold = [example.label for example in examples]
    known: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: accuracy_score(gold, answers),
        "mcc": lambda: matthews_corrcoef(gold, answers),
        "f1_macro": lambda: f1_score(gold, answers, average="macro"),
    }
    return float(known[metric]())


def score_numbers(examples: Many[Any], answers: list[Any], metric: str) -> float:
    """By scipy."""
    return float(
        {"pearson": pearsonr, "spearman": spearmanr}[metric](
            [float(e.label) for e in examples], answers
        ).statistic
    )


CLASSES = Peer(classes, lambda prediction: prediction.label, score_classes, padded=128)
NUMBERS = Peer(numbers, lambda prediction: prediction.score, score_numbers, padded=128)
