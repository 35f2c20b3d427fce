"""`bothways finetune`: a model folder and labelled data become a model folder for a task."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bothways
from bothways.cli import options
from bothways.core.bar import error_console
from bothways.core.terminal import output_console, quantity, say, show_lines
from bothways.training.shorthands import FinetuneRecipe
from bothways.training_runs import finetune_settings

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from bothways.finetuning.config import FinetuneConfig
    from bothways.finetuning.result import FinetuneResult
    from bothways.lab.sweeps.folds import CrossValidation
    from bothways.lab.sweeps.runs import Series


def finetune(  # noqa: PLR0913 – one option per question a run answers
    model: options.StartModel,
    train: str,
    *overrides: str,
    task: options.TrainedTask = "classify",
    dev: options.DevData = None,
    lr: float | None = None,
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    batch_size: int | None = None,
    max_length: int | None = None,
    text: options.NewTextColumn = None,
    text_b: options.SecondColumn = None,
    label: options.LabelColumn = None,
    group: options.GroupColumn = None,
    out: options.RunFolder = Path("finetuned"),
    recipe: options.FineRecipe = "modern",
    config: options.ConfigFile = None,
    seeds: str | None = None,
    folds: int | None = None,
    teacher: str | None = None,
    adapter_only: bool = False,
    resume: bool = False,
    device: options.Device = "auto",
) -> None:
    """Fine-tune a model on labelled data for a task.

    Columns, labels, lengths, vocabulary, memory and disk are checked before training starts. The
    checkpoint with the best dev metric is saved as a Hugging Face folder.

    Parameters
    ----------
    train
        Labelled data: .csv, .tsv, .jsonl, .parquet (the first three also .gz, .xz, .zst, .bz2), or
        hub:owner/name:configuration:split.
    overrides
        Settings by dotted path or common name, such as metric=mcc warmup=0.06
        stability.layer_decay=0.9.
    lr
        The peak learning rate; default: the recipe's, which is by the width of the model for
        modern (5e-5 for BERT-base).
    batch_size
        Examples per update; default: the recipe's, 32 for modern.
    max_length
        The longest sequence in tokens, special tokens included; longer texts are cut. Default: the
        task's, or what holds 95 % of the training texts whole, if that is more.
    seeds
        Run several seeds: a count (5), a list (3,14,15), or heads × data orders (5x3). Each run
        has a folder seed-N; model/ is the best run's.
    folds
        Cross-validation: run once per fold of TRAIN, which is then the dev data. Writes folds.json,
        and out_of_fold.jsonl with a prediction for each row.
    teacher
        A fine-tuned model whose outputs are learned in addition to the labels; teacher.weight=0.5
        and teacher.temperature=2 are its settings.
    adapter_only
        Train low-rank changes (lora.rank=8), and save them with the heads alone as an adapter of
        PEFT.
    resume
        Continue from the newest checkpoint in the folder; skip finished runs of several.
    """
    from bothways.core.errors import ConfigError
    from bothways.lab.sweeps.folds import CrossValidation
    from bothways.lab.sweeps.runs import SweepFolder
    from bothways.lab.sweeps.seeds import finetune_seeds, parse_seeds

    if seeds is not None and folds is not None:
        message = "and --folds are both given"
        raise ConfigError(message, where="--seeds", fix="Leave out one of the two.")
    if resume:
        options.check_begun(out)
    columns = {"text": text, "text_b": text_b, "label": label}
    settings = task_settings(
        overrides, columns, lr=lr, batch_size=batch_size, max_length=max_length, group=group,
        until=end.duration, adapter_only=adapter_only or None,
        teacher=None if teacher is None else {"folder": teacher},
    )  # fmt: skip
    console = error_console()
    options.say_kernels(device)
    if seeds is not None:
        base, notes = finetune_settings(
            model, train, dev, task, settings, recipe=recipe, config=config
        )
        seed_list = parse_seeds(seeds, base.seed)
        with options.run_progress(out, console) as progress:
            for note in notes:
                progress.message(note)
            series = finetune_seeds(base, seed_list, SweepFolder(out, resume, device, progress))
        print_series(series, out, console)
        return
    with options.run_progress(out, console) as progress:
        done = bothways.finetune(
            model,
            train,
            dev,
            task,
            folds=folds,
            recipe=recipe,
            config=config,
            out=out,
            resume=resume,
            device=device,
            progress=progress,
            **settings,
        )
    if isinstance(done, CrossValidation):
        print_folds(done, out, console)
    else:
        conclude_finetuning(done, out, console)


def task_settings(
    words: Iterable[str], columns: dict[str, str | None], **arguments: object
) -> dict[str, Any]:
    """Return the settings of a fine-tuning, as `settings_for`, with the columns that are named."""
    names = {name: column for name, column in columns.items() if column is not None}
    return options.settings_for(bothways.finetune, words, columns=names or None, **arguments)


def settings_from(
    arguments: dict[str, Any],
    columns: dict[str, str | None],
    overrides: tuple[str, ...],
    task: str,
    recipe: FinetuneRecipe,
    file: Path | None,
) -> FinetuneConfig:
    """Return the settings of a recipe, changed by a file, overrides and options."""
    model, train, dev = (arguments.pop(name) for name in ("model", "train", "dev"))
    settings = task_settings(overrides, columns, **arguments)
    built, notes = finetune_settings(model, train, dev, task, settings, recipe=recipe, config=file)
    for note in notes:
        say(error_console(), note)
    return built


def conclude_finetuning(done: FinetuneResult, out: Path, console: Console) -> None:
    """Print the result of a single run; see `print_series`."""
    from bothways.hub.hf_config import format_note
    from bothways.training.parallel import is_main, plan_here

    if not done.finished:
        options.stop_saved(console, f"Saved after step {done.progress.steps:,}.")
    if not is_main(plan_here()):
        return
    if done.failure is not None:
        say(console, f"warning: {done.failure}")
    if done.metrics:
        show_lines(output_console(), _dev_table(done))
        say(console, f"Error analysis: {out / 'report.html'}")
    sentences = (f"The model is in {done.folder}.", format_note(done.folder), _try(out))
    say(console, " ".join(sentence for sentence in sentences if sentence))


def _dev_table(done: FinetuneResult) -> RenderableType:
    """Return the metrics next to the majority baseline's, where that has them."""
    columns = {"model": done.metrics}
    if done.baseline.keys() & done.metrics.keys():
        baseline = {name: done.baseline.get(name, math.nan) for name in done.metrics}
        columns["majority baseline"] = baseline
    from bothways.core.report.terminal import metric_table

    return metric_table(
        "Best checkpoint on the dev data",
        columns,
        shown=lambda name, value: "–" if math.isnan(value) else f"{value:.4f}",
    )


