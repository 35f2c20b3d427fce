"""Open a model: for predictions, their evaluation, a training loop of one's own, as a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, overload

from bothways.core.config.values import checked, require_at_least, require_choice, require_range
from bothways.core.errors import ConfigError, DataError, argument, require, require_unset
from bothways.core.files import check_not_input, check_output_path, local_path
from bothways.core.progress import Progress, shown_progress
from bothways.hub import Format
from bothways.prediction import PartFormat, PredictPrecision, Runtime

if TYPE_CHECKING:
    from bothways.hub.model_folder import PretrainedModel
    from bothways.model.heads import Head
    from bothways.prediction.analysis.calibrate import CalibrationResult
    from bothways.prediction.analysis.evaluation import Evaluation, EvaluationData
    from bothways.prediction.bulk.run import BulkResult
    from bothways.prediction.export.folder import ExportResult
    from bothways.prediction.predictor import Predictor
    from bothways.tasks.sentence_embedding.vectors import VectorType


@checked
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
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        length: maximum length of a text in tokens; `None` as in training.
        batch_invariant: True for predictions that are bit-identical regardless of the other
            texts in the batch, as of `bothways predict`; without it a short text alone is
            computed sooner.
            Vectors of the task "embed" always are.
        runtime: "onnxruntime" or "openvino" computes the graph in a folder that
            `bothways.export_model` wrote.
        settings: settings of the task, such as `pooling="cls"` or `top=3`; `labels=[…]` opens a
            model of natural language inference as a classifier by these labels.

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
    from bothways.prediction.opening import open_task

    require_choice(PredictPrecision, "precision", precision)
    require_choice(Runtime, "runtime", runtime)
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


@overload
def predict(
    model: str | Path,
    files: str | Path | Iterable[Any],
    out: None = None,
    *,
    task: str | None = None,
    text: str | None = None,
    text_b: str | None = None,
    best: int | None = None,
    keep: str | Iterable[str] = (),
    format: PartFormat | None = None,
    window: int | None = None,
    length: int | None = None,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
    runtime: Runtime = "torch",
    output_dtype: VectorType = "float32",
    calibration: str | Path | None = None,
    progress: Progress | bool = True,
    **settings: Any,
) -> Iterator[dict[str, Any]]: ...


@overload
def predict(
    model: str | Path,
    files: str | Path | Iterable[Any],
    out: str | Path,
    *,
    rows: int = 4096,
    rejects: bool = False,
    processes: int | None = None,
    threads: int | None = None,
    **options: Any,
) -> BulkResult: ...


@checked
def predict(  # noqa: PLR0913 – one option per question
    model: str | Path,
    files: str | Path | Iterable[Any],
    out: str | Path | None = None,
    *,
    task: str | None = None,
    text: str | None = None,
    text_b: str | None = None,
    best: int | None = None,
    keep: str | Iterable[str] = (),
    format: PartFormat | None = None,
    rows: int = 4096,
    rejects: bool = False,
    processes: int | None = None,
    threads: int | None = None,
    window: int | None = None,
    length: int | None = None,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
    runtime: Runtime = "torch",
    output_dtype: VectorType = "float32",
    calibration: str | Path | None = None,
    progress: Progress | bool = True,
    **settings: Any,
) -> BulkResult | Iterator[dict[str, Any]]:
    """Predict the rows of files, as `bothways predict` does; the same call continues.

    Args:
        model: a fine-tuned model folder, the folder of a run, a sentence encoder, or a Hub id.
        files: a file, a quoted glob or a Hub data set, several of them, or "-" for standard input;
            without `out` in Python also rows, as for a predictor, but for plain texts.
        out: one file: .jsonl, .csv, .tsv, .parquet, or .npy for vectors. Or a folder of predictions
            in parts. Both read any number of files, and continue where they were stopped.
        task: a task of finetune, fill, likelihood, prefer, zero-shot, embed, or a common alias of
            one of them; by default the task of the model.
        text: column of the text, or of the first of two (for rerank the query), without a header
            its number; by default as in training.
        text_b: the column of the second text.
        best: number of the most probable labels, or of the best documents, to keep; by default all.
        keep: columns to copy to the output, such as a key; old=new renames one.
        format: format of the parts: jsonl, parquet, npy, or spans, JSON lines with the text and the
            entities as character spans. By default npy for vectors, parquet if the input is or if
            vectors have columns to keep, else jsonl.
        rows: rows of a part.
        rejects: with `out`: write rows that cannot be read or predicted to a file of their own
            instead of stopping at the first one.
        processes: with `out`: processes that predict; by default 1.
        threads: with `out`: threads of each process; by default an equal share of the cores.
        window: without `out`: texts to read before the first prediction; by default 4096.
        length: maximum length in tokens; by default as in training.
        precision: precision of matrix products: fp32, bf16, int8 or auto.
        device: auto (a GPU, if there is one), cpu, cuda or cuda:N.
        runtime: what computes the model: torch, or onnxruntime or openvino for an exported folder.
        output_dtype: type of vectors: float32; int8 or uint8, a byte a component; binary or
            ubinary, a bit.
        calibration: an .npy file with vectors of this model, whose ranges int8 and uint8 take.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        settings: settings of the task, such as `top=10` for fill, `pooling="max"` for embed, or
            `labels=["travel", "cooking"]` for a model of natural language inference.

    Returns:
        With `out` the totals of its rows and parts, else an iterator over the prediction of each
        row of one file, as plain values.

    Raises:
        ConfigError: an unknown task or setting, or the folder was begun with other ones.
        DataError: a file or a row cannot be read.
        FolderError: the model cannot be read, or lacks the heads of the task.

    Examples:
        >>> done = bothways.predict("my-classifier", "dev.tsv", "labels.jsonl", text="text")
        >>> done.rows
        24
        >>> rows = bothways.predict("my-classifier", "dev.tsv", keep=["label=given"])
        >>> sorted(next(rows))
        ['given', 'label', 'probabilities']
    """
    from bothways.data.tables import iter_rows
    from bothways.prediction.bulk.parts import BulkRequest, expand_patterns
    from bothways.prediction.bulk.run import SUFFIXES, predict_files, predict_rows
    from bothways.tasks.sentence_embedding.vectors import VectorType

    require_choice(PredictPrecision, "precision", precision)
    require_choice(Runtime, "runtime", runtime)
    require_choice(VectorType, "output_dtype", output_dtype)
    items = [files] if isinstance(files, str | Path) else list(iter_rows(files, "files"))
    in_memory = [item for item in items if not isinstance(item, str | Path)]
    require_at_least(1, best=best)
    if in_memory:
        fix = "Leave it out: the call yields a prediction for each row, in their order."
        message = "is for files, and rows in memory are given"
        require_unset(message, fix, out=out, keep=keep or None)
    request = BulkRequest(
        str(model),
        () if in_memory else tuple(expand_patterns(map(str, items))),
        task=task,
        settings=settings,
        length=length,
        precision=precision,
        device=device,
        runtime=runtime,
        text=text,
        text_b=text_b,
        top=best,
        keep=(keep,) if isinstance(keep, str) else tuple(keep),
        form=format,
        rows=rows,
        rejects=rejects,
        vectors=output_dtype,
        ranges=None if calibration is None else _read_ranges(local_path(calibration)),
    )
    if out is None:
        require_unset(
            "is for predictions in parts", f"Name a folder for them: {argument(out='DIR')}",
            format=format in ("parquet", "npy") or None, rows=rows != BulkRequest.rows or None,
            rejects=rejects or None, processes=processes, threads=threads,
        )  # fmt: skip

        def stream() -> Iterator[dict[str, Any]]:
            with shown_progress(progress) as reporter:
                yield from predict_rows(request, window, reporter, items if in_memory else None)

        return stream()
    out = local_path(out)
    check_not_input(out, [] if calibration is None else [calibration])
    # "v1.2" is a folder, "p.json" names a file.
    if out.suffix.lower() not in SUFFIXES and out.suffix[1:2].isalpha() and not out.is_dir():
        message = f"{str(out)!r} has no format of predictions"
        name = out.name.partition(".")[0]
        fix = f"Name a file: {name}.jsonl, .csv, .tsv or .parquet; or a folder."
        raise ConfigError(message, where="out", fix=fix)
    fix = "Leave it out; parts have rows."
    require_unset("is for predictions that are printed", fix, window=window)
    with shown_progress(progress) as reporter:
        return predict_files(request, out, 1 if processes is None else processes, threads, reporter)


def _read_ranges(file: Path) -> tuple[tuple[float, ...], ...]:
    """Return the lowest and the highest values of the components of vectors in a file."""
    import numpy as np

    from bothways.tasks.sentence_embedding.vectors import ARRAY_FAULTS, ranges_of

    try:
        vectors = np.lib.format.open_memmap(file, mode="r")
    except ARRAY_FAULTS as error:
        raise DataError(f"cannot be read as vectors: {error}", where=file) from error
    low, high = ranges_of(vectors).tolist()
    return tuple(low), tuple(high)


@checked
def evaluate(  # noqa: PLR0913 – one option per question
    model: str | Path,
    data: str | Path | Iterable[Any] | None = None,
    *,
    task: str | None = None,
    blimp: str | Path | None = None,
    text: str | None = None,
    text_b: str | None = None,
    label: str | None = None,
    length: int | None = None,
    report: str | Path | None = None,
    precision: PredictPrecision = "fp32",
    limit: float | None = None,
    device: str = "auto",
    runtime: Runtime = "torch",
    progress: Progress | bool = True,
    **settings: Any,
) -> Evaluation:
    """Score a model on labelled data, on a corpus, or on minimal pairs, in constant memory.

    Args:
        model: a fine-tuned model folder, the folder of a run, or a Hub id.
        data: labelled data (.csv, .tsv, .jsonl, .parquet, or
            hub:owner/name:configuration:split), or the folder of a corpus for the losses
            and the perplexity of a pre-trained model; or a folder as BEIR's, or one that holds
            several, for retrieval by vectors; in Python also rows. By default the dev data
            that a run split from its training data (--dev 20%).
        task: a task as for predict; by default the one that the model was trained for.
        blimp: instead of data a folder of minimal pairs: files of JSON lines with sentence_good and
            sentence_bad. Gives the accuracy on each file, linguistics_term and field, and on all.
            Masked models are scored with variant=word_l2r.
        text: column of the text, or of the first of two (for rerank the query), without a header
            its number; by default as in training, if the model was fine-tuned.
        text_b: the column of the second text.
        label: the column of the label.
        length: maximum length in tokens; by default as in training.
        report: write an HTML page with confusions or places, calibration, slices of the data and
            the hardest examples.
        precision: precision of matrix products; int8 is compared with fp32 in accuracy and speed.
        limit: points of the metric that int8 may lose; a point is 0.01. By default 0.5.
        device: auto (a GPU, if there is one), cpu, cuda or cuda:N.
        runtime: what computes the model: torch, or onnxruntime or openvino for an exported folder.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        settings: settings of the task, such as `variant="word_l2r"` for likelihood.

    Returns:
        The `metrics`; of int8 also its cost, of a sentence encoder all layers and poolings by the
        correlation of cosines with gold scores, of minimal pairs the accuracies of all groups.

    Raises:
        ConfigError: an option that does nothing with this data; int8 loses too much.
        DataError: the data cannot be read, or has no labels.

    Examples:
        >>> done = bothways.evaluate("my-classifier", "dev.tsv")
        >>> done.metrics["accuracy"]
        1.0
        >>> rows = [{"text": "a good film", "label": "positive"}]
        >>> bothways.evaluate("my-classifier", rows).metrics["accuracy"]
        1.0
    """
    from bothways.data.manifest import holds_corpus
    from bothways.prediction.analysis import evaluation
    from bothways.prediction.opening import open_task
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.search import evaluation as retrieval

    require_choice(PredictPrecision, "precision", precision)
    require_choice(Runtime, "runtime", runtime)
    folder, columns = str(model), {"text": text, "text_b": text_b, "label": label}
    for_rows = {
        "task": task, **columns, "report": report, "limit": limit,
        "runtime": None if runtime == "torch" else runtime,
    }  # fmt: skip

    with shown_progress(progress) as reporter:
        if blimp is not None:
            require_unset("does nothing with minimal pairs", "Leave it out.", **for_rows)
            if data is not None:
                fix = "Leave one of the two out."
                raise ConfigError(f"is given in addition to {blimp}", where=str(data), fix=fix)
            task_model = evaluation.open_pairs(folder, settings, length=length, device=device)
            suite, predictor = local_path(blimp), Predictor(task_model, precision)
            scores = evaluation.evaluate_suite(predictor, suite, reporter)
            metrics = {"accuracy": scores.accuracy, "mean": scores.mean}
            title = f"{folder} on {suite}, {scores.variant}"
            return evaluation.Evaluation(title, metrics, pairs=scores)
        if isinstance(data, str | Path) and holds_corpus(str(data)):
            from bothways.data.corpus import Corpus
            from bothways.pretraining.evaluation import evaluate_on_corpus

            fix = "Leave it out; the losses of a pre-trained model depend on the length alone."
            require_unset(
                "does nothing with a corpus", fix, **for_rows, **dict.fromkeys(settings, True)
            )
            if precision == "int8":
                raise ConfigError("int8 does nothing with a corpus", where="precision", fix=fix)
            metrics = evaluate_on_corpus(
                folder, Corpus.open(str(data)), length=128 if length is None else length,
                device=device, precision=precision,
            )  # fmt: skip
            return evaluation.Evaluation(f"{folder} on {data}", metrics)
        if isinstance(data, str | Path) and (folders := retrieval.beir_folders(local_path(data))):
            from bothways.prediction.search.index import open_embedder

            for_rows["task"] = None if task == "embed" else task
            require_unset("does nothing with retrieval data", "Leave it out.", **for_rows)
            embedder = open_embedder(folder, None, length, precision, device, settings)
            tables = retrieval.evaluate_retrieval(embedder, folders, reporter)
            metrics = dict([*tables.values()][-1]["vectors"])
            return evaluation.Evaluation(f"{folder} on {data}", metrics, retrieval=tables)
        if data is None:
            message = "does nothing with the dev data of the run"
            require_unset(message, "Leave it out.", task=task, **columns)
        labelled = _labelled_data(folder, data, columns, reporter)
        page = None if report is None else local_path(report)
        if page is not None:
            require("report", "a report", "jinja2", "matplotlib")
            check_output_path(page, [labelled.name])
            if page.suffix.lower() not in (".html", ".htm", ""):
                message = f"{page.name!r} must end in .html"
                raise ConfigError(message, where="report", fix=f"Such as {page.stem}.html.")
        opened: Any = {"length": length, "device": device, "runtime": runtime, "settings": settings}
        return labelled.evaluate(
            lambda precision: open_task(folder, task, precision=precision, **opened),
            precision,
            page,
            limit,
            named=task is not None,
        )


def _labelled_data(
    folder: str, data: Any, columns: Mapping[str, str | None], progress: Progress
) -> EvaluationData:
    """Return labelled data by its name or as rows; None for the dev data that a run has split."""
    from bothways.data.tables import iter_rows
    from bothways.finetuning.data import read_recorded_split
    from bothways.prediction.analysis.evaluation import EvaluationData

    if isinstance(data, str | Path):
        return EvaluationData(folder, str(data), columns, progress)
    if data is not None:
        rows = list(iter_rows(data, "data"))
        return EvaluationData(folder, "rows", columns, progress, rows=rows)
    recorded = read_recorded_split(folder)
    if recorded is None:
        fix = "Give a file; evaluate also reads the folder of a corpus, and minimal pairs (blimp)."
        raise ConfigError("there is no labelled data", where="data", fix=fix)
    name, examples = recorded
    progress.message(f"note: scored on {name}, as in training")
    return EvaluationData(folder, name, columns, progress, examples=examples)


@checked
def average(models: str | Path | Iterable[str | Path], out: str | Path) -> list[str]:
    """Save a model folder whose weights are the mean of those of several models.

    Sums are in float64, and models are read one after the other. The files that describe a model
    are copied from the first, its tuned thresholds included; the card is new.

    Args:
        models: model folders, folders of runs or Hub ids, of one configuration (but for dropout),
            vocabulary and labels; or checkpoints of finished runs (`run/step-1000`), also a single
            one; or one run, for all its checkpoints.
        out: the new model folder.

    Returns:
        The names of the models that were averaged.

    Raises:
        FolderError: there is only one model, or the models differ in more than their weights.
        CheckpointError: a checkpoint is damaged.

    Examples:
        >>> bothways.average(["my-bert", "my-bert"], "averaged")
        ['my-bert', 'my-bert']
        >>> bothways.load_model("averaged").config == bothways.load_model("my-bert").config
        True
    """
    from bothways.data.tables import iter_rows
    from bothways.hub.average import save_average

    names = [models] if isinstance(models, str | Path) else [*iter_rows(models, "models")]
    for name in names:
        if not isinstance(name, str | Path):
            message = f"must be model folders or Hub ids, not {type(name).__name__}"
            raise ConfigError(message, where="models", fix="Name their folders, or save them.")
    return save_average([*map(str, names)], local_path(out))


@checked
def calibrate(  # noqa: PLR0913 – one option per question
    model: str | Path,
    data: str | Path | Iterable[Any] | None = None,
    out: str | Path = "",
    *,
    error: float | None = None,
    text: str | None = None,
    text_b: str | None = None,
    label: str | None = None,
    device: str = "auto",
    progress: Progress | bool = True,
) -> CalibrationResult:
    """Make the probabilities of a classifier as frequent as they say, on data it has not seen.

    One temperature for classes, a scale and an offset for each of several labels (multilabel):
    they become part of the weights, and no answer changes.

    Args:
        model: a model folder for classify or multilabel, the folder of a run, or a Hub id.
        data: labelled data that the model was not trained on, as for evaluate. By default the dev
            data that a run split from its training data (--dev 20%).
        out: the new folder of the calibrated model.
        error: predictions of classify also hold a set of labels that misses the right one in at
            most this share of texts like the data, such as 0.1. Half of the data decides the sets.
        text: column of the text, or of the first of two; by default as in training.
        text_b: the column of the second text.
        label: the column of the label.
        device: auto (a GPU, if there is one), cpu, cuda or cuda:N.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.

    Returns:
        The `temperature`, and loss and calibration error `before` and `after`, measured on halves
        of the data that the calibration had not seen.

    Raises:
        ConfigError: the model is for another task; too few examples for the error rate.
        DataError: the data cannot be read, is what the model was trained on, or has one class.

    Examples:
        >>> rows = [{"text": "a good film", "label": "positive"}] * 9
        >>> rows += [{"text": "a good film", "label": "negative"}, *rows[:5]]
        >>> rows += [{"text": "a bad play", "label": "negative"}] * 5
        >>> done = bothways.calibrate("my-classifier", rows, "calibrated", error=0.2)
        >>> bothways.load("calibrated")("a good film").label_set
        ('positive',)
        >>> bothways.load("calibrated", abstain=1.0)("a good film").label is None
        True
    """
    from bothways.prediction.analysis import calibrate as calibration

    if not str(out):
        raise ConfigError("is missing", where="out", fix="Name a new folder for the model.")
    if error is not None:  # before the predictions
        require_range("(0, 1)", error=error)
    columns = {"text": text, "text_b": text_b, "label": label}
    with shown_progress(progress) as reporter:
        labelled = _labelled_data(str(model), data, columns, reporter)
        return calibration.calibrate(labelled, local_path(out), error, device)


@checked
def load_model(
    folder: str | Path,
    heads: Head | Iterable[Head] | None = None,
    *,
    fresh: str | Collection[str] = (),
) -> PretrainedModel:
    """Load a model for a training loop of your own, or to look into it.

    The result is an `nn.Module` in evaluation mode, in fp32, on the CPU. Called with a batch, it
    returns an output with the names of transformers. Tokens are packed: all texts of a batch end
    to end, without padding, and `batch.split` divides a tensor of tokens by text.

    Args:
        folder: a model folder, the folder of a run, or a Hub id.
        heads: the model's heads, with the pooler that they read; `None` for the folder's.
        fresh: kinds of heads that start at random, such as the label head of a new task.

    Raises:
        FolderError: the folder cannot be read, or lacks a head that is not in `fresh`.
        ConfigError: `fresh` names a head that the model does not have.

    Examples:
        >>> model = bothways.load_model("my-bert")
        >>> batch = model.tokenizer.batch(["a good film", ("a bad play", "it ends")])
        >>> output = model(batch, output_hidden_states=True, output_attentions=True)
        >>> [tuple(text.shape) for text in batch.split(output.last_hidden_state)]
        [(5, 32), (8, 32)]
        >>> len(output.hidden_states), [tuple(text.shape) for text in output.attentions[0]]
        (3, [(2, 5, 5), (2, 8, 8)])
        >>> tuple(output.logits["pair"].shape)
        (2, 2)
        >>> import torch
        >>> from bothways.model.heads import LabelHead
        >>> model = bothways.load_model("my-bert", [LabelHead(2)], fresh=["labels"]).train()
        >>> output = model(model.tokenizer.batch(["a good film", "a bad play"], length=16))
        >>> labels = torch.tensor([1, 0])
        >>> torch.nn.functional.cross_entropy(output.logits["labels"], labels).backward()
        >>> model.labels = ("bad", "good")
        >>> model.save("my-own-classifier").name
        'my-own-classifier'
    """
    from bothways.hub import model_folder
    from bothways.hub.model_folder import PretrainedModel
    from bothways.hub.resolve import resolve_run

    return PretrainedModel(model_folder.load_model(resolve_run(str(folder)), heads, fresh))


@checked
def export_model(  # noqa: PLR0913 – one option per question
    folder: str | Path,
    out: str | Path,
    to: Format | Literal["both"] | Iterable[Format] = "onnx",
    *,
    task: str | None = None,
    length: int | None = None,
    int8: str | Path | Iterable[Any] | None = None,
    limit: float | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    progress: Progress | bool = True,
    **settings: Any,
) -> ExportResult:
    """Write a model as a graph for onnxruntime, OpenVINO or a browser, and verify its outputs.

    Args:
        folder: a fine-tuned model folder, the folder of a run, a sentence encoder, or a Hub id.
        out: the new folder: the graph with its configuration and tokenizer, without the weights of
            PyTorch; an earlier export there is replaced.
        to: format: onnx, openvino, or both.
        task: what the graph computes, as for predictions; by default the task of the model.
        length: maximum length of a text in tokens; `None` as in training.
        int8: labelled data, a file, a Hub data set, or in Python rows. A second file in int8 for
            each format is written if it scores as well as fp32 there.
        limit: points of the metric that int8 may lose; a point is 0.01. By default 0.5.
        columns: columns of a file of `int8` by role, "text", "text_b" and "label"; by
            default as in training.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        settings: settings of the task, such as `pooling="cls"`.

    Returns:
        The exported `folder`, the largest differences from the model (`comparisons`), the cost of
        `int8` by runtime, and the `sizes` of the files in bytes.

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
    from bothways.data.tables import iter_rows
    from bothways.prediction.analysis.evaluation import MAX_LOSS
    from bothways.prediction.export.folder import write_export
    from bothways.prediction.predictor import named_columns
    from bothways.tasks.base import Metrics

    if int8 is None:
        fix = f"Add {argument(int8='LABELLED_DATA')}."
        message = "is for int8, which is not computed"
        require_unset(message, fix, limit=limit, **columns)
    is_named = int8 is None or isinstance(int8, str | Path)
    data = int8 if is_named else list(iter_rows(int8, "int8"))  # read twice

    def evaluate(predictor: Predictor) -> Metrics:
        roles = named_columns(predictor.task_model.task, **columns)
        return predictor.evaluate(predictor.read(data or [], roles, labelled=True))

    with shown_progress(progress) as reporter:
        return write_export(
            folder, out, to, task=task, length=length, settings=settings,
            int8=None if int8 is None else evaluate, limit=MAX_LOSS if limit is None else limit,
            progress=reporter,
        )  # fmt: skip
