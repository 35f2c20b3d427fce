"""What the OpenAPI document says of each POST route: its tasks, request, answer and an example.

The fields of requests are those that the routes declare (`serving.requests`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bothways.serving import explain, hugging_face, openai, rerank, tei
from bothways.serving.requests import TEXT, RequestBody, Schema, either, list_of
from bothways.serving.shapes import OwnRequest

NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}


def obj(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object: the fields that it always has, and those it may have."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def maybe(schema: Schema, *, default: Any = None, about: str | None = None) -> Schema:
    """Return the schema of a field that may be absent, or null, which means the same."""
    notes = {"default": default} if default is not None else {}
    notes |= {} if about is None else {"description": about}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"], **notes}
    return either(schema, {"type": "null"}) | notes


def reference_to(name: str) -> Schema:
    """Return the reference to a schema of `COMPONENTS`."""
    return {"$ref": f"#/components/schemas/{name}"}


VECTOR = list_of(NUMBER)
SPAN = {"text": TEXT, "start": COUNT, "end": COUNT}
PROBABILITIES: Schema = {"type": "object", "additionalProperties": NUMBER}
SCORED = obj({"label": TEXT, "score": NUMBER})

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

_FILLING = obj({"score": NUMBER, "token": COUNT, "token_str": TEXT, "sequence": TEXT})
_FOUND = obj({"answer": TEXT, "score": NUMBER, "start": COUNT, "end": COUNT})
_ENTITY = obj(
    {"score": NUMBER, "word": TEXT, "start": COUNT, "end": COUNT},
    {"entity_group": TEXT, "entity": TEXT, "index": COUNT},
)
_MASKS = list_of(_FILLING)
HUGGING_FACE: dict[str, Schema] = {
    **dict.fromkeys(tei.CLASSIFIERS, list_of(list_of(SCORED))),
    "tag": either(list_of(_ENTITY), list_of(list_of(_ENTITY))),
    "answer": either(_FOUND, list_of(_FOUND), list_of(list_of(_FOUND))),
    "fill": either(_MASKS, list_of(_MASKS), list_of(list_of(_MASKS))),
    "embed": either(list_of(VECTOR), list_of(NUMBER)),
}
"""The answers of Hugging Face's shapes by task; other tasks answer as in `PREDICTIONS`."""

USAGE = obj({"prompt_tokens": COUNT, "total_tokens": COUNT})


@dataclass(frozen=True)
class Operation:
    """What a POST route takes and answers.

    Attributes:
        summary: one line.
        kinds: the tasks of models that answer; empty for all.
        request: the fields of a request; None for those of Hugging Face's shapes, which depend on
            the task.
        answer: the schema of a response with status 200.
        example: a request; `None` as inputs is an input of the task.
        one_of: names of which a request has exactly one.
    """

    summary: str
    kinds: tuple[str, ...]
    request: type[RequestBody] | None
    answer: Schema
    example: Mapping[str, Any] = field(default_factory=dict)
    one_of: tuple[str, ...] = ()


def own_operation(kind: str) -> Operation:
    """Return the operation of the library's own shape for a task."""
    answer = either(reference_to(kind), list_of(reference_to(kind)))
    summary = f"Task {kind}: lines of `bothways predict`"
    return Operation(summary, (kind,), OwnRequest, answer, {"inputs": None})


def _rerank() -> Operation:
    result = obj({"index": COUNT, "relevance_score": NUMBER}, {"document": obj({"text": TEXT})})
    ranked = {
        "id": TEXT,
        "model": TEXT,
        "results": list_of(result),
        "usage": USAGE,
        "meta": {"type": "object"},
    }
    return Operation(
        "Documents ranked for a query: Cohere and Jina (documents), TEI (texts)",
        ("rerank",),
        rerank.RerankRequest,
        either(obj(ranked), list_of(obj({"index": COUNT, "score": NUMBER}, {"text": TEXT}))),
        {"query": "who sleeps?", "documents": ["the cat sleeps", "it rains"]},
        one_of=("documents", "texts"),
    )


def _embeddings() -> Operation:
    item = obj({"object": TEXT, "index": COUNT, "embedding": either(VECTOR, TEXT)})
    answer = {"object": TEXT, "data": list_of(item), "model": TEXT, "usage": USAGE}
    return Operation(
        "OpenAI's embeddings: vectors of length 1",
        ("embed",),
        openai.EmbeddingsRequest,
        obj(answer),
        {"input": ["a dog barks", "it rains"]},
    )


def _tei() -> dict[str, Operation]:
    token = obj(
        {"id": COUNT, "text": TEXT, "special": FLAG, "start": maybe(COUNT), "stop": maybe(COUNT)}
    )
    similar = {"source_sentence": "a dog barks", "sentences": ["a hound howls"]}
    return {
        "/embed": Operation(
            "TEI: a vector for each text",
            ("embed",),
            tei.EmbedRequest,
            list_of(VECTOR),
            {"inputs": ["a dog barks", "it rains"]},
        ),
        "/predict": Operation(
            "TEI: labels with scores; a list of two texts is a pair",
            tei.CLASSIFIERS,
            tei.PredictRequest,
            either(list_of(SCORED), list_of(list_of(SCORED))),
            {"inputs": "what a lovely film"},
        ),
        "/similarity": Operation(
            "TEI: cosines of a sentence with others",
            ("embed",),
            tei.SimilarityRequest,
            list_of(NUMBER),
            {"inputs": similar},
        ),
        "/tokenize": Operation(
            "TEI: the tokens of texts",
            (),
            tei.TokenizeRequest,
            list_of(list_of(token)),
            {"inputs": "a dog barks"},
        ),
    }


def _explain() -> Operation:
    word = {"text": TEXT, "start": COUNT, "stop": COUNT, "part": COUNT, "effect": maybe(NUMBER)}
    explained = {"label": maybe(TEXT), "value": NUMBER, "words": list_of(obj(word))}
    gradients = {"baseline": NUMBER, "error": NUMBER, "steps": COUNT}
    attention = {
        "tokens": list_of(obj({"id": COUNT, "text": TEXT, "special": FLAG})),
        "layer": COUNT,
        "layers": COUNT,
        "heads": list_of(list_of(VECTOR)),
        "rollout": list_of(VECTOR),
    }
    methods = {
        "leave_one_out": explained,
        "integrated_gradients": {**explained, **gradients},
        "attention": attention,
    }
    return Operation(
        "Why the model answers so: words left out, integrated gradients, attention",
        explain.KINDS,
        explain.ExplainRequest,
        either(*(obj({"method": {"const": name}, **methods[name]}) for name in methods)),
        {"method": "attention", "inputs": None},
    )


def request_schemas(kinds: Mapping[str, object]) -> list[type[RequestBody]]:
    """Return the requests of Hugging Face's shapes for models of these tasks."""
    requests = [hugging_face.REQUESTS.get(kind, hugging_face.TaskRequest) for kind in kinds]
    requests += [tei.SimilarityRequest] if "embed" in kinds else []
    requests += [rerank.RerankRequest] if "rerank" in kinds else []
    return list(dict.fromkeys(requests))


OPERATIONS: dict[str, Operation] = {
    **{f"/{kind}": own_operation(kind) for kind in PREDICTIONS},
    **_tei(),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _rerank()),
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), _embeddings()),
    "/": Operation("Hugging Face: the task of the model", (), None, {}, {"inputs": None}),
    "/explain": _explain(),
}
"""The POST routes."""
