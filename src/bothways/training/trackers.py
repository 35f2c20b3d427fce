"""Trackers of a run: metrics.jsonl and TensorBoard; a record as a line of text.

A record is a flat table of numbers, one of which is the step. Reports read `metrics.jsonl`, which
holds each step once, however often the run was stopped and resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from bothways.core import errors
from bothways.core.atomic_files import replace_text
from bothways.core.json_reader import parse_object
from bothways.training.durations import Duration
from bothways.training.meter import EvaluationScores, StepReport
from bothways.training.state import RunState

Record = Mapping[str, int | float]

_FIX = f"Make room, then {errors.AGAIN}: the checkpoints are whole."


def report_values(report: StepReport) -> dict[str, int | float]:
    """Return a report as a flat table, with keys such as "step" and "loss/NAME"."""
    return {
        **progress_values(report.progress),
        **score_values(report.scores),
        "gradient_norm": report.gradient_norm,
        "learning_rate": report.rate,
        **report.pace,
    }


def progress_values(progress: RunState) -> dict[str, int | float]:
    """Return the place of a record in the run."""
    return {
        "step": progress.steps,
        "tokens": progress.tokens,
        "epochs": progress.epochs,
        "seconds": progress.seconds,
    }


def score_values(scores: EvaluationScores, prefix: str = "") -> dict[str, float]:
    """Return scores as a flat table: "PREFIXloss/NAME" and "PREFIXaccuracy/NAME"."""
    losses = {f"{prefix}loss/{name}": value for name, value in scores.losses.items()}
    return losses | {f"{prefix}accuracy/{name}": value for name, value in scores.accuracies.items()}


@runtime_checkable
class Tracker(Protocol):
    """A receiver of records."""

    def write(self, record: Record) -> None:
        """Take one record: of training, with a "share" of the run in it, or of an evaluation."""
        ...

    def close(self) -> None:
        """Write what is held back."""
        ...


class JsonLines:
    """Appends one JSON object a line; a resumed run first drops the lines after its checkpoint.

    Raises:
        CheckpointError: the file is not UTF-8, or a line is not a record.
        ResourceError: the file cannot be written.
    """

    def __init__(self, file: Path, step: int) -> None:
        text = (
            "".join(line for line in _whole_lines(file) if _step(file, line) <= step)
            if step
            else ""
        )
        replace_text(file, text)
        self._file = file

    def write(self, record: Record) -> None:
        """Append a line."""
        with errors.os_errors(self._file, _FIX), self._file.open("a", encoding="utf8") as stream:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Do nothing: every line is written at once."""


def _whole_lines(file: Path) -> list[str]:
    """Return the lines of a file, without a last one that was cut by a kill."""
    try:
        text = file.read_text(encoding="utf8") if file.exists() else ""
    except UnicodeDecodeError as error:
        fix = "Move it away: the run continues with new records."
        raise errors.CheckpointError("is not UTF-8", where=file, fix=fix) from error
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise errors.ResourceError(
            message, where=file, fix=f"Look at the disk, then {errors.AGAIN}."
        ) from error
    # By "\n" alone: the name of a metric may hold other characters at which `splitlines` cuts.
    return [f"{line}\n" for line in text.split("\n")[:-1]]


def _step(file: Path, line: str) -> int:
    try:
        return int(parse_object(line, file)["step"])
    except (errors.BothwaysError, ValueError, KeyError, TypeError) as error:
        message = f"{line.strip()[:80]!r} is not a record of a run"
        raise errors.CheckpointError(message, where=file, fix="Delete that line.") from error


