"""The public functions: the steps from text to predictions, one function each.

They accept what users have (paths, strings, rows, DataFrames, data sets) and call the packages
that do the work. Whatever a command does, one of these functions does in Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bothways.core.errors import ConfigError, DataError
from bothways.core.progress import SILENT, Progress

if TYPE_CHECKING:
    from typing import TypeAlias

    from bothways.data.corpus import Corpus
    from bothways.data.documents import Document
    from bothways.data.words import Words
    from bothways.export.folder import ExportResult, Format
    from bothways.finetuning.fit import FinetuneResult
    from bothways.finetuning.metrics import Own
    from bothways.finetuning.prepare import Rows
    from bothways.model.config import ModelConfig
    from bothways.objectives.objective import Objective
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.prepared_model import PredictPrecision
    from bothways.prediction.session_model import Runtime
    from bothways.pretraining.adapt import Adaptation
    from bothways.pretraining.run import PretrainResult
    from bothways.tasks.catalogue import Trainable
    from bothways.text.tokenizer import Tokenizer
    from bothways.training.run import Event

    Corpora: TypeAlias = (
        str | Path | Corpus | Mapping[str, str | Path | Corpus] | Iterable[str | Path | Corpus]
    )


def load(
    folder: str | Path,
    task: str | None = None,
    *,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
    length: int | None = None,
    batch_invariant: bool = False,
    runtime: Runtime = "torch",
    **settings: Any,
) -> Predictor:
    """Load a model for predictions; call the result with a text, a pair, a row or a list.

    Args:
        folder: a model folder, the folder of a run, or a Hub id.
        task: a name such as "classify", "ner", "qa", "fill" or "embed"; `None` for the task that
            the model was trained for.
        precision: precision of matrix products: "fp32", "bf16", "int8" or "auto".
        device: "auto", "cpu", "cuda" or "cuda:N".
        length: maximum length of a text in tokens; `None` as in training.
        batch_invariant: whether a text has the same prediction in any company, to the bit, as
            `bothways predict` computes it; without it a short text alone is computed sooner.
        runtime: "onnxruntime" computes the graph in a folder that `bothways.export_model` wrote.
        settings: settings of the task, such as `pooling="cls"` or `top=3`.

    Raises:
        FolderError: the folder cannot be read, or lacks the heads of the task.
        ConfigError: an unknown task, setting or device.

    Examples:
        >>> classify = bothways.load("my-classifier")
        >>> classify("a good film").label
        'positive'
        >>> [prediction.label for prediction in classify(["a good film", "a bad play"])]
        ['positive', 'negative']
        >>> embed = bothways.load("my-bert", task="embed")
        >>> embed.encode(["a good film", "a bad play"]).shape
        (2, 32)
    """
    from bothways.prediction.predictor import open_task

    return open_task(
        folder,
        task,
        precision=precision,
        device=device,
        length=length,
        batch_invariant=batch_invariant,
        runtime=runtime,
        settings=settings,
    )


def export_model(
    folder: str | Path,
    out: str | Path,
    to: Format | Iterable[Format] = "onnx",
    *,
    task: str | None = None,
    length: int | None = None,
    int8: str | Path | Iterable[Any] | None = None,
    limit: float = 0.5,
    progress: Progress | bool = True,
    **settings: Any,
) -> ExportResult:
    """Write a model as a graph for onnxruntime, OpenVINO or a browser, and verify its outputs.

    Args:
        folder: a model folder, the folder of a run, or a Hub id.
        out: the new folder; an earlier export there is replaced.
        to: "onnx", "openvino", or both as a list.
        task: what the graph computes, as for `load`; `None` for the task of the folder.
        length: maximum length of a text in tokens; `None` as in training.
        int8: labelled data, a file, a Hub data set or rows: an ONNX file in int8 is written, too,
            if it scores as well there as fp32.
        limit: points of the metric that int8 may lose.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        settings: settings of the task, such as `pooling="cls"`.

    Raises:
        FolderError: the folder cannot be read or its model cannot be a graph, or `out` holds
            something else.
        ConfigError: an unknown task or setting, or int8 loses too much.
        DivergedError: a runtime computes other outputs than the model.
        ResourceError: a package of the extra "export" is missing.

    Examples:
        >>> result = bothways.export_model("my-classifier", "exported", int8="dev.tsv")
        >>> sorted(result.sizes)
        ['onnx/model.onnx', 'onnx/model_quantized.onnx']
        >>> classify = bothways.load("exported", runtime="onnxruntime")
        >>> classify("a good film").label
        'positive'
    """
    from bothways.export.folder import Int8Gate, write_export

    gate = None
    if int8 is not None:
        data = int8 if isinstance(int8, str | Path) else list(int8)  # read twice
        gate = Int8Gate(lambda predictor: predictor.evaluate(data), limit)
    with _shown(progress) as shown:
        return write_export(
            folder, out, to, task=task, length=length, settings=settings, int8=gate, progress=shown
        )


def train_tokenizer(
    texts: str | Path | Iterable[str] | Mapping[str, str | Path | Iterable[str]],
    size: int = 30_000,
    *,
    kind: str = "wordpiece",
    alpha: float = 0.7,
    out: str | Path | None = None,
    **settings: Any,
) -> Tokenizer:
    """Train a vocabulary.

    Args:
        texts: a file, folder or pattern with text, or an iterable of texts; several languages as a
            mapping from names to these.
        size: number of tokens, special tokens included.
        kind: "wordpiece" (BERT), "bpe" (RoBERTa) or "unigram" (ALBERT).
        alpha: of several languages: shares of the training text are proportional to size^alpha.
        out: folder to save the tokenizer in.
        settings: of the kind, such as `lowercase=False`: the fields of its class, such as
            `bothways.text.trainers.WordPiece`.

    Raises:
        ConfigError: an unknown kind or setting.
        DataError: a file cannot be read.

    Examples:
        >>> tokenizer = bothways.train_tokenizer("text.txt", size=80, out="new-tokenizer")
        >>> tokenizer.size
        80
    """
    from bothways.text import trainers
    from bothways.text.sampling import sample_languages

    kinds = {"wordpiece": trainers.WordPiece, "bpe": trainers.ByteBPE, "unigram": trainers.Unigram}
    if kind not in kinds:
        fix = f"Choose one of {', '.join(kinds)}."
        raise ConfigError(f"unknown kind of tokenizer {kind!r}", where="kind", fix=fix)
    trainer = _build(kinds[kind], "tokenizer", size=size, **settings)
    if isinstance(texts, Mapping):
        languages = {
            name: (document.text for document in _documents(one)) for name, one in texts.items()
        }
        mixed = sample_languages(languages, alpha, trainers.CEILING)
        tokenizer = trainers.learn(mixed, trainer)
    else:
        lines = (document.text for document in _documents(texts))
        tokenizer = trainers.train_tokenizer(lines, trainer)
    if out is not None:
        tokenizer.save(Path(out))
    return tokenizer


def build_corpus(
    texts: str | Path | Iterable[str | Path | Document],
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    language: str = "auto",
    words: Words | None = None,
    workers: int | None = None,
    progress: Progress | bool = True,
) -> Corpus:
    """Build a corpus for pre-training, continue an interrupted build, or open the existing corpus.

    Args:
        texts: a file, folder or pattern, several of them, or documents.
        tokenizer: a tokenizer, or its folder.
        out: folder of the corpus.
        language: language for splitting sentences; "auto" detects it per document.
        words: for the masking of whole words in Chinese, how a sentence is divided into words:
            "jieba", "spaces", or a function that returns its words.
        workers: number of processes; `None` for one per core.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.

    Raises:
        DataError: a file cannot be read.

    Examples:
        >>> corpus = bothways.build_corpus("text.txt", "tokenizer", "new-corpus", workers=1)
        >>> len(corpus)
        60
    """
    from bothways.data import corpus
    from bothways.text.tokenizer import Tokenizer

    known = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    documents = _documents(texts, of_paths=True)
    with _shown(progress) as shown:
        return corpus.build_corpus(
            documents,
            known,
            out,
            language=language,
            words=words,
            workers=workers,
            progress=shown,
        )


def pretrain(  # noqa: PLR0913 – one option per question
    corpus: Corpora,
    model: str | ModelConfig = "bert-mini",
    objective: str | Objective | None = None,
    *,
    until: str | None = None,
    out: str | Path | None = None,
    start: str | Path | None = None,
    recipe: str = "modern",
    resume: bool = False,
    device: str = "auto",
    progress: Progress | bool = True,
    on_event: Callable[[Event], object] = lambda event: None,
    **settings: Any,
) -> PretrainResult:
    """Pre-train an encoder on a corpus; with `out`, save it in `out/model`.

    Args:
        corpus: a corpus or its folder, or several: a list of folders, whose names are those of the
            corpora, or a mapping from names to corpora or folders; the setting `mixture` says how
            often each is read.
        model: a preset such as "bert-base", or an encoder configuration; vocabulary and padding are
            those of the corpus.
        objective: a name such as "masked-lm", or an objective; `None` for the usual one of the
            model.
        until: end of the run, such as "2 hours", "3 epochs" or "10000 steps".
        out: folder of the run with checkpoints and metrics; `None` trains in memory.
        start: a model folder whose weights to continue from.
        recipe: "modern", "paper", "short", "electra", "roberta", "albert", "spanbert", "deberta" or
            "deberta_v3".
        resume: continue from the newest checkpoint in `out`.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: further settings as nested dicts of dotted paths, such as
            `training={"optimizer": {"lr": 1e-3}}`.

    Raises:
        BothwaysError: a setting, the corpus or the machine is not suitable, or a loss is not
            finite.

    Examples:
        >>> tiny = bothways.EncoderConfig(vocab=5, width=32, depth=1, heads=2, intermediate_size=64)
        >>> result = bothways.pretrain("corpus", tiny, "masked-lm", until="2 steps", out="new-run")
        >>> result.folder.name, result.progress.steps
        ('model', 2)
    """
    from bothways.core.config import reader
    from bothways.data.corpus import Corpus
    from bothways.data.mixture import Smoothed
    from bothways.families.catalogue import preset
    from bothways.pretraining import run
    from bothways.pretraining.build import fit_to_corpus, start_encoder
    from bothways.pretraining.config import PretrainConfig
    from bothways.pretraining.recipes import RECIPES

    text = _corpora(corpus)
    tokenizer = (text if isinstance(text, Corpus) else next(iter(text.values()))).tokenizer
    make = _choice(recipe, RECIPES, "recipe")
    if start is None:
        shape = preset(model) if isinstance(model, str) else model
        base = make(fit_to_corpus(shape, tokenizer))
    else:
        encoder = start_encoder(str(start))
        base = dataclasses.replace(make(encoder), encoder=encoder, start=str(start))
    if not isinstance(text, Corpus):
        base = dataclasses.replace(base, mixture=Smoothed())
    overrides: dict[str, Any] = dict(settings)
    if isinstance(objective, str):
        overrides["objective"] = objective.replace("-", "_")
    elif objective is not None:
        base = dataclasses.replace(base, objective=objective)
    if until is not None:
        overrides["training"] = {"until": until, **overrides.get("training", {})}
    config = reader.load(PretrainConfig, base=base, overrides=overrides)
    folder = None if out is None else Path(out)
    with _shown(progress) as shown:
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
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        settings: further settings of `PretrainConfig`, such as `held_out=0.1`.

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

    with _shown(progress) as shown:
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


def finetune(  # noqa: PLR0913 – one option per question
    model: str | Path,
    train: Rows,
    dev: Rows | None = None,
    task: str | Trainable = "classify",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    recipe: str = "modern",
    metrics: Own | None = None,
    device: str = "auto",
    progress: Progress | bool = True,
    on_event: Callable[[Event], object] = lambda event: None,
    **settings: Any,
) -> FinetuneResult:
    """Fine-tune a model on labelled data; with `out`, save it in `out/model`.

    Args:
        model: a model folder, the folder of a run, or a Hub id.
        train, dev: a file, a Hub data set, a DataFrame, a `datasets.Dataset`, or a list of dicts.
        task: a name such as "classify", "ner" or "qa", or a task.
        out: folder of the run with checkpoints and metrics; `None` trains in memory.
        resume: continue from the newest checkpoint in `out`.
        seed: seed of new heads and of the order of the data.
        recipe: "modern" or "paper".
        metrics: functions by name that take the predictions and the examples of the dev data, and
            return a number or a dict of numbers; `metric="name"` chooses the best weights by one.
            Higher is better, unless it is given as `bothways.Metric(function, better="lowest")`.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: common names such as `lr`, `epochs`, `batch_size`, `max_length`, or nested dicts
            of dotted paths.

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
    """
    from bothways.finetuning import run
    from bothways.finetuning.config import RECIPES
    from bothways.finetuning.prepare import FinetuneConfig, load_config
    from bothways.tasks.catalogue import trainable_task

    make = _choice(recipe, RECIPES, "recipe")
    definition = trainable_task(task) if isinstance(task, str) else task
    base = FinetuneConfig(
        model=str(model),
        train=_source_name(train, "train"),
        dev=None if dev is None else _source_name(dev, "dev"),
        seed=seed,
        **{**vars(make(definition)), "metrics": metrics},
    )
    config = load_config(base, settings)
    folder = None if out is None else Path(out)
    with _shown(progress) as shown:
        return run.finetune(
            config,
            folder,
            train=train,
            dev=dev,
            resume=resume,
            device=device,
            progress=shown,
            on_event=on_event,
        )


def distil(  # noqa: PLR0913 – one option per question
    teacher: str | Path,
    data: Rows | Corpus,
    student: str | Path | None = None,
    dev: Rows | None = None,
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
        data: a corpus or its folder, built with the teacher's tokenizer; or labelled data as for
            `finetune`.
        student: with a corpus a preset or a model folder, `None` for half of the teacher's layers;
            with labelled data a model folder or a Hub id.
        dev: labelled data by which the best weights are chosen.
        until: end of the run, such as "2 hours", "3 epochs" or "10000 steps".
        out: folder of the run with checkpoints and metrics; `None` trains in memory.
        recipe: "distilbert", "tinybert" or "minilm" with a corpus, "modern" or "paper" with
            labelled data; `None` for the first.
        resume: continue from the newest checkpoint in `out`.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        on_event: called after each step, report, evaluation and checkpoint.
        settings: further settings as nested dicts of dotted paths, such as
            `teacher={"weight": 0.7}`; with labelled data common names such as `lr`, too.

    Raises:
        BothwaysError: the teacher, the data, a setting or the machine is not suitable, or a loss is
            not finite.

    Examples:
        >>> texts = {"positive": "a good film", "negative": "a bad play"}
        >>> rows = [{"text": text, "label": label} for label, text in texts.items()]
        >>> result = bothways.distil("my-classifier", rows * 8, "my-bert", epochs=1)
        >>> result.task.labels
        ('negative', 'positive')
    """
    from bothways.core.config import reader
    from bothways.data.corpus import Corpus
    from bothways.finetuning import run as finetuning
    from bothways.finetuning.prepare import load_config, taught_finetuning
    from bothways.pretraining import run as pretraining
    from bothways.pretraining.config import PretrainConfig
    from bothways.pretraining.distilling import distillation

    name = None if student is None else str(student)
    folder = None if out is None else Path(out)
    if until is not None:
        settings["training"] = {"until": until, **settings.get("training", {})}
    common: Any = {"resume": resume, "device": device, "on_event": on_event}
    if isinstance(data, Corpus) or (isinstance(data, str | Path) and Path(data).is_dir()):
        text = data if isinstance(data, Corpus) else Corpus.open(Path(data))
        base = distillation(str(teacher), text, name, recipe)
        config = reader.load(PretrainConfig, base=base, overrides=settings)
        with _shown(progress) as shown:
            return pretraining.pretrain(config, text, folder, progress=shown, **common)
    named = None if dev is None else _source_name(dev, "dev")
    task = taught_finetuning(str(teacher), _source_name(data, "train"), name, recipe, named)
    with _shown(progress) as shown:
        return finetuning.finetune(
            load_config(task, settings), folder, train=data, dev=dev, progress=shown, **common
        )


