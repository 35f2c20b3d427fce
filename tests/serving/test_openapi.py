"""The OpenAPI document: what it says of requests is what the server reads. See drawn_requests.py."""

from typing import Any

import pytest

from bothways.serving.app import App, app
from bothways.serving.errors import Limits, RequestError
from bothways.serving.explain import EXPLAIN
from bothways.serving.routes import ROUTES, document
from bothways.serving.shapes import PREDICTIONS


@pytest.fixture(scope="module")
def application(predictors) -> App:
    limits = Limits(request_tokens=2000, queue_tokens=4000)
    return app(predictors, limits=limits, playground=True)


def test_every_route_is_in_the_document(application, client):
    assert {f"/{kind}" for kind in PREDICTIONS} <= ROUTES.keys(), "add new tasks to PREDICTIONS"
    routes = ROUTES.keys() | {"/explain"}
    shown = client.get("/openapi.json").json()["paths"]
    assert application._routes["/openapi.json"]() is application._routes["/openapi.json"]()
    gets = {path for path, entry in shown.items() if "get" in entry and "{" not in path}
    assert gets == {p for p in application._routes if not p.startswith("/play")}
    named = {path for path in shown if "{" in path}
    assert named == {"/v1/models/{model}"}
    posts = {path for path, entry in shown.items() if "post" in entry and "{" not in path}
    wanted = routes - {"/prefer", "/search"}  # no model here prefers, and there is no index
    assert posts == wanted, f"add a new task to TASKS of toy_predictors.py: {wanted - posts}"


def test_routes_without_a_model_are_left_out(application):
    alone = app(application.models.named("embed").predictor, keys=("a",))
    shown = document(alone.models, guarded=True)
    assert "/v1/embeddings" in shown["paths"]
    assert "/classify" not in shown["paths"]
    assert "/explain" not in shown["paths"]  # it comes with the playground
    assert shown["security"] == [{"bearer": []}, {"key": []}]
    assert shown["paths"]["/ready"]["get"]["security"] == []


def unnamed(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> set[str]:
    """The names of fields in a value that its schema does not name."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(value, list) and "items" in schema:
        return set().union(*(unnamed(item, schema["items"], schemas) for item in value))
    if not isinstance(value, dict) or "properties" not in schema:
        return set()
    known = schema["properties"]
    below = (unnamed(item, known[name], schemas) for name, item in value.items() if name in known)
    return (value.keys() - known.keys()).union(*below)


def test_every_field_of_what_needs_no_model_is_named(client):
    whole = client.get("/openapi.json").json()
    [name] = whole["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert {"embed", "classify"} < {*name["schema"]["enum"]}
    assert "503" in whole["paths"]["/"]["get"]["responses"]
    for path, entry in whole["paths"].items():
        described = entry.get("get", {"responses": {}})["responses"].get("200", {"content": {}})
        for kind, content in described["content"].items():
            answer = client.get(path.replace("{model}", "embed"))
            if kind == "application/json":
                schemas = whole["components"]["schemas"]
                assert not unnamed(answer.json(), content["schema"], schemas), path


def test_every_example_is_answered(client):
    for path, entry in client.get("/openapi.json").json()["paths"].items():
        if "post" not in entry:
            continue
        body = entry["post"]["requestBody"]["content"]["application/json"]
        bodies = [example := body["examples"]["one"]["value"]]
        if path == "/explain":
            bodies.append({**example, "method": "masked_lm"})  # which no model computes
        headers = entry["post"]["responses"]["200"]["headers"]
        required = {name for name, header in headers.items() if header["required"]}
        for asked in bodies:
            response = client.post(path, json=asked)
            assert response.status_code == 200, (path, response.text)
            assert required <= {*response.headers}, path


KINDS: dict[str, Any] = {
    "string": "a", "integer": 7, "boolean": True, "array": [[[0]]], "object": {"x": 0},
}  # fmt: skip


def types_of(schema: dict[str, Any]) -> set[str]:
    """The JSON types that a schema allows."""
    if "anyOf" in schema:
        return set().union(*map(types_of, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return {"string"}
    if "$ref" in schema:
        return {"object"}
    types = schema.get("type", list(KINDS))
    return {types} if isinstance(types, str) else set(types)


def test_fields_of_other_types_are_refused(application):
    count, routes = 0, ROUTES | {"/explain": EXPLAIN}
    shown = document(application.models, guarded=False, playground=True)["paths"]
    for path in routes.keys() & shown.keys():
        body = shown[path]["post"]["requestBody"]["content"]["application/json"]
        example = body["examples"]["one"]["value"]
        for name, schema in body["schema"].get("properties", {}).items():
            for kind in KINDS.keys() - types_of(schema):
                with pytest.raises(RequestError) as caught:
                    routes[path].query(application.models, {**example, name: KINDS[kind]})
                assert caught.value.code == "invalid", (path, name, kind)
                count += 1
    assert count > 100
