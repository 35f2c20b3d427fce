"""OpenAI's embeddings and list of models."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.serving.shapes import (
    Answer,
    Query,
    component_count,
    field,
    prompted,
    shortened,
    truncates,
)


def embeddings(models: Models, body: Mapping[str, Any]) -> Query:
    """Read a request of `/v1/embeddings`; vectors have length 1, as OpenAI's.

    `input` is a text, a list of texts, a list of token ids, or a list of those. The prompt is the
    model's default one, or that of `prompt_name`, which OpenAI does not have.
    """
    model = models.choose(body.get("model"), ("embed",))
    count = component_count(body, "dimensions", model)
    encoding = field(body, "encoding_format", str, "float")
    if encoding not in ("float", "base64"):
        message = f"encoding_format must be float or base64, not {encoding[:50]!r}"
        raise RequestError("invalid", message, param="encoding_format")
    inputs = prompted(model, _texts(body.get("input"), model), body)

    def write(answer: Answer) -> Any:
        """Return a vector for each text, as numbers or in base64."""
        vectors = shortened(answer, count, normalise=True)
        data = [
            base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
            if encoding == "base64"
            else vector
            for vector in vectors
        ]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": n, "embedding": item}
                for n, item in enumerate(data)
            ],
            "model": answer.model.name,
            "usage": {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens},
        }

    return Query(model, inputs, write, truncates(body))


def _texts(value: Any, model: ServedModel) -> list[str]:
    many = value if isinstance(value, list) else [value]
    if value and isinstance(value, list) and all(_is_id(item) for item in value):
        many = [many]
    texts = []
    for item in many:
        if isinstance(item, list) and item and all(_is_id(id) for id in item):
            texts.append(text_of_ids(item, model))
        elif isinstance(item, str):
            texts.append(item)
        else:
            message = "input must be a text, a list of token ids, or a list of either"
            raise RequestError("invalid", message, param="input")
    if any(not text for text in texts):
        raise RequestError("empty", "an input is an empty text", param="input")
    return texts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def text_of_ids(ids: list[int], model: ServedModel) -> str:
    """Return the text of token ids, which is tokenized again.

    Raises:
        RequestError: an id that the vocabulary does not have.
    """
    tokenizer = model.learner.tokenizer
    wrong = [id for id in ids if not 0 <= id < tokenizer.size]
    if wrong:
        message = f"{wrong[0]} is not a token id: ids are 0 to {tokenizer.size - 1}"
        raise RequestError("invalid", message, param="input")
    return tokenizer.decode(ids)


def described(model: ServedModel) -> dict[str, Any]:
    """Return what `/v1/models` says of a model."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "bothways",
        "task": model.kind,
    }
