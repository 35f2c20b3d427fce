"""What is sent to Weights & Biases, by a stand-in for its package."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bothways.core.errors import ResourceError
from bothways.training.trackers import WeightsAndBiases
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


def sending(*kinds: str) -> Any:
    return dataclasses.replace(TRAINING, trackers=kinds)


def test_weights_and_biases_gets_each_record_and_a_resumed_run_is_the_same_one(
    tmp_path, monkeypatch
):
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


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ResourceError, match=r"bothways\[wandb\]"):
        WeightsAndBiases(tmp_path, {})
