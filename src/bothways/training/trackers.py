"""Where the records of a run are sent: `metrics.jsonl`, TensorBoard, Weights & Biases.

Reports read `metrics.jsonl`, which holds each step once, however often the run was stopped and
resumed.

`StepRecord` keeps what no repeat of a step can compute, the rate and the phase. Both follow from
the share of the run that is done, which is read from a clock where the length of the run is a time.
So they are written down before each step:

    steps.bin    16 bytes a step: the multiple of the peak rate (float64), the phase from 0 and the
                 number of ranks (uint32 each), little-endian

A repeat reads them (`pretraining.inspect_step`) and has no clock.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bothways.core import errors
from bothways.core.files import parse_object, read_utf8, replace_text
from bothways.core.terminal import write_stderr
from bothways.training.meter import Record
from bothways.training.schedules import RunState

_FIX = f"Make room, then {errors.AGAIN}: the checkpoints are whole."
_EVENTS, _NUMBER = "events.out.tfevents.", re.compile(r"\d+(\.\d+)?")

HostedTracker = Literal["wandb"]


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without a last one that was cut by a kill.

    Raises:
        CheckpointError: the file is not UTF-8, or a line is not a record.
        ResourceError: the file cannot be read.
    """
    fix = "Move it away: the run continues with new records."
    # By "\n" alone: the name of a metric may hold other characters at which `splitlines` cuts.
    *lines, tail = read_utf8(file, errors.CheckpointError, fix).split("\n")
    records = list[dict[str, Any]]()
    for line in (*lines, tail) if tail else lines:
        try:
            record = parse_object(line, file)
            int(record["step"])
        except (errors.BothwaysError, ValueError, KeyError, TypeError, OverflowError) as error:
            if len(records) == len(lines):
                write_stderr(f"note: {file}: skipped line {len(records) + 1}, which was cut")
                break
            message = f"{line.strip()[:80]!r} is not a record of a run"
            raise errors.CheckpointError(message, where=file, fix="Delete that line.") from error
        records.append(record)
    return records


class JsonLines:
    """Appends one JSON object a line; a resumed run first drops the lines after its checkpoint.

    Raises:
        CheckpointError, ResourceError: as `read_records`; or the file cannot be written.
    """

    def __init__(self, file: Path, step: int) -> None:
        records = read_records(file) if step and file.exists() else []
        replace_text(file, "".join(_line(r) for r in records if int(r["step"]) <= step))
        self._file = file

    def write(self, record: Record) -> None:
        """Append a line."""
        with errors.os_errors(self._file, _FIX), self._file.open("a", encoding="utf8") as stream:
            stream.write(_line(record))


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


class TensorBoard:
    """Writes one event file a session; a resumed one has TensorBoard drop the steps it repeats."""

    def __init__(self, folder: Path, step: int) -> None:
        with errors.optional("tensorboard", "writing TensorBoard events"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder = folder
        with errors.os_errors(folder, _FIX):
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files by name, and a clock may have been set back.
            begun = (name.removeprefix(_EVENTS) for name in os.listdir(folder))
            latest = max(
                (float(number) for number in begun if _NUMBER.fullmatch(number)), default=0.0
            )
            name = f"{_EVENTS}{max(time.time(), latest + 1):.6f}"
            self._file = RecordWriter((folder / name).open("wb"))
        self._put(Event(file_version="brain.Event:2"))
        if step:
            self._put(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: Record) -> None:
        """Append an event, with a scalar for each number."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [(name, value) for name, value in record.items() if name != "step"]
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
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


class WeightsAndBiases:
    """Sends records to Weights & Biases, where a resumed run continues the same one."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        with errors.optional("wandb", "sending records to Weights & Biases"):
            import wandb
        id_file = folder / ".wandb-run"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:16], encoding="utf8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bothways"),
            name=folder.name,
            id=id_file.read_text(encoding="utf8").strip(),
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


Tracker = JsonLines | TensorBoard | WeightsAndBiases
"""A receiver of records: of training, with a "share" of the run in them, or of an evaluation."""

STEPS = "steps.bin"
_ENTRY = np.dtype([("rate", "<f8"), ("phase", "<u4"), ("ranks", "<u4")])
StepEntries = NDArray[Any]
"""The entries of the steps of a run from the first on, with fields `rate`, `phase`, `ranks`."""


class StepRecord:
    """Appends an entry before each step; a resumed run first drops those after its checkpoint.

    Args:
        folder: of the run.
        step: of the checkpoint from which it continues. Steps before it that were not recorded
            have the rate NaN.
        ranks: of this session.

    Raises:
        ResourceError: the file cannot be written.
    """

    def __init__(self, folder: Path, step: int, ranks: int) -> None:
        self._file, self._ranks = folder / STEPS, ranks
        recorded = min(step, len(_read(self._file)))
        unknown = np.zeros(step - recorded, _ENTRY)
        unknown["rate"] = math.nan
        with errors.os_errors(self._file, _FIX):
            # Unbuffered: also the step at which a process is killed has its entry.
            self._stream = self._file.open("ab", buffering=0)
            self._stream.truncate(recorded * _ENTRY.itemsize)
            self._stream.write(unknown.tobytes())

    def note(self, state: RunState, rate: float) -> None:
        """Append the entry of the step that follows a state."""
        entry = np.array((rate, state.phase, self._ranks), _ENTRY)
        with errors.os_errors(self._file, _FIX):
            self._stream.write(entry.tobytes())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def recorded_steps(folder: Path) -> StepEntries:
    """Return the entries of a run's steps.

    Raises:
        CheckpointError: the run has no such record.
    """
    if not (folder / STEPS).is_file():
        message = f"has no record of its steps ({STEPS}): a version without it trained this run"
        fix = "Its steps cannot be repeated. Train it again to inspect one."
        raise errors.CheckpointError(message, where=folder, fix=fix)
    return _read(folder / STEPS)


def _read(file: Path) -> StepEntries:
    """Return the whole entries of a file, whose last one may have been cut by a kill."""
    content = file.read_bytes() if file.is_file() else b""
    return np.frombuffer(content, _ENTRY, len(content) // _ENTRY.itemsize)
