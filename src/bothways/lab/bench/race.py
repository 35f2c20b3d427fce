"""Time a pre-training step of this library and of transformers in one run: `bothways bench`.

The contenders take turns, round after round, with equal threads and tokens; their medians are
compared. Each contender runs in its own process, as it does for its users, so that the allocator
and torch settings of one do not affect another.

A step is a whole update: forward, both losses, backward, clipping, AdamW. This library runs it in
its training loop. On a GPU both libraries are timed again with compiled models, and in bf16 alone
where it has that: nobody trains in fp32 there, and to compile takes up to a minute.

Operations count the matrix products that the model needs (a multiply-add is two, a backward pass
twice the forward pass): 12·H² per token and block, 2·n·H for attention at length n, and the MLM
head on masked tokens only. A contender that computes the head everywhere gets no credit for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bothways.core.batch import Batch, LabelTargets, TokenTargets, pack
from bothways.core.errors import ResourceError
from bothways.core.report.sections import Cell, TableSection
from bothways.core.runtime.devices import Precision, describe_device, gemm_rate, has_bf16, wait
from bothways.core.runtime.process import give_back, tune_allocator
from bothways.core.source import Cursor, Sequence, TrainingStep
from bothways.data.masking import Masking, Vocabulary
from bothways.finetuning.config import finetune_adam
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead
from bothways.model.kernels import library
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule, MaskedLMNextSentence
from bothways.training.loop import Loop
from bothways.training.optimizers import AdamW, build_optimizer
from bothways.training.parallel import Plan
from bothways.training.run import Training, compute_as
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import RunState, Steps
from bothways.training.step_cost import BACKWARD, forward_flops


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
    sequences = list[Sequence]()
    for _ in range(work.rows):
        ids = rng.integers(5, work.encoder.vocab, work.length, dtype=np.int32)
        targets = {"pair": LabelTargets(rng.integers(0, 2, 1))}
        sequences.append(Sequence(ids, segments, targets))
    objective = MaskedLMNextSentence()
    return pack([objective.prepare(sequence, vocabulary, rng) for sequence in sequences])


def build_update(
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
    loop = Loop(RunTensors(training_module, optimizer, Plan()), lambda _: 1.0, precision=precision)
    step = TrainingStep((batch,), Cursor(), batch.layout.tokens, batch.layout.sequences, 0.0)

    def update() -> None:
        loop.train([step], Steps(1), RunState())

    return update


def build_transformers_update(
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
    "bothways": build_update,
    "transformers": build_transformers_update,
    "bothways compiled": partial(
        build_update, training=dataclasses.replace(DEFAULT_TRAINING, compiled=True)
    ),
    "transformers compiled": partial(build_transformers_update, compiled=True),
}


@dataclass(frozen=True)
class Timing:
    """The times of a contender.

    Attributes:
        rounds: seconds per timed update; each follows an untimed one.
        memory: peak memory of the process in bytes; None where the system does not report it.
    """

    contender: str
    precision: Precision
    rounds: tuple[float, ...]
    memory: int | None

    @property
    def median(self) -> float:
        """Median of the rounds in seconds."""
        return statistics.median(self.rounds)


_UPDATE: list[Callable[[], None]] = []
"""The update of a contender, in its own process."""


def _build(
    name: str, work: Workload, precision: Precision, device: torch.device, threads: int
) -> None:
    """Build the contender of this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports the interruption
    torch.set_num_threads(threads)
    _UPDATE[:] = [CONTENDERS[name](work, make_batch(work), precision, device)]


def _take_turn(device: torch.device) -> tuple[float, int | None]:
    """Run two updates; return the seconds of the second and the peak memory so far in bytes."""
    _UPDATE[0]()  # untimed: other contenders have evicted the caches
    wait(device)
    start = time.perf_counter()
    _UPDATE[0]()
    wait(device)
    seconds = time.perf_counter() - start
    give_back(device)
    return seconds, high_water_mark(device)


