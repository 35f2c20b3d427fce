"""`bothways corpus build | inspect` and `tokenizer train | encode | report`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

import bothways
from bothways.cli import options
from bothways.core.config.reader import load
from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.files import check_output_path, replace_file, replace_folder
from bothways.core.progress import terminal_progress
from bothways.core.terminal import output_console, quantity, show_lines, write_stderr
from bothways.data.text_io import STDIN, BytesRead, file_at, read_lines, standard_input
from bothways.texts import read_document_texts, read_sample

if TYPE_CHECKING:
    from bothways.core.progress import Progress
    from bothways.data.cleaning.config import Cleaning
    from bothways.data.corpus import Corpus
    from bothways.text.tokenizer import Tokenizer
    from bothways.text.vocabulary_report import SplitWord


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
        Files (.txt, .jsonl, .csv, .tsv, .parquet, wiki-extractor's; also .gz, .xz, .zst, .bz2),
        folders and quoted globs, files at URLs such as s3://bucket/wiki.txt, or Hub data sets as
        hub:owner/name:configuration:split. Then settings of the cleaning, such as
        word_count.least=20, near_duplicates.shingle=8 or stop_words=none.
    """
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


def inspect(folder: str, /, *, documents: int = 3, seed: int = 0, verify: bool = False) -> None:
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
    columns = ("percentile", *(f"{point}%" for point in _POINTS))
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


Inputs = Annotated[list[str], options.INPUTS]

_LINES = 256
"""Lines that are encoded at once."""


@Parameter(name="*")
@dataclass(frozen=True)
class VocabularyOptions:
    """Options of the vocabulary; the default of each kind is in brackets.

    Parameters
    ----------
    size
        Number of tokens, including five special ones (30,000; bpe 50,000).
    min_frequency
        Minimum occurrences of a pair of pieces to merge it (2). Not for unigram.
    lowercase
        Convert the text to lower case (yes). Not for bpe.
    strip_accents
        Remove accents (as lowercase). Not for bpe.
    cjk
        Make each ideograph a word (yes). wordpiece only.
    alphabet
        The number of characters to keep (1,000, or what coverage needs). wordpiece only.
    coverage
        The share of the text's characters to keep, beyond the first 1,000 (0.9995). Not for bpe.
    prefix_space
        Treat the first word of a text as if it followed a space (yes). bpe only.
    longest
        Maximum characters of a piece (16). unigram only.
    """

    size: int | None = None
    min_frequency: int | None = None
    lowercase: bool | None = None
    strip_accents: bool | None = None
    cjk: bool | None = None
    alphabet: int | None = None
    coverage: float | None = None
    prefix_space: bool | None = None
    longest: int | None = None


