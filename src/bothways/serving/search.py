"""The route `/search`: the documents of an index that answer queries.

    query → vector, by the queue of the model → hits, in a thread → pairs, by the queue → order

An index belongs to the served model that made it, with the settings that it was made with. Each
search looks whether the index on disk has changed, and then opens it again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field
from typing_extensions import TypedDict

from bothways.core.errors import BothwaysError, ConfigError, FolderError, call
from bothways.prediction.predictor import unit
from bothways.prediction.search import Mode
from bothways.prediction.search.index import DEPTH, RECORD, Hit, Index, open_embedder, ordered
from bothways.serving import shapes
from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.serving.shapes import Answer, Query, Route
from bothways.tasks.sentence_embedding.task import PromptedText

_log = logging.getLogger("bothways.serving")


@dataclass
class ServedIndex:
    """An index under a name; searched by one thread at a time.

    Attributes:
        name: what requests call it.
        model: that embeds queries, with the settings of the index.
        index: as it was when it was last looked at.
        stamp: of index.json, which each change replaces; None to open the index again.
    """

    name: str
    model: ServedModel
    index: Index
    stamp: object = None

    def search(
        self, queries: Many[str], vectors: Any, k: int, mode: Mode, **options: Any
    ) -> tuple[int, list[list[Hit]]]:
        """Return the number of changes of the index and hits as `Index.ranked`.

        Raises:
            RequestError: the index on disk is damaged, gone, or was made by another model; it has
                no BM25 for this mode.
        """
        for last in (False, True):
            try:
                folder = self.index.folder
                status = (folder / RECORD).stat()
                stamp = status.st_ino, status.st_mtime_ns, status.st_size
                if stamp != self.stamp:
                    index = Index(folder)
                    if _identity(index) != _identity(self.index):
                        message = "was built again by another model, or with other settings"
                        fix = "Start the server again."
                        raise FolderError(message, where=folder, fix=fix)
                    self.index, self.stamp = index, stamp
                if mode != "vectors" and self.index.record.bm25 is None:
                    message = (
                        f"mode must be vectors: the index {self.name!r} was built without BM25"
                    )
                    raise RequestError("invalid", message, param="mode")
                hits = self.index.ranked(queries, vectors, k, mode, **options)
                return self.index.record.changes, hits
            except (BothwaysError, OSError) as error:
                self.stamp = None  # files may be gone that a change has replaced meanwhile
                if last:
                    _log.exception("the index %s cannot be searched", self.name)
                    message = f"the index {self.name!r} cannot be read; the server's log says why"
                    raise RequestError("not_ready", message) from error
        raise AssertionError


def _identity(index: Index) -> object:
    record = index.record
    return record.digest, record.prompts, dict(record.settings), record.length, record.normalised


def open_indexes(
    folders: Mapping[str, str | Path], models: Iterable[ServedModel], length: int | None = None
) -> dict[str, ServedIndex]:
    """Open indexes by name, each with the served model that made it.

    Args:
        length: for which the models were opened; None for their own.

    Raises:
        FolderError: an index is damaged, or its model is not served.
        ConfigError: the model reads another length than the index.
    """
    indexes = {}
    for name, path in folders.items():
        record = (index := Index(path)).record
        if length not in (None, record.length):
            message = f"the index {name!r} was made with another length than {length}"
            raise ConfigError(message, where="length", fix="Leave the length out.")
        reasons = list[str]()
        for served in models:
            try:
                variant = open_embedder(served.predictor, record).task_model
            except BothwaysError as error:  # such as another model; the next one may fit
                reasons.append(f"{served.name} {error.what}")
                continue
            indexes[name] = ServedIndex(name, replace(served, variant=variant), index)
            break
        else:
            message = f"was made by {record.model}, and no model that is served fits: "
            fix = f"Serve it, too: {call('serve', f'{record.model}:embed', index=str(path))}."
            raise FolderError(message + "; ".join(reasons), where=path, fix=fix)
    return indexes


class SearchRequest(shapes.TruncatedRequest):
    """Queries, as `bothways search` reads them."""

    query: shapes.TextList
    index: shapes.Text | None = Field(
        default=None, description="with a single index it may be absent"
    )
    top: shapes.Count = 10
    mode: Mode = "vectors"
    exact: shapes.Flag = False
    rerank: shapes.Text | None = Field(
        default=None, description="a served model of the task rerank"
    )
    depth: shapes.Count = DEPTH


class FoundDocuments(TypedDict):
    """The best documents for a query."""

    query: str
    hits: list[Hit]


class SearchAnswer(TypedDict):
    """The documents for each query, and the number of changes of the index that was searched."""

    index: str
    version: int
    results: list[FoundDocuments]


def search(models: Models, request: SearchRequest) -> Query:
    """Read a request of `/search`; its answer has the lines of `bothways search`."""
    served, queries, limits = _choose(models, request), request.query, models.limits
    try:
        reranker = None if request.rerank is None else models.choose(request.rerank, ("rerank",))
    except RequestError as error:
        error.param = "rerank"
        raise
    if not all(query.strip() for query in queries) or not queries:
        raise RequestError("empty", "a query is an empty text", param="query")
    deep = request.mode == "hybrid" or reranker is not None
    if not deep and request.depth != DEPTH:
        message = "depth is for searches with rerank, or with mode hybrid"
        raise RequestError("invalid", message, param="depth")
    if request.exact and request.mode == "bm25":
        raise RequestError("invalid", "exact is for vectors, and mode is bm25", param="exact")
    count = max(request.top, request.depth) if deep else request.top
    limits.check("texts", "queries times documents", count * len(queries))
    limits.check("text_characters", "characters of a query", max(map(len, queries)))
    options = {"exact": request.exact, "depth": request.depth}

    def write(answer: Answer) -> SearchAnswer | Query:
        """Search the index; called in the thread of indexes."""
        vectors = answer.vectors if answer.predictions else None
        if vectors is not None and served.index.record.normalised:
            vectors = unit(vectors)
        k = count if reranker is not None else request.top
        version, hits = served.search(queries, vectors, k, request.mode, **options)
        if reranker is None or not any(hits):
            return shown(version, hits)
        share = limits.request_characters // (count * len(queries))
        max_length = min(limits.text_characters, share)
        pairs = [
            (query, hit.text[: max(0, max_length - len(query))])
            for query, ranked in zip(queries, hits, strict=True)
            for hit in ranked
        ]

        def write_reranked(answer: Answer) -> SearchAnswer:
            logits = iter([prediction.logits[0] for prediction in answer.predictions])
            scores = [[*itertools.islice(logits, len(ranked))] for ranked in hits]
            scored = zip(hits, scores, strict=True)
            return shown(version, [ordered(*pair)[: request.top] for pair in scored])

        return Query(
            reranker, pairs, write_reranked, request.truncate,
            input_name=lambda _: "a query with a hit",
        )  # fmt: skip

    def shown(version: int, hits: list[list[Hit]]) -> SearchAnswer:
        pairs = zip(queries, hits, strict=True)
        results: list[FoundDocuments] = [{"query": query, "hits": best} for query, best in pairs]
        return {"index": served.name, "version": version, "results": results}

    prompt = served.index.record.prompts[0]
    inputs = [PromptedText(query, prompt=prompt) for query in queries]
    return Query(
        served.model, () if request.mode == "bm25" else inputs, write, request.truncate,
        searches=True, input_name="query {}".format,
    )  # fmt: skip


def _choose(models: Models, request: SearchRequest) -> ServedIndex:
    """Return the index of a request: by its name, by its model, or the only one."""
    if request.model is not None and len(models.by_name) > 1:
        models.named(request.model)
    fitting = [
        served
        for served in models.indexes.values()
        if request.index in (None, served.name)
        and (len(models.by_name) == 1 or request.model in (None, served.model.name))
    ]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(models.indexes)
    if not names:
        message = "the server has no index: see --index, or indexes in Python"
    elif fitting:
        message = f"there are several indexes: set index to one of {names}"
    else:
        message = f"there is no such index of this model; there are {names}"
    raise RequestError("invalid" if names else "wrong_task", message, param="index")


SEARCH = Route(
    SearchRequest,
    search,
    SearchAnswer,
    "Documents of an index that answer queries",
    ("embed",),
    {"query": "who sleeps?"},
)
"""The route `/search` of servers that have an index."""
