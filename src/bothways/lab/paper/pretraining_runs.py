"""The runs of a table on pre-training: one text, one vocabulary, one budget.

Each cell is pre-trained in `cells/NAME`, then fine-tuned with several seeds in `finetuning/NAME`.
Finished runs are not repeated, and an interrupted one continues where it was.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, DataError, os_errors
from bothways.core.files import replace_folder
from bothways.core.progress import SILENT, Progress
from bothways.data.corpus import Corpus, write_corpus
from bothways.data.documents import read_documents
from bothways.data.masking import Masking
from bothways.lab.paper import Scale, benchmarks, experiment, pretraining_tables
from bothways.lab.paper.benchmarks import glue_plan
from bothways.lab.sweeps.runs import Run, Series, SweepFolder, SweepOutcome, run_all
from bothways.objectives.masked_lm import with_masking
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase, load_pretraining
from bothways.pretraining.recipes import paper, short
from bothways.pretraining.run import pretrain
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import WordPiece, train_vocabulary
from bothways.training.checkpoint import checkpoints
from bothways.training.schedules import Duration, Hours, Linear

SMALL_BUDGET = Hours(5 / 60)
"""The budget of a small run without one: bert-5 then takes about an hour on two cores."""

FIRST_MASKS = Masking(0.4)
"""The masks of the first phase of small runs, also where the table's own are others: with [MASK]
alone, a masked LM of minutes remained at word frequencies (docs/log.md, 2026-11-25)."""

EVALUATIONS = 8
"""Evaluations and checkpoints of a pre-training run with a budget."""


@dataclass(frozen=True)
class TableRequest:
    """What the user asks for.

    Attributes:
        data: folder with GLUE's folders, `SQuAD` for questions and `CoNLL-2003` for entities.
        budget: length of each pre-training run; None for the default of the scale.
        tasks: columns to fine-tune for; empty for all columns that have data.
        cells: pre-training runs to make; empty for all.
        seeds: fine-tuning runs of each row and column; None for the scale's.
        pretraining_seeds: pre-training runs of each row, with seeds from that of the settings on.
        limit: maximum number of training examples; None for the scale's.
        overrides: settings of pre-training by dotted path.
        finetuning: settings of fine-tuning by dotted path.
    """

    table: str
    text: tuple[str, ...]
    data: str
    out: Path
    scale: Scale = "small"
    budget: Duration | None = None
    tasks: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    seeds: int | None = None
    pretraining_seeds: int = 1
    limit: int | None = None
    overrides: tuple[str, ...] = ()
    finetuning: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_at_least(
            1, seeds=self.seeds, pretraining_seeds=self.pretraining_seeds, limit=self.limit
        )
        experiment.require_names("table", (self.table,), pretraining_tables.TABLES)
        experiment.require_names("tasks", self.tasks, pretraining_tables.COLUMNS)
        experiment.require_names("cells", self.cells, [cell.name for cell in self.plan.cells])

    @property
    def plan(self) -> pretraining_tables.PretrainTable:
        """The table."""
        return pretraining_tables.TABLES[self.table]

    @property
    def chosen(self) -> tuple[pretraining_tables.PretrainCell, ...]:
        """The pre-training runs to make."""
        return tuple(c for c in self.plan.cells if not self.cells or c.name in self.cells)


@dataclass(frozen=True)
class ScaleSettings:
    """The size of a scale's vocabulary, and how it fine-tunes: settings, seeds, examples at most.

    Attributes:
        answers: further settings for questions, whose contexts are longer than other texts.
    """

    vocabulary: int
    finetuning: tuple[str, ...]
    answers: tuple[str, ...]
    seeds: int
    limit: int | None


SCALES: Mapping[Scale, ScaleSettings] = {
    "small": ScaleSettings(
        8000,
        ("training.optimizer.lr=3e-4", "training.until=3 epochs", "length=64"),
        ("length=128", "task.stride=64"),
        3,
        4000,
    ),
    "paper": ScaleSettings(30_522, (), (), 5, None),
}


def base_settings(request: TableRequest, tokenizer: Tokenizer | None = None) -> PretrainConfig:
    """Return the settings that the cells of a table share.

    Small runs have the recipe `short`, others `paper`. A budget takes the place of its length, and
    the rate then falls linearly to its end, after a warm-up of 6 % or 1 %.

    Args:
        tokenizer: decides the vocabulary; without one it is as large as asked for.
    """
    budget = request.budget
    encoder = pretraining_tables.scaled(request.plan.encoder(), request.scale)
    if tokenizer is None:
        encoder = dataclasses.replace(encoder, vocab=SCALES[request.scale].vocabulary)
    else:
        encoder = fit_to_corpus(encoder, tokenizer)
    if request.scale == "paper":
        base, schedule = paper(encoder), Linear(0.01)
    else:
        base, schedule, budget = short(encoder), Linear(0.06), budget or SMALL_BUDGET
        phases = (
            PretrainPhase(16, 0.4, base.phases[0].segments, FIRST_MASKS),
            PretrainPhase(64, 0.3),
            PretrainPhase(128, 0.3),
        )
        base = dataclasses.replace(base, phases=phases)
    objective = with_masking(request.plan.objective, getattr(base.objective, "masking", None))
    training = base.training
    if budget is not None:
        often = budget.part(1 / EVALUATIONS)
        training = dataclasses.replace(
            training, until=budget, schedule=schedule, evaluate=often, save=often
        )
    base = dataclasses.replace(base, objective=objective, training=training)
    return load_pretraining(base, request.overrides)


@dataclass(frozen=True)
class PretrainRun(Run):
    """A pre-training run of a series; its finished folder keeps the model and no checkpoints."""

    settings: PretrainConfig
    corpus: Corpus = field(repr=False)

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the corpus."""
        return {"corpus": self.corpus.fingerprint}

    def start(self, folder: Path, sweep: SweepFolder, progress: Progress) -> SweepOutcome:
        """Pre-train, or continue."""
        resume, device = sweep.resume, sweep.device
        done = pretrain(
            self.settings, self.corpus, folder, resume=resume, device=device, progress=progress
        )
        for checkpoint in checkpoints(folder):
            shutil.rmtree(checkpoint)
        metric = next(name for name in done.metrics if name.startswith("held-out/loss/"))
        metrics, at = dict(done.metrics), done.progress
        return SweepOutcome(self.name, metrics, (), metric, "lowest", at.steps, at.seconds)


