"""Forecast of a table on pre-training before it runs: time on this machine, without writing.

A budget in hours is its own forecast. For other budgets each run is planned as by `bothways plan`;
the speed of fine-tuning is measured on random weights, as for the paper's benchmarks.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from typing_extensions import assert_never

from bothways.core.config.reader import fingerprint
from bothways.core.progress import SILENT, Progress
from bothways.core.report.sections import Cell, TableSection
from bothways.core.terminal import time_text
from bothways.data.documents import Document, read_documents
from bothways.hub.model_folder import save_model
from bothways.lab.paper import pretraining_runs
from bothways.lab.paper.cost import Cost, duration_text, estimate, frozen_cost
from bothways.lab.paper.experiment import Experiment, Frozen
from bothways.lab.sweeps.runs import RESULT
from bothways.model.heads import token_head
from bothways.model.model import Model
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.forecast import Here, forecast_run
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import WordPiece, train_tokenizer
from bothways.training.durations import Hours

SAMPLED = 2_000_000
"""Characters of the text from which the vocabulary and the number of tokens are estimated."""


def table_cost(
    request: pretraining_runs.TableRequest, *, device: str = "auto", progress: Progress = SILENT
) -> TableSection:
    """Return the estimated cost of what is not finished.

    Raises:
        DataError: the text or the data cannot be read.
        ConfigError: an invalid setting.
    """
    progress.stage("estimating the cost")
    documents, share = _sample(request.text)
    tokenizer = _tokenizer(request, documents)
    base = pretraining_runs.base_settings(request, tokenizer)
    tokens = sum(map(len, tokenizer.encode([document.text for document in documents]))) / share
    rows, left, runs, done = list[list[Cell]](), 0.0, 0, 0
    cells = list(pretraining_runs.planned(request, base))
    same = identical_runs({run: settings for run, settings, _ in cells}, tokens, device)
    for run, settings, _ in cells:
        finished = int((request.out / "cells" / run / RESULT).exists())
        seconds = 0.0 if finished else _seconds(settings, tokens, device)
        rows.append([f"pre-training {run}", 1, finished, time_text(seconds)])
        left, runs, done = left + seconds, runs + 1, done + finished
    for name, cost, finished in _finetuning(request, base, tokenizer, device):
        number = cost.runs * len(request.rows)
        each_run = None if cost.seconds is None else cost.seconds / cost.runs
        duration = None if each_run is None else each_run * (number - finished)
        rows.append([f"fine-tuning {name}", number, finished, duration_text(duration)])
        left, runs, done = left + (duration or 0.0), runs + number, done + finished
    rows.append(["all", runs, done, time_text(left)])
    note = (
        f"{request.plan.title}; {len(request.rows)} rows. Pre-training: {base.training.until} a "
        "run. Times of fine-tuning are of the table's own encoder."
    )
    for names, epochs in same:
        note += (
            f" WARNING: {' and '.join(names)} are the same run with this budget, of about "
            f"{epochs:.2g} epochs: their masks differ from later epochs on. Give a longer --budget."
        )
    columns = ["", "runs", "finished", "time left (≈)"]
    return TableSection("Estimated cost", columns, rows, total=True, note=note)


def identical_runs(
    cells: Mapping[str, PretrainConfig], tokens: float, device: str
) -> list[tuple[list[str], float]]:
    """Return the names of runs that compute the same with their length, and its epochs.

    Segments and masks repeat after `data_copies` epochs, which a shorter run never reaches.

    Args:
        tokens: number of tokens of an epoch.
    """
    alike: dict[str, dict[str, PretrainConfig]] = {}
    for name, settings in cells.items():
        key = fingerprint(dataclasses.replace(settings, data_copies=None))
        alike.setdefault(key, {})[name] = settings
    result = []
    for group in alike.values():
        if len(group) < 2:
            continue
        folder = Path(tempfile.gettempdir())
        first_settings = next(iter(group.values()))
        epochs = (
            forecast_run(first_settings, Here(device), corpus_tokens=tokens, out=folder).tokens
            / tokens
        )
        same = [
            name
            for name, run_settings in group.items()
            if run_settings.data_copies is None or epochs <= run_settings.data_copies
        ]
        if len(same) > 1:
            result.append((same, epochs))
    return result


def _sample(text: tuple[str, ...]) -> tuple[list[Document], float]:
    """Return the first documents and the share of the files that they are."""
    reader, documents, characters = read_documents(text), list[Document](), 0
    for document in reader:
        documents.append(document)
        characters += len(document.text)
        if characters >= SAMPLED:
            return documents, max(reader.position / max(1, reader.total), 1e-9)
    return documents, 1.0


def _tokenizer(request: pretraining_runs.TableRequest, documents: list[Document]) -> Tokenizer:
    folder = request.out / "tokenizer"
    if folder.exists():
        return Tokenizer.load(folder)
    return train_tokenizer((document.text for document in documents), WordPiece(request.vocabulary))


def _seconds(settings: PretrainConfig, tokens: float, device: str) -> float:
    """Return the duration of a pre-training run on a text of this many tokens."""
    end = settings.training.end
    if isinstance(end, Hours):
        return 3600 * end.count
    folder = Path(tempfile.gettempdir())
    return forecast_run(settings, Here(device), corpus_tokens=tokens, out=folder).total


def _finetuning(
    request: pretraining_runs.TableRequest, base: PretrainConfig, tokenizer: Tokenizer, device: str
) -> Iterator[tuple[str, Cost, int]]:
    """Yield each column with the cost of the first row and the number of finished runs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = Model(base.encoder, (token_head(base.encoder),))
        save_model(folder / "model", model, tokenizer)
        there = dataclasses.replace(request, out=folder)
        row = next((row for row in request.rows if row.method == "fine-tuned"), request.rows[0])
        for column, entry in pretraining_runs.experiments_of(there, row, folder / "model"):
            match entry:
                case Experiment():
                    (cost,), _ = estimate([entry], folder / "out", device=device)
                case Frozen():
                    cost = frozen_cost(entry, folder / "out")
                case _:
                    assert_never(entry)
            yield column, cost, _finished(request, entry.name)


def _finished(request: pretraining_runs.TableRequest, task: str) -> int:
    """Return the number of finished fine-tuning runs of a task."""
    folders = {pretraining_runs.finetuning_folder(request, row) for row in request.rows}
    results = itertools.chain.from_iterable(
        (folder / "runs" / task).glob(f"*/{RESULT}") for folder in folders
    )
    return sum(1 for _ in results)
