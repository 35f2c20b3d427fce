"""`bothways embed`: a vector per text, written to a file or to parts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bothways.cli import options

_SUFFIXES = (".npy", ".parquet", ".jsonl", "")


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

    The same command continues where it was stopped.

    Parameters
    ----------
    folder
        Model folder, sentence-transformers folder, folder of a run, or Hub id.
    inputs
        Files: .txt (one text per line), .csv, .tsv, .jsonl, .parquet,
        hub:owner/name:configuration:split, or - for standard input. Then settings: pooling=mean,
        cls or max; layers=[-1], or several; combine=mean or concat; normalised=true;
        components=256 for the first 256; include_prompt=false. Default: the settings of the
        folder, else the mean of the last layer.
    out
        vectors.npy, .parquet or .jsonl; or a folder for vectors in parts.
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
    import contextlib
    import json
    import shutil

    from bothways.core.atomic_files import check_output_path
    from bothways.core.errors import ConfigError
    from bothways.data.text_io import is_stream
    from bothways.prediction.bulk.one_file import is_file, parts_folder, spooled

    files, settings = options.split_inputs(inputs)
    if out.suffix and not out.is_dir():
        check_output_path(out, files)
    if out.suffix not in _SUFFIXES and not out.is_dir():
        message = f"{out.name!r} must end in .npy, .parquet or .jsonl"
        raise ConfigError(message, where="out", fix="Choose one by its suffix.")
    if prompt_name is not None and prompt is not None:
        message = "a prompt is given, and the name of one"
        raise ConfigError(message, where="prompt", fix="Leave one of them out.")
    if prompt_name is not None:
        settings += (f"prompt_name={json.dumps(prompt_name)}", "prompt=none")
    if prompt is not None:
        settings += (f"prompt={json.dumps(prompt)}",)
    with contextlib.ExitStack() as stack:
        names = list(files)
        if is_file(out):
            for number, name in enumerate(files):
                if is_stream(name):
                    # Parts of a pipe cannot be continued.
                    stack.callback(shutil.rmtree, parts_folder(out), ignore_errors=True)
                    suffix = ".jsonl" if text else ".txt"
                    names[number] = stack.enter_context(spooled(name, suffix))
        options.predict_parts(
            out, parts,
            model=folder, files=tuple(names), settings=settings,
            task="embed", text=text, length=length, precision=precision, device=device,
        )  # fmt: skip
