"""From texts to an index, and from queries to the texts that answer them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bothways.core.bar import shown_progress
from bothways.core.errors import ConfigError, DataError, FolderError
from bothways.core.progress import Progress

if TYPE_CHECKING:
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.prepared_model import PredictPrecision
    from bothways.prediction.search.index import Index, IndexRecord, Mode
    from bothways.prediction.search.stored_vectors import Stored


def build_index(  # noqa: PLR0913 – one option per question
    texts: str | Path | Iterable[Any],
    out: str | Path,
    model: str | Path | None = None,
    *,
    text: str | None = None,
    id: str | None = None,
    stored: Stored = "fp32",
    bm25: bool = False,
    graph: bool = False,
    delete: Iterable[str] = (),
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
        out: folder of the index. One that exists is changed: documents with an id that it has are
            replaced.
        model: model folder, sentence-transformers folder, folder of a run, or Hub id; by default
            that of the index.
        text: column of the text; by default text, after it the title of BEIR's rows.
        id: column of the id; by default _id or id, else the file and line, in Python the number.
        stored: vectors as fp32, bf16, int8 (a quarter), or binary (signs, with int8 codes for the
            order of the best ones).
        bm25: count the words, for the modes bm25 and hybrid (needs bothways[search]).
        graph: add a graph for approximate search (needs bothways[search]); from a million documents
            it is worth its time.
        delete: ids of documents to delete.
        length: maximum length of a text in tokens; by default as in the folder.
        precision: precision of matrix products: fp32, bf16, int8 or auto.
        device: auto (a GPU, if there is one), cpu, cuda or cuda:N.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        settings: settings of the task embed, such as `pooling="mean"`.

    Raises:
        FolderError: the index was made by another model, or is damaged; the model cannot be read.
        DataError: a file cannot be read, an id occurs twice, or is not there to be deleted.
        ConfigError: an unknown setting, or one that the index has otherwise.

    Examples:
        >>> index = bothways.build_index(["a good film", "a bad play"], "my-index", "my-bert")
        >>> len(index)
        2
        >>> len(bothways.build_index([{"id": "1", "text": "a fine film"}], "my-index"))
        2
    """
    from bothways.core.config.checks import require_choice
    from bothways.core.errors import require
    from bothways.hub.provenance import digest_of_model
    from bothways.prediction.search.change import change_index
    from bothways.prediction.search.index import RECORD, Index, IndexRecord
    from bothways.prediction.search.stored_vectors import Stored

    require_choice(Stored, "stored", stored)
    for is_used, package in ((bm25, "bm25s"), (graph, "usearch")):
        if is_used:
            require("search", "an index of this kind", package)
    folder = Path(out)
    old = Index(folder).record if (folder / RECORD).exists() else None
    if old is None and model is None:
        fix = "Name the model that makes the vectors."
        raise ConfigError("there is no index yet, and no model", where="model", fix=fix)
    if old is not None and (settings or stored not in ("fp32", old.stored) or length):
        message = f"{folder} has its settings already: vectors in {old.stored}"
        raise ConfigError(message, where="settings", fix="Leave them out, or build a new index.")
    name = str(old.model if model is None and old is not None else model)
    embedder = open_embedder(name, old, length, precision, device, settings)
    task: Any = embedder.task_model.task
    normalised = embedder.similarity_name == "cosine"
    record = old or IndexRecord(
        _absolute(name), digest_of_model(name, whole=True), task.width(embedder.task_model.model),
        normalised, stored, 0.0, settings, length,
        (task.role_prompt("query"), task.role_prompt("document")),
    )  # fmt: skip
    with shown_progress(progress) as reporter:
        return change_index(
            folder, record, read_texts(texts, text, id),
            lambda items: embedder.encode(
                items, prompt=record.prompts[1], normalize_embeddings=record.normalised
            ),
            reporter, delete=tuple(delete), bm25=bm25, graph=graph,
        )  # fmt: skip


def open_embedder(
    model: str,
    record: IndexRecord | None,
    length: int | None = None,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
    settings: Mapping[str, Any] | None = None,
) -> Predictor:
    """Open the model of an index, as it was when the index was built, or that of a new one.

    Raises:
        FolderError: it is another model.
        ConfigError: its similarity is neither the cosine nor the dot product.
    """
    from bothways.hub.provenance import digest_of_model
    from bothways.prediction.predictor import open_task

    if record is not None:
        digest, length, settings = (
            digest_of_model(model, whole=True),
            record.length,
            record.settings,
        )
        if digest != record.digest:
            message = f"is not the model of the index, which was made by {record.model}"
            fix = "Name that model, or build the index again with this one."
            raise FolderError(message, where=model, fix=fix)
    embedder = open_task(
        model, "embed", length=length, precision=precision, device=device, settings=settings or {}
    )
    if embedder.similarity_name not in ("cosine", "dot"):
        message = f"the model compares by {embedder.similarity_name}"
        fix = "An index has cosines or dot products: choose a model with one of them."
        raise ConfigError(message, where="model", fix=fix)
    return embedder


def read_texts(
    texts: Any, text: str | None = None, id: str | None = None
) -> Iterator[tuple[str | None, str]]:
    """Yield ids and texts; see `build_index`. None for rows of Python without an id."""
    from bothways.data.tables import given_rows, open_table
    from bothways.tasks.sentence_embedding.beir import corpus_file

    items = [Path(texts)] if isinstance(texts, str | Path) else given_rows(texts, "texts")
    for number, item in enumerate(items, 1):
        if isinstance(item, str):
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
    from bothways.tasks.columns import cell_of, text_of

    content = text_of(row, text or "text", where)
    if text is None and "_id" in row and row.get("title"):
        content = f"{row['title']} {content}".strip()
    name = next((key for key in ("_id", "id") if key in row), None) if id is None else id
    value = default if name is None else cell_of(row, name, where)
    return None if value is None else str(value), content


def _absolute(model: str) -> str:
    path = Path(model)
    return str(path.resolve()) if path.exists() else model


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
        >>> index = bothways.build_index(texts, "films", "my-bert")
        >>> hit = bothways.search("films", "a good film", top=1)[0]
        >>> hit.id, hit.text, round(hit.score, 3)
        ('film', 'a good film', 1.0)
    """
    from bothways.core.config.checks import require_at_least, require_choice
    from bothways.prediction.predictor import Predictor, open_task
    from bothways.prediction.search.index import Index, Mode

    require_at_least(1, top=top, depth=depth)
    require_choice(Mode, "mode", mode)
    opened = index if isinstance(index, Index) else Index(index)
    texts = [queries] if isinstance(queries, str) else list(queries)
    reranker = rerank
    if rerank is not None and not isinstance(rerank, Predictor):
        reranker = open_task(rerank, "rerank", precision=precision, device=device)
    vectors = None
    if mode != "bm25":
        embedder = model
        if not isinstance(embedder, Predictor):
            name = str(opened.record.model if model is None else model)
            embedder = open_embedder(name, opened.record, precision=precision, device=device)
        vectors = embed_queries(embedder, opened, texts)
    hits = opened.search(
        texts, vectors, top, mode, exact=exact, reranker=cast("Predictor | None", reranker),
        depth=depth,
    )  # fmt: skip
    return hits[0] if isinstance(queries, str) else hits


def embed_queries(embedder: Predictor, index: Index, queries: Iterable[str]) -> Any:
    """Return the vectors of queries, with the prompt that the index has for them."""
    record = index.record
    return embedder.encode(
        list(queries), prompt=record.prompts[0], normalize_embeddings=record.normalised
    )
