"""Sentence vectors: the vectors of a text's tokens made into one (Devlin et al. 2018, section 5.3, the feature-based approach).

Idea: take one layer or several, join them token by token, then pool the tokens of a text by their mean, their maximum, or as
[CLS]. Data it reads: texts; pairs give two vectors and their cosine, which can be scored against a gold similarity.

Notable choices. The mean and the maximum run over all tokens, [CLS] and [SEP] included, as in sentence-transformers. They are
taken over the segments of the packed batch, so there is no padding that would have to be masked. Which layer and which pooling
are best is a matter of the model: `recipes.embedding` measures all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.batch import Batch
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError
from bothways.core.layout import Layout
from bothways.core.sequence import Ids
from bothways.model.encoder import Hidden
from bothways.model.head_config import Head
from bothways.model.model import Model
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding.sts import Agreement, gold
from bothways.tasks.task import Direction, Metrics, Reading
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.tasks.text_examples import (
    NOT_NAMED,
    TextColumns,
    TextExample,
    example_of,
    open_examples,
)
from bothways.tasks.zero_shot import ZeroShotTask
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer

Pooling = Literal["cls", "mean", "max"]
STS = TextColumns("sentence1", "sentence2", "score")
"""The columns of the Semantic Textual Similarity benchmark, as GLUE has it."""


@dataclass(frozen=True)
class SentenceEmbeddingTask(ZeroShotTask[VectorPrediction]):
    """One vector for a text.

    Attributes:
        columns: where texts are, and scores.
        pooling: how the vectors of the tokens become one: that of [CLS], the mean, or the maximum of each component.
        layers: which are read: 0 the embeddings, 1 the first block, −1 the last one. (−4, −3, −2, −1) with "concat" is what the
            paper found best for frozen features (table 7).
        combine: how several layers become one vector for a token, before pooling.
        normalised: whether vectors are scaled to length 1.
        components: how many of a vector are kept at most, the first ones, after it was scaled; models trained for that put the
            most into these (Kusupati et al. 2022). None means all.
    """

    metric: ClassVar[str] = "spearman"

    columns: TextColumns = NOT_NAMED
    pooling: Pooling = "mean"
    layers: tuple[int, ...] = (-1,)
    combine: Literal["mean", "concat"] = "mean"
    normalised: bool = False
    components: int | None = None
    kind: Literal["embed"] = "embed"

    def __post_init__(self) -> None:
        require_at_least(1, components=self.components)
        if not self.layers:
            raise ConfigError(
                "must name at least one layer", where="layers", fix="The last one is layers=[-1]."
            )

    def read(
        self, source: str, asked: TextColumns | None = None, *, labelled: bool = True
    ) -> Reading[TextExample]:
        """As `Definition.read`; texts or pairs, and with `labelled` the score of each pair. STS-B's columns are known."""
        usual = STS if labelled and self.columns == NOT_NAMED else self.columns
        table, chosen = open_examples(source, asked or NOT_NAMED, usual=usual, labelled=labelled)
        return Reading(
            self.with_columns(chosen), (example_of(row, chosen) for row in table.rows), table.share
        )

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """None."""
        return ()

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Correlations."""
        return {"spearman": "highest", "pearson": "highest"}

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """[CLS] A [SEP], and a sequence of its own for a second text; the end of a long text is cut."""
        texts = tokenizer.encode([text for example in examples for text in self.texts(example)])
        rows = iter(texts)
        room = length - tokenizer.template.single
        return [
            _input([next(rows) for _ in self.texts(example)], tokenizer, room)
            for example in examples
        ]

    def width(self, model: Model) -> int:
        """Components of a vector."""
        width = model.config.width * (len(self.layers) if self.combine == "concat" else 1)
        return width if self.components is None else min(width, self.components)

    def task(self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int) -> Embedder:
        """With any model. ConfigError: a layer that it does not have."""
        depth = model.config.depth
        wrong = [layer for layer in self.layers if not -depth - 1 <= layer <= depth]
        if wrong:
            what = f"the model has layers 0 (the embeddings) to {depth}, or −{depth + 1} to −1, not {wrong[0]}"
            raise ConfigError(what, where="layers", fix="The last one is layers=[-1].")
        return Embedder(self, model, tokenizer, labels, length)


def _input(texts: Many[Ids], tokenizer: Tokenizer, room: int) -> EncodedExample:
    sequences = tuple(assemble(ids[:room], None, tokenizer.template) for ids in texts)
    tokens, kept = sum(map(len, texts)), sum(min(len(ids), room) for ids in texts)
    return EncodedExample(sequences, tokens, tokens - kept)


def pool(
    x: Float[Tensor, "tokens width"], layout: Layout, pooling: Pooling
) -> Float[Tensor, "sequences width"]:
    """The tokens of each sequence of a packed batch as one vector, in fp32."""
    match pooling:
        case "cls":
            return x[layout.first_tokens].float()
        case "mean" | "max":
            result: Tensor = torch.segment_reduce(
                x.float(), pooling, offsets=layout.cu_seqlens, axis=0
            )
            return result
        case _:
            assert_never(pooling)


class Embedder(TaskLearner[TextExample, VectorPrediction]):
    """A model as a task: its heads, if it has any, are left alone."""

    definition: SentenceEmbeddingTask

    def outputs(self, batch: Batch) -> list[Output]:
        """The vector of each sequence, of as many components as the definition's `width` says."""
        chosen = self.definition
        only = batch.layout.first_tokens if chosen.pooling == "cls" else None
        x = self._tokens(self.model.encoder(batch, keep_layers=chosen.layers != (-1,), only=only))
        vectors = pool(x, batch.layout, chosen.pooling)
        if chosen.normalised:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return list(vectors[:, : chosen.components].cpu().numpy())

    def _tokens(self, hidden: Hidden) -> Tensor:
        if not hidden.layers:
            return hidden.last
        layers = [hidden.layers[layer].float() for layer in self.definition.layers]
        match self.definition.combine:
            case "concat":
                return torch.cat(layers, dim=-1)
            case "mean":
                return torch.stack(layers).mean(0)
            case _:
                assert_never(self.definition.combine)

    def decode(self, example: TextExample, outputs: Many[Output]) -> VectorPrediction:
        """The vectors of its texts."""
        return VectorPrediction(np.stack(outputs))

    def score(self, results: Iterable[tuple[TextExample, VectorPrediction]]) -> Metrics:
        """How well the cosine of a pair agrees with its score: "pearson" and "spearman"; and "anisotropy", the mean cosine
        of any two of the texts. Memory grows by two numbers a pair.

        Raises:
            DataError: a single text, a score that is no number, fewer than two pairs.
        """
        agreement = Agreement()
        for example, prediction in results:
            agreement.add(gold(example), prediction.vectors[:, None, :])
        (cell,) = agreement.cells()
        return {name: value for name, value in dataclasses.asdict(cell).items()}

    def grade(self, example: TextExample, prediction: VectorPrediction) -> float:
        """Raises ConfigError: one pair has no right cosine; scores are ranked all together."""
        what = "sentence vectors have no grade for each example, only a correlation with all scores"
        raise ConfigError(
            what, where="task", fix="Score each model: bothways evaluate --task embed."
        )
