"""From text to a vocabulary and a corpus."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

from bothways.core.config import reader as configs
from bothways.core.config.values import checked
from bothways.core.errors import ConfigError, DataError, ResourceError, argument, render
from bothways.core.files import require_text
from bothways.core.progress import Progress, shown_progress
from bothways.core.terminal import quantity

if TYPE_CHECKING:
    from bothways.data.cleaning.config import Cleaning
    from bothways.data.corpus import Corpus
    from bothways.data.documents import Boundary, Document, DocumentReader
    from bothways.data.sentences import Words
    from bothways.data.tables import TableLike
    from bothways.text.tokenizer import Tokenizer
    from bothways.text.trainers import Sample


NOTED_MARKS = 0.0075
"""In files of English Wikipedia up to 0.004 of the letters have an accent."""


@checked
def train_tokenizer(  # noqa: PLR0913 – one option per question
    texts: str | Path | TableLike | Mapping[str, str | Path | TableLike],
    size: int = 30_000,
    *,
    kind: str = "wordpiece",
    alpha: float = 0.7,
    ceiling: float = 200,
    seed: int = 0,
    column: str = "text",
    out: str | Path | None = None,
    progress: Progress | bool = True,
    **settings: Any,
) -> Tokenizer:
    """Train a vocabulary; the same text gives the same one.

    Args:
        texts: a file, folder or pattern with text, the URL of a file, or an iterable of texts, of
            rows such as a DataFrame, of documents or of paths; several languages as a mapping from
            names to these.
        size: number of tokens, special tokens included.
        kind: kind of vocabulary: wordpiece as in BERT, bpe as in RoBERTa (over bytes), or unigram
            as in ALBERT.
        alpha: of several languages: shares of the training text are proportional to size^alpha: 1
            as large as they are, 0 equally (mBERT 0.7, XLM-R 0.3). Small ones are repeated.
        ceiling: maximum size of the training text in millions of characters; longer texts are
            sampled evenly.
        seed: seed of that sample.
        column: column of the text in tables (.jsonl, .csv, .parquet …) and Hub rows.
        out: folder to save the tokenizer in.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.
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

    trainer_class: type[Any] = choice(kind, trainers.KINDS, "kind")
    trainer = configs.read(trainer_class, {"size": size, **settings})
    characters = trainers.characters_of(ceiling)
    with shown_progress(progress) as reporter:
        # A `datasets.DatasetDict`, which has names of columns, holds splits, not languages.
        if isinstance(texts, Mapping) and not hasattr(texts, "column_names"):
            languages = {
                name: read_document_texts(documents_of(source, column=column), reporter)
                for name, source in texts.items()
            }
            sample = trainers.sample_languages(languages, alpha, characters, seed)
            share = f"a sample of {quantity(len(languages), 'language(s)')}, alpha {alpha:g},"
        else:
            documents = documents_of(texts, column=column)
            sample = trainers.sample(read_document_texts(documents, reporter), characters, seed)
            even = f"an even sample ({sample.characters / max(1, sample.total):.1%})"
            share = "all" if sample.characters == sample.total else even
        tokenizer = trainers.learn(sample, trainer, lambda texts: read_sample(texts, reporter))
        if out is not None:
            tokenizer.save(out)
        few = f" (the text has no more candidates for the requested {trainer.size:,})"
        fewer = few if tokenizer.size < trainer.size else ""
        total = quantity(sample.total, "character(s)")
        reporter.message(f"{tokenizer.size:,} tokens{fewer}, trained on {share} of {total}")
        of_words = not isinstance(trainer, trainers.ByteBPE)
        if of_words and trainer.lowercase and trainer.strip_accents is None:
            marks, letter = trainers.removed_marks(sample.read())
            if marks > NOTED_MARKS:
                message = f"{marks:.1%} of the letters have an accent or another mark, such as"
                fix = f"{argument(strip_accents=False)} keeps them"
                message += f" {letter!r}, which this vocabulary removes; {fix}"
                reporter.message(render(f"note: {message}"))
    return tokenizer


def read_document_texts(documents: DocumentReader, progress: Progress) -> Iterator[str]:
    """Yield the texts of documents, with progress in bytes where they are of files."""
    total = documents.total
    progress.stage("reading", total or None)
    for note in documents.notes:
        progress.message(note)
    for number, document in enumerate(documents):
        if total and number % 256 == 0:
            progress.advance(documents.position)
        yield document.text


def read_sample(texts: Sample, progress: Progress) -> Iterator[str]:
    """Yield the texts of a sample, with progress in characters; later work has no measure."""
    progress.stage("counting words", texts.characters)
    done = 0
    for block in texts.blocks:
        yield from block
        done += sum(map(len, block))
        progress.advance(done)
    progress.stage("merging pieces")


