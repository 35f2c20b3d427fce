"""Tasks: how examples become model inputs, and model outputs become scored predictions.

    row → example → encode → sequences → model → outputs → decode → prediction → score

A `Task` is a frozen value without a model. It is part of a run's configuration and is saved with
the model, including tuned thresholds, so that predictions are made as in training. It keeps no
state between calls, so any number of threads may share one. A `TaskModel` binds a task to a
model, a tokenizer, label names and a length: the module that training optimizes.

One example may become several sequences, such as the windows of a long text; `decode` receives the
outputs of all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float64
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError, DataError, Finding
from bothways.core.source import Sequence
from bothways.core.terminal import listed, quantity
from bothways.core.training_module import Loss, TrainingModule
from bothways.data.tables import Table, TableRow
from bothways.hub.hf_config import Problem
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer

E = TypeVar("E")
"""An example of a task: a frozen dataclass; its field `where` names its source, for messages."""
P = TypeVar("P")
"""A prediction of a task."""
A = TypeVar("A")
T = TypeVar("T")
"""A kind of task, without a bound: beartype cannot read one that is defined below."""

Direction = Literal["lowest", "highest"]
Metrics = Mapping[str, float]
Row = Mapping[str, object]
"""Values by column name: a JSON object, a DataFrame row or a row of a Hub data set."""
Results = Iterable[tuple[E, P]]
"""Examples with their predictions."""
Output = NDArray[np.float32]
"""The model's output for one sequence: a vector of logits, or one vector per token."""


class OutputScale(NamedTuple):
    """The scale on which scores far from 0 are learned.

    Attributes:
        mean: of the training scores.
        unit: their standard deviation.
    """

    mean: float
    unit: float


def directions(*highest: str, lowest: str = "") -> dict[str, Direction]:
    """Return metrics with their better direction, which is "highest" for all but one."""
    result: dict[str, Direction] = dict.fromkeys(highest, "highest")
    return {**result, lowest: "lowest"} if lowest else result


MIN_LENGTH = 5
"""[CLS], a token, [SEP], a token, [SEP]."""


@dataclass(frozen=True)
class EncodedExample:
    """The model inputs of one example. Tasks extend it with the data that `decode` needs.

    Attributes:
        sequences: model inputs, with targets where the example has its answer.
        tokens: number of tokens of its texts before truncation, without special tokens.
        cut: number of these tokens that are in no sequence.
        windows: number of sequences of each text, where texts have outputs of their own.
    """

    sequences: tuple[Sequence, ...]
    tokens: int
    cut: int
    windows: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    @classmethod
    def of_texts(cls, texts: Many[EncodedExample]) -> EncodedExample:
        """Join the sequences of several texts."""
        return cls(
            tuple(sequence for text in texts for sequence in text.sequences),
            sum(text.tokens for text in texts),
            sum(text.cut for text in texts),
            windows=tuple(len(text.sequences) for text in texts),
        )

    def by_text(self, values: Many[A]) -> list[Many[A]]:
        """Return the values of each text from the values of its sequences."""
        ends = np.cumsum(self.windows).tolist()
        return [values[end - count : end] for end, count in zip(ends, self.windows, strict=True)]


@dataclass(frozen=True)
class Columns:
    """The base of the types of columns: names, or numbers from 0 in a file without a header.

    None and the default of a field: guess, if it is clear. A task that names no column has none.
    """

    def __str__(self) -> str:
        entries = (
            (role, ", ".join(map(repr, names_in(value)))) for role, value in vars(self).items()
        )
        return ", ".join(f"{role} = {names}" for role, names in entries if names)


