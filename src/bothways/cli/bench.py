"""`bothways bench`: speed of this library and of transformers on this machine."""

from __future__ import annotations

from typing import Literal

from bothways.cli.options import Device


def bench(
    work: Literal["small", "base", "long", "large", "all"] | None = None,
    *,
    rounds: int = 7,
    device: Device = "auto",
) -> None:
    """Time a pre-training step of this library and of transformers.

    Parameters
    ----------
    work
        small: 4 layers × 256, 16 × 128 tokens; base: BERT-base, 16 × 128 (minutes on a CPU);
        long: BERT-base, 64 × 512; large: BERT-large, 32 × 512; all: small and base on a CPU, the
        other three on a GPU. Default: small, on a GPU long. The vocabulary has 30,522 tokens. A
        server is measured by python benchmarks/serving.py.
    rounds
        Number of rounds per contender; medians are compared.
    """
    from bothways.core.bar import terminal_progress
    from bothways.core.config.checks import require_at_least
    from bothways.core.report.terminal import render_report
    from bothways.core.runtime.devices import choose_device
    from bothways.core.terminal import output_console
    from bothways.lab.bench import race
    from bothways.lab.bench.workloads import SUITED, WORKLOADS

    require_at_least(1, rounds=rounds)
    console, target = output_console(), choose_device(device)
    suited = SUITED[target.type]
    for name in suited if work == "all" else [work or suited[0]]:
        load = WORKLOADS[name]
        with terminal_progress() as progress:
            progress.stage(f"measuring {load.name}, {rounds} rounds in turns")
            table = race.measure(load, rounds, target)
        console.print(render_report(table))
    console.print(race.hardware(target), style="dim")
