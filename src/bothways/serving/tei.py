"""The routes of text-embeddings-inference (TEI): embed, predict, similarity, tokenize, info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bothways import __version__
from bothways.serving.errors import RequestError, nothing_given
from bothways.serving.limits import Limits
from bothways.serving.models import Models, ServedModel
from bothways.serving.shapes import (
    Answer,
    Query,
    class_scores,
    component_count,
    cosines,
    field,
    prompted,
    shortened,
    texts_in,
    truncates,
)
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask

CLASSIFIERS = ("classify", "multilabel", "regress", "rerank")
"""The tasks whose predictions `class_scores` writes as labels with scores."""


def embed(models: Models, body: Mapping[str, Any]) -> Query:
    """Read a request of `/embed`: `inputs`, `normalize` (true), `dimensions`, `prompt_name`."""
    model = models.choose(body.get("model"), ("embed",))
    texts, _ = texts_in(body.get("inputs"), "inputs")
    count = component_count(body, "dimensions", model)
    normalise = field(body, "normalize", bool, True)

    def write(answer: Answer) -> Any:
        """Return a vector for each text."""
        return list(shortened(answer, count, normalise=normalise))

    return Query(model, prompted(model, texts, body), write, truncates(body))


def predict(models: Models, body: Mapping[str, Any]) -> Query:
    """Read a request of `/predict`: labels with scores, the highest first.

    A list of two texts is a pair; a batch is a list of lists of one text or two.
    """
    model = models.choose(body.get("model"), CLASSIFIERS)
    value = body.get("inputs")
    one = isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
    )
    inputs = [_pair(item) for item in ([value] if one else field(body, "inputs", list))]

    def write(answer: Answer) -> Any:
        """Return labels with scores, the highest first, for each text."""
        rows = [class_scores(p, answer.model.learner.labels) for p in answer.predictions]
        return rows[0] if one else rows

    return Query(model, inputs, write, truncates(body))


def _pair(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        if len(texts) == 1:
            return texts[0]
        if len(texts) == 2:
            return tuple(texts)
    message = (
        "inputs must be a text, a pair [text, text], or a list of lists of one text or two; "
        "write texts [a, b, c] as [[a], [b], [c]]"
    )
    raise RequestError("invalid", message, param="inputs")


def similarity(models: Models, body: Mapping[str, Any]) -> Query:
    """Read `{"inputs": {"source_sentence": …, "sentences": […]}}`; the answer is the cosines."""
    model = models.choose(body.get("model"), ("embed",))
    inputs = field(body, "inputs", dict)
    parameters = field(body, "parameters", dict, {})
    source = field(inputs, "source_sentence", str)
    sentences, _ = texts_in(field(inputs, "sentences", list), "sentences")
    if not sentences:
        raise RequestError("empty", "sentences is an empty list", param="sentences")

    def write(answer: Answer) -> Any:
        """Return the cosine of each sentence with the source sentence."""
        return cosines(answer.vectors[0], answer.vectors[1:])

    texts = prompted(model, [source, *sentences], parameters)
    return Query(model, texts, write, truncates(body, parameters))


def tokenized(models: Models, body: Mapping[str, Any], limits: Limits) -> Any:
    """Return the tokens of texts, each with its id, its characters, and whether it is special."""
    model = models.choose(body.get("model"))
    given, _ = texts_in(body.get("inputs"), "inputs")
    if not given:
        raise nothing_given()
    texts = [item.prompt + item.text for item in prompted(model, given, body)]
    special = field(body, "add_special_tokens", bool, True)
    if sum(map(len, texts)) > limits.text_characters:
        message = f"there are more than {limits.text_characters:,} characters (text_characters)"
        raise RequestError("text_too_long", message, param="inputs")
    return [_tokens(model, text, special=special) for text in texts]


def _tokens(model: ServedModel, text: str, *, special: bool) -> list[dict[str, Any]]:
    tokenizer = model.learner.tokenizer
    (encoded,) = tokenizer.encode_with_offsets([text])
    pairs = zip(encoded.ids.tolist(), encoded.offsets.tolist(), strict=True)
    inner = [
        {"id": id, "text": tokenizer.token(id), "special": False, "start": start, "stop": stop}
        for id, (start, stop) in pairs
    ]
    if not special:
        return inner
    before, after = (
        [
            {"id": int(id), "text": tokenizer.token(id), "special": True}
            | {"start": None, "stop": None}
            for id in gap.ids
        ]
        for gap in (tokenizer.template.before, tokenizer.template.after)
    )
    return [*before, *inner, *after]


def info(models: Models, limits: Limits) -> dict[str, Any]:
    """Return what `/info` says: TEI's names for the first model, then all models and limits."""
    first = next(iter(models))
    return {
        "model_id": first.name,
        "served_model_name": first.name,
        "model_dtype": _dtype(first),
        "model_type": _model_type(first),
        "max_input_length": first.learner.length,
        "max_batch_tokens": limits.batch_tokens,
        "max_client_batch_size": limits.texts,
        "auto_truncate": True,
        "version": __version__,
        "limits": vars(limits),
        "models": [_described(model) for model in models],
    }


def _described(model: ServedModel) -> dict[str, Any]:
    task = model.learner.task
    columns = getattr(task, "columns", None)
    tokenizer = model.learner.tokenizer
    return {
        "name": model.name,
        "task": model.kind,
        "length": model.learner.length,
        "precision": model.predictor.precision,
        "labels": list(model.learner.labels),
        "since": model.created,
        "digest": model.digest or None,
        **({"prompts": list(task.prompts)} if isinstance(task, SentenceEmbeddingTask) else {}),
        "pairs": getattr(columns, "text_b", None) is not None,
        "layers": model.learner.model.config.depth,
        "mask": tokenizer.token(tokenizer.specials.mask),
        "specials": {"single": tokenizer.template.single, "pair": tokenizer.template.pair},
        "long_texts": _long_texts(model),
    }


def _long_texts(model: ServedModel) -> str:
    """Return how texts beyond the length are read, as `LongTextTask.long_texts`."""
    usual = "windows" if model.kind in ("tag", "answer", "likelihood", "prefer") else "truncate"
    return getattr(model.learner.task, "long_texts", usual)


def _dtype(model: ServedModel) -> str:
    names = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
    return names[model.predictor.precision]


def _model_type(model: ServedModel) -> dict[str, Any]:
    task = model.learner.task
    if isinstance(task, SentenceEmbeddingTask):
        return {"embedding": {"pooling": task.pooling}}
    labels = dict(enumerate(model.learner.labels))
    names = {
        "id2label": {str(n): label for n, label in labels.items()},
        "label2id": {label: n for n, label in labels.items()},
    }
    return {"reranker" if model.kind == "rerank" else "classifier": names}
