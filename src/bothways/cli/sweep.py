"""`bothways sweep`: fine-tuning over a grid of settings."""

from __future__ import annotations

from pathlib import Path

from bothways.cli import options


def sweep(  # noqa: PLR0913 – one option per question
    model: options.StartModel,
    train: str,
    *overrides: str,
    dev: str,
    task: options.TrainedTask = "classify",
    text: options.NewTextColumn = None,
    text_b: options.SecondColumn = None,
    label: options.LabelColumn = None,
    group: options.GroupColumn = None,
    grid: str = "paper",
    out: Path = Path("sweep"),
    recipe: options.FineRecipe = "modern",
    config: options.ConfigFile = None,
    resume: bool = False,
    device: options.Device = "auto",
) -> None:
    """Fine-tune with every combination of some settings and keep the best model on dev data.

    Each combination is a run in its own folder.

    Parameters
    ----------
    train
        Labelled data, as for finetune.
    overrides
        Settings that all runs share, by dotted path.
    dev
        Labelled data for comparing the runs, or its share of TRAIN, such as 20%.
    grid
        paper (appendix A.3: batch, rate, epochs; 18 runs), glue (section 4.1: four rates), or
        "key=value,value key=value".
    out
        Folder for all runs; model/ is the best model, sweep.json has all results.
    resume
        Skip finished runs and continue the interrupted one.
    """
    from bothways.cli.finetune import print_series, settings_from
    from bothways.core.bar import error_console, terminal_progress
    from bothways.lab.sweeps.grid import parse_grid, sweep_grid
    from bothways.lab.sweeps.runs import SweepFolder

    if resume:
        options.check_begun(out)
    arguments = {"model": model, "train": train, "dev": dev, "group": group}
    columns = {"text": text, "text_b": text_b, "label": label}
    settings = settings_from(arguments, columns, overrides, task, recipe, config)
    console = error_console()
    options.say_kernels(device)
    with terminal_progress(console) as progress:
        folder = SweepFolder(out, resume, device, progress)
        series = sweep_grid(settings, parse_grid(grid), folder)
    print_series(series, out, console)
