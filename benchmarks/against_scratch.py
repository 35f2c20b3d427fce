"""The gain of pre-training: a model and the same architecture from random weights, fine-tuned.

    python benchmarks/against_scratch.py DATA_FOLDER MODEL_FOLDER CoLA SST-2
                                         [--rates 1e-4 3e-4] [--seeds 3] [--threads 2]

Each contender gets its best learning rate on the dev data with the first seed; then all seeds run
at that rate. Three epochs, 32 examples per step, AdamW with 10 % warm-up.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from pathlib import Path

import torch

from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import LabelledData
from bothways.finetuning.run import finetune
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import PoolerHead
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer
from bothways.training.optimizers import AdamW
from finetuning import DATA, Data, read


def score(
    start: Model | EncoderConfig, data: LabelledData, job: Data, rate: float, seed: int
) -> float:
    """Fine-tune once; return the dev score at the end."""
    training = dataclasses.replace(finetune_adam(), optimizer=AdamW(lr=rate), evaluate=None)
    settings = FinetuneConfig(training, job.length, task=job.task, seed=seed)
    return finetune(settings, start=start, train=data).metrics[job.metric]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("names", nargs="+", choices=DATA)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4, 3e-4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trained = load_model(options.model, [PoolerHead()]).model
    for name in options.names:
        data = read(DATA[name], options.data, Tokenizer.load(options.model))
        for contender, start in (("pre-trained", trained), ("from random weights", trained.config)):
            first = {rate: score(start, data, DATA[name], rate, 0) for rate in options.rates}
            best = max(first, key=lambda rate: first[rate])
            scores = [
                first[best],
                *(score(start, data, DATA[name], best, seed) for seed in range(1, options.seeds)),
            ]
            listed = ", ".join(f"{100 * value:.1f}" for value in scores)
            tried = ", ".join(f"{rate:g}: {100 * value:.1f}" for rate, value in first.items())
            mean = 100 * statistics.mean(scores)
            print(
                f"{name:6} {contender:20} {DATA[name].metric} {mean:.1f} ({listed}) "
                f"at {best:g} (tried {tried})",
                flush=True,
            )


if __name__ == "__main__":
    main()
