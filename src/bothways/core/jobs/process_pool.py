"""One function over many jobs, in worker processes, with ordered results and bounded memory.

A worker is a fresh interpreter at the end of two pipes. So nothing is forked (other libraries'
threads do not survive a fork, which makes data pipelines hang), the caller needs no `if __name__
== "__main__"`, notebooks work, and a worker ends with its pipe, however its parent died.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from bothways.core.errors import ResourceError

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")

# With -c the current folder comes first in sys.path: a user's random.py there would replace
# Python's.
_SERVE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from bothways.core.jobs.process_pool import serve_jobs; serve_jobs()"
)


NUMBER = "BOTHWAYS_WORKER"
"""The environment variable that holds a worker's number, from 0 on."""


def map_in_order(
    function: Callable[[JobT], ResultT], jobs: Iterable[JobT], workers: int, attempts: int = 1
) -> Generator[ResultT]:
    """Yield the function's results in the order of the jobs.

    Jobs are taken from `jobs` as workers become free: at most `workers + 2` of them are in memory.
    With one worker, or one job, this process does the work. The function, jobs and results must
    pickle; a function does if it can be imported, or is a `functools.partial` of such a one.

    Args:
        attempts: how often a job is begun, each time in a new process, if its worker is killed.

    Raises:
        ResourceError: a worker was killed, at the last attempt.
        RuntimeError: the function raised; the worker's traceback goes to standard error.
    """
    jobs = iter(jobs)
    head = list(itertools.islice(jobs, 2))
    if workers == 1 or len(head) < 2:
        yield from map(function, itertools.chain(head, jobs))
        return
    pool: list[_Worker] = []
    idle: queue.SimpleQueue[int] = queue.SimpleQueue()
    ending = threading.Event()

    def run(job: JobT) -> ResultT:
        """Run a job in the next free worker; there are as many threads as workers."""
        number, left = idle.get(), attempts
        try:
            while True:
                try:
                    result: ResultT = pool[number].run(job)
                    return result
                except ResourceError:
                    left -= 1
                    if not left or ending.is_set():
                        raise
                    pool[number].close()
                    pool[number] = _Worker(function, number)
        finally:
            idle.put(number)

    threads = ThreadPoolExecutor(workers)
    pending: deque[Future[ResultT]] = deque()
    try:
        for job in itertools.chain(head, jobs):
            if len(pool) < workers:
                pool.append(_Worker(function, len(pool)))
                idle.put(len(pool) - 1)
            pending.append(threads.submit(run, job))
            if len(pending) == workers + 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        ending.set()
        with contextlib.ExitStack() as cleanup:  # in spite of a second Ctrl-C, all of it is done
            for number in range(len(pool)):  # one may have been replaced in the meantime
                cleanup.callback(lambda number=number: pool[number].close())
            cleanup.callback(threads.shutdown, cancel_futures=True)
            for worker in pool:  # all at once: it interrupts what follows
                worker.process.kill()


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, function: Callable[[Any], Any], number: int) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = os.environ | {
            "PYTHONPATH": path,
            "TOKENIZERS_PARALLELISM": "false",
            NUMBER: str(number),
        }
        # In a session of its own: Ctrl-C reaches only the parent, which then ends its workers.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._first = pickle.dumps(function)

    def run(self, job: Any) -> Any:
        """Send a job to the worker and return its result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(self._first)
            self._first = b""
            pickle.dump(job, self.process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self.process.stdin.flush()
            return pickle.load(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            code = self.process.wait()
            if code > 0:
                raise RuntimeError("a worker process failed; see its traceback above") from error
            fix = "If the system killed it for lack of memory, use fewer workers."
            raise ResourceError(f"a worker process was killed (signal {-code})", fix=fix) from error

    def close(self) -> None:
        """End the worker, and close its pipes."""
        try:
            self.process.kill()
            self.process.wait()
        finally:
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # the worker had not read everything
                    pipe.close()


def serve_jobs() -> None:
    """Run as a worker: read the function, then jobs, until the pipe closes."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed must not mix with the replies
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