class TensorBoard:
    """Writes one event file a session; a resumed one has TensorBoard drop the steps it repeats."""

    def __init__(self, folder: Path, step: int) -> None:
        with errors.optional("tensorboard", "writing TensorBoard events"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder = folder
        with errors.os_errors(folder, _FIX):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = RecordWriter((folder / _next_name(folder)).open("wb"))
        self._put(Event(file_version="brain.Event:2"))
        if step:
            self._put(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: Record) -> None:
        """Append an event, with a scalar for each number."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name != "step"
        ]
        self._put(Event(step=int(record["step"]), summary=Summary(value=values)))

    def _put(self, event: Any) -> None:
        event.wall_time = time.time()
        with errors.os_errors(self._folder, _FIX):
            self._file.write(event.SerializeToString())
            self._file.flush()

    def close(self) -> None:
        """Close the event file."""
        with contextlib.suppress(OSError):  # of an event that could not be written, as was said
            self._file.close()


def _next_name(folder: Path) -> str:
    """Return a name for a new event file, after those that are there: TensorBoard reads by name.

    A clock that was set back would put it before them.
    """
    begun = [name.removeprefix(_EVENTS) for name in os.listdir(folder) if name.startswith(_EVENTS)]
    latest = max((float(each) for each in begun if _NUMBER.fullmatch(each)), default=0.0)
    return f"{_EVENTS}{max(time.time(), latest + 1):.6f}"


_EVENTS, _NUMBER = "events.out.tfevents.", re.compile(r"\d+(\.\d+)?")


def record_text(record: Record) -> str:
    """Return a record in words: the step, losses with accuracies, other metrics, speed.

    Metrics of single classes, such as "dev/f1/person", are in the file alone.
    """
    metrics = {
        name: value
        for name, value in record.items()
        if name not in _FORMS
        and name not in _NOT_SHOWN
        and (name.count("/") < 2 or "loss/" in name or "accuracy/" in name)
    }
    texts = [f"step {record['step']:,.0f}"]
    for name, value in metrics.items():
        accuracy = metrics.get(name.replace("loss/", "accuracy/"))
        if "loss/" in name:
            texts.append(
                f"{name.replace('loss/', '')} {value:.3f}"
                + (f" ({accuracy:.1%} right)" if accuracy is not None else "")
            )
        elif "accuracy/" not in name or name.replace("accuracy/", "loss/") not in metrics:
            texts.append(f"{name} {value:.3f}")
    return " · ".join(
        [*texts, *(form(record[name]) for name, form in _FORMS.items() if name in record)]
    )


_NOT_SHOWN = {"step", "tokens", "epochs", "seconds", "seconds_left", "share", "gemm_share"}
_FORMS: dict[str, Callable[[float], str]] = {
    "learning_rate": lambda value: f"rate {value:.2e}",
    "gradient_norm": lambda value: f"gradient {value:.2f}",
    "tokens_per_second": lambda value: f"{value:,.0f} tokens/s",
}


@dataclass(frozen=True)
class Peak:
    """The highest speed a run could have.

    Attributes:
        flops_per_token: of one step of training, forward and backward.
        flops_per_second: of matrix products on all devices together (`runtime.devices.gemm_rate`).
    """

    flops_per_token: float
    flops_per_second: float


class Speed:
    """Measures tokens a second and the time left over a sliding window, with evaluation and saving.

    Args:
        run: the duration of the whole run.
        peak: to compare with; None for no comparison.
        window: in seconds.
    """

    def __init__(self, run: Duration, peak: Peak | None = None, window: float = 60.0) -> None:
        self._run, self._peak, self._window = run, peak, window
        self._marks: deque[tuple[float, int, float]] = deque()

    def mark(self, progress: RunState) -> dict[str, float]:
        """Return "share" and, from the second call on, "tokens_per_second" and "seconds_left"."""
        self._marks.append((time.perf_counter(), progress.tokens, progress.share(self._run)))
        while len(self._marks) > 2 and self._marks[-1][0] - self._marks[0][0] > self._window:
            self._marks.popleft()
        (start, tokens, share), (end, tokens_now, share_now) = self._marks[0], self._marks[-1]
        result = {"share": share_now}
        if share_now > share:
            speed = (tokens_now - tokens) / (end - start)
            result["tokens_per_second"] = speed
            if self._peak:
                result["gemm_share"] = (
                    speed * self._peak.flops_per_token / self._peak.flops_per_second
                )
            result["seconds_left"] = max(0.0, 1 - share_now) * (end - start) / (share_now - share)
        return result


HostedTracker = Literal["wandb", "mlflow"]


class WeightsAndBiases:
    """Sends records to Weights & Biases.

    Args:
        folder: of the run.
        settings: in plain values, by dotted path.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        with errors.optional("wandb", "sending records to Weights & Biases"):
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
    """Sends records to MLflow; the arguments are those of `WeightsAndBiases`."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        with errors.optional("mlflow", "sending records to MLflow"):
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        self._metric, self._client = Metric, MlflowClient()

        def create() -> str:
            """Begin a run, and return its id."""
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "bothways")
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(name)
            )
            run_id: str = self._client.create_run(experiment_id, run_name=folder.name).info.run_id
            # MLflow takes at most 100 settings at a time, of 6,000 characters each.
            rows = [Param(key, str(value)[:6000]) for key, value in settings.items()]
            for start in range(0, len(rows), 100):
                self._client.log_batch(run_id, params=rows[start : start + 100])
            return run_id

        self._id = _kept_id(folder / ".mlflow-run", create)
        self._client.update_run(self._id, status="RUNNING")

    def write(self, record: Record) -> None:
        """Send a record."""
        milliseconds, step = int(time.time() * 1000), int(record["step"])
        values = [
            self._metric(name, float(value), milliseconds, step)
            for name, value in record.items()
            if name != "step"
        ]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        """End the run there; it can be resumed."""
        self._client.set_terminated(self._id)


HOSTED: Mapping[HostedTracker, Callable[[Path, dict[str, Any]], Tracker]] = {
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""By name, a function of a run's folder and settings; ResourceError if its package is absent."""


def _kept_id(file: Path, make: Callable[[], str]) -> str:
    """Return the id in a file; a new one is written there."""
    if not file.exists():
        file.write_text(make(), encoding="utf8")
    return file.read_text(encoding="utf8").strip()
