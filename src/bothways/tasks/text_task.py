"""Tasks on texts and pairs of texts: columns, examples, model inputs, and the base classes.

Texts that are too long for the model:

truncate     the first tokens                                       (Google's run_classifier.py)
head_tail    the first quarter of the room and the last tokens      (Sun et al. 2019, section 5.3.1)
windows      all tokens, in overlapping windows whose outputs are averaged

The windows are those of google-research/bert run_squad.py. A token that several windows hold counts
in the window in which it has the most context on its poorer side ("max context").
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.batch import Batch, LabelTargets, Targets, WindowWeight
from bothways.core.config.values import is_integer, require_at_least
from bothways.core.errors import ConfigError, DataError, argument
from bothways.core.source import Ids, Sequence
from bothways.core.terminal import quantity
from bothways.model.heads import Head, LabelHead
from bothways.tasks import base
from bothways.tasks.base import Columns, E, EncodedExample, Output, P
from bothways.tasks.columns import Column, TableTask, UnclearColumnError, cell_of, label_of, text_of
from bothways.text.template import Template, assemble, truncated
from bothways.text.tokenizer import Tokenizer

TEXTS = (
    "text", "sentence", "review", "content", "premise", "question", "query", "sentence1", "text_a",
    "tweet", "document",
)  # fmt: skip
PAIRS = (
    ("text", "text_b"), ("text", "text_pair"), ("text_a", "text_b"), ("text1", "text2"),
    ("sentence1", "sentence2"), ("sentence_A", "sentence_B"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("query", "document"),
    ("sentence_good", "sentence_bad"),
)  # fmt: skip
LABELS = ("label", "labels", "class", "target", "gold_label", "category")


@dataclass(frozen=True)
class Texts:
    """One text or two."""

    text: str
    text_b: str | None = None


@dataclass(frozen=True)
class TextExample(Texts):
    """One or two texts with an optional label and their source."""

    label: str | None = None
    where: str = "an example"


@dataclass(frozen=True)
class TextColumns(Columns):
    """The columns of texts; see `Columns`.

    Attributes:
        text: the text, or the first of two.
        text_b: the second text; absent if `text` is given alone.
        label: the label; "a,b,c" for a column for each label, where a task has several.
    """

    text: str | None = None
    text_b: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.text_b is not None and self.text is None:
            message = "is given without a first text"
            raise ConfigError(message, where="columns.text_b", fix="Name both columns.")


TEXT = Column(
    "text", "text", TEXTS, ("comment", "message", "utterance", "headline", "body"),
    companion="text_b", both=True, pairs=PAIRS,
)  # fmt: skip
LABEL = Column("label", "label", LABELS, ("sentiment", "intent", "emotion", "topic"), answer=True)


def example_of(row: base.Row, columns: TextColumns, where: str) -> TextExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, a text is not a text, or a label cannot be one.
    """
    text, text_b = texts_of_row(row, columns, where)
    label = None
    if columns.label is not None:
        label = label_of(cell_of(row, columns.label, where), columns.label, where)
    return TextExample(text, text_b, label, where)