@dataclass(frozen=True)
class RowOutcome:
    """The result of a row.

    Attributes:
        pretrained: its pre-training runs by seed; without metrics where one diverged.
        tasks: the fine-tuning of each model, by the name of the column.
    """

    cell: pretraining_tables.PretrainCell
    pretrained: tuple[SweepOutcome, ...]
    tasks: Mapping[str, tuple[experiment.CellOutcome, ...]] = field(default_factory=dict)

    def values(self, column: str) -> tuple[float, ...]:
        """Return the metric of a column in percent, without runs that diverged.

        With several seeds of pre-training, one value for each model: the mean over its fine-tuning
        runs, which are not independent of each other. Else the value of each fine-tuning run.
        """
        metric = pretraining_tables.COLUMNS[column][1]
        models = [
            [100 * run.metrics[metric] for run in outcome.series.scored]
            for outcome in self.tasks.get(column, ())
        ]
        if len(self.pretrained) == 1:
            return tuple(itertools.chain(*models))
        return tuple(statistics.fmean(runs) for runs in models if runs)

    def held_out(self, metric: str) -> tuple[float, ...]:
        """Return a metric of held-out text from each pre-training run that has it."""
        return tuple(run.metrics[metric] for run in self.pretrained if metric in run.metrics)


def run_table(
    request: TableRequest,
    *,
    device: str = "auto",
    progress: Progress = SILENT,
    on_row: Callable[[list[RowOutcome]], object] = lambda rows: None,
) -> list[RowOutcome]:
    """Make the runs of a table that are not finished; return the rows.

    Args:
        on_row: called with the rows so far, each time one is done.

    Raises:
        ConfigError: an invalid setting, or a run was finished with other settings or other text.
        DataError: the text or the data cannot be read.
        KeyboardInterrupt: a run was interrupted, and has saved.
    """
    vocabulary = SCALES[request.scale].vocabulary
    corpus = corpus_of_text(request.text, request.out, vocabulary, progress)
    base = base_settings(request, corpus.tokenizer)
    sweep_folder = SweepFolder(request.out / "cells", True, device, progress, "pre-training, ")
    series, rows = Series(), list[RowOutcome]()
    expected = len(request.chosen) * request.pretraining_seeds
    for cell in request.chosen:
        tasks = dict[str, tuple[experiment.CellOutcome, ...]]()
        for name, settings in runs_of(request, cell, base):
            series = run_all([PretrainRun(name, settings, corpus)], sweep_folder, series, expected)
            model, out = sweep_folder.out / name / "model", request.out / "finetuning" / name
            scored = cell.finetuned and series.runs[-1].metrics
            for column, entry in experiments_of(request, out, model) if scored else ():
                outcome = experiment.run(entry, out, device=device, progress=progress)
                tasks[column] = (*tasks.get(column, ()), outcome)
        rows.append(RowOutcome(cell, series.runs[-request.pretraining_seeds :], tasks))
        on_row(rows)
    return rows


