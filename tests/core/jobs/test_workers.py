"""Jobs on a cluster: what is asked of Ray, few jobs in flight, errors told. `make ray` has the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.jobs import ray_pool
from bothways.core.jobs.ray_pool import IN_FLIGHT
from bothways.core.jobs.workers import LocalWorkers, RayWorkers, Workers, map_jobs
from stand_in_ray import ActorUnavailableError, stand_in


def square(number: int) -> int:
    if number == 13:
        raise DataError("is 13", where="jobs")
    if number == 14:
        raise ValueError("is 14")
    return number * number


@pytest.mark.parametrize(
    "workers", [LocalWorkers(), LocalWorkers(2), RayWorkers("auto"), RayWorkers("local", 3)]
)
def test_who_runs_the_jobs_does_not_change_the_results(
    monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    stand_in(monkeypatch)
    assert sorted(map_jobs(square, range(9), workers)) == [n * n for n in range(9)]


@pytest.mark.parametrize(
    ("asked", "gpu", "actors", "address"),
    [
        (RayWorkers("local"), False, 8, None),
        (RayWorkers("auto", threads=3), False, 2, "auto"),
        (RayWorkers("auto"), True, 2, "auto"),
        (RayWorkers("auto", processes=5), True, 5, "auto"),
    ],
)
def test_a_cluster_is_filled_and_left(
    monkeypatch: pytest.MonkeyPatch, asked: RayWorkers, gpu: bool, actors: int, address: str | None
) -> None:
    ray, taken = stand_in(monkeypatch, cores=8, gpus=2), list[int]()

    def jobs() -> Iterator[int]:
        for number in range(100, 200):
            taken.append(number)
            yield number

    results = map_jobs(square, jobs(), asked, gpu=gpu)
    next(results)
    assert (ray.actors, ray.addresses) == (actors, [address])
    assert len(taken) == IN_FLIGHT * actors + 1, "the others wait"
    assert (ray.options["num_cpus"], ray.options["num_gpus"]) == (asked.threads, int(gpu))
    assert ray.connected
    results.close()
    assert ray.killed == ray.actors
    assert not ray.connected


def test_a_connection_that_exists_is_used_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = stand_in(monkeypatch)
    ray.connected = True
    assert list(map_jobs(square, [3], RayWorkers("ray://elsewhere:1"))) == [9]
    assert ray.connected
    assert ray.addresses == []


def test_what_goes_wrong_on_a_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = stand_in(monkeypatch)
    with pytest.raises(DataError, match="jobs: is 13"):
        list(map_jobs(square, range(10, 20), RayWorkers("auto")))
    with pytest.raises(ResourceError, match="a job failed on the cluster: a task failed"):
        list(map_jobs(square, [14], RayWorkers("auto")))
    assert not ray.connected
    with pytest.raises(ResourceError, match="no Ray cluster: nobody answers\n"):
        list(map_jobs(square, [1], RayWorkers("ray://nowhere:1")))
    monkeypatch.setattr(ray_pool, "PATIENCE", 0)
    with pytest.raises(ResourceError, match="no room for an actor with 3 cores and 0 GPUs"):
        list(map_jobs(square, [1], RayWorkers("auto", threads=3)))
    with pytest.raises(ConfigError, match="processes: must be at least 1, not 0"):
        RayWorkers("auto", 0)


def test_an_actor_that_cannot_be_reached_gets_its_job_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(ray_pool, "PAUSE", 0)
    run, failures = ray_pool._Actor.run, [2, 5]  # of the calls with these numbers

    calls = iter(range(1000))

    def unreachable(*given: Any) -> Any:
        if next(calls) in failures:
            raise ActorUnavailableError("the machine does not answer")
        return run(*given)

    monkeypatch.setattr(ray_pool._Actor, "run", unreachable)
    assert sorted(map_jobs(square, range(9), RayWorkers("auto"))) == [n * n for n in range(9)]
    failures[:] = range(1000)
    monkeypatch.setattr(ray_pool, "UNREACHABLE", 0.05)
    with pytest.raises(ResourceError, match="on the cluster: the machine does not answer"):
        list(map_jobs(square, [1], RayWorkers("auto")))
