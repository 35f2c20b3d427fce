"""`bothways predict`: predictions as JSON lines."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from bothways.commands.options import (
    Device,
    Precision,
    RuntimeChoice,
    SecondColumn,
    TextColumn,
)


def predict(  # noqa: PLR0913 – one option per question
    folder: str,
    file: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-",
    *settings: str,
    task: str | None = None,
    text: TextColumn = None,
    text_b: SecondColumn = None,
    top: int | None = None,
    length: int | None = None,
    window: int | None = None,
    precision: Precision = "fp32",
    device: Device = "auto",
    runtime: RuntimeChoice = "torch",
) -> None:
    """Print predictions as JSON lines in the order of the input.

    On standard input each line is a text; with --text, each line is a JSON object.

    Parameters
    ----------
    folder
        A fine-tuned model folder, the folder of a fine-tuning run, or a Hub id.
    file
        .txt (one text per line), .csv, .tsv, .jsonl, .parquet,
        hub:owner/name:configuration:split, or - for standard input.
    settings
        Settings of the task, such as top=10 for fill or pooling=max for embed.
    task
        A task of finetune, fill, likelihood, prefer, embed, or another usual name of one of them;
        default: the task of the model.
    top
        The most probable labels to print; by default all.
    length
        The longest sequence in tokens; by default as in training.
    window
        Number of texts to read before the first prediction; default: 4096, on a terminal 1.
    """
    import json
    import sys
    from pathlib import Path

    from bothways.commands.progress import asked, say_guess, watched
    from bothways.core.config.checks import require_at_least
    from bothways.data.text_io import STDIN
    from bothways.prediction.engine import PredictConfig
    from bothways.prediction.predictor import open_task

    require_at_least(1, top=top)
    if "=" in file and not Path(file).exists():  # echo … | bothways predict MODEL top=3
        file, settings = STDIN, (file, *settings)
    opened = open_task(
        folder,
        task,
        length=length,
        device=device,
        precision=precision,
        batch_invariant=True,
        runtime=runtime,
        settings=settings,
    )
    columns = asked(opened, text=text, text_b=text_b)
    reading = opened.read(file, columns, labelled=False)
    say_guess(opened, reading, columns, file)
    typed = file == STDIN and sys.stdin.isatty()
    pace = PredictConfig(
        window=(1 if typed else PredictConfig.window) if window is None else window
    )
    # What is typed or printed on the same terminal would run through the bar.
    with watched(reading, "predicting", hidden=typed or sys.stdout.isatty()) as tally:
        for _, prediction in opened.predict(reading, pace, tally):
            values = prediction.to_json()
            if top is not None and isinstance(values.get("probabilities"), dict):
                ranked = sorted(values["probabilities"].items(), key=lambda item: -item[1])
                values["probabilities"] = dict(ranked[:top])
            print(json.dumps(values, ensure_ascii=False, allow_nan=False), flush=typed)
    if precision == "auto":
        print(f"note: predicted in {opened.precision}", file=sys.stderr)
    for warning in tally.warnings:
        print(warning, file=sys.stderr)
