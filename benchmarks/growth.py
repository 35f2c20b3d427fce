"""Growth of training and prediction time with the size of the work.

    python benchmarks/growth.py [--out growth] [--threads 1 2] [--seconds 1.0]

A small encoder (2 layers of 128, no dropout, fp32) varies one size at a time from 2,048 tokens in
sequences of 64: tokens per batch, tokens per sequence, width, depth, threads. A training step is
forward, backward and AdamW with masked LM on 15 % of the tokens; a prediction is forward with
pooled vectors. Planning: next-sentence pairs per second by documents of a corpus in memory, and the
time of the first. Each figure is the best of the repetitions that fit into --seconds, in processor
time with one thread, in wall-clock time with several.

Writes growth.jsonl, one record per figure, and growth.html, the curves. The slope of log time over
log size is 1 where time is linear. At a fixed sequence length time should be linear in the tokens of
a batch; in the length it is not, because attention grows with its square.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import machine
from numpy.typing import NDArray

from bothways.core.batch import Batch, Layout
from bothways.core.report.html import write_html
from bothways.core.report.sections import Curves, Line, Report, TableSection
from bothways.core.runtime.process import tune_allocator
from bothways.core.source import Cursor
from bothways.data.corpus_source import CorpusSource
from bothways.data.segments import NextSentence
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.heads import MaskedHead, PoolerHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model
from bothways.text.template import Gap, Template
from bothways.training.optimizers import AdamW, build_optimizer, update

BASE = EncoderConfig(4000, 128, 2, 2, 512, dropout=Dropouts(0.0, 0.0))
TOKENS, LENGTH = 2048, 64
SIZES = {
    "batch tokens": (128, 256, 512, 1024, 2048, 4096, 8192),
    "length": (16, 32, 64, 128, 256, 512),
    "width": (64, 128, 256, 512),
    "depth": (1, 2, 4, 8),
}
START, BETWEEN, END = (
    Gap(np.array([id], dtype=np.int32), np.array([segment], dtype=np.int8))
    for id, segment in ((2, 0), (3, 0), (3, 1))
)
DOCUMENTS = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Figure:
    """Attributes:
    work: "training", "prediction", "planning" or "first plan".
    axis: what is varied.
    size: its value.
    seconds: of one repetition.
    count: what it did: tokens, or plans.
    """

    work: str
    axis: str
    size: int
    seconds: float
    count: int

    @property
    def rate(self) -> float:
        return self.count / self.seconds


def best(run: Callable[[], object], budget: float, threads: int = 1) -> float:
    """Seconds of the quickest repetition, two at least after one that is not counted."""
    clock = time.process_time if threads == 1 else time.perf_counter
    run()
    taken: list[float] = []
    while len(taken) < 2 or sum(taken) < budget:
        start = clock()
        run()
        taken.append(clock() - start)
    return min(taken)


def figures(axis: str, size: int, budget: float) -> Iterator[Figure]:
    """Training and prediction with one size away from its usual value."""
    config, tokens, length = BASE, TOKENS, LENGTH
    match axis:
        case "batch tokens":
            tokens = size
        case "length":
            length = size
        case "width":
            config = dataclasses.replace(
                BASE, width=size, intermediate_size=4 * size, heads=size // 64
            )
        case "depth":
            config = dataclasses.replace(BASE, depth=size)
        case _:
            torch.set_num_threads(size)
    threads = torch.get_num_threads()
    for work, run in works(config, tokens, length).items():
        yield Figure(work, axis, size, best(run, budget, threads), tokens)


def works(config: EncoderConfig, tokens: int, length: int) -> dict[str, Callable[[], object]]:
    """A training step and a prediction."""
    torch.manual_seed(0)
    model, layout = (
        Model(config, (MaskedHead(), PoolerHead())),
        Layout.of([length] * (tokens // length)),
    )
    ids = torch.randint(5, config.vocab, (tokens,))
    batch, places = (
        Batch(ids, torch.zeros_like(ids), layout),
        torch.randperm(tokens)[: tokens * 15 // 100],
    )
    optimizer = build_optimizer(AdamW(), model.named_parameters())

    def train() -> None:
        x = model.train().encoder(batch, only=places).last[places]
        logits = model.heads["masked"](x, model.encoder.embedding.token.weight)
        (cross_entropy(logits, ids[places]).total / len(places)).backward()  # type: ignore[no-untyped-call]
        update(optimizer, 1.0)

    @torch.inference_mode()
    def predict() -> None:
        model.eval().heads["pooler"](model.encoder(batch, only=layout.first_tokens).last, layout)

    return {"training": train, "prediction": predict}


class Arrays(NamedTuple):
    """A corpus in memory."""

    tokens: NDArray[Any]
    sentences: NDArray[Any]
    documents: NDArray[Any]


def planning(documents: int, budget: float) -> Iterator[Figure]:
    """The first plan of an epoch, and 20,000 with it; a document has 10 sentences of 5 to 40 tokens."""
    rng = np.random.default_rng(0)
    sentences = np.concatenate([[0], rng.integers(5, 41, 10 * documents).cumsum()])
    # Plans are made of offsets: no token is read.
    tokens = np.broadcast_to(np.uint16(7), int(sentences[-1]))
    corpus = Arrays(
        tokens, sentences.astype(np.uint64), np.arange(0, 10 * documents + 1, 10, dtype=np.uint64)
    )
    some = min(20_000, documents)

    def read(count: int) -> None:
        source = CorpusSource(
            corpus,
            Template(START, BETWEEN, START, BETWEEN, END),
            NextSentence(128),
            np.arange(documents),
            0,
        )
        for _, _ in zip(range(count), source.read(Cursor()), strict=False):
            pass

    yield Figure("first plan", "documents", documents, best(lambda: read(1), budget), 1)
    yield Figure("planning", "documents", documents, best(lambda: read(some), budget), some)


def slopes(works: dict[str, list[Figure]]) -> dict[str, float]:
    """Of log seconds over log size, by least squares; for what is as much work at each size, or as much for each token."""
    several = {
        work: found for work, found in works.items() if len(found) > 1 and work != "planning"
    }
    logs = {
        work: np.log([[figure.size, figure.seconds] for figure in found]).T
        for work, found in several.items()
    }
    return {work: round(float(np.polyfit(x, y, 1)[0]), 2) for work, (x, y) in logs.items()}


def groups(found: list[Figure]) -> dict[str, dict[str, list[Figure]]]:
    """By axis, then by work."""
    result: dict[str, dict[str, list[Figure]]] = {}
    for figure in found:
        result.setdefault(figure.axis, {}).setdefault(figure.work, []).append(figure)
    return result


def page(found: list[Figure], where: str) -> Report:
    """All curves and their slopes."""
    charts, rows = list[Curves](), list[list[str | float]]()
    for axis, works in groups(found).items():
        rated = {work: some for work, some in works.items() if work != "first plan"}
        unit = "plans a second" if "planning" in rated else "tokens a second"
        lines = [
            Line(work, [f.size for f in some], [round(f.rate) for f in some])
            for work, some in rated.items()
        ]
        charts.append(Curves(f"By {axis}", axis, unit, lines))
        rows += [[work, axis, round(2**slope, 2)] for work, slope in slopes(works).items()]
    columns = ("work", "size", "times the seconds for twice the size")
    several = slopes(groups(found)["batch tokens"])
    headline = "Twice the tokens in a batch take " + " and ".join(
        f"{2**slope:.1f} times as long in {work}" for work, slope in several.items()
    )
    lead = "One size varies at a time. Two in the table is time in proportion to the size."
    table = TableSection("Time by size", columns, rows)
    return Report("How speed grows", headline, lead, [table, *charts], where)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("growth"))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    cases = [(axis, size) for axis, sizes in SIZES.items() for size in sizes]
    found = list[Figure]()
    with options.out.with_suffix(".jsonl").open("w", encoding="utf8") as file:
        for axis, size in [
            *cases,
            *(("documents", n) for n in DOCUMENTS),
            *(("threads", n) for n in options.threads),
        ]:
            work = (
                planning(size, options.seconds)
                if axis == "documents"
                else figures(axis, size, options.seconds)
            )
            for figure in work:
                found.append(figure)
                file.write(json.dumps(dataclasses.asdict(figure)) + "\n")
                print(
                    f"{figure.axis:14}{figure.size:10,}  {figure.work:12}{figure.rate:14,.0f} a second",
                    flush=True,
                )
    where = machine(("torch", "numpy"))
    write_html(page(found, where), options.out.with_suffix(".html"))
    for axis, works in groups(found).items():
        print(axis, slopes(works))
    print(where)


if __name__ == "__main__":
    main()
