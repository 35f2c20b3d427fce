"""The task shapes of Hugging Face's inference API: `{"inputs": …, "parameters": {…}}`.

The model decides the task. A text gives one answer and a list of texts a list of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, WithJsonSchema
from typing_extensions import NotRequired, TypedDict

from bothways.core.errors import ConfigError
from bothways.serving import openai, requests, shapes, tei
from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.tasks.entailment.task import ZeroShotTask
from bothways.tasks.mask_filling.task import MaskFillingTask
from bothways.tasks.predictions import AnswerPrediction
from bothways.tasks.question_answering.task import QuestionAnsweringTask

_QUESTION = {
    "type": "object",
    "properties": {"question": requests.TEXT, "context": requests.TEXT},
    "required": ["question", "context"],
}


def _read_labelled(value: Any) -> Any:
    match value:
        case {"text": str(text), "text_pair": str(pair)} if len(value) == 2:
            return (text, pair)
        case {"text": str(text)} if len(value) == 1:
            return text
        case dict():
            raise ValueError(
                'must have "text" and, for a pair, "text_pair" in an object; '
                "POST /TASK takes the columns of a task"
            )
        case _:
            return requests.check_input(value)


def _read_question(value: Any) -> tuple[str, str]:
    match value:
        case {"question": str(question), "context": str(context)} if len(value) == 2:
            return question, context
        case _:
            raise ValueError('must be objects {"question": "…", "context": "…"}')


class ClassificationParameters(requests.Truncation):
    """Parameters of classifications."""

    top_k: requests.Count | None = None
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None


class TaggingParameters(requests.Truncation):
    """Parameters of tags."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    ignore_labels: list[requests.Text] = Field(default=["O"])


class AnswerParameters(requests.Truncation):
    """Parameters of answers."""

    top_k: requests.Count = 1
    max_answer_len: Annotated[requests.Count, Field(description="in tokens")] | None = None
    handle_impossible_answer: (
        Annotated[requests.Flag, Field(description="whether no answer is one; absent: as trained")]
        | None
    ) = None


class FillParameters(requests.Truncation):
    """Parameters of masks."""

    top_k: requests.Count | None = None


class _PipelineRequest(requests.TruncatedRequest):
    options: requests.Options = requests.Options()


class ClassificationRequest(_PipelineRequest):
    """Texts and pairs to classify."""

    inputs: Annotated[
        requests.Items,
        requests.per_item(_read_labelled),
        WithJsonSchema(requests.either(requests.ROW, requests.list_of(requests.ROW, minItems=1))),
    ]
    parameters: ClassificationParameters = ClassificationParameters()


class TaggingRequest(_PipelineRequest):
    """Texts to tag."""

    inputs: requests.Texts
    parameters: TaggingParameters = TaggingParameters()


class AnswerRequest(_PipelineRequest):
    """Questions with the texts that may answer them."""

    inputs: Annotated[
        requests.Items,
        requests.per_item(_read_question),
        WithJsonSchema(requests.either(_QUESTION, requests.list_of(_QUESTION, minItems=1))),
    ]
    parameters: AnswerParameters = AnswerParameters()


class FillRequest(_PipelineRequest):
    """Texts with masks."""

    inputs: requests.Texts
    parameters: FillParameters = FillParameters()


class TaskRequest(shapes.OwnRequest):
    """Inputs of tasks that the hosted API does not have."""

    options: requests.Options = requests.Options()


def _label_names(value: Any) -> list[str]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("must be a text with commas or a list of texts")
    return [name.strip() for name in names if name.strip()]


class ZeroShotParameters(requests.Truncation):
    """Parameters of a classification by labels that the request names."""

    candidate_labels: Annotated[
        Any,
        AfterValidator(_label_names),
        AfterValidator(requests.bounded),
        WithJsonSchema(requests.either(requests.TEXT, requests.list_of(requests.TEXT, minItems=1))),
    ]
    hypothesis_template: requests.Text = ZeroShotTask.template
    multi_label: requests.Flag = False


class ZeroShotRequest(_PipelineRequest):
    """Texts to classify by labels that a model of natural language inference does not know."""

    inputs: requests.Texts
    parameters: ZeroShotParameters


_OF_LABELS = ("classify", "zero-shot")
"""Tasks whose models may be those of natural language inference."""


def request_of(models: Models, body: Mapping[str, Any]) -> type[requests.RequestBody]:
    """Return the fields of a request, which depend on the task of the model."""
    kind, parameters = models.choose(body.get("model")).kind, body.get("parameters")
    if kind in _OF_LABELS and isinstance(parameters, dict) and "candidate_labels" in parameters:
        return ZeroShotRequest
    if kind == "rerank" and "query" in body:
        return openai.RerankRequest
    if kind == "embed":
        compares = isinstance(body.get("inputs"), dict)
        return tei.SimilarityRequest if compares else tei.EmbedRequest
    return PIPELINES[kind].request if kind in PIPELINES else TaskRequest