def _source_name(rows: Rows, name: str) -> str:
    """Return the path of a source, or a name for rows."""
    return str(rows) if isinstance(rows, str | Path) else f"{name} rows"


def _shown(progress: Any) -> AbstractContextManager[Progress]:
    """Return the receiver of progress: standard error, nothing, or the given one."""
    from bothways.commands.progress import terminal_progress

    if progress is True:
        return terminal_progress()
    if progress is not False and not isinstance(progress, Progress):
        what = f"is {progress!r}, which has no methods stage, advance and message"
        raise ConfigError(what, where="progress", fix="Give True, False or an object that has.")
    return nullcontext(SILENT if progress is False else progress)


def _corpora(given: Corpora) -> Corpus | dict[str, Corpus]:
    """Open what is not open yet; the names of folders in a list are their own."""
    from bothways.data.corpus import Corpus
    from bothways.data.mixture import names_of

    def opened(one: str | Path | Corpus) -> Corpus:
        """Return a corpus, given it or its folder."""
        return one if isinstance(one, Corpus) else Corpus.open(Path(one))

    if isinstance(given, str | Path | Corpus):
        return opened(given)
    if isinstance(given, Mapping):
        return {name: opened(one) for name, one in given.items()}
    items = [opened(one) for one in given]
    if not items:
        raise DataError("there is no corpus", where="corpus", fix="Give one or more.")
    return dict(zip(names_of([item.folder for item in items]), items, strict=True))