def race(work: Workload, rounds: int, device: torch.device) -> list[Timing]:
    """Time every contender in the precisions that people use on the device, in interleaved rounds.

    Raises:
        ResourceError: a contender ended early: out of memory, or an error with its traceback.
    """
    precisions: list[Precision] = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    if device.type != "cpu":
        precisions = precisions[-1:]
    # On a CPU compiling takes longer than the whole race.
    contenders = [name for name in CONTENDERS if device.type != "cpu" or "compiled" not in name]
    names, timings = [*itertools.product(contenders, precisions)], list[Timing]()
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        pools = list[ProcessPoolExecutor]()
        for contender, precision in names:
            inputs = contender, work, precision, device, threads
            pool = ProcessPoolExecutor(1, context, initializer=_build, initargs=inputs)
            pools.append(stack.enter_context(pool))
        turns = [
            [_turn(pool, device, work, *name) for pool, name in zip(pools, names, strict=True)]
            for _ in range(rounds)
        ]
    for (contender, precision), taken in zip(names, zip(*turns, strict=True), strict=True):
        seconds = tuple(seconds for seconds, _ in taken)
        timings.append(Timing(contender, precision, seconds, taken[-1][1]))
    return timings


def _turn(
    pool: ProcessPoolExecutor,
    device: torch.device,
    work: Workload,
    contender: str,
    precision: Precision,
) -> tuple[float, int | None]:
    """Return the result of a contender's turn."""
    try:
        return pool.submit(_take_turn, device).result()
    except (BrokenProcessPool, torch.OutOfMemoryError) as error:
        shape = f"{work.rows} × {work.length} tokens of {work.name}"
        message = f"{contender} in {precision} failed on {shape}: out of memory, or the error above"
        fix = "Choose a smaller workload: bothways bench small."
        raise ResourceError(message, fix=fix) from error


def high_water_mark(device: torch.device) -> int | None:
    """Return the peak memory of this process in bytes (tensors of a GPU), or `None` if unknown.

    getrusage is not used because it includes the peak of the parent process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            (line,) = (line for line in file if line.startswith("VmHWM"))
    except FileNotFoundError:
        return None
    return int(line.split()[1]) * 1024


def measure(work: Workload, rounds: int, device: torch.device) -> TableSection:
    """Time one workload and compare the contenders, one in each row.

    Raises:
        ResourceError: out of memory, or transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ResourceError("transformers is not installed", fix="Run `pip install transformers`.")
    timings = race(work, rounds, device)
    median = {(timing.contender, timing.precision): timing.median for timing in timings}
    dtypes, rows = {"fp32": torch.float32, "bf16": torch.bfloat16}, list[list[Cell]]()
    defaults = [seconds for key, seconds in median.items() if key == ("transformers", "fp32")]
    for timing in timings:
        step, precision = timing.median, timing.precision
        peak = gemm_rate(device, dtypes[precision])
        row: list[Cell] = [
            f"{timing.contender} {precision}",
            f"{step * 1e3:.0f} ({min(timing.rounds) * 1e3:.0f}–{max(timing.rounds) * 1e3:.0f})",
            f"{work.tokens / step:,.0f}",
            *(f"{base / step:.2f}" for base in (*defaults, median["transformers", precision])),
            f"{work.operations / step / peak:.0%}",
            "–" if timing.memory is None else f"{timing.memory / 2**20:,.0f} MiB",
        ]
        rows.append(row)
    ratios = [*["× default"] * len(defaults), "× same"]
    columns = ["", "ms (min–max)", "tokens/s", *ratios, "of GEMM", "memory"]
    title = f"Pre-training step, {work.name}, {work.rows} × {work.length} tokens, MLM + NSP"
    note = "× same: relative to transformers in equal precision"
    note += "; × default: in fp32, its default" if defaults else ""
    return TableSection(title, columns, rows, note=note)


def hardware(device: torch.device) -> str:
    """Describe the machine and the library versions."""
    import transformers

    kernels, version = library.describe_kernels(), transformers.__version__
    return f"{describe_device(device)}, {kernels}, transformers {version}"
