"""`bothways pretrain | adapt | finetune | distil | sweep`: commands that train a model.

`plan` forecasts the cost of a pre-training run before it begins.
"""

from __future__ import annotations

import math
import shlex
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import bothways
from bothways.cli import options
from bothways.core.config.reader import replaced_members
from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, require_unset
from bothways.core.progress import terminal_progress
from bothways.core.runtime.cards import card_named
from bothways.core.terminal import output_console, quantity, say, time_text, write_stderr
from bothways.finetuning import FinetuneRecipe
from bothways.pretraining import DistilRecipe, PretrainRecipe
from bothways.training_runs import check_shape, finetune_settings

if TYPE_CHECKING:
    from bothways.finetuning.run import FinetuneResult
    from bothways.lab.sweeps.runs import Series
    from bothways.pretraining.config import PretrainConfig
    from bothways.pretraining.forecast import RunForecast
    from bothways.pretraining.run import PretrainResult


@options.documented_by(bothways.pretrain)
def pretrain(  # noqa: PLR0913 – one option per question a run answers
    corpus: str,
    *more: str,
    out: Path | None = None,
    model: str | None = None,
    recipe: PretrainRecipe | None = None,
    start: str | None = None,
    find_lr: bool = False,
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    config: Path | None = None,
    resume: bool = False,
    device: options.Device = "auto",
) -> None:
    """Pre-train an encoder on a corpus with masked LM and next sentence prediction, or on full
    sentences as RoBERTa.

    Several GPUs or machines: torchrun --nproc-per-node=N -m bothways pretrain …

    Parameters
    ----------
    corpus
        A folder made by `bothways corpus build`.
    more
        Further corpora, built with the same tokenizer, and settings by dotted path, such as
        objective.masking.rate=0.2, or by a common name, such as lr=5e-4. Several corpora are mixed
        by mixture.alpha (0.7; 1 reads them by size, 0 equally), or by weights:
        mixture.kind=by_weight mixture.weights.NAME=0.9, with the names of their folders.
    find_lr
        Only train for 200 steps, each with a higher learning rate, and suggest one for lr=.
    """
    corpora, words = options.split_inputs(more)
    sources = [corpus, *corpora] if corpora else corpus
    settings = options.settings_for(bothways.pretrain, words, until=end.duration)
    settings |= {"start": start, "recipe": recipe, "config": config, "device": device}
    if find_lr:
        fix = "Leave it out, or --find-lr."
        require_unset("is for a run, and --find-lr saves none", fix, out=out, resume=resume or None)
        with terminal_progress() as progress:
            result = bothways.find_lr(sources, model, progress=progress, **settings)
        # The smoothed losses, a line for each half decade.
        rows, smoothed = list[list[str]](), result.smoothed
        for rate, loss in zip(result.rates, smoothed, strict=True):
            if not rows or rate >= 10**0.5 * float(rows[-1][0]):
                rows.append([f"{rate:.1e}", f"{loss:.3f}"])
        title = f"{quantity(len(smoothed), 'step(s)')}, losses smoothed"
        options.show_tables(options.CommandTable(title, ["rate", "loss"], rows))
        lowest = result.rates[smoothed.index(min(smoothed))]
        suggestion = f"A tenth of it still falls: lr={result.suggestion:.1e}"
        say(output_console(), f"Lowest at {lowest:.1e}. {suggestion}")
        return
    if out is None:
        fix = "Name the folder of the run: --out run. To try rates only: --find-lr."
        raise ConfigError("is missing", where="out", fix=fix)
    with options.training(out, resume, device) as progress:
        done = bothways.pretrain(
            sources, model, out=out, resume=resume, progress=progress, **settings
        )
    conclude_pretraining(done)


def conclude_pretraining(done: PretrainResult) -> None:
    """Print the metrics of a finished run, on the main rank."""
    from bothways.hub.hf_config import format_note

    if not options.on_main_rank():
        return
    assert done.folder is not None
    count = quantity(done.progress.steps, "step(s)")
    title = f"After {count} and {done.progress.tokens:,} tokens, on held-out documents"
    options.show_tables(
        options.metric_table(
            title, {"": done.metrics}, "",
            lambda name, value: (
                f"{value:.1%}" if "accuracy" in name or "/probe/" in name else f"{value:,.3f}"
            ),
        )
    )  # fmt: skip
    write_stderr(f"The model is in {done.folder}. {format_note(done.folder)}".strip())
    if (page := done.folder.parent / "report.html").exists():
        write_stderr(f"Curves, metrics and settings: {page}")


