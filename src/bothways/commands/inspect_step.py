"""`bothways inspect-step`: one step of a pre-training run, done again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bothways.commands.options import Device
from bothways.core.terminal import counted, output_console, say, show_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bothways.pretraining.inspect_step import InspectedStep

SHOWN = 48
"""Characters of a sequence that are shown."""


def inspect_step(
    run: Path, step: int, corpus: str, *more: str, json: bool = False, device: Device = "auto"
) -> None:
    """Repeat one step of a run, and show each of its sequences with its losses and its gradient.

    The steps since the checkpoint before it are repeated, too. The run is not changed.

    Parameters
    ----------
    run
        The folder of a pre-training run.
    step
        The number of an update, from 1, such as the one that an error names.
    corpus
        The corpus that the run was trained on.
    more
        Further corpora, in the order of the run.
    json
        Write one JSON object instead of a table.
    """
    from bothways.commands.progress import terminal_progress
    from bothways.data.mixture import open_corpora
    from bothways.pretraining.inspect_step import inspect_step as repeat

    with terminal_progress() as progress:
        text = open_corpora([corpus, *more])
        found = repeat(run, step, text, device=device, progress=progress)
    if json:
        from dataclasses import asdict
        from json import dumps

        print(dumps(asdict(found), ensure_ascii=False))
        return

    console = output_console()
    show_lines(console, _table(found))
    say(console, f"The steps after {found.began:,} were repeated, in one process.")


def _table(found: InspectedStep) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from bothways.report.terminal import titled

    table, names = Table(), [*found.sequences[0].losses]
    for name in ("sequence", "tokens", *names, "gradient norm"):
        table.add_column(name, justify="left" if name == "sequence" else "right")
    for each in found.sequences:
        text = each.text if len(each.text) <= SHOWN else f"{each.text[:SHOWN]}…"
        losses = (f"{each.losses[name]:.4g}" for name in names)
        table.add_row(Text(text), str(each.tokens), *losses, f"{each.gradient_norm:.4g}")
    return titled(f"Step {found.step:,}: {counted(len(found.sequences), 'sequences')}", table)
