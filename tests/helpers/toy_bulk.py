"""A classifier and files of several kinds, for predictions in parts."""

import json
import random
from pathlib import Path

import pandas
import pyarrow
from pyarrow import parquet

from toy_folder import FILLERS, make_folder, save_classifier


def make_classifier(folder: Path) -> Path:
    """Return the folder of a classifier of two labels, with random weights."""
    return save_classifier(folder / "classifier", make_folder(folder / "bert"))


def make_rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    draw = random.Random(seed)
    return [
        {
            "id": seed * 1000 + number,
            "text": " ".join(draw.choices(FILLERS[:-1], k=draw.randint(1, 20))),
            "source": None if number % 3 else f"s{number}",
        }
        for number in range(count)
    ]


def write_rows(file: Path, rows: list[dict[str, object]]) -> str:
    """Write rows by the suffix of a file; return its name."""
    match file.suffix:
        case ".txt":
            file.write_text("".join(f"{row['text']}\n" for row in rows))
        case ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".tsv" | ".csv" as suffix:
            separator = "," if suffix == ".csv" else "\t"
            pandas.DataFrame(rows).to_csv(file, sep=separator, index=False)
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=10)
    return str(file)
