"""Scores of a model on labelled data: its metrics, the cost of int8, layers, minimal pairs.

- int8 and fp32 are compared by the task's metric and by the clock.
- The layers of a sentence encoder are searched in one pass: all are kept, and each is pooled in
  every way. Memory does not grow with the texts, but for one cosine of each pair and cell.
- Minimal pairs are files of JSON lines, one for each phenomenon, as BLiMP's. A row has
  `sentence_good` and `sentence_bad`; rows that name a `field` or a `linguistics_term` are counted
  under it, too (Warstadt et al. 2020, table 2).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bothways.core.batch import Batch
from bothways.core.config.values import Tree
from bothways.core.errors import ConfigError, DataError, ResourceError, argument
from bothways.core.progress import SILENT, Progress
from bothways.core.report.html import write_html
from bothways.data.tables import open_table
from bothways.data.text_io import suffix_of
from bothways.hub.model_folder import read_record
from bothways.hub.provenance import model_facts
from bothways.hub.resolve import resolve, resolve_run
from bothways.hub.sentence_transformers import Pooling
from bothways.model.model import Encoder
from bothways.prediction import PredictPrecision
from bothways.prediction.analysis.report import analyse, analysis_report
from bothways.prediction.engine import PredictionCounts, counting, predict
from bothways.prediction.opening import open_task_model
from bothways.prediction.predictor import Predictor, named_columns
from bothways.prediction.prepared_model import GraphPrecision
from bothways.tasks import base
from bothways.tasks.columns import guess_note
from bothways.tasks.masked_lm.task import MinimalPairTask
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding import task as embedding
from bothways.tasks.sentence_embedding.vectors import Agreement, Correlation, gold_score
from bothways.tasks.text_task import TextColumns, TextExample, example_of

MAX_LOSS = 0.5
"""Points that int8 may lose by default."""
SHORT_SECONDS = 20.0
"""Measurements are repeated until they have taken this long together, at most three times."""


@dataclass(frozen=True)
class TimedMetrics:
    """The metrics in one precision, and the fewest seconds from texts to metrics."""

    metrics: base.Metrics
    seconds: float


@dataclass(frozen=True)
class Int8Report:
    """One model in two precisions on the same data.

    Attributes:
        metric: the metric that counts, the task's own.
    """

    metric: str
    direction: base.Direction
    fp32: TimedMetrics
    int8: TimedMetrics

    @property
    def points_lost(self) -> float:
        """Hundredths of the metric; where lower is better, percent of its value in fp32."""
        fp32, int8 = self.fp32.metrics[self.metric], self.int8.metrics[self.metric]
        points = 100 * (fp32 - int8 if self.direction == "highest" else int8 / fp32 - 1)
        return round(points, 9)  # 0.9 - 0.895 is a little more than half a point

    @property
    def speedup(self) -> float:
        """The time in fp32 divided by the time in int8."""
        return self.fp32.seconds / self.int8.seconds

    def check(self, limit: float = MAX_LOSS) -> None:
        """Raise ConfigError if more points than `limit` are lost, or the loss is not a number.

        The message has all measurements, which the error ends.
        """
        if not self.points_lost <= limit:
            pairs = ", ".join(
                f"{name} {value:.4g} and {self.int8.metrics[name]:.4g}"
                for name, value in self.fp32.metrics.items()
            )
            message = (
                f"int8 loses {self.points_lost:#.3g} points of {self.metric} here; the limit is "
                f"{limit:g}. In fp32 and in int8: {pairs}; int8 is {self.speedup:.2f} times as fast"
            )
            fix = f"Predict in fp32, or allow more: {argument(limit='POINTS')}."
            raise ConfigError(message, where="precision", fix=fix)

    def __str__(self) -> str:
        change = "gains" if self.points_lost < 0 else "loses"
        points = f"{abs(self.points_lost):#.3g} points of {self.metric}"
        return f"int8 {change} {points}, and is {self.speedup:.2f} times as fast"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `bothways evaluate --json` writes them."""
        metrics = {"fp32": dict(self.fp32.metrics), "int8": dict(self.int8.metrics)}
        summary = {"points_lost": self.points_lost, "speedup": self.speedup}
        return {"metric": self.metric, **summary, **metrics}


