"""From texts to an index, and from queries to the texts that answer them, or that do not."""

from __future__ import annotations

import contextlib
import math
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bothways.core.config.values import checked, require_at_least, require_choice
from bothways.core.errors import ConfigError, DataError, argument, require, require_unset
from bothways.core.files import check_output_path, local_path, require_text
from bothways.core.progress import Progress, shown_progress
from bothways.core.terminal import listed
from bothways.prediction import PredictPrecision
from bothways.prediction.search import CandidateChoice, MiningMode, Mode, Stored

if TYPE_CHECKING:
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.search.index import Index
    from bothways.prediction.search.mining import MiningReport
    from bothways.tasks.sentence_embedding.examples import VectorExample


@checked
def build_index(  # noqa: PLR0913 – one option per question
    texts: str | Path | Iterable[Any],
    model: str | Path | Predictor | None = None,
    out: str | Path | None = None,
    *,
    text: str | None = None,
    id: str | None = None,
    stored: Stored | None = None,
    bm25: bool = False,
    graph: bool = False,
    delete: str | int | Iterable[str | int] = (),
    length: int | None = None,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
    progress: Progress | bool = True,
    **settings: Any,
) -> Index:
    """Build an index of texts, or add texts to an index and delete others, at once or not at all.

    Args:
        texts: a file (.txt, .csv, .tsv, .jsonl, .parquet), a folder as BEIR's, or a Hub data set,
            or several of them as paths; in Python also texts, or rows as dicts.
        model: model folder, sentence-transformers folder, folder of a run, or Hub id; by default
            the model of the index; in Python also a predictor.
        out: folder of the index. One that exists is changed: documents with an id that it has are
            replaced; in Python `None` for a temporary folder, which goes with the index.
        text: column of the text; by default text, after it the title of BEIR's rows.
        id: column of the id; by default _id or id, else the file and line, in Python a free number.
        stored: vectors as fp32, bf16, int8 (a quarter), or binary (signs, with int8 codes for the
            order of the best ones); by default as in the index, in a new one fp32.
        bm25: count the words, for the modes bm25 and hybrid (needs bothways[search]).
        graph: add a graph for approximate search (needs bothways[search]) to 30,000 documents or
            more; fewer are searched exactly.
        delete: ids of documents to delete: one, or several.
        length: maximum length of a text in tokens; by default as in the folder.
        precision: precision of matrix products: fp32, bf16, int8 or auto.
        device: auto (a GPU, if there is one), cpu, cuda or cuda:N.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
        settings: settings of the task embed, such as `pooling="mean"`.

    Raises:
        FolderError: the index was made by another model, or is damaged; the model cannot be read.
        DataError: a file cannot be read, an id occurs twice, or is not there to be deleted.
        ConfigError: an unknown setting, or one that the index has otherwise.

    Examples:
        >>> index = bothways.build_index(["a good film", "a bad play"], "my-bert")
        >>> index.search("a good film", k=1)[0].text
        'a good film'
        >>> _ = bothways.build_index(["a good film", "a bad play"], "my-bert", out="my-index")
        >>> len(bothways.build_index([{"id": "1", "text": "a fine film"}], out="my-index"))
        2
    """
    from bothways.data.tables import plain_value
    from bothways.hub.provenance import digest_of_model
    from bothways.prediction.engine import PredictionCounts
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.search.change import change_index
    from bothways.prediction.search.index import RECORD, Index, IndexRecord, open_embedder

    require_choice(Stored, "stored", stored)
    for is_used, package in ((bm25, "bm25s"), (graph, "usearch")):
        if is_used:
            require("search", "an index of this kind", package)
    old = None
    if out is not None and (local_path(out) / RECORD).exists():
        old = Index(out).record
    if old is None and model is None:
        fix = "Name the model that makes the vectors."
        raise ConfigError("there is no index yet, and no model", where="model", fix=fix)
    named = dict.fromkeys(settings, True)  # also those that are None
    if old is not None:
        message = f"{out} has its settings already: vectors in {old.stored}"
        changed = None if stored == old.stored else stored
        fix = "Leave it out, or build a new index."
        require_unset(message, fix, stored=changed, length=length, **named)
    if isinstance(model, Predictor):
        require_unset(
            "the predictor has its settings already", "Give it to bothways.load.", length=length,
            precision=precision != "fp32" or None, device=device != "auto" or None, **named,
        )  # fmt: skip
        name, length, opened_with = model.opened_from()
        settings = dict(opened_with)
    else:
        name = str(old.model if model is None and old is not None else model)
    opened = model if isinstance(model, Predictor) else name
    embedder = open_embedder(opened, old, length, precision, device, settings)
    task: Any = embedder.task_model.task
    normalised = embedder.similarity_name == "cosine"
    record = old or IndexRecord(
        str(Path(name).resolve()) if Path(name).exists() else name,
        digest_of_model(name), task.width(embedder.task_model.model),
        normalised, stored or "fp32", 0.0, settings, length,
        (task.role_prompt("query"), task.role_prompt("document")),
    )  # fmt: skip
    counts = PredictionCounts()
    several = isinstance(delete, Iterable) and not isinstance(delete, str)
    names: Any = delete if several else [delete]  # ids may be numbers, as in rows
    with shown_progress(progress) as reporter, contextlib.ExitStack() as temporary:
        folder = local_path(
            temporary.enter_context(tempfile.TemporaryDirectory()) if out is None else out
        )
        index = change_index(
            folder, record, read_texts(texts, text, id),
            lambda items: embedder.encode(
                items, prompt=record.prompts[1], normalize_embeddings=record.normalised,
                counts=counts,
            ),
            reporter, delete=tuple(_id_text(plain_value(name)) for name in names),
            bm25=bm25, graph=graph,
        )  # fmt: skip
        for warning in counts.warnings:
            reporter.message(warning)
        # A temporary folder goes with the index; after an error it goes at once.
        weakref.finalize(index, temporary.pop_all().close)
    index.embedders[None, precision, device] = embedder
    return index


