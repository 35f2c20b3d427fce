"""Documents ranked for a query, in the shapes of Cohere, Jina and TEI.

The model has the task `rerank`. The relevance is σ of its logit, whatever the task's activation,
since these clients expect a number from 0 to 1; `raw_scores` asks for the logit.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from bothways.serving.errors import RequestError
from bothways.serving.models import Models
from bothways.serving.shapes import Answer, Query, field, truncates, whole_number
from bothways.tasks.metrics import sigmoid


def rerank(models: Models, body: Mapping[str, Any]) -> Query:
    """Read a request with `query`, and `documents` (Cohere, Jina) or `texts` (TEI).

    The answer to `texts` is TEI's list; to `documents` an object with `results`.
    """
    model = models.choose(body.get("model"), ("rerank",))
    query, tei = field(body, "query", str), "texts" in body
    documents = [_document(item) for item in field(body, "texts" if tei else "documents", list)]
    raw = field(body, "raw_scores", bool, False)
    top = whole_number(body, "top_n")
    with_text = field(body, "return_text" if tei else "return_documents", bool, False)

    def write(answer: Answer) -> Any:
        """Return the documents by falling score."""
        logits = np.array([prediction.logits[0] for prediction in answer.predictions])
        scores = logits if raw else sigmoid(logits)
        order = np.argsort(-logits, kind="stable")[:top].tolist()
        if tei:
            return [
                {"index": n, "score": float(scores[n])}
                | ({"text": documents[n]} if with_text else {})
                for n in order
            ]
        results = [
            {"index": n, "relevance_score": float(scores[n])}
            | ({"document": {"text": documents[n]}} if with_text else {})
            for n in order
        ]
        tokens = answer.tokens
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": answer.model.name,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"billed_units": {"search_units": 1}},
        }

    return Query(model, [(query, text) for text in documents], write, truncates(body))


def _document(value: Any) -> str:
    match value:
        case str():
            return value
        case {"text": str(text)}:
            return text
        case _:
            message = 'each document must be a text, or an object like {"text": "…"}'
            raise RequestError("invalid", message, param="documents")
