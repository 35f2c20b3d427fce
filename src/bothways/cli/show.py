"""`bothways show`: what a model reads in training, token by token."""

from __future__ import annotations

import json as json_format
import os
from pathlib import Path

import bothways
from bothways.cli import options
from bothways.core.errors import ConfigError, call
from bothways.core.terminal import output_console, write_stderr
from bothways.pretraining import PretrainRecipe


@options.documented_by(bothways.show)
def show(  # noqa: PLR0913 – one option per question
    source: str,
    *words: str,
    model: str | None = None,
    start: str | None = None,
    count: int | None = None,
    step: int = 1,
    layer: int | None = None,
    head: int | None = None,
    recipe: PretrainRecipe | None = None,
    config: options.ConfigFile = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Show what a model reads: sequences that a pre-training run is trained on, or a text.

    A token that is predicted has an arrow: [MASK]→dog.

    Parameters
    ----------
    source
        A folder made by `bothways corpus build`; with a text also a tokenizer or a model: a folder,
        the folder of a run, or a Hub id.
    words
        A text, or two for a pair, instead of the sequences of a corpus; further corpora; and
        settings as for pretrain, such as objective=masked_lm objective.masking.rate=0.3. A text
        without settings is shown as in use, without masks.
    head
        The head of the layer, from 1, whose attention is printed; default: the mean of all.
    out
        A file for an HTML page, instead of text.
    json
        Write a JSON object for each sequence, one a line, instead of text.
    """
    names, overrides = options.split_inputs(words)
    settings = options.settings_for(bothways.show, overrides)
    corpora = [name for name in names if os.path.isdir(name)]
    texts = [name for name in names if name not in corpora]
    for text in texts:
        if os.path.isfile(text):
            build = call("corpus build", text, tokenizer="FOLDER", out="CORPUS")
            fix = f"Give a sentence of it, or build a corpus: {build}"
            raise ConfigError("is a file, not a text", where=text, fix=fix)
    if len(texts) > 2:
        message = f"{len(texts)} texts are given, and a model reads one or a pair"
        raise ConfigError(message, where="words", fix="Put quotation marks around each text.")
    if corpora and texts:
        message = f"is a folder next to a text; a text is read by {source} alone"
        raise ConfigError(message, where=corpora[0], fix="Leave out one of them.")
    if head is not None and (layer is None or out is not None or json):
        message = "chooses what is printed of a layer"
        fix = "Add --layer N." if layer is None else "Leave it out: a page or JSON has all heads."
        raise ConfigError(message, where="head", fix=fix)
    if out is not None:
        from bothways.core.files import check_output_path

        check_output_path(out, [source])
    shown = bothways.show(
        [source, *corpora] if corpora else source,
        *texts,
        model=model,
        start=start,
        count=count,
        step=step,
        layer=layer,
        recipe=recipe,
        config=config,
        **settings,
    )
    for note in shown.notes:
        write_stderr(f"note: {note}")
    if out is not None:
        shown.save(out)
        write_stderr(f"The page is in {out}.")
    elif json:
        for sequence in shown.to_json():
            print(json_format.dumps(sequence, ensure_ascii=False))
    else:
        shown.print(output_console(), head)