def names_in(value: str | Many[str] | None) -> list[str]:
    """Return the names in a field of columns."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


@dataclass(frozen=True)
class Reading(Generic[E]):
    """An open source of examples.

    Attributes:
        task: the task, with the columns that are read.
        examples: an iterator over the examples.
        share: returns how much has been read, from 0 to 1; None where this is unknown.
        table: what is read, if each of its rows is an example. Its rows are to be read instead of
            `examples`, where other columns are needed, too.
        parse: returns the example in a row of the table.
        notes: sentences for the user about what is read, complete when all is read.
        unused: names of columns that are not read, where there is no table, complete when all is
            read.
    """

    task: Task[E, Any]
    examples: Iterator[E]
    share: Callable[[], float] | None = None
    table: Table | None = None
    parse: Callable[[TableRow], E] | None = None
    notes: Many[str] = ()
    unused: Many[str] = ()

    @classmethod
    def of_table(
        cls, task: Task[E, Any], table: Table, parse: Callable[[TableRow], E], notes: Many[str] = ()
    ) -> Reading[E]:
        """Return the reading of a table with one example per row."""

        def examples() -> Iterator[E]:
            with contextlib.closing(table):  # now, not when the traceback of an error is collected
                yield from map(parse, table.rows)

        return cls(task, examples(), table.share, table, parse, notes)


class Task(Generic[E, P]):
    """A task without a model. Subclasses are frozen dataclasses whose last field is `kind`.

    Attributes:
        columns: the columns that are read.
        long_texts: what is done with longer texts than the model reads: "truncate", "windows", or
            a setting of the task.

    Class attributes:
        aliases: common names of the task, among them the pipelines of transformers; "ner pos".
        metric: the metric that selects the best weights by default.
        metrics: the metrics that can, where labels do not decide them (`directions`).
        length: maximum sequence length by default, in tokens.
        window: maximum number of examples that are predicted together; smaller where one example
            becomes many sequences.
        truncation_advice: advice on texts that are cut, where the model can read them whole, and
            where it cannot; "{needed}" is the length that holds nearly all texts, "{limit}"
            for the maximum length of the model.
        problem: the `problem_type` of transformers, for tasks that share the label head.
        example_input: the inputs of a request, for the OpenAPI document and to warm a server up;
            "[MASK]" is the mask of the model's tokenizer.
        model_class: the class that binds the task to a model.
        rows_of_lists: whether all values of a row may be lists, such as words and their tags;
            a dict of lists is otherwise a table of columns.
    """

    kind: str
    columns: Any = Columns()
    long_texts: str = "truncate"

    aliases: ClassVar[str] = ""
    metric: ClassVar[str] = ""
    metrics: ClassVar[Mapping[str, Direction]] = {}
    length: ClassVar[int] = 128
    window: ClassVar[int] = 4096
    truncation_advice: ClassVar[tuple[str, str]] = ("Set length={needed}.", "Set length={limit}.")
    problem: ClassVar[Problem | None] = None
    example_input: ClassVar[Any] = "the cat sleeps in London"
    model_class: ClassVar[type[TaskModel[Any, Any]]]
    rows_of_lists: ClassVar[bool] = False

    def read(self, source: str, columns: Any = None, *, labelled: bool = True) -> Reading[E]:
        """Open a file, a Hub data set or the standard input ("-") and stream its examples.

        Args:
            columns: the columns to read, of the same type as `self.columns`. Unnamed columns
                default to the task's, if the data has them; else they are guessed.
            labelled: whether to read answers.

        Raises:
            DataError: the source cannot be read, a column is missing or cannot be guessed; while
                reading, a row without a column or with a value of the wrong type.
        """
        raise NotImplementedError

    def read_rows(
        self, rows: Iterable[TableRow], parse: Callable[[TableRow], E], columns: Any = None,
        *, labelled: bool = True,
    ) -> Reading[E]:  # fmt: skip
        """Read rows in memory: what a DataFrame or a list holds.

        Args:
            rows: with the name of each for messages; other things than rows are in `values`, too.
            parse: returns the example in a row.
            columns, labelled: as in `read`.
        """
        return Reading(self, map(parse, rows))

    def example(
        self, row: Row, columns: Any = None, labelled: bool | None = None, *,
        where: str = "an example",
    ) -> E:  # fmt: skip
        """Return the example in a row.

        Args:
            columns: as in `read`.
            labelled: whether the answer is read; None: if its column is known.

        Raises:
            DataError: a column is missing or cannot be guessed, or a value has the wrong type.
        """
        raise NotImplementedError

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> E:
        """Return the example that consists of these texts: one, two, or a query with documents.

        Raises:
            DataError: an example of the task has another form.
        """
        raise self.wrong_texts(texts, where, "a dict with its columns")

    def answered(self, example: E, answer: Any) -> E:
        """Return an example with its answer.

        Raises:
            DataError: the answer is none, or answers of the task need a row.
        """
        message = f"answers of the task {self.name!r} are part of the rows"
        fix = "Give rows that have their answers, to evaluate(rows)."
        raise DataError(message, where="answers", fix=fix)

    def wrong_texts(self, texts: tuple[str, ...], where: str, needs: str) -> DataError:
        """Return the error for texts that are not an example."""
        count = "one text" if len(texts) == 1 else f"{len(texts)} texts"
        return DataError(f"is {count}, and the task {self.name!r} needs {needs}", where=where)

    def adapted(self: T, train: Many[Any], labels: Many[str] = ()) -> T:
        """Return the task with the settings that its training data decides.

        Such as the splitter of words, or the weights of classes. Adapting twice changes nothing.

        Args:
            labels: the labels of the training data in the model's order; empty for the task's.
        """
        return self

    def labels(self, examples: Iterable[E]) -> tuple[str, ...]:
        """Return the names of the outputs, in order: the labels that occur in training data."""
        return ()

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Return the heads that the model needs. A pooler they read comes with the model."""
        raise NotImplementedError

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Return the metrics that can select weights, each with its better direction."""
        return self.metrics

    def metric_for(self, examples: Many[E]) -> str:
        """Return the metric that selects the best weights on such dev data."""
        return self.metric

    def texts(self, example: E) -> tuple[str, ...]:
        """Return the texts of an example."""
        raise NotImplementedError

    def shared(self, example: E) -> str | None:
        """Return a text that neighbouring examples may share and `encode` reads once, if any."""
        return None

    def passages(self, examples: Many[E]) -> Many[Hashable]:
        """Return a key for each example; those with equal keys are on one side of a split."""
        return [self.shared(example) or self.texts(example) for example in examples]

    def stratum(self, example: E) -> Hashable:
        """Return the kind of an example, of which each side of a split has its share.

        A class, a score (a float), a tuple of labels, or None.
        """
        return None

    def check(self, train: Many[E], dev: Many[E]) -> list[Finding]:
        """Return the problems of the examples; `dev` may be empty."""
        return []

    def encode(
        self, examples: Many[E], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> Many[EncodedExample]:
        """Return the model inputs of examples, at most `length` tokens a sequence.

        CPU only and pure; a call with many examples is faster than many calls.

        Raises:
            DataError: a label that is not among `labels`.
        """
        raise NotImplementedError

    def training_sequences(self, encoded: EncodedExample) -> tuple[Sequence, ...]:
        """Return the sequences of an example as training reads them: those apart may be in
        different microbatches.
        """
        return encoded.sequences

    def score(self, results: Results[E, P], labels: Many[str]) -> Metrics:
        """Return the metrics of predictions, in one pass over the results.

        Raises:
            DataError: an example without its answer or with an unknown label; no example.
        """
        raise NotImplementedError

    def score_tuned(self, results: Results[E, P], labels: Many[str], metric: str) -> Metrics:
        """Return the metrics of the task that is `tuned` for one of them on the same results.

        Selects among weights in training, where nothing is tuned yet.
        """
        return self.score(results, labels)

    def grade(self, example: E, prediction: P, labels: Many[str]) -> float:
        """Return the quality of one prediction, higher is better; used to compare models.

        NaN where there is nothing to grade, as in an empty text.
        """
        raise NotImplementedError

    def tuned(self: T, results: Results[Any, Any], labels: Many[str], metric: str) -> T:
        """Return the task with settings chosen on development data, such as thresholds.

        Args:
            metric: the metric to optimize, where the task has a choice.
        """
        return self

    def output_scale(self, train: Many[E]) -> OutputScale | None:
        """Return the scale on which the head "labels" learns; None to learn scores as they are."""
        return None

    def baseline(self, examples: Many[E]) -> Metrics:
        """Return the metrics of the majority baseline for these examples.

        Returns:
            Metrics named as in `directions`. "loss" is the loss of the best constant output, in the
            units of the task's loss. Unknown ones are absent.
        """
        return {}

    def bind(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> TaskModel[E, P]:
        """Bind the task to a model that has its heads; errors as `check_binding`, `TaskModel`."""
        self.check_binding(model, tokenizer, labels)
        return self.model_class(self, model, tokenizer, labels, length)

    def check_binding(self, model: Model, tokenizer: Tokenizer, labels: Many[str]) -> None:
        """Raise a ConfigError for settings that do not fit a model or its labels."""

    def fitted(self: T, model: Model) -> T:
        """Return the task with the settings that fit a model."""
        return self

    def program_files(self, length: int) -> Mapping[str, Any]:
        """Return JSON files for other programs that are saved with a model; see `save_model`."""
        return {}

    def with_columns(self: T, columns: Any) -> T:
        """Return the task with these columns."""
        return dataclasses.replace(self, columns=columns)  # type: ignore[type-var]

    @property
    def name(self) -> str:
        """The kind of the task."""
        return self.kind


ScoreKind = Literal["classes", "labels", "number", "choices", "span"]
"""The meaning of a model's scores: a row of classes, a row of labels that each apply or not, a
number, one score for each choice, and scores of tokens as the start and the end of an answer."""


class TaskModel(TrainingModule, Generic[E, P]):
    """A task bound to a model. Subclasses define `weights`, `outputs`, `decode` and `forward`; or,
    to be taught by another model, `scale` and `losses` instead of `forward`, and their `scores`.

    Class attributes:
        scale: the meaning of `scores`; None for a task that no teacher is for.
        loss_name: the name of the loss of its answers.

    Args:
        model: the encoder with the heads that the task needs.
        labels: names of the outputs, in order.
        length: maximum length of a sequence in tokens, special tokens included.

    Raises:
        ConfigError: the length is out of the model's range.
    """

    scale: ClassVar[ScoreKind | None] = None
    loss_name: ClassVar[str] = "label"

    def __init__(
        self, task: Task[E, P], model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> None:
        super().__init__()
        # Longer inputs have no position, and shorter ones no room for a token of each text
        positions = model.config.max_positions
        if not MIN_LENGTH <= length <= positions:
            message = f"must be from {MIN_LENGTH} to the encoder's {positions} positions, not "
            fix = f"Set length={min(max(length, MIN_LENGTH), positions)}."
            raise ConfigError(f"{message}{length}", where="length", fix=fix)
        self.task, self.model, self.tokenizer = task, model, tokenizer
        self.labels, self.length = tuple(labels), length

    @property
    def classes(self) -> tuple[str, ...]:
        """The names that predictions choose from: the labels, unless a task has its own."""
        return self.labels

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses of a batch."""
        return self.losses(self.scores(batch), batch)

    def scores(self, batch: Batch) -> Tensor:
        """Return the model's scores with their graph: a row or a number for each target.

        They are the logits of the head "labels", a row for each sequence, unless a task overrides
        this.
        """
        return self.model.read("labels", batch)

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses by name, given the scores."""
        raise NotImplementedError

    def outputs(self, batch: Batch) -> list[Output]:
        """Return the output for each sequence of a batch that is on the model's device.

        They are its rows of `scores`, unless a task overrides this.
        """
        return list(self.scores(batch).float().cpu().numpy())

    def prepare(self, sequence: Sequence, rng: np.random.Generator) -> Sequence:
        """Return the sequence unchanged: its targets come with its example."""
        return sequence

    def encode(self, examples: Many[E]) -> Many[EncodedExample]:
        """Return the model inputs of examples; see `Task.encode`."""
        return self.task.encode(examples, self.tokenizer, self.labels, self.length)

    def decode(self, example: E, encoded: EncodedExample, outputs: Many[Output]) -> P:
        """Return the prediction for an example, from the outputs of its sequences."""
        raise NotImplementedError

    def score(self, results: Results[E, P]) -> Metrics:
        """Return the metrics of predictions; see `Task.score`."""
        return self.task.score(results, self.labels)

    def score_tuned(self, results: Results[E, P], metric: str = "") -> Metrics:
        """Return the metrics with settings chosen on the results; see `Task.score_tuned`."""
        return self.task.score_tuned(results, self.labels, metric or self.task.metric)

    def grade(self, example: E, prediction: P) -> float:
        """Return the quality of one prediction; see `Task.grade`."""
        return self.task.grade(example, prediction, self.labels)

    def tuned(self, results: Results[E, P], metric: str = "") -> Task[E, P]:
        """Return the task with settings chosen on development data; see `Task.tuned`."""
        return self.task.tuned(results, self.labels, metric or self.task.metric)


_NOT_CONTENT = {"where", "before", "after"}


def examples_fingerprint(examples: Iterable[Any]) -> str:
    """Return the SHA-256 of examples in their order, without their source and document context."""
    result = hashlib.sha256()
    for _ in hashed(examples, result):
        pass
    return result.hexdigest()


def hashed(examples: Iterable[E], digest: Any) -> Iterator[E]:
    """Yield examples, and update a digest of `hashlib` by each."""
    for example in examples:
        values = [
            getattr(example, field.name)
            for field in dataclasses.fields(example)  # type: ignore[arg-type]
            if field.name not in _NOT_CONTENT
        ]
        digest.update(json.dumps(values, default=dataclasses.asdict).encode() + b"\n")
        yield example


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest known name, or an empty string."""
    names = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), names, 1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def unknown_label(message: str, label: str, labels: Many[str], where: str) -> DataError:
    """Return the error for a label (`message` names it) that is not one of `labels`."""
    message += f" is not among the {quantity(len(labels), 'label(s)')}"
    fix = f"Give data with these labels: {listed(labels, 5)}. {naming_advice(labels) or ''}"
    return DataError(message + did_you_mean(label, labels), where=where, fix=fix.strip())


def naming_advice(labels: Many[str]) -> str | None:
    """Return advice on naming outputs that were saved without names; None for others."""
    unnamed = [f"LABEL_{number}" for number in range(len(labels))] == [*labels]
    advice = "LABEL_0 … mean that the model was saved without names: write them as id2label in its "
    advice += "config.json, in the order of its training."
    return advice if unnamed else None


def required(answer: A | None, where: str, noun: str = "label") -> A:
    """Return the answer of an example; a DataError if it has none and cannot be scored."""
    if answer is None:
        message, fix = f"has no {noun}, so it cannot be scored", "Add it, or use predict."
        raise DataError(message, where=where, fix=fix)
    return answer


def nothing_to_score(kind: str = "example") -> DataError:
    """Return the error for data without examples."""
    return DataError(f"there is no {kind} to score", fix="Give at least one.")


def softmax(logits: Float[np.ndarray, "*n"]) -> Float64[np.ndarray, "*n"]:
    """Return the softmax over the last axis, in float64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    result: NDArray[np.float64] = exponentials / exponentials.sum(-1, keepdims=True)
    return result
