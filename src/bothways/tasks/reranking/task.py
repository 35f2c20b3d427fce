"""Reranking: a cross-encoder scores each document of a query (Nogueira and Cho 2019).

Each document is a pair, [CLS] query [SEP] document [SEP], as in regression; the one output is the
logit of the probability that the document is relevant, trained by binary cross-entropy. Of a
document that is read in windows the best one counts (MaxP, Dai and Callan 2019).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.core.targets import LabelTargets
from bothways.hub.sentence_transformers import CrossEncoderConfig, program_files
from bothways.model.heads import Head, LabelHead
from bothways.objectives.losses import binary_cross_entropy
from bothways.tasks import base
from bothways.tasks.columns import (
    asked_columns,
    choose_columns,
    open_columns,
    unused_columns,
)
from bothways.tasks.metrics import negative_log, sigmoid
from bothways.tasks.predictions import RankPrediction
from bothways.tasks.prompted_task import PromptedTask
from bothways.tasks.reranking.examples import (
    HOW,
    NO_RANK_COLUMNS,
    TABLE,
    RankColumns,
    RankExample,
    check_rankings,
    joined_rows,
    rank_example,
)
from bothways.tasks.reranking.metrics import Rankings, ndcg
from bothways.tasks.text_encoding import EncodedTexts, encode_texts, window_weight
from bothways.tasks.text_examples import TextExample
from bothways.tasks.text_task import NumberModel, targets_of
from bothways.text.tokenizer import Tokenizer


class Ranker(NumberModel[RankExample, RankPrediction]):
    """A reranking task with a model whose head "labels" has one output; see `TaskModel`."""

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the binary cross-entropy of the scores."""
        columns = (column[:, None] for column in (scores, targets_of(batch), window_weight(batch)))
        return {"label": binary_cross_entropy(*columns)}


