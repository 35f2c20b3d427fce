"""The language of the code base: words to avoid, openings of docstrings, unique class names."""

from __future__ import annotations

import ast
import itertools
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


DOTTED = re.compile(r"`(?:bothways\.)?([A-Za-z]\w*(?:\.\w+)+)`")
FILES = re.compile(r".*\.(bin|html|json|jsonl|md|npy|onnx|onnx_data|pt|safetensors|toml|tsv|txt)")


def names_by_module() -> dict[str, set[str]]:
    """Return what each module defines or imports, at any depth, by its dotted path."""
    found: dict[str, set[str]] = {}
    for path, tree in modules():
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        found[module] = set()
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
                    found[module].add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.AsyncFunctionDef(name=name):
                    found[module].add(name)
    return found


def test_references_in_docstrings_exist() -> None:
    names = names_by_module()
    every = set().union(*names.values())
    packages = {module.split(".")[0] for module in names}
    found = []
    for path, tree in modules():
        texts = [
            (node.lineno, node.value.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]
        for line, reference in (
            (line, reference) for line, text in texts for reference in DOTTED.findall(text)
        ):
            first, *rest = reference.split(".")
            owner, last = ".".join([first, *rest[:-1]]), rest[-1]
            owners = [module for module in names if f".{module}".endswith(f".{owner}")]
            known = (
                reference in names
                or any(f".{module}".endswith(f".{reference}") for module in names)
                or any(last in names[module] for module in owners)
                or {first, *rest} <= every  # `Task.encode`, `keep.best`
                or (set(rest) <= every and reference.islower())  # a setting: `training.ema`
            )
            ours = first in packages or owners or first[0].isupper()
            if ours and not known and not FILES.fullmatch(reference):
                found.append(f"{path}:{line} {reference}")
    assert not found, "\n".join(found)


def test_docstrings_begin_with_a_summary_and_are_indented_evenly() -> None:
    lists = re.compile(r"(Attributes|Args|Returns|Raises|Parameters):$")
    found = []
    for place, _, text in docstrings():
        lines = text.splitlines()
        if lists.match(lines[0]):
            found.append(f"{place} begins with a list")
        for before, line in itertools.pairwise(lines):
            prose = " " in before.strip() and before[0] not in " ·" and before[-1] not in ":.,"
            if prose and re.match(r"    \S", line) and not re.match(r"[A-Z]+: ", before):
                found.append(f"{place} {line.strip()}")
    assert not found, "\n".join(found)
