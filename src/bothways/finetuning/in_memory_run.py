"""Fine-tuning in memory: many short runs on the same examples, from pre-trained or random weights.

`label` does the work that all runs share: checks, tokenizing, the order of the labels. `fit_task`
runs one start, method and seed. `bothways.finetuning.run` does the same with files, a run folder
and checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from bothways.core.config import reader as configs
from bothways.core.config.checks import require_seed
from bothways.core.errors import ConfigError
from bothways.core.stages import OnStage, unseen
from bothways.finetuning.automatic import UNKNOWN, choose, tokens_read, usual_rate
from bothways.finetuning.config import RECIPES, USUAL, FinetuneSettings, expand_shorthands
from bothways.finetuning.data import (
    LabelledData,
    check_metric,
    label,
    loader,
    predictions,
    score,
    tune,
)
from bothways.finetuning.failed_runs import (
    DistinctAnswers,
    Failure,
    signs_of_little_training,
    signs_of_scores,
    signs_of_training,
    still_falling,
    training_loss,
)
from bothways.finetuning.stability import rules, steady
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.resolve import resolve_run
from bothways.model.config import ModelConfig
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.prediction.predictor import Predictor
from bothways.prediction.prepared_model import PredictPrecision
from bothways.preflight.machine import compute_as
from bothways.runtime.devices import choose_device
from bothways.tasks.base import Metrics, Reading, TaskLearner
from bothways.tasks.catalogue import Trainable, trainable_task
from bothways.training.checkpoint import Best, Keep
from bothways.training.parallel import Single
from bothways.training.run import Event, TrainingPhase, train
from bothways.training.state import RunState
from bothways.training.store import MemoryStore

Rows = str | Path | Iterable[Any]
"""A file or Hub data set, or rows: dicts, examples, a DataFrame, a `datasets.Dataset`."""


@dataclass(frozen=True)
class FitResult:
    """The result of a run in memory.

    Attributes:
        task: with the weights that were best on the dev data; without dev data, the last ones.
        metrics: of these weights on the dev data; empty without dev data.
        history: (epochs, metrics) of every evaluation.
        progress: at the end.
        settings: of the run, with the rate and the length that were chosen for it.
        failure: why the run probably failed; None if there is no sign of failure.
    """

    task: TaskLearner[Any, Any]
    metrics: Metrics
    history: tuple[tuple[float, Metrics], ...]
    progress: RunState
    settings: FinetuneSettings
    failure: Failure | None = None

    def predictor(self, precision: PredictPrecision = "fp32") -> Predictor:
        """Return the model prepared for predictions."""
        return Predictor(self.task, precision)

    def save(self, folder: str | Path) -> Path:
        """Save the model as a Hugging Face folder that `open_task` opens; return its path.

        Raises:
            ResourceError: the folder cannot be written.
        """
        definition, place = self.task.task, Path(folder)
        record = {
            "task": configs.to_dict(definition),
            "length": self.task.length,
            "settings": configs.to_dict(self.settings),
            "steps": self.progress.steps,
            "metrics": dict(self.metrics),
            "failure": list(self.failure.failed) if self.failure else [],
        }
        save_model(
            place,
            self.task.model,
            self.task.tokenizer,
            labels=self.task.labels,
            problem=definition.problem,
            extra=record,
        )
        return place


def finetune_rows(  # noqa: PLR0913 – one option per question
    model: str | Path,
    train: Rows,
    dev: Rows | None = None,
    task: str | Trainable = "classify",
    *,
    seed: int = 0,
    order_seed: int | None = None,
    device: str = "auto",
    recipe: str = "modern",
    on_step: Callable[[RunState], None] = lambda progress: None,
    **settings: Any,
) -> FitResult:
    """Fine-tune a model on rows, in memory.

        result = finetune_rows("bert-base-uncased", rows, dev, lr=3e-5, epochs=3)
        result.metrics["accuracy"], result.predictor()("A wonderful film."), result.save("folder")

    Args:
        model: a model folder, the folder of a pre-training run, or a Hub id.
        train, dev: labelled rows; without `dev` the last weights are kept.
        task: its name, or the task itself.
        recipe: "modern" or "paper".
        settings: by common name (`config.SHORTHANDS`) or as nested dicts of the dotted paths.

    Raises:
        BothwaysError: the data or a setting cannot be used, or a loss is not finite.
    """
    require_seed(seed=seed, order_seed=order_seed)
    definition = trainable_task(task) if isinstance(task, str) else task
    base = RECIPES[recipe](definition)
    method = configs.load(FinetuneSettings, base=base, overrides=expand_shorthands(settings))
    loaded = load_model(resolve_run(str(model)), whole=False)
    examples, definition = _examples(method.task, train, "train")
    scored = _examples(definition, dev, "dev")[0] if dev is not None else []
    positions = loaded.model.config.max_positions
    data = label(definition, loaded.tokenizer(), examples, scored, method.length, positions)
    method = dataclasses.replace(method, task=definition)
    method, _ = choose(method, loaded.model.config, data, tokens_read(loaded))
    return fit_task(
        loaded.model,
        data,
        method,
        seed=seed,
        order_seed=order_seed,
        device=device,
        on_step=on_step,
    )


def _examples(definition: Trainable, rows: Rows, name: str) -> tuple[list[Any], Trainable]:
    """Return the examples in rows, and the task with the columns that were read."""
    if isinstance(rows, str | Path):
        columns: Any = definition.columns
        reading: Reading[Any] = definition.read(str(rows), columns)
        return list(reading.examples), reading.task  # type: ignore[return-value]
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a DataFrame
        items: Iterable[Any] = rows.to_dict("records")
    else:
        items = cast("Iterable[Any]", rows)
    return [
        definition.example(row, where=f"{name} row {number}") if isinstance(row, Mapping) else row
        for number, row in enumerate(items, 1)
    ], definition


def start_from(start: Model | ModelConfig, heads: Iterable[Head], seed: int) -> Model:
    """Return a model with new heads and the encoder of `start`.

    The pooler of `start` is copied if the heads include one. A configuration gives random weights.

    Raises:
        ConfigError: the heads need a pooler, and `start` has none.
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
    data: LabelledData,
    method: FinetuneSettings = USUAL,
    *,
    seed: int = 0,
    order_seed: int | None = None,
    device: str = "auto",
    on_step: Callable[[RunState], None] = lambda progress: None,
) -> FitResult:
    """Fine-tune once, in memory.

    Args:
        start: a model whose encoder and pooler are copied, or a configuration for random weights.
        seed: of the new head and all other random weights.
        order_seed: of the order of the data, dropout and mixout. None: the same as `seed`.
        on_step: called after each step, for a progress bar.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: `start` lacks a pooler or the blocks that `stability` names, the schedule does
            not fit the run, the task does not have the metric, or early stopping has no dev data.
    """
    config, tokens = (start.config, UNKNOWN) if isinstance(start, Model) else (start, 0.0)
    method, _ = choose(method, config, data, tokens)
    best = _best(data, method)
    model = start_from(start, data.definition.heads(data.labels, method.dropout), seed)
    _check_start(start, method)
    steady(model, method.stability, seed)
    compute_as(model.encoder, method.training, choose_device(device))
    task = data.definition.learner(model, data.tokenizer, data.labels, data.length).to(
        choose_device(device)
    )
    order = seed if order_seed is None else order_seed
    torch.manual_seed(order + 1)
    losses = list[float]()

    def on_event(event: Event) -> None:
        """Pass each step on and keep the losses."""
        losses.extend(training_losses(event))
        if event.kind == "step":
            on_step(event.progress)

    with learning_by_rows(model, choose_device(device), world=1):
        store, steps = MemoryStore(), loader(data, method, task, order).steps
        progress = train(
            task,
            [TrainingPhase(method.training.end, lambda state: steps(state.cursor))],
            dataclasses.replace(method.training, keep=Keep(1, best)),
            Single(),
            store,
            evaluation=(lambda _: score(task, data)) if data.dev else None,
            rules=rules(method.stability, model),
            on_event=on_event,
        )
        store.load_best(task, best)
    task.eval()
    metrics, failure = conclude(task, data, method, updates=progress.steps, losses=losses)
    return FitResult(task, metrics, tuple(store.history), progress, method, failure)


