"""Training sentence vectors with this library and with sentence-transformers: quality, time, memory.

    python benchmarks/contrastive.py DATA_FOLDER STS-B [SICK MNLI Wikipedia] [--seeds 3] [--threads 2]
    python benchmarks/contrastive.py DATA_FOLDER --memory 4096 [--length 16]

Both sides start from the weights of all-MiniLM-L6-v2, with the same pairs, loss, batches of 32, rate
(2e-5, a tenth of warm-up, linear to 0), AdamW (decay 0.01), clipping at 1, dropout 0.1 and length, in
fp32. sentence-transformers pads each column of a batch to its longest text, as its trainer does. The
sides alternate, seed by seed. Time is that of training alone, from the end of the first step to the
end of the last; with one thread it is processor time, which other work on the machine changes
little. Quality is computed from the vectors of both sides by the same function: Spearman's
correlation of the cosine with the score, or nDCG@10 of the positive among all of the dev data.
`--memory` gives the peak of resident memory of steps of Wikipedia pairs, each side in its own process;
with `--length 16` (tokens of a text) the other side's batch of 4,096 fits in 24 GiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import lzma
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine, minilm
from scipy.stats import spearmanr

import bothways

Rows = list[dict[str, Any]]
RATE, BATCH = 2e-5, 32


@dataclass(frozen=True)
class Data:
    """Attributes:
    read: the training and dev rows in a data folder.
    loss: of sentence-transformers; `loss_kind` is ours.
    length: maximum length of a text in tokens.
    """

    read: Callable[[Path], tuple[Rows, Rows]]
    loss: str
    loss_kind: str
    length: int = 128


def scored(file: Path, columns: tuple[str, str, str]) -> Rows:
    """Two texts and a score in the columns of a .tsv.gz file."""
    with gzip.open(file, "rt", encoding="utf8") as lines:
        header = next(lines).rstrip("\n").split("\t")
        places = [header.index(name) for name in columns]
        cells = [line.rstrip("\n").split("\t") for line in lines]
    texts = ([row[place] for place in places] for row in cells)
    return [{"sentence1": a, "sentence2": b, "score": float(score)} for a, b, score in texts]


def sts(folder: Path) -> tuple[Rows, Rows]:
    columns, folder = ("sentence1", "sentence2", "score"), folder / "glue/STS-B"
    return scored(folder / "train.tsv.gz", columns), scored(folder / "dev.tsv.gz", columns)


def sick(folder: Path) -> tuple[Rows, Rows]:
    columns, folder = ("sentence_A", "sentence_B", "relatedness_score"), folder / "nli/sick"
    names = ("SICK_train.tsv.gz", "SICK_trial.tsv.gz")
    train, dev = (scored(folder / name, columns) for name in names)
    return train, dev


def mnli(folder: Path) -> tuple[Rows, Rows]:
    """Premises and what they entail; judged by the scores of STS-B."""
    rows = []
    for name in ("matched", "mismatched"):
        with gzip.open(
            folder / f"nli/mnli_sample/mnli_{name}.tsv.gz", "rt", encoding="utf8"
        ) as lines:
            cells = [line.rstrip("\n").split("\t") for line in lines]
        rows += [{"anchor": c[1], "positive": c[2]} for c in cells if c[0] == "entailment"]
    return rows, sts(folder)[1]


def wikipedia(folder: Path) -> tuple[Rows, Rows]:
    """Titles and the first paragraph of an article, without the title."""
    with lzma.open(
        folder / "corpora/en/wikipedia2014/enwiki2014_AA.docs.xz", "rt", encoding="utf8"
    ) as file:
        articles = re.findall(r'title="([^"]*)">\n.*\n\n(.+)\n', file.read())
    rows = [{"anchor": title, "positive": text} for title, text in articles if len(text) > 100]
    return rows[500:], rows[:500]


DATA = {
    "STS-B": Data(sts, "CoSENTLoss", "cosent"),
    "SICK": Data(sick, "CoSENTLoss", "cosent"),
    "MNLI": Data(mnli, "MultipleNegativesRankingLoss", "softmax"),
    "Wikipedia": Data(wikipedia, "MultipleNegativesRankingLoss", "softmax"),
}
Encode = Callable[[list[str]], np.ndarray]


def clock() -> float:
    """Return seconds of processor time with one thread, else of the clock."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def ours(job: Data, rows: Rows, batch: int, seed: int) -> tuple[Encode, float]:
    """Train with this library."""
    times = list[float]()

    def on_event(event: Any) -> None:
        if event.kind == "step":
            times.append(clock())

    result = bothways.finetune(
        minilm(), rows, None, "embed", epochs=1, lr=RATE, batch_size=batch, seed=seed,
        length=job.length, progress=False, on_event=on_event, device="cpu",
        **{"task.loss.kind": job.loss_kind, "training.precision": "fp32"},
    )  # fmt: skip
    return result.predictor().encode, times[-1] - times[0]


