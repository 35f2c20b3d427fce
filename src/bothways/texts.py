"""From text to a vocabulary and a corpus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bothways.core.bar import shown_progress
from bothways.core.errors import ConfigError, DataError
from bothways.core.progress import Progress

if TYPE_CHECKING:
    from bothways.core.jobs.workers import Workers
    from bothways.data.cleaning.config import Cleaning
    from bothways.data.corpus import Corpus
    from bothways.data.documents import Document
    from bothways.data.words import Words
    from bothways.text.tokenizer import Tokenizer


def train_tokenizer(
    texts: str | Path | Iterable[str] | Mapping[str, str | Path | Iterable[str]],
    size: int = 30_000,
    *,
    kind: str = "wordpiece",
    alpha: float = 0.7,
    column: str = "text",
    out: str | Path | None = None,
    **settings: Any,
) -> Tokenizer:
    """Train a vocabulary.

    Args:
        texts: a file, folder or pattern with text, a URL of these such as "s3://bucket/wiki/", or
            an iterable of texts; several languages as a mapping from names to these.
        size: number of tokens, special tokens included.
        kind: "wordpiece" (BERT), "bpe" (RoBERTa) or "unigram" (ALBERT).
        alpha: of several languages: shares of the training text are proportional to size^alpha.
        column: column of the text in .jsonl, .parquet and Hub rows.
        out: folder to save the tokenizer in.
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
    from bothways.text.sampling import sample_languages

    trainer = build_settings(
        choice(kind, trainers.KINDS, "kind"), "tokenizer", size=size, **settings
    )
    if isinstance(texts, Mapping):
        languages = {
            name: (document.text for document in documents_of(source, column=column))
            for name, source in texts.items()
        }
        mixed = sample_languages(languages, alpha, trainers.CEILING)
        tokenizer = trainers.learn(mixed, trainer)
    else:
        lines = (document.text for document in documents_of(texts, column=column))
        tokenizer = trainers.train_tokenizer(lines, trainer)
    if out is not None:
        tokenizer.save(Path(out))
    return tokenizer


def build_corpus(  # noqa: PLR0913 – one option per question
    texts: str | Path | Iterable[str | Path | Document],
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    column: str = "text",
    boundary: Literal["auto", "blank", "line", "file"] = "auto",
    language: str = "auto",
    words: Words | None = None,
    cleaning: Cleaning | None = None,
    workers: Workers | int | None = None,
    progress: Progress | bool = True,
) -> Corpus:
    """Build a corpus for pre-training, continue an interrupted build, or open the existing corpus.

    Args:
        texts: a file, folder or pattern, a URL of these, several of them, or documents.
        tokenizer: a tokenizer, or its folder.
        out: folder of the corpus.
        column: column of the text in .jsonl, .parquet and Hub rows.
        boundary: end of a document in a .txt file: "blank" line, "line" or "file"; "auto": blank
            lines if there are any, else each line is a document.
        language: language for splitting sentences; "auto" detects it per document.
        words: for the masking of whole words in Chinese, how a sentence is divided into words:
            "jieba", "spaces", or a function that returns its words.
        cleaning: which documents are dropped besides duplicates, such as
            `bothways.data.cleaning.config.make_cleaning("gopher", 0.8)`: those that the filters of
            Gopher refuse, and near-duplicates.
        workers: number of processes, `None` for one per core; or, for a Ray cluster,
            `bothways.core.jobs.workers.RayWorkers(address)`.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.

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
        return corpus.build_corpus(
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


def build_settings(cls: type[Any], location: str, **values: Any) -> Any:
    """Build a dataclass; unknown fields are a ConfigError."""
    fields = {field.name for field in dataclasses.fields(cls)}
    for name in values.keys() - fields:
        fix = f"Known here: {', '.join(sorted(fields))}."
        raise ConfigError(f"unknown setting {name!r}", where=f"{location}.{name}", fix=fix)
    return cls(**values)


def documents_of(
    texts: Any, *, of_paths: bool = False, column: str = "text", boundary: str = "auto"
) -> Iterable[Document]:
    """Return the documents of files, or of texts; strings in a list are paths if `of_paths`."""
    from bothways.data.documents import Boundary, Document, read_documents

    ends = choice(boundary, {end.value: end for end in Boundary}, "boundary")
    if isinstance(texts, str | Path):
        return read_documents([str(texts)], column=column, boundary=ends)
    if not isinstance(texts, Iterable):
        message = f"is of type {type(texts).__name__}: give a path, texts or documents"
        raise DataError(message, where="texts")
    items = list(texts) if of_paths else texts
    if of_paths and all(isinstance(item, str | Path) for item in items):
        names = [str(item) for item in items]
        return read_documents(names, column=column, boundary=ends)
    return (
        item if isinstance(item, Document) else Document(str(item), f"text {number}")
        for number, item in enumerate(items, 1)
    )
