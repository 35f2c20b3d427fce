"""`bothways bench`: this library and transformers on this machine, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from bothways.commands.options import Device

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def bench(
    work: Literal["small", "base", "long", "large", "all", "tuning"] | None = None,
    *,
    rounds: int = 7,
    device: Device = "auto",
) -> None:
    """Time a pre-training step (vocabulary 30,522) of this library and of transformers.

    Parameters
    ----------
    work
        small: 4 layers × 256, 16 × 128 tokens; base: BERT-base, 16 × 128 (minutes on a CPU);
        long: BERT-base, 64 × 512; large: BERT-large, 32 × 512; all: small and base on a CPU, the
        other three on a GPU; tuning: where one way of computing overtakes another on this machine,
        with the thresholds in use. Default: small, on a GPU long.
    rounds
        Number of rounds per contender; medians are compared.
    """
    from rich.console import Console
    from rich.table import Table

    from bothways.bench import race as recipe
    from bothways.bench.workloads import SUITED, WORKLOADS
    from bothways.commands.progress import terminal_progress
    from bothways.core.config.checks import require_at_least
    from bothways.core.terminal import show_lines
    from bothways.report.terminal import titled
    from bothways.runtime.devices import choose_device

    require_at_least(1, rounds=rounds)
    console, where = Console(), choose_device(device)
    if work == "tuning":
        _tune(console, where, rounds)
        return
    suited = SUITED[where.type]
    for name in suited if work == "all" else [work or suited[0]]:
        load = WORKLOADS[name]
        with terminal_progress() as progress:
            progress.stage(f"measuring {load.name}, {rounds} rounds in turns")
            rows = recipe.measure(load, rounds, where)
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
        title = f"Pre-training step, {load.name}, {load.rows} × {load.length} tokens, MLM + NSP"
        show_lines(console, titled(title, table))
        console.print(
            "× default: relative to transformers in fp32, its default; × same: in equal precision",
            style="dim",
        )
    console.print(recipe.hardware(where), style="dim")


def _tune(console: Console, device: torch.device, rounds: int) -> None:
    """Print measured thresholds as they come, then as Python."""
    from bothways.bench.race import hardware
    from bothways.bench.tuning import measure_thresholds, snippet

    found = []
    for each in measure_thresholds(device, rounds):
        found.append(each)
        console.print(f"[bold]{each.field}[/bold]: {each.ways}")
        speedups = ", ".join(f"{size:,}: {ratio:.2f}×" for size, ratio in each.speedups.items())
        used = "" if each.used is None else f"; in use: {each.used:,}"
        value = "none" if each.value is None else f"{each.value:,}"
        console.print(f"  {speedups}\n  measured: {value}{used}")
    console.print(snippet(found), highlight=False)
    console.print(hardware(device), style="dim")
