"""Fine-tuning from files: a model folder and labelled data become a model folder for a task.

The run folder holds the checkpoints, `metrics.jsonl`, TensorBoard's events, the resolved
`config.toml`, and at the end `model/`: a Hugging Face folder (such as
BertForSequenceClassification with `id2label`, tokenizer and model card) with the record of the
training in `bothways.json`. `report.html` analyses the predictions on the dev data.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bothways.analysis.report import analyse_encoded, write_report
from bothways.core.config import reader as configs
from bothways.core.errors import installed
from bothways.core.finding import Finding, places
from bothways.core.progress import OnShare
from bothways.core.stages import OnStage, part_of, stages
from bothways.core.terminal import say
from bothways.data.loader import Share, ahead
from bothways.finetuning.data import LabelledData, dev_windows, loader, score
from bothways.finetuning.failed_runs import Failure
from bothways.finetuning.in_memory_run import conclude, learning_by_rows, training_losses
from bothways.finetuning.prepare import (
    FinetuneConfig,
    PreparedRun,
    dev_name,
    make_ready,
    remarks,
    training_of,
)
from bothways.finetuning.stability import Stability, rules
from bothways.hub.model_card import Card, limits_of_finetuned, run_of
from bothways.hub.model_folder import save_model
from bothways.hub.provenance import without_places
from bothways.model.flops import forward_flops
from bothways.prediction.engine import PredictionCounts
from bothways.preflight.machine import peak_of
from bothways.runtime.devices import choose_device
from bothways.tasks.base import Metrics, Task, TaskLearner
from bothways.training import run
from bothways.training.parallel import Plan, connected, is_main, plan_here, rank_device
from bothways.training.run_folder import run_folder
from bothways.training.state import RunState
from bothways.training.store import FolderStore

__all__ = ["FinetuneConfig", "FinetuneResult", "finetune"]


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run.

    Attributes:
        task: with the best weights.
        progress: at the end; short of the configured length if the run was interrupted.
        metrics: of the dev data; empty without it, and for an interrupted run.
        findings: of the preflight.
        folder: the model folder; None for an interrupted run.
        failure: why the run probably failed; None if there is no sign of failure.
        finished: False if the run was interrupted.
    """

    task: TaskLearner[Any, Any]
    progress: RunState
    metrics: Metrics
    findings: tuple[Finding, ...]
    folder: Path | None
    failure: Failure | None = None
    finished: bool = False


def finetune(
    settings: FinetuneConfig,
    folder: Path,
    *,
    resume: bool = False,
    device: str = "auto",
    console: Console | None = None,
    several: bool = False,
) -> FinetuneResult:
    """Fine-tune into a run folder, from its newest checkpoint or from the start.

    Under `torchrun` each process is a rank. SIGINT and SIGTERM end the run after a step, with a
    checkpoint.

    Args:
        resume: continue from the checkpoints in the folder; otherwise it must not hold any.
        console: receives warnings; None for no output.
        several: True for one of several runs; the advice after a failure leaves out other seeds.

    Raises:
        BothwaysError: the data or the machine is not suitable (one message lists all problems), or
            a loss is not finite.
        FolderError: the model cannot be read.
        ResourceError: the run folder is in use, holds another run, or cannot be written.
    """
    plan = plan_here()
    console = console if console is not None and is_main(plan) else Console(quiet=True)
    where = rank_device(plan, choose_device(device))
    claim = run_folder(folder, resume=resume) if is_main(plan) else contextlib.nullcontext()
    with claim, connected(plan, where):
        with stages(console) as on_stage:
            ready = make_ready(settings, folder, where, on_stage)
        if is_main(plan):
            for remark in remarks(ready):
                say(console, remark)
        done = _train(ready, folder, plan, where, console)
        for remark in _afterwards(done, several):
            say(console, remark)
        return done


def _afterwards(done: FinetuneResult, several: bool) -> list[str]:
    """Return the notes and warnings at the end of a run."""
    lines = []
    if done.progress.early:
        lines.append(
            f"note: ended after {done.progress.epochs:.4g} epochs: no evaluation improved within "
            "training.early_stopping"
        )
    return lines + ([f"warning: {done.failure.message(several)}"] if done.failure else [])


def _train(
    ready: PreparedRun, folder: Path, plan: Plan, device: torch.device, console: Console
) -> FinetuneResult:
    settings, data, task = ready.settings, ready.data, ready.task
    training = training_of(settings, data.definition.directions(data.labels))
    steps = loader(data, settings, task, settings.ordered_by, Share(plan.rank, plan.world))
    with stages(console) as on_stage:
        on_stage("measuring the speed of the machine", None)
        peak = peak_of(_forward(ready), training, device, plan)
    torch.manual_seed(
        settings.ordered_by + 1 + plan.rank
    )  # after the forecast and the peak, which draw too
    losses = list[float]()
    with learning_by_rows(task.model, device, plan.world):
        progress = run.train(
            task,
            [
                run.TrainingPhase(
                    training.end, lambda state: ahead(steps.steps(state.cursor), device)
                )
            ],
            training,
            plan,
            FolderStore(folder, _made_of(ready), configs.to_toml(settings)),
            evaluation=partial(_evaluate, task, data) if data.dev else None,
            peak=peak,
            rules=rules(settings.stability, task.model, settings.fresh),
            on_event=lambda event: losses.extend(training_losses(event)),
        )
    finished = progress.finished(training.end)
    done = FinetuneResult(task, progress, {}, ready.findings, None, finished=finished)
    if not finished or not is_main(plan):
        return done
    with stages(console) as on_stage:
        return _concluded(done, ready, folder, losses, on_stage)


