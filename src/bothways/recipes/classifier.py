"""Fine-tuning a classifier in memory: many short runs on the same examples, from pre-trained weights or from random ones.

What is the same for all runs is done once (`label`): checks, tokenizing, the order of the labels. What differs is a start, a
method and a seed (`fit_classifier`). `bothways.recipes.finetune` is the same with files, a run folder and checkpoints.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal

import torch

from bothways.core.errors import ConfigError
from bothways.core.hardware import choose_device
from bothways.core.learner import Cursor, Learner
from bothways.core.sequence import Sequence
from bothways.data.listed import ListPlan, ListSource, Shuffled
from bothways.data.loader import Loader, Share
from bothways.data.packing import Examples, Tokens
from bothways.model.config import EncoderConfig
from bothways.model.heads import Labels, Model, Pooled
from bothways.tasks.checks import check_examples
from bothways.tasks.classify import Classify, encode
from bothways.tasks.examples import Example, label_names
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.preflight import Finding, check_casing, check_inputs, settle
from bothways.tasks.task import PACE, Input, Metrics, Pace, predict_encoded
from bothways.text.tokenizer import Tokenizer
from bothways.training.checkpoint import Keep
from bothways.training.loop import fit
from bothways.training.meter import Meter
from bothways.training.optim import AdamW, BertAdam, build
from bothways.training.parallel import Single
from bothways.training.run import Training
from bothways.training.schedule import GoogleLinear, Linear, factor
from bothways.training.state import Epochs, Progress

Metric = Literal["accuracy", "f1_macro", "f1", "mcc", "loss"]
"""What the best weights can be chosen by; "f1" where there are two classes."""

LOWER_IS_BETTER: frozenset[Metric] = frozenset({"loss"})


def modern() -> Training:
    """Three epochs of AdamW at 5e-5 with a tenth of warm-up: the paper's grid, with the bias correction that its code lacks.

    That the correction makes fine-tuning on small sets stable is from Zhang et al. 2020 and Mosbach et al. 2020.
    """
    return Training(until=Epochs(3.0), optimiser=AdamW(lr=5e-5), schedule=Linear(0.1), evaluate=Epochs(1.0), keep=Keep(1))


def paper() -> Training:
    """Devlin et al. 2018 (appendix A.3), as google-research/bert's run_classifier.py does it."""
    return Training(
        until=Epochs(3.0), optimiser=BertAdam(lr=5e-5), schedule=GoogleLinear(0.1), evaluate=Epochs(1.0), keep=Keep(1)
    )


ALL = Share()
"""All of the data: a single process."""


RECIPES: dict[str, Callable[[], Training]] = {"modern": modern, "paper": paper}


@dataclass(frozen=True)
class Method:
    """How a classifier is trained.

    Attributes:
        training: the optimiser, its schedule, the length of the run, and how often the dev data is scored.
        length: the longest sequence in tokens, specials included; what is longer is cut.
        batch: sequences or tokens per update.
        microbatch_tokens: the most tokens in memory at once; changes neither data nor update.
        metric: of the dev data, by which the best weights are chosen.
        dropout: on the pooled vector; none means the encoder's.
    """

    training: Training = field(default_factory=modern)
    length: int = 128
    batch: Examples | Tokens = Examples(32)
    microbatch_tokens: int = 8192
    metric: Metric = "accuracy"
    dropout: float | None = None

    def __post_init__(self) -> None:
        if self.length < 5:
            what = f"must be at least 5 ([CLS], a token, [SEP], a token, [SEP]), not {self.length}"
            raise ConfigError(what, where="length")
        if self.microbatch_tokens < 1:
            raise ConfigError(f"must be at least 1, not {self.microbatch_tokens}", where="microbatch_tokens")
        if self.training.keep.best is not None:
            what = "which checkpoint is the best is decided by metric"
            raise ConfigError(what, where="training.keep.best", fix="Set metric instead, such as metric=mcc.")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(f"must lie in [0, 1), not {self.dropout}", where="dropout")


@dataclass(frozen=True)
class Labelled:
    """Examples that are checked and encoded.

    Attributes:
        labels: in the order of the model's outputs.
        train, dev: what the examples became.
        dev_examples: those to score; there may be none.
        findings: of the preflight.
    """

    tokenizer: Tokenizer
    labels: tuple[str, ...]
    train: tuple[Input, ...]
    dev: tuple[Input, ...]
    dev_examples: tuple[Example, ...]
    findings: tuple[Finding, ...]

    @property
    def sequences(self) -> list[Sequence]:
        """All training sequences."""
        return [sequence for item in self.train for sequence in item.sequences]

    @property
    def tokens(self) -> int:
        """Tokens of an epoch, specials included."""
        return sum(len(sequence) for sequence in self.sequences)


def examine(tokenizer: Tokenizer, train: Many[Example], dev: Many[Example], length: int) -> Labelled:
    """Encode examples and look at them, errors among the findings and all."""
    labels = label_names(train)
    every = label_names([*train, *dev])  # beyond `labels` only where there is an error
    encoded = [tuple(encode(examples, tokenizer, every, length)) for examples in (train, dev)]
    found = (
        *check_examples(train, dev),
        *check_casing(tokenizer, [example.text for example in train]),
        *check_inputs(encoded[0], tokenizer, length),
    )
    return Labelled(tokenizer, labels, encoded[0], encoded[1], tuple(dev), found)


