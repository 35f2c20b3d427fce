"""The task shapes of Hugging Face's inference API: `{"inputs": …, "parameters": {…}}`.

The model decides the task. A text gives one answer and a list of texts a list of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Many
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import NotRequired, TypedDict

from bothways.serving import compatible, shapes
from bothways.serving.errors import RequestError
from bothways.serving.models import Models, request_errors
from bothways.tasks.classification.task import ZeroShotTask
from bothways.tasks.masked_lm.task import MaskFillingTask
from bothways.tasks.predictions import (
    AnswerPrediction,
    ClassPrediction,
    Entity,
    MultilabelPrediction,
    RankPrediction,
    ScorePrediction,
    prediction_type,
)
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.tagging.task import TaggingTask


@with_config(ConfigDict(extra="forbid"))
class QuestionObject(TypedDict):
    """A question with the text that may answer it."""

    question: shapes.Text
    context: shapes.Text


_Question = Annotated[
    QuestionObject, AfterValidator(lambda value: (value["question"], value["context"]))
]


def _read_labelled(value: Any) -> Any:
    """Read `{"text": …, "text_pair": …}`; other inputs stay as they are."""
    match value:
        case list():
            return [_read_labelled(item) for item in value]
        case {"text": str(text), "text_pair": str(pair)} if len(value) == 2:
            return (text, pair)
        case {"text": str(text)} if len(value) == 1:
            return text
        case dict():
            raise ValueError(
                'must have "text" and, for a pair, "text_pair" in an object; '
                "POST /TASK takes the columns of a task"
            )
    return value


class ClassificationParameters(shapes.Truncation):
    """Parameters of classifications."""

    top_k: shapes.Count | None = None
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None


class TaggingParameters(shapes.Truncation):
    """Parameters of tags."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    ignore_labels: list[shapes.Text] = Field(default=["O"])


class AnswerParameters(shapes.Truncation):
    """Parameters of answers."""

    top_k: shapes.Count = 1
    # The scores of all spans are a table of tokens times this length.
    max_answer_len: shapes.Count | None = Field(default=None, le=512, description="in tokens")
    handle_impossible_answer: shapes.Flag | None = Field(
        default=None, description="whether no answer is one; absent: as trained"
    )


class FillParameters(shapes.Truncation):
    """Parameters of masks."""

    top_k: shapes.Count | None = None


class ClassificationRequest(shapes.HostedRequest):
    """Texts and pairs to classify."""

    inputs: Annotated[
        shapes.Text | dict[str, Any] | shapes.NonEmpty[shapes.Row],
        shapes.AN_INPUT,
        AfterValidator(_read_labelled),
        shapes.BOUNDED,
    ]
    parameters: ClassificationParameters = ClassificationParameters()


class TaggingRequest(shapes.HostedRequest):
    """Texts to tag."""

    inputs: shapes.Texts
    parameters: TaggingParameters = TaggingParameters()


class AnswerRequest(shapes.HostedRequest):
    """Questions with the texts that may answer them."""

    inputs: Annotated[
        _Question | shapes.NonEmpty[_Question],
        shapes.must_be('objects {"question": "…", "context": "…"}'),
        shapes.BOUNDED,
    ]
    parameters: AnswerParameters = AnswerParameters()


class FillRequest(shapes.HostedRequest):
    """Texts with masks."""

    inputs: shapes.Texts
    parameters: FillParameters = FillParameters()


class TaskRequest(shapes.OwnRequest):
    """Inputs of tasks that the hosted API does not have."""

    options: shapes.Options = shapes.Options()


def _label_names(value: str | list[str]) -> list[str]:
    names = value.split(",") if isinstance(value, str) else value
    return [name.strip() for name in names if name.strip()]


_Template = Annotated[
    shapes.Text, Field(pattern=r"\{\}"), shapes.must_be("a text with {} where the label goes")
]


class ZeroShotParameters(shapes.Truncation):
    """Parameters of a classification by labels that the request names."""

    candidate_labels: Annotated[
        shapes.Text | shapes.NonEmpty[shapes.Text],
        shapes.must_be("a text with commas or a list of texts"),
        AfterValidator(_label_names),
        AfterValidator(shapes.bounded),
    ]
    hypothesis_template: _Template | None = None
    multi_label: shapes.Flag | None = None


class ZeroShotRequest(shapes.HostedRequest):
    """Texts to classify by labels that a model of natural language inference does not know."""

    inputs: shapes.Texts
    parameters: ZeroShotParameters


class EntityGroup(TypedDict):
    """An entity, or with `aggregation_strategy` "none" a word with its tag."""

    entity_group: NotRequired[str]
    entity: NotRequired[str]
    score: float
    index: NotRequired[int]
    word: str
    start: int
    end: int