def _made_of(ready: PreparedRun) -> dict[str, Any]:
    """Return the identity of a run for its checkpoints: settings, data and model."""
    data = {name: source.sha256 for name, source in ready.sources.items()} | {"model": ready.base}
    return without_places(configs.to_dict(ready.settings)) | {"data": data}


def _evaluate(task: TaskLearner[Any, Any], data: LabelledData, on_share: OnShare) -> Metrics:
    """Return the metrics of the dev data, by their names in the records of a run."""
    return {dev_name(name): value for name, value in score(task, data, on_share=on_share).items()}


def _concluded(
    done: FinetuneResult,
    ready: PreparedRun,
    folder: Path,
    losses: Many[float],
    on_stage: OnStage,
) -> FinetuneResult:
    """Score and save the best weights of a finished run, and write its report."""
    settings, data, task = ready.settings, ready.data, done.task
    metric = training_of(settings, data.definition.directions(data.labels)).keep.best
    on_stage("reading the best weights", None)
    if metric is not None:
        FolderStore(folder, {}).load_best(task, metric)
    task.eval()
    metrics, failure = conclude(task, data, settings, on_stage, done.progress.steps, losses)
    done = dataclasses.replace(done, metrics=metrics, folder=folder / "model", failure=failure)
    on_stage("saving the model", None)
    _save(done, ready)
    if settings.dev is not None and installed("matplotlib", "jinja2"):
        on_count = part_of(partial(on_stage, "analysing each answer"), 0, 1, len(data.dev))
        analysis = analyse_encoded(
            task, dev_windows(data), counts=PredictionCounts(on_count=on_count)
        )
        on_stage("writing the report", None)
        write_report(
            task,
            analysis,
            folder / "report.html",
            model=str(folder),
            data=settings.dev,
            training=settings,
        )
    return done


def _forward(ready: PreparedRun) -> float:
    """Return the operations per token of a forward pass on sequences of average length."""
    model, data = ready.task.model, ready.data
    return forward_flops(
        model.config, model.specification, max(1, data.tokens // len(data.sequences))
    )


def _save(done: FinetuneResult, ready: PreparedRun) -> None:
    assert done.folder is not None
    save_model(
        done.folder,
        done.task.model,
        ready.data.tokenizer,
        labels=ready.data.labels,
        problem=done.task.task.problem,
        card=_card(done, ready),
        extra=_record(done, ready),
    )


def _record(done: FinetuneResult, ready: PreparedRun) -> dict[str, Any]:
    """Return the record of the training in `bothways.json`."""
    settings, definition = ready.settings, done.task.task
    chosen = settings.chosen_by
    return {
        "task": configs.to_dict(definition),
        "length": ready.data.length,
        "data": {name: dataclasses.asdict(source) for name, source in ready.sources.items()},
        "base": {"name": settings.model, "sha256": ready.base},
        "settings": configs.to_dict(settings),
        "steps": done.progress.steps,
        "seconds": round(done.progress.seconds, 1),
        "metrics": dict(done.metrics),
        "chosen_by": {
            "metric": chosen,
            "direction": definition.directions(ready.data.labels)[chosen],
        },
        "early": done.progress.early,
        "failure": list(done.failure.failed) if done.failure else [],
    }


def _card(done: FinetuneResult, ready: PreparedRun) -> Card:
    settings, data = ready.settings, ready.data
    return Card(
        title=f"{Path(settings.model).name} fine-tuned on {Path(settings.train).name}",
        summary=_summary(done, data.labels),
        settings={
            "base model": settings.model,
            "length": data.length,
            "batch": _words(settings.batch),
            "optimizer": _words(settings.training.optimizer),
            "schedule": _words(settings.training.schedule),
            "run": run_of(settings.training.end, done.progress),
            "seed": settings.seed,
            **_changed_settings(settings, done.task.task),
        },
        metrics={f"dev {name}": value for name, value in done.metrics.items()},
        data=ready.sources,
        limits=limits_of_finetuned(data.length, settings.seed, done.findings, bool(data.dev)),
    )


def _summary(done: FinetuneResult, labels: tuple[str, ...]) -> str:
    text = f"Fine-tuned for the task {done.task.task.name}" + (
        f": {places(labels)}." if labels else "."
    )
    return text + (f" Warning: {done.failure}" if done.failure else "")


def _changed_settings(settings: FinetuneConfig, definition: Task[Any, Any]) -> dict[str, object]:
    """Return the settings of task and stability that differ from the defaults."""
    order = {} if settings.order_seed is None else {"seed of the order": settings.order_seed}
    return {
        **_differences(definition, type(definition)()),
        **_differences(settings.stability, Stability()),
        **order,
    }


def _differences(config: Any, default: Any) -> dict[str, object]:
    """Return the settings that differ, by readable names; columns belong to the data."""
    before = configs.to_dict(default)
    changed = {
        name: value for name, value in configs.to_dict(config).items() if value != before[name]
    }
    return {name.replace("_", " "): value for name, value in changed.items() if name != "columns"}


def _words(config: Any) -> str:
    """Return a member of a union on one line: "adamw, lr 5e-05, …"."""
    values = configs.to_dict(config)
    return ", ".join([values.pop("kind"), *(f"{name} {value}" for name, value in values.items())])
