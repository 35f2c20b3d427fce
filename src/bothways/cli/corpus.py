"""`bothways corpus build | inspect`: build a memory-mapped corpus from text, and inspect it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

import bothways
from bothways.cli import options
from bothways.core.progress import terminal_progress
from bothways.core.terminal import output_console, quantity, write_stderr

if TYPE_CHECKING:
    from bothways.data.cleaning.config import Cleaning
    from bothways.data.corpus import Corpus

_POINTS = (0, 10, 25, 50, 75, 90, 99, 100)
_SHOWN_SENTENCES, _SHOWN_CHARACTERS = 8, 240


@Parameter(name="*")
@dataclass(frozen=True)
class CleaningOptions:
    """Options for what a corpus leaves out."""

    filters: Annotated[
        Literal["none", "gopher", "c4"],
        Parameter(
            help="Leave out documents and lines of low quality, by the rules of Gopher or C4. "
            "Settings of rules: see INPUTS."
        ),
    ] = "none"
    near_duplicates: Annotated[
        float | None,
        Parameter(
            help="Leave out documents that are similar to an earlier one, by the share of common "
            "runs of 5 words (characters in Chinese), such as 0.8."
        ),
    ] = None
    min_tokens: Annotated[int, Parameter(help="Leave out documents with fewer tokens.")] = 1

    def cleaning(self, settings: Iterable[str]) -> Cleaning:
        """Return the cleaning, changed by settings such as "word_count.least=20".

        Raises:
            ConfigError: an unknown setting, or a wrong value.
        """
        from bothways.core.config.reader import load
        from bothways.data.cleaning.config import Cleaning, make_cleaning

        base = make_cleaning(self.filters, self.near_duplicates, self.min_tokens)
        return load(Cleaning, base=base, overrides=settings)


@options.documented_by(bothways.build_corpus)
def build(
    *inputs: Annotated[str, options.INPUTS],
    tokenizer: Path,
    out: Path,
    column: str = "text",
    boundary: Literal["auto", "blank", "line", "file"] = "auto",
    language: str = "auto",
    words: Literal["jieba", "spaces"] | None = None,
    cleaning: CleaningOptions = CleaningOptions(),
    workers: int | None = None,
) -> None:
    """Build a corpus: documents, sentences, token ids.

    The same command resumes an interrupted build.

    Parameters
    ----------
    inputs
        Files (.txt, .jsonl, .parquet, wiki-extractor's; also .gz, .xz, .zst and .bz2), folders and
        quoted globs, files at URLs such as s3://bucket/wiki.txt, or Hub data sets as
        hub:owner/name:configuration:split. Then settings of the cleaning, such as
        word_count.least=20, near_duplicates.shingle=8 or stop_words=none.
    """
    from bothways.core.errors import DataError
    from bothways.data.manifest import MANIFEST

    files, settings = options.split_inputs(inputs)
    if not files:
        raise DataError("no input was given", fix="Name files, folders, globs or Hub data sets.")
    complete = (out / MANIFEST).exists()
    with options.resumable(out) as progress:
        result = bothways.build_corpus(
            files, tokenizer, out,
            column=column, boundary=boundary, language=language, words=words,
            cleaning=cleaning.cleaning(settings), workers=workers, progress=progress,
        )  # fmt: skip
    if complete:
        write_stderr(f"{out} already has the corpus of these inputs; nothing to do.")
    options.show_tables(_counts(result, out))


def inspect(
    folder: str,
    /,
    *,
    documents: int = 3,
    seed: int = 0,
    verify: bool = False,
) -> None:
    """Show a corpus: counts, also of what was dropped, lengths, and some documents.

    Parameters
    ----------
    folder
        A folder made by `bothways corpus build`.
    documents
        Number of documents to show.
    seed
        Seed of their choice.
    verify
        Compare the files with the digests in the manifest.
    """
    from bothways.core.config.values import require_at_least
    from bothways.core.source import rng
    from bothways.data.corpus import Corpus, length_percentiles

    require_at_least(0, documents=documents)
    console = output_console()
    corpus = Corpus.open(folder)
    if verify:
        with terminal_progress() as progress:
            progress.stage("comparing files with the manifest")
            corpus.verify()
        console.print("All files match the manifest.")
    counts = _counts(corpus, folder)
    offsets = {
        "tokens of a sentence": corpus.sentences, "sentences of a document": corpus.documents,
    }  # fmt: skip
    rows = [
        [name, *(f"{length:,}" for length in length_percentiles(values, _POINTS))]
        for name, values in offsets.items()
    ]
    columns = ("percentile", *(f"{point} %" for point in _POINTS))
    options.show_tables(counts, options.CommandTable("Lengths", columns, rows))
    count = min(documents, len(corpus))
    for document in sorted(rng(seed, "inspect").choice(len(corpus), count, replace=False)):
        sentences = corpus.sentences_of(int(document))
        console.rule(f"document {document} · {quantity(len(sentences), 'sentence(s)')}")
        for ids in sentences[:_SHOWN_SENTENCES]:
            text = corpus.tokenizer.decode(ids)
            console.print(
                text[:_SHOWN_CHARACTERS] + " …" * (len(text) > _SHOWN_CHARACTERS),
                markup=False,
                highlight=False,
            )
        if len(sentences) > _SHOWN_SENTENCES:
            console.print("…")


def _counts(corpus: Corpus, title: object) -> options.CommandTable:
    counts, settings = corpus.manifest.counts, corpus.manifest.settings
    size = sum(stored.bytes for stored in corpus.manifest.files.values())
    inputs, cleaning, least = corpus.manifest.read, settings.cleaning, settings.cleaning.min_tokens
    names = {"min_tokens": "empty" if least == 1 else f"fewer than {least} tokens"}
    steps = list[tuple[str, str]]()  # the documents or lines that each one dropped
    for step in corpus.manifest.steps:
        name = names.get(step.name, step.name.replace("_", " "))
        if step.name in cleaning.line_rules:
            share = f" ({step.bytes / inputs.bytes:.2%} of the text)" if step.lines else ""
            steps.append((f"removed lines: {name}", f"{step.lines:,}{share}"))
        else:
            share = f" ({step.documents / inputs.documents:.2%})" if step.documents else ""
            steps.append((f"left out: {name}", f"{step.documents:,}{share}"))
    rows = (
        ("documents of the inputs", f"{inputs.documents:,}"),
        *steps,
        ("documents", f"{counts.documents:,}"),
        ("sentences", f"{counts.sentences:,}"),
        ("tokens", f"{counts.tokens:,}"),
        *([] if counts.words is None else [("words by white space", f"{counts.words:,}")]),
        ("size", f"{size / 2**20:,.1f} MiB"),
        ("vocabulary", f"{corpus.tokenizer.size:,}"),
        ("unknown tokens", f"{corpus.unknown_share:.2%}"),
        ("language", settings.language),
        *((("words", settings.words),) if settings.words else ()),
    )
    return options.CommandTable(str(title), ("", ""), rows)
