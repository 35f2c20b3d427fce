"""Training of one prepared task, in a folder or in memory, and its result.

`bothways.finetuning.run` reads data and model from their sources; `in_memory_run` starts from a
model in memory, for many short runs on the same examples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bothways.core.config import reader as configs
from bothways.core.config.checks import require_choice
from bothways.core.finding import Finding
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import device_of
from bothways.core.terminal import result_line
from bothways.data.loader import Share, ahead
from bothways.finetuning.automatic import usual_rate
from bothways.finetuning.config import FinetuneSettings
from bothways.finetuning.data import LabelledData, predictions, score, train_loader, tune
from bothways.finetuning.failed_runs import (
    DistinctAnswers,
    Failure,
    signs_of_little_training,
    signs_of_scores,
    signs_of_training,
    still_falling,
    training_loss,
)
from bothways.finetuning.lora import merge_changes
from bothways.finetuning.metrics import scored
from bothways.finetuning.stability import parameter_rules
from bothways.finetuning.teacher import TaughtModule, Teacher
from bothways.hub.adapter import LowRankChange, TrainedAdapter
from bothways.hub.model_card import Card
from bothways.hub.model_folder import save_model
from bothways.hub.resolve import portable_name
from bothways.model.kernels.library import runs_on
from bothways.model.model import Model
from bothways.prediction.predictor import Predictor
from bothways.prediction.prepared_model import PredictPrecision
from bothways.tasks.base import Metrics, TaskModel
from bothways.training.checkpoint import Best
from bothways.training.optimizers import OptimizerConfig, OptimizerFactory
from bothways.training.parallel import Plan, is_main
from bothways.training.run import Event, OnEvent, Training, TrainingPhase, TrainingRun
from bothways.training.state import RunState
from bothways.training.store import Store
from bothways.training.trackers import Peak


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run.

    Attributes:
        learner: with the weights that were best on the dev data; without dev data, the last ones.
        metrics: of these weights on the dev data; empty without it, and for an interrupted run.
        baseline: on the dev data, of the best answer there that does not depend on the input, such
            as the most frequent class; only the metrics that such an answer has.
        progress: at the end; short of the configured length if the run was interrupted.
        settings: of the run, with the rate and the length that were chosen for it.
        finished: False if the run was interrupted.
        history: (epochs, metrics) of every evaluation in this session.
        failure: why the run probably failed; None if there is no sign of failure.
        findings: of the preflight.
        folder: the model folder of a run in a folder; None in memory, and for an interrupted run.
        card: of the model folder.
        origin: the data and the model of the run, for the record in `bothways.json`.
        changes: the low-rank changes of a run with `lora`, by layer; they are part of the weights.
    """

    learner: TaskModel[Any, Any]
    metrics: Metrics
    progress: RunState
    settings: FinetuneSettings
    finished: bool = False
    history: tuple[tuple[float, Metrics], ...] = ()
    failure: Failure | None = None
    findings: tuple[Finding, ...] = ()
    folder: Path | None = None
    card: Card | None = None
    baseline: Metrics = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, LowRankChange] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return result_line(
            "FinetuneResult",
            self.metrics,
            steps=self.progress.steps,
            finished=None if self.finished else False,
            folder=self.folder,
        )

    def predictor(self, precision: PredictPrecision = "fp32") -> Predictor:
        """Return the model prepared for predictions.

        Raises:
            ConfigError: an unknown precision.
        """
        fix = "Call the predictor with inputs: result.predictor()(inputs)."
        require_choice(PredictPrecision, "precision", precision, fix=fix)
        return Predictor(self.learner, precision)

    def save(self, folder: str | Path) -> Path:
        """Save the model as a Hugging Face folder that `bothways.load` opens; return its path.

        Raises:
            ResourceError: the folder cannot be written.
        """
        place, task = Path(folder), self.learner.task
        record = {
            "task": configs.to_dict(task),
            "length": self.learner.length,
            "settings": configs.to_dict(self.settings),
            "steps": self.progress.steps,
            "seconds": round(self.progress.seconds, 1),
            "early": self.progress.early,
            "metrics": dict(self.metrics),
            "failure": list(self.failure.failed) if self.failure else [],
            **self.origin,
        }
        save_model(
            place,
            self.learner.model,
            self.learner.tokenizer,
            labels=self.learner.labels,
            problem=task.problem,
            card=self.card,
            extra=record,
            extra_files=task.program_files(self.learner.length),
            adapter=self._adapter(),
        )
        return place

    def _adapter(self) -> TrainedAdapter | None:
        lora = self.settings.lora
        if lora is None or not lora.adapter_only:
            return None
        base = portable_name(self.origin["base"]["name"])
        return TrainedAdapter(base, lora.alpha / lora.rank, self.changes)