@options.documented_by(bothways.train_tokenizer)
def train(
    inputs: Inputs,
    *,
    out: Path,
    kind: Literal["wordpiece", "bpe", "unigram"] = "wordpiece",
    options: VocabularyOptions = VocabularyOptions(),
    ceiling: float = 200,
    alpha: float | None = None,
    seed: int = 0,
    column: str = "text",
) -> None:
    """Train a vocabulary and write a folder that bothways and transformers open.

    The same text gives the same files.

    Parameters
    ----------
    inputs
        Files (.txt, .jsonl, .csv, .tsv, .parquet, also .gz, .xz, .zst, .bz2), folders and globs,
        files at URLs such as s3://bucket/wiki.txt, or hub:owner/name.
    out
        Folder to write; it must not exist or must be empty.
    alpha
        Read each input as a language, with a share of the training text proportional to its size
        to this power: 1 as large as they are, 0 equally (mBERT 0.7, XLM-R 0.3). Small languages are
        repeated. By default all inputs are one text.
    """
    from bothways.data.documents import read_documents
    from bothways.text.trainers import KINDS

    fields = {field.name for field in dataclasses.fields(KINDS[kind])}
    values = {name: value for name, value in vars(options).items() if value is not None}
    for name in values.keys() - fields:
        names = ", ".join("--" + other.replace("_", "-") for other in sorted(fields))
        message, where = f"is not an option of {kind}", "--" + name.replace("_", "-")
        raise ConfigError(message, where=where, fix=f"Its options: {names}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        message = "exists and is not an empty folder"
        raise ResourceError(message, where=out, fix="Choose another --out.")
    texts: Any = read_documents(inputs, column=column)
    if alpha is not None:
        texts, values["alpha"] = {name: name for name in inputs}, alpha
    with replace_folder(out) as folder, terminal_progress() as progress:
        bothways.train_tokenizer(
            texts, kind=kind, ceiling=ceiling, seed=seed, column=column, out=folder,
            progress=progress, **{"size": KINDS[kind]().size} | values,
        )  # fmt: skip
        progress.message(f"The tokenizer is in {out}.")


def encode(inputs: Inputs | None = None, *, tokenizer: Path, out: Path | None = None) -> None:
    """Encode each line to a JSON object with ids, tokens and offsets, without [CLS] and [SEP].

    Parameters
    ----------
    inputs
        Text files, also .gz, .xz, .zst; - is standard input, the default.
    tokenizer
        A folder, a tokenizer.json or a vocab.txt.
    out
        .jsonl file to write; default: standard output.
    """
    from bothways.text.tokenizer import Tokenizer

    if out is not None:
        check_output_path(out, [*(inputs or ()), tokenizer])
        if out.suffix.lower() != ".jsonl":
            message = f"{out.name!r} must end in .jsonl"
            raise ConfigError(message, where="out", fix="Such as ids.jsonl.")
    model = Tokenizer.load(tokenizer)
    hidden = out is None and sys.stdout.isatty()  # a bar would be mixed with the output
    with terminal_progress(hidden=hidden) as progress:
        rows = _encoded(model, inputs or [STDIN], progress)
        if out is None:
            sys.stdout.writelines(rows)
            return

        def write(path: Path) -> None:
            """Write the rows to a file."""
            with path.open("w", encoding="utf-8") as file:
                file.writelines(rows)

        replace_file(out, write)


def report(
    inputs: Inputs,
    *,
    tokenizer: Path,
    ceiling: float = 20,
    examples: int = 10,
    column: str = "text",
) -> None:
    """Report how well a vocabulary fits a text.

    Shows the unknown rate, tokens per word, coverage, unused tokens and examples.

    Parameters
    ----------
    inputs
        Files (.txt, .jsonl, .csv, .tsv, .parquet, also .gz, .xz, .zst, .bz2), folders and globs,
        files at URLs such as s3://bucket/wiki.txt, or hub:owner/name.
    tokenizer
        A folder, a tokenizer.json or a vocab.txt.
    ceiling
        Maximum size of the text in millions of characters; longer texts are sampled evenly.
    examples
        Number of tokens and words to show of each kind.
    column
        Column of the text in tables (.jsonl, .csv, .parquet …).
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from bothways.core.report.terminal import titled
    from bothways.data.documents import read_documents
    from bothways.text import trainers
    from bothways.text.tokenizer import Tokenizer
    from bothways.text.vocabulary_report import vocabulary_report

    require_at_least(0, examples=examples)
    model = Tokenizer.load(tokenizer)
    with terminal_progress() as progress:
        documents = read_document_texts(read_documents(inputs, column=column), progress)
        texts = trainers.sample(documents, trainers.characters_of(ceiling))
        summary = vocabulary_report(model, read_sample(texts, progress), examples=examples)
    rows = {
        "vocabulary": f"{summary.size:,} tokens, {summary.unused:.1%} of them unused here",
        "text": f"{summary.characters:,} characters, {summary.words:,} words, "
        f"{summary.tokens:,} tokens",
        "unknown": f"{summary.unknown:.3%} of tokens, {summary.unknown_words:.3%} of words",
        "fertility": f"{summary.fertility:.3f} tokens per word",
        "compression": f"{summary.characters / max(1, summary.tokens):.3f} characters per token",
        "whole words": f"{summary.whole_words:.1%} of words are one token",
        "coverage": f"{summary.covered:.3%} of characters are in words without an unknown token",
        "longest tokens": ", ".join(summary.longest),
        "split words": _examples(summary.split),
        "unknown words": _examples(summary.strange),
    }
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in rows.items():
        if value:  # there may be no split word and no unknown one
            table.add_row(name, Text(value))  # Text: brackets in tokens are not markup
    show_lines(output_console(), titled(str(tokenizer), table))


def _encoded(tokenizer: Tokenizer, inputs: list[str], progress: Progress) -> Iterator[str]:
    """Yield a JSON line for each line of the inputs."""
    files, bytes_read = [None if name == STDIN else file_at(name) for name in inputs], BytesRead()
    sizes = [file.stat().st_size for file in files if file is not None]
    progress.stage("encoding", sum(sizes) if len(sizes) == len(files) else None)
    lines = (
        line
        for file in files
        for _, line in (standard_input() if file is None else read_lines(file, bytes_read))
    )
    while block := list(itertools.islice(lines, _LINES)):
        for encoded in tokenizer.encode_with_offsets(block):
            ids = encoded.ids.tolist()
            row = {
                "ids": ids,
                "tokens": [tokenizer.token(id) for id in ids],
                "offsets": encoded.offsets.tolist(),
            }
            yield json.dumps(row, ensure_ascii=False) + "\n"
        progress.advance(bytes_read.position)


def _examples(words: Sequence[SplitWord]) -> str:
    return "\n".join(f"{word.word} → {' '.join(word.pieces)}  ({word.count:,}×)" for word in words)
