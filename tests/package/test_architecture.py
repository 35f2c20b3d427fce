"""The names in the description of the architecture exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import bothways

SOURCE = Path(bothways.__file__).parent
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf8")
STEPS = (ROOT / "CONTRIBUTING.md").read_text("utf8")
HOPS = sorted(set(re.findall(r"`([\w/]+\.py):(\w+(?:\.\w+)*)", PAGE + STEPS)))


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or a class defines."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[node.name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
    return found


@pytest.mark.parametrize(("file", "name"), HOPS)
def test_a_hop_is_defined_in_its_file(file: str, name: str) -> None:
    body = ast.parse((SOURCE / file).read_text("utf8")).body
    for part in name.split("."):
        node = names_in(body).get(part)
        assert node is not None, f"{file} has no {name}"
        body = getattr(node, "body", [])


def test_every_hop_is_used() -> None:
    """Each name is somewhere else, too: what nothing calls is no step of a walk."""
    hops = {(file, name.rpartition(".")[2]) for file, name in HOPS}
    word = re.compile(rf"\b(?:{'|'.join(sorted({name for _, name in hops}))})\b")
    counts = Counter[str]()
    for path in SOURCE.rglob("*.py"):
        counts.update(word.findall(path.read_text("utf8")))
    unused = {(file, name) for file, name in hops if counts[name] < 2}
    assert unused == set()


def test_the_picture_names_every_package() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(
        re.findall(r"^ .*$", PAGE, re.MULTILINE) and re.findall(r"(\w+)/ ", PAGE)
    )
    assert f"{len(packages)} sub-packages" in PAGE


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text("utf8")
    for name in set(re.findall(r"`([\w/]+/[\w./]*\w+\.py)", text.replace("NAME/", ""))):
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name


def test_the_path_from_text_to_a_loss_has_as_many_files_as_it_says() -> None:
    path = PAGE.split("## From a line of text to a loss")[1].split("Next to this path")[0]
    files = set(re.findall(r"`([\w/]+\.py):", path))
    assert f"{len(files)} files" in path
    assert len(files) <= 25
