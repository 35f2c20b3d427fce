"""Fine-tuning with this library and with transformers' Trainer: scores and time, in one run.

    python benchmarks/finetuning.py DATA_FOLDER CoLA [RTE …] [--model FOLDER] [--limit N]
                                    [--seeds 3] [--epochs 3] [--batch 32] [--threads 2]

Both sides use the same model, data, rate, schedule, batch size and seeds. They get token ids made
in advance and train in fp32, or in bf16 with `--precision bf16`, with AdamW at 5e-5 (decay 0.01,
10 % warm-up, linear to 0, gradient norm clipped at 1) and 32 examples per step (or `--batch`), and
predict the dev data once at the end; scikit-learn, scipy, seqeval or SQuAD's formula score both. The ids are equal,
except for SQuAD, where the Trainer's are those of transformers' own example (`peers.answers`). The
Trainer pads each batch to its longest sequence, as its examples do. Time is that of training alone.
The sides alternate, seed by seed; runs that FILE (--out) already has are not repeated. The Trainer
needs accelerate: `pip install accelerate`.

With `--defaults` each side keeps its own defaults: this library 32 examples per step, packed, in
the fastest precision of the processor; the Trainer 8 examples per step and the padding of
transformers' example for the task: run_glue pads each sequence to 128 tokens and run_qa to 384
(longer ones are truncated on both sides), run_ner and run_swag pad to the longest of the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from harness import minilm
from peers.answers import ANSWERS
from peers.choices import CHOICES
from peers.labels import CLASSES, NUMBERS
from peers.peer import BATCH, Peer, Plan, Trained
from peers.tags import TAGS

from bothways.data.loader import ExampleBudget
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import LabelledData, label, predictions
from bothways.finetuning.run import finetune
from bothways.hub.model_folder import load_model
from bothways.model.heads import PoolerHead
from bothways.tasks.catalogue import Trainable
from bothways.tasks.choice.task import ChoiceColumns, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns
from bothways.text.tokenizer import Tokenizer
from bothways.training.run import Event
from bothways.training.schedules import Epochs


@dataclasses.dataclass(frozen=True)
class Data:
    """Attributes:
    train, dev: files in the data folder.
    task: the task with its columns.
    metric: the metric to compare.
    peer: the training and scoring functions of transformers' side.
    length: maximum length of a sequence in tokens.
    train_limit: number of training examples, taken evenly from the file; None for all.
    dev_limit: number of dev examples, likewise.
    """

    train: str
    dev: str
    task: Trainable
    metric: str
    peer: Peer = CLASSES
    length: int = 128
    train_limit: int | None = None
    dev_limit: int | None = None


DATA = {
    "CoLA": Data(
        "glue/CoLA/train.tsv.gz",
        "glue/CoLA/dev.tsv.gz",
        ClassificationTask(TextColumns("3", None, "1")),
        "mcc",
        length=64,
    ),
    "RTE": Data(
        "glue/RTE/train.tsv.gz", "glue/RTE/dev.tsv.gz", ClassificationTask(), "accuracy", length=256
    ),
    "SST-2": Data(
        "glue/SST-2/train.tsv.gz",
        "glue/SST-2/dev.tsv.gz",
        ClassificationTask(),
        "accuracy",
        train_limit=10_000,
    ),
    "STS-B": Data(
        "glue/STS-B/train.tsv.gz",
        "glue/STS-B/dev.tsv.gz",
        RegressionTask(TextColumns("sentence1", "sentence2", "score")),
        "spearman",
        NUMBERS,
    ),
    "SICK": Data(
        "nli/sick/SICK_train.tsv.gz",
        "nli/sick/SICK_trial.tsv.gz",
        ClassificationTask(TextColumns("sentence_A", "sentence_B", "entailment_judgment")),
        "accuracy",
    ),
    "WNUT-17": Data(
        "ner/wnut17/wnut17train.conll.gz",
        "ner/wnut17/emerging.dev.conll.gz",
        TaggingTask(),
        "f1",
        TAGS,
    ),
    "CODAH": Data(
        "multiple_choice/codah/train.tsv.gz",
        "multiple_choice/codah/dev.tsv.gz",
        ChoiceTask(ChoiceColumns("1", None, ("2", "3", "4", "5"), "6")),
        "accuracy",
        CHOICES,
    ),
    "SQuAD": Data(
        "qa/squad/train-v1.1.subset38.json.xz",
        "qa/squad/dev-v1.1.rebuilt.json.xz",
        QuestionAnsweringTask(),
        "f1",
        ANSWERS,
        length=384,
        train_limit=1000,
        dev_limit=500,
    ),
    "ChnSentiCorp": Data(
        "zh/chnsenticorp/train.tsv.gz",
        "zh/chnsenticorp/dev.tsv.gz",
        ClassificationTask(TextColumns("text_a", None, "label")),
        "accuracy",
        train_limit=2000,
    ),
}


def ours(job: Data, data: LabelledData, plan: Plan) -> Trained:
    """Train with this library."""
    training = dataclasses.replace(finetune_adam(), until=Epochs(plan.epochs), evaluate=None)
    batch = ExampleBudget(32)
    if not plan.defaults:
        training = dataclasses.replace(training, precision=plan.precision)
        batch = ExampleBudget(plan.batch)
    times: list[float] = []

    def on_event(event: Event) -> None:
        if event.kind == "step":
            times.append(time.perf_counter())

    model = load_model(plan.folder, [PoolerHead()]).model
    unjudged = dataclasses.replace(
        data, dev=(), dev_examples=()
    )  # the dev data is answered once, below
    method = FinetuneConfig(training, plan.length, batch, task=job.task)
    begin = time.perf_counter()
    settings = dataclasses.replace(method, seed=plan.seed)
    done = finetune(settings, start=model, train=unjudged, device=plan.device, on_event=on_event)
    answers = [
        job.peer.answer_of(prediction) for _, prediction in predictions(done.task_model, data)
    ]
    return Trained(answers, times[-1] - begin, int(done.progress.tokens))


def theirs(job: Data, data: LabelledData, plan: Plan) -> Trained:
    """Train with transformers' Trainer."""
    return job.peer.theirs(data, plan)


