"""`bothways convert`: a checkpoint of TensorFlow, as Google publishes them, becomes a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def convert(source: Path, /, *, out: Path, part: Literal["discriminator", "generator"] | None = None) -> None:
    """Make a Hugging Face folder of a checkpoint of BERT, ALBERT or ELECTRA. TensorFlow is not needed.

    Parameters
    ----------
    source
        The unpacked folder, or the .index file of one checkpoint in it.
    out
        The model folder.
    part
        Of an ELECTRA, which of its two models; by default the discriminator.
    """
    import sys

    from bothways.interop.card import Card
    from bothways.interop.folder import save_model
    from bothways.interop.tensorflow import read_checkpoint

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
