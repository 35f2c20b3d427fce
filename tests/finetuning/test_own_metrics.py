"""Metrics of a user's own: in every evaluation, in the result, and as what chooses the best weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bothways
from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError
from bothways.finetuning.config import FinetuneConfig
from toy_folder import make_rows
from toy_training import metric_lines


def share_of_right(predictions: list[Any], examples: list[Any]) -> float:
    pairs = zip(predictions, examples, strict=True)
    return sum(prediction.label == example.label for prediction, example in pairs) / len(examples)


def run(model: Path, **settings: Any) -> Any:
    rows = make_rows(60, 0)
    return bothways.finetune(
        model, rows, dev=rows[:20], epochs=3, lr=3e-3, batch_size=16, device="cpu", **settings
    )


def test_a_function_with_other_parameters_is_refused_before_the_run(model):
    with pytest.raises(ConfigError, match=r"metrics\.mine: its function cannot be called"):
        run(model, metrics={"mine": lambda predictions: 0.5})
    assert run(model, metrics={"mine": lambda *both: 0.5}).metrics["mine"] == 0.5


def test_a_function_is_in_every_evaluation_and_in_the_result(model, tmp_path):
    events: list[Any] = []
    done = run(
        model, on_event=events.append, out=tmp_path / "run", metrics={"right": share_of_right}
    )
    values = [event.values for event in events if event.kind == "evaluation"]
    assert len(values) == 3
    assert [each["dev/right"] for each in values] == [each["dev/accuracy"] for each in values]
    assert [metrics["right"] for _, metrics in done.history] == [v["dev/right"] for v in values]
    assert done.metrics["right"] == done.metrics["accuracy"]
    assert sum("dev/right" in line for line in metric_lines(tmp_path / "run")) == 3
    record = json.loads((tmp_path / "run" / "model" / "bothways.json").read_text())
    assert record["metrics"]["right"] == done.metrics["right"]
    assert record["settings"]["metrics"] == {"right": f"{__name__}.share_of_right"}


def test_a_metric_chooses_the_best_weights_in_its_direction(model):
    losses = [metrics["loss"] for _, metrics in run(model).history]
    for better, best in (("highest", 2), ("lowest", 0)):
        count = iter(range(100))
        numbers = bothways.Metric(lambda predictions, examples, count=count: next(count), better)
        done = run(model, metrics={"number": numbers}, metric="number")
        assert done.metrics["loss"] == pytest.approx(losses[best])
        assert done.metrics["number"] == 3


def test_a_function_may_return_several_numbers_of_which_one_chooses(model):
    def by_label(predictions: list[Any], examples: list[Any]) -> dict[str, Any]:
        return {"first": torch.tensor(0.5), "second": 1}

    done = run(model, metrics={"mine": by_label}, metric="mine/second")
    assert (done.metrics["mine/first"], done.metrics["mine/second"]) == (0.5, 1.0)
    with pytest.raises(ConfigError, match="metric: 'mine/third' is not among the metrics"):
        run(model, metrics={"mine": by_label}, metric="mine/third")


def test_a_metric_ends_a_run_early(model):
    constant = {"constant": lambda predictions, examples: 1.0}
    done = run(model, metrics=constant, metric="constant", early_stopping=1)
    assert done.progress.early
    assert len(done.history) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": {"x": lambda p, e: "high"}}, r"metrics\.x: its function returned 'high'"),
        ({"metrics": {"x": lambda p, e: {"a": None}}}, r"metrics\.x: its function returned None"),
        ({"metrics": [share_of_right]}, r"metrics: is of type list\n.*a dict of functions by name"),
        ({"metrics": {"x": 3}}, r"metrics\.x: 3 is not a function"),
        ({"metrics": {"x": bothways.Metric(3)}}, r"metrics\.x: 3 is not a function"),
        ({"metrics": {"x": lambda p, e: 10**400}}, r"metrics\.x: its function returned 1000"),
        ({"metrics": {"accuracy": share_of_right}}, r"metrics\.accuracy: .*a metric of the task"),
        ({"metrics": {"x": share_of_right}, "metric": "y"}, r"metric 'y': .*one of x, accuracy"),
    ],
)
def test_a_mistake_is_one_message(model, settings, message):
    with pytest.raises(ConfigError, match=message):
        run(model, **settings)


def test_metrics_need_dev_data_and_are_given_in_python_only():
    with pytest.raises(ConfigError, match="metrics: are of dev data"):
        FinetuneConfig(model="m", train="t", metrics={"x": share_of_right})
    metric = bothways.Metric(share_of_right)
    object.__setattr__(metric, "better", "up")
    with pytest.raises(ConfigError, match=r'metrics\.x: better must be "highest" or "lowest"'):
        FinetuneConfig(model="m", train="t", dev="d", metrics={"x": metric})
    with pytest.raises(ConfigError, match="metrics: 'kappa' is given, but it must be none"):
        configs.load(FinetuneConfig, overrides=["model=m", "train=t", "metrics=kappa"])
