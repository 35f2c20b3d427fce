"""`bothways evaluate`: a fine-tuned model against labelled data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bothways.commands.options import AnyTask
from bothways.commands.tables import metric_table

if TYPE_CHECKING:
    from rich.table import Table

    from bothways.prediction.engine import PredictConfig, PredictionCounts
    from bothways.prediction.int8_report import Price
    from bothways.prediction.predictor import Predictor
    from bothways.runtime.devices import Precision
    from bothways.tasks.sentence_embedding.task import Embedder
    from bothways.tasks.task import Metrics, Reading

    _Shown = Callable[[], AbstractContextManager[tuple[Reading[Any], PredictionCounts]]]


def evaluate(  # noqa: PLR0913 – one option per question
    folder: str,
    file: str,
    *settings: str,
    task: AnyTask | None = None,
    text: str | None = None,
    text_b: str | None = None,
    label: str | None = None,
    length: int | None = None,
    json: bool = False,
    report: Path | None = None,
    precision: Literal["auto", "fp32", "bf16", "int8"] = "fp32",
    limit: float | None = None,
    device: str = "auto",
) -> None:
    """Score a fine-tuned model on labelled data: accuracy, F1, Matthews correlation, loss. Memory does not grow with the data.

    --task likelihood gives the pseudo-perplexity of texts. --task embed goes through all layers and poolings, and tells how
    well the cosines of pairs agree with their scores.

    Parameters
    ----------
    folder
        A fine-tuned model folder, the folder of a fine-tuning run, or a Hub id.
    file
        Labelled data: .csv, .tsv, .jsonl, .parquet, or hub:owner/name:configuration:split.
    settings
        Of the task, such as variant=word_l2r for likelihood.
    task
        What to do; by default what the model was trained for.
    text
        The column of the text, or of the first of two; by default as in training.
    text_b
        The column of the second text.
    label
        The column of the label.
    length
        The longest sequence in tokens; by default as in training.
    json
        Write one JSON object instead of a table.
    report
        Write what the model does well and badly into this HTML file: confusions, calibration, parts of the data, the hardest
        examples.
    precision
        Of matrix products: fp32 gives the same on every machine, auto takes bf16 where the hardware has it. int8, on a CPU, is
        scored beside fp32, with what it loses and how much faster it is.
    limit
        How many points int8 may lose of the task's metric, by default 0.5; more is an error. A point is 0.01.
    device
        auto, cpu, cuda or cuda:N.
    """
    from bothways.commands.progress import asked
    from bothways.core.atomic_files import check_output_path
    from bothways.core.errors import ConfigError
    from bothways.prediction.engine import PredictConfig
    from bothways.prediction.int8_report import LIMIT
    from bothways.prediction.predictor import open_task
    from bothways.tasks.sentence_embedding.task import Embedder

    if report is not None:
        check_output_path(report, [file])
    if limit is not None and precision != "int8":
        fix = "Add --precision int8, or leave --limit out."
        raise ConfigError(
            f"is for what int8 loses, and the precision is {precision}", where="limit", fix=fix
        )
    opened = open_task(folder, task, length=length, device=device, settings=settings)
    columns, sheet = (
        asked(opened, text=text, text_b=text_b, label=label),
        _Sheet(folder, file, precision, report),
    )
    shown = partial(_shown, opened, file, columns)
    if precision == "int8":
        found = _priced(opened, shown, sheet)
    elif isinstance(opened.task, Embedder) and report is None:
        found = _swept(opened.task, shown, PredictConfig(precision), sheet)
    else:
        found = _scored(opened, shown, PredictConfig(precision), sheet)
    found.show(json)
    if found.price is not None:
        found.price.check(LIMIT if limit is None else limit)


@contextmanager
def _shown(
    opened: Predictor, file: str, columns: Any
) -> Iterator[tuple[Reading[Any], PredictionCounts]]:
    """The examples from the first one on, and a tally with a bar."""
    from bothways.commands.progress import watched

    reading = opened.read(file, columns, labelled=True)
    with watched(reading, "evaluating") as tally:
        yield reading, tally


@dataclass(frozen=True)
class _Sheet:
    """What a result is of.

    Attributes:
        model, data: their names.
        precision: in which it is computed.
        report: the file of its report; none for no report.
    """

    model: str
    data: str
    precision: Precision | Literal["int8"]
    report: Path | None

    @property
    def title(self) -> str:
        """Of a table."""
        return f"{self.model} on {self.data}"


@dataclass(frozen=True)
class _Found:
    """What an evaluation came to.

    Attributes:
        plain: for --json.
        table: for people.
        tally: what went by.
        price: of int8, where it was asked for.
    """

    plain: Mapping[str, Any]
    table: Table
    tally: PredictionCounts
    price: Price | None = None

    def show(self, json: bool) -> None:
        """Print it, as one JSON object or for people."""
        import sys

        for warning in self.tally.warnings:
            print(warning, file=sys.stderr)
        if json:
            from json import dumps

            print(dumps(self.plain))
        else:
            from rich.console import Console

            Console().print(self.table, *([] if self.price is None else [str(self.price)]))


def _priced(opened: Predictor, shown: _Shown, sheet: _Sheet) -> _Found:
    """fp32 beside int8; the report, if one is asked for, is of int8, from a pass of its own whose time does not count."""
    from bothways.prediction.engine import DEFAULT_PREDICT, PredictionCounts, prepare_task
    from bothways.prediction.int8_report import price

    last = PredictionCounts()

    def evaluated(model: Predictor) -> Metrics:
        """The metrics of one precision; each pass has a tally of its own."""
        nonlocal last
        with shown() as (reading, last):
            return model.evaluate(reading, DEFAULT_PREDICT, last)

    found = price(opened, evaluated)
    if sheet.report is not None:
        _reported(
            replace(opened, task=prepare_task(opened.task, "int8")),
            shown,
            DEFAULT_PREDICT,
            sheet,
            sheet.report,
        )
    table = metric_table(sheet.title, {"fp32": found.fp32.metrics, "int8": found.int8.metrics})
    return _Found(found.to_json(), table, last, found)


def _swept(task: Embedder, shown: _Shown, pace: PredictConfig, sheet: _Sheet) -> _Found:
    """All layers and poolings of vectors of texts."""
    from bothways.commands.embed import sweep_table
    from bothways.prediction.layer_sweep import sweep

    with shown() as (reading, tally):
        found = sweep(task, reading.examples, pace, tally)
    return _Found(found.to_json(), sweep_table(found, sheet.title), tally)


def _scored(opened: Predictor, shown: _Shown, pace: PredictConfig, sheet: _Sheet) -> _Found:
    """The metrics of the task; on the way, the report is written if one is asked for."""
    if sheet.report is not None:
        metrics, tally = _reported(opened, shown, pace, sheet, sheet.report)
    else:
        with shown() as (reading, tally):
            metrics = opened.evaluate(reading, pace, tally)
    return _Found(dict(metrics), metric_table(sheet.title, {"value": metrics}), tally)


def _reported(
    opened: Predictor, shown: _Shown, pace: PredictConfig, sheet: _Sheet, report: Path
) -> tuple[Metrics, PredictionCounts]:
    """The metrics, with the report written."""
    from bothways.analysis.report import analyse, write_report

    with shown() as (reading, tally):
        analysis = analyse(opened.task, reading.examples, pace, tally)
    write_report(
        opened.task, analysis, report, model=sheet.model, data=sheet.data, precision=sheet.precision
    )
    return analysis.metrics, tally
