"""Load for a server on this machine: clients that wait for answers, and arrivals that do not wait.

Clients that wait for each answer (a closed loop) find how much a server does; they ask less as soon
as it is slow. Arrivals at random times, a Poisson process (an open loop), show what users see:
requests queue up whether the server is ready for them or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np

from bothways.core.errors import ResourceError

_LENGTH = b"content-length: "
_TOKENS = b"x-compute-tokens: "
_CLOSE = b"connection: close"
_REFUSAL = 300
"""Bytes of a refusal that are kept."""
_OK = 200


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
    """

    exchanges: tuple[Exchanged, ...]
    start: float

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


class _Connection:
    """A connection that is kept for the next request, and opened again if the server closed it."""

    def __init__(self, host: str, port: int) -> None:
        self.place = (host, port)
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, raw: bytes) -> Exchanged:
        """Send a request, and return how it was answered."""
        start = time.perf_counter()
        try:
            head, body = await self._answer(raw)
        except (asyncio.IncompleteReadError, OSError):
            self.close()
            end = time.perf_counter()
            return Exchanged(0, end - start, end, 0, "the connection was closed")
        end, status = time.perf_counter(), int(head.split(b" ", 2)[1])
        refusal = "" if status == _OK else body[:_REFUSAL].decode("utf8", "replace")
        return Exchanged(status, end - start, end, _number(head, _TOKENS), refusal)

    async def _answer(self, raw: bytes) -> tuple[bytes, bytes]:
        """Send a request; return head and body of the response."""
        head = None
        if self.streams is not None:  # it may have been closed while it was not used
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await _head(*self.streams, raw)
        if head is None or self.streams is None:
            self.close()
            self.streams = await asyncio.open_connection(*self.place)
            head = await _head(*self.streams, raw)
        body = await self.streams[0].readexactly(_number(head, _LENGTH))
        if _CLOSE in head:
            self.close()
        return head, body

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


async def _head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes) -> bytes:
    """Send a request; return the head of the response in lower case."""
    writer.write(raw)
    return (await reader.readuntil(b"\r\n\r\n")).lower()


def _number(head: bytes, name: bytes) -> int:
    _, found, rest = head.partition(name)
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def waiting_clients(
    place: tuple[str, int], requests: Many[bytes], clients: int, seconds: float
) -> LoadResult:
    """Ask by clients that each wait for their answer, for some seconds, the requests in turn.

    Each client asks at least once.
    """
    start = time.perf_counter()

    async def client(number: int) -> list[Exchanged]:
        """Send every request of one client, each after the last answer."""
        connection, at, found = _Connection(*place), number, list[Exchanged]()
        while not found or time.perf_counter() < start + seconds:
            found.append(await connection.ask(requests[at % len(requests)]))
            at += clients
        connection.close()
        return found

    found = await asyncio.gather(*(client(number) for number in range(clients)))
    return LoadResult(tuple(sorted(itertools.chain(*found), key=lambda each: each.end)), start)


def due_times(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Return the seconds at which requests of a Poisson process are due, `rate` a second."""
    draw, count = random.Random(seed), max(1, round(rate * seconds))
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


async def arrivals(
    place: tuple[str, int], requests: Many[bytes], rate: float, seconds: float, seed: int = 0
) -> LoadResult:
    """Ask at random times, `rate` a second in the mean, whatever becomes of earlier requests.

    Connections that are free are used again, the last one first; others are opened as needed. A
    request counts from the moment at which it is due.
    """
    free, found = list[_Connection](), list[Exchanged]()
    start = time.perf_counter()

    async def one(raw: bytes, due: float) -> None:
        """Send a request on a connection that is free, or on a new one."""
        connection = free.pop() if free else _Connection(*place)
        done = await connection.ask(raw)
        found.append(replace(done, seconds=done.end - due))
        free.append(connection)

    tasks = []
    for number, after in enumerate(due_times(rate, seconds, seed)):
        due = start + after
        if (ahead := due - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        elif number % 16 == 0:
            await asyncio.sleep(0)  # late: the answers still have to be read
        tasks.append(asyncio.create_task(one(requests[number % len(requests)], due)))
    await asyncio.gather(*tasks)
    for connection in free:
        connection.close()
    return LoadResult(tuple(found), start)
