"""`bothways bench`: this library and transformers, or a server, on this machine, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bothways.cli.options import Device

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from bothways.lab.bench.race import BenchRow
    from bothways.lab.bench.serving import ServerComparison


def bench(
    work: Literal["small", "base", "long", "large", "all", "tuning", "serve"] | None = None,
    model: str | None = None,
    *,
    rounds: int = 7,
    device: Device = "auto",
    task: str | None = None,
    texts: Path | None = None,
    seconds: float = 5.0,
) -> None:
    """Time a pre-training step of this library and of transformers, or a server of a model.

    Parameters
    ----------
    work
        small: 4 layers × 256, 16 × 128 tokens; base: BERT-base, 16 × 128 (minutes on a CPU);
        long: BERT-base, 64 × 512; large: BERT-large, 32 × 512; all: small and base on a CPU, the
        other three on a GPU; tuning: where one way of computing overtakes another on this machine,
        with the thresholds in use; serve: bothways serve MODEL on the loopback address with every
        number of processes that divides the cores, idle, full and beyond, against predictions in
        one process. Default: small, on a GPU long. The vocabulary of steps has 30,522 tokens.
    model
        For serve: what is served, as in bothways serve.
    rounds
        Number of rounds per contender; medians are compared.
    task
        For serve: the task; default: that of the model.
    texts
        For serve: a text a line. Default: random words, as long as sentences and queries are.
    seconds
        For serve: how long each of five loads lasts.
    """
    from bothways.core.bar import terminal_progress
    from bothways.core.config.checks import require_at_least
    from bothways.core.errors import ConfigError
    from bothways.core.report.terminal import titled
    from bothways.core.runtime.devices import choose_device
    from bothways.core.terminal import output_console, show_lines
    from bothways.lab.bench import race
    from bothways.lab.bench.workloads import SUITED, WORKLOADS

    require_at_least(1, rounds=rounds)
    if (work == "serve") != (model is not None):
        what = "serve needs a model, and only serve takes one"
        raise ConfigError(what, where="model", fix="Name one: bothways bench serve FOLDER.")
    if model is not None:
        _serve(model, task, texts, seconds)
        return
    console, where = output_console(), choose_device(device)
    if work == "tuning":
        _tune(console, where, rounds)
        return
    suited = SUITED[where.type]
    for name in suited if work == "all" else [work or suited[0]]:
        load = WORKLOADS[name]
        with terminal_progress() as progress:
            progress.stage(f"measuring {load.name}, {rounds} rounds in turns")
            rows = race.measure(load, rounds, where)
        title = f"Pre-training step, {load.name}, {load.rows} × {load.length} tokens, MLM + NSP"
        show_lines(console, titled(title, _step_table(rows)))
        console.print(
            "× default: relative to transformers in fp32, its default; × same: in equal precision",
            style="dim",
        )
    console.print(race.hardware(where), style="dim")


def _step_table(rows: Iterable[BenchRow]) -> Table:
    """Return the times of a pre-training step, a row for each contender."""
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


def _serve(model: str, task: str | None, file: Path | None, seconds: float) -> None:
    """Print a table of servers, and which one computes most."""
    from bothways.cli.serve import require_server
    from bothways.core.errors import ConfigError

    require_server("bothways bench serve")
    from bothways.core.bar import terminal_progress
    from bothways.core.report.terminal import titled
    from bothways.core.runtime.devices import choose_device, describe_device
    from bothways.core.terminal import output_console, quantity, show_lines
    from bothways.data.text_io import read_lines
    from bothways.lab.bench.serving import compare_divisions, drawn_texts
    from bothways.model.kernels.library import describe_kernels
    from bothways.prediction.predictor import open_task

    if not 0 < seconds <= 600:
        raise ConfigError(f"must be above 0 and at most 600, not {seconds:g}", where="seconds")
    lines = [] if file is None else [line for _, line in read_lines(file) if line.strip()]
    if file is not None and len(lines) < 32:
        fix = "Give at least 32 lines of text."
        raise ConfigError(f"has {quantity(len(lines), 'line(s) of text')}", where=file, fix=fix)
    predictor = open_task(model, task, batch_invariant=True)
    lines = lines[:20_000] or drawn_texts(predictor, 2000)
    with terminal_progress() as progress:
        found = compare_divisions(model, predictor, lines, seconds, progress)
    console, offline, best = output_console(), found.offline, found.best.division
    first, *others = server_tables(found)
    show_lines(console, titled(f"bothways serve {model}", first), *others)
    console.print(
        f"in one process: {offline.tokens_per_second:,.0f} tokens/s, "
        f"{offline.idle:.2f} ms for one text"
    )
    console.print(f"most for texts one by one: --threads {best.threads}")
    console.print(f"{describe_device(choose_device('cpu'))}, {describe_kernels()}", style="dim")


def server_tables(found: ServerComparison) -> list[Table]:
    """Return the measurements as tables of few servers each, which fit in 80 columns."""
    from rich.table import Table

    from bothways.lab.bench.serving import SIDE_BY_SIDE, TITLES, row

    tables = []
    for at in range(0, len(found.servers), SIDE_BY_SIDE):
        columns = [row(each, found.offline) for each in found.servers[at : at + SIDE_BY_SIDE]]
        (title, *heads), *lines = zip(TITLES, *columns, strict=True)
        table = Table(title)
        for head in heads:
            table.add_column(head, justify="right")
        for line in lines:
            table.add_row(*line)
        tables.append(table)
    return tables


def _tune(console: Console, device: torch.device, rounds: int) -> None:
    """Print measured thresholds as they come, then as Python."""
    from bothways.lab.bench.race import hardware
    from bothways.lab.bench.tuning import measure_thresholds, snippet

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
