"""Processes that a test has started, as /proc knows them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # a zombie that nobody waits for is not alive
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def assert_they_end(pids: Iterable[int], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]
