"""What is sent to Weights & Biases and MLflow, by stand-ins for their packages."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bothways.core.errors import ResourceError
from bothways.training.trackers import HOSTED
from toy_training import TRAINING, metric_lines, session


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []

    def init(self, **options: Any) -> SimpleNamespace:
        run: dict[str, Any] = {**options, "logged": [], "finished": False}
        self.runs.append(run)
        return SimpleNamespace(
            log=lambda values, step: run["logged"].append((step, values)),
            finish=lambda: run.update(finished=True),
        )


class FakeClient:
    """MLflow's client, as far as it is used."""

    known: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"experiment {name}"

    def create_run(self, place: str, run_name: str) -> SimpleNamespace:
        key = f"id{len(self.known)}"
        self.known[key] = {
            "name": run_name,
            "place": place,
            "params": {},
            "metrics": [],
            "status": "",
        }
        return SimpleNamespace(info=SimpleNamespace(run_id=key))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        self.known[run]["params"].update(params)
        self.known[run]["metrics"].extend(metrics)

    def update_run(self, run: str, status: str) -> None:
        self.known[run]["status"] = status

    def set_terminated(self, run: str) -> None:
        self.known[run]["status"] = "FINISHED"


def sending(*kinds: str) -> Any:
    return dataclasses.replace(TRAINING, trackers=kinds)


def test_weights_and_biases_gets_each_record_and_a_resumed_run_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    session(tmp_path, 5, training=sending("wandb"))
    session(tmp_path, training=sending("wandb"))
    first, second = fake.runs
    assert first["id"] == second["id"]
    assert (first["name"], first["resume"], first["finished"]) == (tmp_path.name, "allow", True)
    assert first["config"] == {"model.dropout": 0.2, "betas": (0.9, 0.999)}
    sent = [{"step": step, **values} for step, values in first["logged"] + second["logged"]]
    assert sent == metric_lines(tmp_path)


def test_mlflow_gets_each_record_and_a_resumed_run_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeClient.known = {}
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric = lambda *values: values  # type: ignore[attr-defined]
    entities.Param = lambda *values: values  # type: ignore[attr-defined]
    tracking.MlflowClient = FakeClient  # type: ignore[attr-defined]
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    session(tmp_path, 5, training=sending("mlflow"))
    session(tmp_path, training=sending("mlflow"))
    (run,) = FakeClient.known.values()
    assert (run["name"], run["place"], run["status"]) == (
        tmp_path.name,
        "experiment bothways",
        "FINISHED",
    )
    assert run["params"]["model.dropout"] == "0.2"
    expected = [
        (name, value, record["step"])
        for record in metric_lines(tmp_path)
        for name, value in record.items()
        if name != "step"
    ]
    assert [(name, value, step) for name, value, _, step in run["metrics"]] == expected


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ResourceError, match=rf"bothways\[{kind}\]"):
        HOSTED[kind](tmp_path, {})