def read_texts(
    texts: Any, text: str | None = None, id: str | None = None
) -> Iterator[tuple[str | None, str]]:
    """Yield ids and texts; see `build_index`. None for rows of Python without an id."""
    from bothways.data.tables import iter_rows, open_table
    from bothways.tasks.sentence_embedding.examples import corpus_file

    items = [local_path(texts)] if isinstance(texts, str | Path) else iter_rows(texts, "texts")
    for number, item in enumerate(items, 1):
        if isinstance(item, str):
            if number == 1:
                require_text(item)
            yield None, item
        elif isinstance(item, Path):
            source = str(corpus_file(item) or item)
            for row in open_table(source, [text] if text else ()).rows:
                yield _document(row.values, text, id, row.where, Path(row.where).name)
        elif isinstance(item, Mapping):
            yield _document(item, text, id, f"text {number}", None)
        else:
            message = f"is of type {type(item).__name__}: give texts, rows or paths"
            raise DataError(message, where=f"text {number}")


def _document(
    row: Mapping[str, Any], text: str | None, id: str | None, where: str, default: str | None
) -> tuple[str | None, str]:
    """Return the id and the text of a row."""
    from bothways.data.tables import separator_advice
    from bothways.tasks.columns import cell_of, text_of

    if text is None and "text" not in row:
        fix = separator_advice([*row]) or f"Name the column: {argument(text='NAME')}."
        raise DataError(f"has no column 'text'; it has {listed(row)}", where=where, fix=fix)
    content = text_of(row, text or "text", where)
    if text is None and "_id" in row and row.get("title"):
        content = f"{row['title']} {content}".strip()
    name = next((key for key in ("_id", "id") if key in row), None) if id is None else id
    if name is None:
        return default, content
    value = cell_of(row, name, where)
    if value in (None, "") or (isinstance(value, float) and math.isnan(value)):
        fix = "Give each text an id of its own, or leave the column out."
        raise DataError(f"has no id in the column {name!r}", where=where, fix=fix)
    return _id_text(value), content


