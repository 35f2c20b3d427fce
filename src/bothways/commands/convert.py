"""`bothways convert`: a checkpoint of TensorFlow becomes a model folder; the folder of a BERT or RoBERTa, a Longformer."""

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
) -> None:
    """Make a Hugging Face folder of a checkpoint of TensorFlow, or a Longformer of the folder of a BERT or RoBERTa.

    Checkpoints are those of BERT, ALBERT or ELECTRA. TensorFlow is not needed.

    Parameters
    ----------
    source
        The unpacked folder of a checkpoint, or the .index file of one in it. Or, with --positions or --window, the model folder
        of a BERT or RoBERTa.
    out
        The model folder.
    part
        Of an ELECTRA's checkpoint, which of its two models; by default the discriminator.
    positions
        Of a Longformer, the longest input in tokens; by default 4096.
    window
        Of a Longformer, how many tokens each one looks at, both sides together; by default 512.
    """
    from bothways.core.atomic_files import check_not_input

    if not source.exists():
        from bothways.core.errors import FolderError

        fix = "A model of the Hub is fetched first: hf download NAME --local-dir DIR"
        raise FolderError("no such folder", where=source, fix=fix)
    check_not_input(out, [source])
    given = {
        name: value
        for name, value in (("positions", positions), ("window", window))
        if value is not None
    }
    if (source / "config.json").is_file() and not any(source.glob("*.index")) and part is None:
        _lengthen(source, out, given)
    else:
        _check_none(given, source)
        _read(source, out, part)


def _check_none(given: Mapping[str, int], source: Path) -> None:
    """A checkpoint of TensorFlow does not become a Longformer at once."""
    from bothways.core.errors import ConfigError

    if given:
        named = " and ".join(f"--{name}" for name in given)
        what = f"{named} say how a Longformer is made of a model folder, and {source} is read as a checkpoint of TensorFlow"
        fix = "Leave them out, then convert the folder that comes out."
        raise ConfigError(what, where=next(iter(given)), fix=fix)


def _lengthen(source: Path, out: Path, given: Mapping[str, int]) -> None:
    import sys

    from bothways.core.errors import ConfigError
    from bothways.hub.convert.longformer import WINDOW, lengthened
    from bothways.hub.model_card import Card
    from bothways.hub.model_folder import load_model, save_model
    from bothways.text.tokenizer import Tokenizer
    from bothways.text.tokenizer_files import FILES

    if not given:
        what = "is a model folder already; what can be made of it is a Longformer, if its length is said"
        raise ConfigError(what, where=source, fix="Add --positions 4096, --window 512, or both.")
    found = load_model(str(source))
    model = lengthened(found.model, **given)
    held = any((found.folder / name).is_file() for name in FILES)
    tokenizer = Tokenizer.load(found.folder) if held else None
    made = f"a Longformer of {model.config.max_positions:,} positions, window {given.get('window', WINDOW):,}"
    summary = (
        f"A Longformer of {model.config.max_positions} positions, made of {found.folder.name} with `bothways convert`. "
        "Nothing was trained: it needs training on long texts before it is of use there."
    )
    save_model(out, model, tokenizer, card=Card(f"{found.folder.name}, for long texts", summary))
    if tokenizer is None:
        print("warning: the folder has no tokenizer, and neither has the new one", file=sys.stderr)
    print(f"wrote {out}: {made}", file=sys.stderr)


def _read(source: Path, out: Path, part: Literal["discriminator", "generator"] | None) -> None:
    import sys

    from bothways.hub.convert.tensorflow.checkpoint import read_checkpoint
    from bothways.hub.model_card import Card
    from bothways.hub.model_folder import save_model

    found = read_checkpoint(source, part)
    summary = "Converted from a checkpoint of TensorFlow with `bothways convert`. It is what it was: nothing was trained."
    card = Card(f"{found.index.stem}, converted", summary)
    save_model(out, found.model, found.tokenizer, card=card)
    print(found.report)
    if found.tokenizer is None:
        print(
            "warning: there is neither a vocab.txt nor one SentencePiece file beside it: the folder has no tokenizer",
            file=sys.stderr,
        )
    print(f"wrote {out}", file=sys.stderr)
