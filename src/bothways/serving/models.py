"""The models of a server: each a predictor under a name, and the choice among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bothways.core.errors import BothwaysError, ConfigError
from bothways.data.tables import WatchedRow
from bothways.prediction.predictor import Predictor, read_input
from bothways.serving.errors import Limits, RequestError
from bothways.tasks.base import EncodedExample, Task, TaskModel, did_you_mean

if TYPE_CHECKING:
    from bothways.serving.search import ServedIndex

CHUNK_CHARACTERS = 32_000
"""Characters that are tokenized before other requests have their turn: some 20 ms."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A predictor under a name.

    Attributes:
        name: what requests call it.
        created: seconds since 1970 at which it was opened.
        digest: the SHA-256 of its folder; empty if it was not opened from one.
        facts: what it is (`hub.provenance.model_facts`).
        variant: the model with a task of other settings, for one request.
    """

    name: str
    predictor: Predictor
    created: int = 0
    digest: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    variant: TaskModel[Any, Any] | None = None

    @property
    def task_model(self) -> TaskModel[Any, Any]:
        """The task with its model."""
        return self.predictor.task_model if self.variant is None else self.variant

    def with_task(self, task: Task[Any, Any]) -> ServedModel:
        """Return the model for a request that sets settings of its task; itself if it sets none."""
        task_model = self.predictor.task_model
        if task == task_model.task:
            return self
        variant = task.bind(
            task_model.model, task_model.tokenizer, task_model.labels, task_model.length
        )
        variant.training = False  # the model is in evaluation mode already
        return replace(self, variant=variant)

    @property
    def kind(self) -> str:
        """The kind of the task, such as "classify"."""
        return self.task_model.task.name

    @property
    def reads_vocabulary(self) -> bool:
        """True if its head has an output for each token of the vocabulary.

        The products of such a head are not batch-invariant: an example is a batch.
        """
        heads = self.task_model.task.heads(self.task_model.labels, None)
        return any(head.of_vocabulary for head in heads)

    @property
    def example_inputs(self) -> Any:
        """The example of `inputs` of a request, with the mask of this model's tokenizer."""
        tokenizer, value = self.task_model.tokenizer, self.task_model.task.example_input
        mask = tokenizer.token(tokenizer.specials.mask)
        return value.replace("[MASK]", mask) if isinstance(value, str) else value

    def long_inputs(self, limits: Limits) -> list[Any]:
        """Return the example with texts as long as the model reads, within a limit."""
        long = "a " * min(self.task_model.length, limits.text_characters // 4)
        match self.example_inputs:
            case inputs if self.reads_vocabulary:  # a long text would take a pass for each token
                return inputs if isinstance(inputs, list) else [inputs]
            case [[query, _]]:
                return [[query, long]]
            case dict() as row:
                return [{key: long if isinstance(x, str) else x for key, x in row.items()}]
            case _:
                return [long]

    def examples(
        self,
        inputs: Many[Any],
        limits: Limits,
        input_name: Callable[[int], str] = "input {}".format,
    ) -> list[Any]:
        """Return the examples in the inputs of a request.

        Raises:
            RequestError: too many inputs, one that is too long, or one that the task cannot read.
        """
        if not inputs:
            raise RequestError("empty", "there is no input: give at least one text")
        limits.check("texts", "inputs", len(inputs))
        for item in (item for item in inputs if isinstance(item, dict)):
            for name, value in item.items():  # words, endings
                length = len(value) if isinstance(value, list) else 0
                limits.check("text_characters", f"items of {name[:100]}", length)
        examples = [self.example(item, n) for n, item in enumerate(inputs, 1)]
        texts = characters = 0
        for n, example in enumerate(examples, 1):
            lengths = [*map(len, self.task_model.task.texts(example))]
            limits.check("text_characters", f"characters of {input_name(n)}", sum(lengths))
            texts += max(1, len(lengths) - 1)  # a query with its documents counts as these
            characters += sum(lengths)
        limits.check("texts", "texts", texts)
        limits.check("request_characters", "characters of all pairs", characters)
        return examples

    def example(self, value: Any, number: int = 1) -> Any:
        """Read the `number`-th input of a request: a text, a pair, or an object with columns.

        Raises:
            RequestError: the task cannot read it, or an object has a field that the task ignores.
        """
        row = WatchedRow(value) if isinstance(value, dict) else value
        with request_errors():
            example = read_input(self.task_model, row, number, labelled=None)
        unused = [name for name in row if name not in row.read] if row is not value else ()
        if unused:
            path = f"inputs.{unused[0][:100]}"
            near = did_you_mean(unused[0], row.read)
            message = f"{path} is unknown{near}; the task {self.kind} reads {', '.join(row.read)}"
            raise RequestError("invalid", message, param=path)
        return example

    def encode(self, examples: Many[Any]) -> Many[EncodedExample]:
        """Return the model inputs of examples.

        Raises:
            RequestError: an example that the task cannot encode.
        """
        with request_errors():
            return self.task_model.encode(examples)


def check_name(name: str, where: str, fix: str) -> None:
    """Raise ConfigError if a name of a model or an index cannot stand in a URL as it is."""
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name)):
        allowed = 'a text of at most 100 ASCII letters, digits, ".", "_" and "-"'
        message = f"{name!r} is not a name: {allowed}"
        raise ConfigError(message, where=where, fix=fix)


