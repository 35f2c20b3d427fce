"""The POST routes, and the OpenAPI document (version 3.1) of those that a server's models answer.

Each route also exists as `/models/NAME/…` for one model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, Union

from typing_extensions import TypedDict

from bothways import __version__
from bothways.serving import explain, hugging_face, openai, tei
from bothways.serving.errors import STATUS, TRY_AGAIN, Limits
from bothways.serving.models import Models, ServedModel
from bothways.serving.requests import TEXT, RequestBody, Schema, build_schema
from bothways.serving.search import SEARCH
from bothways.serving.shapes import CLASSIFIERS, LabelScore, Route, own
from bothways.tasks.catalogue import ALL_TASKS

TEXTS = ["a dog barks", "it rains"]
RERANK = Route(
    openai.RerankRequest,
    openai.reranking,
    openai.Ranking | list[openai.TextScore],
    "Documents ranked for a query: Cohere and Jina (documents), TEI (texts)",
    ("rerank",),
    {"query": "who sleeps?", "documents": ["the cat sleeps", "it rains"]},
)
EMBEDDINGS = Route(
    openai.EmbeddingsRequest,
    openai.embeddings,
    openai.Embeddings,
    "OpenAI's embeddings: vectors of length 1",
    ("embed",),
    {"input": TEXTS},
)
ROUTES: dict[str, Route] = {
    **{f"/{kind}": own(kind) for kind in ALL_TASKS if kind not in ("embed", "rerank")},
    "/embed": Route(
        tei.EmbedRequest,
        tei.tei_embed,
        list[list[float]] | list[list[int]],
        "TEI: a vector for each text",
        ("embed",),
        {"inputs": TEXTS},
    ),
    "/predict": Route(
        tei.PredictRequest,
        tei.predict,
        list[LabelScore] | list[list[LabelScore]],
        "TEI: labels with scores; a list of two texts is a pair",
        CLASSIFIERS,
        {"inputs": "what a lovely film"},
    ),
    "/similarity": Route(
        tei.SimilarityRequest,
        tei.similarity,
        list[float],
        "TEI: cosines of a sentence with others",
        ("embed",),
        {"inputs": {"source_sentence": "a dog barks", "sentences": ["a hound howls"]}},
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RERANK),
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), EMBEDDINGS),
    "/": Route(
        hugging_face.request_of, hugging_face.pipeline, Any, "Hugging Face: the task of the model"
    ),
}
"""The routes that compute."""
TOKENIZE = Route(
    tei.TokenizeRequest,
    tei.tokenize,
    list[list[tei.TextToken]],
    "TEI: the tokens of texts",
    (),
    {"inputs": "a dog barks"},
)
"""The route `/tokenize`, which needs no queue."""
EXPLAIN = Route(
    explain.ExplainRequest,
    explain.explain,
    explain.WordEffects | explain.Attentions | explain.TrainedInput,
    "Why the model answers so: words left out, attention; the input as in training",
    explain.KINDS,
    {"method": "attention", "inputs": None},
)
"""The route `/explain` of the playground."""


JSON = "application/json"
EXAMPLES: dict[str, Any] = {
    "choice": {"context": "It rained.", "endings": ["She took an umbrella.", "She ate."]},
    "answer": {"question": "Who wrote it?", "context": "Ada Lovelace wrote it in 1843."},
    "prefer": [["the cats sleep", "the cats sleeps"]],
    "rerank": [["who sleeps?", "the cat sleeps"]],
}
"""Inputs by task, where a text is none."""
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
_SECONDS = {
    "description": "seconds",
    "required": True,
    "schema": {"type": "integer", "minimum": 0},
}
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
    "/info": tei.ServerInfo,
    "/metrics": None,
    "/openapi.json": dict[str, Any],
    "/v1/models": openai.ModelList,
    "/v1/models/{model}": openai.ModelObject,
    **dict.fromkeys(PROBES, Status),
}
"""The answers of the routes that compute nothing; None for plain text."""


def document(
    models: Models, limits: Limits, *, guarded: bool, playground: bool = False
) -> dict[str, Any]:
    """Build the document.

    Args:
        models: models of the server; routes without a model are excluded.
        limits: of the server.
        guarded: whether clients need a key.
        playground: whether there is the route `/explain`.
    """
    schemas: dict[str, Schema] = {"Error": ERROR}
    paths = dict[str, dict[str, Any]]()
    for path, answer in GETS.items():
        kind = "text/plain" if answer is None else JSON
        schema = TEXT if answer is None else build_schema(answer, schemas)
        statuses = (401, 403, 404) if "{" in path else (401, 403)
        statuses = (403, 500, 503) if path in PROBES else statuses
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
    routes = {**ROUTES, "/tokenize": TOKENIZE, **({"/explain": EXPLAIN} if playground else {})}
    if models.indexes:
        example = {**SEARCH.example, "index": next(iter(models.indexes))}
        routes["/search"] = replace(SEARCH, example=example)
    for path, route in routes.items():
        fitting = [model for model in models if not route.kinds or model.kind in route.kinds]
        if path == "/search":  # where the name of an index is enough
            fitting = [next(iter(models.indexes.values())).model]
        if fitting:
            paths.setdefault(path, {})["post"] = _post(
                path, route, fitting, limits, schemas, several=len(models.by_name) > 1
            )
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
    models: list[ServedModel],
    limits: Limits,
    schemas: dict[str, Schema],
    *,
    several: bool,
) -> dict[str, Any]:
    example, names = dict(route.example), [model.name for model in models]
    if example.get("inputs", "") is None:
        example["inputs"] = example_input(models[0])
    if isinstance(route.request, type):
        requests, answer = [route.request], route.answer
    else:  # Hugging Face's, for the tasks of the models
        requests, answers = list[type[RequestBody]](), list[Any]()
        for kind in dict.fromkeys(model.kind for model in models):
            if kind == "embed":
                requests += [tei.EmbedRequest, tei.SimilarityRequest]
                answers.append(list[list[float]] | list[float])
                continue
            if kind == "rerank":
                requests.append(openai.RerankRequest)
                answers.append(RERANK.answer)
            if kind in ("classify", "zero-shot"):
                requests.append(hugging_face.ZeroShotRequest)
                answers.append(list[LabelScore])
            shape = hugging_face.PIPELINES.get(kind)
            requests.append(shape.request if shape else hugging_face.TaskRequest)
            answers.append(shape.answer if shape else ROUTES[f"/{kind}"].answer)
        requests, answer = list(dict.fromkeys(requests)), Union[tuple(answers)]  # noqa: UP007
    bodies = [build_schema(request, schemas) for request in requests]
    for body in bodies:
        if len(names) > 1:
            body["properties"]["model"] = {"enum": names}
            body["required"] = [*body.get("required", ()), "model"]
            example["model"] = names[0]
        elif several:
            body["properties"]["model"] = {"enum": [*names, None]}
    body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    headers = {
        name: {"description": text, "required": True, "schema": TEXT}
        for name, text in HEADERS.items()
        if path != "/tokenize"
    }
    content = {JSON: {"schema": build_schema(answer, schemas)}}
    return {
        "summary": route.summary,
        "description": f"At most {limits.texts:,} inputs of {limits.text_characters:,} characters "
        "each.",
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": body, "examples": {"one": {"value": example}}}},
        },
        "responses": {
            "200": {"description": "OK", "headers": headers, "content": content},
            **_errors(sorted({STATUS[code] for code in CODES} - {405})),
        },
    }


def example_input(model: ServedModel) -> Any:
    """Return an input that the model's task reads."""
    if model.kind == "fill":
        tokenizer = model.task_model.tokenizer
        return f"the cat {tokenizer.token(tokenizer.specials.mask)} here"
    return EXAMPLES.get(model.kind, "the cat sleeps in London")