def measure_int8(
    open_in: Callable[[GraphPrecision], Predictor],
    evaluate: Callable[[Predictor], base.Metrics],
) -> Int8Report:
    """Measure the cost and gain of int8 now.

    Args:
        open_in: opens the model in a precision.
        evaluate: returns its metrics; called for both, so it opens the data on each call.

    Raises:
        ConfigError: int8 is not available for this model here.
    """
    quantised = open_in("int8")  # before the data is read for fp32
    measurements = list[TimedMetrics]()
    for predictor in (quantised, open_in("fp32")):
        # The shortest of up to three times: the first one also reads modules and weights from the
        # disk.
        seconds = list[float]()
        while not seconds or (len(seconds) < 3 and sum(seconds) < SHORT_SECONDS):
            start = time.perf_counter()
            metrics = evaluate(predictor)
            seconds.append(time.perf_counter() - start)
        measurements.append(TimedMetrics(metrics, min(seconds)))
    int8, fp32 = measurements
    task_model = quantised.task_model
    directions = task_model.task.directions(task_model.labels)
    metric = next(name for name in (task_model.task.metric, *directions) if name in fp32.metrics)
    return Int8Report(metric, directions[metric], fp32, int8)


POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "max")
WINDOW = 256
"""Maximum number of pairs whose layers are held at once."""
ONE = 1 - 1e-6
"""The mean cosine from which all texts have the same vector, such as [CLS] in the embeddings."""


@dataclass(frozen=True)
class Cell:
    """The result of one layer, pooled in one way. Layer 0 is the embeddings."""

    layer: int
    pooling: Pooling
    correlation: Correlation