SIDES: dict[str, Callable[[Data, LabelledData, Plan], Trained]] = {
    "bothways": ours,
    "transformers": theirs,
}


def plan_of(job: Data, options: argparse.Namespace) -> Plan:
    """Return the settings of both sides, with seed 0."""
    plan = Plan(
        options.model or Path(minilm()),
        job.length,
        options.epochs,
        seed=0,
        batch=options.batch,
        precision=options.precision,
    )
    return (
        dataclasses.replace(plan, batch=8, padded=job.peer.padded, defaults=True)
        if options.defaults
        else plan
    )


def read(job: Data, folder: Path, tokenizer: Tokenizer, limit: int | None = None) -> LabelledData:
    """Read and encode the data; report a tokenizer that does not know its language."""
    task: Any = job.task  # columns differ between tasks
    files = (str(folder / name) for name in (job.train, job.dev))
    train, dev = (list(task.read(file, task.columns).examples) for file in files)
    data = label(
        job.task,
        tokenizer,
        evenly(train, limit or job.train_limit),
        evenly(dev, job.dev_limit or limit),
        job.length,
    )
    ids = np.concatenate([sequence.ids for sequence in data.sequences])
    unknown = float((ids == tokenizer.specials.unknown).mean())
    print(
        f"{len(data.train)} of {len(train)} training examples, "
        f"{len(data.dev)} of {len(dev)} dev examples, {len(ids):,} tokens"
    )
    if unknown > 0.02:
        print(
            f"the vocabulary does not cover this language: {unknown:.0%} of its tokens are [UNK]",
            flush=True,
        )
    return data


def evenly(examples: list[Any], limit: int | None) -> list[Any]:
    """Take `limit` evenly spaced examples: files may be sorted by source or topic."""
    count = len(examples) if limit is None else min(limit, len(examples))
    return [examples[place * len(examples) // count] for place in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("names", nargs="+", choices=DATA)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument(
        "--limit", type=int, default=None, help="number of training and of dev examples"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=BATCH, help="examples per step of both sides")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="precision of both sides"
    )
    parser.add_argument("--defaults", action="store_true", help="each side with its own defaults")
    parser.add_argument("--out", type=Path, default=Path("finetuning.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{platform.processor() or platform.machine()}, {options.threads} threads, "
        f"torch {torch.__version__}"
    )
    print(
        f"transformers {transformers.__version__}, {options.model or minilm()}, {options.epochs:g} epochs",
        flush=True,
    )
    for name in options.names:
        job = DATA[name]
        job = (
            dataclasses.replace(job, length=job.peer.padded or job.length)
            if options.defaults
            else job
        )
        plan = plan_of(job, options)
        data = read(job, options.data, Tokenizer.load(plan.folder), options.limit)
        common = {"data": name, "epochs": options.epochs, "threads": options.threads}
        common |= {"batch": options.batch} if options.batch != BATCH else {}
        common |= {"limit": options.limit} if options.limit else {}
        common |= {"defaults": True} if options.defaults else {"precision": options.precision}
        for seed in range(options.seeds):
            for side, run in SIDES.items():
                key = common | {"side": side, "seed": seed}
                if not rows_of(options.out, key):
                    done = run(job, data, dataclasses.replace(plan, seed=seed))
                    score = job.peer.score(data.dev_examples, done.answers, job.metric)
                    outcome = {"score": score, "seconds": done.seconds, "tokens": done.tokens}
                    with options.out.open("a", encoding="utf8") as file:
                        file.write(json.dumps(key | outcome) + "\n")
        show(name, rows_of(options.out, common))


def rows_of(file: Path, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the finished runs with this key; absent keys have their default."""
    defaults = {"limit": None, "defaults": False, "precision": "fp32", "batch": BATCH}
    with contextlib.suppress(FileNotFoundError):
        rows = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
        return [row for row in rows if (defaults | row).items() >= (defaults | key).items()]
    return []


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Print mean scores with standard deviations, and the speed-up."""
    by_side = {side: [row for row in rows if row["side"] == side] for side in SIDES}
    for side, runs in by_side.items():
        scores = [run["score"] for run in runs]
        spread = float(np.std(scores, ddof=1)) if len(scores) > 1 else float("nan")
        rate = statistics.median(run["tokens"] / run["seconds"] for run in runs)
        listed = ", ".join(f"{100 * score:.1f}" for score in scores)
        print(
            f"{name:12} {side:12} {100 * statistics.mean(scores):5.1f} ± {100 * spread:.1f} "
            f"({listed})  {rate:,.0f} tokens/s"
        )
    ratios = [
        theirs["seconds"] / ours["seconds"]
        for ours, theirs in zip(by_side["bothways"], by_side["transformers"], strict=True)
    ]
    print(
        f"{name:12} {statistics.median(ratios):.2f}× as fast ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
