"""`bothways inspect-step`: one step of a pre-training run, done again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bothways.cli.options import Device, JsonOutput
from bothways.core.terminal import output_console, quantity, say, show_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bothways.pretraining.inspect_step import InspectedStep

SHOWN = 48
"""Characters of a sequence that are shown."""


def inspect_step(
    run: Path, step: int, *corpus: str, json: JsonOutput = False, device: Device = "auto"
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
        The corpora of the run, in its order, if they are no longer where it read them.
    """
    from bothways.core.bar import terminal_progress
    from bothways.pretraining.inspect_step import inspect_step as repeat
    from bothways.pretraining.inspect_step import open_recorded, recorded_data

    with terminal_progress() as progress:
        text = open_recorded(recorded_data(run), corpus)
        inspected = repeat(run, step, text, device=device, progress=progress)
    if json:
        from dataclasses import asdict
        from json import dumps

        print(dumps(asdict(inspected), ensure_ascii=False))
        return

    console = output_console()
    show_lines(console, _table(inspected))
    for line in _comparison(inspected):
        say(console, line)


def _table(step: InspectedStep) -> RenderableType:
    from bothways.core.report.terminal import text_table

    names = [*step.sequences[0].losses]
    rows = [
        [
            item.text if len(item.text) <= SHOWN else f"{item.text[:SHOWN]}…",
            str(item.tokens),
            *(f"{item.losses[name]:.4g}" for name in names),
            f"{item.gradient_norm:.4g}",
        ]
        for item in step.sequences
    ]
    tokens = sum(sequence.tokens for sequence in step.sequences)
    losses = (f"{step.losses[name]:.4g}" if name in step.losses else "–" for name in names)
    rows.append(["the whole step", str(tokens), *losses, f"{step.gradient_norm:.4g}"])
    title = f"Step {step.step:,}: {quantity(len(step.sequences), 'sequence(s)')}"
    return text_table(title, ("sequence", "tokens", *names, "gradient norm"), rows)


def _comparison(step: InspectedStep) -> list[str]:
    """Return sentences on what was repeated, and whether it is what the run recorded."""
    summary = f"Steps {step.began + 1:,} to {step.step:,} were repeated, in one process"
    lines = [f"{summary}. Learning rate: {step.rate:.3g}."]
    if step.ranks > 1:
        lines.append(
            f"The run had {step.ranks} ranks: sums are rounded in another order, and dropout draws "
            "anew; sequences and rates are the same."
        )
    match step.difference:
        case None if step.compared:
            records = quantity(step.compared, "recorded gradient norm(s)")
            lines.append(f"Equal to the bit: {records} of the run.")
        case None:
            lines.append("The run recorded no gradient norm of these steps to compare with.")
        case other:
            lines.append(
                f"Not what the run did: at step {other.step:,} it recorded a gradient norm of "
                f"{other.recorded:.6g}, here it is {other.repeated:.6g}. Another machine, number "
                "of threads, version or start changes it."
            )
    return lines