@dataclass(frozen=True)
class RerankingTask(PromptedTask[RankPrediction]):
    """A score for each document of a query. A prompt is put before the query.

    Attributes:
        columns: the columns of queries, documents and labels.
        activation: what a score is: "sigmoid" for the probability, "identity" for the logit.
    """

    aliases: ClassVar[Many[str]] = (
        "cross-encoder",
        "ranking",
        "reranker",
        "reranking",
        "text-ranking",
    )
    model_class: ClassVar[type[Ranker]] = Ranker
    metric: ClassVar[str] = "ndcg@10"
    window: ClassVar[int] = 64

    columns: RankColumns = NO_RANK_COLUMNS
    activation: Literal["sigmoid", "identity"] = "sigmoid"
    kind: Literal["rerank"] = "rerank"

    def read(
        self, source: str, columns: Any = None, *, labelled: bool = True
    ) -> base.Reading[RankExample]:
        """Open a source and stream its examples; see `Task.read`."""
        requested = columns or NO_RANK_COLUMNS
        table, selected = open_columns(
            source, TABLE, requested, self.columns, labelled, lambda _: HOW
        )
        examples = joined_rows(table.rows, selected)
        unused = unused_columns(table.names, asked_columns(selected))
        return base.Reading(self.with_columns(selected), examples, table.share, unused=unused)

    def example(self, row: base.Row, *, where: str = "an example") -> RankExample:
        """Return the example in a row; see `Task.example`."""
        defaults = self.columns
        columns = choose_columns(TABLE, tuple(row), where, NO_RANK_COLUMNS, defaults, None, HOW)
        return rank_example(row, columns, where)

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> RankExample:
        """Return the example with this query and these documents; see `Task.from_texts`."""
        if len(texts) < 2:
            needs = "a query with documents: (query, [document, …]), or a dict of both"
            raise self.wrong_texts(texts, where, needs)
        query, *documents = texts
        return RankExample(query, tuple(documents), where=where)

    def passages(self, examples: Many[RankExample]) -> Many[Hashable]:
        """Return the queries: the rows of one are on one side of a split."""
        return [example.query for example in examples]

    def stratum(self, example: RankExample) -> Hashable:
        """Return None: queries are of one kind."""
        return None

    def texts(self, example: RankExample) -> tuple[str, ...]:
        """Return the query and the documents."""
        return example.query, *example.documents

    def labels(self, examples: Iterable[RankExample]) -> tuple[str, ...]:
        """Return the name of the one output."""
        return ("relevance",)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Return a head with one output."""
        return (LabelHead(1, dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, base.Direction]:
        """Return the metrics of rankings."""
        return {"ndcg@10": "highest", "mrr@10": "highest", "map": "highest"}

    def check(self, train: Many[RankExample], dev: Many[RankExample]) -> list[Finding]:
        """Return the problems of the examples; `dev` may be empty."""
        return check_rankings(train, dev)

    def encode(
        self, examples: Many[RankExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedTexts]:
        """Return a pair for each document, in one sequence or several windows."""
        prompt, pairs, targets = self.default_prompt, [], []
        for example in examples:
            values = example.labels or [np.nan] * len(example.documents)
            query = prompt + example.query
            pairs += [TextExample(query, text) for text in example.documents]
            targets += [LabelTargets(np.array([label], dtype=np.float32)) for label in values]
        encoded = iter(encode_texts(pairs, targets, tokenizer, self.fit(length)))
        return [_together([next(encoded) for _ in e.documents]) for e in examples]

    def decode(
        self,
        example: RankExample,
        encoded: base.EncodedExample,
        outputs: Many[base.Output],
        tokenizer: Tokenizer,
        labels: Many[str],
    ) -> RankPrediction:
        """Return the score of each document, that of its best window."""
        assert isinstance(encoded, EncodedTexts)
        logits = [float(np.max(chunks)) for chunks in encoded.by_text(outputs)]
        scores = logits
        if self.activation == "sigmoid":
            scores = sigmoid(np.array(logits)).tolist()
        return RankPrediction(example.query, example.documents, tuple(logits), tuple(scores))

    def score(
        self, results: Iterable[tuple[RankExample, RankPrediction]], labels: Many[str]
    ) -> base.Metrics:
        """Return the mean over queries of nDCG@10, MRR@10 and MAP; see `reranking.metrics`.

        A query is one, wherever its documents are in the data.
        """
        rankings = Rankings()
        for example, prediction in results:
            for score, label in zip(prediction.logits, _known(example), strict=True):
                rankings.add(example.query, score, label)
        if not rankings.by_query:
            raise base.nothing_to_score("document")
        return rankings.metrics()

    def grade(self, example: RankExample, prediction: RankPrediction, labels: Many[str]) -> float:
        """Return the nDCG@10 of the query."""
        return ndcg(np.array(prediction.logits), np.array(_known(example)))

    def baseline(self, examples: Many[RankExample]) -> base.Metrics:
        """Return the metrics of equal scores, those of a random order, and the loss of the share
        of relevant documents.
        """
        rankings = Rankings()
        for example in examples:
            for label in _known(example):
                rankings.add(example.query, 0.0, label)
        share = float(np.mean([label for example in examples for label in _known(example)]))
        loss = share * negative_log(share) + (1 - share) * negative_log(1 - share)
        return {**rankings.metrics(), "loss": loss}

    def program_files(self, length: int) -> Mapping[str, Any]:
        """Return the files by which sentence-transformers opens the model as a cross-encoder."""
        return program_files(CrossEncoderConfig(self.activation, length, *self.named_prompts))


def cross_encoder(config: CrossEncoderConfig) -> RerankingTask:
    """Return the task of a cross-encoder's folder of sentence-transformers."""
    return RerankingTask(
        activation=config.activation, prompts=config.prompts, prompt_name=config.prompt_name
    )


def _together(pairs: Many[base.EncodedExample]) -> EncodedTexts:
    return EncodedTexts(
        tuple(sequence for pair in pairs for sequence in pair.sequences),
        sum(pair.tokens for pair in pairs),
        sum(pair.cut for pair in pairs),
        tuple(len(pair.sequences) for pair in pairs),
    )


def _known(example: RankExample) -> tuple[float, ...]:
    if example.labels is None:
        raise base.unlabelled(example.where)
    return example.labels
