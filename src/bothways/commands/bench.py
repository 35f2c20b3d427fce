"""`bothways bench`: this machine against transformers, as a table."""

from __future__ import annotations

from typing import Literal


def bench(work: Literal["small", "base", "all"] = "small", *, rounds: int = 7) -> None:
    """Time a pre-training step (16 × 128 tokens, vocabulary 30,522) of this library and of transformers, in turns.

    Parameters
    ----------
    work
        small is 4 layers × 256, base is BERT-base (some minutes).
    rounds
        How often each contender runs; the medians are compared.
    """
    from rich.console import Console
    from rich.table import Table

    from bothways.recipes import bench as recipe

    console = Console()
    for name in recipe.WORKLOADS if work == "all" else [work]:
        with console.status(f"measuring {recipe.WORKLOADS[name].name}, {rounds} rounds in turns …"):
            rows = recipe.measure(name, rounds)
        table = Table(title=f"Pre-training step, {recipe.WORKLOADS[name].name}, MLM + NSP, AdamW")
        for title in ("", "ms (min–max)", "tokens/s", "× default", "× same", "of GEMM", "memory"):
            table.add_column(title, justify="right" if title else "left")
        for row in rows:
            timing = row.timing
            table.add_row(
                f"{timing.contender} {timing.precision}",
                f"{timing.median * 1e3:.0f} ({min(timing.rounds) * 1e3:.0f}–{max(timing.rounds) * 1e3:.0f})",
                f"{row.tokens_per_second:,.0f}",
                f"{row.against_default:.2f}",
                f"{row.against_same:.2f}",
                f"{row.share_of_gemm:.0%}",
                f"{row.memory / 2**20:,.0f} MiB",
            )
        console.print(table)
        console.print("× default: against transformers in fp32, its default; × same: in the same precision", style="dim")
    console.print(recipe.hardware(), style="dim")