def _try(out: Path) -> str:
    folder = shlex.quote(str(out))
    return f"Try it: bothways predict {folder} FILE, or in a browser: bothways play {folder}"


def print_series(series: Series, out: Path, console: Console) -> None:
    """Print the results of a series; raise KeyboardInterrupt if the last run was interrupted."""
    from bothways.training.parallel import is_main, plan_here

    if not series.finished:
        options.stop_saved(console)
    if not is_main(plan_here()):
        return
    show_lines(output_console(), _series_table(series))
    if series.best is not None:
        name, model = series.best.name, out / "model"
        success = f"The best model, of {name}, is in {model}. {_try(out)}"
        failed = f"warning: every run has probably failed. The model of {name} is in {model}."
        say(console, failed if series.all_failed else success)


def print_folds(scores: CrossValidation, out: Path, console: Console) -> None:
    """Print mean and deviation of each metric; raise KeyboardInterrupt if a run was interrupted."""
    from bothways.core.report.terminal import metric_table
    from bothways.lab.sweeps.folds import PREDICTIONS
    from bothways.training.parallel import is_main, plan_here

    if not scores.series.finished:
        options.stop_saved(console)
    if not is_main(plan_here()):
        return
    columns = {"mean": scores.metrics, "deviation": scores.deviations}
    title = (
        f"{quantity(len(scores.series.scored), 'fold(s)')}, each scored by the model of the others"
    )
    show_lines(output_console(), metric_table(title, columns))
    say(console, f"A prediction for each row is in {out / PREDICTIONS}.")


def _series_table(series: Series) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from bothways.core.report.terminal import titled
    from bothways.lab.sweeps.seeds import seed_spread

    table, summary = Table(), seed_spread(series)
    metric = summary.metric if summary else "metric"
    table.add_column("run", overflow="fold")
    table.add_column(Text(metric), justify="right")
    table.add_column("failed")
    for run in series.runs:
        value = f"{run.metrics[metric]:.4f}" if run.metrics else "–"
        title = Text(run.name + (" (best)" if run is series.best else ""))
        table.add_row(title, value, Text("; ".join(run.failed)))
    if summary:
        table.add_section()
        for name in ("mean", "median", "best", "deviation"):
            value = getattr(summary, name)
            table.add_row(name, "–" if value is None else f"{value:.4f}", "")
        table.add_row("failed runs", f"{summary.failed} of {len(series.runs)}", "")
    return titled(f"{quantity(len(series.runs), 'run(s)')}, scored on the dev data", table)
