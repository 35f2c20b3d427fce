"""Training with transformers' Trainer and the settings of `benchmarks/finetuning.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed

from bothways.finetuning.data import LabelledData

RATE, BATCH = 5e-5, 32

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """The settings of a side.

    Attributes:
        folder: the model folder.
        length: maximum length of a sequence in tokens.
        epochs: length of the training.
        seed: seed of the new head and of the order of the data.
        batch: examples per step of the Trainer.
        padded: length in tokens to which the Trainer's side pads every sequence; None pads to
            the longest sequence of the batch.
        defaults: both sides keep their own defaults; this library uses the processor's fastest
            precision.
        precision: precision of both sides otherwise.
        device: where both sides compute, such as "cuda".
    """

    folder: Path
    length: int
    epochs: float
    seed: int
    batch: int = BATCH
    padded: int | None = None
    defaults: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "cpu"


@dataclass(frozen=True)
class Trained:
    """A side after training.

    Attributes:
        answers: the prediction for each dev example, in the form that `Peer.score` compares.
        seconds: duration of training.
        tokens: number of training tokens without padding.
    """

    answers: list[Any]
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Peer:
    """A kind of task.

    Attributes:
        theirs: trains with transformers and predicts the dev examples.
        answer_of: converts a prediction of this library to the same form.
        score: scores answers to dev examples by a metric, without code of this library.
        padded: length in tokens to which transformers' example for the task pads; None pads to
            the longest sequence of the batch.
    """

    theirs: Callable[[LabelledData, Plan], Trained]
    answer_of: Callable[[Any], Any]
    score: Callable[[Many[Any], list[Any], str], float]
    padded: int | None = None


def train(
    model: Callable[[], Any], rows: Rows, asked: Rows, plan: Plan, collator: Callable[..., Any]
) -> tuple[Any, float, int]:
    """Train a model; return its outputs for the rows `asked`, seconds, and training tokens.

    Args:
        model: builds the model; called after the seed is set.
        collator: class of transformers that makes a batch of rows.
    """
    padding = {"padding": "max_length", "max_length": plan.padded} if plan.padded else {}
    collate = collator(AutoTokenizer.from_pretrained(plan.folder), **padding)
    set_seed(plan.seed)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=plan.batch,
            per_device_eval_batch_size=plan.batch,
            learning_rate=RATE,
            weight_decay=0.01,
            num_train_epochs=plan.epochs,
            warmup_steps=round(0.1 * plan.epochs * len(rows) / plan.batch),
            save_strategy="no",
            eval_strategy="no",
            report_to=[],
            seed=plan.seed,
            use_cpu=plan.device == "cpu",
            bf16=plan.precision == "bf16",
            disable_tqdm=True,
        )
        trainer = Trainer(model(), arguments, train_dataset=rows, data_collator=collate)
        begin = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begin
        return (
            trainer.predict(asked).predictions,
            seconds,
            round(plan.epochs * sum(map(_tokens, rows))),
        )


def _tokens(row: dict[str, Any]) -> int:
    """Of one text, or of several choices."""
    ids = row["input_ids"]
    return sum(map(len, ids)) if isinstance(ids[0], list) else len(ids)
