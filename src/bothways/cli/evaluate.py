"""`bothways evaluate`: score a fine-tuned model on labelled data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bothways.cli import options
from bothways.core.terminal import output_console, show_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bothways.core.runtime.devices import Precision as TrainPrecision
    from bothways.prediction.engine import PredictionCounts
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.prepared_model import PredictPrecision
    from bothways.tasks.base import Metrics, Reading
    from bothways.tasks.sentence_embedding.task import Embedder


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
        folder or URL of a corpus for the losses and the perplexity of a pre-trained model. Default:
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
    from bothways.data.manifest import holds_corpus
    from bothways.prediction.predictor import open_task

    options.say_kernels(device)
    for_rows = {
        "--task": task, "--text": text, "--text-b": text_b, "--label": label, "--report": report,
        "--limit": limit, "--runtime": None if runtime == "torch" else runtime,
    }  # fmt: skip
    if blimp is not None:
        _refuse("--blimp", (), for_rows)
        words = settings if file is None else (file, *settings)
        _evaluate_pairs(folder, blimp, words, length, device, precision, json)
    elif file is not None and holds_corpus(file):
        fix = "Leave it out; the losses of a pre-trained model depend on --length alone."
        for_rows["--precision int8"] = precision == "int8" or None
        _refuse("a corpus", settings, for_rows, fix)
        assert precision != "int8"
        _evaluate_on_corpus(folder, file, length, json, device, precision)
    else:

        def open_in(precision: PredictPrecision) -> Predictor:
            """Open the model for a precision."""
            return open_task(
                folder, task, length=length, device=device, precision=precision, runtime=runtime,
                settings=settings,
            )  # fmt: skip

        columns = {"text": text, "text_b": text_b, "label": label}
        data = _Data(folder, file or "", columns, json)
        if file is None:
            _refuse("the dev data of the run", (), {"--task": task, **columns})
            data = _recorded_data(folder, json)
        _evaluate_on_rows(open_in, data, precision, report, limit, guessed=task is None)


def _evaluate_on_rows(
    open_in: Callable[[PredictPrecision], Predictor],
    data: _Data,
    precision: PredictPrecision,
    report: Path | None,
    limit: float | None,
    *,
    guessed: bool,
) -> None:
    """Print the metrics on labelled data, of int8 next to those of fp32.

    Args:
        guessed: the task is the model's own; a note says so of a sentence encoder.
    """
    from bothways.core.atomic_files import check_output_path
    from bothways.core.errors import ConfigError

    if report is not None:
        check_output_path(report, [data.file])
    if precision == "int8":
        _compare_int8(open_in, data, report, limit)
        return
    if limit is not None:
        message = f"limits the loss of int8, and the precision is {precision}"
        fix = "Add --precision int8, or leave --limit out."
        raise ConfigError(message, where="limit", fix=fix)
    predictor = open_in(precision)
    if guessed and (name := predictor.task_model.task.name) == "embed":
        message = f"{data.folder} is a sentence encoder and is scored as {name}"
        print(f"note: {message}; --task changes that", file=sys.stderr)
    _score(predictor, data, report)


def _refuse(
    data: str, settings: tuple[str, ...], options: Mapping[str, object], fix: str = "Leave it out."
) -> None:
    """Raise ConfigError for options and settings that do nothing with this kind of data."""
    from bothways.core.errors import ConfigError

    name = next((name for name, value in options.items() if value is not None), None)
    if name is not None or settings:
        raise ConfigError(f"does nothing with {data}", where=name or settings[0], fix=fix)


def _score(predictor: Predictor, data: _Data, report: Path | None) -> None:
    """Print the metrics; with a report, analyse each answer; of a sentence encoder, all layers."""
    from bothways.tasks.sentence_embedding.task import Embedder

    if report is not None:
        data.show(metrics := _analyse(predictor, data, report), {"value": metrics})
    elif isinstance(predictor.task_model, Embedder):
        _sweep_layers(predictor, predictor.task_model, data)
    else:
        data.show(metrics := data.score(predictor), {"value": metrics})


def _compare_int8(
    open_in: Callable[[PredictPrecision], Predictor],
    data: _Data,
    report: Path | None,
    limit: float | None,
) -> None:
    """Print the metrics and the speed of fp32 and int8; raise an error for too great a loss."""
    from bothways.prediction.int8_report import MAX_LOSS, measure_int8

    measured = measure_int8(open_in, data.score)
    if report is not None:
        _analyse(open_in("int8"), data, report)
    columns = {"fp32": measured.fp32.metrics, "int8": measured.int8.metrics}
    data.show(measured.to_json(), columns)
    if not data.json:
        print(measured)
    measured.check(MAX_LOSS if limit is None else limit)


def _sweep_layers(predictor: Predictor, embedder: Embedder, data: _Data) -> None:
    """Print the correlation with gold scores of every layer and pooling."""
    from bothways.cli.embed import sweep_table
    from bothways.prediction.layer_sweep import sweep

    with data.opened(predictor) as (reading, counts):
        cells = sweep(embedder, reading.examples, counts=counts)
    data.show(cells.to_json(), sweep_table(cells, data.title))


def _evaluate_on_corpus(
    folder: str,
    file: str,
    length: int | None,
    json: bool,
    device: str,
    precision: TrainPrecision,
) -> None:
    """Print the losses, accuracies and perplexity of a pre-trained model on a corpus."""
    from json import dumps

    from bothways.core.bar import terminal_progress
    from bothways.data.corpus import Corpus
    from bothways.pretraining.evaluation import evaluate_on_corpus

    corpus = Corpus.open(file)
    with terminal_progress():
        metrics = evaluate_on_corpus(
            folder, corpus, length=length or 128, device=device, precision=precision
        )
    if json:
        print(dumps(metrics))
        return
    from bothways.core.report.terminal import metric_table

    show_lines(output_console(), metric_table(f"{folder} on {file}", {"": metrics}, ""))


def _evaluate_pairs(
    folder: str,
    blimp: Path,
    words: tuple[str, ...],
    length: int | None,
    device: options.Device,
    precision: options.Precision,
    json: bool,
) -> None:
    """Print the accuracies on a folder of minimal pairs; `words` are settings of the task."""
    from json import dumps

    from bothways.core.bar import terminal_progress
    from bothways.core.errors import ConfigError
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
    if json:
        print(dumps(scores.to_json()))
        return
    rows: list[list[str | int | float | None]] = [
        [kind, name, count.pairs, round(100 * count.accuracy, 1)]
        for kind, counts in scores.groups.items()
        for name, count in sorted(counts.items())
    ]
    rows.append(["mean of phenomena", None, None, round(100 * scores.mean, 1)])
    rows.append(["all pairs", None, scores.pairs, round(100 * scores.accuracy, 1)])
    title = f"{folder} on {blimp}, {scores.variant}"
    columns = ["", "name", "pairs", "accuracy, %"]
    show_lines(output_console(), render_report(TableSection(title, columns, rows)))


def _recorded_data(folder: str, json: bool) -> _Data:
    """Return the dev data that a run split from its training data, as it was in the run."""
    from bothways.core.errors import ConfigError
    from bothways.finetuning.data import read_recorded_split

    recorded = read_recorded_split(folder)
    if recorded is None:
        fix = "Give a file, the folder or URL of a corpus, or --blimp DIR."
        raise ConfigError("there is no data to evaluate on", where="file", fix=fix)
    print(f"note: scored on {recorded.name}, as in training", file=sys.stderr)
    return _Data(folder, recorded.name, {}, json, examples=recorded.examples)


@dataclass
class _Data:
    """Labelled data that may be read several times, and how results on it are printed.

    Attributes:
        folder, file: the names of the model and of the data.
        counts: counts of the last reading.
        examples: examples instead of the file.
    """

    folder: str
    file: str
    columns: dict[str, str | None]
    json: bool
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

    def show(self, plain: Any, content: RenderableType | Mapping[str, Metrics]) -> None:
        """Print the warnings and the result, as one JSON object or as a table."""
        from json import dumps

        for warning in self.counts.warnings if self.counts else ():
            print(warning, file=sys.stderr)
        if self.json:
            print(dumps(dict(plain)))
            return
        from bothways.core.report.terminal import metric_table

        table = metric_table(self.title, content) if isinstance(content, Mapping) else content
        show_lines(output_console(), table)


def _analyse(predictor: Predictor, data: _Data, report: Path) -> Metrics:
    """Write the report; return the metrics."""
    from bothways.prediction.analysis.report import analyse, write_report

    with data.opened(predictor) as (reading, counts):
        analysis = analyse(predictor.task_model, reading.examples, counts=counts)
    write_report(
        predictor.task_model,
        analysis,
        report,
        model=data.folder,
        data=data.file,
        precision=predictor.precision,
    )
    return analysis.metrics
