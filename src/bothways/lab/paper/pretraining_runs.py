"""The runs of a table on pre-training: one text, one vocabulary, one budget.

Each cell is pre-trained in `cells/NAME`, then each of its rows is fine-tuned with several seeds in
`finetuning/ROW`. Finished runs are not repeated, and an interrupted one continues where it was.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from typing_extensions import assert_never

from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, DataError
from bothways.core.progress import SILENT, Progress
from bothways.data.corpus import Corpus
from bothways.data.masking import Masking
from bothways.data.sentence_pairs import NextSentence
from bothways.hub.model_folder import load_model
from bothways.lab.paper import glue, ner, pretraining_tables, squad
from bothways.lab.paper.cells import CellOutcome
from bothways.lab.paper.cells import run as run_experiment
from bothways.lab.paper.experiment import BenchmarkPlan, Experiment, NotRun, Request
from bothways.lab.sweeps.runs import Series, SweepFolder, SweepOutcome, run_all
from bothways.model.heads import MaskedHead
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence, with_masking
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import GeneratorObjective
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase, load_config
from bothways.pretraining.evaluation import evaluate_on_corpus
from bothways.pretraining.from_text import corpus_of_text
from bothways.pretraining.recipes import paper, short
from bothways.pretraining.run import pretrain
from bothways.text.tokenizer import Tokenizer
from bothways.training.checkpoint import checkpoints
from bothways.training.durations import Duration, Hours, part_of
from bothways.training.optimizers import AdamW, BertAdam, peak_rate
from bothways.training.schedules import Constant, Linear

SMALL_BUDGET = Hours(5 / 60)
"""The budget of a small run without one: bert-5 then takes about an hour on two cores."""

FIRST_MASKS = Masking(0.4)
"""The masks of the first phase of small runs, also where the table's own are others: with [MASK]
alone, a masked LM of minutes remained at word frequencies (docs/log.md, 2026-11-25)."""

FIRST_RUN = "first"
"""The run of masked LM that small runs with a generator begin with (`masked_lm_first`)."""

EVALUATIONS = 8
"""Evaluations and checkpoints of a pre-training run with a budget."""

PROBE_TOKENS = 200_000
"""Tokens of the pairs on which a pair head is scored, at least: 1,600 pairs of 128 tokens, so that
the standard error of an accuracy is about 1.2 points."""


@dataclass(frozen=True)
class TableRequest:
    """What the user asks for.

    Attributes:
        table: name of the table.
        text: text files, folders or patterns.
        data: folder with GLUE's folders, `SQuAD` for questions and `CoNLL-2003` for entities.
        out: folder for runs and results.
        scale: scale of models, data and settings.
        budget: length of each pre-training run; None for the default of the scale.
        tasks: columns to fine-tune for; empty for all columns that have data.
        cells: pre-training runs to make; empty for all.
        seeds: fine-tuning runs of each row and column; None for the scale's.
        limit: maximum number of training examples; None for the scale's.
        overrides: settings of pre-training by dotted path.
        finetuning: settings of fine-tuning by dotted path.
    """

    table: str
    text: tuple[str, ...]
    data: str
    out: Path
    scale: pretraining_tables.Scale = "small"
    budget: Duration | None = None
    tasks: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    seeds: int | None = None
    limit: int | None = None
    overrides: tuple[str, ...] = ()
    finetuning: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_at_least(1, seeds=self.seeds, limit=self.limit)
        _check_names("table", (self.table,), tuple(pretraining_tables.TABLES))
        _check_names("tasks", self.tasks, tuple(pretraining_tables.COLUMNS))
        _check_names("cells", self.cells, tuple(cell.name for cell in self.plan.cells))

    @property
    def plan(self) -> pretraining_tables.PretrainTable:
        """The table."""
        return pretraining_tables.TABLES[self.table]

    @property
    def chosen(self) -> tuple[pretraining_tables.PretrainCell, ...]:
        """The pre-training runs to make."""
        return tuple(c for c in self.plan.cells if not self.cells or c.name in self.cells)

    @property
    def rows(self) -> tuple[pretraining_tables.ResultRow, ...]:
        """The rows of these runs."""
        names = {cell.name for cell in self.chosen}
        return tuple(row for row in self.plan.rows if row.cell in names)

    @property
    def vocabulary(self) -> int:
        """Tokens of the vocabulary."""
        return {"small": 8000, "paper": 30_522}[self.scale]


def _check_names(option: str, names: Many[str], choices: Many[str]) -> None:
    for name in names:
        if name not in choices:
            raise ConfigError(
                f"unknown name {name!r}; there are: {', '.join(choices)}", where=option
            )


@dataclass(frozen=True)
class ScaleSettings:
    """How a scale fine-tunes: settings by dotted path, seeds, and training examples at most.

    Attributes:
        answers: further settings for questions, whose contexts are longer than other texts.
    """

    finetuning: tuple[str, ...]
    answers: tuple[str, ...]
    seeds: int
    limit: int | None


SCALES: Mapping[pretraining_tables.Scale, ScaleSettings] = {
    "small": ScaleSettings(
        ("training.optimizer.lr=3e-4", "training.until=3 epochs", "length=64"),
        ("length=128", "task.stride=64"),
        3,
        4000,
    ),
    "paper": ScaleSettings((), (), 5, None),
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
        encoder = dataclasses.replace(encoder, vocab=request.vocabulary)
    else:
        encoder = fit_to_corpus(encoder, tokenizer)
    match request.scale:
        case "small":
            base, budget = short(encoder), budget or SMALL_BUDGET
            phases = (
                PretrainPhase(16, 0.4, base.phases[0].segments, FIRST_MASKS),
                PretrainPhase(64, 0.3),
                PretrainPhase(128, 0.3),
            )
            base, schedule = dataclasses.replace(base, phases=phases), Linear(0.06)
        case "paper":
            base, schedule = paper(encoder), Linear(0.01)
        case _:
            assert_never(request.scale)
    rate = getattr(base.objective, "masking", None)
    objective = with_masking(request.plan.objective, rate)
    training = base.training
    if budget is not None:
        training = dataclasses.replace(
            training,
            until=budget,
            schedule=schedule,
            evaluate=part_of(budget, 1 / EVALUATIONS),
            save=part_of(budget, 1 / EVALUATIONS),
        )
    base = dataclasses.replace(base, objective=objective, training=training)
    return load_config(base, request.overrides)


def masked_lm_first(settings: PretrainConfig) -> tuple[PretrainConfig, PretrainConfig]:
    """Return masked LM for the first phase of a run with a generator, and the rest of the run.

    From random weights a second network learned nothing within minutes: neither from a generator
    at word frequencies, nor from one that knew as much as the network itself could learn. After
    masked LM it detects what a narrow, new generator replaces; this begins with the tables of the
    model (docs/log.md, 2026-11-25).
    """
    assert isinstance(settings.objective, GeneratorObjective)
    phase, *later_phases = settings.phases
    training, remaining_share = settings.training, 1 - phase.share
    first_settings = dataclasses.replace(
        settings,
        objective=MaskedLM(masking=FIRST_MASKS),
        phases=(dataclasses.replace(phase, share=1.0),),
        evaluation_masking=Masking(),
        training=dataclasses.replace(
            training, until=part_of(training.end, phase.share), schedule=Constant(0.15)
        ),
    )
    optimizer = training.optimizer
    if isinstance(optimizer, AdamW | BertAdam):
        optimizer = dataclasses.replace(optimizer, lr=peak_rate(optimizer) / 2)
    second = dataclasses.replace(
        settings,
        objective=dataclasses.replace(settings.objective, sharing="disentangled"),
        phases=tuple(
            dataclasses.replace(later_phase, share=later_phase.share / remaining_share)
            for later_phase in later_phases
        ),
        training=dataclasses.replace(
            training,
            until=part_of(training.end, remaining_share),
            optimizer=optimizer,
        ),
    )
    return first_settings, second


@dataclass(frozen=True)
class PretrainRun:
    """A pre-training run of a series; its finished folder keeps the model and no checkpoints.

    Attributes:
        after: the name of the run in the same folder from whose model it starts; None for random
            weights.
    """

    name: str
    settings: PretrainConfig
    after: str | None
    corpus: Corpus = field(repr=False)

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the corpus."""
        return {"corpus": self.corpus.fingerprint}

    def start(
        self, folder: Path, *, resume: bool, device: str, progress: Progress
    ) -> SweepOutcome | None:
        """Pre-train, or continue."""
        settings = self.settings
        if self.after is not None:
            assert isinstance(settings.objective, GeneratorObjective)
            heads = [head.kind for head in settings.objective.model_heads if head != MaskedHead()]
            start = str(folder.parent / self.after / "model")
            settings = dataclasses.replace(settings, start=start, fresh=tuple(heads))
        done = pretrain(
            settings, self.corpus, folder, resume=resume, device=device, progress=progress
        )
        if not done.finished(self.settings.training):
            return None
        for checkpoint in checkpoints(folder):
            shutil.rmtree(checkpoint)
        metric = next(name for name in done.metrics if name.startswith("held-out/loss/"))
        at = done.progress
        return SweepOutcome(
            self.name, dict(done.metrics), (), metric, "lowest", at.steps, at.seconds
        )