def fit(  # noqa: PLR0913 – one independent value per question that a run answers
    learner: TaskModel[Any, Any],
    data: LabelledData,
    method: FinetuneSettings,
    store: Store,
    *,
    plan: Plan,
    seed: int,
    fresh: tuple[str, ...] = (),
    teacher: Teacher | None = None,
    peak: Peak | None = None,
    progress: Progress = SILENT,
    on_event: OnEvent = lambda event: None,
    on_trained: Callable[[FinetuneResult], object] = lambda result: None,
) -> FinetuneResult:
    """Train a task; if the run reaches its end, read the best weights, tune and score them.

    Args:
        learner: on its device; `apply_stability` and `compute_as` have prepared its model.
        seed: of the order of the data, dropout and mixout.
        fresh: heads that started at random in addition to the task's own.
        teacher: whose scores `with_teacher_scores` has added to the data; None without one.
        on_trained: called with the best weights, on the main rank, before they are scored: saves
            them whatever may happen then.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: the schedule does not fit the run.
    """
    device = device_of(learner)
    training = training_of(method, data)
    steps = train_loader(data, method, seed, Share(plan.rank, plan.world))
    history: list[tuple[float, Metrics]] = []
    losses: list[float] = []

    def note(event: Event) -> None:
        """Note losses and evaluations, and pass the event on."""
        losses.extend(training_losses(event))
        if event.kind == "evaluation":
            scores = {name.removeprefix("dev/"): value for name, value in event.values.items()}
            history.append((event.progress.epochs, scores))
        on_event(event)

    trained = learner if teacher is None else TaughtModule(learner, teacher)
    torch.manual_seed(seed + 1 + plan.rank)
    with learning_by_rows(learner.model, device, plan.world, training.optimizer):
        state = TrainingRun(
            trained,
            [TrainingPhase(training.end, lambda at: ahead(steps.steps(at.cursor), device))],
            training,
            plan,
            store,
            evaluation=functools.partial(_dev_metrics, learner, data, method) if data.dev else None,
            peak=peak,
            rules=parameter_rules(method.stability, learner.model, fresh),
            progress=progress,
            on_event=note,
        ).train()
    finished = state.finished(training.end)
    done = FinetuneResult(
        learner, {}, state, method, finished, tuple(history), findings=data.findings
    )
    if not finished or not is_main(plan):
        merge_changes(learner.model)
        return done
    if state.early:
        why = "no evaluation improved within training.early_stopping"
        progress.message(f"note: ended at epoch {state.epochs:.4g}: {why}")
    if training.keep.best is not None:
        progress.stage("reading the best weights")
        store.load_best(trained, training.keep.best)
    done = dataclasses.replace(done, changes=merge_changes(learner.model))
    learner.eval()
    on_trained(done)
    metrics, usual, failure = conclude(learner, data, method, state.steps, losses, progress)
    return dataclasses.replace(done, metrics=metrics, baseline=usual, failure=failure)


def _dev_metrics(
    learner: TaskModel[Any, Any], data: LabelledData, method: FinetuneSettings, progress: Progress
) -> Metrics:
    """Score the dev data; return the metrics by their names in the records of a run."""
    scores = score(learner, data, method.chosen_by, method.own_metrics, progress)
    return {f"dev/{name}": value for name, value in scores.items()}


def training_of(method: FinetuneSettings, data: LabelledData) -> Training:
    """Return the training with what depends on dev data: evaluations and best checkpoint."""
    evaluate, best = None, None
    if data.dev:
        direction = method.directions(data.task, data.labels)[method.chosen_by]
        evaluate, best = method.training.evaluate, Best(f"dev/{method.chosen_by}", direction)
    keep = dataclasses.replace(method.training.keep, best=best)
    return dataclasses.replace(method.training, evaluate=evaluate, keep=keep)


@contextlib.contextmanager
def learning_by_rows(
    model: Model, device: torch.device, world: int, optimizer: OptimizerConfig | OptimizerFactory
) -> Iterator[None]:
    """Update only the rows of the embedding that the data uses, where that is faster.

    This needs the compiled kernels, a single process (ranks exchange all rows), and an optimizer of
    the library: others do not take sparse gradients. Task heads use the embedding for lookups only.
    """
    table = model.encoder.embedding.token
    table.sparse = runs_on(device) and world == 1 and isinstance(optimizer, OptimizerConfig)
    try:
        yield
    finally:
        table.sparse = False


def conclude(
    learner: TaskModel[Any, Any],
    data: LabelledData,
    method: FinetuneSettings,
    updates: int | None = None,
    losses: Many[float] = (),
    progress: Progress = SILENT,
) -> tuple[Metrics, Metrics, Failure | None]:
    """Tune a trained task on the dev data and score it.

    Args:
        losses: the training losses of the run, in order.

    Returns:
        The metrics and those of the best constant answer, empty without dev data; and the failure,
        None if there is no sign of failure.
    """
    trained = training_loss(learner, data.sequences, method.microbatch_tokens, progress)
    baseline = data.task.baseline
    usual_train = baseline(data.train_examples)
    reasons = signs_of_training(trained, usual_train)
    metrics: Metrics = {}
    usual: Metrics = {}
    if data.dev:
        tune(learner, data, method.chosen_by, progress)
        answers = DistinctAnswers()
        results = answers.seen(predictions(learner, data, progress=progress))
        metrics = scored(results, learner.score, method.own_metrics)
        direction = method.directions(data.task, data.labels)[method.chosen_by]
        usual = baseline(data.dev_examples)  # as in the report
        reasons = (*signs_of_scores(metrics, usual, method.chosen_by, direction, answers), *reasons)
    little = () if reasons else signs_of_little_training(trained, usual_train)
    if not reasons and not little:
        return metrics, usual, None
    failure = Failure(
        reasons or little,
        method.training,
        updates,
        unfinished=bool(little),
        falling=still_falling(losses),
        usual=usual_rate(learner.model.config, lora=method.lora),
    )
    return metrics, usual, failure


def training_losses(event: Event) -> Iterator[float]:
    """Yield the loss of an event that reports one."""
    if event.kind == "report":
        yield sum(value for name, value in event.values.items() if name.startswith("loss/"))
