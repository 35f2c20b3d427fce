"""This machine's speed at a pre-training step, side by side with transformers in one run.

The contenders take turns, round after round, with the same threads on the same tokens; the medians are compared. Each step is
a whole update: forward, both losses, backward, clipping, AdamW. Ours goes through the library's own loop. On a GPU both come
once more with the compiler that each offers.

Operations are counted as the matrix products that the model needs, a multiply and an add as two, backward as twice forward:
per token 12·H² a block and 2·n·H for attention at length n; the MLM head on masked tokens alone. So a contender that computes
the head everywhere is not credited for it.
"""

from __future__ import annotations

import dataclasses
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bothways.core.allocator import give_back
from bothways.core.batch import Batch, LabelTargets, pack
from bothways.core.errors import ResourceError
from bothways.core.hardware import Precision, describe, gemm_rate, has_bf16, wait
from bothways.core.learner import Cursor
from bothways.core.sequence import Sequence
from bothways.data.loader import Step
from bothways.data.masking import Masking, Vocabulary
from bothways.model import native
from bothways.model.config import EncoderConfig
from bothways.model.heads import Masked, Model, Pair, Pooled
from bothways.model.operations import BACKWARD, forward_flops
from bothways.objectives.pretraining import Pretraining
from bothways.recipes.computing import compute_as
from bothways.recipes.method import adam
from bothways.training.loop import fit
from bothways.training.optim import AdamW, build
from bothways.training.parallel import Single
from bothways.training.run import Training
from bothways.training.state import Progress, Steps


@dataclass(frozen=True)
class Workload:
    """A pre-training step: `rows` sequences of `length` tokens, 15 % of them masked."""

    name: str
    encoder: EncoderConfig
    rows: int = 16
    length: int = 128

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return self.rows * self.length

    @property
    def operations(self) -> float:
        """Floating-point operations of one step, as the module counts them."""
        predicted = Masking().count(self.length) / self.length
        return (1 + BACKWARD) * self.tokens * forward_flops(self.encoder, (Masked(),), self.length, predicted)


WORKLOADS = {
    "small": Workload("L4 H256", EncoderConfig(30522, 256, 4, 4, 1024)),
    "base": Workload("BERT-base", EncoderConfig(30522)),
    "long": Workload("BERT-base", EncoderConfig(30522), 64, 512),
    "large": Workload("BERT-large", EncoderConfig(30522, 1024, 24, 16, 4096), 32, 512),
}
USUAL = adam()
SUITED = {"cpu": ("small", "base"), "cuda": ("long", "large", "base")}
"""The workloads that fill a device and do not take hours; the first one is the usual."""


def make_batch(work: Workload, seed: int = 0) -> Batch:
    """Random tokens in pairs of segments, masked."""
    rng = np.random.default_rng(seed)
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
    learner = Pretraining(Model(EncoderConfig(5, 1, 1, 1, 1), ()), Masking(), vocabulary)
    return pack([learner.prepare(sequence, rng) for sequence in sequences])


def ours(work: Workload, batch: Batch, precision: Precision, device: torch.device, how: Training = USUAL) -> Callable[[], None]:
    """One update of this library, through its own loop."""
    learner = Pretraining(Model(work.encoder, (Masked(), Pooled(), Pair())), Masking(), _no_vocabulary()).to(device)
    compute_as(learner.model.encoder, how, device)
    batch = batch if device.type == "cpu" else batch.pinned()
    optimiser = build(AdamW(), learner.named_parameters())
    step = Step((batch,), Cursor(), batch.layout.tokens, batch.layout.sequences, 0.0)

    def update() -> None:
        """A step of the loop."""
        fit(
            learner, [step], optimiser, lambda _: 1.0, Single(),
            until=Steps(1), progress=Progress(), on_step=lambda *_: False, precision=precision,
        )  # fmt: skip

    return update


def transformers(
    work: Workload, batch: Batch, precision: Precision, device: torch.device, compiled: bool = False
) -> Callable[[], None]:
    """One update of transformers' BertForPreTraining as its documentation has it, padded rows and labels at all places."""
    try:
        from transformers import BertConfig, BertForPreTraining
    except ImportError as error:
        raise ResourceError("transformers is not installed", fix="pip install transformers, to compare with it.") from error
    c = work.encoder
    model = BertForPreTraining(
        BertConfig(
            vocab_size=c.vocab,
            hidden_size=c.width,
            num_hidden_layers=c.depth,
            num_attention_heads=c.heads,
            intermediate_size=c.inner,
        )
    ).to(device)
    forward = torch.compile(model) if compiled else model
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)
    inputs = {name: x.to(device) for name, x in _padded(batch).items()}

    def update() -> None:
        """A step as it is usually written."""
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        loss.item()

    return update