@dataclass(frozen=True)
class RowOutcome:
    """The result of a row.

    Attributes:
        pretrained: its pre-training run; without metrics if it diverged.
        probes: accuracies on pairs, by the title of the column.
        tasks: the fine-tuning runs, by the name of the column.
    """

    row: pretraining_tables.ResultRow
    pretrained: SweepOutcome
    probes: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, CellOutcome] = field(default_factory=dict)

    def values(self, column: str) -> tuple[float, ...]:
        """Return the metric of each seed in percent, without runs that diverged."""
        outcome, metric = self.tasks.get(column), pretraining_tables.COLUMNS[column][1]
        scored = () if outcome is None else outcome.series.scored
        return tuple(100 * run.metrics[metric] for run in scored)


def planned(
    request: TableRequest, base: PretrainConfig
) -> Iterator[tuple[str, PretrainConfig, str | None]]:
    """Yield name and settings of each run in order, and the name of the run that it starts from."""
    begun = False
    for cell in request.chosen:
        settings, previous = cell.settings(base), None
        small = request.scale == "small" and len(settings.phases) > 1
        if small and isinstance(settings.objective, GeneratorObjective):
            first_settings, settings = masked_lm_first(settings)
            previous = FIRST_RUN
            if not begun:
                yield FIRST_RUN, first_settings, None
            begun = True
        yield cell.name, settings, previous


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
    corpus = corpus_of_text(request.text, request.out, request.vocabulary, progress)
    base = base_settings(request, corpus.tokenizer)
    plan = planned(request, base)
    runs = [PretrainRun(name, settings, previous, corpus) for name, settings, previous in plan]
    sweep_folder = SweepFolder(request.out / "cells", True, device, progress, "pre-training, ")
    series, rows = Series(), list[RowOutcome]()
    for run in runs:
        series = run_all([run], sweep_folder, series, expected=len(runs))
        if not series.finished:
            raise KeyboardInterrupt
        pretrained, folder = series.runs[-1], sweep_folder.out / run.name / "model"
        probes: dict[str, float] = {}
        if pretrained.metrics:
            probes = _probes(request.plan, folder, run.settings, corpus, device)
        for row in (row for row in request.rows if row.cell == run.name):
            tasks = dict[str, CellOutcome]()
            experiments = experiments_of(request, row, folder) if pretrained.metrics else ()
            for column, experiment in experiments:
                out = finetuning_folder(request, row)
                tasks[column] = run_experiment(experiment, out, device=device, progress=progress)
            rows.append(RowOutcome(row, pretrained, probes, tasks))
            on_row(_in_order(request, rows))
    return _in_order(request, rows)


