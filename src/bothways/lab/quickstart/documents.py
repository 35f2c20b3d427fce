"""Text of this machine and labelled examples of it, for the quickstart.

The text is the documentation inside a Python installation: the docstrings of the standard library
and of every installed package, without code, tables and markup. Source files are parsed, never
imported: no third-party code is executed.

Labels come from documents that pre-training does not see, by a task that any text with spaces
gives: detect whether two neighbouring words of a sentence are swapped. Half of the sentences are
unchanged; in the other half two neighbouring words are exchanged. Both classes contain the same
words, so counting words does not help: the task needs word order, which a masked language model
learns. Each sentence is used once. Words at either end, words with capitals, digits or punctuation,
and equal words are never moved, so that only the order reveals the label.

Source: the bigram-shift probe of Conneau et al. 2018 (What you can cram into a single vector).
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bothways.core.errors import DataError
from bothways.core.jobs.process_pool import map_in_order
from bothways.core.runtime.process import usable_cores
from bothways.core.source import rng
from bothways.core.terminal import quantity
from bothways.data.documents import Document, read_documents
from bothways.data.sentences import detect_language, split_sentences
from bothways.tasks.text_task import TextExample

_SKIPPED = re.compile(
    r"_*(test(s|ing|_.*)?|conftest|idle_test|pycache|vendor(ed)?|extern(als)?)_*$"
)
_SKIPPED_ROOTS = {"site-packages", "dist-packages", "lib2to3", "pydoc_data"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_PACKAGE_WORDS = 60_000
"""Words of one package at most, so that no large package is most of the corpus."""
_BLANK = re.compile(r"\n\s*\n")
_NOT_PROSE = re.compile(
    r"[=\-~^\"'#*+_.`:|]{3,}|\||\.\.( |$)|:(type|rtype|meta)\b|[\w*, .]+ : |[A-Z]\w*( \w+)?:{1,2}$"
    r"|(Parameters|Returns|Yields|Raises|Notes|Examples|Attributes|References)$"
)
_CODE = re.compile(r"^\s*(>>>|In \[|```|~~~)", re.MULTILINE)
_MARKUP = re.compile(r":[\w:+-]+:(?=`)|[`*\\]+|_{1,2}(?=\s|$)|<?https?://\S+")

TRAINED, TESTED = 1200, 1500
"""Maximum number of examples to fine-tune on, and to test on."""
AS_WRITTEN, SWAPPED = "as written", "swapped"
WORDS = (6, 25)
"""Minimum and maximum length of a sentence in words."""
_MOVABLE = re.compile(r"[a-z]+")


def installed_documentation(
    *, max_words: int = 1_500_000, workers: int | None = None
) -> Iterator[Document]:
    """Iterate over one document of prose per module; `where` is its name.

    The standard library comes first, then packages by name. Repeated paragraphs are kept once.

    Args:
        max_words: number of words after which to stop.
        workers: parsing processes, by default one per core. The documents do not depend on it.
    """
    packages = [path for root in _roots() for path in sorted(root.iterdir())]
    paragraphs_read: set[str] = set()
    words = 0
    for documents in map_in_order(read_package, packages, workers or usable_cores()):
        for name, paragraphs in documents:
            new = [text for text in dict.fromkeys(paragraphs) if text not in paragraphs_read]
            paragraphs_read.update(new)
            words += sum(len(text.split()) for text in new)
            if new:
                yield Document("\n".join(new), name)
            if words >= max_words:
                return


def _roots() -> list[Path]:
    """Return the folder of the standard library and those of installed packages."""
    paths = {os.path.realpath(entry) for entry in sys.path if entry.endswith("-packages")}
    return [Path(sysconfig.get_paths()["stdlib"]), *sorted(map(Path, paths))]


def read_package(path: Path) -> list[tuple[str, list[str]]]:
    """Return the prose of each module of a package, or of a single module, by its name.

    Tests, vendored code, and files that cannot be imported by their name are skipped.
    """
    documents, words = [], 0
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []
    for file in files:
        *parents, name = file.relative_to(path.parent).with_suffix("").parts
        names = (*parents, name)
        if any(not n.isidentifier() or _SKIPPED.match(n) or n in _SKIPPED_ROOTS for n in names):
            continue
        paragraphs = [text for docstring in docstrings(file) for text in prose(docstring)]
        documents.append((".".join((*parents, name)).removesuffix(".__init__"), paragraphs))
        words += sum(len(text.split()) for text in paragraphs)
        if words >= _PACKAGE_WORDS:
            break
    return documents


def docstrings(file: Path) -> Iterator[str]:
    """Iterate over the docstrings of a module, without importing it; none if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in third-party source
            tree = ast.parse(file.read_bytes())
    # No permission, a broken link, templates, and files for other versions of Python.
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def prose(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring that are prose, one line each, in order.

    A paragraph is prose if it has no code prompt, at least three words, and at least 80 % letters
    and spaces. Headings, rules, directives, table rows and types of parameters are dropped.
    """
    paragraphs = []
    for block in _BLANK.split(inspect.cleandoc(docstring)):
        if _CODE.search(block):
            continue
        lines = [line.strip() for line in block.split("\n")]
        text = " ".join(line for line in lines if not _NOT_PROSE.match(line))
        text = " ".join(_MARKUP.sub("", text).replace("::", ":").split())
        words = text.split(" ")
        letters = sum(map(str.isalpha, text)) + len(words) - 1
        plain = sum(word.strip("\"'(),.:;").isalpha() for word in words)
        if plain >= 3 and 5 * letters >= 4 * len(text):
            paragraphs.append(text)
    return paragraphs


def gather_documents(files: Sequence[str] | None) -> list[Document]:
    """Read the documents of files, or of the installed documentation.

    Raises:
        DataError: a file cannot be read, or there are fewer than ten documents.
    """
    documents = list(read_documents(files) if files else installed_documentation())
    if len(documents) < 10:
        count = quantity(len(documents), "document(s)")
        message = f"{count}: too few to train on and to hold some out"
        fix = "Give at least ten documents; in a .txt file, blank lines separate documents."
        raise DataError(message, where=", ".join(files or ["installed documentation"]), fix=fix)
    return documents


def labelled_examples(
    train_documents: list[Document], aside: list[Document]
) -> tuple[list[TextExample], list[TextExample]]:
    """Make examples to train and to test on, of the documents set aside.

    Raises:
        DataError: there are fewer than 20 examples, or the text is Chinese.
    """
    where, language = "the documents set aside", detect_language(aside[0].text) if aside else "en"
    if language == "zh":
        message = "the task swaps words between spaces, and Chinese has none"
        raise DataError(message, where=where, fix="Give text of another language.")
    examples = word_order(aside, train_documents, seed=0, language=language)
    if len(examples) < 20:
        message = f"{len(examples)} labelled examples are too few"
        raise DataError(message, where=where, fix="Give more text.")
    split = min(TRAINED, len(examples) // 2)
    return examples[:split], examples[split : split + TESTED]


def word_order(
    documents: Iterable[Document], excluded: Iterable[Document], seed: int, language: str = "en"
) -> list[TextExample]:
    """Make examples of the sentences of `documents` that are not in `excluded`, in a keyed order.

    Each label is drawn with probability 1/2.
    """

    def key(sentence: str) -> str:
        """Normalise a sentence, so that case and punctuation do not matter."""
        return re.sub(r"\W+", " ", sentence.lower()).strip()

    keys = {key(text) for item in excluded for text in split_sentences(item.text, language)}
    draws = rng(seed, "word order")
    examples = []
    for document in documents:
        for sentence in split_sentences(document.text, language):
            words = sentence.split()
            movable = [_MOVABLE.fullmatch(word) is not None for word in words]
            positions = [
                at
                for at in range(1, len(words) - 2)
                if movable[at] and movable[at + 1] and words[at] != words[at + 1]
            ]
            suits = WORDS[0] <= len(words) <= WORDS[1] and positions
            if not suits or key(sentence) in keys:
                continue
            keys.add(key(sentence))
            at, swap = positions[draws.integers(len(positions))], draws.random() < 0.5
            if swap:
                words[at : at + 2] = words[at + 1], words[at]
            label = SWAPPED if swap else AS_WRITTEN
            examples.append(TextExample(" ".join(words), label=label, where=document.where))
    return [examples[index] for index in draws.permutation(len(examples))]
