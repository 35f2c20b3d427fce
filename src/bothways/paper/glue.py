"""GLUE as Devlin et al. 2018 fine-tune on it (section 4.1, table 1): nine tasks as data, and their files as distributed.

The files are cut at tabs and nothing else: quotes in them are quotes, and unbalanced. Each is written once more as JSON lines
with the same three names in each, which is what a run reads. A training or dev row that lacks a column or a text is left out
and counted, as is done for QQP everywhere; a test row never is, since the leaderboard counts rows.

The grid: batch 32, 3 epochs, a rate of 5e-5, 4e-5, 3e-5 or 2e-5, chosen on dev. Large is unstable on small data sets, and
the paper restarts it several times there: that is `seeds`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bothways.core.errors import DataError
from bothways.data.tables import HUB, open_table
from bothways.data.text_io import COMPRESSED, read_lines
from bothways.paper import published
from bothways.paper.experiment import (
    MEASURED,
    BenchmarkPlan,
    Experiment,
    NotRun,
    Point,
    Request,
    grid_of,
    write_rows,
)
from bothways.tasks.catalogue import TASKS
from bothways.tasks.text_examples import TextColumns

GlueColumn = str | int
"""A column: its name in the first line, or its number, from the end if it is below 0."""


@dataclass(frozen=True)
class GlueFileLayout:
    """Where a file has its texts and its label; none for what it has not.

    Attributes:
        header: whether its first line names the columns.
    """

    text: GlueColumn
    text_b: GlueColumn | None = None
    label: GlueColumn | None = None
    header: bool = True

    def columns(self, labelled: bool) -> dict[str, GlueColumn]:
        """The columns that are read, by what they hold."""
        places = {
            "text": self.text,
            "text_b": self.text_b,
            "label": self.label if labelled else None,
        }
        return {role: place for role, place in places.items() if place is not None}


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        name: of its folder and of the leaderboard's file.
        hub: its configuration on the Hub.
        labels: in the files; empty for scores.
        metric: by which the best run is chosen, the one that table 1 shows.
        train, test: the layout of labelled files and of test files, as distributed.
        hub_layout: of every split on the Hub.
        hub_labels: what the Hub calls `labels`; empty where it calls them the same.
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
    def kind(self) -> Literal["classify", "regress"]:
        """The task that it is."""
        return "classify" if self.labels else "regress"

    @property
    def files(self) -> dict[str, str]:
        """The leaderboard's files, with the split that each is predicted on."""
        return dict(self.submitted) or {self.name: "test"}


_TWO = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")
_SENTENCES = GlueFileLayout("sentence1", "sentence2", "label")
_TEST_PAIR = GlueFileLayout("sentence1", "sentence2")

TASKS_OF_GLUE = (
    GlueTask(
        "MNLI", "mnli", ("contradiction", "entailment", "neutral"), "accuracy",
        GlueFileLayout("sentence1", "sentence2", "gold_label"), _TEST_PAIR, GlueFileLayout("premise", "hypothesis", "label"),
        dev=("dev_matched", "dev_mismatched"),
        submitted=(("MNLI-m", "test_matched"), ("MNLI-mm", "test_mismatched"), ("AX", "diagnostic")),
    ),
    GlueTask(
        "QQP", "qqp", _TWO, "f1",
        GlueFileLayout("question1", "question2", "is_duplicate"), GlueFileLayout("question1", "question2"),
        GlueFileLayout("question1", "question2", "label"), ("not_duplicate", "duplicate"),
    ),
    GlueTask(
        "QNLI", "qnli", _ENTAILED, "accuracy",
        GlueFileLayout("question", "sentence", "label"), GlueFileLayout("question", "sentence"), GlueFileLayout("question", "sentence", "label"),
    ),
    GlueTask(
        "SST-2", "sst2", _TWO, "accuracy",
        GlueFileLayout("sentence", None, "label"), GlueFileLayout("sentence"), GlueFileLayout("sentence", None, "label"), ("negative", "positive"),
    ),
    GlueTask(
        "CoLA", "cola", _TWO, "mcc",
        GlueFileLayout(3, None, 1, header=False), GlueFileLayout("sentence"), GlueFileLayout("sentence", None, "label"),
        ("unacceptable", "acceptable"),
    ),
    GlueTask("STS-B", "stsb", (), "spearman", GlueFileLayout(-3, -2, -1), GlueFileLayout(-2, -1), _SENTENCES),
    GlueTask(
        "MRPC", "mrpc", _TWO, "f1", GlueFileLayout("#1 String", "#2 String", "Quality"), GlueFileLayout("#1 String", "#2 String"), _SENTENCES,
        ("not_equivalent", "equivalent"),
    ),
    GlueTask("RTE", "rte", _ENTAILED, "accuracy", _SENTENCES, _TEST_PAIR, _SENTENCES),
    GlueTask("WNLI", "wnli", _TWO, "accuracy", _SENTENCES, _TEST_PAIR, _SENTENCES, ("not_entailment", "entailment")),
)  # fmt: skip
"""In the order of table 1."""

