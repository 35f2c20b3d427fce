"""What a task is before there is a model: how its data is read, checked and encoded, and which heads it needs.

A definition is a frozen value, a part of the run's configuration. It is saved with the model, tuned thresholds and all, so that
predictions are made as in training. With a model it becomes a `Task`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from bothways.model.head_config import Head
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bothways.core.finding import Finding
    from bothways.tasks.task_learner import EncodedExample, TaskLearner

E = TypeVar("E")
"""An example of a task: a frozen dataclass; its field `where` says where it comes from."""
P = TypeVar("P")
"""A prediction of a task."""

D = TypeVar("D", bound="Task[Any, Any]")

Direction = Literal["lowest", "highest"]
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Reading(Generic[E]):
    """Attributes:
    definition: of the task, with the columns that are read.
    examples: once through.
    share: how much has been read, from 0 to 1; none where nobody knows.
    """

    definition: Task[E, Any]
    examples: Iterator[E]
    share: Callable[[], float] | None = None


class Task(Generic[E, P]):
    """A task without a model. Subclasses are frozen dataclasses with a last field `kind`, and define the methods below.

    Class attributes:
        metric: what the best weights are chosen by, unless another one is named.
        length: of the longest sequence in tokens, unless another one is given.
        window: the most examples that predictions are made of together; less where an example becomes many sequences.
        problem: what transformers calls it, where a label head may be for several.
    """

    metric: ClassVar[str]
    length: ClassVar[int] = 128
    window: ClassVar[int] = 4096
    problem: ClassVar[
        Literal["single_label_classification", "multi_label_classification", "regression"] | None
    ] = None

    def read(self, source: str, asked: Any = None, *, labelled: bool = True) -> Reading[E]:
        """The examples of a file, a Hub data set or ("-") the standard input, streamed.

        Args:
            source: its name.
            asked: the columns to read, of the type of this definition's own; those that it does not name are as in the
                definition, if the data has them, else they are guessed.
            labelled: whether answers are wanted.

        Raises:
            DataError: it cannot be read, or a column is not there or cannot be guessed.
        """
        raise NotImplementedError

    def labels(self, examples: Iterable[E]) -> tuple[str, ...]:
        """The names of the outputs, in order: what occurs in training data."""
        raise NotImplementedError

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """What the model needs; they start at random in fine-tuning; a pooler that they read comes with the model."""
        raise NotImplementedError

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """The metrics by which weights can be chosen, and which value of them is best."""
        raise NotImplementedError

    def texts(self, example: E) -> tuple[str, ...]:
        """The texts of an example."""
        raise NotImplementedError

    def shared(self, example: E) -> str | None:
        """A text that neighbouring examples may share, and that `encode` reads once for all of them; none in most tasks."""
        return None

    def check(self, train: Many[E], dev: Many[E]) -> list[Finding]:
        """Everything that the examples can have wrong; `dev` may be empty."""
        raise NotImplementedError

    def encode(
        self, examples: Many[E], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """What each example becomes, at most `length` tokens a text. CPU only, pure; many at once are faster.

        Raises:
            DataError: a label that is none of `labels`.
        """
        raise NotImplementedError

    def task(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> TaskLearner[E, P]:
        """The task with a model that has the heads."""
        raise NotImplementedError

    def baseline(self, train: Many[E], scored: Many[E]) -> Metrics:
        """What answering without reading reaches on `scored`: always the answer, or the mean, that is most usual in `train`.

        Returns:
            Metrics by their names in `directions`; "loss" is that of the best constant output, in the units of the task's own
            loss. Those that are not known are left out; here, all.
        """
        return {}

    def answer(self, prediction: P) -> Hashable:
        """What a prediction says, without its probabilities: a model that has collapsed says the same of all examples."""
        return repr(prediction)

    def with_columns(self: D, columns: Any) -> D:
        """The same definition, with the columns that were read."""
        return dataclasses.replace(self, columns=columns)  # type: ignore[type-var]

    @property
    def name(self) -> str:
        """Its `kind`."""
        return str(self.kind)  # type: ignore[attr-defined]


_AROUND = {"where", "before", "after"}


def examples_fingerprint(examples: Iterable[Any]) -> str:
    """The sha256 of examples, in their order; where they come from does not count, nor what of it is read around them."""
    result = hashlib.sha256()
    for example in examples:
        values = [
            getattr(example, field.name)
            for field in dataclasses.fields(example)
            if field.name not in _AROUND
        ]
        result.update(json.dumps(values, default=dataclasses.asdict).encode() + b"\n")
    return result.hexdigest()
