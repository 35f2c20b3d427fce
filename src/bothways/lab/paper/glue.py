"""GLUE as fine-tuned by Devlin et al. 2018 (section 4.1, table 1): nine tasks as data.

Distributed files are split at tabs only: quotation marks are part of the text and often unbalanced.
Each file is rewritten as JSON lines with the same three names for all tasks, which runs read.
Training and dev rows that lack a column or a text are skipped and counted, as is common for QQP;
test rows never are, because the leaderboard counts rows.

The grid: batch 32, 3 epochs, a learning rate of 5e-5, 4e-5, 3e-5 or 2e-5, chosen on dev. BERT-Large
is unstable on small data sets, where the paper restarts it several times: `seeds`.

The leaderboard takes files that begin with the line "index<TAB>prediction" and have one row per row
of the test set, in its order. Labels are the training files'; scores of STS-B are clipped to 0
to 5. For WNLI, whose dev set misleads, the paper submits the majority class of the training data
(section 4.1, footnote), without a run. MNLI's model predicts AX, the diagnostic set.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bothways.core.atomic_files import make_folder, replace_text
from bothways.core.errors import DataError
from bothways.core.progress import SILENT, Progress
from bothways.data.hub_rows import HUB
from bothways.data.tables import open_table
from bothways.data.text_io import read_lines
from bothways.lab.paper import experiment, published
from bothways.prediction.engine import counting
from bothways.prediction.predictor import open_task
from bothways.tasks.catalogue import TASKS
from bothways.tasks.text_examples import TextColumns

GlueColumn = str | int
"""A column: its name in the first line, or its index, negative from the end."""


@dataclass(frozen=True)
class GlueFileLayout:
    """The columns of a file; None for a column that it does not have.

    Attributes:
        header: the first line names the columns.
    """

    text: GlueColumn
    text_b: GlueColumn | None = None
    label: GlueColumn | None = None
    header: bool = True

    def columns(self, labelled: bool) -> dict[str, GlueColumn]:
        """Return the columns to read by role, without the label unless `labelled`."""
        label = self.label if labelled else None
        columns = {"text": self.text, "text_b": self.text_b, "label": label}
        return {role: column for role, column in columns.items() if column is not None}


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        name: name of its folder and of the leaderboard's file.
        hub: its configuration on the Hub.
        labels: labels in the files; empty for scores.
        metric: the metric of table 1, which chooses the best run.
        train, test: layout of labelled files and of test files, as distributed.
        hub_layout: layout of every split on the Hub.
        hub_labels: the Hub's names of `labels`; empty if they are equal.
        dev: labelled splits to score on; the first one chooses.
        submitted: the test split behind each of the leaderboard's files.
    """

    name: str
    hub: str
    labels: tuple[str, ...]
    metric: str
    train: GlueFileLayout
    test: GlueFileLayout
    hub_layout: GlueFileLayout
    hub_labels: tuple[str, ...] = ()
    dev: tuple[str, ...] = ("dev",)
    submitted: tuple[tuple[str, str], ...] = ()

    @property
    def files(self) -> dict[str, str]:
        """The leaderboard's files, with the split that each is predicted on."""
        return dict(self.submitted) or {self.name: "test"}


_TWO = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")
_SENTENCES = GlueFileLayout("sentence1", "sentence2", "label")
_SENTENCE = GlueFileLayout("sentence", None, "label")
_QUESTION = GlueFileLayout("question", "sentence", "label")
_TEST_PAIR = GlueFileLayout("sentence1", "sentence2")

