"""Fine-tuning: a model folder and labelled data become a model for a task.

The run folder holds the checkpoints, `metrics.jsonl`, TensorBoard's events, the resolved
`config.toml`, and at the end `model/`: a Hugging Face folder (such as
BertForSequenceClassification with `id2label`, tokenizer and model card) with the record of the
training in `bothways.json`. `report.html` analyses the predictions on the dev data.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bothways.core.config import reader as configs
from bothways.core.config.tree import flatten
from bothways.core.errors import installed
from bothways.core.finding import places
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import choose_device, own_torch_state
from bothways.finetuning.data import dev_windows
from bothways.finetuning.fit import FinetuneResult, fit
from bothways.finetuning.layer_stage import STAGE, learn_layers
from bothways.finetuning.prepare import (
    FinetuneConfig,
    PreparedRun,
    Rows,
    prepare_run,
    remarks,
)
from bothways.finetuning.stability import Stability
from bothways.hub.model_card import Card, limits_of_finetuned, run_of
from bothways.hub.provenance import digest_of_model, without_places
from bothways.model.flops import forward_flops
from bothways.prediction.analysis.report import analyse_encoded, write_report
from bothways.prediction.engine import PredictionCounts
from bothways.tasks.base import Task
from bothways.training.parallel import (
    Plan,
    connected,
    is_main,
    plan_here,
    rank_device,
    require_agreement,
)
from bothways.training.preflight.machine import peak_of
from bothways.training.run import OnEvent
from bothways.training.run_folder import run_folder
from bothways.training.store import FolderStore, MemoryStore

__all__ = ["FinetuneConfig", "FinetuneResult", "finetune"]


@own_torch_state(torch.float32)
def finetune(
    settings: FinetuneConfig,
    folder: Path | None = None,
    *,
    train: Rows | None = None,
    dev: Rows | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
    on_event: OnEvent = lambda event: None,
) -> FinetuneResult:
    """Fine-tune from a model folder, and save the model in `folder/model`.

    Under `torchrun` each process is a rank. SIGINT, SIGTERM, SIGHUP and SIGUSR1 end a run in a
    folder after a step, with a checkpoint.

    Args:
        folder: of this run: checkpoints, metrics, `config.toml`, `model/`, `report.html`; None for
            a run in memory, which keeps the best weights alone.
        train, dev: rows to read instead of the sources that the settings name.
        resume: continue from the checkpoints in the folder; otherwise it must not hold any.
        progress: receives stages, records, and the notes and warnings of the preflight.
        on_event: called after each step, report, evaluation and checkpoint.

    Raises:
        BothwaysError: the data or the machine is not suitable (one message lists all problems), or
            a loss is not finite.
        FolderError: the model cannot be read.
        ResourceError: the run folder is in use, holds another run, or cannot be written.
    """
    plan = plan_here()
    progress = progress if is_main(plan) else SILENT
    where = rank_device(plan, choose_device(device))
    with contextlib.ExitStack() as stack:
        if folder is not None and is_main(plan):
            stack.enter_context(run_folder(folder, resume=resume, progress=progress))
            if settings.stage is not None:
                stack.enter_context(run_folder(folder / STAGE, resume=resume, progress=progress))
        stack.enter_context(connected(plan, where))
        ready = prepare_run(settings, folder, where, progress, train=train, dev=dev)
        identity = _identity(ready)
        require_agreement(plan, flatten(identity))
        for remark in remarks(ready):
            progress.message(remark)
        progress.stage("measuring the speed of the machine")
        peak = peak_of(_forward(ready), settings.training, where, plan)
        if (interrupted := _first_stage(ready, identity, folder, plan, progress)) is not None:
            return interrupted
        done = fit(
            ready.learner,
            ready.data,
            ready.settings,
            MemoryStore()
            if folder is None
            else FolderStore(
                folder,
                identity,
                configs.changeable_settings(ready.settings),
                configs.to_toml(ready.settings),
            ),
            seed=settings.ordered_by,
            fresh=ready.fresh,
            teacher=settings.teacher,
            plan=plan,
            peak=peak,
            progress=progress,
            on_event=on_event,
            on_trained=lambda trained: _save(trained, ready, folder, progress),
        )
        if not done.finished or not is_main(plan):
            return dataclasses.replace(done, findings=ready.findings)
        done = _save(done, ready, folder, progress)
        if folder is not None:
            _write_report(done, ready, folder, progress)
        return done


def _first_stage(
    ready: PreparedRun,
    identity: Mapping[str, Any],
    folder: Path | None,
    plan: Plan,
    progress: Progress,
) -> FinetuneResult | None:
    """Let the student learn the teacher's layers, if it should; return what was interrupted."""
    settings = ready.settings
    if settings.teacher is None or settings.stage is None:
        return None
    changeable = configs.changeable_settings(settings)
    store = MemoryStore() if folder is None else FolderStore(folder / STAGE, identity, changeable)
    state = learn_layers(
        ready.learner.model,
        ready.data,
        settings,
        settings.stage,
        settings.teacher.folder,
        store,
        plan=plan,
        seed=settings.ordered_by,
        progress=progress,
    )
    if state.finished(settings.stage.training.end):
        return None
    return FinetuneResult(ready.learner, {}, state, settings, findings=ready.findings)


