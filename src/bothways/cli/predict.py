"""`bothways predict`: predictions as JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bothways.cli import options

_NO_FORMATS = (".json", ".txt")
"""Endings of files that predictions are not written to."""


def predict(  # noqa: PLR0913 – one option per question
    folder: options.FinetunedModel,
    *inputs: Annotated[str, options.INPUTS],
    out: Path | None = None,
    task: str | None = None,
    text: options.TextColumn = None,
    text_b: options.SecondColumn = None,
    top: int | None = None,
    length: options.MaxLength = None,
    window: int | None = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
    runtime: options.RuntimeChoice = "torch",
    parts: options.PartOptions = options.PartOptions(),  # noqa: B008 – frozen
) -> None:
    """Predict: one JSON line for each input, a table, or many files with --out.

    On standard input each line is a text; with --text, each line is a JSON object.

    Parameters
    ----------
    inputs
        A file: .txt (one text per line), .csv, .tsv, .jsonl, .parquet,
        hub:owner/name:configuration:split, or - for standard input; with --out any number of files.
        Or one text in quotes.
        Then settings of the task, such as top=10 for fill or pooling=max for embed.
    out
        One file: .jsonl, .csv, .tsv, .parquet, or .npy for vectors. Or a folder of predictions in
        parts, as JSON lines or Parquet (--format). Both read any number of files, in several
        processes, and the same command continues where it was stopped.
    task
        A task of finetune, fill, likelihood, prefer, embed, or a common alias of one of them;
        default: the task of the model.
    top
        The most probable labels, or the best documents, to print; by default all.
    window
        Number of texts to read before the first prediction; default: 4096, on a terminal 1.
    """
    import dataclasses
    import json
    import sys

    from bothways.core.config.checks import require_at_least
    from bothways.data.text_io import STDIN
    from bothways.prediction.bulk.output import kept_values, prediction_values
    from bothways.prediction.bulk.parts import predict_kept
    from bothways.prediction.bulk.request import check_format
    from bothways.prediction.engine import PredictConfig
    from bothways.prediction.predictor import open_task, read_input
    from bothways.tasks.base import Reading

    require_at_least(1, top=top, window=window)
    files, settings = options.split_inputs(inputs)
    if out is not None:
        _check_parts(out, window)
        options.predict_parts(
            out, parts,
            model=folder, files=files, settings=settings, task=task, text=text, text_b=text_b,
            top=top, length=length, precision=precision, device=device, runtime=runtime,
        )  # fmt: skip
        return
    form = parts.format if parts.format in ("jsonl", "spans") else None
    parts = dataclasses.replace(parts, format=None) if form else parts
    sentence = options.argument_text(files) if text is None else None
    file = (
        options.one_file(files or (STDIN,), dataclasses.replace(parts, keep=()))
        if sentence is None
        else ""
    )
    opened = open_task(
        folder, task, length=length, device=device, precision=precision, batch_invariant=True,
        runtime=runtime, settings=settings,
    )  # fmt: skip
    check_format(form, opened.task_model.task)
    columns = options.named_columns(opened, text=text, text_b=text_b)
    if sentence is None:
        reading = opened.read(file, columns, labelled=False)
        options.say_guess(opened, reading, columns, file)
    else:
        print("note: no file has this name: it is predicted as a text", file=sys.stderr)
        examples = iter([read_input(opened.task_model, sentence, 1)])
        reading = Reading(opened.task_model.task, examples)
    typed = file == STDIN and sys.stdin.isatty()
    pace = PredictConfig(window=window or (1 if typed else PredictConfig.window))
    # What is typed or printed on the same terminal would run through the bar.
    with options.watched(reading, "predicting", hidden=typed or sys.stdout.isatty()) as tally:
        for copied, prediction in predict_kept(opened, reading, parts.keep, pace, tally):
            values = kept_values(copied, prediction_values(prediction, top, form or "jsonl"))
            print(json.dumps(values, ensure_ascii=False, allow_nan=False), flush=typed)
    if precision == "auto":
        print(f"note: predicted in {opened.precision}", file=sys.stderr)
    for warning in tally.warnings:
        print(warning, file=sys.stderr)


def _check_parts(out: Path, window: int | None) -> None:
    """Refuse a file without a known format, and an option of predictions that are printed."""
    from bothways.core.errors import ConfigError

    if out.suffix in _NO_FORMATS and not out.is_dir():
        message = f"{str(out)!r} has no format of predictions"
        fix = f"Name a file: --out {out.stem}.jsonl, .csv, .tsv or .parquet; or a folder."
        raise ConfigError(message, where="--out", fix=fix)
    if window is not None:
        message, fix = "is for predictions that are printed", "Leave it out; parts have --rows."
        raise ConfigError(message, where="--window", fix=fix)