RATES = (5e-5, 4e-5, 3e-5, 2e-5)
ALONE = 2e-5
"""The rate without a grid: the one of google-research/bert's examples for GLUE."""

COLUMNS = {
    "MNLI-m": ("MNLI", "accuracy"), "MNLI-mm": ("MNLI", "dev_mismatched/accuracy"), "QQP": ("QQP", "f1"),
    "QNLI": ("QNLI", "accuracy"), "SST-2": ("SST-2", "accuracy"), "CoLA": ("CoLA", "mcc"), "STS-B": ("STS-B", "spearman"),
    "MRPC": ("MRPC", "f1"), "RTE": ("RTE", "accuracy"),
}  # fmt: skip

NOTES = (
    "Table 1 is on the test sets, whose labels only the leaderboard has; these runs are on dev, where scores are higher by "
    "chance, since dev has chosen the rate.",
    "The average is table 1's: the plain mean of its nine columns, without WNLI.",
)


def glue_plan(request: Request) -> BenchmarkPlan:
    """GLUE's experiments; the data that they need is written to `out/data`. DataError for a file that is not GLUE's."""
    chosen = request.chosen(tuple(task.name for task in TASKS_OF_GLUE))
    experiments = tuple(_experiment(task, request) for task in TASKS_OF_GLUE if task.name in chosen)
    return BenchmarkPlan(
        "GLUE (section 4.1, table 1)",
        experiments,
        tuple(COLUMNS),
        {MEASURED: COLUMNS},
        published.GLUE,
        published.AVERAGED,
        NOTES,
        seeds=None,
    )


def _experiment(task: GlueTask, request: Request) -> Experiment | NotRun:
    absent = [
        split for split in ("train", *task.dev) if source_of(task, split, request.data) is None
    ]
    if absent:
        return NotRun(
            task.name,
            f"no {absent[0]}.tsv (or {absent[0]}.tsv.gz) in {Path(request.data) / task.name}",
        )
    written = {split: write_split(task, split, request) for split in ("train", *task.dev)}
    definition = TASKS[task.kind]().with_columns(columns_of(task))
    dev, *others = task.dev
    rates = RATES if request.grid == "paper" else (ALONE,)
    points = [Point(rate, 32, 3.0) for rate in rates]
    grid = grid_of(request, definition, points, written["train"][0], written[dev][0], task.metric)
    notes = tuple(
        f"{left} rows of {split} lack a text or a label, and are left out"
        for split, (_, left) in written.items()
        if left
    )
    return Experiment(
        task.name, grid, request.seeds or 1, "best", {o: str(written[o][0]) for o in others}, notes
    )


def columns_of(task: GlueTask) -> TextColumns:
    """The names in the files that runs read."""
    return TextColumns("text", "text_b" if task.train.text_b is not None else None, "label")


