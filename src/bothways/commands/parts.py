"""Predictions in parts, for the commands `predict` and `embed`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bothways.commands.options import PartOptions

if TYPE_CHECKING:
    from bothways.bulk.request import Workers


def split_inputs(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files and the settings among words: "pooling=max" is a setting, if no file."""
    from bothways.data.tables import HUB

    settings = tuple(
        word
        for word in words
        if "=" in word and not word.startswith(HUB) and not Path(word).exists()
    )
    return tuple(word for word in words if word not in settings), settings


def is_folder(out: Path) -> bool:
    """Return True if the output is a folder of parts: it exists as one, or has no suffix."""
    return out.is_dir() or not out.suffix


def one_file(files: tuple[str, ...], options: PartOptions) -> str:
    """Return the only file of a command without a folder for parts.

    Raises:
        ConfigError: there are none or several files, or options of parts.
    """
    from bothways.core.errors import ConfigError

    for name, value in vars(PartOptions()).items():
        if getattr(options, name) != value:
            what = "is for predictions in parts"
            raise ConfigError(what, where=f"--{name}", fix="Name a folder for them: --out DIR")
    if len(files) != 1:
        what = f"there are {len(files)} files, and one is read" if files else "names no file"
        fix = "For several files name a folder: --out DIR" if files else "Name one."
        raise ConfigError(what, where="files", fix=fix)
    return files[0]


def predict_parts(out: Path, options: PartOptions, **asked: Any) -> None:
    """Predict files into parts in a folder, and print the totals.

    Args:
        asked: fields of `bulk.request.BulkRequest` other than those in `options`.
    """
    from bothways.bulk.request import BulkRequest
    from bothways.bulk.run import predict_files
    from bothways.commands.progress import error_console, keeping, say_kernels, terminal_progress
    from bothways.core.terminal import say

    request = BulkRequest(
        **asked,
        keep=options.keep,
        form=options.format,
        rows=options.rows,
        rejects=options.rejects,
    )
    workers = _workers(options)
    say_kernels(request.device)
    console = error_console()
    with keeping(out, console, "What is finished"), terminal_progress(console) as progress:
        done = predict_files(request, out, workers, progress)
    again = f", {done.again:,} of which were finished before" if done.again else ""
    say(console, f"{done.rows:,} rows in {out}, in {done.parts:,} parts{again}")
    for warning in done.warnings:
        print(warning, file=sys.stderr)
    if done.rejected:
        what = f"warning: {done.rejected:,} rows were rejected: see {out / '_rejects'}"
        print(what, file=sys.stderr)


def _workers(options: PartOptions) -> Workers:
    from bothways.bulk.request import LocalWorkers, RayWorkers

    if options.ray is None:
        return LocalWorkers(options.processes or 1, options.threads)
    return RayWorkers(options.ray, options.processes, options.threads or 1)
