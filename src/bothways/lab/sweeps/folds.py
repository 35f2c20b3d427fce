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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bothways.core.atomic_files import replace_text
from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Progress
from bothways.core.terminal import result_line
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import Rows, read_split
from bothways.finetuning.run import finetune
from bothways.finetuning.splits import SplitResult, fold_name
from bothways.hub.provenance import digest_of_model
from bothways.lab.sweeps.runs import (
    FinetuneRun,
    Series,
    SweepFolder,
    SweepOutcome,
    read_finished,
    run_all,
    write_sweep_report,
)
from bothways.prediction.engine import predict
from bothways.tasks.base import examples_fingerprint
from bothways.training.parallel import is_main, plan_here
from bothways.training.run import OnEvent

PREDICTIONS = "out_of_fold.jsonl"
"""The file with the predictions, in the folder of a fold and of the series."""
_TRUTHS = ("label", "labels", "tags", "answers")


@dataclass(frozen=True)
class MetricSpread:
    """A metric over the folds; the deviation has n − 1 in its denominator."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class CrossValidation:
    """The scores and predictions of a cross-validation.

    Attributes:
        metrics: mean of each metric over the folds.
        deviations: standard deviation of each metric over the folds.
        predictions: a prediction for each row by the model that was not trained on it, in the order
            of the rows: a dict with "row" (from 1), "where", "truth", "prediction" and "fold".
        series: the runs, one per fold.
        folder: folder of the runs; None in memory.
    """

    metrics: Mapping[str, float]
    deviations: Mapping[str, float]
    predictions: tuple[dict[str, Any], ...]
    series: Series
    folder: Path | None = None

    def __repr__(self) -> str:
        folds = len(self.series.runs)
        return result_line("CrossValidation", self.metrics, folds=folds, folder=self.folder)


@dataclass(frozen=True)
class FoldRun(FinetuneRun):
    """The run whose dev data is one fold.

    Attributes:
        rows: training data to read instead of the source in the settings.
        on_event: called after each step, report, evaluation and checkpoint.
    """

    rows: Rows | None = None
    on_event: OnEvent = field(default=lambda event: None, repr=False)

    def digests(self) -> dict[str, str]:
        """Return the sha256 of all rows of the fold's two sides, and of the model."""
        if self.rows is None:
            return super().digests()
        split = read_split(self.settings, self.rows)
        ordered = [example for _, example in _in_order(split)]
        return {
            "train": examples_fingerprint(ordered),
            "model": digest_of_model(self.settings.model),
        }

    def start(
        self, folder: Path, *, resume: bool, device: str, progress: Progress
    ) -> SweepOutcome | None:
        """Fine-tune, and write the predictions for the fold."""
        done = finetune(
            self.settings,
            folder,
            train=self.rows,
            resume=resume,
            device=device,
            progress=progress,
            on_event=self.on_event,
        )
        if not done.finished:
            return None
        if done.metrics:  # on the main rank
            split = read_split(self.settings, self.rows)
            results = predict(done.task_model, split.dev)
            lines = (
                {"row": row + 1, **_record(example, prediction)}
                for row, (example, prediction) in zip(split.dev_rows, results, strict=True)
            )
            _write_lines(folder / PREDICTIONS, lines)
        if done.failure is not None:
            progress.message(done.failure.message(several=True))
        metric_name = self.settings.chosen_by
        return SweepOutcome(
            self.name,
            done.metrics,
            done.failure.failed if done.failure else (),
            metric_name,
            self.settings.directions(done.task_model.task, done.task_model.labels)[metric_name],
            done.progress.steps,
            done.progress.seconds,
        )


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
    """Fine-tune once per fold as `finetune_folds`, and read the scores and predictions.

    Args:
        out: folder of the runs; None for a temporary one, in which only one model is kept.
    """
    with contextlib.ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keep: Literal["all", "best"] = "best" if out is None else "all"
        sweep_folder = SweepFolder(folder, resume, device, progress, keep=keep)
        series = finetune_folds(settings, folds, sweep_folder, rows, on_event)
        file, lines = folder / PREDICTIONS, list[str]()
        if series.finished and file.exists():  # on the main rank
            lines = file.read_text(encoding="utf8").split("\n")[:-1]
    spread = fold_spread(series)
    return CrossValidation(
        {name: deviation.mean for name, deviation in spread.items()},
        {name: deviation.deviation for name, deviation in spread.items()},
        tuple(json.loads(line) for line in lines),
        series,
        out,
    )


