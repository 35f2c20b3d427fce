"""What is looked at before any training, since a failure after an hour is the dearest: of the model, its text, the machine.

Each check is a function that returns findings. Errors stop, all of them in one message; warnings and notes are said once. What
concerns labels is in `bothways.tasks.checks`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from bothways.core.batch import Batch
from bothways.core.errors import BothwaysError
from bothways.core.hardware import Precision, disk_free, memory_available, resolve_precision
from bothways.core.learner import Learner
from bothways.core.shares import OnShare, untold
from bothways.model.heads import Head
from bothways.model.ledger import ledger
from bothways.model.operations import kept_floats
from bothways.model.recurrentconfig import ModelConfig
from bothways.tasks.task import Input
from bothways.text.tokenizer import Tokenizer

Check = Literal[
    "ids", "positions", "casing", "truncation", "unknown", "disk", "memory", "time",
    "rows", "labels", "balance", "overlap", "heads",
]  # fmt: skip

UNKNOWN = 0.02
"""The share of unknown tokens from which on a warning is due."""
SAMPLE = 1000
"""Texts that casing is judged by."""
ADAM_BYTES = 16
"""Per parameter, in training: the weight, its gradient, and Adam's two moments, in fp32."""
SAVED_BYTES = 12
"""Per parameter, in a checkpoint: the weight and Adam's two moments."""
SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: which.
        severity: an error stops the run, a warning is likely to spoil it, a note is worth knowing.
        what: as one sentence.
        where: a setting, a file or a line.
        fix: what to change.
    """

    check: Check
    severity: Literal["error", "warning", "note"]
    what: str
    where: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}" + (f". {self.fix}" if self.fix else "")


def settle(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that are no errors, warnings first.

    Raises:
        BothwaysError: there are errors; it lists them all.
    """
    found = list(findings)
    errors = [finding for finding in found if finding.severity == "error"]
    if len(errors) == 1:
        raise BothwaysError(errors[0].what, where=errors[0].where, fix=errors[0].fix)
    if errors:
        lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, 1))
        raise BothwaysError(f"{len(errors)} things must be mended before training:{lines}")
    return sorted(found, key=lambda finding: finding.severity != "warning")


def places(items: Many[str]) -> str:
    """The first few of some places, and how many more there are."""
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def check_model(encoder: ModelConfig, tokenizer: Tokenizer, length: int) -> list[Finding]:
    """Ids against the rows of the embedding, and length against positions; what fails late as a "device-side assert"."""
    findings = []
    if tokenizer.size > encoder.vocab:
        what = f"the tokenizer has ids up to {tokenizer.size - 1}, but the model's embedding has {encoder.vocab} rows"
        findings.append(Finding("ids", "error", what, "tokenizer", "Use the tokenizer that the model was trained with."))
    if length > encoder.most:
        what = f"sequences of {length} tokens are longer than the model's {encoder.most} positions"
        findings.append(Finding("positions", "error", what, "length", f"Set length={encoder.most} or less."))
    return findings


