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
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch, Layout, Targets, onto
from bothways.core.config import reader as configs
from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError, DataError, Finding, call, setting
from bothways.core.source import Sequence
from bothways.core.training_module import VectorModule
from bothways.hub import sentence_transformers
from bothways.hub.model_card import Card
from bothways.hub.static_embedding import StaticEncoder
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.tasks import base
from bothways.tasks.columns import asked_columns, number_of
from bothways.tasks.metrics import RANKING, TINY
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding import losses
from bothways.tasks.sentence_embedding.examples import (
    COLUMNS,
    EmbedColumns,
    VectorExample,
    check_vector_examples,
    graded_examples,
    grades_file,
    vector_example,
)
from bothways.tasks.sentence_embedding.vectors import Agreement, gold_score, retrieval
from bothways.tasks.text_task import PromptedTask, TextColumns, TextExample, together
from bothways.text.tokenizer import Tokenizer

STS = EmbedColumns("sentence1", "sentence2", "score")
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


class Embedder(VectorModule, base.TaskModel[TextExample, VectorPrediction]):
    """An embedding task with any model, whose heads are not used; see `TaskModel`."""

    task: SentenceEmbeddingTask
    loss_name: ClassVar[str] = "vectors"

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of examples, by their anchors."""
        return {self.loss_name: float(batch.target("texts", losses.TextTargets).anchors.numel())}

    def text_values(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the role, the key and the score of each text; see `TextTargets`."""
        values = vars(batch.target("texts", losses.TextTargets))
        return {name: torch.as_tensor(value) for name, value in values.items()}

    def compare(
        self, vectors: Float[Tensor, "texts width"], values: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the loss of the task over all texts but the fillers."""
        valid = (values["roles"] != losses.FILLER).nonzero()[:, 0]
        known = {name: value[valid] for name, value in values.items()}
        move = onto(vectors.device)
        texts = losses.TextTargets(
            known.pop("roles"), **{name: move(value) for name, value in known.items()}
        )
        loss, task = self.task.loss or losses.InBatchSoftmax(), self.task
        total = losses.at_widths(loss, vectors[move(valid)], texts, task.widths, task.width_weights)
        return {self.loss_name: total}

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return the vector of each sequence `(task.width)`."""
        return list(self(batch)[:, : self.task.components].cpu().numpy())

    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]  # vectors, as VectorModule
        """Return the vector of each sequence, all components of it."""
        task, skip, encoder = self.task, skipped(batch), self.model.encoder
        if isinstance(encoder, StaticEncoder) and self.reads_mean and skip is None:
            return self.finished(encoder.mean(batch.ids, batch.layout.cu_seqlens[:-1]))
        only = one_token(batch.layout, task.pooling, skip)
        hidden = encoder(batch, keep_layers=task.layers != (-1,), only=only)
        x = hidden.last
        if hidden.layers:
            layers = [hidden.layers[layer].float() for layer in task.layers]
            concatenated = task.combine == "concat"
            x = torch.cat(layers, dim=-1) if concatenated else torch.stack(layers).mean(0)
        return self.finished(pool(x, batch.layout, task.pooling, skip))

    @property
    def reads_mean(self) -> bool:
        """True if the vector is the mean of the last layer."""
        return (self.task.pooling, self.task.layers) == ("mean", (-1,))

    def finished(self, vectors: Float[Tensor, "texts pooled"]) -> Float[Tensor, "texts width"]:
        """Return pooled vectors after the Dense layers, scaled if the task says so."""
        if (projection := projection_of(self.model)) is not None:
            vectors = projection(vectors)
        if self.task.normalised:
            # As torch.nn.functional.normalize, in three operations instead of five.
            norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
            vectors = vectors / norms.clamp_min(1e-12)
        return vectors

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> VectorPrediction:
        """Return one vector for each text; those of several windows are pooled."""
        if not encoded.windows or len(outputs) == len(encoded.windows):
            return VectorPrediction(np.stack(outputs))
        pooling, vectors = self.task.pooling, list[NDArray[np.float32]]()
        ways = (pooling,) if isinstance(pooling, str) else pooling
        width = self.task.pooled_width(self.model) // len(ways)
        if projection_of(self.model) is not None:  # which mixes them: all as by the first way
            width = len(outputs[0])
        for windows in encoded.by_text(outputs):
            if len(windows) == 1:
                vectors.append(windows[0])
                continue
            rows = np.stack(windows).astype(np.float64)
            parts = np.split(rows, range(width, width * len(ways), width), axis=1)
            # All windows of a text have as many tokens: the mean over them is that over windows.
            pooled = zip(ways, parts, strict=True)
            vector = np.concatenate([p.max(0) if way == "max" else p.mean(0) for way, p in pooled])
            scale = max(float(np.linalg.norm(vector)), TINY) if self.task.normalised else 1.0
            vectors.append((vector / scale).astype(np.float32))
        return VectorPrediction(np.stack(vectors))


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
        loss: what is minimised in fine-tuning; None for the usual one of the data's form.
        widths: numbers of components whose vectors are trained together, such as (384, 128, 32):
            the mean of the loss over these, for vectors that may be cut (Kusupati et al. 2022).
        width_weights: the weight of each of `widths` in the mean; none for equal ones.
    """

    column_table = COLUMNS
    aliases = "contrastive embedding embeddings feature-extraction sentence-similarity similarity"
    model_class = Embedder
    metric = "spearman"
    metrics = base.directions("spearman", "pearson", *RANKING)

    columns: EmbedColumns = EmbedColumns()
    pooling: sentence_transformers.Pooling | tuple[sentence_transformers.Pooling, ...] = "mean"
    layers: tuple[int, ...] = (-1,)
    combine: Literal["mean", "concat"] = "mean"
    normalised: bool = False
    components: int | None = None
    include_prompt: bool = True
    loss: losses.VectorLoss | None = None
    widths: tuple[int, ...] = ()
    width_weights: tuple[float, ...] = ()
    kind: Literal["embed"] = "embed"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, components=self.components)
        if not self.layers:
            raise ConfigError("must name at least one layer", where="layers", fix=LAST)
        if not self.pooling:
            message = "must name at least one way of pooling"
            raise ConfigError(message, where="pooling", fix='The usual one is "mean".')
        fix = f"Write {setting('task.widths', '384,128,32')}, for example."
        require_range("[1, inf)", widths=min(self.widths, default=None), fix=fix)
        weights = self.width_weights
        if weights and (len(weights) != len(self.widths) or not min(weights) > 0):
            message = f"must be a number above 0 for each of the {len(self.widths)} widths"
            raise ConfigError(message, where="width_weights", fix="Leave it out for equal ones.")

    @property
    def compares(self) -> bool:
        """True if the loss compares the examples of a step, of which there must be several."""
        return not isinstance(
            self.loss, losses.CosineRegression | losses.MarginMSE | losses.TeacherKL
        )

    def metric_for(self, examples: Many[TextExample]) -> str:
        """Return the metric of pairs with a score, or the one of retrieval."""
        first = examples[0]
        scored = first.text_b is not None and first.label is not None
        return self.metric if scored or not isinstance(first, VectorExample) else "ndcg@10"

    def usual_columns(self, labelled: bool) -> TextColumns:
        return STS if labelled and self.columns == EmbedColumns() else self.columns

    def read(
        self, source: str, columns: TextColumns | None = None, *, labelled: bool = True
    ) -> base.Reading[TextExample]:
        """Open a source as `Task.read`, or the grades of a folder of BEIR's form."""
        if labelled and (grades := grades_file(source)) is not None:
            notes = list[str]()
            if columns is not None and asked_columns(columns):  # as other data of the run has them
                notes.append(f"{grades}: has the fields of BEIR; named columns are not read")
            return base.Reading(self, graded_examples(grades, notes), notes=notes)
        return super().read(source, columns, labelled=labelled)

    def parse(self, row: base.Row, columns: TextColumns, where: str) -> TextExample:
        if isinstance(columns, EmbedColumns) and (columns.text_b or columns.label):
            return vector_example(row, columns, where)
        parsed: TextExample = super().parse(row, columns, where)
        return parsed

    def texts(self, example: TextExample) -> tuple[str, ...]:
        return example.all_texts if isinstance(example, VectorExample) else super().texts(example)

    def stratum(self, example: TextExample) -> Hashable:
        """Return the class of a text, or the score of a pair."""
        if example.text_b is None:
            return example.label
        score = number_of(example.label)
        return score if math.isfinite(score) else None

    def adapted(self, train: Many[TextExample], labels: Many[str] = ()) -> SentenceEmbeddingTask:
        """Return the task with the loss that is usual for the form of its training data.

        Raises:
            DataError: an example without a second text, a label or negatives.
        """
        if self.loss is not None:
            return self
        examples = [example for example in train if isinstance(example, VectorExample)]
        examples = examples or vector_examples(train)
        loss: losses.VectorLoss = losses.InBatchSoftmax()
        if any(example.scores for example in examples):
            loss = losses.TeacherKL()
        elif any(example.text_b is None for example in examples):
            if examples[0].label is None:
                message = "has one text and no class, so there is nothing to learn"
                fix = "Give a column with a text that belongs to it, or with its class."
                raise DataError(message, where=examples[0].where, fix=fix)
            loss = losses.SupervisedContrastive()
        elif any(example.label is not None for example in examples):
            loss = losses.CoSENT()
        return dataclasses.replace(self, loss=loss)

    def check(self, train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
        return check_vector_examples(
            self.loss or losses.InBatchSoftmax(), vector_examples(train), vector_examples(dev)
        )

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return ()

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return [CLS] A [SEP], and sequences of its own for a second text.

        They have targets if all examples can be trained on: those of a batch are of the same names.
        """
        results = []
        trainable = all(isinstance(example, VectorExample) for example in examples)
        prompts = [self._prompts(example) for example in examples]
        prompt_lengths = {
            text: len(tokenizer.encode([text])[0]) if text else 0
            for text in {*itertools.chain.from_iterable(prompts)}
        }
        pairs = list(zip(prompts, examples, strict=True))
        whole = [p + t for used, e in pairs for p, t in zip(used, self.texts(e), strict=True)]
        rows = iter(tokenizer.encode(whole))
        for used, example in pairs:
            texts = list[base.EncodedExample]()
            targets = example.targets() if trainable else None  # type: ignore[attr-defined]
            for number, prompt in enumerate(used):
                ids, count = next(rows), prompt_lengths[prompt]
                sequences, cut = self.single(ids, tokenizer.template, length, count)
                # Without a prompt, [CLS] is pooled, too.
                skip = count and count + len(tokenizer.template.before)
                for at, sequence in enumerate(sequences):
                    added: dict[str, Targets] = {}
                    if targets is not None:
                        added["texts"] = targets[number]
                    if not self.include_prompt:
                        skipped_tokens = np.array([min(skip, len(sequence) - 1)], dtype=np.int64)
                        added["prompt"] = PromptTokens(skipped_tokens)
                    sequences[at] = dataclasses.replace(sequence, targets=added)
                texts.append(base.EncodedExample(tuple(sequences), len(ids), cut))
            results.append(base.EncodedExample.of_texts(texts))
        return results

    def _prompts(self, example: TextExample) -> list[str]:
        """Return the prompt of each text: in training, that for queries or for documents."""
        if isinstance(example, PromptedText):
            return [example.prompt] * len(self.texts(example))
        if not isinstance(example, VectorExample) or example.text_b is None or example.label:
            return [self.default_prompt] * len(self.texts(example))
        documents = [self.role_prompt("document")] * (len(example.all_texts) - 1)
        return [self.role_prompt("query"), *documents]

    def role_prompt(self, role: Literal["query", "document"]) -> str:
        """Return the prompt of queries or documents, by its common names, else the default one."""
        # Models such as E5 are trained with one prompt for queries and another for documents
        names = ("query",) if role == "query" else ("document", "passage", "corpus")
        own = (self.prompts[name] for name in names if name in self.prompts)
        return self.default_prompt if self.prompt is not None else next(own, self.default_prompt)

    def training_sequences(self, encoded: base.EncodedExample) -> tuple[Sequence, ...]:
        """Return a sequence for each positive: the anchor, the positive and the negatives.

        Its texts do not attend to each other. Of a text that is read in windows, the first counts.
        """
        texts = [chunks[0] for chunks in encoded.by_text(encoded.sequences)]
        roles = [int(text.target("texts", losses.TextTargets).roles[0]) for text in texts]
        others = [text for text, role in zip(texts, roles, strict=True) if role == losses.OTHER]
        positives = [
            [text] for text, role in zip(texts, roles, strict=True) if role == losses.POSITIVE
        ]
        return tuple(together([texts[0], *positive, *others]) for positive in positives or [[]])

    def score(
        self, results: base.Results[TextExample, VectorPrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return the correlation of cosines with scores, and "anisotropy", the mean cosine.

        Of texts that belong together, or have a class, it is how well each text finds the others
        of its kind among all texts; see `retrieval`. The first example decides.

        Memory: two numbers a pair; for retrieval the vectors of all texts.

        Raises:
            DataError: an example has one text or no numeric score; fewer than two pairs.
        """
        first = list(itertools.islice(results := iter(results), 1))
        results = itertools.chain(first, results)
        if first and self.metric_for([first[0][0]]) in RANKING:
            return retrieval(results)
        agreement = Agreement()
        for example, prediction in results:
            agreement.add(gold_score(example), prediction.vectors[:, None, :])
        (cell,) = agreement.cells()
        return dataclasses.asdict(cell)

    def grade(self, example: TextExample, prediction: VectorPrediction, labels: Many[str]) -> float:
        """Raise a ConfigError: correlation is not defined for one pair."""
        message = "sentence vectors have no grade for each example, only a correlation"
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
            ConfigError: a layer that the model does not have, pooled vectors that its Dense layers
                do not read, or more of `widths` than components.
        """
        projection, width = projection_of(model), self.pooled_width(model)
        if projection is not None and projection.inputs != width:
            message = f"gives {width} components, and the folder's Dense layer reads "
            fix = "Leave out pooling, layers and combine."
            raise ConfigError(f"{message}{projection.inputs}", where="pooling", fix=fix)
        outputs = width if projection is None else projection.outputs
        if (widest := max(self.widths, default=0)) > outputs:
            message = f"must be at most {outputs}, the components of a vector, not {widest}"
            raise ConfigError(message, where="widths", fix="Leave it out.")
        depth = model.config.depth
        unknown_layers = [layer for layer in self.layers if not -depth - 1 <= layer <= depth]
        if unknown_layers:
            allowed = f"0 (the embeddings) to {depth}, or −{depth + 1} to −1"
            message = f"the model has layers {allowed}, not {unknown_layers[0]}"
            raise ConfigError(message, where="layers", fix=LAST)
        return Embedder(self, model, tokenizer, labels, length)


def vector_examples(examples: Many[TextExample]) -> list[VectorExample]:
    """Return examples as those of training; one without other texts has its label alone."""
    return [
        e if isinstance(e, VectorExample) else VectorExample(e.text, e.text_b, e.label, e.where)
        for e in examples
    ]


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
    if sentence_transformers.PROJECTION not in model.heads:
        return None
    return cast(sentence_transformers.Projection, model.heads[sentence_transformers.PROJECTION])


def sentence_encoder(config: sentence_transformers.SentenceEncoderConfig) -> SentenceEmbeddingTask:
    """Return the task of a folder of sentence-transformers."""
    settings = {name: value for name, value in vars(config).items() if name != "length"}
    return SentenceEmbeddingTask(**settings)


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
    folder: str | Path,
    task_model: Embedder,
    card: Card | None = None,
    record: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a folder from which sentence-transformers computes the same vectors, if transformers
    has a class for the model.

    Args:
        record: what else `bothways.json` holds, such as the settings of a run.

    Raises:
        ConfigError: as `sentence_config`.
        FolderError, ResourceError: as `save_model`.
    """
    extra = {"task": configs.to_dict(task_model.task), "length": task_model.length, **record}
    config = sentence_config(task_model)
    sentence_transformers.save_sentence_folder(
        folder, task_model.model, task_model.tokenizer, config, card=card, extra=extra
    )