def first_fold(folds: int, dev: object = None) -> str:
    """Return the name of the first fold, the dev data in the settings of a cross-validation.

    Raises:
        ConfigError: fewer than two folds, or dev data in addition.
    """
    if folds < 2:
        fix = "Give 2 or more, such as 5."
        raise ConfigError(f"must be at least 2, not {folds}", where="folds", fix=fix)
    if dev is not None:
        message = "is given, and the dev data of each run is a fold of the training data"
        raise ConfigError(message, where="dev", fix="Leave out one of the two.")
    return fold_name(1, folds)


def finetune_folds(
    settings: FinetuneConfig,
    folds: int,
    folder: SweepFolder,
    rows: Rows | None = None,
    on_event: OnEvent = lambda event: None,
) -> Series:
    """Fine-tune once per fold, in `fold-N`; each needs the time of a run.

    `folds.json` has mean and deviation of each metric, `out_of_fold.jsonl` the prediction for each
    example by its row, counted from 1. Examples whose label no other has are in no fold.

    Args:
        settings: settings of each run; their dev data is None or the first fold.
        rows: data instead of the source that the settings name; not an iterator.

    Raises:
        ConfigError: fewer than two folds, or dev data in addition.
        BothwaysError: the errors of `runs.run_all`.
    """
    first_fold(folds, None if settings.dev == fold_name(1, folds) else settings.dev)
    runs = [
        FoldRun(
            f"fold-{number}",
            dataclasses.replace(settings, dev=fold_name(number, folds)),
            rows=rows,
            on_event=on_event,
        )
        for number in range(1, folds + 1)
    ]
    for run in runs if folder.resume else ():
        if not (folder.out / run.name / PREDICTIONS).exists() and read_finished(run, folder):
            message = f"a finished run has no {PREDICTIONS}"
            raise ConfigError(message, where=folder.out / run.name, fix="Delete its folder.")
    series = run_all(runs, folder)
    if series.finished and is_main(plan_here()):
        spread = {name: dataclasses.asdict(metric) for name, metric in fold_spread(series).items()}
        write_sweep_report(
            folder.out / "folds.json", {"folds": folds, "metrics": spread}, series.runs
        )
        _write_lines(folder.out / PREDICTIONS, _joined(folder.out, series))
    return series


def fold_spread(series: Series) -> dict[str, MetricSpread]:
    """Return mean and deviation of each metric over the folds; runs that diverged have none."""
    scored = series.scored
    names = scored[0].metrics if scored else ()
    values = {
        name: [run.metrics[name] for run in scored]
        for name in names
        if all(name in run.metrics for run in scored)
    }
    return {
        name: MetricSpread(
            statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0
        )
        for name, scores in values.items()
    }


def _in_order(split: SplitResult) -> list[tuple[int, Any]]:
    """Return the examples of both sides by their row."""
    rows = {*split.dev_rows}
    train = iter(split.train)
    dev = iter(split.dev)
    count = len(split.train) + len(split.dev)
    return [(row, next(dev if row in rows else train)) for row in range(count)]


def _record(example: Any, prediction: Any) -> dict[str, Any]:
    """Return a prediction with the source of its example and the right answer."""
    name = next((name for name in _TRUTHS if hasattr(example, name)), None)
    truth = {} if name is None else {"truth": getattr(example, name)}
    return {"where": example.where, **truth, "prediction": prediction.to_json()}


def _joined(out: Path, series: Series) -> Iterator[Mapping[str, Any]]:
    """Yield the predictions of all folds in the order of the rows."""
    lines = [
        {**json.loads(line), "fold": number}
        for number, run in enumerate(series.runs, 1)
        if (out / run.name / PREDICTIONS).exists()
        for line in (out / run.name / PREDICTIONS).read_text(encoding="utf8").split("\n")
        if line
    ]
    yield from sorted(lines, key=lambda values: values["row"])


def _write_lines(file: Path, lines: Iterator[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(values, ensure_ascii=False) + "\n" for values in lines)
    replace_text(file, text)
