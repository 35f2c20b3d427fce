"""Sentence vectors: a text's token vectors pooled into one (Devlin et al. 2018, section 5.3).

One layer or several are combined token by token; then the tokens of a text are pooled: their mean,
their maximum, [CLS] … Dense layers of a sentence-transformers folder project the result. Pairs of
texts give two vectors and their cosine, which can be scored against a gold similarity.

The mean and the maximum include [CLS] and [SEP], as in sentence-transformers. They are computed
over the segments of the packed batch, so there is no padding to mask. The best layer and pooling
depend on the model: `prediction.analysis.evaluation` measures all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.advice import call
from bothways.core.batch import Batch
from bothways.core.config import reader as configs
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError
from bothways.core.layout import Layout
from bothways.core.targets import Targets
from bothways.hub import sentence_transformers
from bothways.hub.model_card import Card
from bothways.model.encoder import Hidden
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.tasks.base import Direction, EncodedExample, Metrics, Output, TaskModel
from bothways.tasks.metrics import TINY
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding.sts import Agreement, gold_score
from bothways.tasks.text_encoding import EncodedTexts
from bothways.tasks.text_examples import NOT_NAMED, TextColumns, TextExample
from bothways.tasks.text_task import PromptedTask
from bothways.text.tokenizer import Tokenizer

STS = TextColumns("sentence1", "sentence2", "score")
"""The columns of the Semantic Textual Similarity benchmark in GLUE."""

LAST = "The last one is layers=[-1]."


@dataclass(frozen=True)
class PromptedText(TextExample):
    """A text with a prompt of its own.

    Attributes:
        prompt: put before the text in place of the task's default one; "" for none.
    """

    prompt: str = ""


@dataclass(frozen=True)
class PromptTokens(Targets):
    """The tokens of a sequence that its vector is not made of `(1)`: those up to the prompt."""

    count: NDArray[np.int64] | Tensor

    def without_weight(self) -> PromptTokens:
        """Return the same: there is no loss."""
        return self


class Embedder(TaskModel[TextExample, VectorPrediction]):
    """An embedding task with any model, whose heads are not used; see `TaskModel`."""

    task: SentenceEmbeddingTask

    def outputs(self, batch: Batch) -> list[Output]:
        """Return the vector of each sequence `(task.width)`."""
        task = self.task
        skip = skipped(batch)
        only = one_token(batch.layout, task.pooling, skip)
        x = self._tokens(self.model.encoder(batch, keep_layers=task.layers != (-1,), only=only))
        vectors = pool(x, batch.layout, task.pooling, skip)
        if (projection := projection_of(self.model)) is not None:
            vectors = projection(vectors)
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

    def decode(
        self, example: TextExample, encoded: EncodedExample, outputs: Many[Output]
    ) -> VectorPrediction:
        """Return one vector for each text; those of several windows are pooled."""
        if not isinstance(encoded, EncodedTexts) or len(outputs) == len(encoded.windows):
            return VectorPrediction(np.stack(outputs))
        sizes = encoded.by_text([len(sequence) for sequence in encoded.sequences])
        vectors_of_texts = zip(encoded.by_text(outputs), sizes, strict=True)
        return VectorPrediction(np.stack([self._joined(*vectors) for vectors in vectors_of_texts]))

    def _joined(self, outputs: Many[Output], sizes: Many[int]) -> NDArray[np.float32]:
        """Return the vector of a text from those of its windows, weighted by their tokens."""
        if len(outputs) == 1:
            return outputs[0]
        rows = np.stack(outputs).astype(np.float64)
        mean = "max" not in self.task.pooling
        vector = np.average(rows, axis=0, weights=sizes) if mean else rows.max(0)
        scale = max(float(np.linalg.norm(vector)), TINY) if self.task.normalised else 1.0
        result: NDArray[np.float32] = (vector / scale).astype(np.float32)
        return result


@dataclass(frozen=True)
class SentenceEmbeddingTask(PromptedTask[VectorPrediction]):
    """One vector for a text.

    Attributes:
        pooling: how token vectors become one, by the names of sentence-transformers: that of [CLS]
            ("cls") or of the last token ("lasttoken"), the mean, the sum by the root of the length
            ("mean_sqrt_len_tokens"), the mean weighted by the position from 1 ("weightedmean"), or
            the maximum by component ("max"). Of several ways the vectors are joined.
        layers: the layers that are read: 0 for the embeddings, 1 for the first block, −1 for the
            last one. (−4, −3, −2, −1) with "concat" is the best choice for frozen features in the
            paper (table 7).
        combine: how several layers become one vector for a token, before pooling.
        normalised: whether vectors are scaled to length 1.
        components: number of components to keep, after scaling: the first ones, in which models
            trained for it hold the most information (Kusupati et al. 2022). None for all.
        include_prompt: whether the tokens of a prompt are pooled; without them, [CLS] is dropped,
            too, and its position is the first token's after the prompt.
    """

    aliases: ClassVar[Many[str]] = (
        "embedding",
        "embeddings",
        "feature-extraction",
        "sentence-similarity",
        "similarity",
    )
    model_class: ClassVar[type[Embedder]] = Embedder
    metric: ClassVar[str] = "spearman"
    metrics: ClassVar[Mapping[str, Direction]] = {"spearman": "highest", "pearson": "highest"}

    pooling: sentence_transformers.Pooling | tuple[sentence_transformers.Pooling, ...] = "mean"
    layers: tuple[int, ...] = (-1,)
    combine: Literal["mean", "concat"] = "mean"
    normalised: bool = False
    components: int | None = None
    include_prompt: bool = True
    kind: Literal["embed"] = "embed"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, components=self.components)
        if not self.layers:
            raise ConfigError("must name at least one layer", where="layers", fix=LAST)
        if not self.pooling:
            message = "must name at least one way of pooling"
            raise ConfigError(message, where="pooling", fix='The usual one is "mean".')

    def usual_columns(self, labelled: bool) -> TextColumns:
        return STS if labelled and self.columns == NOT_NAMED else self.columns

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return ()

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedTexts]:
        """Return [CLS] A [SEP], and sequences of its own for a second text."""
        fit, results = self.fit(length), []
        prompts = [
            e.prompt if isinstance(e, PromptedText) else self.default_prompt for e in examples
        ]
        prompt_lengths = {
            text: len(tokenizer.encode([text])[0]) if text else 0 for text in {*prompts}
        }
        rows = iter(
            tokenizer.encode(
                [p + text for p, e in zip(prompts, examples, strict=True) for text in self.texts(e)]
            )
        )
        for prompt, example in zip(prompts, examples, strict=True):
            count, texts = prompt_lengths[prompt], list[EncodedExample]()
            for ids in [next(rows) for _ in self.texts(example)]:
                sequences, cut = fit.single(ids, tokenizer.template, count)
                if not self.include_prompt:
                    # Without a prompt, [CLS] is pooled, too.
                    skip = count and count + len(tokenizer.template.before)
                    sequences = [
                        dataclasses.replace(
                            sequence,
                            targets={
                                **sequence.targets,
                                "prompt": PromptTokens(
                                    np.array([min(skip, len(sequence) - 1)], dtype=np.int64)
                                ),
                            },
                        )
                        for sequence in sequences
                    ]
                texts.append(EncodedExample(tuple(sequences), len(ids), cut))
            results.append(EncodedTexts.of(texts))
        return results

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
        message = (
            "sentence vectors have no grade for each example, only a correlation with all scores"
        )
        fix = f"Score each model: {call('evaluate', 'MODEL', task='embed')}"
        raise ConfigError(message, where="task", fix=fix)

    def width(self, model: Model) -> int:
        """Return the number of components of a vector."""
        projection = projection_of(model)
        width = self.pooled_width(model) if projection is None else projection.outputs
        return width if self.components is None else min(width, self.components)

    def pooled_width(self, model: Model) -> int:
        """Return the number of components of a pooled vector."""
        layers = len(self.layers) if self.combine == "concat" else 1
        poolings = 1 if isinstance(self.pooling, str) else len(self.pooling)
        return model.config.width * layers * poolings

    def bind(self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int) -> Embedder:
        """Bind the task to any model.

        Raises:
            ConfigError: a layer that the model does not have, or pooled vectors that its Dense
                layers do not read.
        """
        projection, width = projection_of(model), self.pooled_width(model)
        if projection is not None and projection.inputs != width:
            message = f"gives {width} components, and the folder's Dense layer reads "
            message += f"{projection.inputs}"
            raise ConfigError(
                message, where="pooling", fix="Leave out pooling, layers and combine."
            )
        depth = model.config.depth
        unknown_layers = [layer for layer in self.layers if not -depth - 1 <= layer <= depth]
        if unknown_layers:
            allowed = f"0 (the embeddings) to {depth}, or −{depth + 1} to −1"
            message = f"the model has layers {allowed}, not {unknown_layers[0]}"
            raise ConfigError(message, where="layers", fix=LAST)
        return Embedder(self, model, tokenizer, labels, length)


def skipped(batch: Batch) -> Int[Tensor, " sequences"] | None:
    """Return the number of tokens at the start of each sequence that are not pooled, if any."""
    if "prompt" not in batch.targets:
        return None
    return torch.as_tensor(batch.target("prompt", PromptTokens).count)


def pool(
    x: Float[Tensor, "tokens width"],
    layout: Layout,
    pooling: sentence_transformers.Pooling | tuple[sentence_transformers.Pooling, ...],
    skip: Int[Tensor, " sequences"] | None = None,
) -> Float[Tensor, "sequences pooled"]:
    """Return one vector for each sequence of a packed batch, in fp32; `skip` as in `skipped`."""
    if not isinstance(pooling, str):
        return torch.cat([pool(x, layout, mode, skip) for mode in pooling], dim=-1)
    if (token := one_token(layout, pooling, skip)) is not None:
        return x[token].float()
    bounds, weights = layout.cu_seqlens, (layout.positions + 1).to(torch.float32)
    if skip is not None:  # the other tokens keep the weights of their positions
        pooled = layout.positions >= skip[layout.sequence_ids]
        x, weights = x[pooled], weights[pooled]
        bounds = torch.cat([bounds[:1], (bounds.diff() - skip).cumsum(0)])
    reduce = functools.partial(torch.segment_reduce, offsets=bounds, axis=0)
    result: Tensor
    match pooling:
        case "mean_sqrt_len_tokens":
            result = reduce(x.float(), "sum") / bounds.diff()[:, None].sqrt()
        case "weightedmean":
            result = reduce(x.float() * weights[:, None], "sum") / reduce(weights, "sum")[:, None]
        case _:
            result = reduce(x.float(), pooling)
    return result


def one_token(
    layout: Layout,
    pooling: sentence_transformers.Pooling | tuple[sentence_transformers.Pooling, ...],
    skip: Int[Tensor, " sequences"] | None,
) -> Int[Tensor, " sequences"] | None:
    """Return the token whose vector is that of its sequence; None where all are pooled."""
    match pooling:
        case "cls":
            return layout.first_tokens if skip is None else layout.first_tokens + skip
        case "lasttoken":
            return layout.last_tokens
        case _:
            return None


def projection_of(model: Model) -> sentence_transformers.Projection | None:
    """Return the Dense layers of a model that was opened for embedding, if it has any."""
    return (
        cast(sentence_transformers.Projection, model.heads[sentence_transformers.PROJECTION])
        if sentence_transformers.PROJECTION in model.heads
        else None
    )


def sentence_encoder(config: sentence_transformers.SentenceEncoderConfig) -> SentenceEmbeddingTask:
    """Return the task of a folder of sentence-transformers."""
    return SentenceEmbeddingTask(
        pooling=config.pooling,
        normalised=config.normalised,
        components=config.components,
        include_prompt=config.include_prompt,
        prompts=config.prompts,
        prompt_name=config.prompt_name,
    )


def sentence_config(task_model: Embedder) -> sentence_transformers.SentenceEncoderConfig:
    """Return the settings by which sentence-transformers computes the same vectors.

    Raises:
        ConfigError: the task reads other layers than the last one.
    """
    settings = task_model.task
    if settings.layers not in ((-1,), (task_model.model.config.depth,)):
        message = f"other programs pool the last layer, and this task reads {settings.layers}"
        raise ConfigError(message, where="layers", fix=LAST)
    return sentence_transformers.SentenceEncoderConfig(
        settings.pooling,
        settings.normalised,
        settings.components,
        task_model.length,
        *settings.named_prompts,
        settings.include_prompt,
    )


def save_sentence_encoder(
    folder: str | Path, task_model: Embedder, card: Card | None = None
) -> None:
    """Write a folder from which sentence-transformers computes the same vectors.

    Raises:
        ConfigError: as `sentence_config`.
        FolderError, ResourceError: as `save_model`.
    """
    extra = {"task": configs.to_dict(task_model.task), "length": task_model.length}
    config = sentence_config(task_model)
    sentence_transformers.save_sentence_folder(
        folder, task_model.model, task_model.tokenizer, config, card=card, extra=extra
    )
