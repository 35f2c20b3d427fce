"""Cohere's embeddings, of version 2 of its API; its ranking is in `rerank`."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.serving.shapes import (
    Answer,
    Query,
    Vectors,
    component_count,
    field,
    prompted,
    shortened,
    texts_in,
)
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask

TYPES = ("float", "base64")
TRUNCATE = ("END", "NONE")
PROMPTS = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""The prompts that an input type asks for, by the names that sentence-transformers gives them."""


def embed(models: Models, body: Mapping[str, Any]) -> Query:
    """Read a request of `/v2/embed`; vectors have length 1.

    The prompt is that of `prompt_name`, which Cohere does not have; else the first of `PROMPTS` for
    `input_type` that the model has; else its default one.
    """
    model = models.choose(body.get("model"), ("embed",))
    for name in ("images", "max_tokens"):  # without them, the vectors would be others
        if body.get(name) is not None:
            raise RequestError("invalid", f"{name} is not served: leave it out", param=name)
    count = component_count(body, "output_dimension", model)
    types = field(body, "embedding_types", list, []) or ["float"]
    for kind in types:
        _check(kind, "embedding_types", TYPES)
    truncate = field(body, "truncate", str, "END")
    _check(truncate, "truncate", TRUNCATE)
    texts = _texts(body)

    def write(answer: Answer) -> Any:
        """Return the vectors in each type that is asked for."""
        vectors = shortened(answer, count, normalise=True)
        return {
            "id": uuid.uuid4().hex,
            "response_type": "embeddings_by_type",
            "embeddings": {kind: _written(vectors, kind) for kind in types},
            "texts": texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": answer.tokens},
            },
        }

    inputs = prompted(model, texts, body, {"prompt_name": _prompt_name(model, body)})
    return Query(model, inputs, write, truncate == "END")


def _written(vectors: Vectors, kind: str) -> list[Any]:
    if kind == "float":
        return list(vectors)
    return [base64.b64encode(row.astype("<f4").tobytes()).decode("ascii") for row in vectors]


def _check(value: Any, name: str, allowed: Many[str]) -> None:
    if value not in allowed:
        given = value[:50] if isinstance(value, str) else value
        message = f"{name} must be {' or '.join(allowed)}, not {given!r}"
        raise RequestError("invalid", message, param=name)


def _prompt_name(model: ServedModel, body: Mapping[str, Any]) -> str | None:
    """Return the prompt of the model for the input type; None for the default one."""
    kind, task = field(body, "input_type", str, None), model.learner.task
    if kind is None:
        return None
    _check(kind, "input_type", list(PROMPTS))
    assert isinstance(task, SentenceEmbeddingTask)
    return next((name for name in PROMPTS[kind] if name in task.prompts), None)


def _texts(body: Mapping[str, Any]) -> list[str]:
    """Return `texts`, or the texts in the contents of `inputs`."""
    if body.get("inputs") is None:
        return texts_in(field(body, "texts", list), "texts")[0]
    if body.get("texts") is not None:
        raise RequestError("invalid", "give texts or inputs, not both", param="inputs")
    return [_joined(item) for item in field(body, "inputs", list)]


def _joined(item: Any) -> str:
    match item:
        case {"content": [*parts]} if parts:
            texts = [_text(part) for part in parts]
        case _:
            texts = [None]
    if None in texts:
        message = 'each input must be texts: {"content": [{"type": "text", "text": "…"}]}'
        raise RequestError("invalid", message, param="inputs")
    return "\n".join(filter(None, texts))


def _text(part: Any) -> str | None:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            return None
