"""Retrieval among the texts of the dev data: each query against all documents.

Exact: blocks of queries against all documents, so that memory grows with the vectors alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from bothways.tasks.base import Metrics, nothing_to_score
from bothways.tasks.metrics import TINY
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.reranking.metrics import PLACES, average_precision, ndcg, reciprocal_rank
from bothways.tasks.sentence_embedding.examples import VectorExample
from bothways.tasks.text_task import TextExample

Vector = NDArray[np.float32]
RETRIEVAL = (f"ndcg@{PLACES}", f"mrr@{PLACES}", "map")
"""The metrics, by name."""
BLOCK = 256
"""Queries that are compared at once."""


def retrieval(results: Iterable[tuple[TextExample, VectorPrediction]]) -> Metrics:
    """Return the mean over queries of nDCG@10, MRR@10 and MAP.

    Queries are the anchors, documents the positives and negatives of all of them; equal texts are
    one. Of texts with a class each is a query, and the others are its documents: those of its
    class are relevant.

    Raises:
        DataError: there is no example.
    """
    queries = dict[str, Vector]()
    documents = dict[str, Vector]()
    relevant = defaultdict[str, set[str]](set)  # documents by query, or by class
    classes = dict[str, str]()
    for example, prediction in results:
        lengths = np.linalg.norm(prediction.vectors, axis=1, keepdims=True)
        units = prediction.vectors / np.maximum(lengths, TINY)
        queries[example.text] = units[0]
        if example.text_b is None:
            documents[example.text] = units[0]
            classes[example.text] = str(example.label)
            relevant[str(example.label)].add(example.text)
            continue
        _, *others = (
            example.all_texts
            if isinstance(example, VectorExample)
            else (example.text, example.text_b)
        )
        negatives = len(example.negatives) if isinstance(example, VectorExample) else 0
        documents |= dict(zip(others, units[1:], strict=True))
        relevant[example.text].update(others[: len(others) - negatives])
    if not queries:
        raise nothing_to_score()
    columns = {text: column for column, text in enumerate(documents)}
    matrix, rows = np.stack([*documents.values()]), np.stack([*queries.values()])
    values = list[tuple[float, float, float]]()
    for number, query in enumerate(queries):
        if number % BLOCK == 0:
            block = (rows[number : number + BLOCK] @ matrix.T).astype(np.float64)
        scores, labels = block[number % BLOCK], np.zeros(len(documents))
        labels[[columns[text] for text in relevant[classes.get(query, query)]]] = 1
        if classes:  # a text does not find itself
            scores, labels = (np.delete(x, columns[query]) for x in (scores, labels))
        values.append(
            (
                ndcg(scores, labels),
                reciprocal_rank(scores, labels),
                average_precision(scores, labels),
            )
        )
    means = np.mean(values, axis=0).tolist()
    return dict(zip(RETRIEVAL, means, strict=True))
