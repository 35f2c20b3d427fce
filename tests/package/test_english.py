"""The language of the code base: words to avoid, openings of docstrings, unique class names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import bothways

SOURCE = Path(bothways.__file__).parent
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

ALTERNATIVES = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\banew\b": "again",
    r"\bbeside\b": "next to, in addition to",
    r"\bstands? (for|in|at|on|beside|there)\b": "is, represents",
    r"\blies?\b": "is",
    r"\bcame to\b": "resulted in",
    r"\bneeds but\b|\bis but\b": "only",
    r"\bwhoever\b": "the caller, the user",
    r"\bin the place of\b": "instead of",
    r"\b(is|are) told\b|\btells\b": "reports",
    r"\bas it comes\b": "by default",
    r"\bdear(er|est)?\b": "expensive",
    r"\bweighed\b": "weighted",
    r"\bso (many|much|often)\b": "a number",
}
"""Patterns of words that slow a reader down, with the plain alternative."""

OPENINGS = re.compile(r"(What|Whether|How|Of|Those|So|That|Where|Which|As|Such)\b")

PENDING: set[str] = set()
"""Packages and pages whose language is still to be revised."""

PENDING_NAMES: set[str] = set()
"""Class names that still have two meanings."""


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Yield every module of the package with its syntax tree."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text("utf8"))


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Yield every docstring of revised packages with its place and its owner."""
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    revised = (item for item in modules() if item[0].parts[0] not in PENDING)
    for path, tree in revised:
        for node in ast.walk(tree):
            if isinstance(node, owners) and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", node, text


def test_docstrings_and_pages_use_plain_words() -> None:
    texts = [(place, text) for place, _, text in docstrings()]
    texts += [(page.name, page.read_text("utf8")) for page in PAGES if page.name not in PENDING]
    found = [
        f"{place}: {match[0]!r}, better: {plain}"
        for place, text in texts
        for pattern, plain in ALTERNATIVES.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_functions_are_described_by_a_verb() -> None:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{place} {text.splitlines()[0]}"
        for place, node, text in docstrings()
        if isinstance(node, functions) and OPENINGS.match(text)
    ]
    assert not found, "\n".join(found)


def test_examples_have_the_heading_that_the_reference_reads() -> None:
    found = [place for place, _, text in docstrings() if re.search(r"^Example:$", text, re.M)]
    assert not found, "write 'Examples:'"


def test_a_public_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    double = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in double.items() if name not in PENDING_NAMES} == {}


def test_a_package_has_at_most_25_files() -> None:
    folders = defaultdict(set)
    for path, _ in modules():
        folders[path.parent].add(path.name)
    counts = {folder: len(names - {"__init__.py"}) for folder, names in folders.items()}
    assert {folder: count for folder, count in counts.items() if count > 25} == {}
