"""Sentence vectors: a text's token vectors pooled into one (Devlin et al. 2018, section 5.3).

One layer or several are combined token by token; then the tokens of a text are pooled: their mean,
their maximum, or [CLS]. Pairs of texts give two vectors and their cosine, which can be scored
against a gold similarity.

The mean and the maximum include [CLS] and [SEP], as in sentence-transformers. They are computed
over the segments of the packed batch, so there is no padding to mask. The best layer and pooling
depend on the model: `prediction.layer_sweep` measures all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.batch import Batch
from bothways.core.config import reader as configs
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, FolderError
from bothways.core.layout import Layout
from bothways.core.sequence import Sequence
from bothways.hub.model_card import Card
from bothways.hub.sentence_transformers import (
    SentenceEncoderConfig,
    read_sentence_config,
    save_sentence_folder,
)
from bothways.model.encoder import Hidden
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.tasks.base import Direction, EncodedExample, Metrics, Output, TaskLearner
from bothways.tasks.metrics import TINY
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding.sts import Agreement, gold_score
from bothways.tasks.text_examples import NOT_NAMED, TextColumns, TextExample
from bothways.tasks.text_task import LongTextTask
from bothways.text.tokenizer import Tokenizer

Pooling = Literal["cls", "mean", "max"]
STS = TextColumns("sentence1", "sentence2", "score")
"""The columns of the Semantic Textual Similarity benchmark in GLUE."""

LAST = "The last one is layers=[-1]."


@dataclass(frozen=True)
class EncodedTexts(EncodedExample):
    """The sequences of one text or two.

    Attributes:
        windows: number of sequences of each text.
    """

    windows: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class SentenceEmbeddingTask(LongTextTask[VectorPrediction]):
    """One vector for a text.

    Attributes:
        pooling: how token vectors become one: that of [CLS], the mean, or the maximum by component.
        layers: the layers that are read: 0 for the embeddings, 1 for the first block, −1 for the
            last one. (−4, −3, −2, −1) with "concat" is the best choice for frozen features in the
            paper (table 7).
        combine: how several layers become one vector for a token, before pooling.
        normalised: whether vectors are scaled to length 1.
        components: number of components to keep, after scaling: the first ones, in which models
            trained for it hold the most information (Kusupati et al. 2022). None for all.
    """

    metric: ClassVar[str] = "spearman"

    pooling: Pooling = "mean"
    layers: tuple[int, ...] = (-1,)
    combine: Literal["mean", "concat"] = "mean"
    normalised: bool = False
    components: int | None = None
    kind: Literal["embed"] = "embed"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, components=self.components)
        if not self.layers:
            raise ConfigError("must name at least one layer", where="layers", fix=LAST)

    def usual_columns(self, labelled: bool) -> TextColumns:
        """Return the columns to read where none are asked for."""
        return STS if labelled and self.columns == NOT_NAMED else self.columns

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Return no head: the encoder alone is used."""
        return ()

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Return the correlations with gold scores."""
        return {"spearman": "highest", "pearson": "highest"}

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedTexts]:
        """Return [CLS] A [SEP], and sequences of its own for a second text."""
        rows = iter(tokenizer.encode([text for e in examples for text in self.texts(e)]))
        fit, results = self.fit(length), []
        for example in examples:
            texts = [next(rows) for _ in self.texts(example)]
            fitted = [fit.single(ids, tokenizer.template) for ids in texts]
            results.append(
                EncodedTexts(
                    tuple(sequence for parts, _ in fitted for sequence in parts),
                    sum(map(len, texts)),
                    sum(cut for _, cut in fitted),
                    tuple(len(parts) for parts, _ in fitted),
                )
            )
        return results

    def decode(
        self,
        example: TextExample,
        encoded: EncodedExample,
        outputs: Many[Output],
        tokenizer: Tokenizer,
        labels: Many[str],
    ) -> VectorPrediction:
        """Return one vector for each text; those of several windows are pooled."""
        if not isinstance(encoded, EncodedTexts) or len(outputs) == len(encoded.windows):
            return VectorPrediction(np.stack(outputs))
        vectors, start = [], 0
        for count in encoded.windows:
            part = slice(start, start + count)
            vectors.append(self._joined(outputs[part], encoded.sequences[part]))
            start += count
        return VectorPrediction(np.stack(vectors))

    def _joined(self, outputs: Many[Output], windows: Many[Sequence]) -> NDArray[np.float32]:
        """Return the vector of a text from those of its windows, weighted by their tokens."""
        if len(outputs) == 1:
            return outputs[0]
        rows = np.stack(outputs).astype(np.float64)
        if self.pooling == "max":
            vector = rows.max(0)
        else:
            vector = np.average(rows, axis=0, weights=list(map(len, windows)))
        scale = max(float(np.linalg.norm(vector)), TINY) if self.normalised else 1.0
        result: NDArray[np.float32] = (vector / scale).astype(np.float32)
        return result

    def score(
        self, results: Iterable[tuple[TextExample, VectorPrediction]], labels: Many[str]
    ) -> Metrics:
        """Return the correlation of cosines with scores, and "anisotropy", the mean cosine.

        Memory: two numbers a pair.

        Raises:
            DataError: an example has one text or no numeric score; fewer than two pairs.
        """
        agreement = Agreement()
        for example, prediction in results:
            agreement.add(gold_score(example), prediction.vectors[:, None, :])
        (cell,) = agreement.cells()
        return dataclasses.asdict(cell)

    def grade(self, example: TextExample, prediction: VectorPrediction, labels: Many[str]) -> float:
        """Raise a ConfigError: correlation is not defined for one pair."""
        what = "sentence vectors have no grade for each example, only a correlation with all scores"
        fix = "Score each model: bothways evaluate --task embed."
        raise ConfigError(what, where="task", fix=fix)

    def width(self, model: Model) -> int:
        """Return the number of components of a vector."""
        width = model.config.width * (len(self.layers) if self.combine == "concat" else 1)
        return width if self.components is None else min(width, self.components)

    def learner(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> Embedder:
        """Bind the task to any model; ConfigError for a layer that it does not have."""
        depth = model.config.depth
        wrong = [layer for layer in self.layers if not -depth - 1 <= layer <= depth]
        if wrong:
            known = f"0 (the embeddings) to {depth}, or −{depth + 1} to −1"
            what = f"the model has layers {known}, not {wrong[0]}"
            raise ConfigError(what, where="layers", fix=LAST)
        return Embedder(self, model, tokenizer, labels, length)


def pool(
    x: Float[Tensor, "tokens width"], layout: Layout, pooling: Pooling
) -> Float[Tensor, "sequences width"]:
    """Return one vector for each sequence of a packed batch, in fp32."""
    match pooling:
        case "cls":
            return x[layout.first_tokens].float()
        case "mean" | "max":
            bounds = layout.cu_seqlens
            result: Tensor = torch.segment_reduce(x.float(), pooling, offsets=bounds, axis=0)
            return result
        case _:
            assert_never(pooling)


class Embedder(TaskLearner[TextExample, VectorPrediction]):
    """An embedding task with any model, whose heads are not used; see `TaskLearner`."""

    task: SentenceEmbeddingTask

    def outputs(self, batch: Batch) -> list[Output]:
        """Return the vector of each sequence `(task.width)`."""
        task = self.task
        only = batch.layout.first_tokens if task.pooling == "cls" else None
        x = self._tokens(self.model.encoder(batch, keep_layers=task.layers != (-1,), only=only))
        vectors = pool(x, batch.layout, task.pooling)
        if task.normalised:
            # As torch.nn.functional.normalize, in three operations instead of five.
            norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
            vectors = vectors / norms.clamp_min(1e-12)
        return list(vectors[:, : task.components].cpu().numpy())

    def _tokens(self, hidden: Hidden) -> Tensor:
        if not hidden.layers:
            return hidden.last
        layers = [hidden.layers[layer].float() for layer in self.task.layers]
        match self.task.combine:
            case "concat":
                return torch.cat(layers, dim=-1)
            case "mean":
                return torch.stack(layers).mean(0)
            case _:
                assert_never(self.task.combine)


def read_sentence_encoder(folder: Path, positions: int) -> tuple[SentenceEmbeddingTask, int] | None:
    """Return the task and the longest text in tokens; None without files of sentence-transformers.

    Raises:
        FolderError: as `read_sentence_config`.
    """
    config = read_sentence_config(folder, positions)
    if config is None:
        return None
    task = SentenceEmbeddingTask(
        pooling=config.pooling, normalised=config.normalised, components=config.components
    )
    return task, config.length


def save_sentence_encoder(folder: str | Path, task: Embedder, card: Card | None = None) -> None:
    """Write a folder from which sentence-transformers computes the same vectors.

    Raises:
        FolderError: sentence-transformers cannot compute these vectors; else as `save_model`.
        ResourceError: as `save_model`.
    """
    settings = task.task
    if settings.layers not in ((-1,), (task.model.config.depth,)):
        what = f"sentence-transformers pools the last layer, and this task reads {settings.layers}"
        raise FolderError(what, where=folder, fix="Set layers=[-1].")
    config = SentenceEncoderConfig(
        settings.pooling, settings.normalised, settings.components, task.length
    )
    extra = {"task": configs.to_dict(settings), "length": task.length}
    save_sentence_folder(folder, task.model, task.tokenizer, config, card=card, extra=extra)
