"""`bothways convert | average | export`: checkpoints and vocabularies, mean weights, runtimes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import bothways
from bothways.cli import options


def convert(
    source: Path,
    /,
    *,
    out: Path,
    part: Literal["discriminator", "generator"] | None = None,
    vocabulary: Path | None = None,
) -> None:
    """Convert a TensorFlow checkpoint to a model folder, or a model to another vocabulary.

    Checkpoints are Google's of BERT, ALBERT or ELECTRA. TensorFlow is not needed.

    Parameters
    ----------
    source
        The unpacked folder of a checkpoint, or its .index file. With --vocabulary, a model folder,
        or the folder of a run.
    out
        The model folder.
    part
        The model of an ELECTRA checkpoint; by default the discriminator.
    vocabulary
        Add the words of a text file, one a line, or replace the vocabulary by that of a tokenizer:
        a folder, tokenizer.json or vocab.txt. New rows are the means of the old pieces; the new
        folder lists all rows in vocabulary.tsv.
    """
    from bothways.core.errors import FolderError
    from bothways.core.files import check_not_input
    from bothways.hub.resolve import resolve_run

    if not source.exists():
        fix = "A model of the Hub is fetched first: hf download NAME --local-dir DIR"
        raise FolderError("no such folder", where=source, fix=fix)
    check_not_input(out, [source])
    if vocabulary is not None:
        from bothways.core.progress import terminal_progress
        from bothways.core.terminal import quantity
        from bothways.hub.convert.vocabulary import TABLE, convert_vocabulary

        with terminal_progress() as progress:
            change = convert_vocabulary(source, out, vocabulary, progress)
        for fate, count in change.counts.items():
            print(f"{fate}: {quantity(count, 'row(s)')}")
        print(f"wrote {out}: {change.new.size:,} tokens; each row is in {TABLE}", file=sys.stderr)
        return
    is_model = Path(resolve_run(str(source)), "config.json").is_file()
    if is_model and not (any(source.glob("*.index")) or part):
        fix = "To change its vocabulary: --vocabulary FILE."
        raise FolderError("is a model folder already", where=source, fix=fix)
    from bothways.hub.convert.tensorflow.checkpoint import read_tensorflow
    from bothways.hub.model_card import Card
    from bothways.hub.model_folder import save_model

    checkpoint = read_tensorflow(source, part)
    summary = "Converted from a TensorFlow checkpoint with `bothways convert`, without training."
    card = Card(f"{checkpoint.index.stem}, converted", summary)
    save_model(out, checkpoint.model, checkpoint.tokenizer, card=card)
    print(checkpoint.report)
    if checkpoint.tokenizer is None:
        message = "there is no vocab.txt and no single SentencePiece file next to the checkpoint"
        print(f"warning: {message}: the folder has no tokenizer", file=sys.stderr)
    print(f"wrote {out}", file=sys.stderr)


@options.documented_by(bothways.average)
def average(*models: Path, out: Path) -> None:
    """Save the mean of the weights of several models, or of all checkpoints of one run.

    Runs that began alike, such as seeds of one fine-tuning, and the last checkpoints of a run are
    often better together than each alone. Measure it: bothways evaluate OUT dev.tsv.
    """
    names = bothways.average(models, out)
    print(f"The mean of {len(names)} models is in {out}.", file=sys.stderr)


@options.documented_by(bothways.export_model)
def export(  # noqa: PLR0913 – one option per question
    folder: str,
    *settings: str,
    to: Literal["onnx", "openvino", "both"] = "onnx",
    out: Path,
    task: str | None = None,
    length: options.MaxLength = None,
    int8: str | None = None,
    limit: float | None = None,
    text: options.TextColumn = None,
    text_b: options.SecondColumn = None,
    label: options.LabelColumn = None,
) -> None:
    """Write a model as a graph that onnxruntime, OpenVINO and browsers run.

    The graph takes any batch size and length. Nothing is written if its outputs differ from the
    model's.

    Parameters
    ----------
    settings
        Settings of the task, such as pooling=cls for embed.
    limit
        Points of the metric that int8 may lose; a point is 0.01. By default 0.5.
    """
    from bothways.core.progress import terminal_progress

    columns = {"text": text, "text_b": text_b, "label": label}
    with terminal_progress() as progress:
        result = bothways.export_model(
            folder,
            out,
            to,
            task=task,
            length=length,
            int8=int8,
            limit=limit,
            columns={name: column for name, column in columns.items() if column is not None},
            progress=progress,
            **options.settings_for(bothways.export_model, settings),
        )
    for name, size in result.sizes.items():
        print(f"{out / name}  {size / 2**20:,.1f} MiB")
    for comparison in result.comparisons:
        print(comparison)
    for runtime, report in result.int8.items():
        print(f"{runtime}: {report}")
