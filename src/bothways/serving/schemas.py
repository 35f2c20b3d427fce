"""JSON schemas of what routes take and answer; `openapi` writes them into its document.

Each operation is a value: the tasks it is for, the fields of its requests, the answer, an example.
Fields that are not named here are ignored by the routes; tests compare both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bothways.serving import cohere, explain
from bothways.serving.hugging_face import TASKS
from bothways.serving.tei import CLASSIFIERS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}


def list_of(items: Schema, **more: Any) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **more}


def either(*schemas: Schema) -> Schema:
    """Return the schema of a value that one of several describes."""
    return {"anyOf": list(schemas)}


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


PAIR = list_of(TEXT, minItems=2, maxItems=2)
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
HUGGING_FACE: dict[str, Schema] = {
    "text-classification": list_of(list_of(SCORED)),
    "token-classification": either(list_of(_ENTITY), list_of(list_of(_ENTITY))),
    "question-answering": either(_FOUND, list_of(_FOUND), list_of(list_of(_FOUND))),
    "fill-mask": either(
        *(_FILLING, _nested := list_of(_FILLING), list_of(_nested)), list_of(list_of(_nested))
    ),
    "feature-extraction": list_of(VECTOR),
    "sentence-similarity": list_of(NUMBER),
}
"""The answers of Hugging Face's shapes by task."""

TENSOR = obj(
    {
        "name": {"enum": ["text", "text_b"]},
        "datatype": {"const": "BYTES"},
        "shape": list_of({"type": "integer"}),
        "data": list_of(either(TEXT, list_of(TEXT))),
    }
)
TRUNCATE = maybe(FLAG, default=True, about="false: a text that is too long is an error")
PROMPT = maybe(TEXT, about="a prompt of the model, put before the text; null: its default one")
IDS = list_of(COUNT, minItems=1)
USAGE = obj({"prompt_tokens": COUNT, "total_tokens": COUNT})


@dataclass(frozen=True)
class Operation:
    """What a POST route takes and answers.

    Attributes:
        summary: one line.
        kinds: the tasks of models that answer; empty for all.
        fields: of a request, those that may be absent being nullable.
        required: the names of the others.
        answer: the schema of a response with status 200.
        example: a request; `None` as inputs is an input of the task.
        one_of: names of which a request has at least one.
        prefixed: whether the model is named in the path alone.
    """

    summary: str
    kinds: tuple[str, ...]
    fields: Mapping[str, Schema]
    required: tuple[str, ...]
    answer: Schema
    example: Mapping[str, Any] = field(default_factory=dict)
    one_of: tuple[str, ...] = ()
    prefixed: bool = False


def own_operation(kind: str) -> Operation:
    """Return the operation of the library's own shape for a task."""
    item = either(TEXT, PAIR, {"type": "object"})
    return Operation(
        f"Task {kind}: lines of `bothways predict`",
        (kind,),
        {
            "inputs": either(TEXT, {"type": "object"}, list_of(item, minItems=1)),
            "truncate": TRUNCATE,
        },
        ("inputs",),
        either(reference_to(kind), list_of(reference_to(kind))),
        {"inputs": None},
    )


def _hugging_face(task: str) -> Operation:
    kinds = TASKS[task]
    texts = either(TEXT, list_of(TEXT, minItems=1))
    top: Schema = {"type": "integer", "minimum": 1}
    question = obj({"question": TEXT, "context": TEXT})
    labelled = either(TEXT, PAIR, {"type": "object"})
    similar = obj({"source_sentence": TEXT, "sentences": list_of(TEXT, minItems=1)})
    strategies = ["none", "simple", "first", "average", "max"]
    parameters: dict[str, dict[str, Schema]] = {
        "text-classification": {"top_k": maybe(top)},
        "token-classification": {
            "aggregation_strategy": {"enum": [*strategies, None], "default": "simple"},
            "ignore_labels": maybe(list_of({}), default=["O"]),
        },
        "question-answering": {"top_k": maybe(top, default=1)},
        "fill-mask": {"top_k": maybe(top)},
        "feature-extraction": {"normalize": maybe(FLAG, default=False), "prompt_name": PROMPT},
        "sentence-similarity": {"prompt_name": PROMPT},
    }
    inputs: dict[str, Schema] = {
        "text-classification": either(labelled, list_of(labelled, minItems=1)),
        "question-answering": either(question, list_of(question, minItems=1)),
        "sentence-similarity": similar,
    }
    example = {"source_sentence": "a dog barks", "sentences": ["a hound howls", "it rains"]}
    more = {"normalize": maybe(FLAG), "prompt_name": PROMPT} if task == "feature-extraction" else {}
    return Operation(
        f"Hugging Face: {task}",
        kinds,
        {
            "inputs": inputs.get(task, texts),
            "parameters": maybe(obj({}, {**parameters[task], "truncate": TRUNCATE})),
            "truncate": TRUNCATE,
            **more,
        },
        ("inputs",),
        HUGGING_FACE[task],
        {"inputs": example if task == "sentence-similarity" else None},
    )


def _rerank() -> Operation:
    document = either(TEXT, obj({"text": TEXT}))
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
        {
            "query": TEXT,
            "documents": list_of(document, minItems=1),
            "texts": list_of(document, minItems=1),
            "top_n": maybe({"type": "integer", "minimum": 1}),
            "raw_scores": maybe(FLAG, default=False),
            "return_documents": maybe(FLAG, default=False),
            "return_text": maybe(FLAG, default=False),
            "truncate": TRUNCATE,
        },
        ("query",),
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
        {
            "input": either(TEXT, IDS, list_of(either(TEXT, IDS), minItems=1)),
            "dimensions": maybe({"type": "integer", "minimum": 1}),
            "encoding_format": {"enum": ["float", "base64", None], "default": "float"},
            "prompt_name": PROMPT,
            "truncate": TRUNCATE,
        },
        ("input",),
        obj(answer),
        {"input": ["a dog barks", "it rains"]},
    )


