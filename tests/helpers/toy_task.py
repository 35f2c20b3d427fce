"""A small vocabulary, a small random model, and examples at random."""

import dataclasses
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from bothways.core.config.reader import load
from bothways.finetuning import run
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import LabelledData
from bothways.finetuning.run import FinetuneResult, finetune
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.tasks.classification.task import ClassificationTask, TextClassifier
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from toy_text import write_vocabulary
from toy_training import enter_ranks

WORDS = ("ape", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s")


def make_tokenizer(
    folder: Path, tokens: tuple[str, ...] = VOCABULARY, lowercase: bool = True
) -> Tokenizer:
    return Tokenizer.load(write_vocabulary(folder, tokens, do_lower_case=lowercase) / "vocab.txt")


def make_task(
    folder: Path, labels: tuple[str, ...] = ("x", "y", "z"), length: int = 16, dropout: float = 0.1
) -> TextClassifier:
    return bind_small(ClassificationTask(), make_tokenizer(folder), labels, length, dropout=dropout)


def bind_small(
    task: Any, tokenizer: Tokenizer, labels: tuple[str, ...] = (), length: int = 16, *,
    seed: int = 5, dropout: float = 0.0, spread: float = 0.3,
) -> Any:  # fmt: skip
    """A task with a small model at random that has its heads."""
    torch.manual_seed(seed)
    config = EncoderConfig(
        tokenizer.size, 16, 2, 2, 32, position=Learned(24), initial_range=spread,
        dropout=Dropouts(dropout, dropout),
    )  # fmt: skip
    return task.bind(Model(config, task.heads(labels, None)), tokenizer, labels, length)


def fit_task(
    start: Model | EncoderConfig,
    data: LabelledData,
    settings: FinetuneConfig,
    *,
    seed: int = 0,
    order_seed: int | None = None,
    **options: Any,
) -> FinetuneResult:
    """Fine-tune once, in memory."""
    settings = dataclasses.replace(settings, seed=seed, order_seed=order_seed)
    return finetune(settings, start=start, train=data, **options)


def interrupt_score(patch: pytest.MonkeyPatch, call: int = 1, number: int = signal.SIGINT) -> None:
    """Send this process a signal when a run scores its dev data for the n-th time."""
    score, calls = run.score, iter(range(1, 10**6))

    def interrupting(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            signal.raise_signal(number)
        return score(*arguments, **options)

    patch.setattr(run, "score", interrupting)


def fit_on_rank(rank: int, world: int, port: int, settings: Path, folders: list[Path]) -> None:
    """Fine-tune into each folder, as one of two ranks at a store like that of torchrun's agents."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    enter_ranks(rank, world, port)
    for folder in folders:
        finetune(load(FinetuneConfig, file=settings), folder, device="cpu")


def make_text(draw: random.Random, longest: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))


def make_examples(
    count: int, labels: tuple[str, ...] = ("x", "y", "z"), longest: int = 20, seed: int = 0
) -> list[TextExample]:
    """Singles and pairs in turn, of any length."""
    draw = random.Random(seed)
    return [
        TextExample(
            make_text(draw, longest),
            make_text(draw, longest) if number % 2 else None,
            draw.choice(labels),
            f"made:{number}",
        )
        for number in range(count)
    ]
