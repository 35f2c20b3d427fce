"""Cells of a reproduction: which there are, which are found again, and what becomes of one that is lost."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bothways.core.errors import DivergedError
from bothways.finetuning.config import FinetuneConfig
from bothways.lab.paper import experiment as runner
from bothways.lab.paper import glue
from bothways.lab.paper.experiment import Experiment, Request
from bothways.lab.paper.run import reproduce
from bothways.lab.sweeps import runs as engine
from bothways.lab.sweeps.runs import Series, SweepFolder, SweepOutcome
from toy_folder import make_folder

QUICK = ("length=16", "training.precision=fp32", "training.until=2 steps")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
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
    return json.loads((request.out / "results.json").read_text())["tasks"]["CoLA"]


def fake(name: str, value: float) -> SweepOutcome:
    return SweepOutcome(name, {"mcc": value}, (), "mcc", "highest", 1, 1.0)


def test_equal_cells_run_once(place, tmp_path):
    request = request_of(place, tmp_path, overrides=(*QUICK, "training.optimizer.lr=1e-3"))
    (cola,) = glue.glue_plan(request).experiments
    assert isinstance(cola, Experiment)
    assert (len(cola.grid), cola.cells) == (1, 1)
    assert reproduce("glue", request, device="cpu") is not None
    assert len(entry_of(request)["cells"]) == 1
    assert (Path(entry_of(request)["best"]) / "model").is_dir()


def test_best_folder_keeps_weights(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
    series = Series((fake("a", 0.25), fake("b", 0.75), fake("b", 0.75)))
    engine._delete_weights(series, SweepFolder(tmp_path))
    assert [(tmp_path / name / "model").exists() for name in ("a", "b")] == [False, True]


@pytest.fixture
def wild(monkeypatch) -> set[int]:
    """The seeds with which runs diverge."""
    seeds, real = set[int](), engine.finetune

    def diverging(settings: FinetuneConfig, folder: Path, **options: Any) -> Any:
        if settings.seed in seeds:
            raise DivergedError("the loss is not finite", where="step 3", fix="Lower the rate.")
        return real(settings, folder, **options)

    monkeypatch.setattr(engine, "finetune", diverging)
    return seeds


def test_diverged_restarts_are_excluded_from_mean(place, tmp_path, wild):
    wild.add(1)
    (cola,) = glue.glue_plan(request_of(place, tmp_path, grid="none", seeds=3)).experiments
    assert isinstance(cola, Experiment)
    outcome = runner.run(
        dataclasses.replace(cola, restarts="mean"),
        tmp_path,
        device="cpu",
    )
    runs = outcome.series.runs
    assert [bool(run.metrics) for run in runs] == [True, False, True]
    assert outcome.counted == (runs[0], runs[2])


def test_a_task_of_which_every_run_diverges_is_told(place, tmp_path, wild):
    wild |= {0, 1}
    request = request_of(place, tmp_path, grid="none", seeds=2)
    done = reproduce("glue", request, device="cpu")
    assert done is not None
    assert (entry_of(request)["best"], entry_of(request)["metrics"]) == (None, {})
    _, tasks, details = done.sections
    assert tasks.rows == [["CoLA", "every run diverged", None, ""]]
    assert details.sections[0].rows[0][2] == "diverged (failed)"
