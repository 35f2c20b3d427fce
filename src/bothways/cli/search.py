"""`bothways index | search | mine`: texts, the texts that answer queries, and those that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

import bothways
from bothways.cli import options
from bothways.core.progress import terminal_progress
from bothways.core.terminal import quantity, write_stderr


@options.documented_by(bothways.build_index)
def index(  # noqa: PLR0913 – one option per question
    *texts: Annotated[str, options.INPUTS],
    out: Path,
    model: str | None = None,
    text: str | None = None,
    id: str | None = None,
    stored: Literal["fp32", "bf16", "int8", "binary"] | None = None,
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
    mode: Literal["vectors", "bm25", "hybrid"] = "vectors",
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

    typed = options.argument_text(queries) if queries else None
    if typed is None and len(queries) == 1 and queries[0] != "-" and not Path(queries[0]).exists():
        typed = queries[0]
    files = [Path(name) for name in queries or ("-",)]
    texts = [typed] if typed is not None else [query for _, query in read_texts(files, text)]
    results = bothways.search(
        index, texts, top, mode=mode, exact=exact, rerank=rerank, depth=depth, model=model,
        precision=precision, device=device,
    )  # fmt: skip
    for query, hits in zip(texts, results, strict=True):
        line = {"query": query, "hits": [vars(hit) for hit in hits]}
        print(json.dumps(line, ensure_ascii=False), file=sys.stdout)


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
    choose: Literal["best", "random"] = "best",
    mode: Literal["vectors", "bm25"] = "vectors",
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
    likely = (
        f"{quantity(done.likely, 'likely positive(s)')} of {quantity(done.with_likely, 'row(s)')}"
    )
    write_stderr(
        f"{mined} in {out}; {done.short:,} have fewer than {negatives}. {likely} are in "
        f"{done.likely_file}.",
    )
