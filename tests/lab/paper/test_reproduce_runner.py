"""Cells of a reproduction: which there are, which are found again, and what becomes of one that is lost."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bothways.core.errors import ConfigError, DivergedError, ResourceError
from bothways.finetuning.config import FinetuneConfig
from bothways.lab.features.data import FeatureConfig, tagger_adam
from bothways.lab.features.tagger import BiLSTMTagger
from bothways.lab.paper import cells as runner
from bothways.lab.paper import cost, glue
from bothways.lab.paper.experiment import Experiment, Frozen, Request
from bothways.lab.paper.run import PLANS, reproduce
from bothways.lab.sweeps import runs as engine
from bothways.lab.sweeps.runs import Series, SweepFolder, SweepOutcome
from bothways.training.durations import Steps
from heard_progress import Heard
from toy_folder import make_folder

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


def fake(name: str, value: float) -> SweepOutcome:
    return SweepOutcome(name, {"mcc": value}, (), "mcc", "highest", 1, 1.0)


def test_cells_that_overrides_make_equal_are_one(place: Path, tmp_path: Path) -> None:
    request = request_of(place, tmp_path, overrides=(*QUICK, "training.optimizer.lr=1e-3"))
    (cola,) = glue.glue_plan(request).experiments
    assert isinstance(cola, Experiment)
    assert (len(cola.grid), cola.cells) == (1, 1)
    assert reproduce("glue", request, device="cpu") is not None
    assert len(entry_of(request)["cells"]) == 1
    assert (Path(entry_of(request)["best"]) / "model").is_dir()


def test_a_folder_that_is_the_best_ones_keeps_its_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
    series = Series((fake("a", 0.25), fake("b", 0.75), fake("b", 0.75)))
    engine._delete_weights(series, SweepFolder(tmp_path))
    assert [(tmp_path / name / "model").exists() for name in ("a", "b")] == [False, True]


def test_a_finished_cell_is_found_where_its_files_have_moved_and_not_for_another_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(place, tmp_path / "first", grid="none")
    assert reproduce("glue", request, device="cpu") is not None
    monkeypatch.setattr(engine, "finetune", None)
    model = shutil.copytree(request.model, tmp_path / "bert")
    moved = dataclasses.replace(
        request, out=request.out.rename(tmp_path / "second"), model=str(model)
    )
    assert reproduce("glue", moved, device="cpu") is not None
    make_folder(model, seed=1)
    with pytest.raises(
        ConfigError,
        match=r"seed0: this run was finished with other content of model",
    ):
        reproduce("glue", moved, device="cpu")
    shutil.copytree(request.model, model, dirs_exist_ok=True)
    (model / "README.md").write_text("something else")
    assert reproduce("glue", moved, device="cpu") is not None


@pytest.fixture
def wild(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The seeds with which runs diverge."""
    seeds, real = set[int](), engine.finetune

    def diverging(settings: FinetuneConfig, folder: Path, **options: Any) -> Any:
        if settings.seed in seeds:
            raise DivergedError("the loss is not finite", where="step 3", fix="Lower the rate.")
        return real(settings, folder, **options)

    monkeypatch.setattr(engine, "finetune", diverging)
    return seeds


def test_a_run_that_diverges_is_told_and_the_others_go_on(
    place: Path, tmp_path: Path, wild: set[int]
) -> None:
    wild.add(0)
    heard = Heard()
    request = request_of(place, tmp_path, grid="none", seeds=2)
    assert reproduce("glue", request, device="cpu", progress=heard) is not None
    lost, done = entry_of(request)["cells"]
    assert lost["metrics"] == {}
    assert lost["failed"] == ["step 3: the loss is not finite Lower the rate."]
    assert entry_of(request)["best"] == done["folder"]
    assert entry_of(request)["metrics"] == done["metrics"]
    assert heard.text.count("step 3: the loss is not finite") == 1
    assert reproduce("glue", request, device="cpu", progress=heard) is not None
    assert heard.text.count(": done before\n") == 2


def test_restarts_that_diverge_are_left_out_of_the_mean(
    place: Path, tmp_path: Path, wild: set[int]
) -> None:
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


def test_restarts_that_are_done_are_counted(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "_training_speed", lambda *arguments: 1.0)
    (cola,) = glue.glue_plan(request_of(place, tmp_path, seeds=3)).experiments
    assert isinstance(cola, Experiment)
    mean = dataclasses.replace(cola, restarts="mean", grid=cola.grid[:2])
    seen = []
    for seeds in (2, 3):
        runner.run(dataclasses.replace(mean, seeds=seeds), tmp_path, device="cpu")
        (found,), _ = cost.estimate([mean], tmp_path, device="cpu")
        seen.append((found.runs, found.done, found.seconds > 0))
    assert seen == [(4, 3, True), (4, 4, False)]


def test_numbers_of_runs_that_are_not_the_papers_are_said() -> None:
    departures = {
        seeds: Request("m", "d", Path("o"), seeds=seeds).departures(5) for seeds in (None, 2, 5)
    }
    assert departures == {None: (), 2: ("2 runs per setting instead of 5",), 5: ()}
    assert Request("m", "d", Path("o"), seeds=2).departures(None) == ()
    names = ("ner", "squad", "swag", "glue")
    seeds = [PLANS[name](Request("m", "d", Path("o"))).seeds for name in names]
    assert seeds == [5, 1, 1, None]


def test_a_file_in_the_place_of_the_folder_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="file: cannot be written: File exists"):
        reproduce("glue", request_of(place, tmp_path / "file"), device="cpu")


def test_a_task_of_which_every_run_diverges_is_told(
    place: Path, tmp_path: Path, wild: set[int]
) -> None:
    wild |= {0, 1}
    request = request_of(place, tmp_path, grid="none", seeds=2)
    done = reproduce("glue", request, device="cpu")
    assert done is not None
    assert (entry_of(request)["best"], entry_of(request)["metrics"]) == (None, {})
    _, tasks, details = done.report.sections
    assert tasks.rows == [["CoLA", "every run diverged", None, ""]]  # type: ignore[union-attr]
    assert details.sections[0].rows[0][2] == "diverged (failed)"  # type: ignore[union-attr]


def test_a_bilstm_that_diverges_is_left_out_of_the_mean(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runner.fit_features

    def diverging(data: Any, settings: FeatureConfig, **options: Any) -> Any:
        if settings.seed == 0:
            raise DivergedError("the loss is not finite", where="step 3")
        return real(data, settings, **options)

    monkeypatch.setattr(runner, "fit_features", diverging)
    file = tmp_path / "words.conll"
    file.write_text("film O\ngood B-X\n\nbad B-Y\nfilm O\n\n")
    training = dataclasses.replace(tagger_adam(), until=Steps(1))
    settings = FeatureConfig(
        model=str(place / "bert"),
        train=str(file),
        dev=str(file),
        layers="last",
        tagger=BiLSTMTagger(4, 1),
        training=training,
    )
    outcome = runner.run(Frozen("last", settings, 2), tmp_path, device="cpu")
    runs = outcome.series.runs
    assert outcome.counted == runs[1:]
    assert outcome.metrics == dict(runs[1].metrics)