class FoundAnswer(TypedDict):
    """An answer in a context."""

    answer: str
    score: float
    start: int
    end: int


class Filling(TypedDict):
    """A token for a mask."""

    score: float
    token: int
    token_str: str
    sequence: str


_FUNCTIONS: Mapping[type, str] = {
    ClassPrediction: "softmax",
    MultilabelPrediction: "sigmoid",
    RankPrediction: "sigmoid",
    ScorePrediction: "none",
}
"""The functions that make the scores of each kind of prediction."""


def _text_classification(models: Models, request: ClassificationRequest) -> shapes.Query:
    model, parameters = models.choose(request.model), request.parameters
    function, top = parameters.function_to_apply, parameters.top_k
    if function is not None:
        expected = _FUNCTIONS[prediction_type(model.task_model.task)]
        if function != expected:
            message = f"function_to_apply must be {expected}, that of the model's task"
            raise RequestError("invalid", message, param="parameters.function_to_apply")

    def write(answer: shapes.Answer) -> list[list[shapes.LabelScore]]:
        # A list of lists for a single text too: the clients take its first element.
        return [scores[:top] for scores in shapes.label_scores(answer)]

    inputs = request.inputs if isinstance(request.inputs, list) else [request.inputs]
    return shapes.Query(model, inputs, write, request.cuts)


def _zero_shot(models: Models, request: ZeroShotRequest) -> shapes.Query:
    """Read a request; a text gives labels with scores, the highest first, a list a list of these.

    Raises:
        RequestError: the model has no output for entailment, or the labels cannot be compared.
    """
    model, parameters = models.choose(request.model), request.parameters
    task = model.task_model.task
    task = task if isinstance(task, ZeroShotTask) else ZeroShotTask()
    settings = {"template": parameters.hypothesis_template, "multi_label": parameters.multi_label}
    changes: Any = {name: value for name, value in settings.items() if value is not None}
    with request_errors("parameters.candidate_labels"):
        task = replace(task, candidates=tuple(parameters.candidate_labels), **changes)
        changed = model.with_task(task)
    return shapes.query_each(changed, request.inputs, shapes.label_scores, request.cuts)


def _token_classification(models: Models, request: TaggingRequest) -> shapes.Query:
    model, parameters = models.choose(request.model), request.parameters
    ignored, by_word = parameters.ignore_labels, parameters.aggregation_strategy == "none"
    task = model.task_model.task
    assert isinstance(task, TaggingTask)
    if not by_word and "O" not in ignored and task.spells(model.task_model.labels):
        message = "ignore_labels must have 'O': words outside of entities are no group; they are "
        message += "listed with aggregation_strategy 'none'"
        raise RequestError("invalid", message, param="parameters.ignore_labels")

    def group(e: Entity) -> EntityGroup:
        return EntityGroup(
            entity_group=e.type, score=e.score, word=e.text, start=e.start, end=e.end
        )

    def write(answer: shapes.Answer) -> list[list[EntityGroup]]:
        answers = list[list[EntityGroup]]()
        for example, prediction in zip(answer.examples, answer.predictions, strict=True):
            groups: list[EntityGroup]
            if by_word or prediction.entities is None:
                scores = prediction.probabilities.max(1).tolist()
                words = zip(prediction.tags, scores, example.words, example.spans, strict=True)
                groups = [
                    {"entity": tag, "score": score, "index": n, "word": word, "start": a, "end": b}
                    for n, (tag, score, word, (a, b)) in enumerate(words, 1)
                    if tag not in ignored
                ]
            else:
                groups = [group(each) for each in prediction.entities if each.type not in ignored]
            answers.append(groups)
        return answers

    return shapes.query_each(model, request.inputs, write, request.cuts)


