"""The POST routes, and the OpenAPI document (version 3.1) of those that a server's models answer.

Each route also exists as `/models/NAME/…` for one model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Union

from typing_extensions import TypedDict

from bothways import __version__
from bothways.serving import compatible, hugging_face
from bothways.serving.errors import STATUS, TRY_AGAIN
from bothways.serving.explain import EXPLAIN
from bothways.serving.models import Models, ServedModel
from bothways.serving.search import SEARCH
from bothways.serving.shapes import PREDICTIONS, Route, Schema, build_schema, own

ROUTES: dict[str, Route] = {
    **{f"/{kind}": own(kind) for kind in PREDICTIONS},
    "/embed": compatible.EMBED,
    "/predict": compatible.PREDICT,
    "/similarity": compatible.SIMILARITY,
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), compatible.RERANK),
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), compatible.EMBEDDINGS),
    "/": Route(
        None,
        hugging_face.choose_route,
        Any,
        "Hugging Face: the task of the model",
        tuple(hugging_face.ALTERNATIVES),
    ),
    "/tokenize": compatible.TOKENIZE,
    "/search": SEARCH,
}
"""The POST routes of every server."""

JSON = "application/json"
TEXT: Schema = {"type": "string"}
CODES = [code for code in STATUS if code != "client_left"]
"""The codes that a client can receive."""
HEADERS = {
    "x-compute-tokens": "tokens that the model read",
    "x-truncated": "inputs that were cut",
    "server-timing": "milliseconds of tokenizing, queue and model",
}
"""The headers of a computed answer."""
PROBES = ("/live", "/ready", "/health", "/ping")
"""Routes without a key."""


_ERROR_FIELDS = {
    "message": TEXT,
    "type": {"enum": ["invalid_request_error", "server_error"]},
    "code": {"enum": CODES},
    "param": {"type": ["string", "null"]},
}
ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {"type": "object", "properties": _ERROR_FIELDS, "required": list(_ERROR_FIELDS)},
        "error_type": {"enum": CODES},
    },
    "required": ["error", "error_type"],
}
"""The schema of an answer that is an error."""
_SECONDS = {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 0}}
RESPONSES = {
    str(status): {
        "description": ", ".join(code for code in CODES if STATUS[code] == status),
        "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
        **({"headers": {"retry-after": _SECONDS}} if status in TRY_AGAIN else {}),
    }
    for status in dict.fromkeys(STATUS[code] for code in CODES)
}
"""One response for each status of the catalogue of errors."""


class Status(TypedDict):
    """The answer of a probe."""

    status: Literal["live", "ready"]


GETS: dict[str, Any] = {
    "/": Status,
    "/info": compatible.ServerInfo,
    "/metrics": None,
    "/openapi.json": dict[str, Any],
    "/v1/models": compatible.ModelList,
    "/v1/models/{model}": compatible.ModelObject,
    **dict.fromkeys(PROBES, Status),
}
"""The answers of the routes that compute nothing; None for plain text."""


def document(models: Models, *, guarded: bool, playground: bool = False) -> dict[str, Any]:
    """Build the document.

    Args:
        models: models of the server; routes without a model are excluded.
        guarded: whether clients need a key.
        playground: whether there is the route `/explain`.
    """
    schemas: dict[str, Schema] = {"Error": ERROR}
    paths = dict[str, dict[str, Any]]()
    for path, answer in GETS.items():
        kind = "text/plain" if answer is None else JSON
        schema = TEXT if answer is None else build_schema(answer, schemas)
        statuses = (401, 403, 404) if "{" in path else (401, 403)
        statuses = (500, 503) if path in PROBES else statuses
        statuses = (401, 403, 503) if path == "/" else statuses
        ok = {"description": "OK", "content": {kind: {"schema": schema}}}
        entry: dict[str, Any] = {"responses": {"200": ok, **_errors(statuses)}}
        if "{" in path:
            names = {"enum": list(models.by_name)}
            parameter = {"name": "model", "in": "path", "required": True, "schema": names}
            entry["parameters"] = [parameter]
        if path in PROBES:
            entry["security"] = []
        paths[path] = {"get": entry}
    routes = {**ROUTES, **({"/explain": EXPLAIN} if playground else {})}
    for path, route in routes.items():
        fitting = [model for model in models if not route.kinds or model.kind in route.kinds]
        if path == "/search":
            searching = {served.model.name for served in models.indexes.values()}
            fitting = [model for model in models if model.name in searching]
        if fitting:
            paths.setdefault(path, {})["post"] = _post(path, route, fitting, models, schemas)
    components: dict[str, Any] = {"schemas": schemas, "responses": RESPONSES}
    info = {
        "title": "bothways",
        "version": __version__,
        "description": "Every POST route also exists for one model, as /models/NAME/ROUTE.",
    }
    result = {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}
    if not guarded:
        return result
    bearer = {"type": "http", "scheme": "bearer"}
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    components["securitySchemes"] = {"bearer": bearer, "key": header}
    return {**result, "security": [{"bearer": []}, {"key": []}]}


def _errors(statuses: Iterable[int]) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _post(
    path: str,
    route: Route,
    fitting: list[ServedModel],
    models: Models,
    schemas: dict[str, Schema],
) -> dict[str, Any]:
    example, names = dict(route.example), [model.name for model in fitting]
    if example.get("inputs", "") is None:
        example["inputs"] = fitting[0].example_inputs
    if path == "/search":
        example["index"] = next(iter(models.indexes))
    routes = [route]
    if route.request is None:  # Hugging Face's, for the tasks of the models
        kinds = dict.fromkeys(model.kind for model in fitting)
        routes = [other for kind in kinds for other in hugging_face.ALTERNATIVES[kind]]
    requests = dict.fromkeys(other.request for other in routes)
    answer: Any = Union[tuple(other.answer for other in routes)]  # noqa: UP007
    bodies = [build_schema(request, schemas) for request in requests]
    for body in bodies:
        if len(names) > 1 and path != "/search":  # where the name of an index is enough
            body["properties"]["model"] = {"enum": names}
            body["required"] = [*body.get("required", ()), "model"]
            example["model"] = names[0]
        elif len(models.by_name) > 1:
            body["properties"]["model"] = {"enum": [*names, None]}
    body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    # `/explain` draws masks without the model.
    headers = {
        name: {"description": text, "required": path != "/explain", "schema": TEXT}
        for name, text in HEADERS.items()
        if route.computes
    }
    content, limits = {JSON: {"schema": build_schema(answer, schemas)}}, models.limits
    bounds = f"At most {limits.texts:,} inputs of {limits.text_characters:,} characters each."
    return {
        "summary": route.summary,
        "description": bounds,
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": body, "examples": {"one": {"value": example}}}},
        },
        "responses": {
            "200": {"description": "OK", "headers": headers, "content": content},
            **_errors(sorted({STATUS[code] for code in CODES} - {405})),
        },
    }
