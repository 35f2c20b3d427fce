"""Who runs the jobs of a long piece of work: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from typing_extensions import assert_never

from bothways.core.config.checks import require_at_least
from bothways.core.jobs.process_pool import map_in_order

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class LocalWorkers:
    """Processes of this machine.

    Attributes:
        processes: 1 computes in this process.
        threads: of each; None: all cores, divided by the processes.
    """

    processes: int = 1
    threads: int | None = None
    kind: Literal["local"] = "local"

    def __post_init__(self) -> None:
        require_at_least(1, processes=self.processes, threads=self.threads)


@dataclass(frozen=True)
class RayWorkers:
    """Actors of a Ray cluster.

    Attributes:
        address: of the cluster: "auto", "ray://HOST:10001", or "local" for a new one here.
        processes: number of actors; None: as many as the cluster has room for now.
        threads: processor cores of each.
    """

    address: str
    processes: int | None = None
    threads: int = 1
    kind: Literal["ray"] = "ray"

    def __post_init__(self) -> None:
        require_at_least(1, processes=self.processes, threads=self.threads)


Workers = LocalWorkers | RayWorkers


def map_jobs(
    function: Callable[[JobT], ResultT],
    jobs: Iterable[JobT],
    workers: Workers,
    *,
    attempts: int = 1,
    gpu: bool = False,
) -> Generator[ResultT]:
    """Yield the function's results: in the order of the jobs from processes, in any from a cluster.

    Jobs are taken from `jobs` as workers become free, so a bounded number of them is in memory.

    Args:
        attempts: how often a job is begun whose process is killed. A cluster begins it four times.
        gpu: whether each actor of a cluster that has GPUs takes one.

    Raises:
        ResourceError: a worker was killed, at the last attempt; no cluster, or it has no room.
    """
    match workers:
        case LocalWorkers(processes):
            yield from map_in_order(function, jobs, processes, attempts)
        case RayWorkers():
            from bothways.core.jobs.ray_pool import map_on_ray

            yield from map_on_ray(function, jobs, workers, gpu)
        case _:
            assert_never(workers)
