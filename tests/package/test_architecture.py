"""The names in the description of the architecture exist."""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import bothways
from documents import ROOT
from toy_bulk import make_classifier

SOURCE = Path(bothways.__file__).parent
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
def test_a_hop_is_defined_in_its_file(file, name):
    body = ast.parse((SOURCE / file).read_text("utf8")).body
    for part in name.split("."):
        node = names_in(body).get(part)
        assert node is not None, f"{file} has no {name}"
        body = getattr(node, "body", [])


def test_the_picture_names_every_package():
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    picture = PAGE.split("```")[1]
    rows = re.findall(r"^ ((?:\w+/ +)+)", picture, re.MULTILINE)
    assert packages == set(re.findall(r"(\w+)/", " ".join(rows)))
    assert f"{len(packages)} sub-packages" in PAGE


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text("utf8")
    for name in set(re.findall(r"`([\w/]+/[\w./]*\w+\.py)", text.replace("NAME/", ""))):
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name


def entered_files(work: Callable[[], object], end: tuple[str, str]) -> set[str]:
    """The files of which a function runs until one of this file and name returns; no imports."""
    entered, root, importing = set[str](), f"{SOURCE}/", 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal importing
        code = frame.f_code
        file = code.co_filename.removeprefix(root)
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or a class
            importing += (event == "call") - (event == "return")
        elif event == "call" and not importing and file != code.co_filename:
            entered.add(file)
        elif event == "return" and (file, code.co_name) == end:
            sys.setprofile(None)

    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.setprofile(None)
    return entered


def test_pretraining_enters_as_many_files_as_the_page_says(corpus):
    path = PAGE.split("## From a line of text to a loss")[1].split("Next to this path")[0]
    walk = set(re.findall(r"`([\w/]+\.py):", path))
    assert f"by the {len(walk)} files" in path

    def train() -> None:
        bothways.pretrain(
            str(corpus.folder), "bert-tiny", until="1 steps", device="cpu", progress=False,
            evaluation_tokens=400,
        )  # fmt: skip

    train()  # so that nothing is imported below
    entered = entered_files(train, ("objectives/masked_lm.py", "forward"))
    stated = re.search(r"enters up\s+to (\d+) files", path)
    # Not the number itself: processors differ in their kernels.
    assert int(stated[1]) - 10 <= len(entered) <= int(stated[1]), sorted(entered)
    training = set(re.findall(r"`([\w/]+\.py):", path[path.index("\n4. ") :]))
    assert training <= entered


def test_a_prediction_enters_as_many_files_as_the_page_says(tmp_path):
    predictor = bothways.load(make_classifier(tmp_path))
    predictor("a good film")  # so that nothing is imported below
    entered = entered_files(lambda: predictor("a good film"), ("", ""))
    stated = re.search(r"prediction of a text\s+enters up to (\d+) files", PAGE)
    assert int(stated[1]) - 10 <= len(entered) <= int(stated[1]), sorted(entered)
