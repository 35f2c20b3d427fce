"""The result of a fine-tuning run: the trained model, its metrics, and what is saved with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bothways.core.config import reader as configs
from bothways.core.config.values import require_choice
from bothways.core.errors import Finding, places
from bothways.core.files import local_path
from bothways.core.report.html import metrics_html
from bothways.core.terminal import result_line
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.failed_runs import Failure
from bothways.finetuning.prepare import PreparedRun
from bothways.finetuning.stability import Stability
from bothways.hub.adapter import LowRankChange, TrainedAdapter
from bothways.hub.model_card import Card, limits_of_finetuned, run_of
from bothways.hub.model_folder import save_model
from bothways.hub.provenance import today
from bothways.hub.resolve import portable_name
from bothways.prediction.predictor import Predictor
from bothways.prediction.prepared_model import PredictPrecision
from bothways.tasks.base import Metrics, TaskModel
from bothways.tasks.sentence_embedding.task import Embedder, save_sentence_encoder
from bothways.training.schedules import RunState


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run.

    Attributes:
        task_model: the model with the best weights on the dev data; without it, the last ones.
        metrics: metrics of these weights on the dev data; empty without it, and for an interrupted
            run.
        baseline: metrics of the majority baseline on the dev data, as far as it has them: of the
            best answer that does not depend on the input, such as the most frequent class.
        progress: state at the end; short of the configured length if the run was interrupted.
        settings: settings of the run, with the rate and the length that were chosen for it.
        finished: False if the run was interrupted.
        history: (epochs, metrics) of every evaluation in this session.
        failure: reasons why the run probably failed; None if there is no sign of failure.
        findings: warnings and notes of the preflight.
        folder: the model folder of a run in a folder; None in memory, and for an interrupted run.
        card: model card of the folder.
        origin: the data and the model of the run, for the record in `bothways.json`.
        changes: the low-rank changes of a run with `lora`, by layer; they are part of the weights.
    """

    task_model: TaskModel[Any, Any]
    metrics: Metrics
    progress: RunState
    settings: FinetuneConfig
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

    def _repr_html_(self) -> str | None:
        title = f"Fine-tuned for {self.task_model.task.name}, {self.progress.steps:,} steps"
        return metrics_html(title, {"dev": self.metrics, "majority baseline": self.baseline})

    def predictor(self, precision: PredictPrecision = "fp32") -> Predictor:
        """Return the model prepared for predictions.

        Raises:
            ConfigError: an unknown precision.
        """
        fix = "Call the predictor with inputs: result.predictor()(inputs)."
        require_choice(PredictPrecision, "precision", precision, fix=fix)
        return Predictor(self.task_model, precision)

    def save(self, folder: str | Path) -> Path:
        """Save the model as a Hugging Face folder that `bothways.load` opens; return its path.

        Raises:
            ResourceError: the folder cannot be written.
        """
        path, task, lora = local_path(folder), self.task_model.task, self.settings.lora
        adapter = None
        if lora is not None and lora.adapter_only:
            base = portable_name(self.origin["base"]["name"])
            adapter = TrainedAdapter(base, lora.alpha / lora.rank, self.changes)
        record = {
            "task": configs.to_dict(task),
            "length": self.task_model.length,
            "settings": configs.to_dict(self.settings),
            "steps": self.progress.steps,
            "seconds": round(self.progress.seconds, 1),
            "early": self.progress.early,
            "date": today(),
            "metrics": dict(self.metrics),
            "failure": list(self.failure.failed) if self.failure else [],
            **self.origin,
        }
        if isinstance(self.task_model, Embedder):
            save_sentence_encoder(path, self.task_model, self.card, record)
            return path
        save_model(
            path,
            self.task_model.model,
            self.task_model.tokenizer,
            labels=self.task_model.labels,
            problem=task.problem,
            card=self.card,
            extra=record,
            extra_files=task.program_files(self.task_model.length),
            adapter=adapter,
        )
        return path


def build_card(done: FinetuneResult, run: PreparedRun) -> Card:
    """Build the model card of a trained model."""
    settings, data = run.settings, run.data
    plain = configs.to_dict(settings)
    labels = f": {places(data.labels)}" if data.labels else ""
    warning = f" Warning: {done.failure}" if done.failure else ""
    task = done.task_model.task
    order = {} if settings.order_seed is None else {"seed of the order": settings.order_seed}
    lora = {} if settings.lora is None else vars(settings.lora)
    lora_settings = {name: value for name, value in lora.items() if value is not False}
    return Card(
        title=f"{Path(settings.model).name} fine-tuned on {Path(settings.train).name}",
        summary=f"Fine-tuned for the task {task.name}{labels}.{warning}",
        settings={
            "base model": settings.model,
            "length": data.length,
            "batch": _words(plain["batch"]),
            "optimizer": _words(plain["training"]["optimizer"]),
            "schedule": _words(plain["training"]["schedule"]),
            "run": run_of(settings.training.end, done.progress),
            "seed": settings.seed,
            **_differences(task, type(task)()),
            **_differences(settings.stability, Stability()),
            **({"lora": _words(lora_settings)} if lora_settings else {}),
            **order,
        },
        metrics={f"dev {name}": value for name, value in done.metrics.items()},
        data=run.sources,
        limits=limits_of_finetuned(data.length, settings.seed, done.findings, bool(data.dev)),
    )


def _differences(config: Any, default: Any) -> dict[str, object]:
    """Return the settings that differ, by readable names; columns belong to the data."""
    defaults = configs.to_dict(default)
    changed = {
        name: value for name, value in configs.to_dict(config).items() if value != defaults[name]
    }
    return {name.replace("_", " "): value for name, value in changed.items() if name != "columns"}


def _words(plain: str | dict[str, Any]) -> str:
    """Return plain values on one line, such as a member of a union: "adamw, lr 5e-05, …"."""
    if isinstance(plain, str):
        return plain
    values = dict(plain)
    kind = [values.pop("kind")] if "kind" in values else []
    return ", ".join([*kind, *(f"{name} {value}" for name, value in values.items())])