def pipeline(models: Models, request: Any) -> shapes.Query:
    """Read a request for a model's own task.

    Raises:
        RequestError: a parameter that the model does not have.
    """
    match request:
        case openai.RerankRequest():
            return openai.reranking(models, request)
        case tei.SimilarityRequest():
            return tei.similarity(models, request)
        case tei.EmbedRequest():
            return tei.tei_embed(models, request, normalise=False)
        case ZeroShotRequest():
            return _zero_shot(models, request)
    model = models.choose(request.model)
    if model.kind not in PIPELINES:
        query: shapes.Query = shapes.own(model.kind).read(models, request)
        return query
    truncate = bool(request.truncate and request.parameters.truncate)
    return PIPELINES[model.kind].read(model, request, truncate)


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


_FUNCTIONS = {
    "classify": "softmax",
    "multilabel": "sigmoid",
    "rerank": "sigmoid",
    "regress": "none",
}
"""The functions that make the scores of each task."""


def _text_classification(
    model: ServedModel, request: ClassificationRequest, truncate: bool
) -> shapes.Query:
    parameters, value = request.parameters, request.inputs
    function, top = parameters.function_to_apply, parameters.top_k
    if function not in (None, _FUNCTIONS[model.kind]):
        message = f"function_to_apply must be {_FUNCTIONS[model.kind]}, that of the model's task"
        raise RequestError("invalid", message, param="parameters.function_to_apply")

    def write(answer: shapes.Answer) -> list[list[shapes.LabelScore]]:
        # A list of lists for a single text too: the clients take its first element.
        return [scores[:top] for scores in shapes.label_scores(answer)]

    return shapes.Query(model, value if isinstance(value, list) else [value], write, truncate)


def _zero_shot(models: Models, request: ZeroShotRequest) -> shapes.Query:
    """Read a request; a text gives labels with scores, the highest first, a list a list of these.

    Raises:
        RequestError: the model has no output for entailment, or the labels cannot be compared.
    """
    model, parameters = models.choose(request.model, _OF_LABELS), request.parameters
    try:
        changed = model.with_task(
            ZeroShotTask(
                candidates=tuple(parameters.candidate_labels),
                template=parameters.hypothesis_template,
                multi_label=parameters.multi_label,
            )
        )
    except ConfigError as error:
        raise RequestError(
            "invalid", error.message("json"), param="parameters.candidate_labels"
        ) from error
    truncate = bool(request.truncate and parameters.truncate)
    return shapes.query_each(changed, request.inputs, shapes.label_scores, truncate)


def _token_classification(
    model: ServedModel, request: TaggingRequest, truncate: bool
) -> shapes.Query:
    parameters = request.parameters
    ignored, by_word = parameters.ignore_labels, parameters.aggregation_strategy == "none"

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
                groups = [
                    {
                        "entity_group": e.type,
                        "score": e.score,
                        "word": e.text,
                        "start": e.start,
                        "end": e.end,
                    }
                    for e in prediction.entities
                    if e.type not in ignored
                ]
            answers.append(groups)
        return answers

    return shapes.query_each(model, request.inputs, write, truncate)


def _question_answering(model: ServedModel, request: AnswerRequest, truncate: bool) -> shapes.Query:
    parameters, top = request.parameters, request.parameters.top_k
    task = model.task_model.task
    assert isinstance(task, QuestionAnsweringTask)
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

    return shapes.query_each(changed, request.inputs, write, truncate)


def _fill_mask(model: ServedModel, request: FillRequest, truncate: bool) -> shapes.Query:
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

    return shapes.query_each(model, request.inputs, write, truncate)


class Pipeline(NamedTuple):
    """A task of the hosted API: its request, its answer, and what reads the request."""

    request: type[requests.RequestBody]
    answer: Any
    read: Callable[[ServedModel, Any, bool], shapes.Query]


PIPELINES: Mapping[str, Pipeline] = {
    **dict.fromkeys(
        shapes.CLASSIFIERS,
        Pipeline(ClassificationRequest, list[list[shapes.LabelScore]], _text_classification),
    ),
    "tag": Pipeline(
        TaggingRequest, list[EntityGroup] | list[list[EntityGroup]], _token_classification
    ),
    "answer": Pipeline(
        AnswerRequest,
        FoundAnswer | list[FoundAnswer] | list[list[FoundAnswer]],
        _question_answering,
    ),
    "fill": Pipeline(
        FillRequest, list[Filling] | list[list[Filling]] | list[list[list[Filling]]], _fill_mask
    ),
}
"""The tasks of the hosted API; other tasks answer as `own`, and vectors as TEI."""
