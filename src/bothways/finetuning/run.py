"""Fine-tuning: a pre-trained model and labelled data become a model for a task.

The run folder holds the checkpoints, `metrics.jsonl`, TensorBoard's events, the resolved
`config.toml`, and at the end `model/`: a Hugging Face folder (such as
BertForSequenceClassification with `id2label`, tokenizer and model card) with the record of the
training in `bothways.json`. `report.html` analyses the predictions on the dev data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import torch

from bothways.core.config import reader as configs
from bothways.core.config.values import flatten
from bothways.core.errors import installed
from bothways.core.progress import SILENT, Progress
from bothways.core.report.html import write_html
from bothways.core.runtime.devices import choose_device, own_torch_state
from bothways.core.source import Sequence
from bothways.core.training_module import TrainingModule, VectorModule
from bothways.data.loader import Share, ahead
from bothways.finetuning import failed_runs as failures, few_shot
from bothways.finetuning.automatic import learning_by_rows, training_of
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import (
    LabelledData,
    Rows,
    dev_windows,
    predictions,
    score,
    train_loader,
)
from bothways.finetuning.distillation import TaughtModule
from bothways.finetuning.lora import merge_changes
from bothways.finetuning.metrics import scored
from bothways.finetuning.prepare import PreparedRun, prepare_run, remarks
from bothways.finetuning.result import FinetuneResult, build_card
from bothways.finetuning.stability import parameter_rules
from bothways.hub.provenance import model_facts
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.prediction.analysis.report import analyse_encoded, analysis_report, is_analysed
from bothways.prediction.engine import PredictionCounts
from bothways.tasks.base import Metrics, TaskModel
from bothways.training import parallel, run as loop
from bothways.training.checkpoint import FolderStore, MemoryStore, Store, run_folder
from bothways.training.meter import Peak
from bothways.training.step_cost import forward_flops, peak_of

__all__ = ["FinetuneConfig", "FinetuneResult", "finetune"]


@own_torch_state(torch.float32)
def finetune(  # noqa: PLR0913 – one independent value per question that a run answers
    settings: FinetuneConfig,
    folder: Path | None = None,
    *,
    train: Rows | LabelledData | None = None,
    dev: Rows | None = None,
    start: Model | EncoderConfig | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
    on_event: loop.OnEvent = lambda event: None,
) -> FinetuneResult:
    """Fine-tune a model, and save it in `folder/model`.

    Under `torchrun` each process is a rank. SIGINT, SIGTERM, SIGHUP and SIGUSR1 end a run in a
    folder after a step, with a checkpoint.

    Args:
        folder: folder of this run: checkpoints, metrics, `config.toml`, `model/`, `report.html`;
            None for a run in memory, which keeps the best weights alone.
        train, dev: rows to read instead of the sources that the settings name; with `start`,
            `train` is what `data.label` returns.
        start: a model in memory whose encoder and pooler are copied, or a configuration for random
            weights, for many runs on the same examples in memory; None for the model that the
            settings name.
        resume: continue from the checkpoints in the folder; otherwise it must not hold any.
        progress: receives stages, records, and the notes and warnings of the preflight.
        on_event: called after each step, report, evaluation and checkpoint.

    Raises:
        BothwaysError: the data or the machine is not suitable (one message lists all problems), or
            a loss or a gradient is not finite.
        ConfigError: two settings contradict each other, or do not fit the task or the model.
        FolderError: the model cannot be read.
        ResourceError: the run folder is in use, holds another run, or cannot be written.
    """
    plan = parallel.plan_here()
    progress = progress if parallel.is_main(plan) else SILENT
    torch_device = parallel.rank_device(plan, choose_device(device))
    with contextlib.ExitStack() as stack:
        if folder is not None and parallel.is_main(plan):
            stack.enter_context(run_folder(folder, resume=resume, progress=progress))
        stack.enter_context(parallel.connected(plan, torch_device))
        run = prepare_run(
            settings, folder, torch_device, progress, train=train, dev=dev, start=start
        )
        identity = run.identity()
        parallel.require_agreement(plan, flatten(identity))
        settings, task_model, data = run.settings, run.task_model, run.data
        for remark in remarks(run):
            progress.message(remark)
        peak = _measure_peak(run, torch_device, plan, progress) if run.sources else None
        store: Store = MemoryStore()
        if folder is not None:
            changeable = configs.changeable_settings(settings)
            store = FolderStore(folder, identity, changeable, configs.to_toml(settings))
        training, seed = training_of(settings, data), settings.ordered_by
        module, sequences = _trained(task_model, data, settings)
        evaluate = functools.partial(_score_fitted, task_model, data, settings)
        steps = train_loader(sequences, settings, seed, Share(plan.rank, plan.world))
        scores = list[tuple[float, Metrics]]()

        def note_scores(event: loop.Event) -> None:
            """Keep the scores of an evaluation, and pass the event on."""
            if event.kind == "evaluation":
                values = {name.removeprefix("dev/"): value for name, value in event.values.items()}
                scores.append((event.progress.epochs, values))
            on_event(event)

        torch.manual_seed(seed + 1 + plan.rank)
        phase = loop.TrainingPhase(
            training.end, lambda state: ahead(steps.steps(state.cursor), torch_device)
        )
        with learning_by_rows(task_model.model, torch_device, plan.world, training.optimizer):
            state = loop.TrainingRun(
                module,
                [phase],
                training,
                plan,
                store,
                evaluation=evaluate if data.dev else None,
                peak=peak,
                rules=parameter_rules(settings.stability, task_model.model, run.fresh),
                progress=progress,
                on_event=note_scores,
            ).train()
        finished = state.finished(training.end)
        done = FinetuneResult(
            task_model, {}, state, settings, finished, tuple(scores), findings=run.findings
        )
        if finished and parallel.is_main(plan) and training.keep.best is not None:
            progress.stage("reading the best weights")
            store.load_best(module, training.keep.best)
        done = dataclasses.replace(done, changes=merge_changes(task_model.model))
        few_shot.fit_head(task_model, data.sequences, settings)
        if not finished or not parallel.is_main(plan):
            return done
        if state.early:
            progress.message(
                f"note: ended at epoch {state.epochs:.4g}: no evaluation improved within "
                "training.early_stopping"
            )
        task_model.eval()
        _save(done, run, folder, progress)  # whatever may happen while it is scored
        metrics, baseline, failure = _conclude(task_model, data, settings, progress)
        done = dataclasses.replace(done, metrics=metrics, baseline=baseline, failure=failure)
        done = _save(done, run, folder, progress)
        if folder is not None and settings.dev is not None:
            _write_report(run, folder, progress)
        return done


def _trained(
    task_model: TaskModel[Any, Any], data: LabelledData, settings: FinetuneConfig
) -> tuple[TrainingModule, list[Sequence]]:
    """Return the module that is trained, and the sequences that it reads."""
    if (few := settings.few_shot) is not None:
        pairs = few_shot.sample_pairs(data.sequences, few, settings.ordered_by)
        return few_shot.pair_module(task_model, few), pairs
    taught = settings.teacher and TaughtModule(task_model, settings.teacher)
    return taught or task_model, data.sequences


def _score_fitted(
    task_model: TaskModel[Any, Any],
    data: LabelledData,
    settings: FinetuneConfig,
    progress: Progress,
) -> Metrics:
    """Return the metrics of the dev data; the head of few-shot training is fitted before."""
    few_shot.fit_head(task_model, data.sequences, settings)
    return score(task_model, data, settings, progress)


def _measure_peak(
    run: PreparedRun, device: torch.device, plan: parallel.Plan, progress: Progress
) -> Peak:
    """Measure the peak speed of the machine, for sequences of average length."""
    progress.stage("measuring the speed of the machine")
    model, data = run.task_model.model, run.data
    length = max(1, data.tokens // len(data.sequences))
    forward = forward_flops(model.config, model.specification, length)
    return peak_of(forward, run.settings.training, device, plan)


def _write_report(run: PreparedRun, folder: Path, progress: Progress) -> None:
    """Write a report on the model's answers to the dev data."""
    if not installed("matplotlib", "jinja2") or not is_analysed(run.data.task):
        return
    task_model, data, settings = run.task_model, run.data, run.settings
    progress.stage("analysing each answer", len(data.dev))
    counts = PredictionCounts(on_count=progress.advance)
    analysis = analyse_encoded(task_model, dev_windows(data), counts=counts)
    progress.stage("writing the report")
    source, page = settings.sources["dev"], folder / "report.html"
    facts = model_facts(folder, data.labels)
    write_html(analysis_report(task_model, analysis, str(folder), source, facts, settings), page)