def texts_of_row(row: base.Row, columns: TextColumns, location: str) -> tuple[str, str | None]:
    """Return the text or the two texts in a row; errors as `example_of`."""
    assert columns.text is not None
    text = text_of(row, columns.text, location)
    return text, None if columns.text_b is None else text_of(row, columns.text_b, location)


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Return each label once: whole numbers by value, then texts by their characters."""
    distinct = set(labels)
    numbers = {label for label in distinct if is_integer(label.removeprefix("-"))}
    return (*sorted(numbers, key=lambda label: (int(label), label)), *sorted(distinct - numbers))


LongTexts = Literal["truncate", "head_tail", "windows"]
HEAD = 4
"""The head of a text that is cut in the middle is the room divided by this: 128 of 510 tokens."""


def together(texts: Many[Sequence]) -> Sequence:
    """Return one sequence of texts that do not attend to each other, with their targets."""
    starts = [0, *itertools.accumulate(len(text) for text in texts)][:-1]
    masks = [mask for text in texts if (mask := text.global_attention_mask) is not None]
    targets = dict[str, Targets]()
    for name, target in texts[0].targets.items():
        packed = type(target).pack([text.targets[name] for text in texts], starts)
        targets[name] = packed.apply(lambda tensor: tensor.numpy())  # type: ignore[arg-type, return-value]
    return Sequence(
        np.concatenate([text.ids for text in texts]),
        np.concatenate([text.segments for text in texts]),
        targets,
        tuple(len(text) for text in texts),
        np.concatenate(masks) if masks else None,
    )


def window_weight(batch: Batch) -> Float[Tensor, " sequences"]:
    """Return the weight of each sequence's label: 1, or less where texts are read in windows."""
    if "weight" not in batch.targets:
        return torch.ones(batch.layout.sequences, device=batch.ids.device)
    return torch.as_tensor(batch.target("weight", WindowWeight).weight)


def averaged(outputs: Many[Output]) -> Output:
    """Return the mean output of the windows of a text."""
    return outputs[0] if len(outputs) == 1 else np.mean(outputs, axis=0, dtype=np.float32)


