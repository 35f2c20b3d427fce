"""`bothways bench`: speed of this library and of transformers on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from bothways.cli.options import Device

if TYPE_CHECKING:
    from rich.table import Table

    from bothways.lab.bench.race import BenchRow


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
        other three on a GPU. Default: small, on a GPU long. The vocabulary has 30,522 tokens.
    rounds
        Number of rounds per contender; medians are compared.
    """
    from bothways.core.bar import terminal_progress
    from bothways.core.config.checks import require_at_least
    from bothways.core.report.terminal import titled
    from bothways.core.runtime.devices import choose_device
    from bothways.core.terminal import output_console, show_lines
    from bothways.lab.bench import race
    from bothways.lab.bench.workloads import SUITED, WORKLOADS

    require_at_least(1, rounds=rounds)
    console, target = output_console(), choose_device(device)
    suited = SUITED[target.type]
    for name in suited if work == "all" else [work or suited[0]]:
        load = WORKLOADS[name]
        with terminal_progress() as progress:
            progress.stage(f"measuring {load.name}, {rounds} rounds in turns")
            rows = race.measure(load, rounds, target)
        title = f"Pre-training step, {load.name}, {load.rows} × {load.length} tokens, MLM + NSP"
        show_lines(console, titled(title, _step_table(rows)))
        console.print(
            "× default: relative to transformers in fp32, its default; × same: in equal precision",
            style="dim",
        )
    console.print(race.hardware(target), style="dim")


def _step_table(rows: Iterable[BenchRow]) -> Table:
    """Build the table of a pre-training step, with a row for each contender."""
    from rich.table import Table

    table = Table()
    for title in ("", "ms (min–max)", "tokens/s", "× default", "× same", "of GEMM", "memory"):
        table.add_column(title, justify="right" if title else "left")
    for row in rows:
        timing = row.timing
        table.add_row(
            f"{timing.contender} {timing.precision}",
            f"{timing.median * 1e3:.0f} "
            f"({min(timing.rounds) * 1e3:.0f}–{max(timing.rounds) * 1e3:.0f})",
            f"{row.tokens_per_second:,.0f}",
            f"{row.against_default:.2f}",
            f"{row.against_same:.2f}",
            f"{row.share_of_gemm:.0%}",
            "–" if timing.memory is None else f"{timing.memory / 2**20:,.0f} MiB",
        )
    return table
