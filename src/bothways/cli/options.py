"""Options that several commands share, and predictions in parts, which two commands make."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from bothways.core.urls import is_url, local_path

if TYPE_CHECKING:
    from bothways.core.jobs.workers import Workers

TrainedTask = Annotated[
    str,
    Parameter(
        help="classify, regress, multilabel, choice, tag, answer, rerank, or another usual name of "
        "one of them, such as sentiment, ner or qa."
    ),
]
Device = Annotated[str, Parameter(help="auto (a GPU, if there is one), cpu, cuda or cuda:N.")]
TextColumn = Annotated[
    str | None,
    Parameter(
        help="Column of the text, or of the first of two (for rerank the query); default: as in "
        "training."
    ),
]
NewTextColumn = Annotated[
    str | None,
    Parameter(help="Column of the text, or of the first of two; without a header its number."),
]
SecondColumn = Annotated[str | None, Parameter(help="The column of the second text.")]
LabelColumn = Annotated[str | None, Parameter(help="The column of the label.")]
GroupColumn = Annotated[
    str | None,
    Parameter(
        help="With --dev 20%: a column whose equal values stay on one side of the split, such as a "
        "user or a patient."
    ),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "int8"],
    Parameter(
        help="Precision of matrix products: fp32 gives equal results on every machine, auto uses "
        "bf16 where the hardware supports it. int8 is faster and less exact on a CPU: `bothways "
        "evaluate --precision int8` compares it with fp32 in accuracy and speed."
    ),
]
RuntimeChoice = Annotated[
    Literal["torch", "onnxruntime", "openvino"],
    Parameter(
        help="What computes the model: this library, or onnxruntime or OpenVINO for a folder that "
        "`bothways export` wrote."
    ),
]
FineRecipe = Annotated[
    Literal["modern", "paper", "electra"],
    Parameter(
        help="modern is AdamW; paper is Adam without bias correction, as in BERT's own code; "
        "electra has lower rates for lower layers, as in ELECTRA's code."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class RunLength:
    """The options for the length of a run; each gives the setting `training.until`."""

    epochs: Annotated[
        float | None,
        Parameter(help="How many times the data is read; default: the length of the recipe."),
    ] = None
    until: Annotated[
        str | None,
        Parameter(
            help='End of the run instead of --epochs, such as "2 hours", "10000 steps", "2e9 '
            'tokens".'
        ),
    ] = None

    @property
    def settings(self) -> tuple[str, ...]:
        """The setting as an override; none without an option.

        Raises:
            ConfigError: both options are given.
        """
        if self.epochs is not None and self.until is not None:
            from bothways.core.errors import ConfigError

            what = f"the length is given twice: {self.epochs:g} epochs and {self.until!r}"
            raise ConfigError(what, where="--until", fix="Leave out --epochs or --until.")
        if self.epochs is not None:
            return (f"training.until={self.epochs:g} epochs",)
        return () if self.until is None else (f"training.until={self.until}",)


def _check_names(kind: object, names: str | Iterable[str] | None) -> None:
    """Raise ValueError for an unknown option."""
    for name in [names] if isinstance(names, str) else names or ():
        if name.startswith("-") and name != "-":
            raise ValueError(f"Unknown option: {name}")


INPUTS = Parameter(allow_leading_hyphen=True, validator=_check_names)
"""File names as arguments of a command, including "-"."""


@Parameter(name="*")
@dataclass(frozen=True)
class PartOptions:
    """Options of predictions in parts (`--out`)."""

    keep: Annotated[
        tuple[str, ...],
        Parameter(
            help="A column to copy to the output, such as a key; old=new renames it. May be "
            "repeated.",
        ),
    ] = ()
    format: Annotated[
        Literal["jsonl", "spans", "parquet", "npy"] | None,
        Parameter(
            help="With --out DIR: format of the parts. Default: npy for vectors, parquet if the "
            "input is or if vectors have columns to keep, else jsonl. spans, also without --out: "
            "JSON lines with the text and the entities as character spans."
        ),
    ] = None
    rows: Annotated[int, Parameter(help="With --out DIR: rows of a part.")] = 4096
    rejects: Annotated[
        bool,
        Parameter(
            negative="",
            help="With --out: write rows that cannot be read or predicted to DIR/_rejects or "
            "FILE.rejects.jsonl instead of stopping at the first one.",
        ),
    ] = False
    processes: Annotated[
        int | None,
        Parameter(help="With --out DIR: processes that predict; default: 1, on Ray all it has."),
    ] = None
    threads: Annotated[
        int | None,
        Parameter(
            help="With --out DIR: threads of each process; default: an equal share of the cores; "
            "on Ray 1."
        ),
    ] = None
    ray: Annotated[
        str | None,
        Parameter(
            help="With --out DIR: predict on a Ray cluster: auto, ray://HOST:10001, or local."
        ),
    ] = None


_SETTING = re.compile(r"\w+(?:\.\w+)*=")
_FILE_NAME = re.compile(r"[~./].*|.*\w\.[A-Za-z]\w{0,7}")
"""What cannot be a text: a path, or a name with a suffix."""


def split_inputs(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files and the settings among words: "pooling=max" is a setting, if no file."""
    settings = tuple(word for word in words if _SETTING.match(word) and not os.path.exists(word))
    return tuple(word for word in words if word not in settings), settings


