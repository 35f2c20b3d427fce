"""Multiple choice: AutoModelForMultipleChoice on the very ids that this library reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoModelForMultipleChoice
from transformers.data.data_collator import DataCollatorForMultipleChoice

from bothways.finetuning.data import LabelledData
from bothways.tasks.base import EncodedExample
from peers.peer import Peer, Plan, Rows, Trained, train


def choices(data: LabelledData, plan: Plan) -> Trained:
    """The place of an ending for each question."""
    model = functools.partial(AutoModelForMultipleChoice.from_pretrained, plan.folder)
    scores, seconds, tokens = train(
        model, _rows(data.train), _rows(data.dev), plan, DataCollatorForMultipleChoice
    )
    return Trained(scores.argmax(1).tolist(), seconds, tokens)


def _rows(inputs: Many[EncodedExample]) -> Rows:
    """Ids and segments of each choice, and the place of the right one."""
    return [
        {
            "input_ids": _parts(sequence.ids, sequence.parts),
            "token_type_ids": _parts(sequence.segments, sequence.parts),
            "labels": sequence.targets["label"].labels[0].item(),  # type: ignore[attr-defined]
        }
        for item in inputs
        for sequence in item.sequences
    ]


def _parts(values: NDArray[Any], lengths: Many[int]) -> list[list[int]]:
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])]


def score_choices(examples: Many[Any], answers: list[Any], metric: str) -> float:
    """The share that is right."""
    assert metric == "accuracy"
    return float(
        np.mean([example.label == place for example, place in zip(examples, answers, strict=True)])
    )


CHOICES = Peer(choices, lambda prediction: prediction.index, score_choices)
