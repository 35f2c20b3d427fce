"""Sentence vectors of a whole file, and the search for the best layer and pooling.

The search makes one pass of the model: all layers are kept, and every layer is pooled in every
way. Memory does not grow with the number of texts, except for one cosine for each pair and cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from bothways.core.atomic_files import check_output_path, replace_file
from bothways.core.batch import Batch
from bothways.core.errors import ConfigError, optional
from bothways.hub.sentence_transformers import Pooling
from bothways.prediction.engine import PredictConfig, PredictionCounts, predict
from bothways.tasks.base import EncodedExample, Output, TaskModel
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding.sts import Agreement, Correlation, gold_score
from bothways.tasks.sentence_embedding.task import (
    Embedder,
    SentenceEmbeddingTask,
    pool,
    skipped,
)
from bothways.tasks.text_examples import TextExample

POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "max")
WINDOW = 256
"""Maximum number of pairs whose layers are held at once."""
GROUP = 1024
"""Number of vectors in a row group of a Parquet file."""

ONE = 1 - 1e-6
"""The mean cosine from which all texts have the same vector, such as [CLS] in the embeddings."""

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Cell:
    """The result of one layer, pooled in one way. Layer 0 is the embeddings."""

    layer: int
    pooling: Pooling
    correlation: Correlation


@dataclass(frozen=True)
class Sweep:
    """Every layer with every pooling, layer by layer, and the number of pairs."""

    cells: tuple[Cell, ...]
    pairs: int

    @property
    def best(self) -> Cell:
        """The cell with the highest Spearman correlation, the first of equals.

        Cells where all texts have the same vector come last.
        """
        return max(
            self.cells,
            key=lambda cell: (cell.correlation.anisotropy < ONE, cell.correlation.spearman),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `bothways evaluate --json` writes them."""
        rows = [{"layer": c.layer, "pooling": c.pooling, **vars(c.correlation)} for c in self.cells]
        return {"pairs": self.pairs, "best": rows[self.cells.index(self.best)], "cells": rows}


class _AllLayers(TaskModel[TextExample, VectorPrediction]):
    """A task that returns the vectors of all layers and poolings, cut to the task's components."""

    task: SentenceEmbeddingTask

    def outputs(self, batch: Batch) -> list[Output]:
        """Return the vectors of each sequence `(cells, components)`."""
        layers, skip = self.model.encoder(batch, keep_layers=True).layers, skipped(batch)
        cells = [
            pool(x, batch.layout, pooling, skip)[:, : self.task.components]
            for x in layers
            for pooling in POOLINGS
        ]
        return list(torch.stack(cells, dim=1).cpu().numpy())

    def decode(
        self, example: TextExample, encoded: EncodedExample, outputs: Many[Output]
    ) -> VectorPrediction:
        """Return the vectors of an example's texts `(texts, cells, components)`."""
        return VectorPrediction(np.stack(outputs))


def sweep(
    task_model: Embedder,
    examples: Iterable[TextExample],
    counts: PredictionCounts | None = None,
) -> Sweep:
    """Measure in one pass how well cosines agree with the scores of pairs.

    Every layer and pooling is a cell; arguments are those of `predict`.

    Raises:
        DataError: an example is a single text, a score is not a number, or there are fewer than
            two pairs.
    """
    all_layers = _AllLayers(
        task_model.task, task_model.model, task_model.tokenizer, (), task_model.length
    ).train(task_model.training)
    agreement = Agreement()
    for example, prediction in predict(all_layers, examples, PredictConfig(window=WINDOW), counts):
        agreement.add(gold_score(example), prediction.vectors)
    cell_names = itertools.product(range(task_model.model.config.depth + 1), POOLINGS)
    cells = tuple(
        Cell(*cell_name, value)
        for cell_name, value in zip(cell_names, agreement.cells(), strict=True)
    )
    return Sweep(cells, len(agreement.scores))


def check_out(path: Path, source: str) -> None:
    """Check a file that vectors are to be written to.

    Raises:
        ConfigError: the suffix is not supported.
        ResourceError: see `check_output_path`.
    """
    check_output_path(path, [source])
    if path.suffix not in (".npy", ".parquet", ".jsonl"):
        message = f"{path.name!r} must end in .npy, .parquet or .jsonl"
        raise ConfigError(message, where="out", fix="Choose one by its suffix.")


def write_vectors(path: Path, vectors: Iterable[Vector], width: int) -> None:
    """Write one vector per text into a .npy `(texts, width)`, .parquet or .jsonl file.

    Vectors are written one by one; the file appears when it is complete.

    Raises:
        ResourceError: the disk is full, or permission is denied.
    """
    write = {".npy": _write_npy, ".parquet": _write_parquet, ".jsonl": _write_jsonl}[path.suffix]
    replace_file(path, lambda file: write(file, iter(vectors), width))


def _write_npy(file: Path, vectors: Iterator[Vector], width: int) -> None:
    """Write the vectors, then the header with the number of rows, for which NumPy leaves room."""
    with file.open("wb") as stream:
        _npy_header(stream, 0, width)
        count = 0
        for vector in vectors:
            stream.write(vector.astype("<f4").tobytes())
            count += 1
        stream.seek(0)
        _npy_header(stream, count, width)


def _npy_header(stream: BinaryIO, count: int, width: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(stream, header)


def _write_parquet(file: Path, vectors: Iterator[Vector], width: int) -> None:
    with optional("data", "writing Parquet files"):
        import pyarrow
        from pyarrow import parquet

    schema = pyarrow.schema([("vector", pyarrow.list_(pyarrow.float32(), width))])
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(itertools.islice(vectors, GROUP)):
            column = pyarrow.FixedSizeListArray.from_arrays(
                pyarrow.array(np.concatenate(group)), width
            )
            writer.write_table(pyarrow.table([column], schema=schema))


def _write_jsonl(file: Path, vectors: Iterator[Vector], width: int) -> None:
    import json

    with file.open("w", encoding="utf8", newline="\n") as stream:
        for vector in vectors:
            stream.write(json.dumps(VectorPrediction(vector[None]).to_json()) + "\n")
