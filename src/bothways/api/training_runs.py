"""Train a model: pre-training, adaptation, fine-tuning, distillation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from bothways.api.arguments import choice, dev_source, given_corpora, source_name
from bothways.core.bar import shown_progress
from bothways.core.progress import Progress

if TYPE_CHECKING:
    from bothways.api.arguments import Corpora
    from bothways.data.corpus import Corpus
    from bothways.finetuning.data import Rows
    from bothways.finetuning.metrics import OwnMetrics
    from bothways.finetuning.result import FinetuneResult
    from bothways.lab.sweeps.folds import CrossValidation
    from bothways.model.config import EncoderConfig
    from bothways.objectives.objective import Objective
    from bothways.pretraining.adapt import Adaptation
    from bothways.pretraining.config import PretrainConfig
    from bothways.pretraining.run import PretrainResult
    from bothways.tasks.catalogue import Trainable
    from bothways.training.run import Event


def pretrain(  # noqa: PLR0913 – one option per question
    corpus: Corpora,
    model: str | EncoderConfig | None = None,
    objective: str | Objective | None = None,
    *,
    until: str | None = None,
    out: str | Path | None = None,
    start: str | Path | None = None,
    recipe: str | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress | bool = True,
    on_event: Callable[[Event], object] = lambda event: None,
    **settings: Any,
) -> PretrainResult:
    """Pre-train an encoder on a corpus; with `out`, save it in `out/model`.

    Args:
        corpus: a corpus, its folder or its URL, or several: a list of folders, whose names are
            those of the corpora, or a mapping from names to corpora or folders; the setting
            `mixture` says how often each is read.
        model: a preset such as "bert-base", or an encoder configuration; vocabulary and padding are
            those of the corpus. `None` for "bert-mini"; with `start`, for the model there.
        objective: a name such as "masked-lm", or an objective; `None` for the usual one of the
            model.
        until: end of the run, such as "2 hours", "3 epochs" or "10000 steps".
        out: folder of the run with checkpoints and metrics; `None` trains in memory.
        start: a model folder whose weights to continue from.
        recipe: "modern", "paper", "short", "electra", "roberta", "albert", "spanbert", "deberta" or
            "deberta_v3"; `None` for "short" if `until` is 30 minutes or less, else "modern".
        resume: continue from the newest checkpoint in `out`.
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: further settings as nested dicts of dotted paths, such as
            `training={"optimizer": {"lr": 1e-3}}`.

    Returns:
        The trained model (`model`), the metrics of held-out documents by name (`metrics`), and the
        model folder (`folder`; None in memory).

    Raises:
        BothwaysError: a setting, the corpus or the machine is not suitable, or a loss is not
            finite.

    Examples:
        >>> tiny = bothways.EncoderConfig(vocab=5, width=32, depth=1, heads=2, intermediate_size=64)
        >>> result = bothways.pretrain("corpus", tiny, "masked-lm", until="2 steps", out="new-run")
        >>> result.folder.name, result.progress.steps
        ('model', 2)
    """
    from bothways.data.corpus import Corpus
    from bothways.data.mixture import Smoothed
    from bothways.pretraining import run
    from bothways.pretraining.build import encoder_of
    from bothways.pretraining.config import load_config
    from bothways.pretraining.recipes import RECIPES, chosen_settings

    text = given_corpora(corpus)
    tokenizer = (text if isinstance(text, Corpus) else next(iter(text.values()))).tokenizer
    if recipe is not None:
        choice(recipe, RECIPES, "recipe")
    source = None if start is None else str(start)
    encoder = encoder_of(model, source, tokenizer)
    overrides: dict[str, Any] = dict(settings)
    if isinstance(objective, str):
        overrides["objective"] = objective.replace("-", "_")
    if until is not None:
        overrides["training"] = {"until": until, **overrides.get("training", {})}

    def changed(base: PretrainConfig) -> PretrainConfig:
        """Return the settings of a recipe with those of this call."""
        if not isinstance(text, Corpus):
            base = dataclasses.replace(base, mixture=Smoothed())
        if objective is not None and not isinstance(objective, str):
            base = dataclasses.replace(base, objective=objective)
        return load_config(base, overrides)

    config, notes = chosen_settings(recipe, encoder, source, changed)
    folder = None if out is None else Path(out)
    with shown_progress(progress) as shown:
        for note in notes:
            shown.message(note)
        return run.pretrain(
            config, text, folder, resume=resume, device=device, progress=shown, on_event=on_event
        )


def adapt(  # noqa: PLR0913 – one option per question
    model: str | Path,
    texts: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    replay: str | Path | Iterable[str | Path] = (),
    replay_share: float = 0.1,
    until: str | None = None,
    length: int = 128,
    resume: bool = False,
    device: str = "auto",
    progress: Progress | bool = True,
    **settings: Any,
) -> Adaptation:
    """Continue the pre-training of a model on text of a domain; save it in `out/model`.

    Args:
        model: a model folder, the folder of a run, or a Hub id.
        texts: files, folders or patterns with text of the domain, or the folder of a corpus.
        out: folder of the run, with corpora, checkpoints, `model/`, `report.html` and
            `new_words.txt`.
        replay: general text or a corpus, read among that of the domain and measured.
        replay_share: share of the sequences of general text; 0 only measures it.
        until: end of the run, such as "20 minutes"; `None` for one pass over the text, with at
            least 1,000 updates.
        length: tokens of a sequence.
        resume: continue from the newest checkpoint in `out`.
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        settings: further settings of `PretrainConfig`, such as `held_out=0.1`.

    Returns:
        The metrics of held-out text `before` and `after`, by "domain" and "general", the model
        folder (`folder`), and how the vocabulary fits the domain (`vocabulary`).

    Raises:
        BothwaysError: the model, the text or a setting is not suitable.

    Examples:
        >>> result = bothways.adapt("my-bert", "text.txt", "adapted", until="4 steps", length=16)
        >>> sorted(result.before), result.folder.name
        (['domain'], 'model')
    """
    from bothways.pretraining import adapt as job

    def paths(given: str | Path | Iterable[str | Path]) -> list[str]:
        """Return one or several paths as texts."""
        return [str(one) for one in ([given] if isinstance(given, str | Path) else given)]

    with shown_progress(progress) as shown:
        return job.adapt(
            model,
            paths(texts),
            Path(out),
            replay=paths(replay),
            replay_share=replay_share,
            until=until,
            length=length,
            overrides=settings,
            resume=resume,
            device=device,
            progress=shown,
        )


@overload
def finetune(
    model: str | Path,
    train: Rows,
    dev: Rows | float | None = None,
    task: str | Trainable = "classify",
    *,
    folds: None = None,
    **settings: Any,
) -> FinetuneResult: ...


@overload
def finetune(
    model: str | Path,
    train: Rows,
    dev: None = None,
    task: str | Trainable = "classify",
    *,
    folds: int,
    **settings: Any,
) -> CrossValidation: ...


def finetune(  # noqa: PLR0913 – one option per question
    model: str | Path,
    train: Rows,
    dev: Rows | float | None = None,
    task: str | Trainable = "classify",
    *,
    folds: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    recipe: str = "modern",
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
        task: a name such as "classify", "ner" or "qa", or a task.
        folds: number of folds of a cross-validation: a run per fold of `train`, which is then the
            dev data. The result has `metrics`, `deviations` and `predictions` for all rows.
        out: folder of the run with checkpoints and metrics; `None` trains in memory.
        resume: continue from the newest checkpoint in `out`.
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        seed: seed of new heads and of the order of the data.
        recipe: "modern", "paper" or "electra".
        metrics: functions by name that take the predictions and the examples of the dev data, and
            return a number or a dict of numbers; `metric="name"` chooses the best weights by one.
            Higher is better, unless it is given as `bothways.Metric(function, better="lowest")`.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: common names such as `lr`, `epochs`, `batch_size`, `max_length`, or nested dicts
            of dotted paths.

    Returns:
        The metrics of the best weights on the dev data (`metrics`; empty without dev data), with
        the methods `predictor()` and `save(folder)`.

    Raises:
        BothwaysError: the data, a setting or the machine is not suitable, or a loss is not finite.

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
        >>> result = bothways.finetune("my-bert", rows * 8, folds=2, epochs=1)
        >>> [row["truth"] for row in result.predictions][:3], "accuracy" in result.deviations
        (['yes', 'no', 'yes'], True)
    """
    from bothways.core.config.reader import replaced_members
    from bothways.core.errors import ConfigError
    from bothways.finetuning import run
    from bothways.finetuning.config import RECIPES, load_config
    from bothways.lab.sweeps.folds import cross_validate, first_fold
    from bothways.tasks.base import Task
    from bothways.tasks.catalogue import trainable_task

    make = choice(recipe, RECIPES, "recipe")
    chosen = trainable_task(task) if isinstance(task, str) else task
    if not isinstance(chosen, Task):
        what = f"must be a name or a task, not {type(chosen).__name__}"
        fix = 'Write task="regress"; with settings, task=RegressionTask(lstm=768).'
        raise ConfigError(what, where="task", fix=fix)
    dev_name, dev_rows = dev_source(dev if folds is None else first_fold(folds, dev))
    base = dataclasses.replace(
        make(chosen),
        model=str(model),
        train=source_name(train, "train"),
        dev=dev_name,
        seed=seed,
        metrics=metrics,
    )
    config = load_config(base, settings)
    folder = None if out is None else Path(out)
    with shown_progress(progress) as shown:
        for note in replaced_members(config, base):
            shown.message(f"note: {note}")
        if folds is not None:
            rows = list(train) if isinstance(train, Iterator) else train
            return cross_validate(
                config, folds, folder, rows,
                resume=resume, device=device, progress=shown, on_event=on_event,
            )  # fmt: skip
        return run.finetune(
            config,
            folder,
            train=train,
            dev=dev_rows,
            resume=resume,
            device=device,
            progress=shown,
            on_event=on_event,
        )


