"""The workloads and contenders of `bothways bench`.

A step is a whole update: forward, both losses, backward, clipping, AdamW. This library runs it in
its training loop. On a GPU both libraries are timed again with compiled models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bothways.core.batch import Batch, LabelTargets, TokenTargets, pack
from bothways.core.runtime.allocator import tune_allocator
from bothways.core.runtime.devices import Precision
from bothways.core.sequence import Sequence
from bothways.core.source import Cursor
from bothways.data.loader import LoadedStep
from bothways.data.masking import Masking, Vocabulary
from bothways.finetuning.config import finetune_adam
from bothways.model.config import EncoderConfig
from bothways.model.flops import BACKWARD, forward_flops
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule, MaskedLMNextSentence
from bothways.training.durations import RunState, Steps
from bothways.training.loop import Loop
from bothways.training.optimizers import AdamW, build_optimizer
from bothways.training.parallel import Single
from bothways.training.preflight import compute_as
from bothways.training.run import Training
from bothways.training.saved_state import RunTensors


@dataclass(frozen=True)
class Workload:
    """A pre-training step: `rows` sequences of `length` tokens, 15 % of them masked."""

    name: str
    encoder: EncoderConfig
    rows: int = 16
    length: int = 128

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return self.rows * self.length

    @property
    def operations(self) -> float:
        """Floating-point operations of one step, counted as described in `race`."""
        predicted = Masking().count(self.length) / self.length
        forward = forward_flops(self.encoder, (MaskedHead(),), self.length, predicted)
        return (1 + BACKWARD) * self.tokens * forward


WORKLOADS = {
    "small": Workload("L4 H256", EncoderConfig(30522, 256, 4, 4, 1024)),
    "base": Workload("BERT-base", EncoderConfig(30522)),
    "long": Workload("BERT-base", EncoderConfig(30522), 64, 512),
    "large": Workload("BERT-large", EncoderConfig(30522, 1024, 24, 16, 4096), 32, 512),
}
DEFAULT_TRAINING = finetune_adam()
SUITED = {"cpu": ("small", "base"), "cuda": ("long", "large", "base")}
"""The workloads that keep a device busy without taking hours, the default first."""


def make_batch(work: Workload) -> Batch:
    """Return random masked tokens in pairs of segments."""
    rng = np.random.default_rng(0)
    special = np.zeros(work.encoder.vocab, dtype=bool)
    special[:5] = True
    vocabulary = Vocabulary(special, np.zeros_like(special), 4)
    segments = (np.arange(work.length) >= work.length // 2).astype(np.int8)
    sequences = [
        Sequence(
            rng.integers(5, work.encoder.vocab, work.length, dtype=np.int32),
            segments,
            {"pair": LabelTargets(rng.integers(0, 2, 1))},
        )
        for _ in range(work.rows)
    ]
    objective = MaskedLMNextSentence()
    return pack([objective.prepare(sequence, vocabulary, rng) for sequence in sequences])


def ours(
    work: Workload,
    batch: Batch,
    precision: Precision,
    device: torch.device,
    training: Training = DEFAULT_TRAINING,
) -> Callable[[], None]:
    """Return a function that makes one update with the training loop of this library."""
    tune_allocator()  # as the training loop does
    model = Model(*MaskedLMNextSentence().models(work.encoder)["model"])
    training_module = MaskedLMModule(model).to(device)
    compute_as(training_module.model.encoder, training, device)
    batch = batch if device.type == "cpu" else batch.pinned()
    optimizer = build_optimizer(AdamW(), training_module.named_parameters())
    loop = Loop(
        RunTensors(training_module, optimizer, Single()), lambda _: 1.0, precision=precision
    )
    step = LoadedStep((batch,), Cursor(), batch.layout.tokens, batch.layout.sequences, 0.0)

    def update() -> None:
        """Make one step."""
        loop.train([step], Steps(1), RunState())

    return update


def transformers(
    work: Workload, batch: Batch, precision: Precision, device: torch.device, compiled: bool = False
) -> Callable[[], None]:
    """Return a function that makes one update of BertForPreTraining, written as documented there.

    Rows are padded and every position has a label.
    """
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=work.encoder.vocab,
        hidden_size=work.encoder.width,
        num_hidden_layers=work.encoder.depth,
        num_attention_heads=work.encoder.heads,
        intermediate_size=work.encoder.intermediate_size,
    )
    model = BertForPreTraining(config).to(device).train()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    inputs = {name: x.to(device) for name, x in _padded(batch).items()}

    def update() -> None:
        """Make one step."""
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return update


def _padded(batch: Batch) -> dict[str, Any]:
    rows = batch.layout.sequences
    masked = batch.target("masked", TokenTargets)
    labels = torch.full_like(batch.ids, -100)
    labels[masked.index] = torch.as_tensor(masked.ids)
    ids = batch.ids.view(rows, -1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": batch.segments.view(rows, -1),
        "labels": labels.view(rows, -1),
        "next_sentence_label": batch.target("pair", LabelTargets).labels,
    }


Contender = Callable[[Workload, Batch, Precision, torch.device], Callable[[], None]]
CONTENDERS: Mapping[str, Contender] = {
    "bothways": ours,
    "transformers": transformers,
    "bothways compiled": partial(
        ours, training=dataclasses.replace(DEFAULT_TRAINING, compiled=True)
    ),
    "transformers compiled": partial(transformers, compiled=True),
}


def contenders(device: torch.device) -> tuple[str, ...]:
    """Return the contenders for a device; on a CPU compiling takes longer than the whole race."""
    return tuple(name for name in CONTENDERS if device.type != "cpu" or "compiled" not in name)