def example_ranges(model: ServedModel, examples: Many[Any]) -> Iterator[tuple[int, int]]:
    """Yield ranges of examples with some `CHUNK_CHARACTERS`, each at least one."""
    start = characters = 0
    for n, example in enumerate(examples):
        characters += sum(map(len, model.task_model.task.texts(example)))
        if characters > CHUNK_CHARACTERS and n > start:
            yield start, n
            start, characters = n, sum(map(len, model.task_model.task.texts(example)))
    yield start, len(examples)


@contextmanager
def request_errors(param: str = "inputs") -> Iterator[None]:
    """Raise a user's mistake as the error of a request, whose field `param` is at fault."""
    try:
        yield
    except BothwaysError as error:
        raise RequestError("invalid", error.message("json"), param=param) from error


class Models:
    """The models of a server by name, at least one, its indexes by name, and its limits."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        indexes: Mapping[str, ServedIndex],
        limits: Limits,
    ) -> None:
        self.by_name, self.indexes, self.limits = dict(models), indexes, limits

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.by_name.values())

    def named(self, name: str) -> ServedModel:
        """Return the model with exactly this name.

        Raises:
            RequestError: there is none.
        """
        if name not in self.by_name:
            message = f"there is no model {name[:100]!r}; there are {', '.join(self.by_name)}"
            raise RequestError("model_not_found", message, param="model")
        return self.by_name[name]

    def choose(self, name: object, kinds: Many[str] = ()) -> ServedModel:
        """Return the model that a request asks for.

        Without a name, and where the server has a single model, it is the one model for these
        kinds of tasks.

        Args:
            name: the field `model` of the request, if any.
            kinds: the tasks that the route is for; empty for any.

        Raises:
            RequestError: there is no such model, it has another task, or the name is missing.
        """
        if name is not None and not isinstance(name, str):
            raise RequestError("invalid", "model must be a text", param="model")
        # A server of one model answers to any name: clients must send one.
        models = [self.named(name)] if name is not None and len(self.by_name) > 1 else [*self]
        fitting = [model for model in models if not kinds or model.kind in kinds]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            names = ", ".join(model.name for model in fitting)
            message = f"there are several models: set model to one of {names}"
            raise RequestError("invalid", message, param="model")
        served = ", ".join(f"{model.name!r} is for {model.kind}" for model in models)
        message = (
            f"this route is for {', '.join(kinds)}, and {served}; "
            "a server is started for a task by NAME=FOLDER:TASK"
        )
        raise RequestError("wrong_task", message, param="model")
