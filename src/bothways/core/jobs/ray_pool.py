"""One function over many jobs on a Ray cluster: actors that hold the function.

Ray restarts an actor that dies, on another machine if need be, and repeats its job. A machine that
vanishes is not known to be dead for half a minute, in which calls of its actors fail: these are
made again. Jobs and results go through Ray's object store, so the actors share no folder with this
process.

Source: Ray's documentation of fault tolerance for actors (`max_restarts`, `max_task_retries`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from bothways.core.errors import BothwaysError, ResourceError, optional

if TYPE_CHECKING:
    from bothways.core.jobs.workers import RayWorkers

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")

IN_FLIGHT = 2
"""Jobs that an actor has at once: one at work, the next one waiting."""
PATIENCE = 5.0
"""Seconds that a full cluster is given to become free."""
RETRIES = 3
"""How often a job is repeated whose actor died."""
UNREACHABLE = 120.0
"""Seconds for which a job is given again to an actor that cannot be reached."""
PAUSE = 1.0
"""Seconds before it is given again."""


def map_on_ray(
    function: Callable[[JobT], ResultT],
    jobs: Iterable[JobT],
    cluster: RayWorkers,
    gpu: bool = False,
) -> Generator[ResultT]:
    """Yield the results of the jobs as they come, with a bounded number of them in flight.

    A connection that exists is used and stays; otherwise one is made and closed at the end.

    Args:
        gpu: whether each actor takes a GPU, where the cluster has some.

    Raises:
        ResourceError: Ray is not installed, the cluster cannot be reached or has no room, or a
            job's actors died repeatedly.
        BothwaysError: the function raised it.
    """
    with optional("ray", "work on a cluster"):
        import ray

    connects = not ray.is_initialized()
    if connects:
        _connect(cluster.address)
    try:
        gpus = int(gpu and ray.cluster_resources().get("GPU", 0) > 0)
        count = cluster.processes or _room(cluster.threads, gpus)
        actor = ray.remote(
            num_cpus=cluster.threads, num_gpus=gpus, max_restarts=-1, max_task_retries=RETRIES
        )(_Actor)
        actors = [actor.remote() for _ in range(count)]
        try:
            yield from _dispatch(actors, ray.put(function), jobs)
        finally:
            for handle in actors:
                ray.kill(handle)
    finally:
        if connects:
            ray.shutdown()


def _dispatch(actors: list[Any], function: Any, jobs: Iterable[Any]) -> Generator[Any]:
    """Give each actor jobs as it becomes free, and yield what comes back."""
    import ray

    # The job and the actor of each call, and the time when the actor was first unreachable.
    waiting, jobs = dict[Any, tuple[Any, int, float | None]](), iter(jobs)

    def give(job: Any, number: int, since: float | None = None) -> None:
        waiting[actors[number].run.remote([function], job)] = (job, number, since)

    free = [number for _ in range(IN_FLIGHT) for number in range(len(actors))]
    job = next(jobs, None)
    while job is not None or waiting:
        while job is not None and free:
            give(job, free.pop(0))
            job = next(jobs, None)
        [ready], _ = ray.wait([*waiting], num_returns=1)
        assigned, number, since = waiting.pop(ready)
        try:
            result = ray.get(ready)
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.ActorUnavailableError):
                since = since or time.monotonic()
                if time.monotonic() - since < UNREACHABLE:
                    time.sleep(PAUSE)
                    give(assigned, number, since)
                    continue
            raise _failed(error) from error
        free.append(number)
        del ready  # the object store keeps a result while a reference to it exists
        yield result


def _failed(error: Exception) -> BothwaysError:
    """Return the exception of the function, or the failure of a job on the cluster."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BothwaysError):
        return cause
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    fix = "See Ray's log. If memory ran out, use fewer or smaller workers."
    return ResourceError(f"a job failed on the cluster: {reason}", fix=fix)


class _Actor:
    """One process of the cluster."""

    def __init__(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # an actor has the cores it asked for
        self.function: Callable[[Any], Any] | None = None

    def run(self, reference: list[Any], job: Any) -> Any:
        """Return the function's result for a job; the function is fetched once.

        As an argument of the constructor it would be fetched again only as long as Ray keeps it,
        when Ray restarts the actor; in a list it is not fetched for each job.
        """
        if self.function is None:
            import ray

            self.function = ray.get(reference[0])
        assert self.function is not None
        return self.function(job)


def _connect(address: str) -> None:
    import ray

    try:
        ray.init(
            None if address == "local" else address, log_to_driver=False, logging_level="ERROR",
            **({"include_dashboard": False} if address == "local" else {}),
        )  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fix = 'Start one with "ray start --head", or write --ray local for one on this machine.'
        raise ResourceError(f"no Ray cluster: {reason}", where=address, fix=fix) from error


def _room(threads: int, gpus: int) -> int:
    """Return the number of actors that fit the cluster, at the latest after `PATIENCE` seconds."""
    import ray

    end = time.monotonic() + PATIENCE
    while True:
        free = ray.available_resources()
        count = int(free.get("CPU", 0)) // threads
        count = min(count, int(free.get("GPU", 0))) if gpus else count
        if count:
            return count
        if time.monotonic() > end:
            message = f"the cluster has no room for an actor with {threads} cores and {gpus} GPUs"
            fix = "Use fewer threads, or wait until it is free."
            raise ResourceError(message, where="ray", fix=fix)
        time.sleep(0.2)  # actors that have ended leave their cores after a moment