def _in_order(request: TableRequest, rows: Many[RowOutcome]) -> list[RowOutcome]:
    return sorted(rows, key=lambda done: request.rows.index(done.row))


def finetuning_folder(request: TableRequest, row: pretraining_tables.ResultRow) -> Path:
    """Return the folder of a row's fine-tuning runs."""
    return request.out / "finetuning" / f"{row.cell}-{row.method.lower()}"


def experiments_of(
    request: TableRequest, row: pretraining_tables.ResultRow, model: Path
) -> Iterator[tuple[str, Experiment]]:
    """Yield the columns that have data with their experiment.

    A BiLSTM has columns of labels alone; next to rows that are fine-tuned it may have none.

    Raises:
        DataError: none of the columns has data.
    """
    experiments, missing = list[tuple[str, Experiment]](), list[str]()
    for column in request.tasks or request.plan.columns:
        entry = _experiment(request, row, model, column)
        if isinstance(entry, NotRun):
            missing.append(entry.reason)
        else:
            experiments.append((column, entry))
    other_method = row.method == "BiLSTM" and any(r.method == "fine-tuned" for r in request.rows)
    if not experiments and not other_method:
        message = f"has no data for any of the columns: {'; '.join(dict.fromkeys(missing))}"
        fix = (
            f"Add them, or name other columns by --tasks: {', '.join(pretraining_tables.COLUMNS)}."
        )
        raise DataError(message, where=request.data, fix=fix)
    yield from experiments