@dataclass(frozen=True)
class Sweep:
    """Every layer with every pooling, layer by layer, and the number of pairs."""

    cells: tuple[Cell, ...]
    pairs: int

    @property
    def best(self) -> Cell:
        """The cell with the highest Spearman correlation, the first of equals.

        Cells where all texts have the same vector come last.
        """
        return max(
            self.cells,
            key=lambda cell: (cell.correlation.anisotropy < ONE, cell.correlation.spearman),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `bothways evaluate --json` writes them."""
        rows = [{"layer": c.layer, "pooling": c.pooling, **vars(c.correlation)} for c in self.cells]
        return {"pairs": self.pairs, "best": rows[self.cells.index(self.best)], "cells": rows}


class _AllLayers(base.TaskModel[TextExample, VectorPrediction]):
    """A task that returns the vectors of all layers and poolings, cut to the task's components."""

    task: embedding.SentenceEmbeddingTask

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return the vectors of each sequence `(cells, components)`."""
        layers, skip = self.model.encoder(batch, keep_layers=True).layers, embedding.skipped(batch)
        cells = [
            embedding.pool(x, batch.layout, pooling, skip)[:, : self.task.components]
            for x in layers
            for pooling in POOLINGS
        ]
        return list(torch.stack(cells, dim=1).cpu().numpy())

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> VectorPrediction:
        """Return the vectors of an example's texts `(texts, cells, components)`."""
        return VectorPrediction(np.stack(outputs))


def is_swept(task_model: embedding.Embedder) -> bool:
    """Return True if the vectors of a model are among those of its layers and usual poolings."""
    task, model = task_model.task, task_model.model
    plain = task.pooling in POOLINGS and task.layers == (-1,) and task.long_texts != "windows"
    has_layers = isinstance(model.encoder, Encoder)  # no graph, and no table
    return plain and has_layers and embedding.projection_of(model) is None


def sweep_layers(
    task_model: embedding.Embedder,
    examples: Iterable[TextExample],
    counts: PredictionCounts | None = None,
) -> Sweep:
    """Measure in one pass how well cosines agree with the scores of pairs.

    Every layer and pooling is a cell; arguments are those of `predict`.

    Raises:
        DataError: an example is a single text, a score is not a number, or there are fewer than
            two pairs.
    """
    all_layers = _AllLayers(
        task_model.task, task_model.model, task_model.tokenizer, (), task_model.length
    ).train(task_model.training)
    agreement = Agreement()
    for example, prediction in predict(all_layers, examples, counts, window=WINDOW):
        agreement.add(gold_score(example), prediction.vectors)
    cell_names = itertools.product(range(task_model.model.config.depth + 1), POOLINGS)
    cells = zip(cell_names, agreement.cells(), strict=True)
    return Sweep(tuple(Cell(*name, value) for name, value in cells), len(agreement.scores))


COLUMNS = TextColumns("sentence_good", "sentence_bad")
GROUPS = ("phenomenon", "linguistics_term", "field")
"""Groupings of accuracies: the file, and two columns of BLiMP."""


@dataclass
class SuiteScores:
    """Accuracies of a suite of minimal pairs.

    Attributes:
        variant: how a text's likelihood was computed, see `MinimalPairTask`.
        groups: for each pair, whether its first text is the more likely one: by the names in
            `GROUPS`, then by the name of the group.
    """

    variant: str
    groups: dict[str, dict[str, list[bool]]] = field(
        default_factory=lambda: {name: {} for name in GROUPS}
    )

    @property
    def pairs(self) -> int:
        """The number of all pairs."""
        return sum(map(len, self.groups["phenomenon"].values()))

    @property
    def accuracy(self) -> float:
        """The accuracy on all pairs."""
        return sum(map(sum, self.groups["phenomenon"].values())) / self.pairs

    @property
    def mean(self) -> float:
        """The mean of the accuracies of the phenomena, whatever their numbers of pairs."""
        return statistics.fmean(map(statistics.fmean, self.groups["phenomenon"].values()))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        groups = {
            name: {value: sum(pairs) / len(pairs) for value, pairs in sorted(group.items())}
            for name, group in self.groups.items()
            if group
        }
        overall = {"accuracy": self.accuracy, "mean": self.mean, "pairs": self.pairs}
        return {**overall, "variant": self.variant, **groups}


def open_pairs(
    folder: str | Path,
    settings: Tree | Many[str] = (),
    *,
    length: int | None = None,
    device: str = "auto",
) -> base.TaskModel[Any, Any]:
    """Open a model for the task "prefer"; without settings, masked models hide the rest of a word.

    Arguments and errors as `open_task_model`.
    """
    task_model = open_task_model(folder, "prefer", length=length, device=device, settings=settings)
    task = task_model.task
    if isinstance(task, MinimalPairTask) and task.variant == "original" and not settings:
        task_model.task = dataclasses.replace(task, variant="word_l2r")
    return task_model


def evaluate_suite(predictor: Predictor, folder: Path, progress: Progress = SILENT) -> SuiteScores:
    """Return the accuracies of a model on the files of a folder.

    Args:
        predictor: opened for the task "prefer".
        folder: with .jsonl files, plain or compressed.

    Raises:
        DataError: no such folder or no file in it; a row without the two sentences.
    """
    scores = SuiteScores(predictor.task_model.task.variant)  # type: ignore[attr-defined]
    for_groups, for_examples = itertools.tee(read_suite(folder, progress))
    predicted = predictor.predict_examples(example for _, example in for_examples)
    for (groups, _), pair in zip(for_groups, predicted, strict=True):
        correct = bool(predictor.task_model.grade(*pair))
        for name, value in groups.items():
            scores.groups[name].setdefault(value, []).append(correct)
    return scores


def read_suite(
    folder: Path, progress: Progress = SILENT
) -> Iterator[tuple[dict[str, str], TextExample]]:
    """Yield each pair of a suite with its groups by the names in `GROUPS`, file by file.

    Raises:
        DataError: no such folder, no file of JSON lines in it, or two of one name; a row without
            the two sentences.
    """
    fix = "Give a folder of .jsonl files with sentence_good and sentence_bad, such as BLiMP's data."
    if not folder.is_dir():
        raise DataError("is not a folder", where=folder, fix=fix)
    files = dict[str, Path]()
    for file in sorted(path for path in folder.iterdir() if suffix_of(path) == ".jsonl"):
        other = files.setdefault(file.name[: file.name.lower().rindex(".jsonl")], file)
        if other != file:
            message = f"is a second file of one name, beside {other.name}"
            raise DataError(message, where=file, fix="Keep one of the two.")
    if not files:
        raise DataError("has no .jsonl file", where=folder, fix=fix)
    progress.stage("minimal pairs", len(files))
    for done, (name, file) in enumerate(files.items()):
        progress.advance(done, name)
        for row in open_table(str(file)).rows:
            groups = {key: str(row.values[key]) for key in GROUPS[1:] if row.values.get(key)}
            yield {"phenomenon": name, **groups}, example_of(row.values, COLUMNS, row.where)


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model.

    Attributes:
        title: the model and its data.
        metrics: by name; of int8 its own, of layers for the model's own vectors.
        int8: the comparison of int8 with fp32.
        layers: every layer and pooling of a sentence encoder.
        pairs: the accuracies of groups of minimal pairs.
        retrieval: metrics by folder and ranking; see `evaluate_retrieval`.
    """

    title: str
    metrics: Mapping[str, float]
    int8: Int8Report | None = None
    layers: Sweep | None = None
    pairs: SuiteScores | None = None
    retrieval: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `bothways evaluate --json` writes them."""
        if self.retrieval is not None:
            return dict(self.retrieval)
        if self.layers is not None:
            return {**self.metrics, **self.layers.to_json()}
        detail = self.int8 or self.pairs
        return dict(self.metrics) if detail is None else detail.to_json()


@dataclass
class EvaluationData:
    """Labelled data that may be read several times.

    Attributes:
        folder, name: the names of the model and of the data, which is a file without the rest.
        columns: to read, by role; None as in training.
        examples, rows: examples of the task, or rows in memory, instead of a file.
    """

    folder: str
    name: str
    columns: Mapping[str, str | None]
    progress: Progress
    counts: PredictionCounts | None = None
    examples: list[Any] | None = None
    rows: list[Any] | None = None

    @contextmanager
    def opened(self, predictor: Predictor) -> Iterator[tuple[base.Reading[Any], PredictionCounts]]:
        """Open the examples from the first one on."""
        task = predictor.task_model.task
        is_first = self.counts is None  # int8 and a report read the data again
        if self.examples is not None:
            reading = base.Reading(task, iter(self.examples))
        else:
            columns = named_columns(task, **self.columns)
            data = self.name if self.rows is None else self.rows
            reading = predictor.read(data, columns, labelled=True)
            note = guess_note(self.name, reading, task, columns) if self.rows is None else None
            if is_first and note:
                self.progress.message(note)
        self.counts = counting(reading, self.progress, "evaluating")
        record = read_record(resolve(resolve_run(self.folder)))
        trained, calibrated = record.get("data", {}), record.get("calibration", {})
        uses = {  # training data with the dev data that was split from it is training data, too
            "trained the model, whose scores": [trained.get("train"), record.get("split")],
            "calibrated the model, whose probabilities": [calibrated.get("data")],
        }
        # The digest is complete when all examples have been read: the note comes after the scores.
        digest = hashlib.sha256()
        if any(map(any, uses.values())):
            reading = dataclasses.replace(reading, examples=base.hashed(reading.examples, digest))
        yield reading, self.counts
        for use, sources in uses.items():
            digests = [source.get("sha256") for source in sources if source]
            if is_first and digest.hexdigest() in digests:
                message = f"note: this data {use} look better on it than on other data"
                self.progress.message(message)

    def score(self, predictor: Predictor) -> base.Metrics:
        """Return the metrics of a model."""
        with self.opened(predictor) as (reading, counts):
            return predictor.evaluate(reading, counts=counts)

    def analyse(self, predictor: Predictor, report: Path) -> base.Metrics:
        """Write the report; return the metrics.

        Raises:
            ResourceError: it cannot be written; the message has the metrics, which took the time.
        """
        with self.opened(predictor) as (reading, counts):
            analysis = analyse(predictor.task_model, reading.examples, counts=counts)
        facts = model_facts(self.folder, predictor.task_model.labels)
        page = analysis_report(
            predictor.task_model, analysis, self.folder, self.name, facts,
            precision=predictor.precision,
        )  # fmt: skip
        try:
            write_html(page, report)
        except ResourceError as error:
            scores = ", ".join(f"{name} {x:.4f}" for name, x in analysis.metrics.items())
            message = f"{error.what}; the scores are {scores}"
            raise ResourceError(message, where=error.where, fix=error.advice) from error
        return analysis.metrics

    def evaluate(
        self,
        open_in: Callable[[PredictPrecision], Predictor],
        precision: PredictPrecision,
        report: Path | None,
        limit: float | None,
        *,
        named: bool,
    ) -> Evaluation:
        """Return the scores of a model.

        Args:
            report: a page to write.
            limit: the most points that int8 may lose.
            named: whether the user has named the task.

        Raises:
            ConfigError: int8 loses too much, or a limit without int8.
        """
        title = f"{self.folder} on {self.name}"
        if precision == "int8":
            if report is not None:  # first: a task without a report is refused at once
                self.analyse(open_in("int8"), report)
            cost = measure_int8(open_in, self.score)
            done = Evaluation(title, cost.int8.metrics, int8=cost)
            cost.check(MAX_LOSS if limit is None else limit)
        elif limit is not None:
            message = f"limits the loss of int8, and the precision is {precision}"
            raise ConfigError(message, where="limit", fix="Set the precision to int8, or drop it.")
        else:
            predictor = open_in(precision)
            embeds = predictor.task_model.task.name == "embed"
            if embeds and not named:
                message = f"{self.folder} is a sentence encoder and is scored as embed"
                self.progress.message(f"note: {message}; naming a task changes that")
            task_model = predictor.task_model
            if report is not None:
                done = Evaluation(title, self.analyse(predictor, report))
            elif isinstance(task_model, embedding.Embedder) and is_swept(task_model):
                # All layers are scored on pairs with a score; else retrieval is.
                with self.opened(predictor) as (reading, counts):
                    first = list(itertools.islice(reading.examples, 1))
                    examples = itertools.chain(first, reading.examples)
                    if first and task_model.task.metric_for(first) != task_model.task.metric:
                        peeked = dataclasses.replace(reading, examples=examples)
                        done = Evaluation(title, predictor.evaluate(peeked, counts=counts))
                    else:
                        swept = sweep_layers(task_model, examples, counts)
                        # The last layer, in the pooling of the model.
                        cell = swept.cells[POOLINGS.index(task_model.task.pooling) - len(POOLINGS)]
                        done = Evaluation(title, vars(cell.correlation), layers=swept)
            else:
                done = Evaluation(title, self.score(predictor))
            if precision == "auto":
                self.progress.message(f"note: computed in {predictor.precision}")
        for warning in self.counts.warnings if self.counts else ():
            self.progress.message(warning)
        return done
