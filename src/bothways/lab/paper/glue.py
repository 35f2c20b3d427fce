"""GLUE as fine-tuned by Devlin et al. 2018 (section 4.1, table 1): nine tasks as data.

Distributed files are split at tabs only: quotation marks are part of the text and often unbalanced.
Each file is rewritten as JSON lines with the same three names for all tasks, which runs read.
Rows that lack a column or a text are skipped and counted, as is common for QQP.

The grid: batch 32, 3 epochs, a learning rate of 5e-5, 4e-5, 3e-5 or 2e-5, chosen on dev. BERT-Large
is unstable on small data sets, where the paper restarts it several times: `seeds`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bothways.core.errors import DataError
from bothways.data.tables import HUB, open_table
from bothways.data.text_io import read_lines
from bothways.lab.paper import experiment, published
from bothways.lab.sweeps.runs import write_rows
from bothways.tasks.catalogue import TASKS
from bothways.tasks.text_task import TextColumns

GlueColumn = str | int
"""A column: its name in the first line, or its index, negative from the end."""


@dataclass(frozen=True)
class GlueFileLayout:
    """The columns of a file; None for a second text that it does not have.

    Attributes:
        header: the first line names the columns.
    """

    text: GlueColumn
    text_b: GlueColumn | None
    label: GlueColumn
    header: bool = True

    @property
    def columns(self) -> dict[str, GlueColumn]:
        """The columns to read by role."""
        columns = {"text": self.text, "text_b": self.text_b, "label": self.label}
        return {role: column for role, column in columns.items() if column is not None}


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        name: name of its folder.
        labels: labels in the files; empty for scores.
        metric: the metric of table 1, which chooses the best run.
        layout: layout of the files as distributed.
        hub_layout: layout of every split on the Hub; None if it is that of the files.
        hub_labels: the Hub's names of `labels`; empty if they are equal.
        dev: labelled splits to score on; the first one chooses.
    """

    name: str
    labels: tuple[str, ...]
    metric: str
    layout: GlueFileLayout
    hub_layout: GlueFileLayout | None = None
    hub_labels: tuple[str, ...] = ()
    dev: tuple[str, ...] = ("dev",)


_TWO = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")
_SENTENCES = GlueFileLayout("sentence1", "sentence2", "label")
_SENTENCE = GlueFileLayout("sentence", None, "label")

TASKS_OF_GLUE = (
    GlueTask(
        "MNLI",
        ("contradiction", "entailment", "neutral"),
        "accuracy",
        layout=GlueFileLayout("sentence1", "sentence2", "gold_label"),
        hub_layout=GlueFileLayout("premise", "hypothesis", "label"),
        dev=("dev_matched", "dev_mismatched"),
    ),
    GlueTask(
        "QQP",
        _TWO,
        "f1",
        layout=GlueFileLayout("question1", "question2", "is_duplicate"),
        hub_layout=GlueFileLayout("question1", "question2", "label"),
        hub_labels=("not_duplicate", "duplicate"),
    ),
    GlueTask("QNLI", _ENTAILED, "accuracy", GlueFileLayout("question", "sentence", "label")),
    GlueTask("SST-2", _TWO, "accuracy", _SENTENCE, hub_labels=("negative", "positive")),
    GlueTask(
        "CoLA",
        _TWO,
        "mcc",
        layout=GlueFileLayout(3, None, 1, header=False),
        hub_layout=_SENTENCE,
        hub_labels=("unacceptable", "acceptable"),
    ),
    GlueTask("STS-B", (), "spearman", GlueFileLayout(-3, -2, -1), _SENTENCES),
    GlueTask(
        "MRPC",
        _TWO,
        "f1",
        layout=GlueFileLayout("#1 String", "#2 String", "Quality"),
        hub_layout=_SENTENCES,
        hub_labels=("not_equivalent", "equivalent"),
    ),
    GlueTask("RTE", _ENTAILED, "accuracy", _SENTENCES),
    GlueTask("WNLI", _TWO, "accuracy", _SENTENCES, hub_labels=("not_entailment", "entailment")),
)
"""The tasks in the order of table 1, then WNLI."""

