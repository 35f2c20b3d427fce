"""`bothways evaluate`: score a fine-tuned model on labelled data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bothways.cli import options
from bothways.core.bar import terminal_progress
from bothways.core.errors import ConfigError
from bothways.core.terminal import output_console, quantity, show_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bothways.core.runtime.devices import Precision as TrainPrecision
    from bothways.prediction.engine import PredictionCounts
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.prepared_model import PredictPrecision
    from bothways.tasks.base import Metrics, Reading


def evaluate(  # noqa: PLR0913 – one option per question
    folder: options.FinetunedModel,
    file: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *settings: str,
    task: str | None = None,
    blimp: Path | None = None,
    text: options.TextColumn = None,
    text_b: options.SecondColumn = None,
    label: options.LabelColumn = None,
    length: options.MaxLength = None,
    json: options.JsonOutput = False,
    report: Path | None = None,
    precision: options.Precision = "fp32",
    limit: options.Int8Limit = None,
    device: options.Device = "auto",
    runtime: options.RuntimeChoice = "torch",
) -> None:
    """Score a fine-tuned model on labelled data: accuracy, F1, Matthews correlation, loss.

    Needs constant memory. --task likelihood computes the pseudo-perplexity of texts; --task prefer
    counts how often the first of two texts is the more likely one, as in BLiMP. --task embed
    scores all layers and poolings by the correlation of cosine similarities with gold scores.

    Parameters
    ----------
    file
        Labelled data (.csv, .tsv, .jsonl, .parquet, or hub:owner/name:configuration:split), or the
        folder of a corpus for the losses and the perplexity of a pre-trained model. Default:
        the dev data that a run split from its training data (--dev 20%).
    settings
        Settings of the task, such as variant=word_l2r for likelihood.
    task
        A task as for predict; by default the one that the model was trained for.
    blimp
        Instead of FILE, a folder of minimal pairs: files of JSON lines with sentence_good and
        sentence_bad. Prints the accuracy on each file, linguistics_term and field, and on all.
        Masked models are scored with variant=word_l2r.
    report
        Write an HTML page with confusions or places, calibration, slices of the data and the
        hardest examples.
    """
    from bothways.core.atomic_files import check_output_path
    from bothways.core.report.terminal import metric_table
    from bothways.data.manifest import holds_corpus
    from bothways.prediction.predictor import open_task

    options.say_kernels(device)
    columns = {"text": text, "text_b": text_b, "label": label}
    for_rows = {
        "--task": task, "--text": text, "--text-b": text_b, "--label": label, "--report": report,
        "--limit": limit, "--runtime": None if runtime == "torch" else runtime,
    }  # fmt: skip
    if blimp is not None:
        _refuse("--blimp", (), for_rows)
        words = settings if file is None else (file, *settings)
        _show(json, *_score_pairs(folder, blimp, words, length, device, precision))
        return
    if file is not None and holds_corpus(file):
        fix = "Leave it out; the losses of a pre-trained model depend on --length alone."
        for_rows["--precision int8"] = precision == "int8" or None
        _refuse("a corpus", settings, for_rows, fix)
        assert precision != "int8"
        metrics = _score_on_corpus(folder, file, length or 128, device, precision)
        _show(json, metrics, metric_table(f"{folder} on {file}", {"": metrics}, ""))
        return
    if file is None:
        _refuse("the dev data of the run", (), {"--task": task, **columns})
    data = _recorded_data(folder) if file is None else _Data(folder, file, columns)
    if report is not None:
        check_output_path(report, [data.file])

    def open_in(precision: PredictPrecision) -> Predictor:
        """Open the model for a precision."""
        return open_task(
            folder, task, length=length, device=device, precision=precision, runtime=runtime,
            settings=settings,
        )  # fmt: skip

    if precision == "int8":
        _compare_int8(open_in, data, report, limit, json)
        return
    if limit is not None:
        message = f"limits the loss of int8, and the precision is {precision}"
        fix = "Add --precision int8, or leave --limit out."
        raise ConfigError(message, where="limit", fix=fix)
    predictor = open_in(precision)
    if task is None and (name := predictor.task_model.task.name) == "embed":
        message = f"{folder} is a sentence encoder and is scored as {name}"
        print(f"note: {message}; --task changes that", file=sys.stderr)
    if report is None and predictor.task_model.task.name == "embed":
        plain, table = _sweep_layers(predictor, data)
    else:
        plain = data.score(predictor) if report is None else _analyse(predictor, data, report)
        table = metric_table(data.title, {"value": plain})
    _show(json, plain, table, data.counts)


def _show(
    json: bool, plain: Any, table: RenderableType, counts: PredictionCounts | None = None
) -> None:
    """Print the warnings and the result, as one JSON object or as a table."""
    for warning in counts.warnings if counts else ():
        print(warning, file=sys.stderr)
    if json:
        print(dumps(dict(plain)))
    else:
        show_lines(output_console(), table)


def _refuse(
    data: str, settings: tuple[str, ...], options: Mapping[str, object], fix: str = "Leave it out."
) -> None:
    """Raise ConfigError for options and settings that do nothing with this kind of data."""
    name = next((name for name, value in options.items() if value is not None), None)
    if name is not None or settings:
        raise ConfigError(f"does nothing with {data}", where=name or settings[0], fix=fix)


def _compare_int8(
    open_in: Callable[[PredictPrecision], Predictor],
    data: _Data,
    report: Path | None,
    limit: float | None,
    json: bool,
) -> None:
    """Print the metrics and the speed of fp32 and int8; raise an error for too great a loss."""
    from bothways.core.report.terminal import metric_table
    from bothways.prediction.int8_report import MAX_LOSS, measure_int8

    measured = measure_int8(open_in, data.score)
    if report is not None:
        _analyse(open_in("int8"), data, report)
    columns = {"fp32": measured.fp32.metrics, "int8": measured.int8.metrics}
    _show(json, measured.to_json(), metric_table(data.title, columns), data.counts)
    if not json:
        print(measured)
    measured.check(MAX_LOSS if limit is None else limit)


def _sweep_layers(predictor: Predictor, data: _Data) -> tuple[Any, RenderableType]:
    """Return the correlation with gold scores of every layer and pooling, the best one marked."""
    from bothways.core.report.terminal import text_table
    from bothways.prediction.layer_sweep import sweep_layers

    with data.opened(predictor) as (reading, counts):
        done = sweep_layers(predictor.task_model, reading.examples, counts=counts)  # type: ignore[arg-type]
    names = ("layer", "pooling", "pearson", "spearman", "anisotropy")
    rows = []
    for cell in done.cells:
        mark = " ← best" if cell is done.best else ""
        numbers = (f"{getattr(cell.correlation, name):.4f}" for name in names[2:])
        rows.append([str(cell.layer), f"{cell.pooling}{mark}", *numbers])
    note = f"{quantity(done.pairs, 'pair(s)')}. anisotropy: the mean cosine of any two texts"
    return done.to_json(), text_table(f"{data.title}\n{note}", names, rows)


def _score_on_corpus(
    folder: str, file: str, length: int, device: str, precision: TrainPrecision
) -> Metrics:
    """Return the losses, accuracies and perplexity of a pre-trained model on a corpus."""
    from bothways.data.corpus import Corpus
    from bothways.pretraining.evaluation import evaluate_on_corpus

    corpus = Corpus.open(file)
    with terminal_progress():
        return evaluate_on_corpus(folder, corpus, length=length, device=device, precision=precision)


def _score_pairs(
    folder: str,
    blimp: Path,
    words: tuple[str, ...],
    length: int | None,
    device: options.Device,
    precision: options.Precision,
) -> tuple[Any, RenderableType]:
    """Return the accuracies on a folder of minimal pairs; `words` are settings of the task."""
    from bothways.core.report.sections import TableSection
    from bothways.core.report.terminal import render_report
    from bothways.prediction.pair_suite import evaluate_suite, open_pairs
    from bothways.prediction.predictor import Predictor

    files, settings = options.split_inputs(words)
    if files:
        fix = "Leave one of the two out."
        raise ConfigError(f"is given in addition to --blimp {blimp}", where=files[0], fix=fix)
    opened = Predictor(open_pairs(folder, settings, length=length, device=device), precision)
    with terminal_progress() as progress:
        scores = evaluate_suite(opened, blimp, progress)
    rows: list[list[str | int | float | None]] = [
        [kind, name, len(pairs), round(100 * sum(pairs) / len(pairs), 1)]
        for kind, group in scores.groups.items()
        for name, pairs in sorted(group.items())
    ]
    rows.append(["mean of phenomena", None, None, round(100 * scores.mean, 1)])
    rows.append(["all pairs", None, scores.pairs, round(100 * scores.accuracy, 1)])
    title = f"{folder} on {blimp}, {scores.variant}"
    table = TableSection(title, ["", "name", "pairs", "accuracy, %"], rows)
    return scores.to_json(), render_report(table)


def _recorded_data(folder: str) -> _Data:
    """Return the dev data that a run split from its training data, as it was in the run."""
    from bothways.finetuning.data import read_recorded_split

    recorded = read_recorded_split(folder)
    if recorded is None:
        fix = "Give a file, the folder of a corpus, or --blimp DIR."
        raise ConfigError("there is no data to evaluate on", where="file", fix=fix)
    name, examples = recorded
    print(f"note: scored on {name}, as in training", file=sys.stderr)
    return _Data(folder, name, {}, examples=examples)


@dataclass
class _Data:
    """Labelled data that may be read several times.

    Attributes:
        folder, file: the names of the model and of the data.
        counts: counts of the last reading.
        examples: examples instead of the file.
    """

    folder: str
    file: str
    columns: dict[str, str | None]
    counts: PredictionCounts | None = None
    examples: list[Any] | None = None

    @property
    def title(self) -> str:
        """The title of a table."""
        return f"{self.folder} on {self.file}"

    @contextmanager
    def opened(self, predictor: Predictor) -> Iterator[tuple[Reading[Any], PredictionCounts]]:
        """Open the examples from the first one on, with a progress bar."""
        from bothways.tasks.base import Reading

        if self.examples is None:
            reading = predictor.read(
                self.file, options.named_columns(predictor, **self.columns), labelled=True
            )
        else:
            reading = Reading(predictor.task_model.task, iter(self.examples))
        with options.watched(reading, "evaluating") as self.counts:
            yield reading, self.counts

    def score(self, predictor: Predictor) -> Metrics:
        """Return the metrics of a model."""
        with self.opened(predictor) as (reading, counts):
            return predictor.evaluate(reading, counts=counts)


def _analyse(predictor: Predictor, data: _Data, report: Path) -> Metrics:
    """Write the report; return the metrics."""
    from bothways.prediction.analysis.report import analyse, write_report

    with data.opened(predictor) as (reading, counts):
        analysis = analyse(predictor.task_model, reading.examples, counts=counts)
    write_report(
        predictor.task_model, analysis, report,
        model=data.folder, data=data.file, precision=predictor.precision,
    )  # fmt: skip
    return analysis.metrics
