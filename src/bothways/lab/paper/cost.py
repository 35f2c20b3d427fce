"""Forecast of experiments and of tables on pre-training before they run: time on this machine.

Examples are counted and tokens per example estimated from the first ones; a step of fine-tuning is
measured once, on a batch of the first task. For a table each pre-training run is forecast as by
`bothways plan`, unless its budget is a time, and fine-tuning is measured on random weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

from bothways.core.batch import pack
from bothways.core.config.reader import fingerprint
from bothways.core.progress import SILENT, Progress
from bothways.core.report.sections import Cell, TableSection
from bothways.core.runtime.devices import choose_device
from bothways.core.sequence import Sequence
from bothways.core.terminal import time_text
from bothways.data.documents import Document, read_documents
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.prepare import load_for
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.resolve import resolve_run
from bothways.lab.paper import pretraining_runs
from bothways.lab.paper.cells import first_runs, place_of, restarts
from bothways.lab.paper.experiment import Experiment
from bothways.lab.sweeps.runs import RESULT, Series, read_finished
from bothways.model.flops import BACKWARD
from bothways.model.heads import token_head
from bothways.model.model import Model
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.forecast import Here, RunForecast, forecast_run
from bothways.tasks.base import Task
from bothways.tasks.catalogue import Trainable
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import WordPiece, train_tokenizer
from bothways.training.durations import Epochs, Hours
from bothways.training.optimizers import build_optimizer
from bothways.training.preflight.machine import measure_updates

SAMPLED = 1000
"""Number of examples from which tokens per example are estimated."""
SAMPLED_TEXT = 2_000_000
"""Characters of the text from which the vocabulary and the number of tokens are estimated."""
BATCH = 1024
"""Tokens of the batch on which the speed is measured."""


class Cost(NamedTuple):
    """The runs of an experiment, those that are finished, the size of its training data, and the
    seconds of the remaining runs with evaluation; None if they are not measured.
    """

    name: str
    runs: int
    done: int
    examples: int
    tokens: float
    seconds: float | None


def estimate(entries: Many[Experiment], out: Path, *, device: str) -> tuple[list[Cost], str]:
    """Return the cost of each experiment, of the same model, and a note on the measurement.

    Raises:
        DataError: the data cannot be read.
        FolderError: the model cannot be opened.
    """
    costs, notes, rate = list[Cost](), list[str](), 0.0
    loaded = load_model(resolve_run(entries[0].settings.model), ())
    tokenizer = loaded.tokenizer()
    for entry in entries:
        settings = entry.settings
        length = settings.length or settings.task.length or loaded.model.config.max_positions
        examples, tokens, sample = _data_size(settings.train, settings.task, length, tokenizer)
        done, seconds = _finished(entry, out), None
        if isinstance(settings, FinetuneConfig):
            rate = rate or _training_speed(settings, sample, device)
            scored = sum(
                _data_size(source, settings.task, length, tokenizer)[1]
                for source in (str(settings.dev), *entry.others.values())
            )
            # A run that is not measured in epochs counts as one.
            lengths = [run.training.until for run in entry.grid]
            epochs = statistics.fmean(n.count if isinstance(n, Epochs) else 1.0 for n in lengths)
            work = epochs * tokens + scored / (1 + BACKWARD)
            seconds = work * (entry.cells - done) / rate
        costs.append(Cost(entry.name, entry.cells, done, examples, tokens, seconds))
    if rate:
        speed = f"At {rate:,.0f} training tokens per second, as measured"
        notes.append(f"{speed}; evaluation is included.")
    if any(cost.seconds is None for cost in costs):
        notes.append("Frozen features are not timed: a pass of the encoder per task, then BiLSTMs.")
    return costs, " ".join(notes)


def _data_size(
    source: str, task: Trainable, length: int, tokenizer: Tokenizer
) -> tuple[int, float, list[Sequence]]:
    """Count the examples of a source, and estimate its tokens from the first ones; return these.

    Raises:
        DataError: the source cannot be read.
    """
    reading = task.read(source, getattr(task, "columns", None))
    task_read: Task[Any, Any] = reading.task
    sample = list(itertools.islice(reading.examples, SAMPLED))
    count = len(sample) + sum(1 for _ in reading.examples)
    encoded = task_read.encode(sample, tokenizer, task_read.labels(sample), length)
    sequences = [sequence for item in encoded for sequence in item.sequences]
    return count, sum(map(len, sequences)) * count / len(sample), sequences


def _finished(experiment: Experiment, out: Path) -> int:
    """Return the number of finished runs."""
    folder, grid_runs = place_of(experiment, out), first_runs(experiment, out)
    done = [outcome for run in grid_runs if (outcome := read_finished(run, folder)) is not None]
    # Only if all of these are finished is the best setting known, which is restarted.
    seeds = restarts(experiment, Series(tuple(done)), out) if len(done) == len(grid_runs) else []
    return len(done) + sum(read_finished(run, folder) is not None for run in seeds)


def _training_speed(settings: FinetuneConfig, sample: list[Sequence], device: str) -> float:
    """Return the tokens per second of a step."""
    task: Task[Any, Any] = settings.task.read(settings.train).task
    labels = task.labels(settings.task.read(settings.train).examples)
    loaded = load_for(settings, task.heads(labels, settings.dropout))
    length = settings.length or settings.task.length
    task_model = task.bind(loaded.model, loaded.tokenizer(), labels, length)
    task_model.to(choose_device(device))
    sequences = sorted(sample, key=len)
    batch = pack(sequences[:: max(1, sum(map(len, sequences)) // BATCH)])
    optimizer = build_optimizer(settings.training.optimizer, task_model.trained_parameters())
    step = measure_updates(task_model, [batch], optimizer, settings.training)
    return 1 / (step.per_token[0] + step.update / batch.layout.tokens)


def cost_table(costs: Many[Cost], note: str) -> TableSection:
    """Return the costs as a table, one experiment per row, with their sum."""
    rows: list[list[Cell]] = [
        [c.name, c.runs, c.done, c.examples, round(c.tokens), _duration_text(c.seconds)]
        for c in costs
    ]
    runs, done = sum(cost.runs for cost in costs), sum(cost.done for cost in costs)
    rows.append(["all", runs, done, None, None, time_text(sum(c.seconds or 0.0 for c in costs))])
    columns = ["task", "runs", "finished", "training examples", "tokens (≈)", "time left (≈)"]
    return TableSection("Estimated cost", columns, rows, total=True, note=note)


def _duration_text(seconds: float | None) -> str:
    return "–" if seconds is None else time_text(seconds)


def table_cost(
    request: pretraining_runs.TableRequest, *, device: str = "auto", progress: Progress = SILENT
) -> TableSection:
    """Return the estimated cost of what is not finished of a table, without writing.

    Raises:
        DataError: the text or the data cannot be read.
        ConfigError: an invalid setting.
    """
    progress.stage("estimating the cost")
    documents, share = _sample_text(request.text)
    texts = [document.text for document in documents]
    if (request.out / "tokenizer").exists():
        tokenizer = Tokenizer.load(request.out / "tokenizer")
    else:
        tokenizer = train_tokenizer(texts, WordPiece(request.vocabulary))
    base = pretraining_runs.base_settings(request, tokenizer)
    tokens = sum(map(len, tokenizer.encode(texts))) / share
    cells = {run: cell for run, cell, _ in pretraining_runs.planned(request, base)}
    warnings = [
        f" WARNING: {' and '.join(names)} are the same run with this budget, of about "
        f"{epochs:.2g} epochs: their masks differ from later epochs on. Give a longer --budget."
        for names, epochs in identical_runs(cells, tokens, device)
    ]
    rows, left, runs, done = list[list[Cell]](), 0.0, 0, 0
    for name, count, finished, seconds in (
        *_pretraining(request, cells, tokens, device),
        *_finetuning(request, base, tokenizer, device),
    ):
        rows.append([name, count, finished, _duration_text(seconds)])
        left, runs, done = left + (seconds or 0.0), runs + count, done + finished
    rows.append(["all", runs, done, time_text(left)])
    note = (
        f"{request.plan.title}; {len(request.rows)} rows. Pre-training: {base.training.until} a "
        f"run. Times of fine-tuning are of the table's own encoder.{''.join(warnings)}"
    )
    columns = ["", "runs", "finished", "time left (≈)"]
    return TableSection("Estimated cost", columns, rows, total=True, note=note)


def identical_runs(
    cells: Mapping[str, PretrainConfig], tokens: float, device: str
) -> Iterator[tuple[list[str], float]]:
    """Yield the names of runs that compute the same with their length, and its epochs.

    Segments and masks repeat after `data_copies` epochs, which a shorter run never reaches.

    Args:
        tokens: number of tokens of an epoch.
    """
    alike: dict[str, list[str]] = {}
    for name, settings in cells.items():
        key = fingerprint(dataclasses.replace(settings, data_copies=None))
        alike.setdefault(key, []).append(name)
    for names in alike.values():
        if len(names) < 2:
            continue
        epochs = _forecast(cells[names[0]], tokens, device).tokens / tokens
        copies = {name: cells[name].data_copies for name in names}
        same = [name for name, count in copies.items() if count is None or epochs <= count]
        if len(same) > 1:
            yield same, epochs


def _forecast(settings: PretrainConfig, tokens: float, device: str) -> RunForecast:
    folder = Path(tempfile.gettempdir())
    return forecast_run(settings, Here(device), corpus_tokens=tokens, out=folder)


def _sample_text(text: tuple[str, ...]) -> tuple[list[Document], float]:
    """Return the first documents and the share of the files that they are."""
    reader, documents, characters = read_documents(text), list[Document](), 0
    for document in reader:
        documents.append(document)
        characters += len(document.text)
        if characters >= SAMPLED_TEXT:
            return documents, max(reader.position / max(1, reader.total), 1e-9)
    return documents, 1.0


_Row = tuple[str, int, int, float | None]
"""Name, number of runs, of finished ones, and the seconds of the others."""


def _pretraining(
    request: pretraining_runs.TableRequest,
    cells: Mapping[str, PretrainConfig],
    tokens: float,
    device: str,
) -> Iterator[_Row]:
    for name, settings in cells.items():
        finished, end = (request.out / "cells" / name / RESULT).exists(), settings.training.end
        seconds = 0.0
        if not finished:
            by_clock = isinstance(end, Hours)  # such a budget is its own forecast
            seconds = 3600 * end.count if by_clock else _forecast(settings, tokens, device).total
        yield f"pre-training {name}", 1, int(finished), seconds


def _finetuning(
    request: pretraining_runs.TableRequest, base: PretrainConfig, tokenizer: Tokenizer, device: str
) -> Iterator[_Row]:
    """Yield each column, whose first row counts for all of them."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = Model(base.encoder, (token_head(base.encoder),))
        save_model(folder / "model", model, tokenizer)
        there = dataclasses.replace(request, out=folder)
        row = next((row for row in request.rows if row.method == "fine-tuned"), request.rows[0])
        folders = {pretraining_runs.finetuning_folder(request, row) for row in request.rows}
        for column, entry in pretraining_runs.experiments_of(there, row, folder / "model"):
            (cost,), _ = estimate([entry], folder / "out", device=device)
            results = (out.glob(f"runs/{entry.name}/*/{RESULT}") for out in folders)
            runs, finished = cost.runs * len(request.rows), sum(1 for x in results for _ in x)
            per_run = None if cost.seconds is None else cost.seconds / cost.runs
            left = None if per_run is None else per_run * (runs - finished)
            yield f"fine-tuning {column}", runs, finished, left
