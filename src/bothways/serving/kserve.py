"""KServe's protocol, version 2: tensors by name in JSON.

A request has one tensor of texts (datatype BYTES): `text`, and for pairs `text_b`. The answer has
`embedding` (FP32) for the task `embed`; else `prediction` (BYTES), each a line of
`bothways predict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.serving.shapes import Answer, Query, field


def infer(models: Models, body: Mapping[str, Any]) -> Query:
    """Read a request of `/v2/models/NAME/infer`."""
    model = models.choose(body.get("model"))
    tensors: dict[str, list[str]] = {}
    for tensor in field(body, "inputs", list):
        if not isinstance(tensor, dict):
            raise RequestError("invalid", "each of inputs must be an object", param="inputs")
        tensors[field(tensor, "name", str)] = _texts(tensor)
    if "text" not in tensors or not tensors.keys() <= {"text", "text_b"}:
        message = f"the inputs are text and, for pairs, text_b; given: {', '.join(tensors)[:200]}"
        raise RequestError("invalid", message, param="inputs")
    inputs: list[Any] = tensors["text"]
    if "text_b" in tensors:
        if len(tensors["text_b"]) != len(inputs):
            raise RequestError("invalid", "text and text_b must be of one length", param="inputs")
        inputs = list(zip(inputs, tensors["text_b"], strict=True))
    id = field(body, "id", str, None)

    def write(answer: Answer) -> Any:
        """Return the predictions as a tensor."""
        return {
            "model_name": answer.model.name,
            **({} if id is None else {"id": id}),
            "outputs": [_output(answer)],
        }

    return Query(model, inputs, write)


def _texts(tensor: Mapping[str, Any]) -> list[str]:
    if field(tensor, "datatype", str) != "BYTES":
        raise RequestError("invalid", "the datatype of texts is BYTES", param="datatype")
    data = field(tensor, "data", list)
    flat = [text for item in data for text in (item if isinstance(item, list) else [item])]
    if not all(isinstance(text, str) for text in flat):
        raise RequestError("invalid", "data must be texts", param="data")
    shape = field(tensor, "shape", list)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in shape)
    if not whole or [size for size in shape if size != 1] not in ([], [len(flat)]):
        raise RequestError("invalid", f"shape must be [{len(flat)}]", param="shape")
    return flat


def _output(answer: Answer) -> dict[str, Any]:
    if answer.model.kind == "embed" and all(len(p.vectors) == 1 for p in answer.predictions):
        vectors = answer.vectors
        return {
            "name": "embedding",
            "datatype": "FP32",
            "shape": list(vectors.shape),
            "data": np.ascontiguousarray(vectors).reshape(-1),
        }
    lines = [orjson.dumps(prediction.to_json()).decode() for prediction in answer.predictions]
    return {"name": "prediction", "datatype": "BYTES", "shape": [len(lines)], "data": lines}


def metadata(model: ServedModel) -> dict[str, Any]:
    """Return what is said of a model's tensors."""
    embeds = model.kind == "embed"
    output = {
        "name": "embedding" if embeds else "prediction",
        "datatype": "FP32" if embeds else "BYTES",
        "shape": [-1, -1] if embeds else [-1],
    }
    return {
        "name": model.name,
        "versions": ["1"],
        "platform": "bothways",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [output],
    }