TASKS_OF_GLUE = (
    GlueTask(
        "MNLI",
        "mnli",
        ("contradiction", "entailment", "neutral"),
        "accuracy",
        train=GlueFileLayout("sentence1", "sentence2", "gold_label"),
        test=_TEST_PAIR,
        hub_layout=GlueFileLayout("premise", "hypothesis", "label"),
        dev=("dev_matched", "dev_mismatched"),
        submitted=(
            ("MNLI-m", "test_matched"),
            ("MNLI-mm", "test_mismatched"),
            ("AX", "diagnostic"),
        ),
    ),
    GlueTask(
        "QQP",
        "qqp",
        _TWO,
        "f1",
        train=GlueFileLayout("question1", "question2", "is_duplicate"),
        test=GlueFileLayout("question1", "question2"),
        hub_layout=GlueFileLayout("question1", "question2", "label"),
        hub_labels=("not_duplicate", "duplicate"),
    ),
    GlueTask(
        "QNLI",
        "qnli",
        _ENTAILED,
        "accuracy",
        train=_QUESTION,
        test=GlueFileLayout("question", "sentence"),
        hub_layout=_QUESTION,
    ),
    GlueTask(
        "SST-2",
        "sst2",
        _TWO,
        "accuracy",
        train=_SENTENCE,
        test=GlueFileLayout("sentence"),
        hub_layout=_SENTENCE,
        hub_labels=("negative", "positive"),
    ),
    GlueTask(
        "CoLA",
        "cola",
        _TWO,
        "mcc",
        train=GlueFileLayout(3, None, 1, header=False),
        test=GlueFileLayout("sentence"),
        hub_layout=_SENTENCE,
        hub_labels=("unacceptable", "acceptable"),
    ),
    GlueTask(
        "STS-B",
        "stsb",
        (),
        "spearman",
        train=GlueFileLayout(-3, -2, -1),
        test=GlueFileLayout(-2, -1),
        hub_layout=_SENTENCES,
    ),
    GlueTask(
        "MRPC",
        "mrpc",
        _TWO,
        "f1",
        train=GlueFileLayout("#1 String", "#2 String", "Quality"),
        test=GlueFileLayout("#1 String", "#2 String"),
        hub_layout=_SENTENCES,
        hub_labels=("not_equivalent", "equivalent"),
    ),
    GlueTask("RTE", "rte", _ENTAILED, "accuracy", _SENTENCES, _TEST_PAIR, _SENTENCES),
    GlueTask(
        "WNLI",
        "wnli",
        _TWO,
        "accuracy",
        train=_SENTENCES,
        test=_TEST_PAIR,
        hub_layout=_SENTENCES,
        hub_labels=("not_entailment", "entailment"),
    ),
)
"""The tasks in the order of table 1, then WNLI."""

RATES = (5e-5, 4e-5, 3e-5, 2e-5)
DEFAULT_RATE = 2e-5
"""The rate without a grid: that of google-research/bert's examples for GLUE."""

MAJORITY = "0"
"""Majority class of WNLI's training data: 323 of 635."""
LOWEST, HIGHEST = 0.0, 5.0
"""Range of the scores of STS-B."""

COLUMNS = {
    "MNLI-m": ("MNLI", "accuracy"),
    "MNLI-mm": ("MNLI", "dev_mismatched/accuracy"),
    **{task.name: (task.name, task.metric) for task in TASKS_OF_GLUE[1:]},
}
"""Task and metric of each column of the comparison."""

NOTES = (
    "Table 1 is on the test sets, whose labels only the leaderboard has; these runs are on dev, "
    "where scores are higher by chance because dev has chosen the learning rate.",
    "The average is that of table 1: the mean of its nine columns, without WNLI, which the paper "
    "leaves out.",
)


def glue_plan(request: experiment.Request) -> experiment.BenchmarkPlan:
    """Return the plan; the data that it needs is written to `out/data`.

    Raises:
        DataError: a file differs from GLUE's.
    """
    names = request.chosen(tuple(task.name for task in TASKS_OF_GLUE))
    return experiment.BenchmarkPlan(
        "GLUE (section 4.1, table 1)",
        tuple(_experiment(task, request) for task in TASKS_OF_GLUE if task.name in names),
        tuple(COLUMNS),
        {experiment.MEASURED: COLUMNS},
        published.TABLES["GLUE"],
        published.AVERAGED,
        NOTES,
        seeds=None,
    )


def _experiment(
    task: GlueTask, request: experiment.Request
) -> experiment.Experiment | experiment.NotRun:
    splits = ("train", *task.dev)
    for split in splits:
        if source_of(task, split, request.data) is None:
            folder = Path(request.data) / task.name
            return experiment.NotRun(task.name, f"no {split}.tsv (or {split}.tsv.gz) in {folder}")
    written = {split: write_split(task, split, request) for split in splits}
    dev, *further_dev = task.dev
    columns = TextColumns("text", "text_b" if task.train.text_b is not None else None, "label")
    rates = RATES if request.grid == "paper" else (DEFAULT_RATE,)
    grid = experiment.grid_settings(
        request,
        TASKS["classify" if task.labels else "regress"]().with_columns(columns),
        [experiment.GridPoint(rate, 32, 3.0) for rate in rates],
        written["train"][0],
        written[dev][0],
        task.metric,
    )
    notes = tuple(
        f"{skipped} rows of {split} without a text or a label are left out"
        for split, (_, skipped) in written.items()
        if skipped
    )
    scored = {split: str(written[split][0]) for split in further_dev}
    return experiment.Experiment(task.name, grid, request.seeds or 1, "best", scored, notes)


def source_of(task: GlueTask, split: str, data: str) -> str | None:
    """Return the file or Hub name of a split, None if the file does not exist."""
    if data.startswith(HUB):
        if split == "diagnostic":
            return f"{data}:ax:test"
        return f"{data}:{task.hub}:{split.replace('dev', 'validation')}"
    diagnostic = ("diagnostic/diagnostic.tsv",) if split == "diagnostic" else ()
    return experiment.find_file(data, f"{task.name}/{split}.tsv", *diagnostic)