def runs_of(
    request: TableRequest, cell: pretraining_tables.PretrainCell, base: PretrainConfig
) -> Iterator[tuple[str, PretrainConfig]]:
    """Yield the name and the settings of each pre-training run of a row."""
    settings = cell.settings(base)
    for number in range(request.pretraining_seeds):
        name = f"{cell.name}-seed-{number}" if number else cell.name
        yield name, dataclasses.replace(settings, seed=settings.seed + number)


def experiments_of(
    request: TableRequest, out: Path, model: Path
) -> Iterator[tuple[str, experiment.Experiment]]:
    """Yield the columns that have data with their experiment, whose files are in `out`.

    Raises:
        DataError: none of the columns has data.
    """
    scale, missing = SCALES[request.scale], list[str]()
    for column in request.tasks or request.plan.columns:
        folder, plan = {
            "NER": ("CoNLL-2003", benchmarks.ner_plan),
            "SQuAD": ("SQuAD", benchmarks.squad_plan),
        }.get(column.split(maxsplit=1)[0], ("", glue_plan))
        answers = scale.answers if column.startswith("SQuAD") else ()
        column_request = experiment.Request(
            str(model), str(Path(request.data) / folder), out,
            (pretraining_tables.COLUMNS[column][0],), request.seeds or scale.seeds, "none",
            request.limit or scale.limit, (*scale.finetuning, *answers, *request.finetuning),
        )  # fmt: skip
        (entry,) = plan(column_request).experiments
        if isinstance(entry, experiment.NotRun):
            missing.append(entry.reason)
        else:
            yield column, entry
    if len(missing) == len(request.tasks or request.plan.columns):
        message = f"has no data for any of the columns: {'; '.join(dict.fromkeys(missing))}"
        names = ", ".join(pretraining_tables.COLUMNS)
        fix = f"Add them, or name other columns by --tasks: {names}."
        raise DataError(message, where=request.data, fix=fix)


SIZE = "size.txt"
"""The file of the tokenizer's folder with the size that its vocabulary was trained for."""


def corpus_of_text(
    files: Sequence[str], folder: Path, vocabulary: int, progress: Progress = SILENT
) -> Corpus:
    """Train a WordPiece vocabulary, build the corpus, or open what an earlier call has built.

    Args:
        files: text files, folders or patterns, as for `read_documents`.
        folder: gets `tokenizer/` and `corpus/`.
        vocabulary: tokens of the vocabulary; of little text there are fewer.

    Raises:
        DataError: a file cannot be read.
        ConfigError, ResourceError: the folder has the corpus of other files or another vocabulary,
            or cannot be written.
    """
    documents = read_documents(files)  # checks the names
    path, size = folder / "tokenizer", str(vocabulary)
    if (path / SIZE).exists() and (trained := (path / SIZE).read_text("utf8")) != size:
        message = f"was trained for {trained} tokens, not {size}"
        raise ConfigError(message, where=path, fix="Choose another folder.")
    if not path.exists():
        progress.stage("learning the vocabulary")
        texts = (document.text for document in read_documents(files))
        tokenizer = train_vocabulary(texts, WordPiece(vocabulary))
        with os_errors(folder, "Choose another folder."):
            folder.mkdir(parents=True, exist_ok=True)
        with replace_folder(path) as hidden:
            tokenizer.save(hidden)
            (hidden / SIZE).write_text(size, "utf8")
    return write_corpus(documents, Tokenizer.load(path), folder / "corpus", progress=progress)