def _id_text(value: Any) -> str:
    """Return an id as text: 7.0, which pandas makes of 7 in a column with absent ones, is "7"."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


@checked
def search(  # noqa: PLR0913 – one option per question
    index: str | Path | Index,
    queries: str | Iterable[str],
    top: int = 10,
    *,
    mode: Mode = "vectors",
    exact: bool = False,
    rerank: str | Path | Predictor | None = None,
    depth: int = 100,
    model: str | Path | Predictor | None = None,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
) -> list[Any]:
    """Search an index: for each query the best documents, with their ids, scores and texts.

    Args:
        index: folder of an index; in Python also an open one, `bothways.Index(folder)`.
        queries: a text, or several.
        top: number of documents for each query.
        mode: vectors; bm25, by words; or hybrid, both fused by their ranks.
        exact: use no graph, if the index has one.
        rerank: a cross-encoder that orders the best documents, such as the folder of a run with the
            task rerank; in Python also a predictor.
        depth: documents of each ranking that are fused, and that a cross-encoder scores.
        model: the model of the index, if it is no longer where it was; in Python also a predictor
            of it, which is not opened again.
        precision: precision of matrix products: fp32, bf16, int8 or auto.
        device: auto (a GPU, if there is one), cpu, cuda or cuda:N.

    Returns:
        A list of hits for one text; for several a list of these.

    Raises:
        FolderError: the index is damaged, or was made by another model.
        ConfigError: the index was built without BM25, which the mode needs.

    Examples:
        >>> texts = [{"id": "film", "text": "a good film"}, {"id": "play", "text": "a bad play"}]
        >>> index = bothways.build_index(texts, "my-bert", out="films")
        >>> hit = bothways.search("films", "a good film", top=1)[0]
        >>> hit.id, hit.text, round(hit.score, 3)
        ('film', 'a good film', 1.0)
    """
    from bothways.prediction.search.index import Index

    require_at_least(1, top=top)
    opened = index if isinstance(index, Index) else Index(index)
    return opened.search(
        queries, top, mode=mode, exact=exact, rerank=rerank, depth=depth, model=model,
        precision=precision, device=device,
    )  # fmt: skip


@checked
def mine(  # noqa: PLR0913 – one option per question
    pairs: str | Path | Iterable[Any],
    index: str | Path | Index,
    out: str | Path,
    *,
    negatives: int = 3,
    skip: int = 0,
    depth: int = 100,
    margin: float | None = 0.05,
    absolute_margin: float | None = None,
    choose: CandidateChoice = "best",
    mode: MiningMode = "vectors",
    seed: int = 0,
    model: str | Path | None = None,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
    progress: Progress | bool = True,
) -> MiningReport:
    """Mine hard negatives: documents of an index that rank high for an anchor and are no positive.

    Args:
        pairs: anchors with their positives, as for the task embed: a file, a folder's grades as
            BEIR's, or a Hub data set; in Python also rows. It is read twice.
        index: folder of an index of the documents; in Python also an open one.
        out: a .jsonl file with anchor, positive and negative, which the task embed trains on. Next
            to it NAME.likely.jsonl lists likely positives. The same call continues a stopped one.
        negatives: number of negatives for each anchor, at most.
        skip: candidates at the top that are passed over.
        depth: documents of each ranking that are read.
        margin: a candidate with a score above p − margin · |p|, where p is the lowest score of a
            positive of the row, is a likely positive and dropped; none keeps it, in Python `None`.
        absolute_margin: the same with p − absolute_margin.
        choose: the best candidates, or random ones of the ranking.
        mode: ranks by vectors, or by words (bm25); margins are of vectors in both.
        seed: of random candidates.
        model: the model of the index, if it is no longer where it was.
        precision: precision of matrix products: fp32, bf16, int8 or auto.
        device: auto (a GPU, if there is one), cpu, cuda or cuda:N.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.

    Raises:
        DataError: the pairs cannot be read, or a row has no positive, or a score.
        FolderError: the index is damaged, or was made by another model.
        ConfigError: a setting contradicts another one, or the index was built without BM25.
        ResourceError: the unfinished file belongs to other settings.

    Examples:
        >>> texts = ["a good film", "a bad play", "a fine film", "a poor play"]
        >>> index = bothways.build_index(texts, "my-bert")
        >>> pairs = [{"anchor": "a good film", "positive": "a fine film"}]
        >>> bothways.mine(pairs, index, "negatives.jsonl", negatives=1, margin=None).negatives
        1
    """
    from bothways.data.tables import iter_rows
    from bothways.prediction.search import mining
    from bothways.prediction.search.index import Index

    target, opened = local_path(out), index if isinstance(index, Index) else Index(index)
    source = str(pairs) if isinstance(pairs, str | Path) else None
    if target.suffix.lower() != ".jsonl":
        message = f"{target.name!r} must end in .jsonl"
        raise ConfigError(message, where="out", fix="Such as train-with-negatives.jsonl.")
    for output in (target, mining.likely_file(target)):
        inputs = opened.folder.glob("texts-*.jsonl")
        check_output_path(output, [*inputs, *([] if source is None else [source])])
    rows = pairs if source is not None else [*iter_rows(pairs, "pairs")]
    settings = mining.Mining(negatives, skip, depth, margin, absolute_margin, choose, mode, seed)
    if mode == "bm25":
        _ = opened.words  # an error before a file is written
    record = opened.record
    embedder = opened.embedder(model, precision, device)
    answers = mining.Answers(_read_pairs(rows))
    if not answers.rows:
        raise DataError("holds no row", where=source or "pairs", fix="Give at least one pair.")

    def embed(side: int) -> mining.Embed:  # of queries (0) or documents (1)
        return lambda texts: embedder.encode(
            texts, prompt=record.prompts[side], normalize_embeddings=record.normalised
        )

    def mine_from(examples: Sequence[VectorExample], first: int) -> Iterator[mining.Mined]:
        return mining.mine_window(examples, first, opened, embed(0), embed(1), answers, settings)

    decisive = {
        **vars(settings), "digest": record.digest, "changes": record.changes,
        "pairs": answers.digest,
    }  # fmt: skip
    with shown_progress(progress) as reporter:
        return mining.write_mined(
            _read_pairs(rows), answers.rows, mine_from, target, decisive, reporter
        )


def _read_pairs(pairs: Any) -> Iterator[VectorExample]:
    """Yield the examples of a source or of rows.

    Raises:
        DataError: a row has no positive, or a score, or another form than the first row.
    """
    from bothways.tasks.columns import UnclearColumnError
    from bothways.tasks.sentence_embedding.examples import VectorExample
    from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask

    task = SentenceEmbeddingTask()
    try:
        if isinstance(pairs, str | Path):
            examples: Iterable[Any] = task.read(str(pairs)).examples
        else:
            examples = (task.example(row, where=f"pair {n}") for n, row in enumerate(pairs, 1))
        for example in examples:
            if not isinstance(example, VectorExample) or example.text_b is None:
                fix = "Give a column with a text that answers it, such as positive."
                raise DataError("has no positive", where=example.where, fix=fix)
            if example.label is not None or example.scores:
                message = "has a score, and each second text is taken for a positive"
                fix = "Keep the pairs that belong together, without their scores."
                raise DataError(message, where=example.where, fix=fix)
            yield example
    except UnclearColumnError as error:
        raise error.unnamed from None  # no option and no argument names a column
