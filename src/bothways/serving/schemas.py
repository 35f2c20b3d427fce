"""The predictions of each task in the OpenAPI document, and an input for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bothways.serving.requests import TEXT, Schema, either, list_of

NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def obj(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object: the fields that it always has, and those it may have."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def maybe(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""
    return {**schema, "type": [schema["type"], "null"]}


SPAN = {"text": TEXT, "start": COUNT, "end": COUNT}
PROBABILITIES: Schema = {"type": "object", "additionalProperties": NUMBER}

PREDICTIONS: dict[str, Schema] = {
    "classify": obj({"label": TEXT, "probabilities": PROBABILITIES}),
    "multilabel": obj({"labels": list_of(TEXT), "probabilities": PROBABILITIES}),
    "regress": obj({"score": NUMBER}),
    "choice": obj({"index": COUNT, "ending": TEXT, "probabilities": list_of(NUMBER)}),
    "tag": obj(
        {"words": list_of(TEXT), "tags": list_of(TEXT)},
        {"entities": list_of(obj({"type": TEXT, **SPAN, "score": NUMBER}))},
    ),
    "answer": obj(
        {
            "id": TEXT,
            "text": TEXT,
            "start": maybe(COUNT),
            "end": maybe(COUNT),
            "confidence": NUMBER,
            "null_difference": NUMBER,
            "spans": list_of(obj({**SPAN, "score": NUMBER, "probability": NUMBER})),
        }
    ),
    "fill": obj(
        {
            "text": TEXT,
            "masks": list_of(list_of(obj({"token": TEXT, "probability": NUMBER}))),
            "fillings": list_of(
                obj({"tokens": list_of(TEXT), "probability": NUMBER, "text": TEXT})
            ),
        }
    ),
    "likelihood": obj(
        {
            "log_likelihood": NUMBER,
            "pseudo_perplexity": maybe(NUMBER),
            "tokens": list_of(list_of(either(TEXT, NUMBER), minItems=2, maxItems=2)),
        }
    ),
    "prefer": obj(
        {
            "preferred": {"enum": ["first", "second"]},
            "log_likelihoods": list_of(NUMBER, minItems=2, maxItems=2),
        }
    ),
}
"""The lines of `bothways predict` by task; other routes answer vectors and rankings."""
EXAMPLES: dict[str, Any] = {
    "choice": {"context": "It rained.", "endings": ["She took an umbrella.", "She ate."]},
    "answer": {"question": "Who wrote it?", "context": "Ada Lovelace wrote it in 1843."},
    "prefer": [["the cats sleep", "the cats sleeps"]],
    "rerank": [["who sleeps?", "the cat sleeps"]],
}
"""Inputs by task, where a text is none."""
