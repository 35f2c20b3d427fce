"""`bothways speedrun`: what pre-training reaches in little time, and an entry for the board."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from bothways.cli.options import Device, keeping
from bothways.core.terminal import say


def speedrun(  # noqa: PLR0913 – one option per question
    *overrides: str,
    text: Annotated[list[str], Parameter(consume_multiple=True, negative=())],
    held_out: str | None = None,
    blimp: Path | None = None,
    out: Path,
    model: str = "bert-mini",
    recipe: str = "modern",
    config: Path | None = None,
    seeds: int = 3,
    target: float | None = None,
    device: Device = "auto",
) -> None:
    """Measure what pre-training reaches in little time, and write an entry with the curves.

    With --held-out: the time from the first update to the evaluation that reaches a loss. With
    --blimp: the accuracy on minimal pairs after at most 8 hours with the first 10 million words.
    Vocabulary and corpus are not on the clock, and are found again. docs/speedrun.md has the rules
    and the board.

    Parameters
    ----------
    overrides
        Settings of pre-training by dotted path, such as training.until="20 minutes", the length
        that the rate follows.
    text
        Text files, folders or patterns to train on.
    held_out
        The text file whose loss is to be reached.
    blimp
        A folder of minimal pairs, as for evaluate.
    out
        Folder for corpus, runs and entry.json.
    model
        The shape to start from, as for pretrain.
    recipe
        The recipe to start from, as for pretrain.
    config
        A TOML file with settings; settings on the command line have priority.
    seeds
        Number of runs; a record needs three.
    target
        With --held-out: the loss at which a run ends, in nats; default: 5.0, that of the track.
    """
    from bothways.cli.options import say_kernels
    from bothways.core.bar import error_console, terminal_progress
    from bothways.core.errors import ConfigError
    from bothways.core.terminal import time_text
    from bothways.lab.bench import speedrun as job

    track: job.LossTrack | job.PairTrack
    if (held_out is None) == (blimp is None):
        what = "exactly one of --held-out FILE and --blimp DIR is needed"
        fix = "--held-out measures the time to a loss, --blimp the accuracy on minimal pairs."
        raise ConfigError(what, fix=fix)
    if blimp is None:
        assert held_out is not None
        track = job.LossTrack(held_out) if target is None else job.LossTrack(held_out, target)
    elif target is None:
        track = job.PairTrack(blimp)
    else:
        raise ConfigError("is a held-out loss, and --blimp has none", where="target")
    request = job.RecordRequest(tuple(text), track, out, model, recipe, config, overrides, seeds)
    console = error_console()
    say_kernels(device)
    with keeping(out, console), terminal_progress(console) as progress:
        entry = job.speedrun(request, device=device, progress=progress)
    for run in entry["runs"]:
        at = f"{time_text(run['seconds'])}, {run['steps']:,} steps"
        print(
            f"seed {run['seed']}: {_loss_line(run, at) if blimp is None else _pair_line(run, at)}"
        )
    if isinstance(track, job.LossTrack):
        reached = sum(run["reached"] for run in entry["runs"])
        runs = f"{reached} of {len(entry['runs'])} runs reached {track.target:g} nats"
        mean = entry["mean seconds"]
        print(runs if mean is None else f"mean {time_text(mean)} to {track.target:g} nats")
    elif (accuracy := entry["mean accuracy"]) is not None:
        print(f"mean {accuracy:.1%} right after {time_text(entry['mean seconds'])}")
    say(console, f"Written: {out / job.ENTRY}")


def _loss_line(run: dict[str, Any], at: str) -> str:
    """Return what a run to a loss has reached."""
    loss = "diverged" if run["loss"] is None else f"{run['loss']:.3f} nats"
    return f"{'reached' if run['reached'] else 'not reached'} in {at}, {loss}"


def _pair_line(run: dict[str, Any], at: str) -> str:
    """Return the accuracy of a run on minimal pairs."""
    score = "diverged" if run["accuracy"] is None else f"{run['accuracy']:.1%} right"
    return f"{score} after {at}"