def check_casing(tokenizer: Tokenizer, texts: Many[str]) -> list[Finding]:
    """Whether the vocabulary and the tokenizer agree about capital letters, judged by a sample of the text."""
    sample = list(texts[:: max(1, len(texts) // SAMPLE)][:SAMPLE])
    if tokenizer.lowercase:
        control = tokenizer.special | (np.arange(tokenizer.size) == tokenizer.specials.unknown)
        tokens = [token for token, id in tokenizer.backend.get_vocab().items() if not control[id]]
        capital = sum(token != token.lower() for token in tokens) / max(1, len(tokens))
        if capital <= 0.1:
            return []
        what = f"the vocabulary is cased ({capital:.0%} of its tokens have capitals), but the tokenizer lower-cases"
        return [Finding("casing", "warning", what, "tokenizer", 'Set "do_lower_case": false in tokenizer_config.json.')]
    unknown, lowered = (unknown_share(tokenizer, some) for some in (sample, [text.lower() for text in sample]))
    if unknown - lowered <= UNKNOWN:
        return []
    what = (
        f"the vocabulary is uncased, but the tokenizer keeps capitals: {unknown:.1%} of tokens are unknown, "
        f"lower-cased {lowered:.1%}"
    )
    return [Finding("casing", "warning", what, "tokenizer", 'Set "do_lower_case": true in tokenizer_config.json.')]


def unknown_share(tokenizer: Tokenizer, texts: list[str]) -> float:
    """The part of the tokens of these texts that are unknown."""
    ids, _ = tokenizer.encode_flat(texts)
    return float((ids == tokenizer.specials.unknown).mean()) if len(ids) else 0.0


def check_inputs(inputs: Many[Input], tokenizer: Tokenizer, length: int) -> list[Finding]:
    """How much of the text is cut off, and how much of the rest is unknown."""
    findings = []
    cut = [item for item in inputs if item.cut]
    if cut:
        tokens = sum(item.tokens for item in inputs)
        what = (
            f"{len(cut)} of {len(inputs)} examples ({len(cut) / len(inputs):.1%}) are longer than {length} tokens and are cut: "
            f"{sum(item.cut for item in cut) / tokens:.1%} of all tokens are not read"
        )
        findings.append(Finding("truncation", "warning", what, "length", "Set a greater length to read them whole."))
    ids = [sequence.ids for item in inputs for sequence in item.sequences]
    share = float((np.concatenate(ids) == tokenizer.specials.unknown).mean()) if ids else 0.0
    if share > UNKNOWN:
        what = f"{share:.1%} of the tokens are unknown to the vocabulary"
        findings.append(Finding("unknown", "warning", what, "tokenizer", "Use a model whose vocabulary fits this text."))
    return findings


@dataclass(frozen=True)
class Load:
    """What a run asks of a machine.

    Attributes:
        encoder, heads: the model.
        length: the longest sequence, in tokens.
        microbatch: the most tokens that go through the model at once.
        checkpoints: how many lie on the disk at once, the one being written included.
        recompute: whether blocks are computed again in the backward pass.
    """

    encoder: ModelConfig
    heads: tuple[Head, ...]
    length: int
    microbatch: int
    checkpoints: int
    recompute: bool = False

    @property
    def parameters(self) -> int:
        """Those of the model."""
        return ledger(self.encoder, self.heads).total

    def memory(self, device: torch.device) -> float:
        """Bytes at the peak of a step: weights with Adam's moments, and what the backward pass needs of each token."""
        kept = kept_floats(self.encoder, self.length, device, self.recompute)
        return ADAM_BYTES * self.parameters + 4.0 * kept * self.microbatch


def check_machine(load: Load, folder: Path, device: torch.device) -> list[Finding]:
    """Disk space for checkpoints and the model, and memory for a step by an estimate."""
    return [*_check_disk(load, folder), *_check_memory(load, device)]


def forecast(
    learner: Learner,
    batch: Batch,
    tokens: int | float,
    precision: Precision,
    on_share: OnShare = untold,
) -> Finding:
    """How long so many tokens will take, as `speed` measures it."""
    rate = speed(learner, batch, precision, on_share)
    left = timedelta(seconds=math.ceil(tokens / rate))
    return Finding("time", "note", f"{tokens:,.0f} tokens at {rate:,.0f} a second, as measured now: about {left}")


def speed(learner: Learner, batch: Batch, precision: Precision, on_share: OnShare = untold) -> float:
    """Tokens per second in training, measured on one batch forward and backward; the weights stay as they are.

    Draws from torch's generator, for dropout: seed it afterwards. `on_share` is told how much of the measurement is done.
    """
    device = next(learner.parameters()).device
    dtype, moved = resolve_precision(precision, device), batch.to(device)
    learner.train()
    rate = 0.0
    for done in range(2):  # the first is slower than all that follow
        on_share(done / 2)
        start = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            losses = learner(moved)
        torch.autograd.backward(torch.stack([loss.total for loss in losses.values()]).sum())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rate = batch.layout.tokens / (time.perf_counter() - start)
    learner.zero_grad()
    return rate


def _check_disk(load: Load, folder: Path) -> list[Finding]:
    needed, free = SAVED_BYTES * load.parameters * load.checkpoints + 4 * load.parameters, disk_free(folder)
    if needed <= free:
        return []
    what = f"{load.checkpoints} checkpoints and the model take {_size(needed)}, but {_size(free)} are free"
    return [Finding("disk", "error", what, str(folder), "Make room, or choose a folder on another disk.")]


def _check_memory(load: Load, device: torch.device) -> list[Finding]:
    free, fixed = memory_available(device), ADAM_BYTES * load.parameters
    if free is None:
        return []
    if fixed > free:
        what = f"the model with its optimiser takes {_size(fixed)} of memory, but {_size(free)} are free on {device}"
        return [Finding("memory", "error", what, fix="Use a smaller model or another machine.")]
    if (peak := load.memory(device)) > free:
        what = f"a step may take {_size(peak)} of memory, but {_size(free)} are free on {device}"
        fix = f"Halve it; it is {load.microbatch}." + ("" if load.recompute else " Or set training.recompute=true.")
        return [Finding("memory", "warning", what, "microbatch_tokens", fix)]
    return []


def _size(count: int | float) -> str:
    return f"{count / 2**20:,.1f} MiB"
