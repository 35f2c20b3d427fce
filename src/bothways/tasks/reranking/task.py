"""Reranking: a cross-encoder scores each document of a query (Nogueira and Cho 2019).

Each document is a pair, [CLS] query [SEP] document [SEP], as in regression; the one output is the
logit of the probability that the document is relevant, trained by binary cross-entropy. Of a
document that is read in windows the best one counts (MaxP, Dai and Callan 2019).

Read without naming columns: a row for each document (query, document, label), where neighbouring
rows of a query become one example; a row for each query with lists of documents and labels; and a
query with its relevant and its other documents (positive and negative, as texts or lists).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from bothways.core.batch import Batch, LabelTargets
from bothways.core.errors import DataError, Finding
from bothways.core.terminal import quantity
from bothways.core.training_module import Loss
from bothways.data.tables import TableRow
from bothways.hub.sentence_transformers import CrossEncoderConfig, ScoreActivation, program_files
from bothways.objectives.losses import binary_cross_entropy
from bothways.tasks import base, text_checks, text_task
from bothways.tasks.columns import Column, asked_columns, cell_of, is_absent, number_of, text_of
from bothways.tasks.metrics import RANKING, Rankings, ndcg, negative_log, sigmoid
from bothways.tasks.predictions import RankPrediction
from bothways.text.tokenizer import Tokenizer

QUERIES = ("query", "question", "anchor", "claim", "sentence1", "text_a", "text1")
DOCUMENTS = (
    "documents", "document", "passages", "passage", "texts", "text", "candidates", "docs", "doc",
    "answers", "answer", "sentence2", "text_b", "text2",
)  # fmt: skip
RELEVANT = ("positive", "positives", "pos")
OTHERS = ("negative", "negatives", "neg")
LABELS = (
    "label", "labels", "relevance", "relevances", "score", "scores", "grade", "grades", "target",
)  # fmt: skip


@dataclass(frozen=True)
class RankExample:
    """A query with documents, how relevant each is (0: not at all) if known, and its source.

    Attributes:
        joined: the documents come from neighbouring rows, not from a list in one row.
    """

    query: str
    documents: tuple[str, ...]
    labels: tuple[float, ...] | None = None
    where: str = "an example"
    joined: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class RankColumns(text_task.TextColumns):
    """The columns of queries; see `Columns`.

    Attributes:
        text: the query.
        text_b: the document, or a list of documents.
        label: the relevance, or a list with that of each document.
        negatives: documents that are not relevant, where those of `text_b` all are; a text or a
            list. There is no label then.
    """

    negatives: str | None = None


class Ranker(text_task.NumberModel[RankExample, RankPrediction]):
    """A reranking task with a model whose head "labels" has one output; see `TaskModel`."""

    task: RerankingTask

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the binary cross-entropy of the scores."""
        columns = (scores, text_task.targets_of(batch), text_task.window_weight(batch))
        return {"label": binary_cross_entropy(*(column[:, None] for column in columns))}

    def decode(
        self, example: RankExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> RankPrediction:
        """Return the score of each document, that of its best window."""
        logits = [float(np.max(chunks)) for chunks in encoded.by_text(outputs)]
        scores = logits
        if self.task.activation == "sigmoid":
            scores = sigmoid(np.array(logits)).tolist()
        return RankPrediction(example.query, example.documents, tuple(logits), tuple(scores))


@dataclass(frozen=True)
class RerankingTask(text_task.PromptedTask[RankPrediction]):
    """A score for each document of a query. A prompt is put before the query.

    Attributes:
        columns: the columns of queries, documents and labels.
        activation: what a score is: "sigmoid" for the probability, "identity" for the logit.
    """

    aliases = "cross-encoder ranking reranker reranking text-ranking"
    model_class = Ranker
    metric = "ndcg@10"
    metrics = base.directions(*RANKING)
    window = 64
    example_input: ClassVar[Any] = [["who sleeps?", "the cat sleeps"]]

    column_table = (
        Column("text", "query", QUERIES),
        Column(
            "text_b", "documents", DOCUMENTS, companion="negatives",
            pairs=[*itertools.product(RELEVANT, OTHERS)],
        ),
        Column("label", "label", LABELS, answer=True, replaced_by="negatives"),
    )  # fmt: skip

    objects = True

    columns: RankColumns = RankColumns()
    activation: ScoreActivation = "sigmoid"
    kind: Literal["rerank"] = "rerank"

    def read(
        self, source: str, columns: Any = None, *, labelled: bool = True
    ) -> base.Reading[RankExample]:
        rows = super().read(source, columns, labelled=labelled)
        assert rows.table is not None
        used = asked_columns(rows.task.columns)
        unused = [name for name in rows.table.names if name and name not in used]
        return base.Reading(rows.task, _joined(rows.examples), rows.share, unused=unused)

    def read_rows(
        self, rows: Iterable[TableRow], parse: Callable[[TableRow], RankExample],
        columns: Any = None, *, labelled: bool = True,
    ) -> base.Reading[RankExample]:  # fmt: skip
        return base.Reading(self, _joined(map(parse, rows)))

    def parse(self, row: base.Row, columns: text_task.TextColumns, where: str) -> RankExample:
        """Return the example in a row.

        Raises:
            DataError: a column is missing, or its value is not a text, a list of texts, or the
                labels of the documents.
        """
        assert isinstance(columns, RankColumns)
        assert columns.text is not None
        assert columns.text_b is not None
        query = text_of(row, columns.text, where)
        documents = _texts(row, columns.text_b, where)
        labels: tuple[float, ...] | None = None
        if columns.negatives is not None:
            remaining = _texts(row, columns.negatives, where)
            labels = (*(1.0 for _ in documents), *(0.0 for _ in remaining))
            documents += remaining
        elif columns.label is not None:
            labels = _labels(row, columns.label, len(documents), where)
        joined = columns.negatives is None and isinstance(row[columns.text_b], str)
        return RankExample(query, documents, labels, where, joined)

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> RankExample:
        if len(texts) < 2:
            needs = "a query with documents: (query, [document, …]), or a dict of both"
            raise self.wrong_texts(texts, where, needs)
        query, *documents = texts
        return RankExample(query, tuple(documents), where=where)

    def passages(self, examples: Many[RankExample]) -> Many[Hashable]:
        """Return the queries: the rows of one are on one side of a split."""
        return [example.query for example in examples]

    def answered(self, example: RankExample, answer: Any) -> RankExample:
        row = {"answers": answer}
        labels = _labels(row, "answers", len(example.documents), example.where)
        return replace(example, labels=labels)

    def stratum(self, example: RankExample) -> Hashable:
        return None

    def texts(self, example: RankExample) -> tuple[str, ...]:
        return example.query, *example.documents

    def labels(self, examples: Iterable[RankExample]) -> tuple[str, ...]:
        return ("relevance",)

    def check(self, train: Many[RankExample], dev: Many[RankExample]) -> list[Finding]:
        high = "training example(s) has|have labels above 1"
        fix = "Divide them by the highest grade; dev data may keep its grades."
        without = "example(s) has|have no document"
        findings = [
            *text_checks.check_rows([*train, *dev], without, lambda e: not e.documents),
            *text_checks.check_examples(
                train, dev, self.texts, lambda e: e.labels, (), lambda e: e.query, "queries"
            ),
            *text_checks.check_rows(
                train, high, lambda e: max(e.labels or (0,)) > 1, fix, check="labels"
            ),
            *_check_queries(train),
            *_check_queries(dev),
        ]
        labels = {label for e in train for label in e.labels or ()}
        if len(labels) == 1:
            message = f"all training documents have the label {labels.pop():g}: "
            message += "there is nothing to learn"
            fix = "Add documents that are not relevant (0), or relevant ones."
            findings.append(Finding("balance", "error", message, fix=fix))
        relevant = {e.query for e in dev if any(label > 0 for label in e.labels or ())}
        lost = list({e.query: e.where for e in dev if e.query not in relevant}.values())
        fault = "dev query|queries has|have no relevant document, and count 0 in each metric"
        return findings + text_checks.report_rows("balance", lost, fault, severity="warning")

    def encode(
        self, examples: Many[RankExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return a pair for each document, in one sequence or several windows."""
        prompt, pairs, targets = self.default_prompt, [], []
        for example in examples:
            values = example.labels or [np.nan] * len(example.documents)
            query = prompt + example.query
            pairs += [text_task.TextExample(query, text) for text in example.documents]
            targets += [LabelTargets(np.array([label], dtype=np.float32)) for label in values]
        encoded = iter(self.encode_texts(pairs, targets, tokenizer, length))
        return [
            base.EncodedExample.of_texts([next(encoded) for _ in e.documents]) for e in examples
        ]

    def score(
        self, results: base.Results[RankExample, RankPrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return the mean over queries of nDCG@10, MRR@10 and MAP; see `tasks.metrics`.

        A query is one, wherever its documents are in the data.
        """
        rankings = Rankings()
        for example, prediction in results:
            labels_of_query = base.required(example.labels, example.where)
            for score, label in zip(prediction.logits, labels_of_query, strict=True):
                rankings.add(example.query, score, label)
        if not rankings.by_query:
            raise base.nothing_to_score("document")
        return rankings.metrics()

    def grade(self, example: RankExample, prediction: RankPrediction, labels: Many[str]) -> float:
        """Return the nDCG@10 of the query."""
        labels_of_query = base.required(example.labels, example.where)
        return ndcg(np.array(prediction.logits), np.array(labels_of_query))

    def baseline(self, examples: Many[RankExample]) -> base.Metrics:
        """Return the metrics of equal scores, those of a random order, and the loss of the share
        of relevant documents; no loss for grades above 1, which are not probabilities.
        """
        zeros = ((0.0,) * len(example.documents) for example in examples)
        equal = (RankPrediction("", (), scores, scores) for scores in zeros)
        metrics = self.score(zip(examples, equal, strict=True), ())
        relevances = [label for example in examples for label in example.labels or ()]
        if max(relevances) > 1:
            return metrics
        share = float(np.mean(relevances))
        loss = share * negative_log(share) + (1 - share) * negative_log(1 - share)
        return {**metrics, "loss": loss}

    def program_files(self, length: int) -> Mapping[str, Any]:
        """Return the files by which sentence-transformers opens the model as a cross-encoder."""
        return program_files(CrossEncoderConfig(self.activation, length, *self.named_prompts))


def cross_encoder(config: CrossEncoderConfig) -> RerankingTask:
    """Return the task of a cross-encoder's folder of sentence-transformers."""
    return RerankingTask(
        activation=config.activation, prompts=config.prompts, prompt_name=config.prompt_name
    )


def _joined(examples: Iterable[RankExample]) -> Iterator[RankExample]:
    """Yield the examples of rows; neighbouring rows with one document each of a query are one.
    Rows with lists are examples by themselves.
    """

    def key(item: tuple[int, RankExample]) -> Hashable:
        number, example = item
        # Rows with and without a label are never one example.
        return (example.query, example.labels is None) if example.joined else number

    for _, pairs in itertools.groupby(enumerate(examples), key):
        group = [example for _, example in pairs]
        documents = tuple(text for example in group for text in example.documents)
        labels = tuple(label for example in group for label in example.labels or ())
        known = group[0].labels is not None
        yield replace(group[0], documents=documents, labels=labels if known else None)


def _texts(row: base.Row, column: str, location: str) -> tuple[str, ...]:
    value = cell_of(row, column, location)
    items = value if isinstance(value, list) else [value]
    faulty = [item for item in items if not isinstance(item, str)]
    if faulty:
        kind = "a null" if faulty[0] is None else f"a value of type {type(faulty[0]).__name__}"
        message = f"column {column!r} holds {kind}, where a document or a list of documents must be"
        raise DataError(message, where=location, fix="Write texts.")
    return tuple(items)


def _labels(row: base.Row, column: str, documents: int, location: str) -> tuple[float, ...] | None:
    """Return the labels in a row; None if all are absent."""
    value = cell_of(row, column, location)
    items = value if isinstance(value, list) else [value]
    if all(is_absent(item) or item == "" for item in items):
        return None
    if len(items) != documents:
        counts = f"{quantity(len(items), 'label(s)')} for {quantity(documents, 'document(s)')}"
        message = f"column {column!r} holds {counts}"
        raise DataError(message, where=location, fix="Give each document one label.")
    numbers, words = list[float](), {"true": 1.0, "false": 0.0}
    for item in items:
        text = str(item).strip().lower()
        number = words.get(text, number_of(text))
        if not 0 <= number < math.inf:
            message = f"column {column!r} holds {item!r:.80}, which is not a relevance"
            fix = "Write a number from 0: 0 for not relevant, 1 for relevant, or a grade such as 3."
            raise DataError(message, where=location, fix=fix)
        numbers.append(number)
    return tuple(numbers)


def _check_queries(examples: Many[RankExample]) -> list[Finding]:
    """Report queries that come again after other rows: their documents are ranked by themselves.

    A row with a list of documents is always ranked by itself.
    """
    seen, repeated = set[str](), list[str]()
    for example in (example for example in examples if example.joined):
        if example.query in seen:
            repeated.append(example.where)
        seen.add(example.query)
    fault = "example(s) has|have the query of an earlier one, and is|are ranked by themselves"
    return text_checks.report_rows("rows", repeated, fault, "Sort the rows by query.", "warning")
