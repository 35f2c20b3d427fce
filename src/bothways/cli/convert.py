"""`bothways convert`: TensorFlow checkpoints, Longformers and other vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal


def convert(
    source: Path,
    /,
    *,
    out: Path,
    part: Literal["discriminator", "generator"] | None = None,
    positions: int | None = None,
    window: int | None = None,
    vocabulary: Path | None = None,
    rows: Literal["mean", "similar", "unused"] = "mean",
    texts: list[str] | None = None,
) -> None:
    """Convert a TensorFlow checkpoint to a model folder, a BERT or RoBERTa to a Longformer, or a
    model to another vocabulary.

    Checkpoints are Google's of BERT, ALBERT or ELECTRA. TensorFlow is not needed.

    Parameters
    ----------
    source
        The unpacked folder of a checkpoint, or its .index file. With --positions or --window, the
        model folder of a BERT or RoBERTa, or the folder of a run.
    out
        The model folder.
    part
        The model of an ELECTRA checkpoint; by default the discriminator.
    positions
        The longest input of a Longformer, in tokens; by default 4096.
    window
        The tokens that each token of a Longformer attends to, on both sides together; by default
        512.
    vocabulary
        Add the words of a text file, one a line, or replace the vocabulary by that of a tokenizer:
        a folder, tokenizer.json or vocab.txt. The new folder lists all rows in vocabulary.tsv.
    rows
        The start of new rows: mean of the old pieces; similar mixes tokens with similar contexts
        in --texts; unused puts words in place of BERT's [unused] tokens, as means of pieces.
    texts
        Text for similar: files, folders or globs.
    """
    from bothways.core.atomic_files import check_not_input
    from bothways.hub.resolve import resolve_run

    if not source.exists():
        from bothways.core.errors import FolderError

        fix = "A model of the Hub is fetched first: hf download NAME --local-dir DIR"
        raise FolderError("no such folder", where=source, fix=fix)
    check_not_input(out, [source])
    lengths = {
        name: value
        for name, value in (("positions", positions), ("window", window))
        if value is not None
    }
    if vocabulary is not None:
        _change_vocabulary(source, out, vocabulary, rows, texts or [])
    elif (model := Path(resolve_run(str(source)), "config.json")).is_file() and not (
        any(source.glob("*.index")) or part
    ):
        _lengthen(model.parent, out, lengths)
    else:
        _check_none(lengths, source)
        _read(source, out, part)


def _change_vocabulary(
    source: Path,
    out: Path,
    vocabulary: Path,
    kind: Literal["mean", "similar", "unused"],
    texts: list[str],
) -> None:
    import sys

    from bothways.core.bar import terminal_progress
    from bothways.core.errors import ConfigError
    from bothways.core.terminal import quantity
    from bothways.data.documents import read_documents
    from bothways.hub.convert.vocabulary import (
        TABLE,
        MeanOfPieces,
        Rows,
        Similar,
        UnusedSlots,
        convert_vocabulary,
    )

    if (kind == "similar") != bool(texts):
        message = "similar needs texts, and they are for similar alone"
        raise ConfigError(
            message, where="--texts", fix="Give --rows similar --texts FILES, or none."
        )
    rows: Rows = MeanOfPieces() if kind == "mean" else UnusedSlots()
    if texts:
        rows = Similar(document.text for document in read_documents(texts))
    with terminal_progress() as progress:
        change = convert_vocabulary(source, out, vocabulary, rows, progress)
    for fate, count in change.counts.items():
        print(f"{fate}: {quantity(count, 'row(s)')}")
    print(f"wrote {out}: {change.new.size:,} tokens; each row is in {TABLE}", file=sys.stderr)


def _check_none(options: Mapping[str, int], source: Path) -> None:
    """Refuse the options of a Longformer for a TensorFlow checkpoint."""
    from bothways.core.errors import ConfigError

    if options:
        names = " and ".join(f"--{name}" for name in options)
        message = f"{names} apply to model folders, and {source} is read as a TensorFlow checkpoint"
        fix = "Leave them out, then convert the new folder."
        raise ConfigError(message, where=next(iter(options)), fix=fix)


def _lengthen(source: Path, out: Path, lengths: Mapping[str, int]) -> None:
    import sys

    from bothways.core.errors import ConfigError
    from bothways.hub.convert.longformer import WINDOW, lengthened
    from bothways.hub.model_card import Card
    from bothways.hub.model_folder import load_model, save_model
    from bothways.hub.sentence_transformers import kept_files
    from bothways.text.tokenizer import Tokenizer
    from bothways.text.tokenizer_files import FILES

    if not lengths:
        message = "is a model folder already; it can only become a Longformer"
        raise ConfigError(message, where=source, fix="Add --positions 4096, --window 512, or both.")
    loaded = load_model(str(source))
    name, model = loaded.folder.name, lengthened(loaded.model, **lengths)
    has_tokenizer = any((loaded.folder / file).is_file() for file in FILES)
    tokenizer = Tokenizer.load(loaded.folder) if has_tokenizer else None
    positions, window = model.config.max_positions, lengths.get("window", WINDOW)
    summary = (
        f"A Longformer of {positions} positions, made of {name} with `bothways convert`. "
        "Nothing was trained: train it on long texts before using it there."
    )
    save_model(
        out,
        model,
        tokenizer,
        labels=loaded.labels,
        problem=loaded.problem,
        card=Card(f"{name}, for long texts", summary),
        extra={name: value for name, value in loaded.extra.items() if name == "task"},
        extra_files=kept_files(loaded.folder, model, positions),
    )
    if tokenizer is None:
        print("warning: the folder has no tokenizer, and neither has the new one", file=sys.stderr)
    print(
        f"wrote {out}: a Longformer of {positions:,} positions, window {window:,}", file=sys.stderr
    )


def _read(source: Path, out: Path, part: Literal["discriminator", "generator"] | None) -> None:
    import sys

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
