"""The schemas of predictions: the forms of JSON and Arrow that files and clients rely on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from bothways.prediction.bulk.parts import part_content
from bothways.tasks import predictions
from bothways.tasks.catalogue import ALL_TASKS
from bothways.tasks.predictions import arrow_fields, arrow_type, json_schema, prediction_type

THIRD = 1 / 3
SPAN = "text: string, start: int64, end: int64, score: double"
TEXTS, CHANCES = "list<item: string>", "map<string, double>"


def listed(fields: str) -> str:
    """The Arrow type of a list of structs."""
    return f"list<item: struct<{fields}>>"


CASES: list[tuple[predictions.Prediction, str, dict[str, str]]] = [
    (
        predictions.ClassPrediction("a", 0, {"a": 2 * THIRD, "b": THIRD}),
        '{"label": "a", "probabilities": {"a": 0.666667, "b": 0.333333}}',
        {"label": "string", "probabilities": CHANCES, "label_set": TEXTS},
    ),
    (
        predictions.MultilabelPrediction(("a",), {"a": 1.0}),
        '{"labels": ["a"], "probabilities": {"a": 1.0}}',
        {"labels": TEXTS, "probabilities": CHANCES},
    ),
    (predictions.ScorePrediction(THIRD), '{"score": 0.333333}', {"score": "double"}),
    (
        predictions.ChoicePrediction(1, "x", (THIRD, 2 * THIRD)),
        '{"index": 1, "ending": "x", "probabilities": [0.333333, 0.666667]}',
        {"index": "int64", "ending": "string", "probabilities": "list<item: double>"},
    ),
    (
        predictions.RankPrediction("q", ("a", "b"), (0.0, 2.0), (0.5, THIRD)),
        '{"query": "q", "ranking": [{"index": 1, "score": 0.333333, "document": "b"}, '
        '{"index": 0, "score": 0.5, "document": "a"}]}',
        {"query": "string", "ranking": listed("index: int64, score: double, document: string")},
    ),
    (
        predictions.FillPrediction(((predictions.TokenGuess("a", THIRD),),), (predictions.JointFilling(("a",), THIRD, "t"),)),
        '{"text": "t", "masks": [[{"token": "a", "probability": 0.333333}]], '
        '"fillings": [{"tokens": ["a"], "probability": 0.333333, "text": "t"}]}',
        {
            "text": "string",
            "masks": f"list<item: {listed('token: string, probability: double')}>",
            "fillings": listed(f"tokens: {TEXTS}, probability: double, text: string"),
        },
    ),
    (
        predictions.LikelihoodPrediction(("a",), (-THIRD,)),
        '{"log_likelihood": -0.333333, "pseudo_perplexity": 1.39561, "tokens": [["a", -0.333333]]}',
        {
            "log_likelihood": "double", "pseudo_perplexity": "double",
            "tokens": listed("token: string, log_likelihood: double"),
        },
    ),
    (
        predictions.LikelihoodPrediction((), ()),
        '{"log_likelihood": 0.0, "pseudo_perplexity": null, "tokens": []}',
        {},
    ),
    (
        predictions.PreferencePrediction(-THIRD, -2.0),
        '{"preferred": "first", "log_likelihoods": [-0.333333, -2.0]}',
        {"preferred": "string", "log_likelihoods": "list<item: double>"},
    ),
    (
        predictions.TagPrediction(("a",), ("B-X",), np.eye(1), (predictions.Entity("X", "a", 0, 1, THIRD),)),
        '{"entities": [{"type": "X", "text": "a", "start": 0, "end": 1, "score": 0.333333}], '
        '"words": ["a"], "tags": ["B-X"]}',
        {"entities": listed(f"type: string, {SPAN}"), "words": TEXTS, "tags": TEXTS},
    ),
    (predictions.TagPrediction(("a",), ("X",), np.eye(1)), '{"words": ["a"], "tags": ["X"]}', {}),
    (
        predictions.AnswerPrediction("1", "a", 0, 1, THIRD, -2.0, (predictions.AnswerSpan("a", 0, 1, 2.0, THIRD),)),
        '{"id": "1", "text": "a", "start": 0, "end": 1, "confidence": 0.333333, '
        '"null_difference": -2.0, "spans": [{"text": "a", "start": 0, "end": 1, "score": 2.0, '
        '"probability": 0.333333}]}',
        {
            "id": "string", "text": "string", "start": "int64", "end": "int64", "confidence": "double",
            "null_difference": "double", "spans": listed(f"{SPAN}, probability: double"),
        },
    ),
    (
        predictions.AnswerPrediction("2", "", None, None, 1.0, 0.0, ()),
        '{"id": "2", "text": "", "start": null, "end": null, "confidence": 1.0, '
        '"null_difference": 0.0, "spans": []}',
        {},
    ),
]  # fmt: skip


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a JSON value is what a schema describes."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    match value:
        case None:
            return "null" in types
        case str():
            return "string" in types
        case int() | float():
            return ("integer" if isinstance(value, int) else "number") in types
        case list():
            size = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99)
            return size and "array" in types and all(fits(item, schema["items"]) for item in value)
        case dict():
            known = schema.get("properties", {})
            more = schema.get("additionalProperties")
            return {*schema.get("required", ())} <= {*value} and all(
                fits(item, known.get(name, more)) for name, item in value.items()
            )
    return False


@pytest.mark.parametrize(("prediction", "text", "types"), CASES)
def test_json_arrow_and_schema_agree(prediction, text, types):
    assert json.dumps(prediction.to_json()) == text
    fields = arrow_fields(type(prediction))
    if types:
        assert {name: str(kind) for name, kind in fields.items()} == types
    assert fits(prediction.to_json(), json_schema(type(prediction)))
    assert part_content("parquet", [prediction], None, {}, ()).startswith(b"PAR1")


def test_every_task_declares_its_prediction():
    types = {prediction_type(task) for task in ALL_TASKS.values()}
    assert types == {type(prediction) for prediction, *_ in CASES} | {predictions.VectorPrediction}


def test_attributes_are_described_by_their_docstrings():
    schema = json_schema(predictions.AnswerPrediction)["properties"]
    assert schema["start"]["type"] == ["integer", "null"]
    assert schema["id"]["description"] == "the id of the question."
    ranking = json_schema(predictions.RankPrediction)["properties"]["ranking"]
    assert ranking["description"] == "The documents, best first; of equal ones the first."
    assert ranking["items"]["properties"]["score"]["description"] == "its score."


@dataclass(frozen=True)
class Kinds(predictions.Prediction):
    """A prediction of another package."""

    numbers: Mapping[str, tuple[int, ...]]


def test_a_prediction_of_another_package_needs_no_entry():
    assert Kinds({"a": (1, 2)}).to_json() == {"numbers": {"a": [1, 2]}}
    assert str(arrow_fields(Kinds)["numbers"]) == "map<string, list<item: int64>>"
    with pytest.raises(TypeError):
        arrow_type(type(np.zeros(1)))
