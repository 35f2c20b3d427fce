"""The OpenAPI document of a server (version 3.1): the routes that its models answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bothways import __version__
from bothways.serving.errors import STATUS, TRY_AGAIN
from bothways.serving.limits import Limits
from bothways.serving.models import Models, ServedModel
from bothways.serving.requests import TEXT, Schema, list_of, schema_of
from bothways.serving.schemas import (
    COUNT,
    EXAMPLES,
    FLAG,
    NUMBER,
    OPERATIONS,
    PREDICTIONS,
    Operation,
    maybe,
    obj,
    reference_to,
    request_schemas,
)

_JSON = "application/json"
_INTERNAL = ("client_left",)
"""Codes that no client receives."""
_ANSWERED = {
    "x-compute-tokens": "tokens that the model read",
    "x-truncated": "inputs that were cut",
    "server-timing": "milliseconds of tokenizing, queue and model",
}
_PROBES = ("/live", "/ready", "/health", "/ping")


def document(
    models: Models, limits: Limits, *, guarded: bool, playground: bool = False
) -> dict[str, Any]:
    """Return the document.

    Args:
        models: of the server; routes for which there is none are left out.
        limits: of the server.
        guarded: whether clients need a key.
        playground: whether there is the route `/explain`.
    """
    operations = {path: o for path, o in OPERATIONS.items() if playground or path != "/explain"}
    info = {
        "title": "bothways",
        "version": __version__,
        "description": "Every POST route also exists for one model, as /models/NAME/ROUTE.",
    }
    components: dict[str, Any] = {"schemas": _schemas(), "responses": _responses()}
    result = {"openapi": "3.1.0", "info": info, "paths": _paths(models, limits, operations)}
    if not guarded:
        return {**result, "components": components}
    bearer = {"type": "http", "scheme": "bearer"}
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    components["securitySchemes"] = {"bearer": bearer, "key": header}
    return {**result, "components": components, "security": [{"bearer": []}, {"key": []}]}


def _schemas() -> dict[str, Schema]:
    codes = [code for code in STATUS if code not in _INTERNAL]
    error = {
        "message": TEXT,
        "type": {"enum": ["invalid_request_error", "server_error"]},
        "code": {"enum": codes},
        "param": maybe(TEXT),
    }
    return {**PREDICTIONS, "Error": obj({"error": obj(error), "error_type": {"enum": codes}})}


def _responses() -> dict[str, Any]:
    """Return one response for each status of the catalogue of errors."""
    by_status: dict[int, list[str]] = {}
    for code, status in STATUS.items():
        if code not in _INTERNAL:
            by_status.setdefault(status, []).append(code)
    content = {_JSON: {"schema": reference_to("Error")}}
    seconds = {"description": "seconds", "required": True, "schema": COUNT}
    return {
        str(status): {
            "description": ", ".join(codes),
            "content": content,
            **({"headers": {"retry-after": seconds}} if status in TRY_AGAIN else {}),
        }
        for status, codes in by_status.items()
    }


def _errors(statuses: Iterable[int]) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _paths(models: Models, limits: Limits, operations: Mapping[str, Operation]) -> dict[str, Any]:
    names = _in_path([model.name for model in models])
    paths = {path: {"get": _get(path, answer, names)} for path, answer in _gets().items()}
    for path, operation in operations.items():
        fitting = [m for m in models if not operation.kinds or m.kind in operation.kinds]
        if not fitting:
            continue
        entry = _post(path, operation, fitting, limits, several=len(list(models)) > 1)
        paths.setdefault(path, {})["post"] = entry
    return paths


def _get(path: str, answer: Schema | None, names: dict[str, Any]) -> dict[str, Any]:
    kind = "text/plain" if answer is None else _JSON
    statuses = (401, 403, 404) if "{" in path else (401, 403)
    statuses = (403, 500, 503) if path in _PROBES else statuses
    statuses = (401, 403, 503) if path == "/" else statuses
    content = {kind: {"schema": TEXT if answer is None else answer}}
    entry: dict[str, Any] = {
        "responses": {"200": {"description": "OK", "content": content}, **_errors(statuses)}
    }
    if "{" in path:
        entry["parameters"] = [names]
    if path in _PROBES:
        entry["security"] = []
    return entry


def _in_path(names: list[str]) -> dict[str, Any]:
    return {"name": "model", "in": "path", "required": True, "schema": {"enum": names}}


def _gets() -> dict[str, Schema | None]:
    """Return the answers of the routes that compute nothing; None for plain text."""
    status = obj({"status": TEXT})
    described = obj({"id": TEXT, "object": TEXT, "created": COUNT, "owned_by": TEXT, "task": TEXT})
    return {
        "/": status,
        "/info": _info(),
        "/metrics": None,
        "/openapi.json": {"type": "object"},
        "/v1/models": obj({"object": TEXT, "data": list_of(described)}),
        "/v1/models/{model}": described,
        **dict.fromkeys(_PROBES, status),
    }


def _info() -> Schema:
    model = {
        "name": TEXT,
        "task": TEXT,
        "length": COUNT,
        "precision": TEXT,
        "labels": list_of(TEXT),
        "since": COUNT,
        "digest": maybe(TEXT),
        "pairs": FLAG,
        "layers": COUNT,
        "mask": TEXT,
        "specials": obj({"single": COUNT, "pair": COUNT}),
        "long_texts": TEXT,
    }
    return obj(
        {
            "model_id": TEXT,
            "served_model_name": TEXT,
            "model_dtype": TEXT,
            "model_type": {"type": "object"},
            "max_input_length": COUNT,
            "max_batch_tokens": COUNT,
            "max_client_batch_size": COUNT,
            "auto_truncate": FLAG,
            "version": TEXT,
            "limits": {"type": "object", "additionalProperties": NUMBER},
            "models": list_of(obj(model, {"prompts": list_of(TEXT)})),
        }
    )


def _post(
    path: str, operation: Operation, fitting: list[ServedModel], limits: Limits, *, several: bool
) -> dict[str, Any]:
    example = dict(operation.example)
    if example.get("inputs", "") is None:
        example["inputs"] = example_input(fitting[0])
    if operation.request is None:
        requests = request_schemas({model.kind: model for model in fitting})
    else:
        requests = [operation.request]
    names = [model.name for model in fitting]
    bodies = [schema_of(request) for request in requests]
    for body in bodies:
        if len(fitting) > 1:
            body["properties"]["model"] = {"enum": names}
            body["required"] = [*body.get("required", ()), "model"]
            example["model"] = names[0]
        elif several:
            body["properties"]["model"] = {"enum": [*names, None]}
        if operation.one_of:
            body["oneOf"] = [{"required": [name]} for name in operation.one_of]
    body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    about = f"At most {limits.texts:,} inputs of {limits.text_characters:,} characters each."
    headers = {
        name: {"description": text, "required": True, "schema": TEXT}
        for name, text in _ANSWERED.items()
        if path != "/tokenize"
    }
    content = {_JSON: {"schema": operation.answer}}
    statuses = sorted({status for code, status in STATUS.items() if code not in _INTERNAL} - {405})
    return {
        "summary": operation.summary,
        "description": about,
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": body, "examples": {"one": {"value": example}}}},
        },
        "responses": {
            "200": {"description": "OK", "headers": headers, "content": content},
            **_errors(statuses),
        },
    }


def example_input(model: ServedModel) -> Any:
    """Return an input that the model's task reads."""
    if model.kind == "fill":
        tokenizer = model.learner.tokenizer
        return f"the cat {tokenizer.token(tokenizer.specials.mask)} here"
    return EXAMPLES.get(model.kind, "the cat sleeps in London")