def _choice(name: str, known: Mapping[str, Any], where: str) -> Any:
    if name not in known:
        what = f"unknown {where} {name!r}"
        raise ConfigError(what, where=where, fix=f"Choose one of {', '.join(known)}.")
    return known[name]


def _build(cls: type[Any], where: str, **values: Any) -> Any:
    """Build a dataclass; unknown fields are a ConfigError."""
    known = {field.name for field in dataclasses.fields(cls)}
    for name in values.keys() - known:
        fix = f"Known here: {', '.join(sorted(known))}."
        raise ConfigError(f"unknown setting {name!r}", where=f"{where}.{name}", fix=fix)
    return cls(**values)


def _documents(texts: Any, *, of_paths: bool = False) -> Iterable[Document]:
    """Return the documents of files, or of texts; strings in a list are paths if `of_paths`."""
    from bothways.data.documents import Document, read_documents

    if isinstance(texts, str | Path):
        return read_documents([str(texts)])
    if not isinstance(texts, Iterable):
        what = f"is a {type(texts).__name__}: give a path, texts or documents"
        raise DataError(what, where="texts")
    items = list(texts) if of_paths else texts
    if of_paths and all(isinstance(item, str | Path) for item in items):
        return read_documents([str(item) for item in items])
    return (
        item if isinstance(item, Document) else Document(str(item), f"text {number}")
        for number, item in enumerate(items, 1)
    )