@options.documented_by(bothways.adapt)
def adapt(  # noqa: PLR0913 – one option per question
    model: str,
    /,
    *texts: Annotated[str, options.INPUTS],
    out: Path,
    replay: list[str] | None = None,
    replay_share: float | None = None,
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    length: int = 128,
    column: str = "text",
    resume: bool = False,
    device: options.Device = "auto",
) -> None:
    """Adapt a model to a domain: continue its pre-training on text, measured before and after.

    Without --epochs or --until it reads the text once, with at least 1,000 updates.

    Parameters
    ----------
    texts
        Text of the domain: files (.txt, .jsonl, .csv, .parquet, also .gz), folders or globs; or
        the folder of a corpus. Then settings of pretrain by dotted path or common name, such as
        lr=1e-5.
    """
    files, words = options.split_inputs(texts)
    if not files:
        fix = "Name files, folders or a corpus: bothways adapt MODEL TEXTS --out FOLDER"
        raise ConfigError("names no text of the domain", where="texts", fix=fix)
    settings = options.settings_for(bothways.adapt, words, until=end.duration)
    with options.training(out, resume, device) as progress:
        done = bothways.adapt(
            model, files, out, replay=replay or (), replay_share=replay_share, length=length,
            column=column, resume=resume, device=device, progress=progress, **settings,
        )  # fmt: skip
    from bothways.pretraining.adapt import head_note

    if not options.on_main_rank():
        return

    # The perplexities before and after, and the fit of the vocabulary.
    scores = [
        (str(name), str(metric), f"{score:,.4g}", f"{adapted:,.4g}", str(relative))
        for name, metric, score, adapted, relative in done.comparison()
    ]
    title = "Held-out text, the same masks before and after"
    general = ["general"] if done.vocabulary.general else []
    options.show_tables(
        options.CommandTable(title, ("text", "metric", "before", "after", "relative"), scores),
        options.CommandTable("", ("vocabulary", "domain", *general), done.vocabulary.rows()),
    )
    say(output_console(), f"Are new words worth adding? {done.vocabulary.answer}")
    if done.new_head:
        say(output_console(), head_note(done.before))
    page = out / "report.html"
    report = f" The report: {page}" if page.exists() else ""
    write_stderr(f"The model is in {done.folder}.{report}")


@options.documented_by(bothways.distil)
def distil(  # noqa: PLR0913 – one option per question a run answers
    teacher: str,
    data: str | None = None,
    *overrides: str,
    to: Literal["model", "static"] = "model",
    width: int | None = None,
    student: str | None = None,
    dev: options.DevData = None,
    recipe: DistilRecipe | None = None,
    out: Path = Path("distilled"),
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    config: Path | None = None,
    resume: bool = False,
    device: options.Device = "auto",
) -> None:
    """Train a smaller model on what a teacher computes.

    With a corpus, the student is pre-trained: it learns from the teacher's predictions, vectors or
    relations between tokens. With labelled data, it is fine-tuned for the teacher's task, on the
    labels and the teacher's outputs. Both have the vocabulary of the teacher. --to static makes a
    vector for each token, without training: bothways distil MODEL --to static --out FOLDER.

    Parameters
    ----------
    overrides
        Settings by dotted path, such as encoder.depth=4 objective.losses.0.temperature=3, or with
        labelled data teacher.weight=0.7.
    """
    from bothways.finetuning.run import FinetuneResult
    from bothways.prediction.static_distillation import StaticResult

    settings = options.settings_for(bothways.distil, overrides, until=end.duration)
    with options.training(out, resume, device) as progress:
        done = bothways.distil(
            teacher,
            data,
            student,
            dev,
            to=to,
            width=width,
            recipe=recipe,
            config=config,
            out=out,
            resume=resume,
            device=device,
            progress=progress,
            **settings,
        )
    if isinstance(done, StaticResult):
        shape = done.task_model.model.config
        share = f"{shape.width} components, {done.explained:.1%} of the teacher's variance"
        write_stderr(f"The vectors of {shape.vocab - 1:,} tokens ({share}) are in {done.folder}.")
    elif isinstance(done, FinetuneResult):
        conclude_finetuning(done, out)
    else:
        conclude_pretraining(done)