RATES = (5e-5, 4e-5, 3e-5, 2e-5)
DEFAULT_RATE = 2e-5
"""The rate without a grid: that of google-research/bert's examples for GLUE."""

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
    experiments = list[experiment.Experiment | experiment.NotRun]()
    for task in (task for task in TASKS_OF_GLUE if task.name in names):
        splits = ("train", *task.dev)
        absent = [split for split in splits if source_of(task, split, request.data) is None]
        if absent:
            folder = Path(request.data) / task.name
            reason = f"no {absent[0]}.tsv (or {absent[0]}.tsv.gz) in {folder}"
            experiments.append(experiment.NotRun(task.name, reason))
            continue
        written = {split: write_split(task, split, request) for split in splits}
        dev, *further_dev = task.dev
        columns = TextColumns("text", "text_b" if task.layout.text_b is not None else None, "label")
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
        seeds = request.seeds or 1
        experiments.append(experiment.Experiment(task.name, grid, seeds, "best", scored, notes))
    return experiment.BenchmarkPlan(
        "GLUE (section 4.1, table 1)",
        tuple(experiments),
        tuple(COLUMNS),
        {experiment.MEASURED: COLUMNS},
        published.TABLES["GLUE"],
        published.AVERAGED,
        NOTES,
        seeds=None,
    )


def source_of(task: GlueTask, split: str, data: str) -> str | None:
    """Return the file or Hub name of a split, None if the file does not exist."""
    if data.startswith(HUB):
        configuration = task.name.lower().replace("-", "")
        return f"{data}:{configuration}:{split.replace('dev', 'validation')}"
    return experiment.find_file(data, f"{task.name}/{split}.tsv")


def write_split(task: GlueTask, split: str, request: experiment.Request) -> tuple[Path, int]:
    """Write a split as JSON lines to `out/data`; return the path and the number of skipped rows.

    Raises:
        DataError: the split does not exist or differs from GLUE's format.
    """
    source = source_of(task, split, request.data)
    if source is None:
        location, fix = Path(request.data) / task.name, "Get it from gluebenchmark.com."
        raise DataError(f"has no {split}.tsv", where=location, fix=fix)
    limit = request.limit if split == "train" else None
    name = f"{split}-{limit}.jsonl" if limit else f"{split}.jsonl"
    skipped = list[str]()
    rows = itertools.islice(rows_of(task, source, skipped), limit)
    return write_rows(request.out / "data" / task.name / name, rows), len(skipped)


def rows_of(task: GlueTask, source: str, skipped: list[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a split as {"text", "text_b", "label"}.

    Args:
        skipped: receives where the rows are that lack a text or a label.

    Raises:
        DataError: the file lacks a column, or a label is not one of the task's.
    """
    rows = _hub_rows if source.startswith(HUB) else _file_rows
    for location, row in rows(task, source):
        values = {role: value or "" for role, value in row.items()}
        if not all(value.strip() for value in values.values()):
            skipped.append(location)
            continue
        if task.labels and values["label"] not in task.labels:
            message = f"unknown label {values['label']!r}; {task.name} has {', '.join(task.labels)}"
            raise DataError(message, where=location, fix="Give the file as GLUE distributes it.")
        yield values


Rows = Iterator[tuple[str, dict[str, str | None]]]


def _file_rows(task: GlueTask, source: str) -> Rows:
    lines = read_lines(Path(source))
    names = next(lines, (1, ""))[1].split("\t") if task.layout.header else []
    indices = dict[str, int]()
    for role, column in task.layout.columns.items():
        if isinstance(column, str) and column not in names:
            message = f"has no column {column!r}; its first line is {', '.join(names)}"
            raise DataError(message, where=source, fix="Give the file as GLUE distributes it.")
        indices[role] = names.index(column) if isinstance(column, str) else column
    for number, line in lines:
        if line:
            cells = line.split("\t")
            row = {
                role: cells[at] if -len(cells) <= at < len(cells) else None
                for role, at in indices.items()
            }
            yield f"{source}:{number}", row


def _hub_rows(task: GlueTask, source: str) -> Rows:
    names = dict(zip(task.hub_labels, task.labels, strict=False))
    columns = (task.hub_layout or task.layout).columns
    for row in open_table(source).rows:
        cells = {role: row.values[str(column)] for role, column in columns.items()}
        values = {role: None if cell is None else str(cell) for role, cell in cells.items()}
        yield row.where, {**values, "label": names.get(values["label"] or "", values["label"])}
