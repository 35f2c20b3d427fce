"""Cells of a reproduction: which there are, which are found again, and what becomes of one that is lost."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from toy_folder import make_folder

from bothways.core.errors import ResourceError
from bothways.recipes.reproduce import glue, runner
from bothways.recipes.reproduce.benchmarks import reproduce
from bothways.recipes.reproduce.experiment import Experiment, Request
from bothways.recipes.reproduce.runner import Result

QUICK = ("length=16", "training.precision=fp32", "training.until=2 steps")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    make_folder(folder / "bert")
    files = {
        "train": "".join(f"x\t{i % 2}\t\t{('bad', 'good')[i % 2]} film\n" for i in range(12)),
        "dev": "x\t1\t\tgood\nx\t0\t*\tbad\n",
    }
    for split, text in files.items():
        (folder / "glue" / "CoLA").mkdir(parents=True, exist_ok=True)
        (folder / "glue" / "CoLA" / f"{split}.tsv").write_text(text)
    return folder


def request_of(place: Path, out: Path, **changes: Any) -> Request:
    base = Request(str(place / "bert"), str(place / "glue"), out, ("CoLA",), overrides=QUICK)
    return dataclasses.replace(base, **changes)


def entry_of(request: Request) -> dict[str, Any]:
    return json.loads((request.out / "results.json").read_text())["tasks"]["CoLA"]  # type: ignore[no-any-return]


def fake(folder: Path, value: float, **changes: Any) -> Result:
    return dataclasses.replace(Result(folder, {}, {}, {"mcc": value}, value, 1, 1.0, ""), **changes)


def test_cells_that_overrides_make_equal_are_one(place: Path, tmp_path: Path) -> None:
    request = request_of(place, tmp_path, overrides=(*QUICK, "training.optimiser.lr=1e-3"))
    (cola,) = glue.plan(request).experiments
    assert isinstance(cola, Experiment)
    assert (len(cola.grid), cola.cells) == (1, 1)
    assert reproduce("glue", request, device="cpu") is not None
    assert len(entry_of(request)["cells"]) == 1
    assert (Path(entry_of(request)["best"]) / "model").is_dir()


def test_a_folder_that_is_the_best_ones_keeps_its_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
    runner._keep_best([fake(tmp_path / "a", 0.25), fake(tmp_path / "b", 0.75), fake(tmp_path / "b", 0.75)])
    assert [(tmp_path / name / "model").exists() for name in ("a", "b")] == [False, True]


def test_a_finished_cell_is_found_where_its_files_have_moved_and_not_for_another_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(place, tmp_path / "first", grid="none")
    assert reproduce("glue", request, device="cpu") is not None
    monkeypatch.setattr(runner, "finetune", None)
    model = shutil.copytree(request.model, tmp_path / "bert")
    moved = dataclasses.replace(request, out=request.out.rename(tmp_path / "second"), model=str(model))
    assert reproduce("glue", moved, device="cpu") is not None
    make_folder(model, seed=1)
    with pytest.raises(ResourceError, match=r"seed0: holds the result of other settings, of other data or of another model"):
        reproduce("glue", moved, device="cpu")
    shutil.copytree(request.model, model, dirs_exist_ok=True)
    (model / "README.md").write_text("something else")
    assert reproduce("glue", moved, device="cpu") is not None