@options.documented_by(bothways.finetune)
def finetune(  # noqa: PLR0913 – one option per question a run answers
    model: str,
    train: str,
    *overrides: str,
    task: str = "classify",
    dev: options.DevData = None,
    lr: float | None = None,
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    batch_size: int | None = None,
    max_length: int | None = None,
    columns: options.DataColumns = options.DataColumns(),  # noqa: B008 – frozen
    group: options.GroupColumn = None,
    out: Path = Path("finetuned"),
    recipe: FinetuneRecipe = "modern",
    config: Path | None = None,
    seeds: str | None = None,
    folds: int | None = None,
    teacher: str | None = None,
    adapter_only: bool = False,
    resume: bool = False,
    device: options.Device = "auto",
) -> None:
    """Fine-tune a model on labelled data for a task.

    Columns, labels, lengths, vocabulary, memory and disk are checked before training starts. The
    checkpoint with the best dev metric is saved as a Hugging Face folder.

    Parameters
    ----------
    train
        Labelled data: .csv, .tsv, .jsonl, .parquet (the first three also .gz, .xz, .zst, .bz2), or
        hub:owner/name:configuration:split.
    overrides
        Settings by dotted path or common name, such as metric=mcc warmup=0.06
        stability.layer_decay=0.9.
    lr
        The peak learning rate; default: the recipe's, which is by the width of the model for
        modern (5e-5 for BERT-base).
    batch_size
        Examples per update; default: the recipe's, 32 for modern.
    max_length
        The longest sequence in tokens, special tokens included; longer texts are cut. Default: the
        length of a model for the same task, else the task's; or the length that holds 95 % of the
        training texts whole, if it is more.
    seeds
        Run several seeds: a count (5), or a list (3,14,15). Each run has a folder seed-N; model/
        is the best run's.
    teacher
        A fine-tuned model whose outputs are learned in addition to the labels; teacher.weight=0.5
        and teacher.temperature=2 are its settings.
    adapter_only
        Train low-rank changes (lora.rank=8), and save them with the heads alone as an adapter of
        PEFT.
    resume
        Continue from the newest checkpoint in the folder; skip finished runs of several.
    """
    from bothways.lab.sweeps.folds import PREDICTIONS, CrossValidation
    from bothways.lab.sweeps.runs import SweepFolder, finetune_seeds, parse_seeds

    if seeds is not None and folds is not None:
        message = "and --folds are both given"
        raise ConfigError(message, where="--seeds", fix="Leave out one of the two.")
    settings = options.settings_for(
        bothways.finetune, overrides, columns=columns.named or None, lr=lr,
        batch_size=batch_size, max_length=max_length, group=group, until=end.duration,
        adapter_only=adapter_only or None,
        teacher=None if teacher is None else {"folder": teacher},
    )  # fmt: skip
    if seeds is not None:
        base, notes = finetune_settings(
            model, train, dev, task, settings, recipe=recipe, config=config
        )
        seed_list = parse_seeds(seeds, base.seed)
        with options.training(out, resume, device, notes) as progress:
            series = finetune_seeds(base, seed_list, SweepFolder(out, resume, device, progress))
        print_series(series, out)
        return
    with options.training(out, resume, device) as progress:
        done = bothways.finetune(
            model,
            train,
            dev,
            task,
            folds=folds,
            recipe=recipe,
            config=config,
            out=out,
            resume=resume,
            device=device,
            progress=progress,
            **settings,
        )
    if not isinstance(done, CrossValidation):
        conclude_finetuning(done, out)
    elif options.on_main_rank():
        count = quantity(len(done.series.scored), "fold(s)")
        title = f"{count}, each scored by the model of the others"
        scores = {"mean": done.metrics, "deviation": done.deviations}
        options.show_tables(options.metric_table(title, scores))
        write_stderr(f"A prediction for each row is in {out / PREDICTIONS}.")


def conclude_finetuning(done: FinetuneResult, out: Path) -> None:
    """Print the result of a single run, on the main rank."""
    from bothways.hub.hf_config import format_note

    if not options.on_main_rank():
        return
    if done.failure is not None:
        write_stderr(f"warning: {done.failure}")
    if done.metrics:
        columns = {"model": done.metrics}
        for name, compared in done.compared().items():
            columns[name] = {metric: compared.get(metric, math.nan) for metric in done.metrics}
        options.show_tables(
            options.metric_table(
                "Best checkpoint on the dev data",
                columns,
                shown=lambda name, value: "–" if math.isnan(value) else f"{value:.4f}",
            )
        )
        if (page := out / "report.html").is_file():  # not of vectors, or without matplotlib
            write_stderr(f"Error analysis: {page}")
    sentences = (f"The model is in {done.folder}.", format_note(done.folder), _try(out))
    write_stderr(" ".join(sentence for sentence in sentences if sentence))


