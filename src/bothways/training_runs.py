"""Train a model: pre-training, adaptation, fine-tuning, distillation, and what a run reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from bothways.core.config.values import (
    NONE,
    checked,
    flatten,
    read_toml,
    require_at_least,
    require_choice,
)
from bothways.core.errors import (
    BothwaysError,
    ConfigError,
    DataError,
    argument,
    call,
    require_unset,
)
from bothways.core.files import local_path
from bothways.core.progress import Progress, shown_progress
from bothways.finetuning import FinetuneRecipe
from bothways.pretraining import DistilRecipe, PretrainRecipe

if TYPE_CHECKING:
    from typing import TypeAlias

    from bothways.data.corpus import Corpus
    from bothways.finetuning.config import FinetuneConfig, OwnMetrics
    from bothways.finetuning.data import Rows
    from bothways.finetuning.run import FinetuneResult
    from bothways.lab.sweeps.folds import CrossValidation
    from bothways.model.config import EncoderConfig
    from bothways.objectives.objective import Objective
    from bothways.prediction.static_distillation import StaticResult
    from bothways.pretraining.adapt import Adaptation
    from bothways.pretraining.config import PretrainConfig
    from bothways.pretraining.run import PretrainResult, RateTest
    from bothways.pretraining.training_inputs import TrainingInputs
    from bothways.tasks.catalogue import Trainable
    from bothways.training.run import Event

    CorpusInput: TypeAlias = (
        str | Path | Corpus | Mapping[str, str | Path | Corpus] | Iterable[str | Path | Corpus]
    )


@checked
def pretrain(  # noqa: PLR0913 – one option per question
    corpus: CorpusInput,
    model: str | EncoderConfig | None = None,
    objective: str | Objective | None = None,
    *,
    until: str | None = None,
    out: str | Path | None = None,
    start: str | Path | None = None,
    recipe: PretrainRecipe | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress | bool = True,
    on_event: Callable[[Event], object] = lambda event: None,
    **settings: Any,
) -> PretrainResult:
    """Pre-train an encoder on a corpus; with `out`, save it in `out/model`.

    Args:
        corpus: a corpus or its folder, or several: a list of folders, whose names are the
            corpora's, or a mapping from names to corpora or folders; the setting `mixture` says
            how often each is read.
        model: the shape to start from: bert-tiny, bert-mini, bert-small, bert-medium, bert-base,
            bert-large, roberta-base and other presets, or in Python an encoder configuration.
            Vocabulary and padding are the corpus's. Default: bert-mini; with `start`, the model
            there.
        objective: a name such as "masked-lm", or an objective; `None` for the usual one of the
            model.
        until: end of the run, such as "2 hours", "3 epochs" or "10000 steps".
        out: folder of the run: checkpoints, metrics, and at the end model/, a Hugging Face folder;
            in Python `None` trains in memory.
        start: a model folder or Hub id whose pre-training to continue; build the corpus with its
            tokenizer. A larger `model` of the same family repeats its weights. Name the heads that
            it lacks, to start them at random, by the setting fresh, such as masked,pair.
        recipe: settings to start from: modern is current practice; paper has those of Devlin et
            al. 2018; short is for minutes: many small updates, on short sequences at first;
            electra is ELECTRA-small's, with a generator; roberta, albert, spanbert, deberta,
            deberta_v3 and modernbert are those of these papers, with large batches; babylm is
            GPT-BERT on ten million words. Default: short for 30 minutes or less, else modern.
        config: a TOML file with settings; those given otherwise have priority.
        resume: continue from the newest checkpoint in `out`, or begin if there is none.
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: further settings as nested dicts of dotted paths, such as
            `training={"optimizer": {"lr": 1e-3}}`.

    Returns:
        The trained model (`model`), the metrics of held-out documents by name (`metrics`), and the
        model folder (`folder`; None in memory).

    Raises:
        BothwaysError: a setting, the corpus or the machine is not suitable, or a loss is not
            finite.
        KeyboardInterrupt: interrupted; with `out`, after a checkpoint.

    Examples:
        >>> tiny = bothways.EncoderConfig(vocab=5, width=32, depth=1, heads=2, intermediate_size=64)
        >>> result = bothways.pretrain("corpus", tiny, "masked-lm", until="2 steps", out="new-run")
        >>> result.folder.name, result.progress.steps
        ('model', 2)
    """
    from bothways.pretraining import run

    folder, overrides = _run_folder(out, settings, resume), dict(settings)
    if until is not None:
        overrides["until"] = until
    text, config_values, notes = _open_run(
        corpus, model, objective, start, recipe, config, device, overrides
    )
    with shown_progress(progress, notes) as reporter:
        return run.pretrain(
            config_values,
            text,
            folder,
            resume=resume,
            device=device,
            progress=reporter,
            on_event=on_event,
        )


@checked
def find_lr(  # noqa: PLR0913 – one option per question
    corpus: CorpusInput,
    model: str | EncoderConfig | None = None,
    objective: str | Objective | None = None,
    *,
    steps: int = 200,
    start: str | Path | None = None,
    recipe: PretrainRecipe | None = None,
    config: str | Path | None = None,
    device: str = "auto",
    progress: Progress | bool = True,
    **settings: Any,
) -> RateTest:
    """Train for some steps in memory, each with a higher learning rate, to see where it breaks.

    The batch and the sequences are those with which the run would begin.

    Args:
        steps: number of steps, from a rate of 1e-6 to 1; it ends earlier where the loss has risen.

    Returns:
        The `rates` and `losses` of the steps, and a `suggestion`.

    Raises:
        BothwaysError: as `pretrain`, whose arguments the others are.

    Examples:
        >>> tiny = bothways.EncoderConfig(vocab=5, width=32, depth=1, heads=2, intermediate_size=64)
        >>> result = bothways.find_lr("corpus", tiny, "masked-lm", steps=20)
        >>> 1e-6 < result.suggestion < 1
        True
    """
    from bothways.pretraining.run import run_rate_test

    require_at_least(2, steps=steps)
    text, values, notes = _open_run(
        corpus, model, objective, start, recipe, config, device, settings
    )
    with shown_progress(progress, notes) as reporter:
        return run_rate_test(values, text, steps, device, reporter)


def _open_run(
    corpus: CorpusInput,
    model: str | EncoderConfig | None,
    objective: str | Objective | None,
    start: str | Path | None,
    recipe: PretrainRecipe | None,
    config: str | Path | None,
    device: str,
    settings: Mapping[str, Any],
) -> tuple[Corpus | dict[str, Corpus], PretrainConfig, list[str]]:
    """Return the corpora of a run, its settings, and notes on what was chosen."""
    from bothways.data.corpus import Corpus
    from bothways.pretraining.build import encoder_of

    text = open_text(corpus)
    tokenizer = (text if isinstance(text, Corpus) else next(iter(text.values()))).tokenizer
    source = None if start is None else str(start)
    encoder = encoder_of(model, source, tokenizer)
    check_shape(encoder, model, settings, config)
    return text, *pretrain_settings(encoder, objective, settings, source, recipe, config, device)


def pretrain_settings(
    encoder: EncoderConfig,
    objective: str | Objective | None,
    settings: Mapping[str, Any],
    start: str | None,
    recipe: PretrainRecipe | None,
    config: str | Path | None,
    device: str = "auto",
) -> tuple[PretrainConfig, list[str]]:
    """Return the settings of a pre-training run, and notes on what was chosen.

    Arguments and errors are those of `pretrain`.
    """
    from bothways.core.runtime import devices
    from bothways.objectives.objective import Objective
    from bothways.pretraining.config import load_pretraining
    from bothways.pretraining.recipes import chosen_settings

    overrides = {**_given({"start": start}), **settings}
    if isinstance(objective, str):  # first: settings of the objective change it
        overrides = {"objective": objective.replace("-", "_"), **overrides}

    def changed(base: PretrainConfig) -> PretrainConfig:
        if objective is not None and not isinstance(objective, str):
            if not isinstance(objective, Objective):
                message = f"must be a name or an objective, not {objective!r}"
                fix = 'Write objective="masked-lm", or an object: MaskedLM().'
                raise ConfigError(message, where="objective", fix=fix)
            base = dataclasses.replace(base, objective=objective)
        return load_pretraining(base, overrides, _path(config))

    memory = devices.gpu_memory(device)
    return chosen_settings(recipe, encoder, start, changed, memory, _path(config))


_SHAPE = ("width", "depth", "heads", "intermediate_size", "embedding")


def check_shape(
    encoder: EncoderConfig,
    model: str | Path | EncoderConfig | None,
    settings: Mapping[str, Any] | Iterable[str],
    config: str | Path | None,
    where: str = "model",
) -> None:
    """Raise ConfigError if a file has the whole shape of another model than the one that is named.

    A table `encoder` without `vocab`, which the config.toml of a run has, changes that model.

    Args:
        encoder: the shape of `model`; None for a model that is not named.
        settings: those that have priority over the file.
        where: the argument that names it.
    """
    from bothways.core.config.reader import read
    from bothways.core.config.values import parse_overrides
    from bothways.model.config import EncoderConfig

    table = {} if model is None or config is None else read_toml(local_path(config))
    if "vocab" not in table.get("encoder", {}):
        return
    changes = parse_overrides(settings).get("encoder", {})
    bases = (encoder, read(EncoderConfig, table["encoder"]))
    named, other = (read(EncoderConfig, changes, base=base, where="encoder") for base in bases)
    kinds = {"position": (named.position.kind, other.position.kind)}
    pairs = kinds | {name: (getattr(named, name), getattr(other, name)) for name in _SHAPE}
    if differs := [name for name, (one, two) in pairs.items() if one != two]:
        message = f"is given, and {config} has a model with another {', '.join(differs)}"
        fix = f"Give one of them: leave it out, or delete the table [encoder] of {config}."
        raise ConfigError(message, where=where, fix=fix)


def _without_text(source: str) -> BothwaysError:
    """Return the error about a model without a text, or about a corpus that does not exist."""
    fix = f"Give a text, or a corpus: {call('show', source, 'TEXT')}"
    if not local_path(source).exists():
        return DataError("no such corpus; a model needs a text", where=source, fix=fix)
    return ConfigError("is missing: only a corpus has sequences", where="text", fix=fix)


@checked
def show(  # noqa: PLR0913 – one option per question
    source: CorpusInput,
    text: str | None = None,
    text_b: str | None = None,
    *,
    objective: str | Objective | None = None,
    model: str | EncoderConfig | None = None,
    start: str | Path | None = None,
    count: int | None = None,
    step: int = 1,
    layer: int | None = None,
    recipe: PretrainRecipe | None = None,
    config: str | Path | None = None,
    progress: Progress | bool = True,
    **settings: Any,
) -> TrainingInputs:
    """Show what a model reads: sequences that a pre-training run is trained on, or a text.

    Args:
        source: a corpus, its folder, or several as for `pretrain`; with a text also a tokenizer
            or a model: a folder, the folder of a run, or a Hub id.
        text: a text instead of the sequences of a corpus; without an objective or settings it is
            shown as in use, without masks.
        text_b: the second text of a pair.
        objective: a name such as "masked-lm", or an objective, as for `pretrain`.
        model: the shape of the run's model, as for `pretrain`; for a text the default is `source`,
            if that is a model.
        start: a model that the run starts from, as for `pretrain`.
        count: number of sequences, or for a text of draws of its masks; default: 3, for a text 1.
        step: number of the update whose sequences are shown, from 1; for a text the first draw.
        layer: number of a layer, from 1, whose attention and vectors are computed for a text; the
            source is then a model.
        recipe: settings to start from, as for `pretrain`.
        config: a TOML file with settings; those given otherwise have priority.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        settings: settings of the run by dotted path, such as
            `**{"objective.masking.rate": 0.3}`.

    Returns:
        The sequences, token by token (`sequences`); `print` and `str` give them as text, `save`
        writes an HTML page.

    Raises:
        BothwaysError: the source, a text or a setting is not suitable.

    Examples:
        >>> shown = bothways.show("corpus", count=1, seed=1)
        >>> len(shown.sequences), shown.sequences[0].tokens[0].token
        (1, '[CLS]')
        >>> shown = bothways.show("my-bert", "a good film", objective="masked-lm")
        >>> [token.original for token in shown.sequences[0].tokens]
        ['[CLS]', 'a', 'good', 'film', '[SEP]']
    """
    from bothways.data.corpus_source import Corpora
    from bothways.data.manifest import holds_corpus
    from bothways.hub.resolve import is_model_folder, resolve_run
    from bothways.model_folders import load_model
    from bothways.pretraining import training_inputs
    from bothways.pretraining.build import encoder_of
    from bothways.text.tokenizer import Tokenizer

    require_at_least(1, step=step, count=1 if count is None else count)
    of_corpus = not isinstance(source, str | Path) or holds_corpus(source)
    of_model = not of_corpus and (
        not local_path(str(source)).exists() or is_model_folder(Path(resolve_run(str(source))))
    )
    if text is None and of_model:
        raise _without_text(str(source))
    if text is None and text_b is not None:
        message = "is the second text of a pair, and there is no first"
        raise ConfigError(message, where="text_b", fix="Give text, too.")
    if layer is not None and not (of_model and text is not None):
        fix = f"Give both: {call('show', 'MODEL', 'TEXT', layer=layer)}"
        raise ConfigError("is of a model that reads a text", where="layer", fix=fix)
    corpora, loaded = None, None
    if of_model:
        loaded = load_model(str(source))
        tokenizer = loaded.tokenizer
    elif of_corpus or text is None:
        corpora = open_text(source)
        tokenizer = Corpora.of(corpora, None).tokenizer
    else:
        tokenizer = Tokenizer.load(str(source))
    run_settings, notes = None, list[str]()
    trained = objective is not None or recipe or config or settings
    if text is not None and not trained:
        message = "is of a text in training, and without an objective it is shown as in use"
        fix = f"Leave it out, or add {argument(objective='masked_lm')}."
        require_unset(message, fix, count=count, step=step != 1 or None, model=model, start=start)
    if text is None or trained:
        first = None if start is None else str(start)
        if loaded is not None and model is None and first is None:
            encoder = loaded.config
        else:
            encoder = encoder_of(model, first, tokenizer)
        check_shape(encoder, model, settings, config)
        run_settings, notes = pretrain_settings(encoder, objective, settings, first, recipe, config)
    with shown_progress(progress, notes) as reporter:
        if text is not None:
            texts = (text,) if text_b is None else (text, text_b)
            draws = range(step, step + (count or 1))
            return training_inputs.show_text(
                texts, tokenizer, loaded, corpora, run_settings, draws, layer
            )
        assert run_settings is not None
        assert corpora is not None
        return training_inputs.show_corpus(run_settings, corpora, step, count or 3, reporter)


@checked
def adapt(  # noqa: PLR0913 – one option per question
    model: str | Path,
    texts: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    replay: str | Path | Iterable[str | Path] = (),
    replay_share: float | None = None,
    until: str | None = None,
    length: int = 128,
    column: str = "text",
    resume: bool = False,
    device: str = "auto",
    progress: Progress | bool = True,
    **settings: Any,
) -> Adaptation:
    """Continue the pre-training of a model on text of a domain; save it in `out/model`.

    Args:
        model: a model folder, the folder of a run, or a Hub id.
        texts: files, folders or patterns with text of the domain, or the folder of a corpus.
        out: folder of the run: corpora, checkpoints, and at the end model/ and report.html; the
            words that the vocabulary lacks are in new_words.txt.
        replay: general text, or a corpus of it: read among that of the domain against forgetting,
            and measured.
        replay_share: the share of the sequences that are of general text, by default 0.1; 0 only
            measures it.
        until: end of the run, such as "20 minutes"; `None` for one pass over the text, with at
            least 1,000 updates.
        length: tokens of a sequence.
        column: column of the text in tables (.jsonl, .csv, .parquet …), also of general text.
        resume: continue from the newest checkpoint in `out`, or begin if there is none.
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        settings: further settings of `PretrainConfig`, such as `held_out=0.1`.

    Returns:
        The metrics of held-out text `before` and `after`, by "domain" and "general", the model
        folder (`folder`), and how the vocabulary fits the domain (`vocabulary`).

    Raises:
        BothwaysError: the model, the text or a setting is not suitable.
        KeyboardInterrupt: interrupted; with `out`, after a checkpoint.

    Examples:
        >>> result = bothways.adapt("my-bert", "text.txt", "adapted", until="4 steps", length=16)
        >>> sorted(result.before), result.folder.name
        (['domain'], 'model')
    """
    from bothways.data.tables import iter_rows
    from bothways.pretraining import adapt as adaptation

    def paths(sources: str | Path | Iterable[str | Path], name: str) -> list[str]:
        items = [sources] if isinstance(sources, str | Path) else [*iter_rows(sources, name)]
        for item in items:
            if not isinstance(item, str | Path):
                message = f"must be names of files or of a corpus, not {type(item).__name__}"
                fix = "Build a corpus of texts in memory, with the tokenizer of the model: "
                fix += "bothways.build_corpus(ROWS, MODEL, FOLDER)."
                raise ConfigError(message, where=name, fix=fix)
        return [*map(str, items)]

    with shown_progress(progress) as reporter:
        return adaptation.adapt(
            model,
            paths(texts, "texts"),
            local_path(out),
            replay=paths(replay, "replay"),
            replay_share=replay_share,
            length=length,
            column=column,
            overrides={**_given({"until": until}), **settings},
            resume=resume,
            device=device,
            progress=reporter,
        )


@overload
def finetune(
    model: str | Path,
    train: Rows,
    dev: Rows | float | None = None,
    task: str | Trainable = "classify",
    *,
    folds: None = None,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int | None = None,
    recipe: FinetuneRecipe = "modern",
    config: str | Path | None = None,
    metrics: OwnMetrics | None = None,
    device: str = "auto",
    progress: Progress | bool = True,
    on_event: Callable[[Event], object] = ...,
    **settings: Any,
) -> FinetuneResult: ...


@overload
def finetune(
    model: str | Path,
    train: Rows,
    dev: Rows | float | None = None,
    task: str | Trainable = "classify",
    *,
    folds: int,
    **settings: Any,
) -> CrossValidation: ...


@checked
def finetune(  # noqa: PLR0913 – one option per question
    model: str | Path,
    train: Rows,
    dev: Rows | float | None = None,
    task: str | Trainable = "classify",
    *,
    folds: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int | None = None,
    recipe: FinetuneRecipe = "modern",
    config: str | Path | None = None,
    metrics: OwnMetrics | None = None,
    device: str = "auto",
    progress: Progress | bool = True,
    on_event: Callable[[Event], object] = lambda event: None,
    **settings: Any,
) -> FinetuneResult | CrossValidation:
    """Fine-tune a model on labelled data; with `out`, save it in `out/model`.

    Args:
        model: a model folder, the folder of a run, or a Hub id.
        train, dev: a file, a Hub data set, a DataFrame, a `datasets.Dataset`, or a list of dicts;
            `dev=0.2` splits a fifth from `train`, by class, with equal texts on one side, and
            `group="user"` keeps the rows with equal values of a column together.
        task: name of the task: classify, regress, multilabel, choice, tag, answer, rerank, embed,
            or a common alias of one of them, such as sentiment, ner or qa; in Python also a task.
        folds: cross-validation: run once per fold of `train`, which is then the dev data. The
            result has `metrics`, `deviations` and `predictions` for all rows; `out` has them in
            folds.json and out_of_fold.jsonl.
        out: folder of the run: checkpoints, metrics, and at the end model/, a Hugging Face folder;
            in Python `None` trains in memory.
        config: a TOML file with settings; those given otherwise have priority.
        resume: continue from the newest checkpoint in `out`, or begin if there is none.
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        seed: seed of new heads and of the order of the data; `None` for 0.
        recipe: method to start from: modern (AdamW), paper (Adam without bias correction, as in
            BERT's own code), electra (lower rates for lower layers) or few-shot (for some 8 texts a
            class).
        metrics: functions by name that take the predictions and the examples of the dev data, and
            return a number or a dict of numbers; `metric="name"` chooses the best weights by one.
            Higher is better, unless it is given as `bothways.Metric(function, better="lowest")`.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: common names such as `lr`, `epochs`, `batch_size`, `max_length`, or nested dicts
            of dotted paths.

    Returns:
        The metrics of the best weights on the dev data (`metrics`; empty without dev data), with
        the methods `predictor()` and `save(folder)`.

    Raises:
        BothwaysError: the data, a setting or the machine is not suitable, or a loss is not finite.
        KeyboardInterrupt: interrupted; with `out`, after a checkpoint.

    Examples:
        >>> rows = [{"text": "a good film", "label": "yes"}, {"text": "a bad play", "label": "no"}]
        >>> result = bothways.finetune("my-bert", rows * 8, dev=rows, epochs=2, lr=1e-3)
        >>> sorted(result.metrics)[:2]
        ['accuracy', 'f1']
        >>> result.predictor()("a good film").label in {"yes", "no"}
        True
        >>> result.save("new-classifier").name
        'new-classifier'
        >>> def mistakes(predictions, examples):
        ...     pairs = zip(predictions, examples)
        ...     return sum(prediction.label != example.label for prediction, example in pairs)
        >>> fewest = {"mistakes": bothways.Metric(mistakes, better="lowest")}
        >>> data = {"train": rows * 8, "dev": rows}
        >>> result = bothways.finetune("my-bert", **data, metrics=fewest, metric="mistakes")
        >>> result.metrics["mistakes"]
        0.0
        >>> more = [{**row, "text": f"{row['text']} {n}"} for n in range(8) for row in rows]
        >>> result = bothways.finetune("my-bert", more, folds=2, epochs=1)
        >>> [row["truth"] for row in result.predictions][:3], "accuracy" in result.deviations
        (['yes', 'no', 'yes'], True)
    """
    from bothways.finetuning import run
    from bothways.lab.sweeps.folds import cross_validate, first_fold

    folder = _run_folder(out, settings, resume)
    source = first_fold(folds, dev) if folds is not None else dev
    config_values, notes = finetune_settings(
        model, train, source, task, settings,
        seed=seed, recipe=recipe, config=config, metrics=metrics,
    )  # fmt: skip
    with shown_progress(progress, notes) as reporter:
        common: Any = {"resume": resume, "device": device, "on_event": on_event}
        common["progress"] = reporter
        if folds is not None:
            rows = list(train) if isinstance(train, Iterator) else train
            return cross_validate(config_values, folds, folder, rows, **common)
        dev_rows = None if isinstance(dev, int | float) else dev
        return run.finetune(config_values, folder, train=train, dev=dev_rows, **common)


def finetune_settings(  # noqa: PLR0913 – one option per question
    model: str | Path,
    train: Rows,
    dev: Rows | float | None,
    task: str | Trainable,
    settings: Mapping[str, Any],
    *,
    recipe: FinetuneRecipe = "modern",
    config: str | Path | None = None,
    seed: int | None = None,
    metrics: OwnMetrics | None = None,
) -> tuple[FinetuneConfig, list[str]]:
    """Return the settings of `finetune`, and notes on what they replace in the recipe."""
    from bothways.core.config.reader import replaced_members
    from bothways.finetuning.config import RECIPES, load_config
    from bothways.tasks.base import Task
    from bothways.tasks.catalogue import trainable_task

    require_choice(FinetuneRecipe, "recipe", recipe)
    value = trainable_task(task) if isinstance(task, str) else task
    if not isinstance(value, Task):
        message = f"must be a name or a task, not {type(value).__name__}"
        fix = 'Write task="regress"; with settings, task=RegressionTask(length=256).'
        raise ConfigError(message, where="task", fix=fix)
    # Over those of a file, as the config.toml of a run has them.
    arguments: dict[str, Any] = {"model": str(model), "train": source_name(train, "train")}
    arguments["dev"] = dev_name(dev)
    base = dataclasses.replace(RECIPES[recipe](value), metrics=metrics, **arguments)
    overrides = {**_given(arguments), **settings, **_given({"seed": seed})}
    loaded = load_config(base, overrides, _path(config))
    if value.kind not in (loaded.task.kind, "classify"):  # "classify" may be the default
        source = "a setting" if "task.kind" in overrides else config
        message = f"is {value.kind}, and {source} has the task {loaded.task.kind}"
        raise ConfigError(message, where="task", fix="Give one of them.")
    notes = [*replaced_members(loaded, base, _path(config))]
    if value.kind != loaded.task.kind and "task.kind" not in overrides:
        notes.append(f"the task is {loaded.task.kind}, of {config}")
    return loaded, [f"note: {note}" for note in notes]


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


@checked
def distil(  # noqa: PLR0913 – one option per question
    teacher: str | Path,
    data: Rows | Corpus | None = None,
    student: str | Path | None = None,
    dev: Rows | float | None = None,
    *,
    to: Literal["model", "static"] = "model",
    width: int | None = None,
    until: str | None = None,
    out: str | Path | None = None,
    recipe: DistilRecipe | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress | bool = True,
    on_event: Callable[[Event], object] = lambda event: None,
    **settings: Any,
) -> PretrainResult | FinetuneResult | StaticResult:
    """Train a smaller model on what a teacher computes; with `out`, save it in `out/model`.

    With a corpus the student is pre-trained, with labelled data it is fine-tuned for the teacher's
    task, on the labels and the teacher's outputs. To static vectors, without training: the teacher
    computes a vector for each token of its vocabulary, once.

    Args:
        teacher: a model folder, the folder of a run, or a Hub id; with labelled data a fine-tuned
            one.
        data: the folder of a corpus that was built with the teacher's tokenizer, or labelled data
            as for `finetune`. For static vectors a corpus, in which tokens are counted, or nothing.
        student: with a corpus a preset, such as distilbert-base-uncased, or a model folder;
            default: half of the teacher's layers. With labelled data a model folder or Hub id.
        dev: labelled data by which the best weights are chosen; 0.2 splits a fifth from `data`.
        to: "static" for a table of vectors in place of an encoder; no setting of training applies.
        width: number of components of static vectors; default: 256, or all of a narrower teacher.
        until: end of the run, such as "2 hours", "3 epochs" or "10000 steps".
        out: folder of the run: checkpoints, metrics, and at the end model/, a Hugging Face folder;
            in Python `None` trains in memory.
        recipe: losses to start from. With a corpus distilbert (the default: predictions, masked
            LM, cosine) or minilm (relations of one layer, for any width). With labelled data
            modern (the default) or paper, as for `finetune`.
        config: a TOML file with settings; those given otherwise have priority.
        resume: continue from the newest checkpoint in `out`, or begin if there is none.
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: further settings as nested dicts of dotted paths, such as
            `**{"teacher.weight": 0.7}`; with labelled data common names such as `lr`, too.

    Returns:
        The result of `bothways.pretrain` with a corpus, that of `bothways.finetune` with labelled
        data; for static vectors the table in a task (`task_model`), and `predictor()` to embed.

    Raises:
        BothwaysError: the teacher, the data, a setting or the machine is not suitable, or a loss is
            not finite.
        KeyboardInterrupt: interrupted; with `out`, after a checkpoint.

    Examples:
        >>> texts = {"positive": "a good film", "negative": "a bad play"}
        >>> rows = [{"text": text, "label": label} for label, text in texts.items()]
        >>> result = bothways.distil("my-classifier", rows * 8, "my-bert", epochs=1)
        >>> result.task_model.labels
        ('negative', 'positive')
    """
    from bothways.core.config.reader import replaced_members
    from bothways.data.corpus import Corpus
    from bothways.finetuning import config as finetune_config, run as finetuning
    from bothways.prediction.static_distillation import distil_static
    from bothways.pretraining import config as pretrain_config, recipes, run as pretraining

    require_choice(Literal["model", "static"], "to", to)
    folder, teacher = _run_folder(out, settings, resume), str(teacher)
    name = None if student is None else str(student)
    settings |= _given({"until": until})
    is_corpus = isinstance(data, Corpus) or (
        isinstance(data, str | Path) and local_path(data).is_dir()
    )
    if to == "static":
        require_unset(
            "is for training, and static vectors are computed in one pass",
            f"Leave it out; train them afterwards: {call('finetune', 'MODEL', task='embed')}",
            student=student, dev=dev, recipe=recipe, config=config, resume=resume or None,
            data=None if is_corpus else data, **dict.fromkeys(settings, True),
        )  # fmt: skip
        corpus: Any = Corpus.open(data) if isinstance(data, str | Path) else data
        model_folder = folder and folder / "model"
        with shown_progress(progress) as reporter:
            return distil_static(teacher, corpus, width, model_folder, device, reporter)
    fix = f"For static vectors: {argument(to='static')}."
    require_unset("is for static", fix, width=width)
    if data is None:
        raise ConfigError("is missing: a corpus, or labelled data", where="data", fix=fix)
    common: Any = {"resume": resume, "device": device, "on_event": on_event}
    if is_corpus:
        fix = "Leave it out; held_out=0.01 sets aside text."
        require_unset(f"is for labelled data, and {data} is a corpus", fix, dev=dev)
        text = data if isinstance(data, Corpus) else Corpus.open(data)  # type: ignore[arg-type]
        base: Any = recipes.distillation(teacher, name, recipe)
        check_shape(base.encoder, name, settings, config, "student")
        start = _student_start(base, name, teacher, _path(config))
        settings = {"objective.teacher": teacher, **start, **settings}
        config_values: Any = pretrain_config.load_pretraining(base, settings, _path(config))
        run: Any = functools.partial(pretraining.pretrain, config_values, text)
    else:
        assert not isinstance(data, Corpus)
        train = source_name(data, "data")
        base = finetune_config.taught_finetuning(teacher, train, name, recipe, dev_name(dev))
        arguments = {"model": name, "train": train, "dev": base.dev, "teacher.folder": teacher}
        config_values = finetune_config.load_config(
            base, {**_given(arguments), **settings}, _path(config)
        )
        common |= {"train": data, "dev": None if isinstance(dev, int | float) else dev}
        run = functools.partial(finetuning.finetune, config_values)
    notes = [f"note: {note}" for note in replaced_members(config_values, base, _path(config))]
    with shown_progress(progress, notes) as reporter:
        result: PretrainResult | FinetuneResult = run(folder, progress=reporter, **common)
        return result


def _student_start(
    base: PretrainConfig, student: str | None, teacher: str, file: Path | None
) -> dict[str, Any]:
    """Return the start of a distillation if the call decides it, not the file: the folder of a
    student, or, where the file's student starts from its teacher, the layers of another teacher.
    """
    values = flatten(read_toml(file)) if file else {}
    old = values.get("start", NONE)
    follows = old == values.get("objective.teacher") != teacher
    if not follows and (student is None or base.start != student):
        return {}
    layers = {} if old == NONE else {"start_layers": base.start_layers}
    return {"start": base.start, **layers}


def _run_folder(out: str | Path | None, settings: dict[str, Any], resume: bool) -> Path | None:
    """Return `out`, which transformers calls `output_dir`, without it among the settings."""
    if out is not None and "output_dir" in settings:
        message = "sets what 'out' sets, which is given, too"
        raise ConfigError(message, where="output_dir", fix="Leave one of them out.")
    folder = _path(settings.pop("output_dir", out))
    if resume and folder is None:
        message = "continues the run in a folder, and none is given"
        raise ConfigError(message, where="resume", fix="Give the folder: out=FOLDER.")
    return folder


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else local_path(path)


def dev_name(dev: Rows | float | None) -> str | None:
    """Return the name of dev data, or its share of the training data."""
    if dev is None:
        return None
    if isinstance(dev, int | float):
        from bothways.finetuning.splits import parse_part

        return str(parse_part(dev))
    return source_name(dev, "dev")


def source_name(rows: Rows, name: str) -> str:
    """Return the path of a source, or a name for rows.

    Raises:
        DataError: there are no rows.
    """
    if rows is None:
        from bothways.data.tables import FORMS

        raise DataError("is None", where=name, fix=f"Give a file, a Hub data set, {FORMS}.")
    return str(rows) if isinstance(rows, str | Path) else f"{name} rows"


def open_text(corpora: CorpusInput) -> Corpus | dict[str, Corpus]:
    """Open what is not open yet; the names of folders in a list are their own."""
    from bothways.data.corpus import Corpus
    from bothways.data.corpus_source import corpus_names

    def opened(source: str | Path | Corpus) -> Corpus:
        if not isinstance(source, str | Path | Corpus):
            message = f"is of type {type(source).__name__}, neither a corpus nor its folder"
            raise DataError(message, where="corpus", fix=f"Build one: {call('corpus build', '…')}")
        return source if isinstance(source, Corpus) else Corpus.open(source)

    if isinstance(corpora, str | Path | Corpus) or not isinstance(corpora, Iterable):
        return opened(corpora)
    if not isinstance(corpora, Mapping):
        corpora = list(corpora)
    if not corpora:
        raise DataError("there is no corpus", where="corpus", fix="Give one or more.")
    if isinstance(corpora, Mapping):
        return {name: opened(one) for name, one in corpora.items()}
    items = [opened(one) for one in corpora]
    return dict(zip(corpus_names([item.folder for item in items]), items, strict=True))
