"""`bothways embed`: a vector per text, written to a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from cyclopts import Parameter

from bothways.cli import options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bothways.prediction.layer_sweep import Sweep
    from bothways.tasks.sentence_embedding.task import Embedder, SentenceEmbeddingTask


def embed(  # noqa: PLR0913 – one option per question
    folder: str,
    *inputs: Annotated[str, options.INPUTS],
    out: Path,
    text: str | None = None,
    prompt_name: str | None = None,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    length: int | None = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
    parts: options.PartOptions = options.PartOptions(),  # noqa: B008 – frozen
) -> None:
    """Compute a vector of each text, in the order of the input and in constant memory.

    Parameters
    ----------
    folder
        Model folder, sentence-transformers folder, folder of a run, or Hub id.
    inputs
        A file: .txt (one text per line), .csv, .tsv, .jsonl, .parquet,
        hub:owner/name:configuration:split, or - for standard input; if --out is a folder, any
        number of files. Then settings: pooling=mean, cls or max; layers=[-1], or several;
        combine=mean or concat; normalised=true; components=256 for the first 256;
        include_prompt=false. Default: the settings of the folder, else the mean of the last layer.
    out
        vectors.npy, .parquet or .jsonl; or a folder for vectors in parts, in processes or on a
        cluster: the same command continues where it was stopped.
    text
        Column of the text.
    prompt_name
        The prompt of the folder that is put before each text, such as query; default: the folder's
        default one, if it has one.
    prompt
        A prompt instead of one of the folder's, such as "query: "; "" for none.
    length
        Maximum length of a text in tokens; default: as in the folder, else all positions.
    """
    import sys

    from bothways.core.errors import DataError
    from bothways.core.terminal import quantity
    from bothways.prediction.layer_sweep import check_out, write_vectors
    from bothways.prediction.predictor import open_task

    files, settings = options.split_inputs(inputs)
    settings += _prompt_settings(prompt_name, prompt)
    if options.is_folder(out):
        options.predict_parts(
            out, parts,
            model=folder, files=files, settings=settings, task="embed", text=text, length=length,
            precision=precision, device=device,
        )  # fmt: skip
        return
    file = options.one_file(files, parts)
    check_out(out, file)
    options.say_kernels(device)
    opened = open_task(
        folder, "embed", length=length, device=device, precision=precision, batch_invariant=True,
        settings=settings,
    )  # fmt: skip
    text_columns = options.named_columns(opened, text=text)
    reading = opened.read(file, text_columns, labelled=False)
    options.say_guess(opened, reading, text_columns, file)
    columns = cast("SentenceEmbeddingTask", reading.task).columns
    if columns.text_b is not None:
        message = (
            f"has two texts a row, {columns.text!r} and {columns.text_b!r}, and one is embedded"
        )
        raise DataError(message, where=file, fix="Name one: --text NAME.")
    task_model = cast("Embedder", opened.task_model)
    width = task_model.task.width(task_model.model)
    with options.watched(reading, "embedding") as tally:
        predictions = opened.predict_examples(reading, counts=tally)
        write_vectors(out, (prediction.vectors[0] for _, prediction in predictions), width)
    for warning in tally.warnings:
        print(warning, file=sys.stderr)
    print(
        f"{quantity(tally.examples, 'vector(s)')} of {width} components in {out}, "
        f"computed in {opened.precision}",
        file=sys.stderr,
    )


def _prompt_settings(name: str | None, prompt: str | None) -> tuple[str, ...]:
    """Return the settings of a prompt, given or named.

    Raises:
        ConfigError: both are given.
    """
    import json

    from bothways.core.errors import ConfigError

    if name is not None and prompt is not None:
        message = "a prompt is given, and the name of one"
        raise ConfigError(message, where="prompt", fix="Leave one of them out.")
    if name is not None:
        return f"prompt_name={json.dumps(name)}", "prompt=none"
    return () if prompt is None else (f"prompt={json.dumps(prompt)}",)


def sweep_table(sweep: Sweep, title: str) -> RenderableType:
    """Return a table of every layer with every pooling, the best one marked."""
    from rich.table import Table

    from bothways.core.report.terminal import titled
    from bothways.core.terminal import quantity

    table = Table(
        caption=f"{quantity(sweep.pairs, 'pair(s)')}. anisotropy: the mean cosine of any two texts"
    )
    for name in ("layer", "pooling", "pearson", "spearman", "anisotropy"):
        table.add_column(name, justify="left" if name == "pooling" else "right")
    best = sweep.best
    for cell in sweep.cells:
        numbers = (cell.correlation.pearson, cell.correlation.spearman, cell.correlation.anisotropy)
        mark = " ← best" if cell is best else ""
        table.add_row(
            str(cell.layer), f"{cell.pooling}{mark}", *(f"{number:.4f}" for number in numbers)
        )
    return titled(title, table)
