"""`bothways speedrun`: the time to a fixed held-out loss, and an entry for the board."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bothways.commands.options import Device
from bothways.commands.progress import keeping
from bothways.core.terminal import say


def speedrun(  # noqa: PLR0913 – one option per question
    *overrides: str,
    text: Annotated[list[str], Parameter(consume_multiple=True, negative=())],
    held_out: str,
    out: Path,
    model: str = "bert-mini",
    recipe: str = "modern",
    config: Path | None = None,
    seeds: int | None = None,
    target: float | None = None,
    device: Device = "auto",
) -> None:
    """Train to a fixed held-out loss, print the time, and write an entry with the curve.

    The clock runs from the first update to the evaluation that reaches the loss. Vocabulary and
        corpus are not on it, and are found again. docs/speedrun.md has the rules and the board.

    Parameters
    ----------
    overrides
        Settings of pre-training by dotted path, such as training.until="20 minutes", the length
        that the rate follows.
    text
        Text files, folders or patterns to train on.
    held_out
        The text file to score on.
    out
        Folder for corpus, runs and entry.json.
    model
        The shape to start from, as for pretrain.
    recipe
        The recipe to start from, as for pretrain.
    config
        A TOML file with settings; settings on the command line have priority.
    seeds
        Number of runs; default: 3, as a record needs.
    target
        The held-out loss at which a run ends, in nats; default: 5.0, that of the track.
    """
    import dataclasses

    from bothways.bench import speedrun as job
    from bothways.commands.progress import error_console, say_kernels, terminal_progress
    from bothways.core.terminal import time_text

    track = job.CPU if target is None else dataclasses.replace(job.CPU, target=target)
    request = job.RecordRequest(
        tuple(text), held_out, out, track, model, recipe, config, overrides, seeds
    )
    console = error_console()
    say_kernels(device)
    with keeping(out, console), terminal_progress(console) as progress:
        entry = job.speedrun(request, device=device, progress=progress)
    for run in entry["runs"]:
        state = "reached" if run["reached"] else "not reached"
        loss = "diverged" if run["loss"] is None else f"{run['loss']:.3f} nats"
        time = time_text(run["seconds"])
        print(f"seed {run['seed']}: {state} in {time}, {run['steps']:,} steps, {loss}")
    print(f"mean {time_text(entry['mean seconds'])} to {track.target:g} nats")
    say(console, f"Written: {out / job.ENTRY}")
