"""Several runs: with seeds and over grids; finished ones are not run again, lost ones are told, the best one is kept."""

import dataclasses
import json
import math
import shutil
import signal
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from bothways.cli.training import print_series
from bothways.core import errors
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.run import FinetuneResult
from bothways.hub.model_folder import load_model
from bothways.lab.sweeps import runs as engine
from bothways.lab.sweeps.runs import (
    SeedSpread,
    Series,
    SweepFolder,
    SweepOutcome,
    finetune_seeds,
    parse_seeds,
    seed_spread,
)
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Epochs, Steps
from commands import run_line
from toy_folder import make_examples, make_folder, write_tsv
from toy_task import interrupt_score
from toy_training import equal

FAST = dataclasses.replace(
    finetune_adam(), until=Steps(4), evaluate=None, optimizer=AdamW(lr=3e-3), precision="fp32"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> FinetuneConfig:
    folder = tmp_path_factory.mktemp("files")
    return FinetuneConfig(
        model=str(make_folder(folder / "bert")),
        train=str(write_tsv(folder / "train.tsv", make_examples(96, 0))),
        dev=str(write_tsv(folder / "dev.tsv", make_examples(40, 1))),
        length=16,
        training=FAST,
    )


@pytest.fixture
def around_runs(monkeypatch) -> dict[str, Callable[[FinetuneConfig], object]]:
    """What is called before and after each run, by these names."""
    hooks: dict[str, Callable[[FinetuneConfig], object]] = {}
    real, nothing = engine.finetune, lambda settings: None

    def finetune(settings: FinetuneConfig, folder: Path, **options: object) -> FinetuneResult:
        hooks.get("before", nothing)(settings)
        done = real(settings, folder, **options)
        hooks.get("after", nothing)(settings)
        return done

    monkeypatch.setattr(engine, "finetune", finetune)
    return hooks


def test_seeds_run_once_each_and_the_best_is_kept(base, tmp_path, around_runs):
    place = SweepFolder(tmp_path, device="cpu")
    series = finetune_seeds(base, (0, 3), place)
    values = [run.metrics["accuracy"] for run in series.runs]
    assert [run.name for run in series.runs] == ["seed-0", "seed-3"]
    assert series.best.metrics["accuracy"] == max(values)
    kept, best = (load_model(tmp_path / name / "model").model for name in (".", series.best.name))
    assert equal(kept, best)
    card, other = (
        (tmp_path / name / "model" / "README.md").read_text() for name in (".", series.best.name)
    )
    assert (
        "- It was selected as the best of 2 runs by dev accuracy, whose mean over them is "
        f"{statistics.fmean(values):.4g}: expect that.\n" in card
    )
    assert "selected as the best" not in other
    report = json.loads((tmp_path / "seeds.json").read_text())
    assert report["mean"] == pytest.approx(statistics.fmean(values))
    assert report["deviation"] == pytest.approx(statistics.stdev(values))
    assert report["best"] == max(values)
    assert [run["metrics"]["accuracy"] for run in report["runs"]] == values

    with pytest.raises(errors.ResourceError, match="holds the checkpoints of an earlier run"):
        finetune_seeds(base, (0, 3), place)
    ran, resumed = list[int](), dataclasses.replace(place, resume=True)
    around_runs["before"] = lambda settings: ran.append(settings.seed)
    again = finetune_seeds(base, (0, 3, 4), resumed)
    assert ran == [4]
    assert again.runs[:2] == series.runs
    with pytest.raises(errors.ConfigError, match="seed-0: this run was finished"):
        finetune_seeds(dataclasses.replace(base, length=12), (0,), resumed)
    for damage in ("{}", '{"name": "seed-0", "metrics": {}, "failed": [], "unknown": 1}'):
        (tmp_path / "seed-0" / engine.RESULT).write_text(damage)
        with pytest.raises(errors.FolderError, match=r"result.json: is not the result of a run"):
            finetune_seeds(base, (0,), resumed)


@pytest.mark.parametrize("name", ["train", "dev", "model"])
def test_runs_on_other_content_are_refused(name, base, tmp_path, monkeypatch):
    files = {each: str(shutil.copy(getattr(base, each), tmp_path)) for each in ("train", "dev")}
    model = str(shutil.copytree(base.model, tmp_path / "bert"))
    settings = dataclasses.replace(base, model=model, **files)
    place = SweepFolder(tmp_path / "runs", device="cpu")
    finetune_seeds(settings, (0,), place)
    if name == "model":
        make_folder(tmp_path / "bert", seed=1)
    else:
        with Path(files[name]).open("a") as file:
            file.write("a good film\tpos\n")
    monkeypatch.setattr(engine, "finetune", None)  # nothing more is trained
    message = f"seed-0: this run was finished with other content of {name}"
    with pytest.raises(errors.ConfigError, match=message):
        finetune_seeds(settings, (1, 0), dataclasses.replace(place, resume=True))


def test_data_changed_during_series_is_detected(base, tmp_path, around_runs):
    settings = dataclasses.replace(base, model=str(shutil.copytree(base.model, tmp_path / "bert")))
    around_runs["after"] = lambda _: make_folder(tmp_path / "bert", seed=1)
    with pytest.raises(errors.ConfigError, match="runs: seed-0 and seed-1 had different content"):
        finetune_seeds(settings, (0, 1), SweepFolder(tmp_path / "runs", device="cpu"))


def test_finished_run_survives_moved_files(base, tmp_path, monkeypatch):
    place = SweepFolder(tmp_path / "runs", device="cpu")
    done = finetune_seeds(base, (0,), place)
    moved = {name: str(tmp_path / f"moved-{name}.tsv") for name in ("train", "dev")}
    for name, file in moved.items():
        shutil.copy(getattr(base, name), file)
    model = str(shutil.copytree(base.model, tmp_path / "bert"))
    monkeypatch.setattr(engine, "finetune", None)
    settings = dataclasses.replace(base, model=model, **moved)
    again = finetune_seeds(settings, (0,), dataclasses.replace(place, resume=True))
    assert again.runs == done.runs


def test_diverged_run_does_not_end_series(base, tmp_path, around_runs):
    def diverge(settings: FinetuneConfig) -> None:
        if settings.seed == 1:
            fix = "Lower the rate."
            raise errors.DivergedError("the loss is not finite", where="step 3", fix=fix)

    around_runs["before"] = diverge
    series = finetune_seeds(base, (1, 2), SweepFolder(tmp_path, device="cpu"))
    lost = series.runs[0]
    assert (lost.name, lost.metrics) == ("seed-1", {})
    assert lost.failed == ("step 3: the loss is not finite Lower the rate.",)
    assert lost.settings["seed"] == 1
    assert series.best is series.runs[1]
    summary = seed_spread(series)
    assert (summary.failed, summary.deviation) == (1 + bool(series.runs[1].failed), None)
    lost = finetune_seeds(base, (1,), SweepFolder(tmp_path / "lost", device="cpu"))
    assert seed_spread(lost) is None
    assert not (tmp_path / "lost" / "model").exists()


@pytest.mark.parametrize(("direction", "best"), [("lowest", "c"), ("highest", "b")])
def test_best_run_depends_on_direction(direction, best):
    """The first of equals; a run whose metric is not a number is worse than any other."""
    values = (("a", math.nan), ("b", 2.0), ("c", 1.0), ("d", 1.0), ("e", 2.0))
    runs = (SweepOutcome(name, {"m": value}, (), "m", direction) for name, value in values)
    assert Series(tuple(runs)).best.name == best


def test_spread_is_over_scored_runs():
    values = (0.5, 0.75, 0.25, 0.875)
    runs = (
        *(SweepOutcome(str(v), {"m": v}, ("bad",) * (v < 0.5), "m") for v in values),
        SweepOutcome("lost", {}, ("diverged",)),
    )
    found = seed_spread(Series(runs))
    assert found == SeedSpread("m", 0.59375, 0.625, 0.875, statistics.stdev(values), 2)
    undefined = tuple(SweepOutcome(str(v), {"m": v}, (), "m") for v in (0.5, math.nan, 0.25))
    assert math.isnan(seed_spread(Series(undefined)).deviation)  # the correlation of equal answers


def test_series_needs_dev_data_and_own_folder(base, tmp_path):
    with pytest.raises(errors.ConfigError, match=r"^dev: several runs are compared by dev data"):
        finetune_seeds(dataclasses.replace(base, dev=None), (0,), SweepFolder(tmp_path))
    (tmp_path / ".run").touch()
    with pytest.raises(errors.ResourceError, match="is the folder of a single run"):
        finetune_seeds(base, (0,), SweepFolder(tmp_path))


@pytest.mark.parametrize(
    ("text", "start", "seeds"),
    [
        ("3", 0, (0, 1, 2)), ("7,", 0, (7,)), ("3, 14,15", 0, (3, 14, 15)), ("1", 0, (0,)),
        ("2", 5, (5, 6)),
    ],
)  # fmt: skip
def test_seeds_are_parsed(text, start, seeds):
    assert parse_seeds(text, start) == seeds


@pytest.mark.parametrize(
    "text", ["0", "x", "1,x", "1,1", "", ",", "-1", "0x2", "2x", "2x0", "2x2x2", "1" * 5000]
)
def test_invalid_seeds_are_refused(text):
    with pytest.raises(errors.ConfigError, match=r"^seeds: .* does not name seeds"):
        parse_seeds(text)
    with pytest.raises(errors.ConfigError, match=r"^seeds: '10001' is more than 10,000 runs"):
        parse_seeds("10001")


def test_grids_match_paper(base):
    found = [settings for _, settings in engine.grid_cells(base, engine.GRIDS["paper"])]
    assert {(s.batch.n, s.training.optimizer.lr, s.training.until) for s in found} == {
        (n, lr, Epochs(epochs))
        for n in (16, 32)
        for lr in (5e-5, 3e-5, 2e-5)
        for epochs in (2.0, 3.0, 4.0)
    }
    assert (
        len({name for name, _ in engine.grid_cells(base, engine.GRIDS["paper"])})
        == len(found)
        == 18
    )


def test_grids_are_parsed():
    assert engine.parse_grid("training.until='2 epochs, 3 epochs' batch.n=16") == {
        "training.until": ("2 epochs", "3 epochs"),
        "batch.n": ("16",),
    }
    assert engine.folder_name({"a.b": "2 epochs", "c": "../x"}) == "a.b=2+epochs,c=..%2Fx"
    assert engine.folder_name({"a": "caf\udce9"}) == "a=caf%ED%B3%A9"  # not UTF-8
    assert len({engine.folder_name({"a": value}) for value in ("x/y", "x-y", "x y", "x+y")}) == 4
    for text in ("nonsense", "a=", "a=1 a=2", "=3"):
        with pytest.raises(errors.ConfigError, match=r"^grid: .* is not a key with values"):
            engine.parse_grid(text)
    with pytest.raises(errors.ConfigError, match=r"^grid: 'batch.n=16,32,16' has a value twice"):
        engine.parse_grid("batch.n=16,32,16")
    with pytest.raises(errors.ConfigError, match=r"^grid: is empty"):
        engine.parse_grid(" ")


def test_long_folder_name_ends_in_hash():
    cell = {f"training.optimizer.{number}": "1e-5" for number in range(20)}
    names = [engine.folder_name(cell | {"seed": seed}) for seed in "12"]
    assert names[0] != names[1]
    assert [len(name.encode()) for name in names] == [213, 213]
    start = "training.optimizer.0=1e-5,training.optimizer.1=1e-5,"
    assert all(name.startswith(start) for name in names)


def test_wrong_setting_fails_before_first_run(base, tmp_path):
    with pytest.raises(errors.ConfigError, match=r"batch\.m: unknown key"):
        engine.sweep_grid(base, {"batch.n": ("16",), "batch.m": ("1",)}, SweepFolder(tmp_path))
    assert not list(tmp_path.iterdir())


def words(base: FinetuneConfig, *more: str) -> list[str]:
    options = ["--device", "cpu", "length=16", "training.until=2 steps"]
    return [base.model, base.train, "--dev", str(base.dev), *options, *more]


def test_sweep_and_compare_commands(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["finetune", *words(base, "--out", "many", "--seeds", "2")]
    monkeypatch.setattr("sys.argv", ["bothways", *line])
    with monkeypatch.context() as patch:
        interrupt_score(patch, number=signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):  # `run_command_line` makes its exit status of it
            run_line(*line, "training.until=8 steps", "training.evaluate=2 steps")
    assert ". To resume: bothways finetune" in capsys.readouterr().err
    assert not [*Path("many").glob("seeds.json"), *Path("many").glob("model")]
    run_line(*line, "training.until=8 steps", "training.evaluate=2 steps", "--resume")
    output = capsys.readouterr()
    for word in ("seed-0", "seed-1", "(best)", "mean", "median", "deviation", "failed runs"):
        assert word in output.out
    assert "is in many/model" in output.err
    with pytest.raises(errors.BothwaysError, match="has no column 'nowhere'"):
        run_line("sweep", *words(base, "--text", "nowhere", "--out", "grid"))
    columns = ("--text", "sentence", "--label", "label")
    options = ("--grid", "training.optimizer.lr=1e-7,5e-3", "--out", "grid", *columns)
    run_line("sweep", *words(base, *options))
    assert "2 runs, scored on the dev data" in capsys.readouterr().out
    report = json.loads(Path("grid/sweep.json").read_text())
    scores = {run["name"]: run["metrics"]["accuracy"] for run in report["runs"]}
    assert [*scores] == [f"training.optimizer.lr={rate}" for rate in ("1e-7", "5e-3")]
    assert scores[report["best"]] == max(scores.values())
    kept = load_model(Path("grid/model")).model
    assert equal(kept, load_model(Path("grid", report["best"], "model")).model)
    run_line("compare", "many", "grid", base.dev, "--device", "cpu")
    shown = capsys.readouterr().out
    assert "Grades on" in shown
    assert "95 % interval" in shown
    run_line("compare", "many", "grid", base.dev, *columns, "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["examples"] == 40
    assert not math.isnan(values["p_value"])
    with pytest.raises(errors.BothwaysError):
        run_line("compare", "many", "nowhere", base.dev)


def test_the_model_of_failed_runs_is_not_announced_as_the_best(tmp_path, capsys):
    failed = SweepOutcome("seed-0", {"m": 0.5}, ("it answers 'x' for all",), "m")
    print_series(Series((failed,)), tmp_path)
    shown = capsys.readouterr()
    assert "warning: every run has probably failed. The model of seed-0 is in" in shown.err
    assert "best model" not in shown.err
    assert [line.split()[3] for line in shown.out.splitlines() if "deviation" in line] == ["–"]
    good = SweepOutcome("seed-1", {"m": 0.6}, (), "m")
    print_series(Series((failed, good)), tmp_path)
    assert "The best model, of seed-1, is in" in capsys.readouterr().err
