"""The language of the code base: terms of the field, references, unique class names."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import bothways
from documents import GUIDE, ROOT

SOURCE = Path(bothways.__file__).parent
PAGES = [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]

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


@dataclass(frozen=True)
class Module:
    """What the rules read of a module; the syntax trees of all would stay in memory.

    Attributes:
        path: its file, from the folder of the package.
        classes: names of the classes at its top level.
        names: what it defines or imports, at any depth.
        texts: line and value of each string.
        docstrings: line and value of each string that is a statement.
    """

    path: Path
    classes: list[str]
    names: set[str]
    texts: list[tuple[int, str]]
    docstrings: list[tuple[int, str]]


def read_module(path: Path) -> Module:
    tree = ast.parse(path.read_text("utf8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    module = Module(path.relative_to(SOURCE), classes, set(), [], [])
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                module.texts.append((node.lineno, text))
            case ast.Expr(value=ast.Constant(value=str(text))):
                module.docstrings.append((node.lineno, text))
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
                module.names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.AsyncFunctionDef(name=name):
                module.names.add(name)
    return module


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """Every module of the package, parsed once for all rules."""
    return [read_module(path) for path in sorted(SOURCE.rglob("*.py"))]


def test_docstrings_messages_and_guide_use_the_terms_of_the_field(modules):
    texts = [(f"{module.path}:{line}", text) for module in modules for line, text in module.texts]
    texts += [(page.name, page.read_text("utf8")) for page in PAGES]
    wrong = [
        f"{location}: {match[0]!r}, write: {term}"
        for location, text in texts
        for pattern, term in GLOSSARY.items()
        for match in re.finditer(pattern, " ".join(text.lower().split()))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_public_class_name_has_one_meaning(modules):
    places = defaultdict(list)
    for module in modules:
        for name in module.classes:
            if not name.startswith("_"):
                places[name].append(str(module.path))
    double = {name: where for name, where in places.items() if len(where) > 1}
    assert double == {}


def test_a_package_has_at_most_25_files():
    folders = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        folders[path.parent].add(path.name)
    counts = {folder: len(names - {"__init__.py"}) for folder, names in folders.items()}
    assert {folder: count for folder, count in counts.items() if count > 25} == {}


DOTTED = re.compile(r"`(?:bothways\.)?([A-Za-z]\w*(?:\.\w+)+)`")
FILES = re.compile(r".*\.(bin|html|json|jsonl|md|npy|onnx|onnx_data|pt|safetensors|toml|tsv|txt)")


def references(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield the dotted names in docstrings, each with its file and line."""
    for module in modules:
        for line, text in module.docstrings:
            yield from ((f"{module.path}:{line}", name) for name in DOTTED.findall(text))


def test_references_in_docstrings_exist(modules):
    names = {
        ".".join(module.path.with_suffix("").parts).removesuffix(".__init__"): module.names
        for module in modules
    }
    every = set().union(*names.values())
    packages = {module.split(".")[0] for module in names}
    found = []
    for place, reference in references(modules):
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
            found.append(f"{place} {reference}")
    assert not found, "\n".join(found)
