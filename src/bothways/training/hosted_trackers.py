"""Trackers that send the records of a run to Weights & Biases or MLflow.

The run's name there is that of its folder. A resumed run continues the same one, by an id that the
folder keeps. Where to send, and as whom, are variables of these programs: WANDB_PROJECT,
WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any, Literal

from typing_extensions import assert_never

from bothways.core.errors import optional
from bothways.training.trackers import Record, Tracker

HostedTracker = Literal["wandb", "mlflow"]


class WeightsAndBiases:
    """Sends records to Weights & Biases.

    Args:
        folder: of the run.
        settings: in plain values, by dotted path.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        with optional("wandb", "sending records to Weights & Biases"):
            import wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bothways"),
            name=folder.name,
            id=_kept_id(folder / ".wandb-run", lambda: uuid.uuid4().hex[:16]),
            resume="allow",
            dir=str(folder),
            config=settings,
        )

    def write(self, record: Record) -> None:
        """Send a record."""
        values = {name: value for name, value in record.items() if name != "step"}
        self._run.log(values, step=int(record["step"]))

    def close(self) -> None:
        """Send what is held back."""
        self._run.finish()


class MLflow:
    """Sends records to MLflow.

    Args:
        folder: of the run.
        settings: in plain values, by dotted path.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        with optional("mlflow", "sending records to MLflow"):
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        self._metric, self._client = Metric, MlflowClient()

        def create() -> str:
            """Begin a run, and return its id."""
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "bothways")
            known = self._client.get_experiment_by_name(name)
            place = known.experiment_id if known else self._client.create_experiment(name)
            made: str = self._client.create_run(place, run_name=folder.name).info.run_id
            # MLflow takes at most 100 settings at a time, of 6,000 characters each.
            rows = [Param(key, str(value)[:6000]) for key, value in settings.items()]
            for start in range(0, len(rows), 100):
                self._client.log_batch(made, params=rows[start : start + 100])
            return made

        self._id = _kept_id(folder / ".mlflow-run", create)
        self._client.update_run(self._id, status="RUNNING")

    def write(self, record: Record) -> None:
        """Send a record."""
        now, step = int(time.time() * 1000), int(record["step"])
        values = [
            self._metric(name, float(value), now, step)
            for name, value in record.items()
            if name != "step"
        ]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        """End the run there; it can be resumed."""
        self._client.set_terminated(self._id)


def open_hosted(kind: HostedTracker, folder: Path, settings: dict[str, Any]) -> Tracker:
    """Return a tracker; ResourceError if its package is not installed."""
    match kind:
        case "wandb":
            return WeightsAndBiases(folder, settings)
        case "mlflow":
            return MLflow(folder, settings)
        case _:
            assert_never(kind)


def _kept_id(file: Path, make: Any) -> str:
    """Return the id in a file; a new one is written there."""
    if not file.exists():
        file.write_text(make(), encoding="utf8")
    return file.read_text(encoding="utf8").strip()
