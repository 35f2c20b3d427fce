"""`bothways predict | embed | evaluate | calibrate`: predictions, vectors, scores, probabilities.

`index | search | mine` find the texts that answer queries, and those that do not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

import bothways
from bothways.cli import options
from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError
from bothways.core.progress import terminal_progress
from bothways.core.terminal import output_console, quantity, say, write_stderr
from bothways.data.text_io import STDIN
from bothways.prediction import PartFormat, Runtime
from bothways.prediction.search import CandidateChoice, MiningMode, Mode, Stored

if TYPE_CHECKING:
    from bothways.prediction.analysis.evaluation import Evaluation


@options.documented_by(bothways.predict)
@Parameter(name="*")
@dataclass(frozen=True)
class PartOptions:
    """Options of predictions in parts (`--out`).

    Parameters
    ----------
    keep
        A column to copy to the output, such as a key; old=new renames it. May be repeated.
    rejects
        With --out: write rows that cannot be read or predicted to DIR/_rejects or
        FILE.rejects.jsonl instead of stopping at the first one.
    """

    keep: tuple[str, ...] = ()
    format: PartFormat | None = None
    rows: int = 4096
    rejects: Annotated[bool, Parameter(negative="")] = False
    processes: int | None = None
    threads: int | None = None


@options.documented_by(bothways.predict)
def predict(  # noqa: PLR0913 – one option per question
    model: str,
    *inputs: Annotated[str, options.INPUTS],
    out: Path | None = None,
    task: str | None = None,
    text: str | None = None,
    text_b: str | None = None,
    top: int | None = None,
    labels: str | None = None,
    abstain: options.Abstain = None,
    length: options.MaxLength = None,
    window: int | None = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
    runtime: Runtime = "torch",
    parts: PartOptions = PartOptions(),
) -> None:
    """Predict: one JSON line for each input, a table, or many files with --out.

    On standard input each line is a text; with --text, each line is a JSON object.

    Parameters
    ----------
    inputs
        A file: .txt (one text per line), .csv, .tsv, .jsonl, .parquet,
        hub:owner/name:configuration:split, or - for standard input; with --out any number of files.
        Or one text in quotes.
        Then settings of the task, such as top=10 for fill or pooling=max for embed.
    top
        The most probable labels, or the best documents, to print; by default all.
    labels
        Labels to choose from, such as "travel, cooking", with a model of natural language inference
        that was not trained on them.
    window
        Number of texts to read before the first prediction; default: 4096, on a terminal 1.
    """
    require_at_least(1, top=top, window=window)
    files, words = options.split_inputs(inputs)
    settings: dict[str, Any] = {
        "task": task, "text": text, "text_b": text_b, "best": top, "length": length,
        "precision": precision, "device": device, "runtime": runtime, "window": window,
        **options.settings_for(bothways.predict, words, abstain=abstain, labels=labels),
    }  # fmt: skip
    if out is not None:
        _predict_parts(model, files, out, parts, settings)
        return
    typed = files in ((), (STDIN,)) and sys.stdin.isatty()
    # What is typed or printed on the same terminal would run through the bar.
    with terminal_progress(hidden=typed or sys.stdout.isatty()) as progress:
        settings["progress"] = progress
        if text is None and (sentence := options.argument_text(files)) is not None:
            progress.message("note: no file has this name: it is predicted as a text")
            rows = bothways.predict(model, [(sentence,)], **vars(parts), **settings)
        else:
            settings["window"] = window or (1 if typed else None)
            rows = bothways.predict(model, files or STDIN, **vars(parts), **settings)
        for values in rows:
            print(dumps(values, ensure_ascii=False, allow_nan=False), flush=typed)


def _predict_parts(
    model: str, files: tuple[str, ...], out: Path, parts: PartOptions, settings: Mapping[str, Any]
) -> None:
    """Predict files into a file or a folder, and print the totals."""
    from bothways.prediction.bulk.run import is_file, parts_folder, rejects_file

    is_one_file = is_file(out)
    folder = parts_folder(out) if is_one_file else out
    with options.resumable(folder, "What is finished", settings["device"]) as progress:
        done: Any = bothways.predict(
            model, files, out, progress=progress, **vars(parts), **settings
        )
    finished = quantity(done.again, "part(s) was|were finished before")
    repeated = f"; {finished}" if done.again else ""
    count = "" if is_one_file else f", in {quantity(done.parts, 'part(s)')}"
    write_stderr(f"{quantity(done.rows, 'row(s)')} in {out}{count}{repeated}")
    for warning in done.warnings:
        write_stderr(warning)
    if done.rejected:
        rejects = rejects_file(out) if is_one_file else out / "_rejects"
        write_stderr(f"warning: {quantity(done.rejected, 'row(s)')} rejected: see {rejects}")


@options.documented_by(bothways.predict)
def embed(  # noqa: PLR0913 – one option per question
    model: str,
    *inputs: Annotated[str, options.INPUTS],
    out: Path,
    text: str | None = None,
    prompt_name: str | None = None,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    output_dtype: Literal["float32", "int8", "uint8", "binary", "ubinary"] = "float32",
    calibration: Path | None = None,
    length: int | None = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
    parts: PartOptions = PartOptions(),
) -> None:
    """Compute a vector of each text, in the order of the input and in constant memory.

    The same command continues where it was stopped.

    Parameters
    ----------
    model
        Model folder, sentence-transformers folder, folder of a run, or Hub id.
    inputs
        Files: .txt (one text per line), .csv, .tsv, .jsonl, .parquet,
        hub:owner/name:configuration:split, or - for standard input. Then settings: pooling=mean,
        cls or max; layers=[-1], or several; combine=mean or concat; normalised=true;
        components=256 for the first 256; include_prompt=false. Default: the settings of the
        folder, else the mean of the last layer.
    out
        vectors.npy, .parquet or .jsonl; or a folder for vectors in parts.
    text
        Column of the text.
    prompt_name
        The prompt of the folder that is put before each text, such as query; default: the folder's
        default one, if it has one.
    prompt
        A prompt instead of one of the folder's, such as "query: "; "" for none.
    length
        Maximum length of a text in tokens; default: as in the folder, else all positions.
    """
    files, words = options.split_inputs(inputs)
    if out.suffix.lower() not in (".npy", ".parquet", ".jsonl", "") and not out.is_dir():
        message = f"{out.name!r} must end in .npy, .parquet or .jsonl"
        raise ConfigError(message, where="out", fix="Choose one by its suffix.")
    if prompt_name is not None and prompt is not None:
        message = "a prompt is given, and the name of one"
        raise ConfigError(message, where="prompt", fix="Leave one of them out.")
    prompts = {"prompt": "none" if prompt_name is not None else prompt, "prompt_name": prompt_name}
    settings: dict[str, Any] = {
        "task": "embed", "text": text, "output_dtype": output_dtype, "calibration": calibration,
        "length": length, "precision": precision, "device": device,
        **options.settings_for(bothways.predict, words, **prompts),
    }  # fmt: skip
    _predict_parts(model, files, out, parts, settings)


@options.documented_by(bothways.evaluate)
def evaluate(  # noqa: PLR0913 – one option per question
    model: str,
    data: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *settings: str,
    task: str | None = None,
    blimp: Path | None = None,
    columns: options.DataColumns = options.DataColumns(),  # noqa: B008 – frozen
    abstain: options.Abstain = None,
    length: options.MaxLength = None,
    json: options.JsonOutput = False,
    report: Path | None = None,
    precision: options.Precision = "fp32",
    limit: float | None = None,
    device: options.Device = "auto",
    runtime: Runtime = "torch",
) -> None:
    """Score a fine-tuned model on labelled data: accuracy, F1, Matthews correlation, loss.

    Needs constant memory. --task likelihood computes the pseudo-perplexity of texts; --task prefer
    counts how often the first of two texts is the more likely one, as in BLiMP. --task embed
    scores all layers and poolings by the correlation of cosine similarities with gold scores. A
    folder as BEIR's, or one that holds several, gives the metrics of retrieval, those of BM25, and
    their means.

    Parameters
    ----------
    settings
        Settings of the task, such as variant=word_l2r for likelihood.
    """
    if data is not None and options.split_inputs((data,))[1]:  # the first setting
        settings, data = (data, *settings), None
    with terminal_progress(announced=options.kernels(device)) as progress:
        done = bothways.evaluate(
            model, data, task=task, blimp=blimp, length=length, report=report,
            precision=precision, limit=limit, device=device, runtime=runtime, progress=progress,
            **columns.named, **options.settings_for(bothways.evaluate, settings, abstain=abstain),
        )  # fmt: skip
    if json:
        print(dumps(done.to_json()))
        return
    options.show_tables(_table(done))
    if done.int8 is not None:
        print(done.int8)


@options.documented_by(bothways.calibrate)
def calibrate(
    model: str,
    data: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *,
    out: Path,
    error: float | None = None,
    columns: options.DataColumns = options.DataColumns(),  # noqa: B008 – frozen
    json: options.JsonOutput = False,
    device: options.Device = "auto",
) -> None:
    """Make the probabilities of a classifier as frequent as they say, on data it has not seen.

    One temperature for classes, a scale and an offset for each of several labels: they become part
    of the weights, so every program that opens the folder has them, and no answer changes.
    """
    with terminal_progress() as progress:
        done = bothways.calibrate(
            model, data, out, error=error, **columns.named, device=device, progress=progress
        )  # fmt: skip
    if json:
        print(dumps(done.record))
        return
    kind = "a scale for each label" if done.temperature is None else f"T = {done.temperature:.3g}"
    scores = {"before": done.before, "after": done.after}
    options.show_tables(options.metric_table(f"{model}, calibrated: {kind}", scores))
    say(output_console(), f"Saved in {out}.")


def _table(done: Evaluation) -> options.CommandTable:
    """Return the metrics; of layers or groups of pairs all their rows."""
    if done.int8 is not None:
        columns = {"fp32": done.int8.fp32.metrics, "int8": done.int8.int8.metrics}
        return options.metric_table(done.title, columns)
    if done.layers is not None:
        names = ("layer", "pooling", "pearson", "spearman", "anisotropy")
        note = f"{quantity(done.layers.pairs, 'pair(s)')}. anisotropy: the mean cosine of any two"
        rows = [
            [
                str(cell.layer),
                cell.pooling + (" ← best" if cell is done.layers.best else ""),
                *(f"{getattr(cell.correlation, name):.4f}" for name in names[2:]),
            ]
            for cell in done.layers.cells
        ]
        return options.CommandTable(f"{done.title}\n{note} texts", names, rows)
    if done.retrieval is not None:
        rows = [
            [name, ranking, *(f"{value:.4f}" for value in scores.values())]
            for name, rankings in done.retrieval.items()
            for ranking, scores in rankings.items()
        ]
        return options.CommandTable(done.title, ["folder", "ranking", *done.metrics], rows, left=2)
    if done.pairs is not None:
        groups = [
            [kind, name, f"{len(pairs):,}", f"{100 * sum(pairs) / len(pairs):.1f}"]
            for kind, group in done.pairs.groups.items()
            for name, pairs in sorted(group.items())
        ]
        groups.append(["mean of phenomena", "", "", f"{100 * done.pairs.mean:.1f}"])
        total, accuracy = f"{done.pairs.pairs:,}", f"{100 * done.pairs.accuracy:.1f}"
        groups.append(["all pairs", "", total, accuracy])
        return options.CommandTable(
            done.title, ["", "name", "pairs", "accuracy, %"], groups, left=2
        )
    return options.metric_table(done.title, {"value": done.metrics})


@options.documented_by(bothways.build_index)
def index(  # noqa: PLR0913 – one option per question
    *texts: Annotated[str, options.INPUTS],
    out: Path,
    model: str | None = None,
    text: str | None = None,
    id: str | None = None,
    stored: Stored | None = None,
    bm25: Annotated[bool, Parameter(negative="")] = False,
    graph: Annotated[bool, Parameter(negative="")] = False,
    delete: tuple[str, ...] = (),
    length: int | None = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
) -> None:
    """Build an index of texts, or add texts to one and delete others, at once or not at all.

    Parameters
    ----------
    texts
        Files (.txt, .csv, .tsv, .jsonl, .parquet), folders as BEIR's, or a Hub data set. Then
        settings of the vectors, as for bothways embed.
    delete
        The id of a document to delete; may be repeated.
    """
    files, words = options.split_inputs(texts)
    with terminal_progress() as progress:
        done = bothways.build_index(
            [Path(file) for file in files], model, out, text=text, id=id, stored=stored, bm25=bm25,
            graph=graph, delete=delete, length=length, precision=precision, device=device,
            progress=progress, **options.settings_for(bothways.build_index, words),
        )  # fmt: skip
    write_stderr(f"{quantity(len(done), 'document(s)')} in {out}")


@options.documented_by(bothways.search)
def search(  # noqa: PLR0913 – one option per question
    index: Path,
    *queries: Annotated[str, options.INPUTS],
    top: int = 10,
    mode: Mode = "vectors",
    exact: Annotated[bool, Parameter(negative="")] = False,
    rerank: str | None = None,
    depth: int = 100,
    model: str | None = None,
    text: str | None = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
) -> None:
    """Search an index: a JSON line for each query, with ids, scores and texts of the best hits.

    Parameters
    ----------
    queries
        One text in quotes; or files of queries, one a line, or - for standard input.
    text
        Column of the query; default: text.
    """
    from bothways.indexes import read_texts

    opened = bothways.Index(index)  # before its queries are read
    typed = options.argument_text(queries) if text is None else None
    if typed is None and text is None and queries and all(map(options.is_word, queries)):
        if len(queries) > 1:
            fix = f'Put quotation marks around a text: "{" ".join(queries)}".'
            raise ConfigError("is not a file", where=queries[0], fix=fix)
        typed = queries[0]
    files = [Path(name) for name in queries or ("-",)]
    texts = [typed] if typed is not None else [query for _, query in read_texts(files, text)]
    results = bothways.search(
        opened, texts, top, mode=mode, exact=exact, rerank=rerank, depth=depth, model=model,
        precision=precision, device=device,
    )  # fmt: skip
    for query, hits in zip(texts, results, strict=True):
        line = {"query": query, "hits": [vars(hit) for hit in hits]}
        print(dumps(line, ensure_ascii=False))


@options.documented_by(bothways.mine)
def mine(  # noqa: PLR0913 – one option per question
    pairs: str,
    *,
    index: Path,
    out: Path,
    negatives: int = 3,
    skip: int = 0,
    depth: int = 100,
    margin: float | Literal["none"] = 0.05,
    absolute_margin: float | None = None,
    choose: CandidateChoice = "best",
    mode: MiningMode = "vectors",
    seed: int = 0,
    model: str | None = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
) -> None:
    """Mine hard negatives: texts of an index that rank high for an anchor and are no positive."""
    with options.resumable(out.with_name(f"{out.name}.part")) as progress:
        done = bothways.mine(
            pairs, index, out, negatives=negatives, skip=skip, depth=depth,
            margin=None if margin == "none" else margin, absolute_margin=absolute_margin,
            choose=choose, mode=mode, seed=seed, model=model, precision=precision, device=device,
            progress=progress,
        )  # fmt: skip
    mined = f"{quantity(done.negatives, 'negative(s)')} for {quantity(done.rows, 'row(s)')}"
    summary = f"{mined} in {out}; {quantity(done.short, 'has|have')} fewer than {negatives}."
    likely, rows = quantity(done.likely, "likely positive(s)"), quantity(done.with_likely, "row(s)")
    write_stderr(f"{summary} {likely} of {rows} are in {done.likely_file}.")
