"""Requests drawn from the OpenAPI document by schemathesis: `make api` runs this file.

No answer is an error of the server, every status, header and answer is one that the document
describes, and requests that it excludes are refused.
"""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from bothways.serving.app import app
from bothways.serving.errors import Limits
from bothways.serving.routes import document
from running_server import running
from toy_folder import make_folder
from toy_predictors import TASKS, predictor

EXAMPLES = 40
"""Requests of each route that must be refused, and of each that may be answered."""


def strict(node: Any) -> Any:
    """Schemas in which objects have no other fields than those that are named."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if "properties" in node else {}
    return {**closed, **{name: strict(value) for name, value in node.items()}}


def answers_are_strict(whole: dict[str, Any]) -> dict[str, Any]:
    paths = {
        path: {
            method: {**entry, "responses": strict(entry["responses"])}
            for method, entry in methods.items()
        }
        for path, methods in whole["paths"].items()
    }
    return {**whole, "paths": paths, "components": strict(whole["components"])}


@pytest.mark.filterwarnings("default")
def test_requests_drawn_from_the_document(tmp_path):
    folder = make_folder(tmp_path / "bert")
    limits = Limits(request_tokens=2000, queue_tokens=4000)
    application = app(
        {name: predictor(folder, name) for name in TASKS}, limits=limits, playground=True
    )
    schemathesis.checks.load_all_checks()
    names = """
    not_a_server_error status_code_conformance content_type_conformance
    response_headers_conformance response_schema_conformance negative_data_rejection
    """
    checks = schemathesis.checks.CHECKS.get_by_names(names.split())
    whole = document(application.models, guarded=False, playground=True)
    schema = schemathesis.openapi.from_dict(answers_are_strict(whole))
    answered: set[str] = set()
    drawn = settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    with running(application) as url:
        for operation in (found.ok() for found in schema.get_all_operations()):
            for mode in schemathesis.GenerationMode:
                if operation.method == "get" and mode == schemathesis.GenerationMode.NEGATIVE:
                    continue  # they take nothing

                def ask(case: Any) -> None:
                    response = case.call(base_url=url)
                    if response.status_code == 200:
                        answered.add(case.operation.label)
                    case.validate_response(response, checks=checks)

                drawn(given(operation.as_strategy(generation_mode=mode))(ask))()
    routes = [(path, method) for path, methods in whole["paths"].items() for method in methods]
    assert answered == {f"{method.upper()} {path}" for path, method in routes}