def distil(  # noqa: PLR0913 – one option per question
    teacher: str | Path,
    data: Rows | Corpus,
    student: str | Path | None = None,
    dev: Rows | float | None = None,
    *,
    until: str | None = None,
    out: str | Path | None = None,
    recipe: str | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress | bool = True,
    on_event: Callable[[Event], object] = lambda event: None,
    **settings: Any,
) -> PretrainResult | FinetuneResult:
    """Train a smaller model on what a teacher computes; with `out`, save it in `out/model`.

    With a corpus the student is pre-trained, with labelled data it is fine-tuned for the teacher's
    task, on the labels and the teacher's outputs.

    Args:
        teacher: a model folder, the folder of a run, or a Hub id.
        data: a corpus, its folder or its URL, built with the teacher's tokenizer; or labelled data
            as for `finetune`.
        student: with a corpus a preset or a model folder, `None` for half of the teacher's layers;
            with labelled data a model folder or a Hub id.
        dev: labelled data by which the best weights are chosen; 0.2 splits a fifth from `data`.
        until: end of the run, such as "2 hours", "3 epochs" or "10000 steps".
        out: folder of the run with checkpoints and metrics; `None` trains in memory.
        recipe: "distilbert", "tinybert" or "minilm" with a corpus, "modern", "paper" or "tinybert"
            with labelled data; `None` for the first.
        resume: continue from the newest checkpoint in `out`.
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: further settings as nested dicts of dotted paths, such as
            `teacher={"weight": 0.7}`; with labelled data common names such as `lr`, too.

    Returns:
        The result of `bothways.pretrain` with a corpus, that of `bothways.finetune` with labelled
        data.

    Raises:
        BothwaysError: the teacher, the data, a setting or the machine is not suitable, or a loss is
            not finite.

    Examples:
        >>> texts = {"positive": "a good film", "negative": "a bad play"}
        >>> rows = [{"text": text, "label": label} for label, text in texts.items()]
        >>> result = bothways.distil("my-classifier", rows * 8, "my-bert", epochs=1)
        >>> result.learner.labels
        ('negative', 'positive')
    """
    from bothways.data.corpus import Corpus
    from bothways.data.manifest import holds_corpus
    from bothways.finetuning import run as finetuning
    from bothways.finetuning.config import load_config
    from bothways.finetuning.distillation import taught_finetuning
    from bothways.pretraining import run as pretraining
    from bothways.pretraining.config import load_config as load_pretraining
    from bothways.pretraining.distilling import distillation

    name = None if student is None else str(student)
    folder = None if out is None else Path(out)
    if until is not None:
        settings["training"] = {"until": until, **settings.get("training", {})}
    common: Any = {"resume": resume, "device": device, "on_event": on_event}
    named = isinstance(data, str | Path) and (Path(data).is_dir() or holds_corpus(data))
    if named or isinstance(data, Corpus):
        text = data if isinstance(data, Corpus) else Corpus.open(data)  # type: ignore[arg-type]
        base = distillation(str(teacher), text, name, recipe)
        config = load_pretraining(base, settings)
        with shown_progress(progress) as shown:
            return pretraining.pretrain(config, text, folder, progress=shown, **common)
    measured, dev_rows = dev_source(dev)
    task = taught_finetuning(str(teacher), source_name(data, "train"), name, recipe, measured)
    with shown_progress(progress) as shown:
        return finetuning.finetune(
            load_config(task, settings), folder, train=data, dev=dev_rows, progress=shown, **common
        )