def theirs(
    job: Data, rows: Rows, batch: int, seed: int, cached: bool = False
) -> tuple[Encode, float]:
    """Train with sentence-transformers' trainer."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses
    from transformers import TrainerCallback

    times = list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(clock())

    model = SentenceTransformer(minilm(), device="cpu")
    model.max_seq_length = job.length
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=batch, learning_rate=RATE,
            warmup_steps=0.1, weight_decay=0.01, max_grad_norm=1.0, seed=seed, use_cpu=True,
            report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no",
            lr_scheduler_type="linear",
        )  # fmt: skip
        loss = getattr(losses, ("Cached" if cached else "") + job.loss)(model)
        trainer = SentenceTransformerTrainer(
            model, arguments, train_dataset=Dataset.from_list(rows), loss=loss, callbacks=[Clock()]
        )
        trainer.train()
    model.eval()
    return lambda texts: np.asarray(model.encode(texts)), times[-1] - times[0]


SIDES = {"bothways": ours, "sentence-transformers": theirs}


def quality(encode: Encode, dev: Rows) -> float:
    """Return Spearman's correlation of scored pairs, or nDCG@10 of others."""
    first, second = (name for name in dev[0] if name != "score")
    a, b = (encode([row[name] for row in dev]) for name in (first, second))
    a, b = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
    if "score" in dev[0]:
        return float(spearmanr((a * b).sum(1), [row["score"] for row in dev]).statistic)
    scores = a @ b.T
    ranks = (scores > np.diag(scores)[:, None]).sum(1)
    return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def compare(name: str, folder: Path, seeds: int, limit: int) -> None:
    """Train both sides with each seed and print a row of means."""
    job = DATA[name]
    train, dev = job.read(folder)
    rows = random.Random(0).sample(train, min(limit, len(train)))
    texts = [text for row in rows for key, text in row.items() if key != "score"]
    lengths = np.array([len(text.split()) for text in texts])
    start = quality(bothways.load(minilm(), "embed").encode, dev)
    print(
        f"{name}: {len(rows)} pairs of texts of {lengths.mean():.0f} ± {lengths.std():.0f} words; before: {start:.4f}"
    )
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for seed in range(seeds):
        for side, run in SIDES.items():
            encode, seconds = run(job, rows, BATCH, seed)
            found[side].append((quality(encode, dev), seconds))
            print(f"  seed {seed} {side:22} {found[side][-1][0]:.4f} {seconds:7.1f} s", flush=True)
    for side, values in found.items():
        scores = [score for score, _ in values]
        spread = float(np.std(scores, ddof=1)) if seeds > 1 else float("nan")
        print(f"  {side:22} {statistics.mean(scores):.4f} ± {spread:.4f}")
    pairs = zip(*(found[side] for side in SIDES), strict=True)
    ratios = [peer[1] / own[1] for own, peer in pairs]
    print(
        f"  {statistics.median(ratios):.2f}× as fast ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def peak(side: str, folder: Path, batch: int, length: int) -> None:
    """Train two steps in this process and print its peak of resident memory."""
    # More is an error of this process, not of the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (20 * 2**30, 20 * 2**30))
    job = dataclasses.replace(DATA["Wikipedia"], length=length)
    rows = (job.read(folder)[0] * 100)[: 2 * batch]
    rows = [{**row, "anchor": f"{row['anchor']} {n}"} for n, row in enumerate(rows)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if side == "bothways":
        seconds = ours(job, rows, batch, 0)[1]
    else:
        seconds = theirs(job, rows, batch, 0, cached=side.endswith("cached"))[1]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{side:30} {after / 2**20:6.2f} GiB, {before / 2**20:.2f} before training; {seconds:.1f} s a step",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("names", nargs="*", choices=[*DATA, []])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=2000, help="number of training pairs")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--memory", type=int, metavar="BATCH")
    parser.add_argument("--length", type=int, default=128, help="of texts in tokens, for --memory")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        peak(options.peak, options.data, options.memory, options.length)
        return
    print(machine(["torch", "sentence-transformers"]))
    for name in options.names:
        compare(name, options.data, options.seeds, options.limit)
    if options.memory:
        for side in (*SIDES, "sentence-transformers cached"):
            command = [sys.executable, *sys.argv, "--peak", side]
            if subprocess.run(command, check=False).returncode:
                print(f"{side}: ended by an error, or for lack of memory")


if __name__ == "__main__":
    main()
