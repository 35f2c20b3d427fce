"""Worker processes: results in order, few jobs in memory, failures told, nothing left behind."""

import functools
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from bothways.core.errors import ResourceError
from bothways.core.jobs.process_pool import map_in_order
from child_processes import alive, assert_they_end
from pool_jobs import die, die_once, fail, process_id, scaled, sleepy_id, slow_square


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order(workers):
    assert list(map_in_order(slow_square, range(10), workers)) == [n * n for n in range(10)]


def test_no_job_and_one_job_start_no_process():
    assert list(map_in_order(process_id, [], 3)) == []
    assert list(map_in_order(process_id, [0], 3)) == [os.getpid()]


def test_workers_import_modules_of_the_current_folder_as_the_parent_does(tmp_path, monkeypatch):
    """A module there does not stand for one of Python."""
    (tmp_path / "random.py").write_text("raise SystemExit('a module of the user')")
    (tmp_path / "of_the_user.py").write_text("def double(number): return 2 * number")
    monkeypatch.chdir(tmp_path)
    assert list(map_in_order(slow_square, range(3), 2)) == [0, 1, 4]
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    double = importlib.import_module("of_the_user").double
    assert list(map_in_order(double, range(3), 2)) == [0, 2, 4]


def test_large_jobs_and_results_do_not_block():
    jobs = [list(range(n, n + 300_000)) for n in range(4)]
    results = map_in_order(functools.partial(scaled, 3), jobs, 2)
    assert [result[:2] for result in results] == [[0, 3], [3, 6], [6, 9], [9, 12]]


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_are_taken_when_they_are_needed(workers):
    taken: list[int] = []

    def jobs() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = map_in_order(slow_square, jobs(), workers)
    for number in range(5):
        next(results)
        assert len(taken) <= number + workers + 2
    results.close()
    assert len(taken) <= 5 + workers + 2


def test_a_function_that_raises(capfd):
    with pytest.raises(RuntimeError, match="see its traceback above"):
        list(map_in_order(fail, range(5), 2))
    assert "ValueError: job" in capfd.readouterr().err


def test_a_worker_that_is_killed():
    with pytest.raises(ResourceError, match=r"was killed \(signal 9\)\n  .*use fewer workers"):
        list(map_in_order(die, range(5), 2))


def test_an_error_of_the_jobs_stops_the_workers():
    def jobs() -> Iterator[int]:
        yield from range(3)
        raise KeyError("no more jobs")

    with pytest.raises(KeyError):
        list(map_in_order(slow_square, jobs(), 2))


# A script without a main guard.
SCRIPT = """
from bothways.core.jobs.process_pool import map_in_order
import time
from pool_jobs import process_id
results = map_in_order(process_id, range(10**6), 2)
pids = set()
while len(pids) < 2:
    pids.add(next(results))
print(*pids, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is of Unix")
def test_workers_end_with_a_parent_that_is_killed():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.kill()
    assert_they_end(pids)


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is of Unix")
def test_no_worker_outlives_a_second_interrupt(monkeypatch):
    wait, left = subprocess.Popen.wait, [1]

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if threading.current_thread() is threading.main_thread() and left:
            left.clear()
            raise KeyboardInterrupt
        return wait(process, timeout)

    results = map_in_order(sleepy_id, range(10), 2)
    pids = {next(results), next(results)}
    assert len(pids) == 2
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.close()
    assert_they_end(pids)


def test_a_job_whose_worker_was_killed_is_begun_again(tmp_path):
    job = functools.partial(die_once, str(tmp_path / "died"))
    found = list(map_in_order(job, range(6), 2, attempts=2))
    assert [number for number, _ in found] == [*range(6)]
    assert {worker for _, worker in found} == {"0", "1"}
    with pytest.raises(ResourceError, match="a worker process was killed"):
        list(map_in_order(die, range(4), 2, attempts=2))
