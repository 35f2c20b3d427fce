"""The schemas of predictions for the OpenAPI document, and an input of each task."""

from __future__ import annotations

from typing import Any

from bothways.serving.requests import Schema
from bothways.tasks.catalogue import ALL_TASKS
from bothways.tasks.schemas import json_schema, prediction_type

COUNT: Schema = {"type": "integer", "minimum": 0}
PREDICTIONS: dict[str, Schema] = {
    kind: json_schema(prediction_type(task))
    for kind, task in ALL_TASKS.items()
    if kind not in ("embed", "rerank")
}
"""The lines of `bothways predict` by task; other routes answer vectors and rankings."""
EXAMPLES: dict[str, Any] = {
    "choice": {"context": "It rained.", "endings": ["She took an umbrella.", "She ate."]},
    "answer": {"question": "Who wrote it?", "context": "Ada Lovelace wrote it in 1843."},
    "prefer": [["the cats sleep", "the cats sleeps"]],
    "rerank": [["who sleeps?", "the cat sleeps"]],
}
"""Inputs by task, where a text is none."""
