"""Fine-tuning in memory: many short runs on the same examples, from pre-trained weights or from random ones.

What is the same for all runs is done once (`label`): checks, tokenizing, the order of the labels. What differs is a start, a
method and a seed (`fit_task`). `bothways.recipes.finetune` is the same with files, a run folder and checkpoints.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch

from bothways.core.errors import ConfigError
from bothways.core.hardware import choose_device
from bothways.core.learner import Cursor, Learner
from bothways.core.sequence import Sequence
from bothways.data.listed import ListPlan, ListSource, Shuffled
from bothways.data.loader import Loader, Share
from bothways.data.packing import Examples, Tokens
from bothways.model.heads import Head, Model
from bothways.model.recurrentconfig import ModelConfig
from bothways.recipes.failure import Answers, Failure, signs_of_scores, signs_of_training, training_loss
from bothways.recipes.stability import Stability, rules, steady
from bothways.tasks.catalogue import Trainable
from bothways.tasks.classify import Classification
from bothways.tasks.definition import Definition, Metrics
from bothways.tasks.preflight import Finding, check_casing, check_inputs, settle
from bothways.tasks.task import PACE, SHORTEST, Input, Pace, Task, predict_encoded
from bothways.text.tokenizer import Tokenizer
from bothways.training.checkpoint import Best, Keep
from bothways.training.loop import fit
from bothways.training.meter import Meter
from bothways.training.optim import AdamW, BertAdam, build
from bothways.training.parallel import Single
from bothways.training.patience import Waiting
from bothways.training.run import Training
from bothways.training.schedule import GoogleLinear, Linear, factor
from bothways.training.state import Epochs, Progress


def adam() -> Training:
    """Three epochs of AdamW at 5e-5 with a tenth of warm-up: the paper's grid, with the bias correction that its code lacks.

    That the correction makes fine-tuning on small sets stable is from Zhang et al. 2020 and Mosbach et al. 2020.
    """
    return Training(until=Epochs(3.0), optimiser=AdamW(lr=5e-5), schedule=Linear(0.1), evaluate=Epochs(1.0), keep=Keep(1))


ALL = Share()
"""All of the data: a single process."""


@dataclass(frozen=True)
class Method:
    """How a model is fine-tuned.

    Attributes:
        training: the optimiser, its schedule, the length of the run, and how often the dev data is scored.
        length: the longest sequence in tokens, specials included; what is longer is cut.
        batch: sequences or tokens per update.
        microbatch_tokens: the most tokens in memory at once; changes neither data nor update.
        metric: of the dev data, by which the best weights are chosen; none means the task's usual one.
        dropout: on the vectors that the new head reads; none means the encoder's.
        stability: what keeps the run near its start, or frees it of what is bad in it.
        task: what for.
    """

    training: Training = field(default_factory=adam)
    length: int = 128
    batch: Examples | Tokens = Examples(32)
    microbatch_tokens: int = 8192
    metric: str | None = None
    dropout: float | None = None
    stability: Stability = Stability()
    task: Trainable = Classification()

    def __post_init__(self) -> None:
        if self.length < SHORTEST:
            what = f"must be at least {SHORTEST} ([CLS], a token, [SEP], a token, [SEP]), not {self.length}"
            raise ConfigError(what, where="length")
        if self.microbatch_tokens < 1:
            raise ConfigError(f"must be at least 1, not {self.microbatch_tokens}", where="microbatch_tokens")
        if self.training.keep.best is not None:
            what = "which checkpoint is the best is decided by metric"
            raise ConfigError(what, where="training.keep.best", fix="Set metric instead, such as metric=mcc.")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(f"must lie in [0, 1), not {self.dropout}", where="dropout")

    @property
    def chosen_by(self) -> str:
        """The metric by which the best weights are chosen."""
        return self.metric or self.task.metric


def modern(task: Trainable) -> Method:
    """What one would do today: AdamW, three epochs, a tenth of warm-up."""
    return Method(adam(), task.length, task=task)


def paper(task: Trainable) -> Method:
    """Devlin et al. 2018 (sections 4 and 5.3, appendix A.3), with the optimiser and the schedule of google-research/bert."""
    epochs, rate, batch = PAPER.get(task.name, (3.0, 5e-5, 32))
    training = dataclasses.replace(adam(), until=Epochs(epochs), optimiser=BertAdam(lr=rate), schedule=GoogleLinear(0.1))
    return Method(training, task.length, Examples(batch), task=task)


PAPER: dict[str, tuple[float, float, int]] = {"choice": (3.0, 2e-5, 16)}
"""Epochs, learning rate and batch of the tasks for which the paper says others than 3, 5e-5 and 32."""

RECIPES: dict[str, Callable[[Trainable], Method]] = {"modern": modern, "paper": paper}


@dataclass(frozen=True)
class Labelled:
    """Examples that are checked and encoded.

    Attributes:
        definition: of the task.
        labels: in the order of the model's outputs.
        train, dev: what the examples became.
        train_examples, dev_examples: as they were read; there may be none to score.
        findings: of the preflight.
    """

    definition: Definition[Any, Any]
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    train: tuple[Input, ...]
    dev: tuple[Input, ...]
    train_examples: tuple[Any, ...]
    dev_examples: tuple[Any, ...]
    findings: tuple[Finding, ...]

    @property
    def sequences(self) -> list[Sequence]:
        """All training sequences."""
        return [sequence for item in self.train for sequence in item.sequences]

    @property
    def tokens(self) -> int:
        """Tokens of an epoch, specials included."""
        return sum(len(sequence) for sequence in self.sequences)


def examine(definition: Definition[Any, Any], tokenizer: Tokenizer, train: Many[Any], dev: Many[Any], length: int) -> Labelled:
    """Encode examples and look at them, errors among the findings and all."""
    labels = definition.labels(train)
    every = definition.labels([*train, *dev])  # beyond `labels` only where there is an error
    encoded = [tuple(definition.encode(examples, tokenizer, every, length)) for examples in (train, dev)]
    found = (
        *definition.check(train, dev),
        *check_casing(tokenizer, [text for example in train for text in definition.texts(example)]),
        *check_inputs(encoded[0], tokenizer, length),
    )
    return Labelled(definition, tokenizer, labels, encoded[0], encoded[1], tuple(train), tuple(dev), found)


def label(definition: Definition[Any, Any], tokenizer: Tokenizer, train: Many[Any], dev: Many[Any], length: int) -> Labelled:
    """Check and encode examples, once for any number of runs; `length` is that of the longest sequence, in tokens.

    Raises:
        BothwaysError: what the task cannot learn from, such as an empty text, an absent label, fewer than two classes; all of
            them in one message.
    """
    data = examine(definition, tokenizer, train, dev, length)
    return dataclasses.replace(data, findings=tuple(settle(data.findings)))


def loader(data: Labelled, method: Method, learner: Learner, seed: int, share: Share = ALL) -> Loader[ListPlan]:
    """Steps over the training data, shuffled anew in each epoch."""
    source = ListSource(data.sequences, Shuffled(seed))
    return Loader(source, learner.prepare, method.batch, method.microbatch_tokens, seed, share)


def dev_windows(data: Labelled, size: int = PACE.window) -> Iterator[tuple[list[Any], list[Input]]]:
    """The dev examples with what they became, in parts."""
    for start in range(0, len(data.dev), size):
        part = slice(start, start + size)
        yield list(data.dev_examples[part]), list(data.dev[part])


def predictions(task: Task[Any, Any], data: Labelled, pace: Pace = PACE) -> Iterator[tuple[Any, Any]]:
    """The dev examples with their predictions, in windows, so that no more predictions than one window's are held."""
    for examples, inputs in dev_windows(data, pace.window):
        yield from predict_encoded(task, examples, inputs, pace)


