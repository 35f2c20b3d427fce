"""`bothways evaluate`: score a fine-tuned model on labelled data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bothways.commands.tables import metric_table

if TYPE_CHECKING:
    from bothways.prediction.engine import PredictionCounts
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.prepared_model import PredictPrecision
    from bothways.tasks.base import Metrics, Reading


def evaluate(  # noqa: PLR0913 – one option per question
    folder: str,
    file: str,
    *settings: str,
    task: str | None = None,
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
    """Score a fine-tuned model on labelled data: accuracy, F1, Matthews correlation, loss.

    Needs constant memory. --task likelihood computes the pseudo-perplexity of texts. --task embed
    scores all layers and poolings by the correlation of cosine similarities with gold scores.

    Parameters
    ----------
    folder
        A fine-tuned model folder, the folder of a fine-tuning run, or a Hub id.
    file
        Labelled data (.csv, .tsv, .jsonl, .parquet, or hub:owner/name:configuration:split), or the
        folder of a corpus for the losses and the perplexity of a pre-trained model.
    settings
        Settings of the task, such as variant=word_l2r for likelihood.
    task
        A task as for predict; by default the one that the model was trained for.
    text
        Column of the text, or of the first of two; default: as in training.
    text_b
        The column of the second text.
    label
        The column of the label.
    length
        Maximum length of a sequence in tokens; default: as in training.
    json
        Write one JSON object instead of a table.
    report
        Write an HTML page with confusions, calibration, slices of the data and the hardest
        examples.
    precision
        Precision of matrix products: fp32 gives equal results on every machine, auto uses bf16
        where the hardware supports it. int8 is compared with fp32 in accuracy and speed.
    limit
        Maximum loss of int8 in points (0.01) of the metric, by default 0.5; more is an error.
    device
        auto, cpu, cuda or cuda:N.
    """
    from bothways.commands.progress import say_kernels
    from bothways.core.atomic_files import check_output_path
    from bothways.core.errors import ConfigError
    from bothways.prediction.int8_report import MAX_LOSS, measure_int8
    from bothways.prediction.layer_sweep import sweep
    from bothways.prediction.predictor import open_task
    from bothways.tasks.sentence_embedding.task import Embedder

    if Path(file, "manifest.json").is_file():
        say_kernels(device)
        _evaluate_on_corpus(folder, file, length, json, device)
        return
    if report is not None:
        check_output_path(report, [file])
    if limit is not None and precision != "int8":
        what = f"limits the loss of int8, and the precision is {precision}"
        fix = "Add --precision int8, or leave --limit out."
        raise ConfigError(what, where="limit", fix=fix)

    def open_in(precision: PredictPrecision) -> Predictor:
        return open_task(
            folder, task, length=length, device=device, precision=precision, settings=settings
        )

    columns = {"text": text, "text_b": text_b, "label": label}
    say_kernels(device)
    if precision == "int8":
        last = _Data(file, columns)

        def score(predictor: Predictor) -> Metrics:
            with last.opened(predictor) as (reading, counts):
                return predictor.evaluate(reading, counts=counts)

        measured = measure_int8(open_in, score)
        if report is not None:
            _analyse(open_in("int8"), last, folder, report)
        both = {"fp32": measured.fp32.metrics, "int8": measured.int8.metrics}
        last.show(measured.to_json(), metric_table(last.title(folder), both), json)
        if not json:
            print(measured)
        measured.check(MAX_LOSS if limit is None else limit)
        return
    predictor, data = open_in(precision), _Data(file, columns)
    _say_task(predictor, task, folder)
    embedder = predictor.task
    if isinstance(embedder, Embedder) and report is None:
        from bothways.commands.embed import sweep_table

        with data.opened(predictor) as (reading, counts):
            cells = sweep(embedder, reading.examples, counts=counts)
        data.show(cells.to_json(), sweep_table(cells, data.title(folder)), json)
        return
    if report is None:
        with data.opened(predictor) as (reading, counts):
            metrics = predictor.evaluate(reading, counts=counts)
    else:
        metrics = _analyse(predictor, data, folder, report)
    data.show(dict(metrics), metric_table(data.title(folder), {"value": metrics}), json)


def _evaluate_on_corpus(
    folder: str, file: str, length: int | None, json: bool, device: str
) -> None:
    """Print the losses, accuracies and perplexity of a pre-trained model on a corpus."""
    from json import dumps

    from rich.console import Console

    from bothways.data.corpus import Corpus
    from bothways.pretraining.evaluation import evaluate_on_corpus

    corpus = Corpus.open(file)
    metrics = evaluate_on_corpus(folder, corpus, length=length or 128, device=device)
    if json:
        print(dumps(metrics))
        return
    Console().print(metric_table(f"{folder} on {file}", {"": metrics}, ""))


def _say_task(predictor: Predictor, asked: str | None, folder: str) -> None:
    """Print which task is scored for a sentence encoder if no task is given."""
    name = predictor.task.task.name
    if asked is None and name == "embed":
        note = f"note: {folder} is a sentence encoder and is scored as {name}; --task changes that"
        print(note, file=sys.stderr)


@dataclass
class _Data:
    """Labelled data that may be read several times.

    Attributes:
        counts: of the last reading.
    """

    file: str
    columns: dict[str, str | None]
    counts: PredictionCounts | None = None

    def title(self, folder: str) -> str:
        return f"{folder} on {self.file}"

    @contextmanager
    def opened(self, predictor: Predictor) -> Iterator[tuple[Reading[Any], PredictionCounts]]:
        """Open the examples from the first one on, with a progress bar."""
        from bothways.commands.progress import asked, watched

        reading = predictor.read(self.file, asked(predictor, **self.columns), labelled=True)
        with watched(reading, "evaluating") as self.counts:
            yield reading, self.counts

    def show(self, plain: Any, table: Any, json: bool) -> None:
        """Print the warnings and the result, as one JSON object or as a table."""
        for warning in self.counts.warnings if self.counts else ():
            print(warning, file=sys.stderr)
        if json:
            from json import dumps

            print(dumps(plain))
        else:
            from rich.console import Console

            Console().print(table)


def _analyse(predictor: Predictor, data: _Data, folder: str, report: Path) -> Metrics:
    """Write the report; return the metrics."""
    from bothways.analysis.report import analyse, write_report
    from bothways.prediction.engine import DEFAULT_PREDICT

    with data.opened(predictor) as (reading, counts):
        analysis = analyse(predictor.task, reading.examples, DEFAULT_PREDICT, counts)
    write_report(
        predictor.task,
        analysis,
        report,
        model=folder,
        data=data.file,
        precision=predictor.precision,
    )
    return analysis.metrics
