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
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

_LENGTH = b"content-length: "
_TOKENS = b"x-compute-tokens: "


@dataclass(frozen=True)
class Exchanged:
    """A request that was answered or refused.

    Attributes:
        status: of HTTP.
        seconds: from sending to the last byte.
        end: by `time.perf_counter`.
        tokens: that the model read.
    """

    status: int
    seconds: float
    end: float
    tokens: int


@dataclass(frozen=True)
class LoadResult:
    """What became of the requests of one load.

    Attributes:
        exchanges: in order of their ends.
        start: by `time.perf_counter`.
    """

    exchanges: tuple[Exchanged, ...]
    start: float

    def seconds(self, status: int = 200) -> list[float]:
        """Return how long each request with a status took."""
        return [each.seconds for each in self.exchanges if each.status == status]

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all answers, per second until the last answer."""
        answered = [each for each in self.exchanges if each.status == 200]
        if not answered:
            return 0.0
        took = max(each.end for each in answered) - self.start
        return sum(each.tokens for each in answered) / took


def percentile(seconds: Many[float], share: int) -> float:
    """Return a percentile in milliseconds; NaN of nothing."""
    return float(np.percentile(seconds, share)) * 1e3 if seconds else float("nan")


def post(route: str, body: object) -> bytes:
    """Return a request as it is sent."""
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class _Connection:
    """A connection that is kept for the next request."""

    def __init__(self, host: str, port: int) -> None:
        self.place = (host, port)
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, raw: bytes) -> Exchanged:
        """Send a request, and return how it was answered."""
        start = time.perf_counter()
        if self.streams is None:
            self.streams = await asyncio.open_connection(*self.place)
        reader, writer = self.streams
        writer.write(raw)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(_number(head, _LENGTH))
        end = time.perf_counter()
        return Exchanged(int(head.split(b" ", 2)[1]), end - start, end, _number(head, _TOKENS))

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self.streams is not None:
            self.streams[1].close()


def _number(head: bytes, name: bytes) -> int:
    _, found, rest = head.partition(name)
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def waiting_clients(
    place: tuple[str, int], requests: Many[bytes], clients: int, seconds: float
) -> LoadResult:
    """Ask by clients that each wait for their answer, for some seconds, the requests in turn."""
    found: list[Exchanged] = []
    start = time.perf_counter()

    async def client(number: int) -> None:
        """Send every request of one client, each after the last answer."""
        connection, at = _Connection(*place), number
        while time.perf_counter() < start + seconds:
            found.append(await connection.ask(requests[at % len(requests)]))
            at += clients
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return LoadResult(tuple(found), start)


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
        found.append(Exchanged(done.status, done.end - due, done.end, done.tokens))
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
