"""The targets of the fuzzers: data files, model folders, checkpoints, killed processes."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bothways.core.files import file_digest
from fuzz.cases import Case, Workshop, bothways, damage_file


def data(workshop: Workshop) -> Iterator[Case]:
    """Damaged files of documents and of rows in every format."""
    rows = [{"text": workshop.sentence(), "label": "yes"} for _ in range(8)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    files = {
        "rows.jsonl": lines.encode(),
        "rows.json": json.dumps(rows).encode(),
        "rows.csv": (
            "text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in rows)
        ).encode(),
        "rows.tsv": (
            "text\tlabel\n" + "".join("\t".join(r.values()) + "\n" for r in rows)
        ).encode(),
        "rows.txt": "".join(row["text"] + "\n" for row in rows).encode(),
        "rows.parquet": _parquet(rows),
    }
    classifier, tokenizer = workshop.classifier, workshop.tokenizer
    while True:
        for file, content in files.items():
            name, damaged = file, workshop.damage(content)
            if file != "rows.parquet":
                name, damaged = workshop.compressed(file, damaged)
                if workshop.rng.random() < 0.3:
                    damaged = workshop.damage(damaged)
            path = workshop.write(f"data/{name}", damaged)
            yield Case(f"predict {name}", bothways("predict", classifier, path))
            yield Case(f"evaluate {name}", bothways("evaluate", classifier, path))
            inspect = ("tokenizer", "report", path, "--tokenizer", tokenizer)
            yield Case(f"documents of {name}", bothways(*inspect))


def _parquet(rows: list[dict[str, str]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def folders(workshop: Workshop) -> Iterator[Case]:
    """Model folders and corpora of which one file is damaged."""
    texts = workshop.write("texts.txt", b"a good film\nbad rain\n")
    sources = {"model": workshop.classifier, "corpus": workshop.corpus}
    while True:
        for kind, source in sources.items():
            folder = workshop.copy(source, f"damaged-{kind}")
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            chosen = files[int(workshop.rng.integers(len(files)))]
            damage_file(workshop, chosen)
            name = f"{kind} with damaged {chosen.relative_to(folder)}"
            if kind == "model":
                yield Case(name, bothways("predict", folder, texts))
                yield Case(name, bothways("describe", folder))
            else:
                yield Case(name, bothways("corpus", "inspect", folder))


def checkpoints(workshop: Workshop) -> Iterator[Case]:
    """Yield runs that resume after one file of them was damaged."""
    begun = workshop.folder / "begun"
    workshop.pretrain(begun, 3)()
    while True:
        folder = workshop.copy(begun, "tampered")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        chosen = files[int(workshop.rng.integers(len(files)))]
        damage_file(workshop, chosen)
        name = f"resume with damaged {chosen.relative_to(folder)}"
        yield Case(name, workshop.pretrain(folder, 5, "--resume"))


def kills(workshop: Workshop) -> Iterator[Case]:
    """Yield runs that are killed at random times; they end with the weights of a whole one."""
    whole = workshop.folder / "whole"
    workshop.pretrain(whole, 8)()
    wanted = file_digest(whole / "model" / "model.safetensors")
    while True:
        out = workshop.folder / f"killed-{workshop.rng.integers(2**31)}"
        times = workshop.rng.uniform(2.0, 6.0, 2).tolist()
        run = functools.partial(_pretrain_with_kills, workshop, out, times, wanted)
        yield Case(f"kill after {times} s", run)


def _pretrain_with_kills(workshop: Workshop, out: Path, times: list[float], wanted: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for seconds in times:
        words = workshop.pretrain_words(out, 8, *(["--resume"] if out.exists() else []))
        command = [sys.executable, "-m", "bothways", *words]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(seconds)
        process.kill()
        process.wait()
    if not (out / "model").exists():
        workshop.pretrain(out, 8, *(["--resume"] if out.exists() else []))()
    found = file_digest(out / "model" / "model.safetensors")
    assert found == wanted, f"other weights after kills: {found} instead of {wanted}"


TARGETS: Mapping[str, Callable[[Workshop], Iterator[Case]]] = {
    "data": data, "folders": folders, "checkpoints": checkpoints, "kills": kills,
}  # fmt: skip
