"""Processes that a test has started, as /proc knows them, and what some do in them.

Workers import this file: torch only where it is needed.
"""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from bothways.core import files


def children(pid: int) -> list[int]:
    """The processes that a process has started; none once it has ended."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(word) for word in text.split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # a zombie that nobody waits for is not alive
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def assert_they_end(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def killed_in_save(place: Path) -> None:
    """Save a model over itself, and be killed between two renames."""
    from bothways.hub.model_folder import load_model, save_model

    loaded, rename = load_model(place), Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith(files.HIDDEN):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.rename = killed
    save_model(place, loaded.model)


def measure_opening(folder: Path) -> None:
    """Write down the MiB that a process needs to open `model` after it has opened `small`."""
    from bothways.hub.model_folder import load_model

    def peak() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

    load_model(
        folder / "small"
    )  # reads the pages of libraries, of which a build with CUDA has more
    before = peak()
    load_model(folder / "model")
    (folder / "peak").write_text(str(peak() - before))
