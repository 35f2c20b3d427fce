"""The language of the code base: terms of the field, references, unique class names."""

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

GLOSSARY = {
    r"what this processor has": "supported CPU features",
    r"in any company": "batch-invariant",
    r"(what )?is to be known of": "the noun",
    r"the process above": "supervisor",
    r"nobody has read for the longest time|make way": "least recently used, evicted",
    r"what waits of": "pending work",
    r"one answer for all\b|best constant answer": "majority baseline",
    r"in the shapes of": "compatible with",
    r"well and badly": "error analysis",
    r"usual names?\b": "common alias",
    r"for no known task": "is not fine-tuned for a task",
}
"""Descriptions by clauses, as patterns, with the term of the field."""


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Yield every module of the package with its syntax tree."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text("utf8"))


def test_docstrings_messages_and_guide_use_the_terms_of_the_field() -> None:
    texts = [
        (f"{path}:{node.lineno}", node.value)
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    texts += [(page.name, page.read_text("utf8")) for page in PAGES]
    wrong = [
        f"{location}: {match[0]!r}, write: {term}"
        for location, text in texts
        for pattern, term in GLOSSARY.items()
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_public_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    double = {name: where for name, where in places.items() if len(where) > 1}
    assert double == {}


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