def _try(out: Path) -> str:
    folder = shlex.quote(str(out))
    return f"Try it: bothways predict {folder} FILE, or in a browser: bothways play {folder}"


def print_series(series: Series, out: Path) -> None:
    """Print the results of a series, on the main rank."""
    from bothways.lab.sweeps.runs import seed_spread

    if not options.on_main_rank():
        return
    summary = seed_spread(series)
    metric = summary.metric if summary else "metric"
    rows = [
        [
            run.name + (" (best)" if run is series.best else ""),
            f"{run.metrics[metric]:.4f}" if run.metrics else "–",
            "; ".join(run.failed),
        ]
        for run in series.runs
    ]
    if summary:
        for name in ("mean", "median", "best", "deviation"):
            value = getattr(summary, name)
            rows.append([name, "–" if value is None else f"{value:.4f}", ""])
        rows.append(["failed runs", f"{summary.failed} of {len(series.runs)}", ""])
    title = f"{quantity(len(series.runs), 'run(s)')}, scored on the dev data"
    options.show_tables(options.CommandTable(title, ("run", metric, "failed"), rows))
    if series.best is not None:
        name, model = series.best.name, out / "model"
        success = f"The best model, of {name}, is in {model}. {_try(out)}"
        failed = f"warning: every run has probably failed. The model of {name} is in {model}."
        write_stderr(failed if all(run.failed for run in series.runs) else success)


@options.documented_by(bothways.finetune)
def sweep(  # noqa: PLR0913 – one option per question
    model: str,
    train: str,
    *overrides: str,
    dev: str,
    task: str = "classify",
    columns: options.DataColumns = options.DataColumns(),  # noqa: B008 – frozen
    group: options.GroupColumn = None,
    grid: str = "paper",
    out: Path = Path("sweep"),
    recipe: FinetuneRecipe = "modern",
    config: Path | None = None,
    resume: bool = False,
    device: options.Device = "auto",
) -> None:
    """Fine-tune with every combination of some settings and keep the best model on dev data.

    Each combination is a run in its own folder.

    Parameters
    ----------
    train
        Labelled data, as for finetune.
    overrides
        Settings that all runs share, by dotted path.
    dev
        Labelled data for comparing the runs, or its share of TRAIN, such as 20%.
    grid
        paper (appendix A.3: batch, rate, epochs; 18 runs), or "key=value,value key=value".
    out
        Folder for all runs; model/ is the best model, sweep.json has all results.
    resume
        Skip finished runs and continue the interrupted one.
    """
    from bothways.lab.sweeps.runs import SweepFolder, parse_grid, sweep_grid

    settings = options.settings_for(
        bothways.finetune, overrides, columns=columns.named or None, group=group
    )
    base, notes = finetune_settings(model, train, dev, task, settings, recipe=recipe, config=config)
    with options.training(out, resume, device, notes) as progress:
        series = sweep_grid(base, parse_grid(grid), SweepFolder(out, resume, device, progress))
    print_series(series, out)