def _question_answering(models: Models, request: AnswerRequest) -> shapes.Query:
    model = models.choose(request.model)
    parameters, top = request.parameters, request.parameters.top_k
    task = model.task_model.task
    assert isinstance(task, QuestionAnsweringTask)
    models.limits.check("texts", "top_k", top)
    settings: dict[str, Any] = {"n_best": max(top, task.n_best)}
    if parameters.max_answer_len is not None:
        settings["longest"] = parameters.max_answer_len
    # transformers has no answer as a choice among others: a threshold of 0.
    if parameters.handle_impossible_answer is not None:
        default = 0.0 if task.threshold is None else task.threshold
        settings["threshold"] = default if parameters.handle_impossible_answer else None
    task = replace(task, **settings)
    changed = model.with_task(task)

    def best(prediction: AnswerPrediction) -> FoundAnswer:
        start, end, score = prediction.start or 0, prediction.end or 0, prediction.confidence
        return {"answer": prediction.text, "score": score, "start": start, "end": end}

    def several(prediction: AnswerPrediction) -> list[FoundAnswer]:
        answers: list[FoundAnswer] = [
            {"answer": s.text, "score": s.probability, "start": s.start, "end": s.end}
            for s in prediction.spans
        ]
        if task.threshold is None and answers:
            return answers
        # No answer has the rest of the probability, and comes first where it is the prediction.
        rest = max(0.0, 1 - sum(answer["score"] for answer in answers))
        answers.append({"answer": "", "score": rest, "start": 0, "end": 0})
        return sorted(answers, key=lambda each: (each["answer"] != prediction.text, -each["score"]))

    def write(answer: shapes.Answer) -> list[Any]:
        if top == 1:
            return [best(prediction) for prediction in answer.predictions]
        return [several(prediction)[:top] for prediction in answer.predictions]

    return shapes.query_each(changed, request.inputs, write, request.cuts)


def _fill_mask(models: Models, request: FillRequest) -> shapes.Query:
    model = models.choose(request.model)
    task, top = model.task_model.task, request.parameters.top_k
    assert isinstance(task, MaskFillingTask)
    if top is not None and top > task.top:
        message = f"top_k must be at most {task.top}, with which the model is served, not {top}"
        raise RequestError("invalid", message, param="parameters.top_k")

    tokenizer = model.task_model.tokenizer
    mask = tokenizer.token(tokenizer.specials.mask)

    def fill(text: str, prediction: Any) -> list[Filling] | list[list[Filling]]:
        """Return the tokens of a mask, each with its text; for several masks a list of these."""
        single = len(prediction.masks) == 1
        masks: list[list[Filling]] = []
        for number, guesses in enumerate(prediction.masks):
            fillings: list[Filling] = []
            for guess, filling in zip(guesses[:top], prediction.fillings, strict=False):
                id = tokenizer.id(guess.token)
                assert id is not None
                piece, gaps = tokenizer.decode([id]), text.split(mask)
                # With several masks the others stay masks in the text of a guess.
                left, tail = mask.join(gaps[: number + 1]), mask.join(gaps[number + 1 :])
                sequence = filling.text if single else left + piece + tail
                score = guess.probability
                fillings.append(
                    {"score": score, "token": id, "token_str": piece, "sequence": sequence}
                )
            masks.append(fillings)
        return masks[0] if single else masks

    def write(answer: shapes.Answer) -> list[Any]:
        pairs = zip(answer.examples, answer.predictions, strict=True)
        return [fill(example.text, prediction) for example, prediction in pairs]

    return shapes.query_each(model, request.inputs, write, request.cuts)


_CLASSIFICATION = shapes.Route(
    ClassificationRequest, _text_classification, list[list[shapes.LabelScore]]
)
_ZERO_SHOT = shapes.Route(ZeroShotRequest, _zero_shot, list[shapes.LabelScore])
ALTERNATIVES: Mapping[str, Many[shapes.Route]] = {
    **{kind: (replace(shapes.own(kind), request=TaskRequest),) for kind in shapes.PREDICTIONS},
    **dict.fromkeys(shapes.CLASSIFIERS, (_CLASSIFICATION,)),
    **dict.fromkeys(("classify", "zero-shot"), (_CLASSIFICATION, _ZERO_SHOT)),
    "rerank": (_CLASSIFICATION, compatible.RERANK),
    "embed": (
        replace(compatible.EMBED, read=partial(compatible.embed_inputs, normalise=False)),
        compatible.SIMILARITY,
    ),
    "tag": (
        shapes.Route(
            TaggingRequest, _token_classification, list[EntityGroup] | list[list[EntityGroup]]
        ),
    ),
    "answer": (
        shapes.Route(
            AnswerRequest,
            _question_answering,
            FoundAnswer | list[FoundAnswer] | list[list[FoundAnswer]],
        ),
    ),
    "fill": (
        shapes.Route(
            FillRequest, _fill_mask, list[Filling] | list[list[Filling]] | list[list[list[Filling]]]
        ),
    ),
}
"""The requests for each task, and how they are read: the usual one, and another for some tasks."""


def choose_route(models: Models, body: Mapping[str, Any]) -> shapes.Route:
    """Return the route for a request, which depends on the task of the model."""
    kind = models.choose(body.get("model"), [*ALTERNATIVES]).kind
    parameters = body.get("parameters")
    others = {"embed": isinstance(body.get("inputs"), dict), "rerank": "query" in body}
    labelled = isinstance(parameters, dict) and "candidate_labels" in parameters
    other = others.get(kind, labelled and kind in ("classify", "zero-shot"))
    return ALTERNATIVES[kind][other]