def score(task: Task[Any, Any], data: Labelled, pace: Pace = PACE) -> Metrics:
    """The metrics of the dev data."""
    return task.score(predictions(task, data, pace))


def tune(task: Task[Any, Any], data: Labelled, pace: Pace = PACE) -> None:
    """Choose what the task takes from dev data, such as thresholds."""
    task.definition = task.tuned(predictions(task, data, pace))


def check_metric(metric: str, data: Labelled) -> None:
    """Raises ConfigError for a metric that the task does not have with these labels."""
    known = data.definition.directions(data.labels)
    if metric not in known:
        what = f"{metric!r} is no metric of {data.definition.name} with {len(data.labels)} labels: it must be one of "
        raise ConfigError(what + ", ".join(known), where="metric", fix=f"Set metric={data.definition.metric}.")


def better(metric: str, data: Labelled, new: Metrics, old: Metrics) -> bool:
    """Whether the metric is better in `new`."""
    return (
        new[metric] < old[metric] if data.definition.directions(data.labels)[metric] == "lowest" else new[metric] > old[metric]
    )


@dataclass(frozen=True)
class Fitted:
    """What a run came to.

    Attributes:
        task: with the weights that were best on the dev data; the last ones, if there is none.
        metrics: of these weights on the dev data; empty if there is none.
        history: (epochs, metrics) of every evaluation.
        progress: at the end.
        failure: why the run is to be thought of as failed; none if nothing says so.
    """

    task: Task[Any, Any]
    metrics: Metrics
    history: tuple[tuple[float, Metrics], ...]
    progress: Progress
    failure: Failure | None = None


def start_from(start: Model | ModelConfig, heads: Iterable[Head], seed: int) -> Model:
    """A model with fresh heads: on the encoder and, if it is among them, the pooler of `start`, or all at random.

    Raises:
        ConfigError: `start` has no pooler, and the heads read one.
    """
    torch.manual_seed(seed)
    if not isinstance(start, Model):
        return Model(start, heads)
    model = Model(start.config, heads, copy.deepcopy(start.encoder))
    if "pooler" in model.heads:
        if "pooler" not in start.heads:
            what = f"the model has no pooler, only {', '.join(start.heads) or 'an encoder'}"
            fix = "Pre-train with next-sentence pairs, or load the model with a fresh pooler."
            raise ConfigError(what, where="start", fix=fix)
        model.heads["pooler"].load_state_dict(start.heads["pooler"].state_dict())
    return model


