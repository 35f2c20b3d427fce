"""Documents ranked for a query, compatible with Cohere, Jina and TEI.

The model has the task `rerank`. The relevance is σ of its logit, whatever the task's activation,
since these clients expect a number from 0 to 1; `raw_scores` asks for the logit.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, ConfigDict, WithJsonSchema
from typing_extensions import NotRequired, TypedDict

from bothways.serving import requests
from bothways.serving.errors import RequestError
from bothways.serving.models import Models
from bothways.serving.openai import Usage
from bothways.serving.shapes import Answer, Query
from bothways.tasks.metrics import sigmoid


def _read_document(value: Any) -> str:
    match value:
        case str():
            return value
        case {"text": str(text)} if len(value) == 1:
            return text
        case _:
            raise ValueError('must be texts, or objects like {"text": "…"}')


Documents = Annotated[
    list[Any],
    BeforeValidator(requests.bounded),
    requests.per_item(_read_document),
    WithJsonSchema(
        requests.list_of(
            requests.either(
                requests.TEXT,
                {"type": "object", "properties": {"text": requests.TEXT}, "required": ["text"]},
            ),
            minItems=1,
        )
    ),
]


class RerankRequest(requests.TruncatedRequest):
    """A query and its documents: `documents` as Cohere and Jina call them, or `texts` as TEI."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["documents"]}, {"required": ["texts"]}]}
    )
    query: requests.Text
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: requests.Count | None = None
    raw_scores: requests.Flag = False
    return_documents: requests.Flag | None = None
    return_text: requests.Flag | None = None


class TextScore(TypedDict):
    """A document in TEI's answer."""

    index: int
    score: float
    text: NotRequired[str]


class DocumentText(TypedDict):
    """The text of a document."""

    text: str


class RerankResult(TypedDict):
    """A document in the answer of Cohere and Jina."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText]


class Ranking(TypedDict):
    """The answer of Cohere and Jina."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: dict[str, Any]


def rerank(models: Models, request: RerankRequest) -> Query:
    """Read a request of `/rerank`.

    The answer to `texts` is TEI's list; to `documents` an object with `results`.
    """
    model = models.choose(request.model, ("rerank",))
    tei = request.texts is not None
    if tei == (request.documents is not None):
        message = "give documents (as Cohere and Jina) or texts (as text-embeddings-inference)"
        raise RequestError("invalid", message, param="documents")
    other = "return_documents" if tei else "return_text"
    if getattr(request, other) is not None:
        message = f"{other} belongs to {'documents' if tei else 'texts'}, which is not given"
        raise RequestError("invalid", message, param=other)
    query, raw, top = request.query, request.raw_scores, request.top_n
    documents = request.texts or request.documents or []
    with_text = bool(request.return_text or request.return_documents)

    def write(answer: Answer) -> Ranking | list[TextScore]:
        logits = np.array([prediction.logits[0] for prediction in answer.predictions])
        scores = logits if raw else sigmoid(logits)
        order = np.argsort(-logits, kind="stable")[:top].tolist()
        if tei:
            rows: list[TextScore] = [{"index": n, "score": float(scores[n])} for n in order]
            for row in rows if with_text else ():
                row["text"] = documents[row["index"]]
            return rows
        results: list[RerankResult] = [
            {"index": n, "relevance_score": float(scores[n])} for n in order
        ]
        for result in results if with_text else ():
            result["document"] = {"text": documents[result["index"]]}
        tokens = answer.tokens
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": answer.model.name,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"billed_units": {"search_units": 1}},
        }

    return Query(model, [(query, text) for text in documents], write, request.truncate)
