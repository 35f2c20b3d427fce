"""The names of the code base: class names are unique, and references in docstrings exist."""

import ast
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

import bothways

SOURCE = Path(bothways.__file__).parent
DOTTED = re.compile(r"`(?:bothways\.)?([A-Za-z]\w*(?:\.\w+)+)`")
FILES = re.compile(r".*\.(bin|html|json|jsonl|md|npy|onnx|onnx_data|pt|safetensors|toml|tsv|txt)")


@dataclass(frozen=True)
class Module:
    """What the rules read of a module; the syntax trees of all would stay in memory.

    Attributes:
        path: its file, from the folder of the package.
        classes: names of the classes at its top level.
        names: what it defines or imports, at any depth.
        references: dotted names in docstrings, each with its file and line.
    """

    path: Path
    classes: list[str]
    names: set[str]
    references: list[tuple[str, str]]


def read_module(path: Path) -> Module:
    tree = ast.parse(path.read_text("utf8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    module = Module(path.relative_to(SOURCE), classes, set(), [])
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                place = f"{module.path}:{node.lineno}"
                module.references.extend((place, name) for name in DOTTED.findall(text))
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
                module.names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.AsyncFunctionDef(name=name):
                module.names.add(name)
    return module


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """Every module of the package, parsed once for all rules."""
    return [read_module(path) for path in sorted(SOURCE.rglob("*.py"))]


def test_a_public_class_name_has_one_meaning(modules):
    places = defaultdict(list)
    for module in modules:
        for name in module.classes:
            if not name.startswith("_"):
                places[name].append(str(module.path))
    double = {name: where for name, where in places.items() if len(where) > 1}
    assert double == {}


def test_a_package_has_at_most_25_files():
    files = Counter(path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    assert {folder: count for folder, count in files.items() if count > 25} == {}


def test_references_in_docstrings_exist(modules):
    names = {
        ".".join(module.path.with_suffix("").parts).removesuffix(".__init__"): module.names
        for module in modules
    }
    every = set().union(*names.values())
    packages = {module.split(".")[0] for module in names}
    found = []
    for place, reference in (pair for module in modules for pair in module.references):
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
