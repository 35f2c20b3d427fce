"""The search for the layer and the pooling with the best sentence vectors.

The search makes one pass of the model: all layers are kept, and every layer is pooled in every
way. Memory does not grow with the number of texts, except for one cosine for each pair and cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bothways.core.batch import Batch
from bothways.hub.sentence_transformers import Pooling
from bothways.prediction.engine import PredictConfig, PredictionCounts, predict
from bothways.tasks.base import EncodedExample, Output, TaskModel
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding import task as embedding
from bothways.tasks.sentence_embedding.sts import Agreement, Correlation, gold_score
from bothways.tasks.text_examples import TextExample

POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "max")
WINDOW = 256
"""Maximum number of pairs whose layers are held at once."""
ONE = 1 - 1e-6
"""The mean cosine from which all texts have the same vector, such as [CLS] in the embeddings."""


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

    task: embedding.SentenceEmbeddingTask

    def outputs(self, batch: Batch) -> list[Output]:
        """Return the vectors of each sequence `(cells, components)`."""
        layers, skip = self.model.encoder(batch, keep_layers=True).layers, embedding.skipped(batch)
        cells = [
            embedding.pool(x, batch.layout, pooling, skip)[:, : self.task.components]
            for x in layers
            for pooling in POOLINGS
        ]
        return list(torch.stack(cells, dim=1).cpu().numpy())

    def decode(
        self, example: TextExample, encoded: EncodedExample, outputs: Many[Output]
    ) -> VectorPrediction:
        """Return the vectors of an example's texts `(texts, cells, components)`."""
        return VectorPrediction(np.stack(outputs))


def sweep_layers(
    task_model: embedding.Embedder,
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
