"""The commands of `bothways.lab`: quickstart, features, bench, babylm and reproduce."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

import bothways
from bothways.cli import options
from bothways.core.config import reader as configs
from bothways.core.config.values import require_at_least
from bothways.core.errors import require
from bothways.core.progress import error_console, terminal_progress
from bothways.core.terminal import output_console, say, write_stderr
from bothways.lab.features import LayerChoice
from bothways.lab.paper import Scale

if TYPE_CHECKING:
    from bothways.core.report.sections import TableSection
    from bothways.lab.paper.run import Benchmark


@options.documented_by(bothways.demo)
def demo(folder: Path) -> None:
    """Write small labelled data of every task, and list commands to try with it."""
    from bothways.lab.demo import COMMANDS

    files = bothways.demo(folder)
    write_stderr(f"{len(files)} files are in {folder}. In this folder, these commands run:")
    for line in (f"cd {shlex.quote(str(folder))}", *(f"bothways {line}" for line in COMMANDS)):
        say(output_console(), line)


def quickstart(
    *,
    minutes: float | None = None,
    out: Path = Path("quickstart"),
    corpus: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
) -> None:
    """Pre-train a small BERT on text of this machine, and measure the gain of pre-training.

    Trains a vocabulary, builds a corpus, pre-trains a BERT, fine-tunes it on a labelled task and
    compares it with the same architecture from random weights. Writes a table and OUT/report.html.
    Nothing is downloaded.

    Parameters
    ----------
    minutes
        Total time, of which pre-training gets the most. Default: as long as a model needs to gain,
        at most 8.
    out
        Folder for the corpus, the models and the report: new, empty, or of an interrupted
        quickstart, which is resumed.
    corpus
        Text files, folders or globs, as for `bothways corpus build`; default: the documentation
        inside this Python installation.
    """
    from bothways.core.report.html import write_html
    from bothways.core.report.terminal import show
    from bothways.lab.quickstart import quickstart_report, run_quickstart

    require("report", "the quickstart", "jinja2", "matplotlib", "sklearn")
    require_at_least(0.5, minutes=minutes)
    with options.resumable(out, device="auto") as progress:
        result = run_quickstart(out, minutes=minutes, files=corpus, progress=progress)
    report = quickstart_report(result)
    write_html(report, out / "report.html")
    show(report, output_console())
    write_stderr(f"Report with curves: {out / 'report.html'}")


@options.documented_by(bothways.finetune)
def features(
    model: str,
    train: str,
    *overrides: str,
    dev: str,
    layers: LayerChoice = "concat_last_four",
    out: Path = Path("features"),
    json: options.JsonOutput = False,
    device: options.Device = "auto",
) -> None:
    """Train a BiLSTM tagger on frozen word vectors of a model, and score it.

    Vectors are computed once and stored; another choice of layers computes only missing ones. The
    fine-tuned counterpart is bothways finetune --task tag.

    Parameters
    ----------
    train
        Words with tags: CoNLL columns, .jsonl, .parquet, or hub:owner/name:configuration:split.
    overrides
        Settings by dotted path, such as tagger.hidden=256 training.until="10 epochs" seed=1.
    dev
        Data of the same kind for choosing the best weights, or its share of TRAIN, such as 20%.
    layers
        Layers of the encoder and their combination: the choices of the paper's table 7.
    out
        The folder of the vectors: words × layers × width × 4 bytes.
    """
    from bothways.lab.features.run import FeatureConfig, fit_features, prepare_features

    settings = configs.load(
        FeatureConfig,
        base=FeatureConfig(model=model, train=train, dev=dev, layers=layers),
        overrides=options.settings_for(features, overrides),
    )
    with options.resumable(out, "What was read to its end", device) as progress:
        data = prepare_features(settings, out, [settings.layers], device=device, progress=progress)
        done = fit_features(data, settings, device=device, progress=progress)
    if json:
        print(dumps({"layers": layers, "metrics": dict(done.metrics), "shares": list(done.shares)}))
    else:
        values, count = dict(done.metrics), len(done.shares)
        for layer, share in enumerate(done.shares, 1):
            values[f"share of layer {layer} of {count}"] = share
        title, head = f"Frozen features: {done.layers}", "metric on the dev data"
        options.show_tables(options.metric_table(title, {"value": values}, head))


def bench(
    work: Literal["small", "base", "long", "large", "all"] | None = None,
    *,
    rounds: int = 7,
    device: options.Device = "auto",
) -> None:
    """Time a pre-training step of this library and of transformers.

    Parameters
    ----------
    work
        small: 4 layers × 256, 16 × 128 tokens; base: BERT-base, 16 × 128 (minutes on a CPU);
        long: BERT-base, 64 × 512; large: BERT-large, 32 × 512; all: small and base on a CPU,
        all but small on a GPU. Default: small, on a GPU long. The vocabulary has 30,522 tokens. A
        server is measured by python benchmarks/serving.py.
    rounds
        Number of rounds per contender; medians are compared.
    """
    from bothways.core.report.terminal import render_report
    from bothways.core.runtime.devices import choose_device
    from bothways.lab.bench import race

    require_at_least(1, rounds=rounds)
    console, target = output_console(), choose_device(device)
    suited = race.SUITED[target.type]
    for name in suited if work == "all" else [work or suited[0]]:
        load = race.WORKLOADS[name]
        with terminal_progress() as progress:
            progress.stage(f"measuring {load.name}, {rounds} rounds in turns")
            table = race.measure(load, rounds, target)
        console.print(render_report(table))
    console.print(race.hardware(target), style="dim")


def babylm(
    model: str,
    data: Path,
    *settings: str,
    out: Path | None = None,
    json: options.JsonOutput = False,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
) -> None:
    """Score the checkpoints of a run on BabyLM's evaluation data.

    Accuracies on minimal pairs, entity tracking and EWoK, and the surprisal of words in contexts,
    which shows when a word is learned.

    Parameters
    ----------
    model
        The folder of a run with chck_1M, chck_2M …, or one model.
    data
        The evaluation's data, such as evaluation_data/fast_eval: folders with .jsonl files, and
        .json files of words with their contexts.
    settings
        Settings of the likelihood, such as variant=both.
    out
        Folder for results.json and surprisal.json.
    """
    from bothways.lab.babylm import evaluate_run

    with terminal_progress(announced=options.kernels(device)) as progress:
        results = evaluate_run(
            model, data, out, settings, device=device, precision=precision, progress=progress
        )
    if json:
        tree = {name: scores.to_json() for name, scores in results.items()}
        print(dumps(tree, ensure_ascii=False))
        return
    names = list(dict.fromkeys(name for scores in results.values() for name in scores.metrics))
    rows = [
        [
            checkpoint,
            *(
                f"{value:.3f}" if name == "surprisal" else f"{100 * value:.1f}"
                for name, value in scores.metrics.items()
            ),
        ]
        for checkpoint, scores in results.items()
    ]
    title = f"{model} on {data}: accuracy in %, surprisal in nats"
    options.show_tables(options.CommandTable(title, ["checkpoint", *names], rows))


@Parameter(name="*")
@dataclass(frozen=True)
class BenchmarkOptions:
    """Options of the benchmarks.

    Parameters
    ----------
    model
        A model folder, the folder of a run, or a Hub id.
    data
        Folder of the benchmark as distributed, or for GLUE hub:owner/name, a data set on the Hub.
    out
        Folder for runs, results.json and report.html.
    tasks
        Comma-separated names of tasks; default: all with data.
    seeds
        Runs per setting; default: as in the paper.
    grid
        paper: every setting of the paper's grid; none: one setting.
    limit
        Maximum number of training examples; the report states it.
    dry_run
        Only print the cost.
    """

    model: str
    data: str
    out: Path = Path("reproduced")
    tasks: str | None = None
    seeds: int | None = None
    grid: Literal["paper", "none"] = "paper"
    limit: int | None = None
    dry_run: bool = False
    device: options.Device = "auto"


def glue(*overrides: options.PaperSettings, settings: BenchmarkOptions) -> None:
    """Fine-tune on GLUE as in table 1 of the paper and compare.

    Prints the cost first: runs, examples, tokens, and time on this machine. The same command
    resumes an interrupted run.
    """
    _reproduce("glue", overrides, settings)


def squad(*overrides: options.PaperSettings, settings: BenchmarkOptions) -> None:
    """Fine-tune on SQuAD as in tables 2 and 3 of the paper and compare; see `reproduce glue`."""
    _reproduce("squad", overrides, settings)


def swag(*overrides: options.PaperSettings, settings: BenchmarkOptions) -> None:
    """Fine-tune on SWAG as in table 4 of the paper and compare; see `reproduce glue`."""
    _reproduce("swag", overrides, settings)


def ner(*overrides: options.PaperSettings, settings: BenchmarkOptions) -> None:
    """Fine-tune and read frozen features on CoNLL-2003 as in table 7; see `reproduce glue`."""
    _reproduce("ner", overrides, settings)


def _reproduce(
    benchmark: Benchmark, overrides: tuple[str, ...], settings: BenchmarkOptions
) -> None:
    """Run a benchmark and print the comparison."""
    from bothways.core.report.terminal import render_report, show
    from bothways.lab.paper.experiment import Request
    from bothways.lab.paper.run import reproduce

    out, device = settings.out, settings.device
    request = Request(
        settings.model,
        settings.data,
        out,
        _names(settings.tasks),
        settings.seeds,
        settings.grid,
        settings.limit,
        overrides,
    )
    costs: list[TableSection] = []  # of a dry run, whose result they are

    def print_cost(table: TableSection) -> None:
        error_console().print(render_report(table))  # above the bar

    with options.resumable(out, device=None if settings.dry_run else device) as progress:
        done = reproduce(
            benchmark,
            request,
            dry_run=settings.dry_run,
            device=device,
            progress=progress,
            on_cost=costs.append if settings.dry_run else print_cost,
        )
    for table in costs:
        output_console().print(render_report(table))
    if done is None:
        return
    show(done, output_console())
    for file in (out / "results.json", out / "report.html"):
        write_stderr(f"Written: {file}")


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def pretraining(  # noqa: PLR0913 – one option per question
    table: str,
    /,
    *overrides: str,
    text: Annotated[list[str], Parameter(consume_multiple=True, negative=())],
    data: str,
    out: Path = Path("reproduced"),
    scale: Scale | None = None,
    budget: str | None = None,
    cells: str | None = None,
    tasks: str | None = None,
    seeds: int | None = None,
    pretraining_seeds: int = 1,
    limit: int | None = None,
    finetuning: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    dry_run: bool = False,
    device: options.Device = "auto",
) -> None:
    """Pre-train every row of a published table on the same text and budget, fine-tune, compare.

    Prints the cost first. The same command resumes an interrupted run.

    Parameters
    ----------
    table
        bert-5 (tasks), bert-6 (sizes), bert-8 (masks), masking-rate, roberta-1 (static masks),
        roberta-2 (input formats), albert-sentences, albert-sharing, electra or steps.
    overrides
        Settings of every pre-training run by dotted path, such as training.optimizer.lr=5e-4.
    text
        Text files, folders or patterns to pre-train on.
    data
        Folder with GLUE's folders as distributed, SQuAD for questions, CoNLL-2003 for entities.
    out
        Folder for runs, results.json and report.html.
    scale
        small: a third of the layers and a quarter of the width; paper: the published sizes and
        settings. By default small without a GPU.
    budget
        Length of each pre-training run: "20 minutes" gives all equal time, "5000 steps" equal
        updates, "1e9 tokens" equal text. Default: 5 minutes (small), or the paper's.
    cells
        Comma-separated names of pre-training runs; default: all.
    tasks
        Comma-separated columns: MNLI-m, QNLI, QQP, MRPC, SST-2, CoLA, STS-B, RTE, SQuAD 1.1 F1,
        SQuAD 2.0 F1, NER, NER features. Default: all columns that have data.
    seeds
        Fine-tuning runs of each row and column; default: 3 (small) or 5.
    pretraining_seeds
        Pre-training runs of each row; from 2 on, spread and significance are over these.
    limit
        Maximum number of training examples; default: 4000 (small) or all.
    finetuning
        Settings of fine-tuning by dotted path.
    dry_run
        Only print the cost.
    """
    from bothways.core.report.html import write_html
    from bothways.core.report.terminal import render_report, show
    from bothways.core.runtime.devices import choose_device
    from bothways.lab.paper.pages import table_report, write_table_results
    from bothways.lab.paper.pretraining_runs import TableRequest, run_table
    from bothways.lab.paper.run import table_cost
    from bothways.training.schedules import duration

    default_scale: Scale = "small" if choose_device(device).type == "cpu" else "paper"
    request = TableRequest(
        table, tuple(text), data, out, scale or default_scale,
        None if budget is None else duration(budget),
        _names(tasks), _names(cells), seeds, pretraining_seeds, limit, overrides, finetuning,
    )  # fmt: skip
    cost = render_report(table_cost(request, device=device))
    (output_console() if dry_run else error_console()).print(cost)
    if dry_run:
        return
    with options.resumable(out, device=device) as progress:
        rows = run_table(
            request,
            device=device,
            progress=progress,
            on_row=lambda rows: write_table_results(request, rows),
        )
    report = table_report(request, rows, device=device)
    write_html(report, out / "report.html")
    show(report, output_console())
    for file in (out / "results.json", out / "report.html"):
        write_stderr(f"Written: {file}")
