"""The language of the code base: words that are not used, openings of docstrings, unique names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import bothways

SOURCE = Path(bothways.__file__).parent
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

REPLACED = {
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
"""Words that readers stumble over, and the plain alternative."""

OPENINGS = re.compile(r"(What|Whether|How|Of|Those|So|That|Where|Which|As|Such)\b")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Every module of the package with its syntax tree."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, ast.parse(path.read_text("utf8"))


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Every docstring of the package with its place and its owner."""
    for path, tree in modules():
        for node in ast.walk(tree):
            owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, owners) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}", node, text


def test_docstrings_and_pages_use_plain_words() -> None:
    texts = [(place, text) for place, _, text in docstrings()]
    texts += [(page.name, page.read_text("utf8")) for page in PAGES]
    found = [
        f"{place}: {match[0]!r}, better: {plain}"
        for place, text in texts
        for pattern, plain in REPLACED.items()
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


def test_a_public_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("limit", [25])
def test_no_package_is_a_heap_of_files(limit: int) -> None:
    folders = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        folders[path.parent].append(path.name)
    assert all(len(set(files) - {"__init__.py"}) <= limit for files in folders.values())