@checked
def build_corpus(  # noqa: PLR0913 – one option per question
    texts: str | Path | TableLike,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    column: str = "text",
    boundary: Literal["auto", "blank", "line", "file"] = "auto",
    language: str = "auto",
    words: Words | None = None,
    cleaning: Cleaning | None = None,
    workers: int | None = None,
    progress: Progress | bool = True,
) -> Corpus:
    """Build a corpus for pre-training, continue an interrupted build, or open the existing corpus.

    Args:
        texts: a file, folder or pattern, the URL of a file, or several of them; in Python also rows
            with a text, such as a DataFrame, or documents.
        tokenizer: a folder, such as one made by `bothways tokenizer train`, a tokenizer.json or a
            vocab.txt; in Python also a tokenizer.
        out: folder of the corpus.
        column: column of the text in tables (.jsonl, .csv, .parquet …) and Hub rows.
        boundary: end of a document in a .txt file: blank line, line or file; auto: blank lines if
            there are any, else each line is a document.
        language: language of the sentences, such as en, zh, de; auto: English or Chinese, by
            document.
        words: for the masking of whole words in Chinese: store where words begin, as jieba divides
            the text (needs bothways[zh]), or at the spaces that another program has put between
            words; in Python also by a function that returns the words of a sentence.
        cleaning: which documents are dropped besides duplicates, such as
            `bothways.data.cleaning.config.make_cleaning("gopher", 0.8)`: those that the filters of
            Gopher refuse, and near-duplicates.
        workers: number of processes; default: one per core.
        progress: True (standard error), False, or a receiver with `stage`, `advance` and `message`.

    Raises:
        DataError: a file cannot be read.

    Examples:
        >>> corpus = bothways.build_corpus("text.txt", "tokenizer", "new-corpus", workers=1)
        >>> len(corpus)
        60
    """
    from bothways.data import corpus
    from bothways.text.tokenizer import Tokenizer

    documents = documents_of(texts, of_paths=True, column=column, boundary=boundary)
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    with shown_progress(progress) as reporter:
        return corpus.write_corpus(
            documents,
            loaded,
            out,
            language=language,
            words=words,
            cleaning=cleaning,
            workers=workers,
            progress=reporter,
        )


def choice(name: str, options: Mapping[str, Any], location: str) -> Any:
    """Look up a name; an unknown one is a ConfigError at `location`."""
    if name not in options:
        message = f"unknown {location} {name!r}"
        raise ConfigError(message, where=location, fix=f"Choose one of {', '.join(options)}.")
    return options[name]


def documents_of(
    texts: Any, *, of_paths: bool = False, column: str = "text", boundary: str = "auto"
) -> DocumentReader:
    """Return the documents of files, or of texts, rows or documents in memory.

    Args:
        of_paths: whether strings in a list are names; otherwise they are texts.

    Raises:
        ConfigError: a column or a boundary that what is given does not have.
        DataError: a name of no file, an item that is none of these, or a text that names a file.
    """
    from bothways.data.documents import Boundary, Document, DocumentReader, row_document
    from bothways.data.tables import TableRow, iter_rows

    ends = choice(boundary, {end.value: end for end in Boundary}, "boundary")
    if isinstance(texts, DocumentReader):
        return texts
    if isinstance(texts, str | Path):
        return _files([texts], column, ends)
    items = iter(iter_rows(texts, "texts"))
    head = [*itertools.islice(items, 1)]  # a stream may be longer than the memory
    items = itertools.chain(head, items)
    if head and isinstance(head[0], str | Path if of_paths else Path):
        names = [*items]
        if all(isinstance(name, str | Path) for name in names):
            return _files(names, column, ends)
        items = iter(names)
    elif head and isinstance(head[0], str):
        require_text(head[0])
    if boundary != "auto":
        message, fix = "does nothing with texts that are documents already", "Leave it out."
        raise ConfigError(message, where="boundary", fix=fix)

    def document(number: int, item: Any) -> Document:
        location = f"text {number}"
        if isinstance(item, Mapping):
            return row_document(TableRow(item, location), column)
        if not isinstance(item, str | Document):
            message = f"is of type {type(item).__name__}: give paths, rows or documents"
            raise DataError(message, where=location)
        if column != "text":
            message, fix = "does nothing with texts, which have no columns", "Leave it out."
            raise ConfigError(message, where="column", fix=fix)
        return Document(item, location) if isinstance(item, str) else item

    return DocumentReader(itertools.starmap(document, enumerate(items, 1)))


def _files(names: Iterable[str | Path], column: str, boundary: Boundary) -> DocumentReader:
    """Return the documents of files; the error for a name with blanks, a text, says where texts go.

    Raises:
        DataError, ConfigError, ResourceError: as `read_documents`.
    """
    from bothways.data.documents import read_documents

    try:
        return read_documents([*map(str, names)], column=column, boundary=boundary)
    except (DataError, ResourceError) as error:
        name = str(error.where)
        if len(name.split()) < 2:
            raise
        row = f'[{{"{column}": "…"}}]'
        fix = f"Check the name; texts that are in no file are given in Python as rows: {row}."
        raise DataError(error.what, where=shorten(name, 80, placeholder=" …"), fix=fix) from None