def _cohere() -> Operation:
    types = {"enum": list(cohere.TYPES)}
    content = obj({"type": {"const": "text"}, "text": TEXT})
    vectors = obj({}, {"float": list_of(VECTOR), "base64": list_of(TEXT)})
    answer = {
        "id": TEXT,
        "response_type": {"const": "embeddings_by_type"},
        "embeddings": vectors,
        "texts": list_of(TEXT),
        "meta": {"type": "object"},
    }
    return Operation(
        "Cohere's embeddings: vectors of length 1",
        ("embed",),
        {
            "texts": maybe(list_of(TEXT, minItems=1)),
            "inputs": maybe(list_of(obj({"content": list_of(content, minItems=1)}), minItems=1)),
            "input_type": {"enum": [*cohere.PROMPTS, None]},
            "embedding_types": maybe(list_of(types)),
            "output_dimension": maybe({"type": "integer", "minimum": 1}),
            "prompt_name": PROMPT,
            "truncate": {"enum": [*cohere.TRUNCATE, None], "default": cohere.TRUNCATE[0]},
        },
        (),
        obj(answer),
        {"texts": ["a dog barks", "it rains"], "input_type": "search_document"},
        one_of=("texts", "inputs"),
    )


def _tei() -> dict[str, Operation]:
    texts = either(TEXT, list_of(TEXT, minItems=1))
    batch = list_of(either(TEXT, list_of(TEXT, minItems=1, maxItems=2)), minItems=1)
    token = obj(
        {"id": COUNT, "text": TEXT, "special": FLAG, "start": maybe(COUNT), "stop": maybe(COUNT)}
    )
    similar = obj({"source_sentence": TEXT, "sentences": list_of(TEXT, minItems=1)})
    asked = {"source_sentence": "a dog barks", "sentences": ["a hound howls"]}
    normalize = maybe(FLAG, default=True)
    dimensions = maybe({"type": "integer", "minimum": 1})
    return {
        "/embed": Operation(
            "TEI: a vector for each text",
            ("embed",),
            {
                "inputs": texts,
                "normalize": normalize,
                "dimensions": dimensions,
                "prompt_name": PROMPT,
                "truncate": TRUNCATE,
            },
            ("inputs",),
            list_of(VECTOR),
            {"inputs": ["a dog barks", "it rains"]},
        ),
        "/predict": Operation(
            "TEI: labels with scores; a list of two texts is a pair",
            CLASSIFIERS,
            {"inputs": either(TEXT, batch), "truncate": TRUNCATE},
            ("inputs",),
            either(list_of(SCORED), list_of(list_of(SCORED))),
            {"inputs": "what a lovely film"},
        ),
        "/similarity": Operation(
            "TEI: cosines of a sentence with others",
            ("embed",),
            {
                "inputs": similar,
                "parameters": maybe(obj({}, {"prompt_name": PROMPT, "truncate": TRUNCATE})),
                "truncate": TRUNCATE,
            },
            ("inputs",),
            list_of(NUMBER),
            {"inputs": asked},
        ),
        "/tokenize": Operation(
            "TEI: the tokens of texts",
            (),
            {
                "inputs": texts,
                "add_special_tokens": maybe(FLAG, default=True),
                "prompt_name": PROMPT,
            },
            ("inputs",),
            list_of(list_of(token)),
            {"inputs": "a dog barks"},
        ),
    }


def _infer() -> Operation:
    output = {
        "name": TEXT,
        "datatype": TEXT,
        "shape": list_of(COUNT),
        "data": list_of(either(TEXT, NUMBER)),
    }
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a dog barks"]}
    return Operation(
        "KServe, version 2: tensors of texts",
        (),
        {"inputs": list_of(TENSOR, minItems=1), "id": maybe(TEXT)},
        ("inputs",),
        obj({"model_name": TEXT, "outputs": list_of(obj(output))}, {"id": TEXT}),
        {"inputs": [text]},
        prefixed=True,
    )


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
    steps = {"type": "integer", "minimum": 1, "maximum": explain.MOST_STEPS}
    return Operation(
        "Why the model answers so: words left out, integrated gradients, attention",
        explain.KINDS,
        {
            "method": {"enum": list(methods)},
            "inputs": either(TEXT, PAIR, {"type": "object"}),
            "label": maybe(TEXT, about="the class or the tag; for fill the token"),
            "word": maybe(COUNT, default=0, about="whose tag, or which mask, from 0"),
            "steps": maybe(steps, default=explain.STEPS),
            "layer": maybe({"type": "integer", "minimum": 1}, about="by default the last"),
        },
        ("method", "inputs"),
        either(*(obj({"method": {"const": name}, **methods[name]}) for name in methods)),
        {"method": "attention", "inputs": None},
    )


def _pipeline() -> Operation:
    return Operation(
        "Hugging Face: the task of the model",
        (),
        {
            "inputs": either(TEXT, {"type": "object"}, {"type": "array"}),
            "parameters": maybe({"type": "object"}),
            "truncate": TRUNCATE,
        },
        ("inputs",),
        {},
        {"inputs": None},
    )


OPERATIONS: dict[str, Operation] = {
    **{f"/{kind}": own_operation(kind) for kind in PREDICTIONS},
    **_tei(),
    "/v2/embed": _cohere(),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _rerank()),
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), _embeddings()),
    **dict.fromkeys(("/", "/invocations"), _pipeline()),
    **{f"/pipeline/{task}": _hugging_face(task) for task in TASKS},
    "/infer": _infer(),
    "/explain": _explain(),
}
"""The POST routes."""
