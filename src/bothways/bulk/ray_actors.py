"""Bulk prediction on a Ray cluster: actors that open the model once and compute parts.

Ray restarts an actor that dies, on another machine if need be, and repeats its part. The parts go
through Ray's object store in both directions, so the actors share no folder with this process.

Source: Ray's documentation of fault tolerance for actors (`max_restarts`, `max_task_retries`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bothways.bulk.parts import PartFailure, PartJob, PartResult
from bothways.bulk.request import RayWorkers
from bothways.bulk.worker import PartWorker
from bothways.core.errors import ResourceError, optional

IN_FLIGHT = 2
"""Parts that an actor has at once: one at work, the next one waiting."""
RETRIES = 3
"""How often a part is repeated whose actor died."""


def map_on_ray(
    worker: PartWorker, jobs: Iterable[PartJob], cluster: RayWorkers
) -> Iterator[PartResult | PartFailure]:
    """Yield the results of the parts as they come, with a bounded number of them in flight.

    A connection that exists is used and stays; otherwise one is made and closed at the end.

    Raises:
        ResourceError: Ray is not installed, the cluster cannot be reached or has no room, or a
            part's actors died repeatedly.
    """
    with optional("ray", "prediction on a cluster"):
        import ray

    own = not ray.is_initialized()
    if own:
        _connect(cluster.address)
    try:
        gpus = _gpus(worker, ray.cluster_resources())
        count = cluster.processes or _room(ray.available_resources(), cluster.threads, gpus)
        actor = ray.remote(
            num_cpus=cluster.threads, num_gpus=gpus, max_restarts=-1, max_task_retries=RETRIES
        )(_Actor)
        yield from _dispatch([actor.remote(worker) for _ in range(count)], jobs)
    finally:
        if own:
            ray.shutdown()


def _dispatch(actors: list[Any], jobs: Iterable[PartJob]) -> Iterator[PartResult | PartFailure]:
    """Give each actor parts as it becomes free, and yield what comes back."""
    import ray

    waiting, jobs = dict[Any, int](), iter(jobs)
    free = [number for _ in range(IN_FLIGHT) for number in range(len(actors))]
    job = next(jobs, None)
    while job is not None or waiting:
        while job is not None and free:
            number = free.pop(0)
            waiting[actors[number].predict.remote(job)] = number
            job = next(jobs, None)
        [ready], _ = ray.wait([*waiting], num_returns=1)
        free.append(waiting.pop(ready))
        try:
            result = ray.get(ready)
        except ray.exceptions.RayError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            fix = "See Ray's log. If memory ran out, use fewer processes or shorter parts (--rows)."
            raise ResourceError(f"a part failed on the cluster: {reason}", fix=fix) from error
        yield result


class _Actor:
    """One process of the cluster."""

    def __init__(self, worker: PartWorker) -> None:
        self.worker = worker

    def predict(self, job: PartJob) -> PartResult | PartFailure:
        """Return a part's content."""
        return self.worker(job)


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


def _gpus(worker: PartWorker, resources: dict[str, float]) -> int:
    """Return the GPUs of an actor: one where the cluster has some, unless a CPU is asked for."""
    return int(worker.request.device != "cpu" and resources.get("GPU", 0) > 0)


def _room(free: dict[str, float], threads: int, gpus: int) -> int:
    """Return how many actors the cluster has room for now."""
    count = int(free.get("CPU", 0)) // threads
    count = min(count, int(free.get("GPU", 0))) if gpus else count
    if count < 1:
        what = f"the cluster has no room for an actor with {threads} cores and {gpus} GPUs"
        raise ResourceError(what, where="ray", fix="Use fewer threads, or wait until it is free.")
    return count
