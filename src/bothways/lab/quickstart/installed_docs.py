"""The documentation inside a Python installation, as a corpus that every machine has.

It consists of the topics of the language reference, the docstrings of built-in types and functions,
and the docstrings of the standard library and every installed package. Source files are parsed,
never imported: no third-party code is executed.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import sys
import sysconfig
import types
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bothways.core.jobs.process_pool import map_in_order
from bothways.core.runtime.limits import usable_cores
from bothways.data.documents import Document
from bothways.lab.quickstart.prose import prose

MAX_WORDS = 4_000_000

_SKIPPED = {
    "tests", "test", "testing", "_testing", "conftest", "idle_test", "site-packages",
    "dist-packages", "__pycache__",
}  # fmt: skip
_VENDORED = {
    "_vendor", "vendor", "vendored", "_vendored", "_distutils", "lib2to3", "pydoc_data",
    "externals", "extern",
}  # fmt: skip
_BATCH_BYTES = 2_000_000
# Measured over 107 packages: 237 MB of source contain 4.8 million words of unique prose.
_SOURCE_BYTES_PER_WORD = 49

Entry = tuple[str, str]
"""Where a docstring or a topic is, by the name of its module or topic, and the text itself."""


@dataclass(frozen=True)
class _Module:
    name: str
    path: str
    size: int


def installed_documentation(
    *, max_words: int = MAX_WORDS, workers: int | None = None
) -> Iterator[Document]:
    """Iterate over one document of prose (see `prose`) per module or topic; `where` is its name.

    Repeated paragraphs are kept once.

    Args:
        max_words: number of words after which to stop.
        workers: parsing processes, by default one per core. The documents do not depend on it.
    """
    batches = _batches(installed_modules(max_words * _SOURCE_BYTES_PER_WORD))
    own = _prose_by_module(itertools.chain(_topics(), built_in_docstrings()))
    parsed = map_in_order(_read_prose, batches, workers or usable_cores())
    seen: set[str] = set()
    words = 0
    for where, paragraphs in itertools.chain(own, itertools.chain.from_iterable(parsed)):
        new = [text for text in dict.fromkeys(paragraphs) if text not in seen]
        seen.update(new)
        if new:
            yield Document("\n".join(new), where)
        words += sum(len(text.split()) for text in new)
        if words >= max_words:
            return


def _read_prose(modules: list[_Module]) -> list[tuple[str, list[str]]]:
    return list(_prose_by_module(entry for module in modules for entry in docstrings_in(module)))


def _prose_by_module(entries: Iterable[Entry]) -> Iterator[tuple[str, list[str]]]:
    for where, group in itertools.groupby(entries, key=lambda entry: entry[0]):
        yield where, [text for _, docstring in group for text in prose(docstring)]


def _topics() -> Iterator[Entry]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # not in every distribution
        return
    for name in sorted(topics):
        yield f"topics {name}", topics[name]


def built_in_docstrings() -> Iterator[Entry]:
    """Iterate over the docstrings of modules that are compiled into the interpreter."""
    for name in ("builtins", *sorted(set(sys.builtin_module_names) - {"builtins"})):
        with warnings.catch_warnings():  # some are deprecated, such as Debian's spwd
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(name)
        for thing in _documented(name, module):
            if isinstance(thing.__doc__, str):
                yield name, thing.__doc__


def _documented(name: str, module: types.ModuleType) -> Iterator[object]:
    """Iterate over a module and its own types, methods and functions, those of C alone."""
    yield module
    for _, value in sorted(vars(module).items()):
        if getattr(value, "__module__", name) not in (name, None):
            continue
        if isinstance(value, type):
            yield value
            for _, member in sorted(vars(value).items()):
                if isinstance(member, types.MethodDescriptorType | types.ClassMethodDescriptorType):
                    yield member
        elif isinstance(value, types.BuiltinFunctionType):
            yield value


def installed_modules(budget: int) -> Iterator[_Module]:
    """Iterate over modules with source, the standard library first, then package by package.

    The standard library is complete. The rest of the budget, in bytes of source, is divided evenly
    among the packages.
    """
    standard, roots = _roots()
    yield from (library := list(_modules_below(standard)))
    packages: defaultdict[str, list[_Module]] = defaultdict(list)
    for root in roots:
        for module in _modules_below(root):
            packages[module.name.partition(".")[0]].append(module)
    sizes = {name: sum(module.size for module in modules) for name, modules in packages.items()}
    share = _fair_share(list(sizes.values()), budget - sum(module.size for module in library))
    for name in sorted(packages, key=lambda name: (name.lower(), name)):
        taken = itertools.accumulate(module.size for module in packages[name])
        yield from (
            module for module, size in zip(packages[name], taken, strict=True) if size <= share
        )


def _roots() -> tuple[Path, list[Path]]:
    """Return the folder of the standard library and those of installed packages."""
    places = {
        os.path.realpath(entry)
        for entry in sys.path
        if entry.endswith(("site-packages", "dist-packages"))
    }
    return Path(sysconfig.get_paths()["stdlib"]), sorted(map(Path, places))


def _fair_share(sizes: list[int], budget: int) -> int:
    """Return the largest share with Σ min(size, share) ≤ budget."""
    rest = max(budget, 0)
    for position, size in enumerate(sorted(sizes)):
        if size * (len(sizes) - position) > rest:
            return rest // (len(sizes) - position)
        rest -= size
    return max(sizes, default=0)


def _modules_below(root: Path) -> Iterator[_Module]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name.isidentifier() and name not in _SKIPPED | _VENDORED
        )
        for file in sorted(files):
            stem, suffix = os.path.splitext(file)
            if (
                suffix == ".py"
                and stem not in _SKIPPED
                and not stem.startswith("test_")
                and stem.isidentifier()
            ):
                parts = [
                    *Path(folder).relative_to(root).parts,
                    *([] if stem == "__init__" else [stem]),
                ]
                path = os.path.join(folder, file)
                try:
                    size = os.path.getsize(path)
                except OSError:  # a broken link
                    continue
                yield _Module(".".join(parts), path, size)


def _batches(modules: Iterable[_Module]) -> Iterator[list[_Module]]:
    batch: list[_Module] = []
    for module in modules:
        batch.append(module)
        if sum(member.size for member in batch) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def docstrings_in(module: _Module) -> Iterator[Entry]:
    """Iterate over the docstrings of a module, without importing it; none if it cannot be read."""
    try:
        source = Path(module.path).read_bytes()
    except OSError:  # no permission
        return
    if b'"""' not in source and b"'''" not in source:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as invalid escapes in third-party source
        try:
            tree = ast.parse(source)
        # Templates, and files for other versions of Python.
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
    yield from ((module.name, docstring) for docstring in _docstrings(tree))


def _docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[str]:
    """Iterate over the docstring of a node, and those of the classes and functions at its top."""
    if docstring := ast.get_docstring(node):
        yield docstring
    for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child)
