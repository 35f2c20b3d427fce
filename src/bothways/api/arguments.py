"""What users give, as the packages that do the work take it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bothways.core.errors import ConfigError, DataError
from bothways.data.given_rows import FORMS

if TYPE_CHECKING:
    from typing import TypeAlias

    from bothways.data.corpus import Corpus
    from bothways.data.documents import Document
    from bothways.finetuning.data import Rows

    Corpora: TypeAlias = (
        str | Path | Corpus | Mapping[str, str | Path | Corpus] | Iterable[str | Path | Corpus]
    )


def dev_source(dev: Rows | float | None) -> tuple[str | None, Rows | None]:
    """Return the name of dev data, or its share of the training data, and its rows, if any."""
    if dev is None:
        return None, None
    if isinstance(dev, int | float):
        from bothways.finetuning.splits import parse_part

        return str(parse_part(dev)), None
    return source_name(dev, "dev"), dev


def source_name(rows: Rows, name: str) -> str:
    """Return the path of a source, or a name for rows.

    Raises:
        DataError: there are no rows.
    """
    if rows is None:
        raise DataError("is None", where=name, fix=f"Give a file, a Hub data set, {FORMS}.")
    return str(rows) if isinstance(rows, str | Path) else f"{name} rows"


def given_corpora(given: Corpora) -> Corpus | dict[str, Corpus]:
    """Open what is not open yet; the names of folders in a list are their own."""
    from bothways.data.corpus import Corpus
    from bothways.data.mixture import corpus_names

    def opened(one: str | Path | Corpus) -> Corpus:
        """Return a corpus, given it or its folder."""
        return one if isinstance(one, Corpus) else Corpus.open(one)

    if isinstance(given, str | Path | Corpus):
        return opened(given)
    if isinstance(given, Mapping):
        return {name: opened(one) for name, one in given.items()}
    items = [opened(one) for one in given]
    if not items:
        raise DataError("there is no corpus", where="corpus", fix="Give one or more.")
    return dict(zip(corpus_names([item.folder for item in items]), items, strict=True))


def choice(name: str, known: Mapping[str, Any], where: str) -> Any:
    """Return what has this name; another name is a ConfigError at `where`."""
    if name not in known:
        what = f"unknown {where} {name!r}"
        raise ConfigError(what, where=where, fix=f"Choose one of {', '.join(known)}.")
    return known[name]


def build_settings(cls: type[Any], where: str, **values: Any) -> Any:
    """Build a dataclass; unknown fields are a ConfigError."""
    known = {field.name for field in dataclasses.fields(cls)}
    for name in values.keys() - known:
        fix = f"Known here: {', '.join(sorted(known))}."
        raise ConfigError(f"unknown setting {name!r}", where=f"{where}.{name}", fix=fix)
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
        what = f"is of type {type(texts).__name__}: give a path, texts or documents"
        raise DataError(what, where="texts")
    items = list(texts) if of_paths else texts
    if of_paths and all(isinstance(item, str | Path) for item in items):
        names = [str(item) for item in items]
        return read_documents(names, column=column, boundary=ends)
    return (
        item if isinstance(item, Document) else Document(str(item), f"text {number}")
        for number, item in enumerate(items, 1)
    )
