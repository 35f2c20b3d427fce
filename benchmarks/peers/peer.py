"""The shared part of all peers: transformers' Trainer with the settings of `benchmarks/finetuning.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed

from bothways.finetuning.data import LabelledData

RATE, BATCH = 5e-5, 32

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """How a side is trained.

    Attributes:
        folder: of the model.
        length: of the longest sequence.
        epochs: how long.
        seed: of the new head and of the data's order.
        batch: examples in a step of the Trainer.
        padded: to how many tokens the Trainer's side pads every sequence; none pads to the longest of the batch.
        defaults: both sides keep their own defaults: here the precision is what the processor does best.
        precision: of both sides otherwise.
    """

    folder: Path
    length: int
    epochs: float
    seed: int
    batch: int = BATCH
    padded: int | None = None
    defaults: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class Trained:
    """A side after training.

    Attributes:
        said: of each dev example, in the form that the scores of its task compare.
        seconds: of the training alone.
        tokens: that were read in training, padding not counted.
    """

    said: list[Any]
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Peer:
    """A kind of task.

    Attributes:
        theirs: train with transformers, and answer the dev examples.
        said: a prediction of this library in the same form.
        score: of what was said of dev examples, by a metric; by other code than this library's.
        padded: to how many tokens transformers' example for the task pads by default; none pads to the longest of the batch.
    """

    theirs: Callable[[LabelledData, Plan], Trained]
    said: Callable[[Any], Any]
    score: Callable[[Many[Any], list[Any], str], float]
    padded: int | None = None


def train(
    model: Callable[[], Any], rows: Rows, asked: Rows, plan: Plan, collator: Callable[..., Any]
) -> tuple[Any, float, int]:
    """What the model says of the rows that are asked, the seconds of training, and its tokens.

    Args:
        model: makes it; called after the seed is set.
        collator: of the tokenizer; makes a batch of rows.
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
            use_cpu=True,
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
