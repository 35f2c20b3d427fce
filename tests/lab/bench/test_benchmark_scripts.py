"""Every name of this library that the scripts in benchmarks/ import exists, also in code they run as text."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
SCRIPTS = sorted(FOLDER.rglob("*.py"))


def programs(file: Path) -> Iterator[ast.Module]:
    """Yield the syntax tree of a script, and those of the programs it holds as strings."""
    tree = ast.parse(file.read_text(encoding="utf8"), str(file))
    yield tree
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    for text in strings:
        if isinstance(text, str) and text.startswith("\n") and "import " in text:
            yield ast.parse(text)


def imported(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yield each module of this library that a program imports, with each name imported from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bothways"):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from ((name, None) for name in names if name.startswith("bothways"))


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(FOLDER)))
def test_benchmark_imports_exist(file):
    for tree in programs(file):
        for module, name in imported(tree):
            try:
                home = importlib.import_module(module)
                if name is not None and not hasattr(home, name):
                    importlib.import_module(f"{module}.{name}")
            except ImportError as error:
                pytest.fail(f"{file.name}: {error}")


def test_programs_in_strings_are_parsed():
    held = {file.name: len(list(programs(file))) - 1 for file in SCRIPTS}
    assert held["embedding.py"] == 2
