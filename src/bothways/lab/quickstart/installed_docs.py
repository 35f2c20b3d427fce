"""The documentation inside a Python installation, as a corpus that every machine has.

It consists of the docstrings of the standard library and of every installed package, without code,
tables and markup. Source files are parsed, never imported: no third-party code is executed.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from bothways.core.jobs.process_pool import map_in_order
from bothways.core.runtime.limits import usable_cores
from bothways.data.documents import Document

_SKIPPED = re.compile(
    r"_*(test(s|ing|_.*)?|conftest|idle_test|pycache|vendor(ed)?|extern(als)?)_*$"
)
_SKIPPED_ROOTS = {"site-packages", "dist-packages", "lib2to3", "pydoc_data"}
_PACKAGE_WORDS = 60_000
"""Words of one package at most, so that no large package is most of the corpus."""
_BLANK = re.compile(r"\n\s*\n")
_NOT_PROSE = re.compile(
    r"[=\-~^\"'#*+_.`:|]{3,}|\||\.\.( |$)|:(type|rtype|meta)\b|[\w*, .]+ : |[A-Z]\w*( \w+)?:{1,2}$"
    r"|(Parameters|Returns|Yields|Raises|Notes|Examples|Attributes|References)$"
)
_CODE = re.compile(r"^\s*(>>>|In \[|```|~~~)", re.MULTILINE)
_MARKUP = re.compile(r":[\w:+-]+:(?=`)|[`*\\]+|_{1,2}(?=\s|$)|<?https?://\S+")


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
        if not all(map(_is_documented, (*parents, name))):
            continue
        paragraphs = [text for docstring in docstrings(file) for text in prose(docstring)]
        documents.append((".".join((*parents, name)).removesuffix(".__init__"), paragraphs))
        words += sum(len(text.split()) for text in paragraphs)
        if words >= _PACKAGE_WORDS:
            break
    return documents


def _is_documented(name: str) -> bool:
    return name.isidentifier() and not _SKIPPED.match(name) and name not in _SKIPPED_ROOTS


def docstrings(file: Path) -> Iterator[str]:
    """Iterate over the docstrings of a module, without importing it; none if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in third-party source
            nodes: list[ast.AST] = [ast.parse(file.read_bytes())]
    # No permission, a broken link, templates, and files for other versions of Python.
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                yield docstring
            # Functions inside functions are private.
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes += reversed(node.body)


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