def _padded(batch: Batch) -> dict[str, Any]:
    rows = batch.layout.sequences
    masked: Any = batch.targets["masked"]
    pair: Any = batch.targets["pair"]
    labels = torch.full_like(batch.ids, -100)
    labels[masked.index] = masked.ids
    ids = batch.ids.view(rows, -1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": batch.segments.view(rows, -1),
        "labels": labels.view(rows, -1),
        "next_sentence_label": pair.labels,
    }


def _no_vocabulary() -> Vocabulary:
    nothing = np.zeros(1, dtype=bool)
    return Vocabulary(nothing, nothing, 0)


Contender = Callable[[Workload, Batch, Precision, torch.device], Callable[[], None]]
CONTENDERS: Mapping[str, Contender] = {
    "bothways": ours,
    "transformers": transformers,
    "bothways compiled": partial(ours, how=dataclasses.replace(USUAL, compiled=True)),
    "transformers compiled": partial(transformers, compiled=True),
}


def contenders(device: torch.device) -> tuple[str, ...]:
    """Who takes part on a device: on a CPU nobody compiled, which takes longer to begin than all the rest."""
    return tuple(name for name in CONTENDERS if device.type != "cpu" or "compiled" not in name)


@dataclass(frozen=True)
class Timing:
    """Seconds of one update: each round's, after a first that is not counted."""

    contender: str
    precision: Precision
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the rounds, in seconds."""
        return statistics.median(self.rounds)


def race(work: Workload, rounds: int, device: torch.device) -> list[Timing]:
    """Seconds of an update for each contender in each precision that the device has, in interleaved rounds."""
    precisions: list[Precision] = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    batch = make_batch(work)
    updates = {(name, p): CONTENDERS[name](work, batch, p, device) for name in contenders(device) for p in precisions}
    seconds: dict[tuple[str, Precision], list[float]] = {key: [] for key in updates}
    for _ in range(rounds + 1):
        for key, update in updates.items():
            start = time.perf_counter()
            update()
            wait(device)
            seconds[key].append(time.perf_counter() - start)
    return [Timing(name, p, tuple(values[1:])) for (name, p), values in seconds.items()]


def peak_memory(contender: str, work: Workload, precision: Precision, device: torch.device) -> int | None:
    """Bytes that a fresh process holds at most on the device during three updates; none if it does not come to its end."""
    code = (
        "import pickle, sys\n"
        "from bothways.recipes.bench import CONTENDERS, high_water_mark, make_batch\n"
        "name, work, precision, device = pickle.load(sys.stdin.buffer)\n"
        "update = CONTENDERS[name](work, make_batch(work), precision, device)\n"
        "for _ in range(3): update()\n"
        "print(high_water_mark(device))"
    )
    given = pickle.dumps((contender, work, precision, device))
    done = subprocess.run([sys.executable, "-c", code], input=given, stdout=subprocess.PIPE, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def high_water_mark(device: torch.device) -> int:
    """Bytes that this process has held at most; of a GPU's memory, in tensors. (getrusage would count its parent's, too.)"""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class Row:
    """One line of the table: tokens a second, ratios to transformers by default and in the same precision, share of GEMM."""

    timing: Timing
    tokens_per_second: float
    against_default: float
    against_same: float
    share_of_gemm: float
    memory: int | None


def measure(work: Workload, rounds: int, device: torch.device) -> list[Row]:
    """The race and the memory of one workload.

    Raises:
        ResourceError: the device has not the memory, or transformers is not installed.
    """
    try:
        timings = race(work, rounds, device)
    except torch.OutOfMemoryError as error:
        what = f"{describe(device)} has not the memory for {work.rows} × {work.length} tokens of {work.name}"
        raise ResourceError(what, fix="Choose a smaller one: bothways bench small.") from error
    give_back(device)  # for the processes below
    median = {(t.contender, t.precision): t.median for t in timings}
    return [
        Row(
            t,
            work.tokens / t.median,
            median["transformers", "fp32"] / t.median,
            median["transformers", t.precision] / t.median,
            work.operations / t.median / gemm_rate(device, torch.bfloat16 if t.precision == "bf16" else torch.float32),
            peak_memory(t.contender, work, t.precision, device),
        )
        for t in timings
    ]


def hardware(device: torch.device) -> str:
    """The machine and the versions that the figures belong to."""
    import transformers as peer

    return f"{describe(device)}, {native.describe()}, transformers {peer.__version__}"
