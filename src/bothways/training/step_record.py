"""What a run decided at each step and no repeat of it can compute: the rate and the phase.

Both follow from the share of the run that is done, which is read from a clock where the length of
the run is a time. So they are written down before each step:

    steps.bin    16 bytes a step: the multiple of the peak rate (float64), the phase from 0 and the
                 number of ranks (uint32 each), little-endian

A repeat reads them (`pretraining.inspect_step`) and has no clock.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import AGAIN, CheckpointError, os_errors
from bothways.training.schedules import RunState

STEPS = "steps.bin"
_ENTRY = np.dtype([("rate", "<f8"), ("phase", "<u4"), ("ranks", "<u4")])
_FIX = f"Make room, then {AGAIN}: the checkpoints are whole."

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
        with os_errors(self._file, _FIX):
            # Unbuffered: also the step at which a process is killed has its entry.
            self._stream = self._file.open("ab", buffering=0)
            self._stream.truncate(recorded * _ENTRY.itemsize)
            self._stream.write(unknown.tobytes())

    def note(self, state: RunState, rate: float) -> None:
        """Append the entry of the step that follows a state."""
        entry = np.array((rate, state.phase, self._ranks), _ENTRY)
        with os_errors(self._file, _FIX):
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
        raise CheckpointError(message, where=folder, fix=fix)
    return _read(folder / STEPS)


def _read(file: Path) -> StepEntries:
    """Return the whole entries of a file, whose last one may have been cut by a kill."""
    content = file.read_bytes() if file.is_file() else b""
    return np.frombuffer(content, _ENTRY, len(content) // _ENTRY.itemsize)