@contextlib.contextmanager
def learning_by_rows(model: Model, device: torch.device, world: int) -> Iterator[None]:
    """Update only the rows of the embedding that the data uses, where that is faster.

    See `training.rows`. This needs the CPU and a single process: other devices would have to wait
        for the row numbers, and ranks exchange all rows. Task heads use the embedding for lookups
        only.
    """
    table = model.encoder.embedding.token
    table.sparse = device.type == "cpu" and world == 1
    try:
        yield
    finally:
        table.sparse = False


def conclude(
    task: TaskLearner[Any, Any],
    data: LabelledData,
    method: FinetuneSettings,
    on_stage: OnStage = unseen,
    updates: int | None = None,
    losses: Many[float] = (),
) -> tuple[Metrics, Failure | None]:
    """Tune a trained task on the dev data and score it.

    Args:
        losses: the training losses of the run, in order.

    Returns:
        The metrics, empty without dev data, and the failure; None if there is no sign of failure.
    """
    trained = training_loss(
        task,
        data.sequences,
        method.microbatch_tokens,
        partial(on_stage, "measuring the training loss"),
    )
    baseline = data.definition.baseline
    usual_train = baseline(data.train_examples, data.train_examples)
    reasons = signs_of_training(trained, usual_train)
    metrics: Metrics = {}
    if data.dev:
        tune(task, data, method.chosen_by, partial(on_stage, "tuning on the dev data"))
        answers = DistinctAnswers(data.definition)
        metrics = task.score(
            answers.seen(
                predictions(task, data, on_share=partial(on_stage, "scoring the dev data"))
            )
        )
        direction = data.definition.directions(data.labels)[method.chosen_by]
        usual = baseline(data.train_examples, data.dev_examples)
        reasons = (*signs_of_scores(metrics, usual, method.chosen_by, direction, answers), *reasons)
    little = () if reasons else signs_of_little_training(trained, usual_train)
    if not reasons and not little:
        return metrics, None
    return metrics, Failure(
        reasons or little,
        method.training,
        updates,
        unfinished=bool(little),
        falling=still_falling(losses),
        usual=usual_rate(task.model.config),
    )


def training_losses(event: Event) -> Iterator[float]:
    """Yield the loss of an event that reports one."""
    if event.kind == "report":
        yield sum(value for name, value in event.values.items() if name.startswith("loss/"))


def _best(data: LabelledData, method: FinetuneSettings) -> Best:
    """Return the metric that chooses the weights.

    Raises:
        ConfigError: it cannot be measured on this data.
    """
    check_metric(method.chosen_by, data)
    if method.training.early_stopping is not None and not data.dev:
        what = "early stopping needs dev data to measure improvement"
        raise ConfigError(
            what, where="training.early_stopping", fix="Give dev data, or leave early_stopping out."
        )
    return Best(method.chosen_by, data.definition.directions(data.labels)[method.chosen_by])


def _check_start(start: Model | ModelConfig, method: FinetuneSettings) -> None:
    for name in ("reinitialise", "frozen", "mixout", "pull"):
        if not isinstance(start, Model) and getattr(method.stability, name):
            what = "needs pre-trained weights, and this run starts from random ones"
            raise ConfigError(
                what, where=f"stability.{name}", fix="Start from a model, or set it to 0."
            )