def _experiment(
    request: TableRequest, row: pretraining_tables.ResultRow, model: Path, column: str
) -> Experiment | NotRun:
    """Return the experiment of a row and a column."""
    scale, task = SCALES[request.scale], pretraining_tables.COLUMNS[column][0]
    folder, plan_of = _benchmark(column)
    if row.method == "BiLSTM" and folder:
        return NotRun(column, "a BiLSTM is for labels of texts")
    overrides = (
        *scale.finetuning,
        *(scale.answers if column.startswith("SQuAD") else ()),
        *request.finetuning,
    )
    if row.method == "BiLSTM":
        overrides = (*overrides, f"task.lstm={load_model(model).model.config.width}")
    column_request = Request(
        str(model),
        str(Path(request.data) / folder),
        finetuning_folder(request, row),
        (task,),
        request.seeds or scale.seeds,
        "none",
        request.limit or scale.limit,
        overrides,
    )
    (entry,) = plan_of(column_request).experiments
    return entry


def _benchmark(column: str) -> tuple[str, Callable[[Request], BenchmarkPlan]]:
    """Return the folder of a column in the data, "" for GLUE's, and what plans its runs."""
    match column.split(maxsplit=1)[0]:
        case "NER":
            return "CoNLL-2003", ner.ner_plan
        case "SQuAD":
            return "SQuAD", squad.squad_plan
        case _:
            return "", glue.glue_plan


def _probes(
    table: pretraining_tables.PretrainTable,
    model: Path,
    settings: PretrainConfig,
    corpus: Corpus,
    device: str,
) -> dict[str, float]:
    """Return the accuracy of a pair head on each kind of pairs, in percent; {} without a head.

    With each comes the accuracy of the most frequent answer: of next-sentence pairs more than half
    are random, since the last sentences of a document have no next one.
    """
    if not table.probes or "pair" not in load_model(model).model.heads:
        return {}
    _, held_out = corpus.split(settings.held_out, settings.seed)
    max_length = max(phase.length for phase in settings.phases)

    def accuracies(title: str, probe: pretraining_tables.Probe) -> dict[str, float]:
        """Return the accuracies on a kind of pairs of held-out text."""
        objective: Objective = (
            MaskedLMSentenceOrder() if probe == "order" else MaskedLMNextSentence(NextSentence())
        )
        metrics = evaluate_on_corpus(
            str(model),
            corpus,
            length=max_length,
            tokens=max(PROBE_TOKENS, settings.evaluation_tokens),
            device=device,
            objective=objective,
            documents=np.asarray(held_out),
        )
        always = metrics["majority/accuracy/pair"]
        return {title: 100 * metrics["accuracy/pair"], f"{title}, one answer": 100 * always}

    return {
        name: value
        for title, probe in table.probes
        for name, value in accuracies(title, probe).items()
    }