def label(tokenizer: Tokenizer, train: Many[Example], dev: Many[Example], length: int) -> Labelled:
    """Check and encode examples, once for any number of runs; `length` is that of the longest sequence, in tokens.

    Raises:
        BothwaysError: an empty text, an absent label, fewer than two classes, a dev label that training lacks; all of them in
            one message.
    """
    data = examine(tokenizer, train, dev, length)
    return dataclasses.replace(data, findings=tuple(settle(data.findings)))


def loader(data: Labelled, method: Method, learner: Learner, seed: int, share: Share = ALL) -> Loader[ListPlan]:
    """Steps over the training data, shuffled anew in each epoch."""
    source = ListSource(data.sequences, Shuffled(seed))
    return Loader(source, learner.prepare, method.batch, method.microbatch_tokens, seed, share)


def score(task: Classify, data: Labelled, pace: Pace = PACE) -> Metrics:
    """The metrics of the dev data, in windows, so that no more predictions than one window's are held."""

    def results() -> Iterator[tuple[Example, ClassPrediction]]:
        for start in range(0, len(data.dev), pace.window):
            part = slice(start, start + pace.window)
            yield from predict_encoded(task, data.dev_examples[part], data.dev[part], pace)

    return task.score(results())


def check_metric(metric: Metric, data: Labelled) -> None:
    """Raises ConfigError for a metric that these labels do not have."""
    if metric == "f1" and len(data.labels) != 2:
        what = f"'f1' is of two classes, and there are {len(data.labels)}: {', '.join(data.labels)}"
        raise ConfigError(what, where="metric", fix="Set metric=f1_macro.")


def better(metric: Metric, new: Metrics, old: Metrics) -> bool:
    """Whether the metric is better in `new`."""
    return new[metric] < old[metric] if metric in LOWER_IS_BETTER else new[metric] > old[metric]


@dataclass(frozen=True)
class Fitted:
    """What a run came to.

    Attributes:
        task: with the weights that were best on the dev data; the last ones, if there is none.
        metrics: of these weights on the dev data; empty if there is none.
        history: (epochs, metrics) of every evaluation.
        progress: at the end.
    """

    task: Classify
    metrics: Metrics
    history: tuple[tuple[float, Metrics], ...]
    progress: Progress


def start_from(start: Model | EncoderConfig, labels: int, dropout: float | None, seed: int) -> Model:
    """A model with a fresh label head: on the encoder and the pooler of `start`, or all at random.

    Raises:
        ConfigError: `start` has no pooler, which a classifier reads.
    """
    torch.manual_seed(seed)
    encoder = start.config if isinstance(start, Model) else start
    model = Model(encoder, (Pooled(), Labels(labels, dropout)))
    if isinstance(start, Model):
        if "pooler" not in start.heads:
            fix = "Pre-train with next-sentence pairs, or load the model with a fresh pooler."
            raise ConfigError(f"the model has no pooler, only {', '.join(start.heads) or 'an encoder'}", where="start", fix=fix)
        model.encoder.load_state_dict(start.encoder.state_dict())
        model.heads["pooler"].load_state_dict(start.heads["pooler"].state_dict())
    return model


def fit_classifier(
    start: Model | EncoderConfig,
    data: Labelled,
    method: Method = Method(),
    *,
    seed: int = 0,
    device: str = "auto",
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> Fitted:
    """Fine-tune once, in memory.

    Args:
        start: a model whose encoder and pooler are copied, or a configuration for random weights.
        seed: of the label head, the order of the data and dropout.
        on_step: called after each step, for a progress bar.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: `start` has no pooler, the schedule does not fit the run, or these labels do not have the metric.
    """
    check_metric(method.metric, data)
    model, training = start_from(start, len(data.labels), method.dropout, seed), method.training
    task = Classify(model, data.tokenizer, data.labels, method.length).to(choose_device(device))
    best = _Best(task, data, method)

    def after(progress: Progress, meter: Meter) -> bool:
        best.after(progress)
        on_step(progress)
        return False

    torch.manual_seed(seed + 1)
    progress = fit(
        task,
        loader(data, method, task, seed).steps(Cursor()),
        build(training.optimiser, task.named_parameters()),
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

    def __init__(self, task: Classify, data: Labelled, method: Method) -> None:
        self._task, self._data, self._method = task, data, method
        self._history: list[tuple[float, Metrics]] = []
        self._metrics: Metrics | None = None
        self._state: dict[str, torch.Tensor] = {}
        self._before = self._scored = Progress()

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
        if self._metrics is None or better(self._method.metric, metrics, self._metrics):
            self._metrics, self._state = metrics, copy.deepcopy(self._task.state_dict())

    def conclude(self, progress: Progress) -> Fitted:
        """Score the last weights if that is still due, and go back to the best."""
        if self._scored.steps != progress.steps:
            self._score(progress)
        if self._state:
            self._task.load_state_dict(self._state)
        self._task.eval()
        return Fitted(self._task, self._metrics or {}, tuple(self._history), progress)