@options.documented_by(bothways.pretrain)
def plan(  # noqa: PLR0913 – one option per question
    model: str,
    *settings: str,
    tokens: float | None = None,
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    corpus: str | None = None,
    recipe: str | None = None,
    teacher: str | None = None,
    config: Path | None = None,
    hardware: str = "here",
    ranks: int = 1,
    utilisation: float | None = None,
    price: float | None = None,
    json: options.JsonOutput = False,
    device: options.Device = "auto",
) -> None:
    """Forecast time, memory, checkpoints and price of a pre-training run, and how to place it.

    Parameters
    ----------
    model
        A preset such as bert-base, or a model folder or Hub id for its shape.
    settings
        Settings of pretrain by dotted path, such as training.recompute=true microbatch_tokens=8192.
    tokens
        Tokens to read, such as 3.3e9.
    corpus
        A folder made by `bothways corpus build`: its tokens and its vocabulary.
    recipe
        The recipe to start from, and the default, as for pretrain; with a teacher as for distil.
    teacher
        A model folder or Hub id: the run distils it into MODEL.
    hardware
        here measures this machine; a card is computed from its data sheet: l4, a10, rtx3090,
        rtx4090, a100-40, l40s, a100, h100, h200, b200, mi300x.
    ranks
        Number of cards.
    utilisation
        The share of the card's rate that a step reaches, as you have measured it; default 0.25.
    price
        Price of a card, or of this machine, per hour, in any currency.
    """
    from bothways.core.runtime.devices import gpu_memory
    from bothways.data.corpus import Corpus
    from bothways.model.families.catalogue import PRESETS, preset
    from bothways.pretraining.build import fit_to_corpus, start_encoder
    from bothways.pretraining.config import load_pretraining
    from bothways.pretraining.forecast import UTILISATION, Cards, forecast_run
    from bothways.pretraining.recipes import chosen_settings, distillation

    text = None if corpus is None else Corpus.open(corpus)
    changes = options.settings_for(bothways.pretrain, settings, until=end.duration)
    if tokens is not None:
        if changes.keys() & {"until", "training.until"}:
            message = f"is given as tokens={tokens:g}, and the length of the run once more"
            raise ConfigError(message, where="tokens", fix="Give one of them.")
        require_at_least(1, tokens=tokens)
        changes["until"] = f"{int(tokens)} tokens"
    if hardware.lower() == "here":
        message = "is for cards; this machine is measured with one rank"
        fix = "Name a card: --hardware h100"
        require_unset(message, fix, ranks=ranks != 1 or None, utilisation=utilisation)
        target: str | Cards = device
        gpu = gpu_memory(device)
    else:
        require_unset(
            "is of this machine, and a card is named", "Leave it out, or --hardware.",
            device=device != "auto" or None,
        )  # fmt: skip
        share = UTILISATION if utilisation is None else utilisation
        target = Cards(card_named(hardware), ranks, share)
        gpu = target.card.memory

    def with_settings(base: PretrainConfig) -> PretrainConfig:
        """Return the settings of a recipe with those of this call."""
        return load_pretraining(base, changes, config)

    if teacher is None:
        is_preset = model in PRESETS or not Path(model).is_dir()
        shape = preset(model) if is_preset and "/" not in model else start_encoder(model)
        encoder = shape if text is None else fit_to_corpus(shape, text.tokenizer)
        check_shape(encoder, model, changes, config)
        run, notes = chosen_settings(recipe, encoder, None, with_settings, gpu, config)
    else:
        base = distillation(teacher, model, recipe)
        check_shape(base.encoder, model, changes, config)
        changes["objective.teacher"] = teacher
        run = with_settings(base)
        notes = [f"note: {member}" for member in replaced_members(run, base, config)]
    for note in notes:
        write_stderr(note)
    with terminal_progress() as progress:
        corpus_tokens = None if text is None else float(text.manifest.counts.tokens)
        done = forecast_run(
            run, target, corpus_tokens=corpus_tokens, price=price, progress=progress
        )
    if json:
        print(dumps(done.to_json(), ensure_ascii=False, allow_nan=False))
    else:
        _show(done)


def _show(done: RunForecast) -> None:
    """Print the forecast as tables."""
    from bothways.training.step_cost import USABLE, size_text

    console = output_console()
    interval = done.total / max(1, done.checkpoints)
    checkpoints = (
        f"{done.checkpoints:,} of {size_text(done.checkpoint)}, one each {time_text(interval)}"
    )
    run = [
        ("parameters", f"{done.parameters:,}"),
        ("tokens", f"{done.tokens:,.0f}"),
        ("updates", f"{done.updates:,}"),
        ("operations", f"{done.operations_per_token * done.tokens:.3g}"),
        ("tokens per second", f"{done.rate:,.0f}"),
        ("checkpoints", checkpoints),
        *((f"time: {name}", time_text(value)) for name, value in done.seconds.items() if value),
        ("time in all", time_text(done.total)),
    ]
    if done.cost is not None:
        run.append(("price", f"{done.cost:,.2f}"))
    memory = done.choice.memory
    activations = f"activations of {done.microbatch:,} tokens"
    sizes = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        activations: memory.activations,
        "teacher": memory.frozen,
        "gathered": memory.gathered,
    }
    rows = [(name, size_text(count)) for name, count in sizes.items() if count]
    free = size_text(done.free) if math.isfinite(done.free) else "unknown"
    rows.append((f"all, of {free} of which {USABLE:.0%} count", size_text(memory.total)))
    rows.append(("most tokens at once (microbatch_tokens)", f"{done.largest:,}"))
    options.show_tables(
        options.CommandTable(f"A run on {done.hardware}", ("", ""), run),
        options.CommandTable("Memory of a rank", ("", ""), rows),
    )
    say(console, f"placement: {done.choice.placement}, because {done.choice.why}")
    for sentence in done.assumed:
        console.print(f"assumed: {sentence}", highlight=False, style="dim", soft_wrap=True)
