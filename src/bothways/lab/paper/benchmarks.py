"""The paper's fine-tuning benchmarks: SQuAD, SWAG, CoNLL-2003 and GLUE.

SQuAD 1.1 and 2.0 (Devlin et al. 2018, sections 4.2 and 4.3, tables 2 and 3): three epochs with
batch 32, and two with batch 48; both with a learning rate of 5e-5. The no-answer threshold of 2.0
is the one with the highest F1 on dev.

SWAG (section 4.4, table 4): three epochs, a learning rate of 2e-5, batch 16.

CoNLL-2003 (section 5.3, table 7): each sentence is read with as much of the surrounding document as
fits, without a CRF; the first token of a word gives its tag. The setting is chosen on dev from the
grid of appendix A.3 by one run each; F1 is the mean of five restarts. Use a cased model.

GLUE (section 4.1, table 1): nine tasks as data. Distributed files are split at tabs only: quotation
marks are part of the text and often unbalanced. Each file is rewritten as JSON lines with the same
three names for all tasks, which runs read. Rows that lack a column or a text are skipped and
counted, as is common for QQP. The grid: batch 32, 3 epochs, a learning rate of 5e-5, 4e-5, 3e-5 or
2e-5, chosen on dev. BERT-Large is unstable on small data sets, where the paper restarts it several
times: `seeds`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bothways.core.errors import ConfigError, DataError
from bothways.core.files import make_folder, replace_text
from bothways.data.tables import HUB, open_table
from bothways.data.text_io import read_lines
from bothways.hub.hf_config import read_hf_config
from bothways.hub.resolve import resolve, resolve_run
from bothways.lab.features import LayerChoice
from bothways.lab.features.run import BiLSTMTagger, FeatureConfig, chosen_layers
from bothways.lab.paper import experiment
from bothways.lab.paper.experiment import BenchmarkPlan, Experiment, NotRun, Request
from bothways.lab.sweeps.runs import GRIDS, Grid, write_rows
from bothways.tasks.catalogue import TASKS
from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.columns import require_columns
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns

RATE, BATCH, UNTIL = "training.optimizer.lr", "batch.n", "training.until"
SQUAD: dict[str, Grid] = {
    "v1.1": {RATE: ("5e-5",), BATCH: ("32",), UNTIL: ("3 epochs",)},
    "v2.0": {RATE: ("5e-5",), BATCH: ("48",), UNTIL: ("2 epochs",)},
}
"""The setting of each version, by its name in file names."""
SQUAD_COLUMNS = {
    "1.1 EM": ("v1.1", "em"),
    "1.1 F1": ("v1.1", "f1"),
    "2.0 EM": ("v2.0", "em"),
    "2.0 F1": ("v2.0", "f1"),
}
SWAG = "SWAG"
SWAG_GRID: Grid = {RATE: ("2e-5",), BATCH: ("16",), UNTIL: ("3 epochs",)}
NER = "CoNLL-2003"
NER_FILES = (("eng.train", "train.txt"), ("eng.testa", "valid.txt"), ("eng.testb", "test.txt"))
"""File names of the splits train, dev and test, the shared task's first."""
NER_GRIDS: dict[str, Grid] = {
    "paper": {**GRIDS["paper"], "length": ("512",)},
    "none": {RATE: ("5e-5",), BATCH: ("32",), UNTIL: ("3 epochs",), "length": ("512",)},
}
NER_SEEDS = 5
LAYERS: dict[str, LayerChoice] = {
    "embeddings": "embeddings",
    "second-to-last": "second_to_last",
    "last": "last",
    "sum-last-four": "weighted_last_four",
    "concat-last-four": "concat_last_four",
    "sum-all": "weighted_all",
}
"""The feature-based rows of table 7, by the name of their task."""
TAGGER = BiLSTMTagger()
"""Two layers of 768 units, as in the paper."""