def source_of(task: GlueTask, split: str, data: str) -> str | None:
    """Where a split is: a file, or a name on the Hub; none where there is no such file."""
    if data.startswith(HUB):
        config, name = (
            ("ax", "test")
            if split == "diagnostic"
            else (task.hub, split.replace("dev", "validation"))
        )
        return f"{data}:{config}:{name}"
    folder = Path(data).expanduser()
    places = [folder / task.name, *([folder / "diagnostic"] if split == "diagnostic" else [])]
    files = (place / f"{split}.tsv{suffix}" for place in places for suffix in ("", *COMPRESSED))
    return next((str(file) for file in files if file.is_file()), None)


def write_split(task: GlueTask, split: str, request: Request) -> tuple[Path, int]:
    """A split as JSON lines in `out/data`, and how many of its rows are left out.

    Raises:
        DataError: the split is not there, or is not as GLUE distributes it.
    """
    labelled = split == "train" or split in task.dev
    source = source_of(task, split, request.data)
    if source is None:
        raise DataError(
            f"has no {split}.tsv",
            where=Path(request.data) / task.name,
            fix="Get it from gluebenchmark.com.",
        )
    limit = request.limit if split == "train" else None
    place = request.out / "data" / task.name / f"{split}{f'-{limit}' if limit else ''}.jsonl"
    left = _Count()
    return write_rows(
        place, itertools.islice(rows_of(task, source, labelled, left), limit)
    ), left.rows


@dataclass
class _Count:
    rows: int = 0


def rows_of(task: GlueTask, source: str, labelled: bool, left: _Count) -> Iterator[dict[str, str]]:
    """The rows of a split, streamed, each {"text", "text_b", "label"} as far as it has them.

    Raises:
        DataError: a column that the file does not have, or a label that the task does not have.
    """
    raw = (
        _hub_rows(task, source, labelled)
        if source.startswith(HUB)
        else _file_rows(task, source, labelled)
    )
    for where, row in raw:
        if not labelled:
            yield {role: value or "" for role, value in row.items()}
        elif all(value and value.strip() for value in row.values()):
            yield {**row, "label": _checked(task, row["label"] or "", where)}  # type: ignore[dict-item]
        else:
            left.rows += 1


def _checked(task: GlueTask, label: str, where: str) -> str:
    if task.labels and label not in task.labels:
        what = f"{label!r} is no label of {task.name}: {', '.join(task.labels)}"
        raise DataError(what, where=where, fix="Give the file as GLUE distributes it.")
    return label


Raw = Iterator[tuple[str, dict[str, str | None]]]


def _file_rows(task: GlueTask, source: str, labelled: bool) -> Raw:
    layout = task.train if labelled else task.test
    lines = read_lines(Path(source))
    names = next(lines, (1, ""))[1].split("\t") if layout.header else []
    places = {
        role: _number(place, names, source) for role, place in layout.columns(labelled).items()
    }
    for number, line in lines:
        if line:
            cells = line.split("\t")
            yield (
                f"{source}:{number}",
                {role: _cell(cells, place) for role, place in places.items()},
            )


def _number(place: GlueColumn, names: list[str], source: str) -> int:
    if isinstance(place, int):
        return place
    if place not in names:
        what = f"has no column {place!r}; its first line is {', '.join(names)}"
        raise DataError(what, where=source, fix="Give the file as GLUE distributes it.")
    return names.index(place)


def _cell(cells: list[str], place: int) -> str | None:
    return cells[place] if -len(cells) <= place < len(cells) else None


def _hub_rows(task: GlueTask, source: str, labelled: bool) -> Raw:
    names = dict(zip(task.hub_labels, task.labels, strict=False))
    layout = (
        GlueFileLayout("premise", "hypothesis") if source.endswith(":ax:test") else task.hub_layout
    )
    columns = layout.columns(labelled)
    for row in open_table(source).rows:
        values = {role: _text(row.values[str(place)]) for role, place in columns.items()}
        if labelled:
            values["label"] = names.get(values["label"] or "", values["label"])
        yield row.where, values


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