def _save(
    done: FinetuneResult, ready: PreparedRun, folder: Path | None, progress: Progress
) -> FinetuneResult:
    """Save the model, if the run has a folder; return the result with its origin and its folder.

    A run saves twice: before its metrics, which may fail, and with them.
    """
    done = dataclasses.replace(
        done, findings=ready.findings, card=_card(done, ready), origin=_origin(ready)
    )
    if folder is None:
        return done
    progress.stage("saving the model")
    return dataclasses.replace(done, folder=done.save(folder / "model"))


def _write_report(
    done: FinetuneResult, ready: PreparedRun, folder: Path, progress: Progress
) -> None:
    """Write a report on the model's answers to the dev data."""
    settings, data = ready.settings, ready.data
    if settings.dev is not None and installed("matplotlib", "jinja2"):
        progress.stage("analysing each answer", len(data.dev))
        counts = PredictionCounts(on_count=progress.advance)
        analysis = analyse_encoded(done.learner, dev_windows(data), counts=counts)
        progress.stage("writing the report")
        write_report(
            done.learner,
            analysis,
            folder / "report.html",
            model=str(folder),
            data=settings.sources["dev"],
            training=settings,
        )


def _identity(ready: PreparedRun) -> dict[str, Any]:
    """Return the settings of a run and the digests of its data and models, without paths."""
    data = {name: source.sha256 for name, source in ready.sources.items()} | {"model": ready.base}
    if ready.settings.teacher is not None:
        data["teacher"] = digest_of_model(ready.settings.teacher.folder)
    return without_places(configs.to_dict(ready.settings)) | {"data": data}


def _forward(ready: PreparedRun) -> float:
    """Return the operations per token of a forward pass on sequences of average length."""
    model, data = ready.learner.model, ready.data
    return forward_flops(
        model.config, model.specification, max(1, data.tokens // len(data.sequences))
    )


def _origin(ready: PreparedRun) -> dict[str, Any]:
    """Return the settings, data and model of a run, for the record in `bothways.json`."""
    settings = ready.settings
    return {
        "data": {name: dataclasses.asdict(source) for name, source in ready.sources.items()},
        "base": {"name": settings.model, "sha256": ready.base},
        **_split_record(settings),
    }


def _split_record(settings: FinetuneConfig) -> dict[str, Any]:
    """Return where dev data was split from, and how, for `bothways evaluate`."""
    if settings.dev_part is None:
        return {}
    split = {"train": settings.train, "dev": settings.dev, **dataclasses.asdict(settings.split)}
    return {"split": split}


def _card(done: FinetuneResult, ready: PreparedRun) -> Card:
    settings, data = ready.settings, ready.data
    plain = configs.to_dict(settings)
    return Card(
        title=f"{Path(settings.model).name} fine-tuned on {Path(settings.train).name}",
        summary=_summary(done, data.labels),
        settings={
            "base model": settings.model,
            "length": data.length,
            "batch": _words(plain["batch"]),
            "optimizer": _words(plain["training"]["optimizer"]),
            "schedule": _words(plain["training"]["schedule"]),
            "run": run_of(settings.training.end, done.progress),
            "seed": settings.seed,
            **_changed_settings(settings, done.learner.task),
        },
        metrics={f"dev {name}": value for name, value in done.metrics.items()},
        data=ready.sources,
        limits=limits_of_finetuned(data.length, settings.seed, done.findings, bool(data.dev)),
    )


def _summary(done: FinetuneResult, labels: tuple[str, ...]) -> str:
    text = f"Fine-tuned for the task {done.learner.task.name}" + (
        f": {places(labels)}." if labels else "."
    )
    return text + (f" Warning: {done.failure}" if done.failure else "")


def _changed_settings(settings: FinetuneConfig, task: Task[Any, Any]) -> dict[str, object]:
    """Return the settings of task, stability and low-rank changes that differ from the defaults."""
    order = {} if settings.order_seed is None else {"seed of the order": settings.order_seed}
    lora = {} if settings.lora is None else vars(settings.lora)
    shown = {name: value for name, value in lora.items() if value is not False}
    low_rank = {"lora": _words(shown)} if shown else {}
    return {
        **_differences(task, type(task)()),
        **_differences(settings.stability, Stability()),
        **low_rank,
        **order,
    }


def _differences(config: Any, default: Any) -> dict[str, object]:
    """Return the settings that differ, by readable names; columns belong to the data."""
    before = configs.to_dict(default)
    changed = {
        name: value for name, value in configs.to_dict(config).items() if value != before[name]
    }
    return {name.replace("_", " "): value for name, value in changed.items() if name != "columns"}


def _words(plain: str | dict[str, Any]) -> str:
    """Return plain values on one line, such as a member of a union: "adamw, lr 5e-05, …"."""
    if isinstance(plain, str):
        return plain
    values = dict(plain)
    kind = [values.pop("kind")] if "kind" in values else []
    return ", ".join([*kind, *(f"{name} {value}" for name, value in values.items())])