def squad_plan(request: Request) -> BenchmarkPlan:
    """Return the plan for train-v1.1.json, dev-v1.1.json and the same of v2.0."""
    experiments, task = list[Experiment | NotRun](), QuestionAnsweringTask()
    for version in request.chosen(tuple(SQUAD)):
        files = _splits(version, request, *((f"{x}-{version}.json",) for x in ("train", "dev")))
        if isinstance(files, NotRun):
            experiments.append(files)
            continue
        train, dev = files
        if request.limit is not None:
            rows = list[dict[str, Any]]()
            for question in itertools.islice(task.read(train).examples, request.limit):
                row = {"id": question.id, "question": question.question}
                texts, starts = ([answer[x] for answer in question.answers] for x in (0, 1))
                answers = {"text": texts, "answer_start": starts}
                rows.append({**row, "context": question.context, "answers": answers})
            file = request.out / "data" / f"train-{version}-{request.limit}.jsonl"
            train = str(write_rows(file, rows))
        grid = experiment.grid_settings(request, task, SQUAD[version], train, dev)
        experiments.append(Experiment(version, grid, request.seeds or 1))
    return BenchmarkPlan(
        "SQuAD (sections 4.2 and 4.3, tables 2 and 3)",
        tuple(experiments),
        tuple(SQUAD_COLUMNS),
        {experiment.MEASURED: SQUAD_COLUMNS},
        experiment.PUBLISHED["SQUAD"],
        notes=("These runs are on dev, with one model, without TriviaQA: compare such rows.",),
    )


