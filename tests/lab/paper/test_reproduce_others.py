"""SQuAD, SWAG and CoNLL-2003 as the paper has them, from files to results; the arithmetic of restarts and of costs."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bothways.core.errors import ConfigError
from bothways.core.terminal import time_text
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.prepare import prepare_run
from bothways.finetuning.run import Failure, FinetuneResult
from bothways.lab.features.run import BiLSTMTagger, FeatureConfig, fit_features, prepare_features
from bothways.lab.paper import benchmarks, experiment as runner, run as cost
from bothways.lab.paper.experiment import CellOutcome, Experiment, NotRun, Request, find_file
from bothways.lab.paper.pages import measured
from bothways.lab.paper.run import PLANS, reproduce
from bothways.lab.sweeps import runs as engine
from bothways.lab.sweeps.runs import Series, SweepOutcome
from bothways.prediction.opening import open_task
from bothways.text.tokenizer import Tokenizer
from bothways.training.schedules import Epochs
from heard_progress import Heard
from toy_folder import make_folder

QUICK = ("length=16", "training.precision=fp32", "training.optimizer.lr=3e-3")
PLENTY = (*QUICK, "training.until=2 steps")


def questions(count: int, impossible: bool) -> dict[str, Any]:
    context, asked = "the old film play rain men", []
    for number in range(count):
        word, none = context.split()[2 + number % 4], impossible and number % 3 == 0
        answers = [] if none else [{"text": word, "answer_start": context.index(word)}]
        question = {"id": f"q{number}", "question": f"was it {word}", "answers": answers}
        asked.append(question | {"is_impossible": none})
    return {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": asked}]}]}


SWAG = (
    ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    + "".join(
        f'{i},v,{i},"the film, it",the film,it,gold,"is ""good"", fine",is bad,ends,was rain,{i % 4}\n'
        for i in range(8)
    )
)
SENTENCES = (
    "-DOCSTART- -X- O O\n\nthe DT O O\nfilm NN O B-MISC\n\nold JJ O B-LOC\nmen NN O O\n\n"
    "-DOCSTART- -X- O O\n\nrain NN O B-LOC\n\n"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    make_folder(folder / "bert")
    for version, impossible in (("v1.1", False), ("v2.0", True)):
        for split, count in (("train", 12), ("dev", 6)):
            file = folder / "squad" / f"{split}-{version}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(questions(count, impossible)), encoding="utf8")
    files = {f"swag/{name}.csv": SWAG for name in ("train", "val")}
    files |= {f"ner/eng.{name}": SENTENCES for name in ("train", "testa", "testb")}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf8")
    return folder


def request_of(place: Path, name: str, out: Path, **changes: Any) -> Request:
    base = Request(str(place / "bert"), str(place / name), out, overrides=PLENTY)
    return dataclasses.replace(base, **changes)


def grid_of(entry: Experiment | NotRun) -> list[tuple[float, int, Any, int]]:
    return [(s.training.optimizer.lr, s.batch.n, s.training.until, s.length) for s in entry.grid]


def test_settings_match_papers(place, tmp_path):
    def planned(name: str) -> tuple[Experiment | NotRun, ...]:
        return PLANS[name](request_of(place, name, tmp_path, overrides=())).experiments

    first, second = planned("squad")
    assert grid_of(first) == [(5e-5, 32, Epochs(3.0), 384)]
    assert grid_of(second) == [(5e-5, 48, Epochs(2.0), 384)]
    assert grid_of(planned("swag")[0]) == [(2e-5, 16, Epochs(3.0), 128)]
    tagged, *by_layers = planned("ner")
    assert set(grid_of(tagged)) == {
        (rate, batch, Epochs(epochs), 512)
        for rate in (5e-5, 3e-5, 2e-5)
        for batch in (16, 32)
        for epochs in (2.0, 3.0, 4.0)
    }
    assert (tagged.seeds, tagged.restarts, tagged.cells) == (5, "mean", 18 + 4)
    assert all(settings.task.context == "document" for settings in tagged.grid)
    single = request_of(place, "ner", tmp_path, grid="none", overrides=())
    alone, *_ = benchmarks.ner_plan(single).experiments
    assert [type(entry) for entry in by_layers] == [Experiment] * 3 + [NotRun] * 2 + [Experiment]
    reason = "'weighted_last_four' needs more blocks than the encoder's 2"
    assert by_layers[3] == NotRun("sum-last-four", reason)
    frozen = by_layers[2].settings
    assert (by_layers[2].seeds, frozen.layers, frozen.task.context) == (5, "last", "document")
    assert (frozen.tagger.hidden, frozen.tagger.depth) == (768, 2)
    assert grid_of(alone) == [(5e-5, 32, Epochs(3.0), 512)]


def test_conll_test_data_has_own_column(place, tmp_path):
    planned = benchmarks.ner_plan(request_of(place, "ner", tmp_path))
    tagged, _, _, last, *_ = planned.experiments
    assert tagged.others == {"test": str(place / "ner" / "eng.testb")}
    results = (fake("one", 0.25, metrics={"f1": 0.25, "test/f1": 0.75, "dev/f1": 0.5}),)
    outcomes = [CellOutcome(each, tmp_path, Series(results), results) for each in (tagged, last)]
    shown = measured(planned, outcomes)
    assert shown["this run, fine-tuned"] == {"dev": 25.0, "test": 75.0}
    assert shown["this run, last"] == {"dev": 25.0}


def test_metrics_are_of_best_run_or_mean(tmp_path):
    runs = tuple(fake(name, value) for name, value in (("a", 0.25), ("b", 0.75), ("c", 0.75)))
    outcome = CellOutcome(Experiment("x", ()), tmp_path, Series(runs), runs[:2])
    assert outcome.best == tmp_path / "b"
    assert outcome.metrics == {"f1": 0.5, "em": 0.5}


@pytest.mark.parametrize(
    ("benchmark", "reasons"),
    [
        ("squad", ["no train-v1.1.json in ", "no train-v2.0.json in "]),
        ("swag", ["no train.csv in "]),
        ("ner", ["no eng.train in "] * 7),
    ],
)
def test_missing_data_is_reported(benchmark, reasons, tmp_path):
    planned = PLANS[benchmark](Request("bert", str(tmp_path), tmp_path))
    actual = [entry.reason for entry in planned.experiments if isinstance(entry, NotRun)]
    assert actual == [f"{reason}{tmp_path}" for reason in reasons]
    with pytest.raises(ConfigError, match=r"tasks: unknown name 'other'; there are: "):
        PLANS[benchmark](Request("bert", str(tmp_path), tmp_path, ("other",)))


def test_files_are_found_renamed_or_compressed(tmp_path):
    request = Request("bert", str(tmp_path), tmp_path)
    names = ("eng.train", "eng.train.gz", "train.txt", "train.txt.gz")
    for name in names:
        (tmp_path / name).touch()
    for name in names:
        assert find_file(request.data, "eng.train", "train.txt") == str(tmp_path / name)
        (tmp_path / name).unlink()
    assert find_file(request.data, "eng.train", "train.txt") is None


def test_squad_runs(place, tmp_path):
    assert reproduce("squad", request_of(place, "squad", tmp_path, limit=9), device="cpu")
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["measured"]["this run"]) == {"1.1 EM", "1.1 F1", "2.0 EM", "2.0 F1"}
    f1 = results["tasks"]["v2.0"]["metrics"]["f1"]
    assert results["measured"]["this run"]["2.0 F1"] == 100 * f1
    opened = open_task(results["tasks"]["v2.0"]["best"], device="cpu")
    assert opened.task_model.task.threshold is not None
    lines = (tmp_path / "data" / "train-v2.0-9.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 9
    assert rows[0]["answers"] == {"text": [], "answer_start": []}
    assert rows[1]["answers"] == {"text": ["play"], "answer_start": [13]}


def test_swag_runs(place, tmp_path):
    assert reproduce("swag", request_of(place, "swag", tmp_path, limit=6), device="cpu") is not None
    results = json.loads((tmp_path / "results.json").read_text())
    accuracy = results["tasks"]["SWAG"]["metrics"]["accuracy"]
    assert results["measured"] == {"this run": {"dev": 100 * accuracy}}
    lines = (tmp_path / "data" / "train-6.jsonl").read_text().splitlines()
    rows = [*map(json.loads, lines)]
    assert len(rows) == 6
    assert rows[1] == {
        "context": "the film", "endings": ['it is "good", fine', "it is bad", "it ends", "it was rain"], "label": 1,
    }  # fmt: skip


def test_ner_averages_restarts_of_best_setting(place, tmp_path, monkeypatch):
    grid = benchmarks.NER_GRIDS["none"] | {"batch.n": ("1", "2")}
    monkeypatch.setitem(benchmarks.NER_GRIDS, "paper", grid)
    heard = Heard()
    request = request_of(place, "ner", tmp_path, seeds=2, limit=2, tasks=("CoNLL-2003",))
    assert reproduce("ner", request, device="cpu", progress=heard) is not None
    entry = json.loads((tmp_path / "results.json").read_text())["tasks"]["CoNLL-2003"]
    assert len(entry["cells"]) == 3
    grid, again = entry["cells"][:2], entry["cells"][2]
    chosen = max(grid, key=lambda cell: cell["metrics"]["f1"])
    assert entry["mean of"] == [chosen["folder"], again["folder"]]
    assert again["settings"]["batch"] == chosen["settings"]["batch"]
    assert [cell["settings"]["seed"] for cell in entry["cells"]] == [0, 0, 1]
    for metric in ("f1", "test/f1", "loss"):
        mean = (chosen["metrics"][metric] + again["metrics"][metric]) / 2
        assert entry["metrics"][metric] == pytest.approx(mean)
    written = (tmp_path / "data" / "train-2.conll").read_text()
    assert written == SENTENCES[: SENTENCES.index("-DOCSTART-", 1)]
    lines = SENTENCES.splitlines()
    assert [*benchmarks.first_sentences(lines, 9)] == lines


def test_frozen_features_average_bilstms(place, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "TAGGER", BiLSTMTagger(4, 1))
    request = request_of(place, "ner", tmp_path, seeds=2, tasks=("last",))
    heard = Heard()
    assert reproduce("ner", request, dry_run=True, device="cpu", progress=heard) is None
    assert not (tmp_path / "runs").exists()
    done = reproduce("ner", request, device="cpu", progress=heard)
    assert done is not None
    results = json.loads((tmp_path / "results.json").read_text())
    cells = results["tasks"]["last"]["cells"]
    assert [cell["settings"]["seed"] for cell in cells] == [0, 1]
    mean = sum(cell["metrics"]["f1"] for cell in cells) / 2
    assert results["measured"] == {"this run, last": {"dev": pytest.approx(100 * mean)}}
    train, dev = (str(place / "ner" / f"eng.{name}") for name in ("train", "testa"))
    settings = FeatureConfig(
        model=request.model, train=train, dev=dev, layers="last", tagger=BiLSTMTagger(4, 1), seed=1
    )
    vectors = prepare_features(settings, tmp_path / "again", [settings.layers], device="cpu")
    again = fit_features(vectors, settings, device="cpu")
    assert cells[1]["metrics"] == dict(again.metrics)
    monkeypatch.setattr("bothways.lab.paper.experiment.fit_features", None)
    assert reproduce("ner", request, device="cpu", progress=heard) is not None
    assert "last, run 2 of 2, seed1: done before" in heard.text


def test_cost_counts_runs_and_data_of_frozen_features(place, tmp_path):
    bert = make_folder(tmp_path / "bert", max_position_embeddings=160)
    words = "".join("film NN O O\n" for _ in range(140))  # beyond the length of fine-tuning
    for name in ("eng.train", "eng.testa"):
        (tmp_path / name).write_text(f"{words}\n{SENTENCES}")
    request = request_of(place, "ner", tmp_path, seeds=3, tasks=("last",))
    request = dataclasses.replace(request, model=str(bert), data=str(tmp_path))
    (experiment,) = benchmarks.ner_plan(request).experiments
    assert isinstance(experiment.settings, FeatureConfig)
    assert experiment.notes == (f"without {', '.join(PLENTY)}",)
    settings = experiment.settings
    ready = prepare_features(settings, tmp_path / "vectors", ["last"], device="cpu")
    examples = list(settings.task.read(settings.train, settings.task.columns).examples)
    inputs = ready.task_model.encode(examples)
    tokens = sum(len(sequence) for item in inputs for sequence in item.sequences)
    table = cost.estimate([experiment], tmp_path, device="cpu")
    assert table.rows[0] == ["last", 3, 0, 4, tokens, "–"]


def test_cost_matches_tokens_of_runs(place, tmp_path, monkeypatch):
    """It extrapolates from the first examples, and leaves finished runs out."""
    monkeypatch.setattr(cost, "_training_speed", lambda *arguments: 1.0)
    overrides = (*QUICK, "length=14")
    request = request_of(place, "squad", tmp_path, overrides=overrides, tasks=("v2.0",), seeds=3)
    (experiment,) = benchmarks.squad_plan(request).experiments
    data = prepare_run(experiment.grid[0], tmp_path / "run", torch.device("cpu")).data
    dev = sum(len(sequence) for item in data.dev for sequence in item.sequences)
    table = cost.estimate([experiment], tmp_path, device="cpu")
    seconds = 3 * (2 * data.tokens + dev / 3)
    assert table.rows == [
        ["v2.0", 3, 0, 12, data.tokens, time_text(seconds)],
        ["all", 3, 0, None, None, time_text(seconds)],
    ]
    assert table.note.startswith("At 1 training tokens per second")
    finished = tmp_path / "runs" / "v2.0" / "one"
    finished.mkdir(parents=True)
    (finished / "result.json").touch()
    monkeypatch.setattr(cost, "SAMPLED", 4)
    task = experiment.grid[0].task
    tokenizer, size = Tokenizer.load(place / "bert"), dict[str, float]()
    for split, count in (("train", 12), ("dev", 6)):
        first = [*task.read(str(place / "squad" / f"{split}-v2.0.json")).examples][:4]
        encoded = task.encode(first, tokenizer, (), 14)
        tokens = sum(len(sequence) for item in encoded for sequence in item.sequences)
        size[split] = tokens * count / 4
    seconds = 2 * (2 * size["train"] + size["dev"] / 3)
    table = cost.estimate([experiment], tmp_path, device="cpu")
    assert table.rows[0] == ["v2.0", 3, 1, 12, round(size["train"]), time_text(seconds)]


def test_restarts_start_at_configured_seed(place, tmp_path):
    overrides = (*PLENTY, "seed=5")
    request = request_of(place, "squad", tmp_path, overrides=overrides, tasks=("v1.1",), seeds=3)
    (experiment,) = benchmarks.squad_plan(request).experiments
    assert [run.settings.seed for run in runner.first_runs(experiment, tmp_path)] == [5, 6, 7]


def fake(name: str, value: float, **changes: Any) -> SweepOutcome:
    base = SweepOutcome(name, {"f1": value, "em": 0.5}, (), "f1", "highest", 1, 1.0)
    return dataclasses.replace(base, **changes)


def test_lower_metric_chooses_lowest_run(place, tmp_path, monkeypatch):
    real: Callable[..., FinetuneResult] = engine.finetune

    def failing(settings: FinetuneConfig, folder: Path, **options: Any) -> FinetuneResult:
        done = real(settings, folder, **options)
        return dataclasses.replace(done, failure=Failure(("it has failed",)))

    monkeypatch.setattr(engine, "finetune", failing)
    heard = Heard()
    request = request_of(place, "swag", tmp_path, seeds=2, overrides=(*PLENTY, "metric=loss"))
    assert reproduce("swag", request, device="cpu", progress=heard) is not None
    entry = json.loads((tmp_path / "results.json").read_text())["tasks"]["SWAG"]
    assert entry["metrics"]["loss"] == min(cell["metrics"]["loss"] for cell in entry["cells"])
    assert heard.text.count("failed: it has failed. Try") == 2
