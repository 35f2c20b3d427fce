"""Cross-validation: a run per fold of the training data, and predictions for every example.

Each example is dev data once (`finetuning.splits`), and is predicted by the run that was not
trained on it. The spread of the metrics over the folds says how far a single split is to be
trusted; the predictions find wrong labels, and are what a second model may be trained on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Progress
from bothways.core.report.html import metrics_html
from bothways.core.terminal import result_line
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import Rows, read_split
from bothways.finetuning.run import FinetuneResult
from bothways.finetuning.splits import fold_name
from bothways.hub.provenance import digest_of_model
from bothways.lab.sweeps import runs
from bothways.prediction.engine import predict
from bothways.tasks.base import Metrics, examples_fingerprint
from bothways.training.parallel import is_main, plan_here
from bothways.training.run import OnEvent

PREDICTIONS = "out_of_fold.jsonl"
"""The file with the predictions, in the folder of a fold and of the series."""
_TRUTHS = ("label", "labels", "tags", "answers")


@dataclass(frozen=True)
class CrossValidation:
    """The scores and predictions of a cross-validation.

    Attributes:
        metrics: mean of each metric over the folds.
        deviations: standard deviation of each metric over the folds, with n − 1.
        predictions: a prediction for each row by the model that was not trained on it, in the order
            of the rows: a dict with "row" (from 1), "where", "truth", "prediction" and "fold".
        series: the runs, one per fold.
        folder: folder of the runs; None in memory.
    """

    metrics: Mapping[str, float]
    deviations: Mapping[str, float]
    predictions: tuple[dict[str, Any], ...]
    series: runs.Series
    folder: Path | None = None

    def __repr__(self) -> str:
        folds = len(self.series.runs)
        return result_line("CrossValidation", self.metrics, folds=folds, folder=self.folder)

    def _repr_html_(self) -> str | None:
        title = f"Cross-validation, {len(self.series.runs)} folds"
        return metrics_html(title, {"mean": self.metrics, "deviation": self.deviations})


@dataclass(frozen=True)
class FoldRun(runs.FinetuneRun):
    """The run whose dev data is one fold; it writes the predictions for the fold."""

    def digests(self) -> dict[str, str]:
        """Return the sha256 of all rows of the fold's two sides, in order, and of the model."""
        if self.rows is None:
            return super().digests()
        # In the order of the rows, so that all folds have the digest of the same data.
        digest = examples_fingerprint(read_split(self.settings, self.rows).examples())
        return {"train": digest, "model": digest_of_model(self.settings.model)}

    def finish(self, done: FinetuneResult, folder: Path) -> Metrics:
        """Write the predictions, on the main rank."""
        if done.metrics:
            split = read_split(self.settings, self.rows)
            predicted = zip(split.dev_rows, predict(done.task_model, split.dev), strict=True)
            records = []
            for row, (example, prediction) in predicted:
                truths = [{"truth": getattr(example, x)} for x in _TRUTHS if hasattr(example, x)]
                record = {"row": row + 1, "where": example.where, **(truths[0] if truths else {})}
                records.append({**record, "prediction": prediction.to_json()})
            runs.write_rows(folder / PREDICTIONS, records)
        return done.metrics


def first_fold(folds: int, dev: object = None) -> str:
    """Return the name of the first fold, the dev data in the settings of a cross-validation.

    Raises:
        ConfigError: fewer than two folds, or dev data in addition.
    """
    require_range("[2, inf)", folds=folds, fix="Give 2 or more, such as 5.")
    if dev is not None:
        message = "is given, and the dev data of each run is a fold of the training data"
        raise ConfigError(message, where="dev", fix="Leave out one of the two.")
    return fold_name(1, folds)


def cross_validate(
    settings: FinetuneConfig,
    folds: int,
    out: Path | None = None,
    rows: Rows | None = None,
    *,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
    on_event: OnEvent = lambda event: None,
) -> CrossValidation:
    """Fine-tune once per fold, in `fold-N`; each needs the time of a run.

    `folds.json` has mean and deviation of each metric, `out_of_fold.jsonl` the prediction for each
    example by its row, counted from 1. Examples whose label no other has are in no fold.

    Args:
        settings: settings of each run; their dev data is None or the first fold.
        out: folder of the runs; None for a temporary one, in which only one model is kept.
        rows: data instead of the source that the settings name; not an iterator.

    Raises:
        ConfigError: fewer than two folds, or dev data in addition.
        BothwaysError: the errors of `runs.run_all`.
    """
    first_fold(folds, None if settings.dev == fold_name(1, folds) else settings.dev)
    fold_runs = []
    for number in range(1, folds + 1):
        changed = dataclasses.replace(settings, dev=fold_name(number, folds))
        fold_runs.append(FoldRun(f"fold-{number}", changed, rows=rows, on_event=on_event))
    with contextlib.ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keep: Any = "best" if out is None else "all"
        sweep_folder = runs.SweepFolder(folder, resume, device, progress, keep=keep)
        for run in fold_runs if resume else ():
            file = folder / run.name / PREDICTIONS
            if not file.exists() and runs.read_finished(run, sweep_folder):
                message = f"a finished run has no {PREDICTIONS}"
                raise ConfigError(message, where=file.parent, fix="Delete its folder.")
        series = runs.run_all(fold_runs, sweep_folder)
        scores = [run.metrics for run in series.scored]  # those that diverged have none
        values = {
            name: [metrics[name] for metrics in scores]
            for name in (scores[0] if scores else ())
            if all(name in metrics for metrics in scores)
        }
        means = {name: statistics.fmean(numbers) for name, numbers in values.items()}
        deviations = {
            name: float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0
            for name, numbers in values.items()
        }
        predictions: list[dict[str, Any]] = []
        if is_main(plan_here()):
            for number, outcome in enumerate(series.runs, 1):
                if (file := folder / outcome.name / PREDICTIONS).exists():
                    lines = file.read_text(encoding="utf8").split("\n")[:-1]
                    predictions += [{**json.loads(line), "fold": number} for line in lines]
            predictions.sort(key=lambda values: values["row"])
            runs.write_rows(folder / PREDICTIONS, predictions)
            spread = {n: {"mean": means[n], "deviation": deviations[n]} for n in values}
            summary = {"folds": folds, "metrics": spread}
            runs.write_sweep_report(folder / "folds.json", summary, series)
    return CrossValidation(means, deviations, tuple(predictions), series, out)
