"""Several processes that answer on one socket, each on cores of its own, and the one above them.

The process above binds the socket, starts the others, passes signals on, and starts a process again
that has ended by itself. It opens no model. The kernel gives a connection to a process that waits
for one. Metrics are counted together, in files that all processes map.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from bothways.core.errors import BothwaysError, ConfigError, ResourceError
from bothways.serving.deployment import Deployment, events_log
from bothways.serving.metrics import SHARED
from bothways.serving.run import announce, logged_as_json, serve

LONG_RUN = 60.0
"""Seconds after which the end of a process is no longer counted as a failed start."""
MOST_FAILURES = 5
"""Failed starts in a row after which the server ends."""


@dataclass(eq=False)
class _Worker:
    """A process, the cores that it may use, and the pipe by which it says that it answers."""

    number: int
    cores: list[int]
    process: SpawnProcess
    pipe: Connection
    started: float
    failures: int = 0
    opened: bool = False


def pinned_cores(workers: int, threads: int | None) -> list[list[int]]:
    """Return the cores of each process, neighbours next to each other.

    Args:
        workers: processes.
        threads: of each; None for an equal share of the cores.

    Raises:
        ConfigError: the machine has fewer cores, or this process may use fewer.
    """
    cores = sorted(_usable())
    each = threads or max(1, len(cores) // workers)
    if workers * each > len(cores):
        what = f"{workers} workers of {each} threads need {workers * each} cores"
        fix = "Set workers × threads to at most the number of cores."
        raise ConfigError(f"{what}, and there are {len(cores)}", where="workers", fix=fix)
    return [cores[n * each : (n + 1) * each] for n in range(workers)]


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _work(deployment: Deployment, bound: socket.socket, pipe: Connection, cores: list[int]) -> None:
    """Answer requests: what a process below does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the process above decides
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    try:
        application = deployment.app()
        opened = functools.partial(_say, pipe)
        serve(application, bound, deployment, opened=opened, parent=pipe)
    except BothwaysError as error:
        _say(pipe, error)


def _say(pipe: Connection, error: BothwaysError | None = None) -> None:
    """Report to the process above, unless it has ended, that this one answers, or why it cannot."""
    said = None
    if error is not None:
        where = None if error.where is None else os.fspath(error.where)
        said = type(error), error.what, where, error.fix
    with contextlib.suppress(BrokenPipeError):
        pipe.send(said)


class Workers:
    """The process above.

    Args:
        deployment: what each process serves; its limits are those of a process.
        bound: the socket.
        cores: of each process.
        opened: called once when all processes have opened their models.
    """

    def __init__(
        self,
        deployment: Deployment,
        bound: socket.socket,
        cores: list[list[int]],
        opened: Callable[[], None],
    ) -> None:
        self._deployment, self._bound, self._cores = deployment, bound, cores
        self._opened = opened
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._signals: list[int] = []
        self._stopping: float | None = None

    def run(self) -> None:
        """Serve until a signal ends it.

        Raises:
            BothwaysError: the first process cannot open the models.
            ResourceError: processes have ended again and again.
        """
        with tempfile.TemporaryDirectory(prefix="bothways-") as folder, self._handled():
            os.environ[SHARED] = folder
            os.environ["OMP_NUM_THREADS"] = str(len(self._cores[0]))
            try:
                self._begin()
                while self._workers:
                    self._look(Path(folder))
            finally:
                for worker in self._workers:
                    worker.process.kill()
                    worker.process.join()
                del os.environ[SHARED]

    def _begin(self) -> None:
        """Start the processes; the first alone, so that a mistake is one message."""
        for number, cores in enumerate(self._cores):
            self._workers.append(self._start(number, cores))
            if number == 0:
                self._await(self._workers[0])
        for worker in self._workers[1:]:
            self._await(worker)
        if not self._signals:
            self._opened()

    def _start(self, number: int, cores: list[int], failures: int = 0) -> _Worker:
        pipe, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work,
            args=(self._deployment, self._bound, theirs, cores),
            name=f"bothways-{number}",
            daemon=True,
        )
        # A SIGHUP waits until the server handles it: what was read before it may be out of date.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        process.start()  # it inherits the mask
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return _Worker(number, cores, process, pipe, time.monotonic(), failures)

    def _await(self, worker: _Worker) -> None:
        """Return when a process has opened its models; raise what it failed by."""
        while not worker.pipe.poll(0.1):
            if self._signals:
                return
        if (failure := _heard(worker)) is not None:
            raise failure

    def _look(self, folder: Path) -> None:
        """Pass signals on, and start processes again that have ended."""
        wait([worker.process.sentinel for worker in self._workers], timeout=0.2)
        while self._signals:
            self._pass_on(self._signals.pop(0))
        for worker in self._workers:
            if not worker.opened and worker.pipe.poll():
                failure = _heard(worker)
                if failure is not None:
                    events_log.info({"event": "worker", "message": str(failure)})
        for worker in [worker for worker in self._workers if not worker.process.is_alive()]:
            self._workers.remove(worker)
            worker.process.join()
            _forget(worker, folder)
            if self._stopping is None:
                self._replace(worker)
        limit = self._deployment.delay + self._deployment.limits.drain_seconds + 10
        if self._stopping is not None and time.monotonic() > self._stopping + limit:
            for worker in self._workers:
                worker.process.kill()

    def _replace(self, worker: _Worker) -> None:
        short = time.monotonic() - worker.started < LONG_RUN
        failures = worker.failures + 1 if short else 0
        line = {"event": "worker", "number": worker.number, "status": worker.process.exitcode}
        events_log.info({**line, "failures": failures})
        if failures >= MOST_FAILURES:
            what = f"a process has ended {failures} times, last with {worker.process.exitcode}"
            raise ResourceError(what, where="workers", fix="The log above has the reason.")
        time.sleep(min(2.0, 0.1 * 2**failures))
        self._workers.append(self._start(worker.number, worker.cores, failures))

    def _pass_on(self, number: int) -> None:
        if number != signal.SIGHUP:
            number = signal.SIGTERM
            self._stopping = self._stopping or time.monotonic()
            # Else clients would connect to it, and wait in vain, once the processes below stop.
            self._bound.close()
        for worker in self._workers:
            if worker.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, number)

    @contextlib.contextmanager
    def _handled(self) -> Iterator[None]:
        """Collect signals, and restore what was done with them."""

        def keep(number: int, frame: FrameType | None) -> None:
            """Note a signal for the loop."""
            self._signals.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, keep) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _heard(worker: _Worker) -> BothwaysError | None:
    """Return why a process cannot answer; None if it has opened its models."""
    try:
        failure = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        what = f"a process ended with status {worker.process.exitcode} at its start"
        return ResourceError(what, where="workers")
    if failure is None:
        worker.opened = True
        return None
    kind, what, where, fix = failure
    result: BothwaysError = kind(what, where=where, fix=fix)
    return result


def _forget(worker: _Worker, folder: Path) -> None:
    """Leave the gauges of a process out that has ended; its counters stay."""
    from prometheus_client.multiprocess import mark_process_dead

    worker.pipe.close()
    mark_process_dead(worker.process.pid, str(folder))  # type: ignore[no-untyped-call]


def serve_by(
    deployment: Deployment, bound: socket.socket, cores: list[list[int]], banner: str
) -> None:
    """Serve by several processes, and print a line when they answer; errors as `Workers.run`."""

    def opened() -> None:
        """Print the line."""
        announce(banner)

    with logged_as_json(requests=deployment.requests):
        Workers(deployment, bound, cores, opened).run()
