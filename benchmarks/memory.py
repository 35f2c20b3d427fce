"""Peak memory of a BERT-base training step: this library, the same with blocks computed again, transformers; and of a start.

    python benchmarks/memory.py [--rows 16] [--length 128] [--steps 2] [--contenders NAME…] [--no-start]

A step is a whole update in fp32 on one thread: masked LM and next sentence, forward, backward, clipping, AdamW, as in `bothways
bench`. Each contender has a process of its own; its figure is the most that the process has held (VmHWM, Linux), code and
libraries included. From the second step on Adam's moments are there. On a busy machine memory is the same, seconds are of
processor time.

The start: a BERT-base with random weights is saved, opened in a fresh process and makes one vector. Beside the peak stands what
is the process's own at the end; the rest are pages of files, which processes share.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import machine, show

from bothways.interop.folder import save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import Model, Pooled

CONTENDERS = ("bothways", "recomputed", "transformers")
STEP = """
import dataclasses, sys, time, torch
from bothways.model.encoder import Encoder
from bothways.recipes.bench import *
torch.set_num_threads(1)
name, rows, length, steps = sys.argv[1], *map(int, sys.argv[2:])
work = dataclasses.replace(WORKLOADS["base"], rows=rows, length=length)
if name == "recomputed":
    name, start = "bothways", Encoder.__init__
    def recomputing(self, config):
        start(self, config)
        self.recompute = True
    Encoder.__init__ = recomputing
update = CONTENDERS[name](work, make_batch(work), "fp32")
for _ in range(steps):
    began = time.process_time()
    update()
    seconds = time.process_time() - began
print(high_water_mark(), seconds)
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
MIB = 2**20


def fresh(code: str, *given: object) -> list[float]:
    """The numbers that a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, given)], stdout=subprocess.PIPE, text=True, check=True)
    return [float(part) for part in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rows": 16, "length": 128, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--no-start", action="store_true")
    options = parser.parse_args()
    if options.contenders:
        found = {name: fresh(STEP, name, options.rows, options.length, options.steps) for name in options.contenders}
        base = found.get("transformers", [float("nan")])[0]
        rows = [[name, f"{peak / MIB:,.0f}", f"{peak / base:.2f}", f"{s:.1f}"] for name, (peak, s) in found.items()]
        title = f"A BERT-base step of {options.rows} × {options.length} tokens"
        show(title, ["MiB at the peak", "× transformers", "s (processor)"], rows)
    if not options.no_start:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model", Model(EncoderConfig(30522), (Pooled(),)))
            opened, peak, own = fresh(START, Path(folder) / "model")
        print(f"Opened in {opened:.2f} s of processor time; {peak / MIB:,.0f} MiB at the peak, {own / MIB:,.0f} its own")
    print(f"1 thread, fp32; {machine(('torch', 'transformers'))}")


if __name__ == "__main__":
    main()