def swag_plan(request: Request) -> BenchmarkPlan:
    """Return the plan for train.csv and val.csv, the file names of SWAG's authors."""
    request.chosen((SWAG,))
    files = _splits(SWAG, request, ("train.csv", "train.jsonl"), ("val.csv", "val.jsonl"))
    task = ChoiceTask()

    def rows(source: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the first examples as rows."""
        for row in itertools.islice(task.read(source).examples, limit):
            yield {"context": row.context, "endings": list(row.endings), "label": row.label}

    if isinstance(files, NotRun):
        entry: Experiment | NotRun = files
    else:
        train, dev = files
        if request.limit is not None:
            # Both are rewritten: the columns of dev are read like those of training.
            data, limit = request.out / "data", request.limit
            train = str(write_rows(data / f"train-{limit}.jsonl", rows(train, limit)))
            dev = str(write_rows(data / "val.jsonl", rows(dev)))
        grid = experiment.grid_settings(request, task, SWAG_GRID, train, dev)
        entry = Experiment(SWAG, grid, request.seeds or 1)
    return BenchmarkPlan(
        "SWAG (section 4.4, table 4)",
        (entry,),
        ("dev",),
        {experiment.MEASURED: {"dev": (SWAG, "accuracy")}},
        experiment.PUBLISHED["SWAG"],
        notes=("The labels of the test set are not public; these runs are scored on dev.",),
    )


def ner_plan(request: Request) -> BenchmarkPlan:
    """Return the plan for files with the word first, the tag last, and -DOCSTART- lines."""
    experiments = tuple(_entities(name, request) for name in request.chosen((NER, *LAYERS)))
    measured: dict[str, Mapping[str, tuple[str, str]]] = {
        entry.name: {"dev": (entry.name, "f1")} for entry in experiments
    }
    if NER in measured:
        measured[NER] = {"dev": (NER, "f1"), "test": (NER, "test/f1")}
    return BenchmarkPlan(
        "Named entities, CoNLL-2003 (section 5.3, table 7)",
        experiments,
        ("dev", "test"),
        {
            f"this run, {'fine-tuned' if name == NER else name}": cells
            for name, cells in measured.items()
        },
        experiment.PUBLISHED["NER"],
        seeds=NER_SEEDS,
    )


def _entities(name: str, request: Request) -> Experiment | NotRun:
    files = _splits(name, request, *NER_FILES[:2])
    if isinstance(files, NotRun):
        return files
    (train, dev), test = files, experiment.find_file(request.data, *NER_FILES[2])
    if request.limit is not None:
        lines = first_sentences((line for _, line in read_lines(Path(train))), request.limit)
        file = request.out / "data" / f"train-{request.limit}.conll"
        make_folder(file.parent)
        replace_text(file, "".join(f"{line}\n" for line in lines))
        train = str(file)
    task = dataclasses.replace(TaggingTask(), context="document")
    seeds = request.seeds or NER_SEEDS
    if name == NER:
        grid = experiment.grid_settings(request, task, NER_GRIDS[request.grid], train, dev)
        return Experiment(NER, grid, seeds, "mean", {} if test is None else {"test": test})
    try:
        encoder = read_hf_config(resolve(resolve_run(request.model))).encoder
        chosen_layers(LAYERS[name], encoder.depth)
    except ConfigError as error:
        return NotRun(name, error.what)
    settings = FeatureConfig(
        model=request.model, train=train, dev=dev, task=task, layers=LAYERS[name], tagger=TAGGER
    )
    # Overrides are settings of fine-tuning.
    notes = (f"without {', '.join(request.overrides)}",) if request.overrides else ()
    return Experiment(name, (settings,), seeds, "mean", notes=notes)


def first_sentences(lines: Iterable[str], count: int) -> Iterator[str]:
    """Yield the lines of the first `count` sentences.

    An empty line ends a sentence; a "-DOCSTART-" line is not one.
    """
    inside, sentence_count = False, 0
    for line in lines:
        yield line
        ends = inside and not line.strip()
        inside = bool(line.strip()) and not line.startswith("-DOCSTART-")
        sentence_count += ends
        if sentence_count == count:
            return


def _splits(name: str, request: Request, *splits: tuple[str, ...]) -> tuple[str, str] | NotRun:
    """Return the files of train and dev; each split has one or more names."""
    train, dev = (experiment.find_file(request.data, *names) for names in splits)
    if train is None or dev is None:
        missing = splits[0 if train is None else 1]
        return NotRun(name, f"no {missing[0]} in {request.data}")
    return train, dev


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        name: name of its folder.
        labels: labels in the files; empty for scores.
        metric: the metric of table 1, which chooses the best run.
        columns: columns of the files as distributed, by role: the name in the first line, or the
            index, negative from the end.
        hub_columns: columns of every split on the Hub; None if they are those of the files.
        hub_labels: the Hub's names of `labels`; empty if they are equal.
        header: whether the first line names the columns.
        dev: labelled splits to score on; the first one chooses.
    """

    name: str
    labels: tuple[str, ...]
    metric: str
    columns: Mapping[str, str | int]
    hub_columns: Mapping[str, str | int] | None = None
    hub_labels: tuple[str, ...] = ()
    header: bool = True
    dev: tuple[str, ...] = ("dev",)


_AS_DISTRIBUTED = "Give the data as GLUE distributes it."
_TWO = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")
_SENTENCES = {"text": "sentence1", "text_b": "sentence2", "label": "label"}
_SENTENCE = {"text": "sentence", "label": "label"}

TASKS_OF_GLUE = (
    GlueTask(
        "MNLI",
        ("contradiction", "entailment", "neutral"),
        "accuracy",
        columns={**_SENTENCES, "label": "gold_label"},
        hub_columns={"text": "premise", "text_b": "hypothesis", "label": "label"},
        dev=("dev_matched", "dev_mismatched"),
    ),
    GlueTask(
        "QQP",
        _TWO,
        "f1",
        columns={"text": "question1", "text_b": "question2", "label": "is_duplicate"},
        hub_columns={"text": "question1", "text_b": "question2", "label": "label"},
        hub_labels=("not_duplicate", "duplicate"),
    ),
    GlueTask(
        "QNLI",
        _ENTAILED,
        "accuracy",
        columns={"text": "question", "text_b": "sentence", "label": "label"},
    ),
    GlueTask("SST-2", _TWO, "accuracy", _SENTENCE, hub_labels=("negative", "positive")),
    GlueTask(
        "CoLA",
        _TWO,
        "mcc",
        columns={"text": 3, "label": 1},
        hub_columns=_SENTENCE,
        hub_labels=("unacceptable", "acceptable"),
        header=False,
    ),
    GlueTask("STS-B", (), "spearman", {"text": -3, "text_b": -2, "label": -1}, _SENTENCES),
    GlueTask(
        "MRPC",
        _TWO,
        "f1",
        columns={"text": "#1 String", "text_b": "#2 String", "label": "Quality"},
        hub_columns=_SENTENCES,
        hub_labels=("not_equivalent", "equivalent"),
    ),
    GlueTask("RTE", _ENTAILED, "accuracy", _SENTENCES),
    GlueTask("WNLI", _TWO, "accuracy", _SENTENCES, hub_labels=("not_entailment", "entailment")),
)
"""The tasks in the order of table 1, then WNLI."""

RATES = {"paper": ("5e-5", "4e-5", "3e-5", "2e-5"), "none": ("2e-5",)}
"""Without the paper's grid, the rate of google-research/bert's examples for GLUE."""

COLUMNS = {
    "MNLI-m": ("MNLI", "accuracy"),
    "MNLI-mm": ("MNLI", "dev_mismatched/accuracy"),
    **{task.name: (task.name, task.metric) for task in TASKS_OF_GLUE[1:]},
}
"""Task and metric of each column of the comparison."""

AVERAGED = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
"""The columns of table 1 whose mean is its average: MNLI counts twice, WNLI is excluded."""

NOTES = (
    "Table 1 is on the test sets, whose labels only the leaderboard has; these runs are on dev, "
    "where scores are higher by chance because dev has chosen the learning rate.",
    "The average is that of table 1: the mean of its nine columns, without WNLI, which the paper "
    "leaves out.",
)


def glue_plan(request: Request) -> BenchmarkPlan:
    """Return the plan; the data that it needs is written to `out/data`.

    Raises:
        DataError: a file differs from GLUE's.
    """
    names = request.chosen(tuple(task.name for task in TASKS_OF_GLUE))
    experiments = list[Experiment | NotRun]()
    for task in (task for task in TASKS_OF_GLUE if task.name in names):
        splits = ("train", *task.dev)
        absent = [split for split in splits if source_of(task, split, request.data) is None]
        if absent:
            folder = Path(request.data) / task.name
            reason = f"no {absent[0]}.tsv (or {absent[0]}.tsv.gz) in {folder}"
            experiments.append(NotRun(task.name, reason))
            continue
        written = {split: write_split(task, split, request) for split in splits}
        dev, *further_dev = task.dev
        columns = TextColumns("text", "text_b" if "text_b" in task.columns else None, "label")
        grid = experiment.grid_settings(
            request,
            TASKS["classify" if task.labels else "regress"]().with_columns(columns),
            {RATE: RATES[request.grid], BATCH: ("32",), UNTIL: ("3 epochs",)},
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
        experiments.append(Experiment(task.name, grid, seeds, "best", scored, notes))
    return BenchmarkPlan(
        "GLUE (section 4.1, table 1)",
        tuple(experiments),
        tuple(COLUMNS),
        {experiment.MEASURED: COLUMNS},
        experiment.PUBLISHED["GLUE"],
        AVERAGED,
        NOTES,
        seeds=None,
    )


def source_of(task: GlueTask, split: str, data: str) -> str | None:
    """Return the file or Hub name of a split, None if the file does not exist."""
    if data.startswith(HUB):
        configuration = task.name.lower().replace("-", "")
        return f"{data}:{configuration}:{split.replace('dev', 'validation')}"
    return experiment.find_file(data, f"{task.name}/{split}.tsv")


def write_split(task: GlueTask, split: str, request: Request) -> tuple[Path, int]:
    """Write a split as JSON lines to `out/data`; return the path and the number of skipped rows.

    Raises:
        DataError: the split differs from GLUE's format.
    """
    source = source_of(task, split, request.data)
    assert source is not None
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
    for location, row in _cells(task, source):
        values = {role: value or "" for role, value in row.items()}
        if not all(value.strip() for value in values.values()):
            skipped.append(location)
            continue
        if task.labels and values["label"] not in task.labels:
            message = f"unknown label {values['label']!r}; {task.name} has {', '.join(task.labels)}"
            raise DataError(message, where=location, fix=_AS_DISTRIBUTED)
        yield values


def _cells(task: GlueTask, source: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield the location of each row and its cells by role, unchanged."""
    if source.startswith(HUB):
        names = dict(zip(task.hub_labels, task.labels, strict=False))
        columns = {role: str(x) for role, x in (task.hub_columns or task.columns).items()}
        for row in open_table(source).rows:
            require_columns([*columns.values()], [*row.values], row.where, _AS_DISTRIBUTED)
            cells = {role: row.values[column] for role, column in columns.items()}
            values = {role: None if cell is None else str(cell) for role, cell in cells.items()}
            yield row.where, {**values, "label": names.get(values["label"] or "", values["label"])}
        return
    lines = read_lines(Path(source))
    head = next(lines, (1, ""))[1].split("\t") if task.header else []
    named = [column for column in task.columns.values() if isinstance(column, str)]
    require_columns(named, head, source, _AS_DISTRIBUTED)
    indices = {role: head.index(x) if isinstance(x, str) else x for role, x in task.columns.items()}
    for number, line in lines:
        if line:
            texts = dict(enumerate(line.split("\t")))
            # An index below 0 is from the end.
            positions = {role: at + len(texts) * (at < 0) for role, at in indices.items()}
            yield f"{source}:{number}", {role: texts.get(at) for role, at in positions.items()}