def _save(
    done: FinetuneResult, run: PreparedRun, folder: Path | None, progress: Progress
) -> FinetuneResult:
    """Save the model, if the run has a folder; return the result with its card and its folder."""
    if not run.sources:
        return done
    done = dataclasses.replace(done, card=build_card(done, run), origin=run.origin())
    if folder is None:
        return done
    progress.stage("saving the model")
    return dataclasses.replace(done, folder=done.save(folder / "model"))


def _conclude(
    task_model: TaskModel[Any, Any],
    data: LabelledData,
    settings: FinetuneConfig,
    progress: Progress,
) -> tuple[Metrics, Metrics, failures.Failure | None]:
    """Tune a trained task on the dev data, score it, and look for signs of failure.

    Returns:
        Its metrics and the majority baseline's, empty without dev data; and the failure,
        None if there is no sign of failure.
    """
    size, loss = settings.microbatch_tokens, math.nan
    if not isinstance(task_model, VectorModule):  # whose loss depends on the size of a step
        loss = failures.training_loss(task_model, data.sequences, size, progress)
    reasons, unfinished = failures.signs_of_training(loss, data.task.baseline(data.train_examples))
    metrics: Metrics = {}
    baseline: Metrics = {}
    if data.dev:
        metric = settings.chosen_by
        results = predictions(task_model, data, progress, "tuning on the dev data")
        task_model.task = task_model.tuned(results, metric)  # such as thresholds
        answers = failures.DistinctAnswers()
        results = answers.seen(predictions(task_model, data, progress=progress))
        metrics = scored(results, task_model.score, settings.own_metrics)
        direction = settings.directions(data.task, data.labels)[metric]
        baseline = data.task.baseline(data.dev_examples)  # as in the report
        signs = failures.signs_of_scores(metrics, baseline, metric, direction, answers)
        reasons = signs if signs and unfinished else (*signs, *reasons)
        unfinished = unfinished and not signs
    return metrics, baseline, failures.Failure(reasons, unfinished) if reasons else None