def fit_task(
    start: Model | ModelConfig,
    data: Labelled,
    method: Method = Method(),
    *,
    seed: int = 0,
    order_seed: int | None = None,
    device: str = "auto",
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> Fitted:
    """Fine-tune once, in memory.

    Args:
        start: a model whose encoder and pooler are copied, or a configuration for random weights.
        seed: of the new head and of what else starts at random.
        order_seed: of the order of the data, dropout and mixout; none for the same one.
        on_step: called after each step, for a progress bar.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: `start` has no pooler or not the blocks that `stability` names, the schedule does not fit the run, these
            labels do not have the metric, or there is patience without dev data.
    """
    check_metric(method.chosen_by, data)
    heads, training = data.definition.heads(data.labels, method.dropout), method.training
    model = start_from(start, heads, seed)
    _check_start(start, method)
    steady(model, method.stability, seed)
    task = data.definition.task(model, data.tokenizer, data.labels, method.length).to(choose_device(device))
    best = _Best(task, data, method)

    def after(progress: Progress, meter: Meter) -> bool:
        best.after(progress)
        on_step(progress)
        return best.over

    order = seed if order_seed is None else order_seed
    torch.manual_seed(order + 1)
    progress = fit(
        task,
        loader(data, method, task, order).steps(Cursor()),
        build(training.optimiser, task.named_parameters(), rules(method.stability, model)),
        factor(training.schedule, training.until),
        Single(),
        until=training.until,
        progress=Progress(),
        on_step=after,
        precision=training.precision,
        clip_norm=training.clip_norm,
    )
    return best.conclude(progress)


class _Best:
    """Scores the task when that is due, and holds the weights that were best."""

    def __init__(self, task: Task[Any, Any], data: Labelled, method: Method) -> None:
        self._task, self._data, self._method = task, data, method
        self._history: list[tuple[float, Metrics]] = []
        self._metrics: Metrics | None = None
        self._state: dict[str, torch.Tensor] = {}
        self._before = self._scored = Progress()
        self._waiting = _waiting(data, method)

    @property
    def over(self) -> bool:
        """Whether the run is to end for want of anything better."""
        return self._waiting.over

    def after(self, progress: Progress) -> None:
        """Score, if that is due after this step."""
        every, before, self._before = self._method.training.evaluate, self._before, progress
        if every is not None and progress.passed(every, before):
            self._score(progress)

    def _score(self, progress: Progress) -> None:
        if not self._data.dev:
            return
        metrics, self._scored = score(self._task, self._data), progress
        self._history.append((progress.epochs, metrics))
        self._waiting.note(metrics[self._method.chosen_by])
        if self._metrics is None or better(self._method.chosen_by, self._data, metrics, self._metrics):
            self._metrics, self._state = metrics, copy.deepcopy(self._task.state_dict())

    def conclude(self, progress: Progress) -> Fitted:
        """Score the last weights if that is still due, and go back to the best."""
        if self._scored.steps != progress.steps:
            self._score(progress)
        if self._state:
            self._task.load_state_dict(self._state)
        self._task.eval()
        metrics, failed = conclude(self._task, self._data, self._method)
        early = self.over and progress.share(self._method.training.until) < 1
        return Fitted(self._task, metrics, tuple(self._history), dataclasses.replace(progress, early=early), failed)


def conclude(task: Task[Any, Any], data: Labelled, method: Method) -> tuple[Metrics, Failure | None]:
    """Tune a trained task on the dev data and score it; metrics, empty without dev data, and whether the run has failed."""
    trained = training_loss(task, data.sequences, method.microbatch_tokens)
    baseline = data.definition.baseline
    reasons = signs_of_training(trained, baseline(data.train_examples, data.train_examples))
    metrics: Metrics = {}
    if data.dev:
        tune(task, data)
        answers = Answers(data.definition)
        metrics = task.score(answers.seen(predictions(task, data)))
        direction = data.definition.directions(data.labels)[method.chosen_by]
        usual = baseline(data.train_examples, data.dev_examples)
        reasons = (*signs_of_scores(metrics, usual, method.chosen_by, direction, answers), *reasons)
    return metrics, Failure(reasons) if reasons else None


def _waiting(data: Labelled, method: Method) -> Waiting:
    if method.training.patience is not None and not data.dev:
        what = "patience needs dev data, by which it is seen whether anything gets better"
        raise ConfigError(what, where="training.patience", fix="Give dev data, or leave patience out.")
    metric = method.chosen_by
    return Waiting(method.training.patience, Best(metric, data.definition.directions(data.labels)[metric]))


def _check_start(start: Model | ModelConfig, method: Method) -> None:
    for name in ("reinitialise", "frozen", "mixout", "pull"):
        if not isinstance(start, Model) and getattr(method.stability, name):
            what = "is about pre-trained weights, and this run starts from random ones"
            raise ConfigError(what, where=f"stability.{name}", fix="Start from a model, or set it to 0.")
