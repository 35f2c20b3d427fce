"""OpenAI's embeddings and list of models; documents ranked for a query, as Cohere, Jina and TEI do.

A model that ranks has the task `rerank`. The relevance is σ of its logit, whatever the task's
activation, since these clients expect a number from 0 to 1; `raw_scores` asks for the logit.
"""

from __future__ import annotations

import base64
import uuid
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, ConfigDict, WithJsonSchema
from typing_extensions import NotRequired, TypedDict

from bothways.serving import shapes
from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.serving.shapes import Answer, Query, Route, prompted
from bothways.tasks.metrics import sigmoid

IDS = shapes.list_of({"type": "integer", "minimum": 0}, minItems=1)


def _read_texts(value: Any) -> list[str | list[int]]:
    """Read a text, a list of token ids, or a list of either."""
    several = isinstance(value, list) and not (value and all(map(_is_id, value)))
    items: list[str | list[int]] = value if several else [value]
    for item in items:
        ids = isinstance(item, list) and item and all(map(_is_id, item))
        if not ids and not isinstance(item, str):
            raise ValueError("must be a text, a list of token ids, or a list of either")
    return items


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class EmbeddingsRequest(shapes.VectorRequest):
    """Texts to embed, as OpenAI's clients send them."""

    input: Annotated[
        shapes.Items,
        AfterValidator(_read_texts),
        WithJsonSchema(
            shapes.either(
                shapes.TEXT,
                IDS,
                shapes.list_of(shapes.either(shapes.TEXT, IDS), minItems=1),
            )
        ),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    user: shapes.Meaningless = None


class EmbeddingObject(TypedDict):
    """A vector, as numbers or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The vectors of texts."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: Usage


def embeddings(models: Models, request: EmbeddingsRequest) -> Query:
    """Read a request of `/v1/embeddings`; vectors have length 1, as OpenAI's.

    `input` is a text, a list of texts, a list of token ids, or a list of those. The prompt is the
    model's default one, or that of `prompt_name`, which OpenAI does not have.
    """
    model = models.choose(request.model, ("embed",))
    vectors = shapes.vector_writer(model, request, normalise=True)
    texts = [item if isinstance(item, str) else text_of_ids(item, model) for item in request.input]
    if not all(texts):
        raise RequestError("empty", "an input is an empty text", param="input")
    inputs = prompted(model, texts, request.prompt_name)

    def write(answer: Answer) -> Embeddings:
        data: list[Any] = [*vectors(answer)]
        if request.encoding_format == "base64":
            data = [base64.b64encode(vector.tobytes()).decode("ascii") for vector in data]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": n, "embedding": item}
                for n, item in enumerate(data)
            ],
            "model": answer.model.name,
            "usage": {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens},
        }

    return Query(model, inputs, write, request.truncate)


EMBEDDINGS = Route(
    EmbeddingsRequest,
    embeddings,
    Embeddings,
    "OpenAI's embeddings: vectors of length 1",
    ("embed",),
    {"input": ["a dog barks", "it rains"]},
)


def text_of_ids(ids: list[int], model: ServedModel) -> str:
    """Return the text of token ids, which is tokenized again.

    Raises:
        RequestError: an id that the vocabulary does not have.
    """
    tokenizer = model.task_model.tokenizer
    invalid = [id for id in ids if not 0 <= id < tokenizer.size]
    if invalid:
        message = f"{invalid[0]} is not a token id: ids are 0 to {tokenizer.size - 1}"
        raise RequestError("invalid", message, param="input")
    return tokenizer.decode(ids)


class ModelObject(TypedDict):
    """A model of the server."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: str


class ModelList(TypedDict):
    """The models of the server."""

    object: Literal["list"]
    data: list[ModelObject]


def described(model: ServedModel) -> ModelObject:
    """Describe a model for `/v1/models`."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "bothways",
        "task": model.kind,
    }


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
    BeforeValidator(shapes.bounded),
    shapes.per_item(_read_document),
    WithJsonSchema(
        shapes.list_of(
            shapes.either(
                shapes.TEXT,
                {"type": "object", "properties": {"text": shapes.TEXT}, "required": ["text"]},
            ),
            minItems=1,
        )
    ),
]


class RerankRequest(shapes.TruncatedRequest):
    """A query and its documents: `documents` as Cohere and Jina call them, or `texts` as TEI."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["documents"]}, {"required": ["texts"]}]}
    )
    query: shapes.Text
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: shapes.Count | None = None
    raw_scores: shapes.Flag = False
    return_documents: shapes.Flag | None = None
    return_text: shapes.Flag | None = None


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


def reranking(models: Models, request: RerankRequest) -> Query:
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
        # By logits: σ of large ones is 1 for all.
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


RERANK = Route(
    RerankRequest,
    reranking,
    Ranking | list[TextScore],
    "Documents ranked for a query: Cohere and Jina (documents), TEI (texts)",
    ("rerank",),
    {"query": "who sleeps?", "documents": ["the cat sleeps", "it rains"]},
)
