"""Predictions as one file: the parts of a hidden folder next to it, joined at the end.

predictions.csv           complete or absent, in the order of the input
.predictions.csv.parts/   as `bulk.folder` describes, until the file is written; the same work
                          continues there
predictions.csv.rejects.jsonl  rows without a prediction, if they are allowed
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bothways.core.atomic_files import HIDDEN, replace_file
from bothways.core.errors import BothwaysError, ConfigError, DataError, optional
from bothways.data.hub_rows import HUB
from bothways.data.text_io import STANDARD_INPUT, STDIN, file_at, read_lines, standard_input
from bothways.prediction.bulk.folder import REJECTS
from bothways.prediction.bulk.request import BulkRequest, PartFormat

SUFFIXES: dict[str, PartFormat] = {
    ".jsonl": "jsonl", ".csv": "jsonl", ".tsv": "jsonl", ".parquet": "parquet", ".npy": "npy",
}  # fmt: skip
"""Endings of files, and the format of the parts that they are made of."""


def is_file(out: Path) -> bool:
    """Return True for the name of a file; other names are folders of parts."""
    return out.suffix in SUFFIXES and not out.is_dir()


def parts_folder(out: Path) -> Path:
    """Return the folder of the parts of a file."""
    return out.with_name(f"{HIDDEN}{out.name}.parts")


def rejects_file(out: Path) -> Path:
    """Return the file of the rows without a prediction."""
    return out.with_name(f"{out.name}.rejects.jsonl")


@contextmanager
def spooled(name: str, suffix: str) -> Iterator[str]:
    """Copy a pipe to a temporary file, since parts are made of what can be read again.

    Errors name the pipe.
    """
    lines = standard_input() if name == STDIN else read_lines(file_at(name))
    with tempfile.NamedTemporaryFile("w", suffix=suffix, encoding="utf8") as file:
        file.writelines(f"{text}\n" for _, text in lines)
        file.flush()
        try:
            yield file.name
        except BothwaysError as error:
            if error.where is not None:
                shown = STANDARD_INPUT if name == STDIN else name
                error.where = str(error.where).replace(file.name, shown)
            raise


def part_format(request: BulkRequest, out: Path) -> PartFormat:
    """Return the format of the parts of a file.

    Raises:
        ConfigError: the request names another format.
        DataError: the file is one of the inputs.
    """
    spans = request.form == "spans" and out.suffix == ".jsonl"
    form: PartFormat = "spans" if spans else SUFFIXES[out.suffix]
    if request.form not in (None, form):
        message = f"{request.form!r} is not the format of {out.name}"
        raise ConfigError(message, where="format", fix="Leave it out: the ending names the format.")
    for name in request.files:
        if not name.startswith(HUB) and file_at(name).resolve() == out.resolve():
            raise DataError("is the input, too", where=out, fix="Choose another file.")
    return form


def join_parts(folder: Path, out: Path, *, flat: bool) -> None:
    """Write the parts in a folder as one file, and their rejected rows as another.

    Args:
        flat: whether the values of a mapping, such as probabilities, are columns of a table.

    Raises:
        ResourceError: no space or no permission; the file is as it was.
    """
    parts = sorted(folder.glob("part-*"))
    rejects = sorted((folder / REJECTS).glob("*.jsonl"))
    if rejects:
        replace_file(rejects_file(out), lambda file: _join_lines(rejects, file))
    else:
        rejects_file(out).unlink(missing_ok=True)
    match out.suffix:
        case ".parquet":
            replace_file(out, lambda file: _join_tables(parts, file))
        case ".jsonl":
            replace_file(out, lambda file: _join_lines(parts, file))
        case ".npy":
            replace_file(out, lambda file: _join_arrays(parts, file))
        case _:
            replace_file(out, lambda file: _write_table(parts, file, out.suffix, flat))


def _join_lines(parts: list[Path], file: Path) -> None:
    with file.open("wb") as stream:
        for part in parts:
            stream.write(part.read_bytes())


def _join_tables(parts: list[Path], file: Path) -> None:
    with optional("data", "writing Parquet files"):
        import pyarrow
        from pyarrow import parquet

    schema = parquet.read_schema(parts[0]) if parts else pyarrow.schema([])
    with parquet.ParquetWriter(file, schema) as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part))


def _join_arrays(parts: list[Path], file: Path) -> None:
    """Write the arrays of all parts as one, `(rows, width)`, with one of them in memory."""
    shapes = [np.load(part, mmap_mode="r").shape for part in parts] or [(0, 0)]
    shape = (sum(rows for rows, _ in shapes), shapes[0][1])
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for part in parts:
            stream.write(np.load(part).tobytes())


def _rows(parts: list[Path], flat: bool) -> Iterator[dict[str, Any]]:
    """Yield the values of each row by column: texts, numbers, and JSON for what is neither."""
    for part in parts:
        with part.open(encoding="utf-8") as lines:
            for line in lines:
                row: dict[str, Any] = {}
                for name, value in json.loads(line).items():
                    if flat and isinstance(value, dict):
                        row |= {f"{name}.{key}": item for key, item in value.items()}
                    elif isinstance(value, dict | list):
                        row[name] = json.dumps(value, ensure_ascii=False)
                    else:
                        row[name] = value
                yield row


def _write_table(parts: list[Path], file: Path, suffix: str, flat: bool) -> None:
    """Write a table; in a .tsv a tab or a line end in a value is a blank, as it has no quotes."""
    names = list(dict.fromkeys(name for row in _rows(parts, flat) for name in row))
    with file.open("w", encoding="utf-8", newline="") as stream:
        if suffix == ".csv":
            table = csv.DictWriter(stream, names, lineterminator="\n")
            if names:
                table.writeheader()
            table.writerows(_rows(parts, flat))
            return
        if names:
            print(*map(_one_field, names), sep="\t", file=stream)
        for row in _rows(parts, flat):
            print(*(_one_field(row.get(name)) for name in names), sep="\t", file=stream)


def _one_field(value: Any) -> str:
    return "" if value is None else " ".join(str(value).splitlines()).replace("\t", " ")
