"""The benchmarks of the paper, from a request to the report, and the cost before they run.

Examples are counted and tokens per example estimated from the first ones; a step is measured once,
on a batch of the first task. Pre-training runs are forecast as by `bothways plan`, unless their
budget is a time, which is its own forecast.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence as Many
from pathlib import Path
from typing import Any, Literal

import torch

from bothways.core.batch import pack
from bothways.core.errors import DataError, os_errors
from bothways.core.progress import SILENT, Progress
from bothways.core.report.html import write_html
from bothways.core.report.sections import Cell, Report, TableSection
from bothways.core.runtime.devices import choose_device
from bothways.core.source import Sequence
from bothways.core.terminal import time_text
from bothways.data.documents import read_documents
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.prepare import load_for
from bothways.hub.hf_config import write_hf_config
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve_run
from bothways.lab.paper import benchmarks, experiment, pages, pretraining_runs
from bothways.lab.paper.experiment import BenchmarkPlan, Experiment, NotRun, Request
from bothways.lab.sweeps.runs import RESULT
from bothways.model.heads import token_head
from bothways.model.model import Model
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.forecast import forecast_run
from bothways.tasks.base import Task
from bothways.text.tokenizer import Tokenizer
from bothways.training.schedules import Epochs, Hours
from bothways.training.step_cost import BACKWARD, measure_updates

Benchmark = Literal["glue", "squad", "swag", "ner"]
PLANS: Mapping[Benchmark, Callable[[Request], BenchmarkPlan]] = {
    "glue": benchmarks.glue_plan,
    "squad": benchmarks.squad_plan,
    "swag": benchmarks.swag_plan,
    "ner": benchmarks.ner_plan,
}


def reproduce(
    benchmark: Benchmark,
    request: Request,
    *,
    dry_run: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
    on_cost: Callable[[TableSection], object] = lambda table: None,
) -> Report | None:
    """Run a benchmark as in the paper, and report; finished runs in `request.out` are not repeated.

    Args:
        dry_run: only estimate the cost, without writing to `request.out`; the result is None.
        on_cost: receives the estimated cost before the first run.

    Raises:
        ConfigError: an unknown task or an invalid setting; a run in `request.out` was finished
            with other settings, on other data or from another model.
        DataError: data that cannot be read, or no data for any of the tasks.
        KeyboardInterrupt: interrupted; the same call resumes.
        ResourceError: `request.out` cannot be written, or a best run has lost its weights.
    """
    if dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            plan = PLANS[benchmark](dataclasses.replace(request, out=Path(scratch)))
            on_cost(estimate(_runnable(plan, request, progress), request.out, device=device))
        return None
    with os_errors(request.out, "Choose another --out."):
        request.out.mkdir(parents=True, exist_ok=True)
    plan = PLANS[benchmark](request)
    entries = _runnable(plan, request, progress)
    on_cost(estimate(entries, request.out, device=device))
    outcomes: list[experiment.CellOutcome] = []
    for entry in entries:
        outcomes.append(experiment.run(entry, request.out, device=device, progress=progress))
        pages.write_benchmark_results(request, plan, outcomes)
    report = pages.benchmark_report(request, plan, outcomes, device=device)
    write_html(report, request.out / "report.html")
    return report


def _runnable(plan: BenchmarkPlan, request: Request, progress: Progress) -> list[Experiment]:
    """Return the experiments that have data; report the others."""
    for entry in plan.experiments:
        if isinstance(entry, NotRun):
            progress.message(f"{entry.name} is not run: {entry.reason}")
    entries = [entry for entry in plan.experiments if isinstance(entry, Experiment)]
    if not entries:
        message, fix = "has no data for any of the tasks", "Give the folder as distributed."
        raise DataError(message, where=request.data, fix=fix)
    progress.stage("estimating the cost")
    return entries


SAMPLED = 1000
"""Number of examples from which tokens per example are estimated."""
BATCH = 1024
"""Tokens of the batch on which the speed is measured."""


def estimate(entries: Many[Experiment], out: Path, *, device: str) -> TableSection:
    """Return the cost of each experiment, of the same model, with their sum.

    Raises:
        DataError: the data cannot be read.
        FolderError: the model cannot be opened.
    """
    rows, note, rate, total = list[list[Cell]](), "", 0.0, 0.0
    loaded = load_model(resolve_run(entries[0].settings.model), ())
    tokenizer = loaded.tokenizer
    for entry in entries:
        settings = entry.settings
        length = settings.length or loaded.model.config.max_positions
        examples, tokens, sample = _data_size(settings.train, settings.task, length, tokenizer)
        finished = len([*out.glob(f"runs/{entry.name}/*/{RESULT}")])
        time = "–"
        if isinstance(settings, FinetuneConfig):
            rate = rate or _training_speed(settings, sample, device)
            others = (str(settings.dev), *entry.others.values())
            scored = sum(_data_size(x, settings.task, length, tokenizer)[1] for x in others)
            # A run that is not measured in epochs counts as one.
            lengths = [run.training.until for run in entry.grid]
            epochs = statistics.fmean(n.count if isinstance(n, Epochs) else 1.0 for n in lengths)
            work = epochs * tokens + scored / (1 + BACKWARD)
            seconds = work * max(0, entry.cells - finished) / rate
            time, total = time_text(seconds), total + seconds
        rows.append([entry.name, entry.cells, finished, examples, round(tokens), time])
    counts = (sum(entry.cells for entry in entries), sum(int(str(row[2])) for row in rows))
    rows.append(["all", *counts, None, None, time_text(total)])
    if rate:
        note = f"At {rate:,.0f} training tokens per second, as measured; evaluation is included. "
    if any(row[-1] == "–" for row in rows):
        note += "Frozen features are not timed: a pass of the encoder per task, then BiLSTMs."
    columns = ["task", "runs", "finished", "training examples", "tokens (≈)", "time left (≈)"]
    return TableSection("Estimated cost", columns, rows, total=True, note=note.strip())


def _data_size(
    source: str, task: Task[Any, Any], length: int, tokenizer: Tokenizer
) -> tuple[int, float, list[Sequence]]:
    """Count the examples of a source, and estimate its tokens from the first ones; return these.

    Raises:
        DataError: the source cannot be read.
    """
    reading = task.read(source, task.columns)
    sample = list(itertools.islice(reading.examples, SAMPLED))
    count = len(sample) + sum(1 for _ in reading.examples)
    encoded = reading.task.encode(sample, tokenizer, reading.task.labels(sample), length)
    sequences = [sequence for item in encoded for sequence in item.sequences]
    return count, sum(map(len, sequences)) * count / len(sample), sequences


def _training_speed(settings: FinetuneConfig, sample: list[Sequence], device: str) -> float:
    """Return the tokens per second of a step."""
    reading = settings.task.read(settings.train)
    task: Task[Any, Any] = reading.task
    labels = task.labels(reading.examples)
    loaded = load_for(settings, task.heads(labels, settings.dropout))
    length = settings.length or settings.task.length
    task_model = task.bind(loaded.model, loaded.tokenizer, labels, length)
    task_model.to(choose_device(device))
    sequences = sorted(sample, key=len)
    batch = pack(sequences[:: max(1, sum(map(len, sequences)) // BATCH)])
    step = measure_updates(task_model, [batch], settings.training)
    return 1 / (step.per_token[0] + step.update / batch.layout.tokens)


def table_cost(request: pretraining_runs.TableRequest, *, device: str = "auto") -> TableSection:
    """Return the runs of a table on pre-training, and the time of those that are not finished.

    Raises:
        DataError: none of the columns has data.
        ConfigError: an invalid setting.
    """
    base = pretraining_runs.base_settings(request)
    next(iter(read_documents(request.text)), None)  # a text that is not there is an error
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with torch.device("meta"):  # some columns depend on the encoder's layers
            model = Model(base.encoder, (token_head(base.encoder),))
            config = write_hf_config(model, None, (), None, folder)
        (folder / "config.json").write_text(json.dumps(config.raw), encoding="utf8")
        columns = [*pretraining_runs.experiments_of(request, folder, folder)]
    rows, total, finished = list[list[Cell]](), 0.0, 0
    # Measured last: a mistake in the settings of fine-tuning need not wait for it.
    for cell in request.chosen:
        runs = [*pretraining_runs.runs_of(request, cell, base)]
        done = sum((request.out / "cells" / name / RESULT).exists() for name, _ in runs)
        seconds = 0.0
        if done < len(runs):
            seconds = _pretraining_seconds(runs[0][1], device) * (len(runs) - done)
        total, finished = total + seconds, finished + done
        time = time_text(seconds) if seconds or done else "–"
        rows.append([f"pre-training {cell.name}", len(runs), done, time])
    fine_tuned = sum(cell.finetuned for cell in request.chosen) * request.pretraining_seeds
    for column, entry in columns:
        results = (request.out / "finetuning").glob(f"*/runs/{entry.name}/*/{RESULT}")
        done = sum(1 for _ in results)
        finished += done
        rows.append([f"fine-tuning {column}", entry.cells * fine_tuned, done, "–"])
    rows.append(["all", sum(int(str(row[1])) for row in rows), finished, time_text(total)])
    note = (
        f"{request.plan.title}; {base.training.until} a pre-training run. Fine-tuning is not timed "
        "here: each run forecasts its time when it begins."
    )
    names = ["", "runs", "finished", "time left (≈)"]
    return TableSection("Estimated cost", names, rows, total=True, note=note)


def _pretraining_seconds(settings: PretrainConfig, device: str) -> float:
    """Return the seconds of a run; 0 for epochs, whose length depends on the corpus."""
    end = settings.training.end
    if isinstance(end, Hours | Epochs):
        return 3600 * end.count if isinstance(end, Hours) else 0.0
    return forecast_run(settings, device, out=Path(tempfile.gettempdir())).total
