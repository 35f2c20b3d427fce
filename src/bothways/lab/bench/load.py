"""Load for a server on this machine: clients that wait for answers, and arrivals that do not wait.

Clients that wait for each answer (a closed loop) find how much a server does; they ask less as soon
as it is slow. Arrivals at random times, a Poisson process (an open loop), show what users see:
requests queue up whether the server is ready for them or not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bothways.core.errors import ResourceError

_LENGTH = b"content-length: "
_TOKENS = b"x-compute-tokens: "
_CLOSE = b"connection: close"
_REFUSAL = 300
"""Bytes of a refusal that are kept."""
_OK = 200
MOST_CONNECTIONS = 900
"""Of arrivals: fewer than a server accepts by its usual limits."""


@dataclass(frozen=True)
class Exchanged:
    """A request that was answered or refused.

    Attributes:
        status: of HTTP; 0 if the connection was closed without an answer.
        seconds: from sending to the last byte.
        end: by `time.perf_counter`.
        tokens: that the model read.
        refusal: the beginning of the response, if the status is not 200.
    """

    status: int
    seconds: float
    end: float
    tokens: int
    refusal: str = ""


@dataclass(frozen=True)
class LoadResult:
    """What became of the requests of one load.

    Attributes:
        exchanges: in order of their ends.
        start: by `time.perf_counter`.
        generator: the share of one core that this process used meanwhile.
    """

    exchanges: tuple[Exchanged, ...]
    start: float
    generator: float = 0.0

    def seconds(self, status: int = _OK) -> list[float]:
        """Return how long each request with a status took."""
        return [each.seconds for each in self.exchanges if each.status == status]

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all answers, per second until the last answer."""
        answered = [each for each in self.exchanges if each.status == _OK]
        if not answered:
            return 0.0
        took = max(each.end for each in answered) - self.start
        return sum(each.tokens for each in answered) / took


def answered(load: LoadResult, *allowed: int) -> LoadResult:
    """Return a load whose requests were all answered: a figure without some of them means nothing.

    Args:
        load: what is returned.
        allowed: other statuses than 200 that are expected.

    Raises:
        ResourceError: a request was refused, or it failed.
    """
    for each in load.exchanges:
        if each.status not in (_OK, *allowed):
            what = f"a request was answered with status {each.status}: {each.refusal}"
            raise ResourceError(what, where="the server that is measured")
    return load


def percentile(seconds: Many[float], share: int) -> float:
    """Return a percentile in milliseconds; NaN of nothing."""
    return float(np.percentile(seconds, share)) * 1e3 if seconds else float("nan")


def post(route: str, body: object) -> bytes:
    """Return a request as it is sent."""
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class _Connection(asyncio.Protocol):
    """A connection that is kept for the next request, and opened again if the server closed it.

    There is neither a task nor a stream for each request: what the generator needs, a server on the
    same cores does not have.
    """

    def __init__(self, place: tuple[str, int]) -> None:
        self.place, self._loop = place, asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._used = False
        self._received = b""
        self._raw = b""
        self._start = 0.0
        self._answer: asyncio.Future[Exchanged] | None = None

    def ask(self, raw: bytes) -> asyncio.Future[Exchanged]:
        """Send a request; the future has how it was answered."""
        self._answer, self._raw = self._loop.create_future(), raw
        self._start, self._received = time.perf_counter(), b""
        if self._transport is None:
            self._open()
        else:
            self._transport.write(raw)
        return self._answer

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _open(self) -> None:
        opening = self._loop.create_task(self._loop.create_connection(lambda: self, *self.place))
        opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[Any]) -> None:
        if opening.exception() is not None:
            self._settle(0, 0, "the server cannot be reached")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request for which the connection was opened."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._used = transport, False
        transport.write(self._raw)

    def data_received(self, data: bytes) -> None:
        """Collect a response, and settle the request when it is complete."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        head = head.lower() + b"\r\n"
        if len(body) < _number(head, _LENGTH):
            return
        status = int(head.split(b" ", 2)[1])
        if _CLOSE in head:
            self.close()
        self._used = True
        refusal = "" if status == _OK else body[:_REFUSAL].decode("utf8", "replace")
        self._settle(status, _number(head, _TOKENS), refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ask again by a new connection if the server had closed one that was not used."""
        self._transport = None
        if self._answer is None or self._answer.done():
            return
        if self._used and not self._received:
            self._open()
        else:
            self._settle(0, 0, "the connection was closed")

    def _settle(self, status: int, tokens: int, refusal: str) -> None:
        if self._answer is not None and not self._answer.done():
            end = time.perf_counter()
            self._answer.set_result(Exchanged(status, end - self._start, end, tokens, refusal))


def _number(head: bytes, name: bytes) -> int:
    _, found, rest = head.partition(name)
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def waiting_clients(
    place: tuple[str, int], requests: Many[bytes], clients: int, seconds: float
) -> LoadResult:
    """Ask by clients that each wait for their answer, for some seconds, the requests in turn.

    Each client asks at least once.
    """
    start, used = time.perf_counter(), time.process_time()

    async def client(number: int) -> list[Exchanged]:
        """Send every request of one client, each after the last answer."""
        connection, at, found = _Connection(place), number, list[Exchanged]()
        while not found or time.perf_counter() < start + seconds:
            found.append(await connection.ask(requests[at % len(requests)]))
            at += clients
        connection.close()
        return found

    found = await asyncio.gather(*(client(number) for number in range(clients)))
    ordered = sorted(itertools.chain(*found), key=lambda each: each.end)
    return LoadResult(tuple(ordered), start, _share(start, used))


def _share(start: float, used: float) -> float:
    """Return the share of one core that this process used since then."""
    return (time.process_time() - used) / (time.perf_counter() - start)


def due_times(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Return the seconds at which requests of a Poisson process are due, `rate` a second."""
    draw, count = random.Random(seed), max(1, round(rate * seconds))
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


async def arrivals(
    place: tuple[str, int], requests: Many[bytes], rate: float, seconds: float, seed: int = 0
) -> LoadResult:
    """Ask at random times, `rate` a second in the mean, whatever becomes of earlier requests.

    Connections that are free are used again, the last one first; others are opened as needed, up to
    `MOST_CONNECTIONS`. A request counts from the moment at which it is due, also if it then waits
    for a connection.
    """
    free, found = list[_Connection](), list[Exchanged]()
    late = deque[tuple[bytes, float]]()
    dues = due_times(rate, seconds, seed)
    start, used, ended, opened = time.perf_counter(), time.process_time(), asyncio.Event(), 0

    def ask(connection: _Connection, raw: bytes, due: float) -> None:
        """Send a request; after its answer the connection is for the next one that waits."""

        def note(answer: asyncio.Future[Exchanged]) -> None:
            """Note how the request was answered."""
            done = answer.result()
            found.append(replace(done, seconds=done.end - due))
            if late:
                ask(connection, *late.popleft())
            else:
                free.append(connection)
            if len(found) == len(dues):
                ended.set()

        connection.ask(raw).add_done_callback(note)

    for number, after in enumerate(dues):
        due = start + after
        if (ahead := due - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        elif number % 16 == 0:
            await asyncio.sleep(0)  # late: the answers still have to be read
        raw = requests[number % len(requests)]
        if free:
            ask(free.pop(), raw, due)
        elif opened < MOST_CONNECTIONS:
            opened += 1
            ask(_Connection(place), raw, due)
        else:
            late.append((raw, due))
    await ended.wait()
    for connection in free:
        connection.close()
    return LoadResult(tuple(found), start, _share(start, used))
