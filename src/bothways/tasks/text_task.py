"""The common parts of tasks whose examples are texts or pairs of texts in a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, DataError
from bothways.core.targets import LabelTargets
from bothways.core.terminal import quantity
from bothways.tasks import text_examples
from bothways.tasks.base import E, Output, P, Row, Scale, TaskModel, did_you_mean
from bothways.tasks.columns import Column, TableTask, label_of
from bothways.tasks.text_encoding import Fit, LongTexts, window_weight


@dataclass(frozen=True)
class TextTask(TableTask[Any, P]):
    """A task on texts or pairs of texts.

    Attributes:
        columns: the columns of texts and answers.
    """

    column_table: ClassVar[Many[Column]] = (text_examples.TEXT, text_examples.LABEL)
    objects: ClassVar[bool] = False

    columns: text_examples.TextColumns = text_examples.NOT_NAMED

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> Any:
        if len(texts) > 2:
            raise self.wrong_texts(texts, where, "one or two")
        columns = text_examples.TextColumns("text", "text_b" if len(texts) > 1 else None)
        self.check_columns(columns, where)
        return self.parse(dict(zip(("text", "text_b"), texts, strict=False)), columns, where)

    def answered(self, example: Any, answer: Any) -> Any:
        return dataclasses.replace(example, label=label_of(answer, "answers", example.where))

    def parse(self, row: Row, columns: text_examples.TextColumns, where: str) -> Any:
        return text_examples.example_of(row, columns, where)

    def stratum(self, example: Any) -> Hashable:
        label: str | None = example.label
        return label

    def texts(self, example: Any) -> tuple[str, ...]:
        return (example.text,) if example.text_b is None else (example.text, example.text_b)


@dataclass(frozen=True)
class LongTextTask(TextTask[P]):
    """A task on texts that may be longer than the model's input.

    Attributes:
        long_texts: what to do with them: "truncate" reads the beginning, "head_tail" the beginning
            and the end, "windows" everything, in overlapping windows whose outputs are averaged.
        stride: tokens from one window to the next; None for half a window.
    """

    truncation_advice: ClassVar[tuple[str, str]] = (
        "Set length={needed}, or task.long_texts=head_tail to read beginning and end.",
        "The model reads at most {limit} tokens at once: set length={limit} and "
        "task.long_texts=windows to read everything, or head_tail for beginning and end.",
    )

    long_texts: LongTexts = "truncate"
    stride: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, "task", stride=self.stride)

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> Any:
        """Return the example that consists of these texts; see `Task.from_texts`.

        A model that was trained on single texts refuses pairs, and the reverse.
        """
        trained = self.columns
        count = 1 if trained.text_b is None else 2
        if trained.text is not None and len(texts) in {1, 2} - {count}:
            message = (
                f"has {quantity(len(texts), 'text(s)')}, and the model was trained on {count} each"
            )
            fix = "Give several texts as a list, and the two texts of one example as a tuple."
            raise DataError(message, where=where, fix=fix)
        return super().from_texts(texts, where=where)

    def fit(self, length: int) -> Fit:
        """Return the treatment of texts that are longer than a length."""
        return Fit(length, self.long_texts, self.stride)


@dataclass(frozen=True)
class PromptedTask(LongTextTask[P]):
    """A task on texts with a prompt before them, such as "query: " (Wang et al. 2022, section 3.2).

    The prompts of a model are named, as in sentence-transformers. One of them may be the default.

    Attributes:
        prompts: prompts by name.
        prompt_name: the one that is used by default; None for none.
        prompt: a prompt in its place; "" for none.
    """

    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    prompt_name: str | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompt_text(self.prompt_name)

    def prompt_text(self, name: str | None = None, text: str | None = None) -> str:
        """Return the prompt with this name, or this text; without either the default one.

        Raises:
            ConfigError: both are given, or no prompt has this name.
        """
        if text is not None:
            if name is not None:
                message = "a prompt is given, and the name of one"
                raise ConfigError(message, where="prompt", fix="Leave one of them out.")
            return text
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            names = ", ".join(map(repr, self.prompts)) or "none"
            message = f"the model has no prompt {name!r:.80}; it has {names}"
            fix = "Name one of these, or give the text of a prompt."
            raise ConfigError(
                message + did_you_mean(name, self.prompts), where="prompt_name", fix=fix
            )
        return self.prompts[name]

    @property
    def default_prompt(self) -> str:
        """The prompt before every text; empty for none."""
        if self.prompt is not None:
            return self.prompt
        return "" if self.prompt_name is None else self.prompts[self.prompt_name]

    @property
    def named_prompts(self) -> tuple[dict[str, str], str | None]:
        """All prompts by name, and the name of the default one: "default" for an unnamed one."""
        if not self.prompt:
            name = self.prompt_name if self.prompt is None else None
            return dict(self.prompts), name
        return {**self.prompts, "default": self.prompt}, "default"


class NumberModel(TaskModel[E, P]):
    """A task with one number for each text: regression and reranking.

    The head "labels" of the model has one output. Subclasses define `losses`.
    """

    scale: ClassVar[Scale | None] = "number"

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of texts with a label; the windows of a text count as one."""
        labelled = ~targets_of(batch).isnan()
        return {"label": float(window_weight(batch)[labelled].sum(dtype=torch.float64))}

    def scores(self, batch: Batch) -> Float[Tensor, " sequences"]:
        result: Tensor = self.model.read("labels", batch)
        return result[:, 0]

    def outputs(self, batch: Batch) -> list[Output]:
        """Return the number of each sequence `(1)`."""
        return list(self.scores(batch).float().cpu().numpy()[:, None])


def targets_of(batch: Batch) -> Shaped[Tensor, " sequences"]:
    """Return the label of each sequence, a class or a number; IGNORED or NaN for none."""
    return torch.as_tensor(batch.target("label", LabelTargets).labels)
