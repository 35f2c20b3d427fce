"""A Ray cluster of two machines in one, and a worker of it that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heard_progress import Heard

MARKS = [
    pytest.mark.skipif(
        os.environ.get("BOTHWAYS_TEST_RAY") != "1", reason="starts a Ray cluster: run make ray"
    ),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@contextlib.contextmanager
def two_machines() -> Iterator[Any]:
    """Yield Ray's cluster of two nodes of one core each; this process is connected to it."""
    import ray
    from ray.cluster_utils import Cluster

    source = str(Path(__file__).parents[2] / "src")
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    size = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    try:
        cluster.add_node(**size)
        ray.init(
            cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}
        )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Killing(Heard):
    """Kills a worker process of the cluster after some jobs."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.killed = after, 0

    def advance(self, done: float | int, note: str | None = None) -> None:
        super().advance(done, note)
        self.after -= 1
        if self.after == 0:
            self.killed = actor_processes()[0]
            os.kill(self.killed, signal.SIGKILL)


def actor_processes() -> list[int]:
    """Return the processes of this session that are actors of the library."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            title = (place / "cmdline").read_bytes() if place.name.isdecimal() else b""
        except OSError:
            continue
        if title.startswith(b"ray::_Actor"):
            found.append(int(place.name))
    return sorted(found)