def argument_text(words: tuple[str, ...]) -> str | None:
    """Return the only word if it is a text to predict, and not the name of a file.

    A text has blanks or letters outside ASCII, as Chinese has; it is not the name of what exists,
    does not begin like a path, and has no suffix: "a good film.", but not "my data.csv".
    """
    if len(words) != 1:
        return None
    [word] = words
    written = any(character.isspace() for character in word) or not word.isascii()
    if not written or _FILE_NAME.fullmatch(word) or is_url(word):
        return None
    named = os.path.exists(word) or os.path.isdir(os.path.dirname(word)) or glob.glob(word)
    return None if named else word


def _expanded(words: Iterable[str]) -> Iterator[str]:
    """Yield names of files; a glob in quotes yields the files that match."""
    from bothways.data.text_io import matching_files

    for word in words:
        if not glob.has_magic(word) or is_url(word) or os.path.exists(local_path(word)):
            yield word
        else:
            yield from map(str, matching_files(word))


def is_folder(out: Path) -> bool:
    """Return True if the output is a folder of parts: it exists as one, or has no suffix."""
    return out.is_dir() or not out.suffix


def one_file(files: tuple[str, ...], options: PartOptions) -> str:
    """Return the only file of a command without a folder for parts; it may be a glob.

    Raises:
        ConfigError: there are none or several files, or options of parts.
    """
    from bothways.core.errors import ConfigError

    files = tuple(_expanded(files))
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
    from bothways.api.progress import keeping, say_kernels
    from bothways.core.bar import error_console, terminal_progress
    from bothways.core.terminal import counted, say
    from bothways.prediction.bulk.one_file import is_file, parts_folder, rejects_file
    from bothways.prediction.bulk.request import BulkRequest
    from bothways.prediction.bulk.run import predict_files

    request = BulkRequest(
        **asked | {"files": tuple(_expanded(asked["files"]))},
        keep=options.keep,
        form=options.format,
        rows=options.rows,
        rejects=options.rejects,
    )
    workers = _workers(options)
    say_kernels(request.device)
    console = error_console()
    folder = parts_folder(out) if is_file(out) else out
    with keeping(folder, console, "What is finished"), terminal_progress(console) as progress:
        done = predict_files(request, out, workers, progress)
    were = "was" if done.again == 1 else "were"
    again = f", {done.again:,} of which {were} finished before" if done.again else ""
    parts = "" if is_file(out) else f", in {counted(done.parts, 'parts')}"
    say(console, f"{counted(done.rows, 'rows')} in {out}{parts}{again}")
    for warning in done.warnings:
        print(warning, file=sys.stderr)
    if done.rejected:
        rejects = rejects_file(out) if is_file(out) else out / "_rejects"
        what = f"warning: {counted(done.rejected, 'rows were rejected')}: see {rejects}"
        print(what, file=sys.stderr)


def _workers(options: PartOptions) -> Workers:
    from bothways.core.jobs.workers import LocalWorkers, RayWorkers

    if options.ray is None:
        return LocalWorkers(options.processes or 1, options.threads)
    return RayWorkers(options.ray, options.processes, options.threads or 1)