def write_split(task: GlueTask, split: str, request: experiment.Request) -> tuple[Path, int]:
    """Write a split as JSON lines to `out/data`; return the path and the number of skipped rows.

    Raises:
        DataError: the split does not exist or differs from GLUE's format.
    """
    labelled = split == "train" or split in task.dev
    source = source_of(task, split, request.data)
    if source is None:
        location, fix = Path(request.data) / task.name, "Get it from gluebenchmark.com."
        raise DataError(f"has no {split}.tsv", where=location, fix=fix)
    limit = request.limit if split == "train" else None
    name = f"{split}-{limit}.jsonl" if limit else f"{split}.jsonl"
    skipped = list[str]()
    rows = itertools.islice(rows_of(task, source, labelled, skipped), limit)
    return experiment.write_rows(request.out / "data" / task.name / name, rows), len(skipped)


def rows_of(
    task: GlueTask, source: str, labelled: bool, skipped: list[str]
) -> Iterator[dict[str, str]]:
    """Yield the rows of a split as {"text", "text_b", "label"}, without the absent ones.

    Args:
        skipped: receives where the rows are that lack a text or a label.

    Raises:
        DataError: the file lacks a column, or a label is not one of the task's.
    """
    rows = _hub_rows if source.startswith(HUB) else _file_rows
    for location, row in rows(task, source, labelled):
        values = {role: value or "" for role, value in row.items()}
        if labelled and not all(value.strip() for value in values.values()):
            skipped.append(location)
            continue
        if labelled and task.labels and values["label"] not in task.labels:
            message = f"unknown label {values['label']!r}; {task.name} has {', '.join(task.labels)}"
            raise DataError(message, where=location, fix="Give the file as GLUE distributes it.")
        yield values


Rows = Iterator[tuple[str, dict[str, str | None]]]


def _file_rows(task: GlueTask, source: str, labelled: bool) -> Rows:
    layout = task.train if labelled else task.test
    lines = read_lines(Path(source))
    names = next(lines, (1, ""))[1].split("\t") if layout.header else []
    columns = layout.columns(labelled).items()
    indices = {role: _index(column, names, source) for role, column in columns}
    for number, line in lines:
        if line:
            cells = line.split("\t")
            row = {
                role: cells[at] if -len(cells) <= at < len(cells) else None
                for role, at in indices.items()
            }
            yield f"{source}:{number}", row


def _index(column: GlueColumn, names: list[str], source: str) -> int:
    if isinstance(column, int):
        return column
    if column not in names:
        message = f"has no column {column!r}; its first line is {', '.join(names)}"
        raise DataError(message, where=source, fix="Give the file as GLUE distributes it.")
    return names.index(column)


def _hub_rows(task: GlueTask, source: str, labelled: bool) -> Rows:
    names = dict(zip(task.hub_labels, task.labels, strict=False))
    diagnostic = source.endswith(":ax:test")
    layout = GlueFileLayout("premise", "hypothesis") if diagnostic else task.hub_layout
    columns = layout.columns(labelled)
    for row in open_table(source).rows:
        cells = {role: row.values[str(column)] for role, column in columns.items()}
        values = {role: None if cell is None else str(cell) for role, cell in cells.items()}
        if labelled:
            values["label"] = names.get(values["label"] or "", values["label"])
        yield row.where, values


def write_submission(
    request: experiment.Request,
    outcomes: Iterable[experiment.CellOutcome],
    *,
    device: str,
    progress: Progress = SILENT,
) -> list[Path]:
    """Write WNLI's file and those of all finished tasks with test data to `out/submission`."""
    best = {done.experiment.name: done.best for done in outcomes if done.best is not None}
    folder, files = request.out / "submission", []
    for task in TASKS_OF_GLUE:
        for name, split in task.files.items():
            ready = task.name == "WNLI" or task.name in best
            if not ready or source_of(task, split, request.data) is None:
                continue
            test, _ = write_split(task, split, request)
            predictions = (
                (MAJORITY for _ in open_table(str(test)).rows)
                if task.name == "WNLI"
                else _predicted(task, test, best[task.name], device, progress)
            )
            make_folder(folder)
            files.append(folder / f"{name}.tsv")
            lines = (f"{index}\t{value}\n" for index, value in enumerate(predictions))
            replace_text(files[-1], "".join(["index\tprediction\n", *lines]))
    return files


def _predicted(
    task: GlueTask, test: Path, folder: Path, device: str, progress: Progress
) -> Iterator[str]:
    predictor = open_task(str(folder), device=device)
    reading = predictor.read(str(test), labelled=False)
    counts = counting(reading, progress, f"predicting {task.name}'s test set")
    for _, prediction in predictor.predict_examples(reading, counts=counts):
        yield prediction.label if task.labels else clip_score(prediction)


def clip_score(prediction: Any) -> str:
    """Format a score with three digits, clipped to the range of STS-B."""
    return f"{min(max(prediction.score, LOWEST), HIGHEST):.3f}"
