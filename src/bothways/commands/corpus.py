"""`bothways corpus build | inspect`: text becomes a memory-mapped corpus, and what is in one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bothways.commands.options import INPUTS
from bothways.commands.progress import terminal_progress
from bothways.commands.resuming import keeping
from bothways.core.terminal import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bothways.data.corpus import Corpus

_POINTS = (0, 10, 25, 50, 75, 90, 99, 100)
_SHOWN_SENTENCES, _SHOWN_CHARACTERS = 8, 240


def build(
    *inputs: Annotated[str, INPUTS],
    tokenizer: Path,
    out: Path,
    column: str = "text",
    boundary: Literal["auto", "blank", "line", "file"] = "auto",
    language: str = "auto",
    min_tokens: int = 1,
    workers: int | None = None,
) -> None:
    """Build a corpus: documents, sentences, token ids. Run again after an interruption, it goes on where it was.

    Parameters
    ----------
    inputs
        Files (.txt, .jsonl, .parquet, wiki-extractor's; .gz, .xz, .zst and .bz2 of them), folders, globs in quotes, or Hub
        data sets as hub:owner/name:configuration:split.
    tokenizer
        A folder made by `bothways tokenizer train`, a tokenizer.json or a vocab.txt.
    out
        The folder of the corpus.
    column
        Where the text is in .jsonl, .parquet and Hub rows.
    boundary
        What ends a document in a .txt file: blank lines, the line, the file; auto takes blank lines if there are any.
    language
        Of the sentences, as en, zh, de; auto tells English from Chinese for each document.
    min_tokens
        Leave out documents with fewer tokens.
    workers
        Processes; one per core unless given. The corpus does not depend on it.
    """
    from rich.console import Console
    from rich.text import Text

    from bothways.core.errors import DataError
    from bothways.data import corpus as job
    from bothways.data.documents import Boundary, read_documents
    from bothways.data.manifest import MANIFEST
    from bothways.text.tokenizer import Tokenizer

    if not inputs:
        raise DataError("no input was given", fix="Name files, folders, globs or Hub data sets.")
    console = Console(stderr=True)
    documents = read_documents(inputs, column=column, boundary=Boundary(boundary))
    known = (out / MANIFEST).exists()
    with keeping(out, console), terminal_progress(console) as progress:
        result = job.build_corpus(
            documents, Tokenizer.load(tokenizer), out,
            language=language, min_tokens=min_tokens, workers=workers, progress=progress,
        )  # fmt: skip
    if known:
        say(console, f"{out} holds the corpus of these inputs already; there was nothing to do.")
    Console().print(Text(str(out), "bold"), _counts(result), sep="\n")


def inspect(folder: Path, /, *, documents: int = 3, seed: int = 0, verify: bool = False) -> None:
    """Show a corpus: counts, lengths, what was left out, and some documents as the model will read them.

    Parameters
    ----------
    folder
        A folder made by `bothways corpus build`.
    documents
        How many to show.
    seed
        Decides which.
    verify
        Compare every byte with the digests of the manifest.
    """
    from rich.console import Console
    from rich.text import Text

    from bothways.core.keyed_rng import rng
    from bothways.data.corpus import Corpus

    console = Console()
    corpus = Corpus.open(folder)
    if verify:
        with console.status("comparing all files with the manifest …"):
            corpus.verify()
        console.print("All files are as they were built.")
    console.print(Text(str(folder), "bold"), _counts(corpus), _lengths(corpus), sep="\n")
    count = min(max(documents, 0), len(corpus))
    for document in sorted(rng(seed, "inspect").choice(len(corpus), count, replace=False)):
        _show(corpus, int(document), console)


def _counts(corpus: Corpus) -> Table:
    from rich.table import Table

    counts, settings = corpus.manifest.counts, corpus.manifest.settings
    size = sum(stored.bytes for stored in corpus.manifest.files.values())
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        ("documents", f"{counts.documents:,}"),
        ("sentences", f"{counts.sentences:,}"),
        ("tokens", f"{counts.tokens:,}"),
        ("left out: seen before", f"{counts.duplicates:,}"),
        (
            "left out: empty"
            if settings.min_tokens == 1
            else f"left out: fewer than {settings.min_tokens} tokens",
            f"{counts.short:,}",
        ),
        ("on the disk", f"{size / 2**20:,.1f} MiB"),
        ("vocabulary", f"{corpus.tokenizer.size:,}"),
        ("unknown tokens", f"{corpus.unknown_share:.2%}"),
        ("language", settings.language),
    ):
        table.add_row(name, value)
    return table


def _lengths(corpus: Corpus) -> Table:
    from rich.table import Table

    from bothways.data.corpus import length_percentiles

    table = Table(
        "percentile", *(f"{point} %" for point in _POINTS), title="Lengths", title_justify="left"
    )
    for name, offsets in (
        ("tokens of a sentence", corpus.sentences),
        ("sentences of a document", corpus.documents),
    ):
        table.add_row(name, *(f"{length:,}" for length in length_percentiles(offsets, _POINTS)))
    return table


def _show(corpus: Corpus, document: int, console: Console) -> None:
    sentences = corpus.sentences_of(document)
    console.rule(f"document {document} · {len(sentences)} sentences")
    for ids in sentences[:_SHOWN_SENTENCES]:
        text = corpus.tokenizer.decode(ids)
        console.print(
            text[:_SHOWN_CHARACTERS] + " …" * (len(text) > _SHOWN_CHARACTERS),
            markup=False,
            highlight=False,
        )
    if len(sentences) > _SHOWN_SENTENCES:
        console.print("…")
