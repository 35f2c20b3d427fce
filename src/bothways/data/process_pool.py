"""One function over many jobs, in worker processes, with the results in order and a bounded number of jobs under way.

A worker is a fresh interpreter at the end of two pipes. So nothing is forked (the threads of other libraries do not survive a
fork, which is how data pipelines come to hang), the caller needs no `if __name__ == "__main__"`, notebooks work, and a worker
ends with its pipe, however its parent died.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from bothways.core.errors import ResourceError

J = TypeVar("J")
R = TypeVar("R")

# With -c the current folder comes first in sys.path, and a user's random.py there would stand for Python's.
_SERVE = "import sys; sys.path[:] = filter(None, sys.path); from bothways.data.process_pool import serve; serve()"


def usable_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(function: Callable[[J], R], jobs: Iterable[J], workers: int) -> Generator[R]:
    """The function's results, in the order of the jobs.

    Jobs are taken from `jobs` as workers get free: no more than `workers + 2` of them are in memory. One worker, or one
    job, means this process. The function must pickle, as one that can be imported does, or a `functools.partial` of it;
    jobs and results too.

    Raises:
        ResourceError: a worker was killed.
        RuntimeError: the function raised; the traceback of the worker goes to the standard error stream.
    """
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, 2))
    if workers == 1 or len(first) < 2:
        yield from map(function, itertools.chain(first, jobs))
        return
    crew: list[_Worker] = []
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def run(job: J) -> R:
        """In whichever worker is free."""
        worker = idle.get()  # there is one for each thread
        try:
            result: R = worker.run(job)
            return result
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(workers)
    pending: deque[Future[R]] = deque()
    try:
        for job in itertools.chain(first, jobs):
            if len(crew) < workers:
                crew.append(_Worker(function))
                idle.put(crew[-1])
            pending.append(threads.submit(run, job))
            if len(pending) == workers + 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in crew:
            worker.kill()
        threads.shutdown()


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        # A session of its own: Ctrl-C reaches the parent alone, which then ends its workers.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._first = pickle.dumps(function)

    def run(self, job: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(self._first)
            self._first = b""
            pickle.dump(job, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            if code > 0:
                raise RuntimeError("a worker process failed; its traceback stands above") from error
            fix = "If the system killed it for lack of memory, use fewer workers."
            raise ResourceError(f"a worker process was killed (signal {-code})", fix=fix) from error

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # of what a killed worker had not read
                pipe.close()


def serve() -> None:
    """The worker's end: reads the function, then jobs, until the pipe closes."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the replies
    received = _received()
    function = next(received, None)
    for job in received:
        result = function(job)
        try:
            pickle.dump(result, replies, protocol=pickle.HIGHEST_PROTOCOL)
            replies.flush()
        except BrokenPipeError:  # the parent is gone
            os._exit(0)


def _received() -> Iterator[Any]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(sys.stdin.buffer)
