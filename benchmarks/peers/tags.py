"""Tags of words: AutoModelForTokenClassification, whose loss and answers are those of each word's first token.

It reads the ids and windows of this library, so both sides tag the same words of the same sentences; seqeval scores both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from seqeval.metrics import f1_score
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

from bothways.core.batch import IGNORED
from bothways.finetuning.data import LabelledData
from bothways.tasks.base import EncodedExample
from peers.peer import Peer, Plan, Rows, Trained, train


def tags(data: LabelledData, plan: Plan) -> Trained:
    """A tag for each word."""
    load, labels = AutoModelForTokenClassification.from_pretrained, len(data.labels)
    model = functools.partial(load, plan.folder, num_labels=labels)
    asked = _rows(data.dev)
    logits, seconds, tokens = train(
        model, _rows(data.train), asked, plan, DataCollatorForTokenClassification
    )
    places = [np.flatnonzero(np.array(row["labels"]) != IGNORED) for row in asked]
    found = iter(
        [data.labels[label] for label in row[at].argmax(1)]
        for row, at in zip(logits, places, strict=True)
    )
    return Trained(
        [tuple(tag for _ in item.sequences for tag in next(found)) for item in data.dev],
        seconds,
        tokens,
    )


def _rows(inputs: Many[EncodedExample]) -> Rows:
    """Ids, segments and, at the first token of each word, its tag."""
    rows = []
    for sequence in (sequence for item in inputs for sequence in item.sequences):
        target: Any = sequence.targets["tag"]
        labels = np.full(len(sequence), IGNORED)
        labels[target.index] = target.ids
        ids, segments = sequence.ids.tolist(), sequence.segments.tolist()
        rows.append({"input_ids": ids, "token_type_ids": segments, "labels": labels.tolist()})
    return rows


def score_tags(examples: Many[Any], answers: list[Any], metric: str) -> float:
    """F1 of entities by seqeval, as conlleval counts them."""
    assert metric == "f1"
    return float(
        f1_score(
            [list(example.tags) for example in examples],
            [list(found) for found in answers],
            zero_division=0,
        )
    )


TAGS = Peer(tags, lambda prediction: prediction.tags, score_tags)