def windows(tokens: int, room: int, stride: int, *, full: bool = False) -> list[range]:
    """Split a text into windows of at most `room` tokens, one every `stride`; at least one window.

    Examples:
        >>> windows(7, room=4, stride=2)
        [range(0, 4), range(2, 6), range(4, 7)]

    Args:
        full: move the last window back so that it has `room` tokens too: `(3, 7)` in the example.
    """
    step, last = min(room, stride), max(0, tokens - room)
    count = 1 - (-last // step)  # 1 + last / step, rounded up
    starts = [min(step * number, last) if full else step * number for number in range(count)]
    return [range(start, min(start + room, tokens)) for start in starts]


def owners(
    positions: Int64[np.ndarray, " words"], chunks: Many[range], room: int
) -> Int64[np.ndarray, " words"]:
    """Return the window in which each position counts, for windows that all hold `room` tokens.

    That is the window with the nearest middle, where it has the most context; of two at equal
    distance, the earlier.
    """
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    # Twice the point halfway between the middles of neighbouring windows: whole numbers.
    borders = starts[:-1] + starts[1:] + room - 1
    return np.searchsorted(borders, 2 * positions).astype(np.int64)


@dataclass(frozen=True)
class TextTask(TableTask[Any, P]):
    """A task on texts or pairs of texts.

    Attributes:
        columns: the columns of texts and answers.
    """

    column_table: ClassVar[Many[Column]] = (TEXT, LABEL)
    objects: ClassVar[bool] = False

    columns: TextColumns = TextColumns()

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> Any:
        if len(texts) > 2:
            raise self.wrong_texts(texts, where, "one or two")
        columns = TextColumns("text", "text_b" if len(texts) > 1 else None)
        self.check_columns(columns, where)
        return self.parse(dict(zip(("text", "text_b"), texts, strict=False)), columns, where)

    def answered(self, example: Any, answer: Any) -> Any:
        return dataclasses.replace(example, label=label_of(answer, "answers", example.where))

    def parse(self, row: base.Row, columns: TextColumns, where: str) -> Any:
        return example_of(row, columns, where)

    def stratum(self, example: Any) -> Hashable:
        label: str | None = example.label
        return label

    def texts(self, example: Any) -> tuple[str, ...]:
        return (example.text,) if example.text_b is None else (example.text, example.text_b)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (LabelHead(max(1, len(labels)), dropout),)


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
        if self.stride is not None and self.long_texts != "windows":
            message = f"is of windows, and long_texts is {self.long_texts!r}"
            fix = "Set stride=none, or long_texts=windows."
            raise ConfigError(message, where="task.stride", fix=fix)

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> Any:
        """Return the example that consists of these texts; see `Task.from_texts`.

        A model that was trained on single texts refuses pairs, and the reverse.
        """
        if len(texts) in {1, 2} - self._counts():
            fix = "Give several texts as a list, and the two texts of one example as a tuple."
            raise self._other_count(len(texts), where, fix)
        return super().from_texts(texts, where=where)

    def check_columns(self, columns: TextColumns, where: str) -> None:
        """Raise a DataError for two texts a row of a model that was trained on one, or the reverse.

        Rows with two texts often have common aliases, such as "sentence1" and "sentence2".
        """
        count, trained = 1 if columns.text_b is None else 2, self.columns
        if count not in self._counts():
            names, options = f"one, as column {trained.text!r}", argument(text="NAME")
            if count == 1:
                names = f"both, as columns {trained.text!r} and {trained.text_b!r}"
                options = argument(text="NAME", text_b="NAME")
            unnamed = self._other_count(count, where, f"Give {names}.")
            fix = f"Give {names} or by {options}."
            error = UnclearColumnError(unnamed.what, where=where, fix=fix)
            error.unnamed = unnamed
            raise error

    def _counts(self) -> set[int]:
        """Return the numbers of texts that an example may have: those of training, or 1 and 2."""
        trained = self.columns
        return {1, 2} if trained.text is None else {1 if trained.text_b is None else 2}

    def _other_count(self, count: int, where: str, fix: str) -> DataError:
        [trained] = self._counts()
        message = f"has {quantity(count, 'text(s)')}; the model was trained on {trained}"
        return DataError(message, where=where, fix=fix)

    def target(self, example: Any, index: Mapping[str, int]) -> Targets:
        """Return the answer of an example for the loss, by the index of each label."""
        raise NotImplementedError

    def encode(
        self, examples: Many[Any], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> Many[base.EncodedExample]:
        index = {label: number for number, label in enumerate(labels)}
        targets = [self.target(example, index) for example in examples]
        return self.encode_texts(examples, targets, tokenizer, length)

    def encode_texts(
        self, examples: Many[Texts], targets: Many[Targets], tokenizer: Tokenizer, length: int
    ) -> list[EncodedExample]:
        """Encode texts and pairs; each sequence has its example's target under the name "label".

        Where long texts are read in windows, each sequence also has its "weight": the windows of a
        text weigh as much together as one short text.
        """
        firsts = tokenizer.encode([e.text for e in examples])
        seconds = iter(tokenizer.encode([e.text_b for e in examples if e.text_b is not None]))
        template, results = tokenizer.template, []
        for example, a, target in zip(examples, firsts, targets, strict=True):
            if example.text_b is None:
                tokens, (chunks, cut) = len(a), self.single(a, template, length)
            else:
                b = next(seconds)
                tokens, (chunks, cut) = len(a) + len(b), self.pair(a, b, template, length)
            by_name: dict[str, Targets] = {"label": target}
            if self.long_texts == "windows":
                by_name["weight"] = WindowWeight(np.array([1 / len(chunks)], dtype=np.float32))
            # [CLS], which the head reads, is global in Longformer.
            masked = ((chunk, np.arange(len(chunk)) == 0) for chunk in chunks)
            sequences = (Sequence(x.ids, x.segments, by_name, (), mask) for x, mask in masked)
            results.append(EncodedExample(tuple(sequences), tokens, cut))
        return results

    def single(
        self, ids: Ids, template: Template, length: int, prompt: int = 0
    ) -> tuple[list[Sequence], int]:
        """Return the sequences of a text, and the number of tokens that are in none of them.

        Args:
            prompt: the number of tokens at the start of `ids` that begin each sequence.

        Raises:
            ConfigError: the prompt leaves no room for a text.
        """
        room = length - template.single - prompt
        if room < 1:
            message = f"has {prompt} tokens, and a sequence has {length}"
            raise ConfigError(message, where="prompt", fix="Shorten the prompt, or set a length.")
        lead, remaining = ids[:prompt], ids[prompt:]
        chunks, cut = self._parts(remaining, room)
        chunks = [np.concatenate([lead, chunk]) for chunk in chunks] if prompt else chunks
        return [assemble(chunk, None, template) for chunk in chunks], cut

    def pair(self, a: Ids, b: Ids, template: Template, length: int) -> tuple[list[Sequence], int]:
        """Return the sequences of two texts, and the number of tokens that are in none of them.

        Windows move over the longer text; the other one keeps at most half of the room.
        """
        room = length - template.pair
        first, second = truncated(len(a), len(b), room)
        if self.long_texts == "windows" and len(a) + len(b) > room:
            is_first = len(a) > len(b)  # the text over which the windows move
            shorter, longer = (b, a) if is_first else (a, b)
            fixed = shorter[: room // 2]  # in each of the windows
            chunks, _ = self._parts(longer, room - len(fixed))
            pairs = [(chunk, fixed) if is_first else (fixed, chunk) for chunk in chunks]
            return [assemble(*pair, template) for pair in pairs], len(shorter) - len(fixed)
        ((a_ids,), cut_a), ((b_ids,), cut_b) = self._parts(a, first), self._parts(b, second)
        return [assemble(a_ids, b_ids, template)], cut_a + cut_b

    def _parts(self, ids: Ids, room: int) -> tuple[list[Ids], int]:
        """Return the parts of a text, of at most `room` tokens, and how many tokens are missing."""
        if len(ids) <= room:
            return [ids], 0
        match self.long_texts:
            case "truncate":
                return [ids[:room]], len(ids) - room
            case "head_tail":
                head = room // HEAD
                # Beginning and end: best for classification in Sun et al. 2019.
                head_and_tail = np.concatenate([ids[:head], ids[len(ids) - (room - head) :]])
                return [head_and_tail], len(ids) - room
            case "windows":
                stride = self.stride or max(1, room // 2)
                chunks = windows(len(ids), room, stride, full=True)
                return [ids[chunk.start : chunk.stop] for chunk in chunks], 0
            case _:
                assert_never(self.long_texts)


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

    def _counts(self) -> set[int]:
        """Return one text and two: either is read, whatever the model was trained on."""
        return {1, 2}

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
            fix = "Name one of these, or put a prompt of your own before the texts."
            raise ConfigError(
                message + base.did_you_mean(name, self.prompts), where="prompt_name", fix=fix
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


class NumberModel(base.TaskModel[E, P]):
    """A task with one number for each text: regression and reranking.

    The head "labels" of the model has one output. Subclasses define `losses`.
    """

    scale: ClassVar[base.ScoreKind | None] = "number"

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of texts with a label; the windows of a text count as one."""
        labelled = ~targets_of(batch).isnan()
        return {"label": float(window_weight(batch)[labelled].sum(dtype=torch.float64))}

    def scores(self, batch: Batch) -> Float[Tensor, " sequences"]:
        result: Tensor = self.model.read("labels", batch)
        return result[:, 0]

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return the number of each sequence `(1)`."""
        return list(self.scores(batch).float().cpu().numpy()[:, None])


def targets_of(batch: Batch) -> Shaped[Tensor, "sequences ..."]:
    """Return the label of each sequence, a class, a number or a row; IGNORED or NaN for none."""
    return torch.as_tensor(batch.target("label", LabelTargets).labels)


def check_single_texts(task: Any, columns: TextColumns, where: str) -> None:
    """Raise a DataError for a second text; the `check_columns` of tasks on single texts."""
    if columns.text_b is not None:
        message = f"has two texts a row, {columns.text!r} and {columns.text_b!r}; one is read"
        raise DataError(message, where=where, fix=f"Name one: {argument(text='NAME')}.")
