"""The task shapes of Hugging Face's inference API: `{"inputs": …, "parameters": {…}}`.

The task is that of the model. A text gives one answer and a list of texts a list of answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bothways.serving import rerank, tei
from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.serving.shapes import (
    Answer,
    Query,
    as_input,
    class_scores,
    field,
    own,
    prompted,
    shortened,
    texts_in,
    truncates,
    whole_number,
)
from bothways.tasks.mask_filling.task import MaskFillingTask

TASKS = {
    "text-classification": tei.CLASSIFIERS,
    "token-classification": ("tag",),
    "question-answering": ("answer",),
    "fill-mask": ("fill",),
    "feature-extraction": ("embed",),
    "sentence-similarity": ("embed",),
}
"""The tasks of the hosted API by their names there, and ours."""


def pipeline(models: Models, body: Mapping[str, Any], task: str | None = None) -> Query:
    """Read a request for a model's own task, or for one of `TASKS`.

    Raises:
        RequestError: the model has another task; a field is missing or has another type.
    """
    model = models.choose(body.get("model"), () if task is None else TASKS[task])
    body = {**body, "model": model.name, "parameters": field(body, "parameters", dict, {})}
    match model.kind:
        case "rerank" if "query" in body:
            return rerank.rerank(models, body)
        case kind if kind in tei.CLASSIFIERS:
            return _text_classification(model, body)
        case "tag":
            return _token_classification(model, body)
        case "answer":
            return _question_answering(model, body)
        case "fill":
            return _fill_mask(model, body)
        case "embed" if task == "sentence-similarity" or isinstance(body.get("inputs"), dict):
            return tei.similarity(models, body)
        case "embed":
            return _feature_extraction(model, body)
        case kind:
            return own(kind)(models, body)


def _text_classification(model: ServedModel, body: Mapping[str, Any]) -> Query:
    parameters, value = body["parameters"], body.get("inputs")
    top = whole_number(parameters, "top_k")
    if parameters.get("function_to_apply") is not None:
        message = "the function is that of the model's task: leave function_to_apply out"
        raise RequestError("invalid", message, param="function_to_apply")
    inputs = [_classified(item) for item in (value if isinstance(value, list) else [value])]

    def write(answer: Answer) -> Any:
        """Return labels with scores, the highest first, for each text."""
        # A list of lists for a single text too: the clients take its first element.
        labels = answer.model.learner.labels
        return [class_scores(prediction, labels)[:top] for prediction in answer.predictions]

    return Query(model, inputs, write, truncates(body, parameters))


def _classified(value: Any) -> Any:
    match value:
        case {"text": str(text), "text_pair": str(pair)} if len(value) == 2:
            return (text, pair)
        case {"text": str(text)} if len(value) == 1:
            return text
        case dict():
            message = (
                'an object in inputs has "text" and, for a pair, "text_pair"; '
                "POST /TASK takes the columns of a task"
            )
            raise RequestError("invalid", message, param="inputs")
        case _:
            return as_input(value)


def _token_classification(model: ServedModel, body: Mapping[str, Any]) -> Query:
    parameters = body["parameters"]
    texts, several = texts_in(body.get("inputs"), "inputs")
    strategy = field(parameters, "aggregation_strategy", str, "simple")
    strategies = ("none", "simple", "first", "average", "max")
    if strategy not in strategies:
        message = f"aggregation_strategy must be one of {', '.join(strategies)}"
        raise RequestError("invalid", message, param="aggregation_strategy")
    ignored = field(parameters, "ignore_labels", list, ["O"])

    def write(answer: Answer) -> Any:
        """Return the entities of each text, or its words with their tags."""
        pairs = zip(answer.examples, answer.predictions, strict=True)
        rows = [
            _words(example, prediction, ignored)
            if strategy == "none" or prediction.entities is None
            else [
                {"entity_group": e.type, "score": e.score, "word": e.text}
                | {"start": e.start, "end": e.end}
                for e in prediction.entities
                if e.type not in ignored
            ]
            for example, prediction in pairs
        ]
        return rows if several else rows[0]

    return Query(model, texts, write, truncates(body, parameters))


def _words(example: Any, prediction: Any, ignored: list[Any]) -> list[dict[str, Any]]:
    scores = prediction.probabilities.max(1).tolist()
    words = zip(prediction.tags, scores, example.words, example.spans, strict=True)
    return [
        {"entity": tag, "score": score, "index": n, "word": word, "start": start, "end": end}
        for n, (tag, score, word, (start, end)) in enumerate(words, 1)
        if tag not in ignored
    ]


def _question_answering(model: ServedModel, body: Mapping[str, Any]) -> Query:
    parameters, value = body["parameters"], body.get("inputs")
    several = isinstance(value, list)
    top = whole_number(parameters, "top_k", 1)
    assert top is not None
    inputs = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            message = 'inputs must be an object like {"question": "…", "context": "…"}'
            raise RequestError("invalid", message, param="inputs")
        inputs.append((field(item, "question", str), field(item, "context", str)))

    def write(answer: Answer) -> Any:
        """Return the best answers to each question."""
        rows: list[Any] = []
        for prediction in answer.predictions:
            if top == 1:
                start, end = prediction.start or 0, prediction.end or 0
                score = prediction.confidence
                rows.append({"answer": prediction.text, "score": score, "start": start, "end": end})
            else:
                rows.append(
                    [
                        {"answer": s.text, "score": s.probability, "start": s.start, "end": s.end}
                        for s in prediction.spans[:top]
                    ]
                )
        return rows if several else rows[0]

    return Query(model, inputs, write, truncates(body, parameters))


def _fill_mask(model: ServedModel, body: Mapping[str, Any]) -> Query:
    parameters, task = body["parameters"], model.learner.task
    assert isinstance(task, MaskFillingTask)
    texts, several = texts_in(body.get("inputs"), "inputs")
    top = whole_number(parameters, "top_k", task.top)
    if parameters.get("targets") is not None:
        message = "the tokens cannot be chosen: leave targets out"
        raise RequestError("invalid", message, param="targets")
    if top is not None and top > task.top:
        message = f"top_k must be at most {task.top}, with which the model is served, not {top}"
        raise RequestError("invalid", message, param="top_k")

    def write(answer: Answer) -> Any:
        """Return the best tokens for each mask."""
        pairs = zip(answer.examples, answer.predictions, strict=True)
        rows = [_fillings(model, example.text, p, top) for example, p in pairs]
        return rows if several else rows[0]

    return Query(model, texts, write, truncates(body, parameters))


def _fillings(model: ServedModel, text: str, prediction: Any, top: int | None) -> list[Any]:
    """Return the tokens of a mask, each with its text; for several masks a list of these."""
    tokenizer = model.learner.tokenizer
    mask = tokenizer.token(tokenizer.specials.mask)
    single = len(prediction.masks) == 1
    masks = []
    for number, guesses in enumerate(prediction.masks):
        found = []
        for guess, filling in zip(guesses[:top], prediction.fillings, strict=False):
            id = tokenizer.id(guess.token)
            assert id is not None
            piece, parts = tokenizer.decode([id]), text.split(mask)
            left, right = mask.join(parts[: number + 1]), mask.join(parts[number + 1 :])
            sequence = filling.text if single else left + piece + right
            found.append(
                {"score": guess.probability, "token": id, "token_str": piece}
                | {"sequence": sequence}
            )
        masks.append(found)
    return masks[0] if single else masks


def _feature_extraction(model: ServedModel, body: Mapping[str, Any]) -> Query:
    parameters = body["parameters"]
    texts, _ = texts_in(body.get("inputs"), "inputs")
    # Clients send these at the root or among the parameters.
    inputs = prompted(model, texts, body, parameters)
    normalise = field(body, "normalize", bool, field(parameters, "normalize", bool, False))

    def write(answer: Answer) -> Any:
        """Return a vector for each text."""
        return list(shortened(answer, None, normalise=normalise))

    return Query(model, inputs, write, truncates(body, parameters))
