"""Load for a server on this machine: clients that wait for answers, and arrivals that do not wait.

Clients that wait for each answer (a closed loop) find how much a server does; they send less as soon
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
"""Bytes of a refused response that are recorded."""
_OK = 200
MAX_CONNECTIONS = 900
"""Connections of arrivals: fewer than a server accepts by its default limits."""


@dataclass(frozen=True)
class Exchange:
    """A request that was answered or refused.

    Attributes:
        status: HTTP status; 0 if the connection was closed without an answer.
        seconds: duration from sending to the last byte.
        end: time of the last byte by `time.perf_counter`.
        tokens: number of tokens that the model read.
        refusal: beginning of the response, if the status is not 200.
    """

    status: int
    seconds: float
    end: float
    tokens: int
    refusal: str = ""


@dataclass(frozen=True)
class LoadResult:
    """The requests of one load with their answers.

    Attributes:
        exchanges: requests in the order of their ends.
        start: time of the first request by `time.perf_counter`.
        generator: fraction of one core that this process used meanwhile.
    """

    exchanges: tuple[Exchange, ...]
    start: float
    generator: float = 0.0

    def seconds(self, status: int = _OK) -> list[float]:
        """Return the durations of the requests with a status."""
        return [exchange.seconds for exchange in self.exchanges if exchange.status == status]

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all answers, per second until the last answer."""
        answers = [exchange for exchange in self.exchanges if exchange.status == _OK]
        if not answers:
            return 0.0
        duration = max(exchange.end for exchange in answers) - self.start
        return sum(exchange.tokens for exchange in answers) / duration


def require_answers(load: LoadResult, *allowed: int) -> LoadResult:
    """Return a load; raise ResourceError for a status other than 200 and `allowed`."""
    for exchange in load.exchanges:
        if exchange.status not in (_OK, *allowed):
            message = f"a request was answered with status {exchange.status}: {exchange.refusal}"
            raise ResourceError(message, where="the measured server")
    return load


def percentile(seconds: Many[float], percent: int) -> float:
    """Return a percentile in milliseconds; NaN of an empty list."""
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else float("nan")


def post(route: str, body: object) -> bytes:
    """Return the bytes of a POST request."""
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class _Connection(asyncio.Protocol):
    """A connection that is kept for the next request, and opened again if the server closed it.

    There is neither a task nor a stream for each request: the generator takes its time from the
    server, which runs on the same cores.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address, self._loop = address, asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._used = False
        self._received = b""
        self._raw = b""
        self._start = 0.0
        self._answer: asyncio.Future[Exchange] | None = None

    def send(self, raw: bytes) -> asyncio.Future[Exchange]:
        """Send a request; the future has its answer."""
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
        opening = self._loop.create_task(self._loop.create_connection(lambda: self, *self._address))
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
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
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
        """Send the request again if the server had closed an idle connection."""
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
            self._answer.set_result(Exchange(status, end - self._start, end, tokens, refusal))


def _number(head: bytes, name: bytes) -> int:
    _, separator, line = head.partition(name)
    return int(line.split(b"\r\n", 1)[0]) if separator else 0


async def waiting_clients(
    address: tuple[str, int], requests: Many[bytes], clients: int, seconds: float
) -> LoadResult:
    """Send the requests in turn by clients that each wait for their answer, for some seconds.

    Each client sends at least one request.
    """
    start, used = time.perf_counter(), time.process_time()

    async def client(number: int) -> list[Exchange]:
        """Send the requests of one client, each after the last answer."""
        connection, index, exchanges = _Connection(address), number, list[Exchange]()
        while not exchanges or time.perf_counter() < start + seconds:
            exchanges.append(await connection.send(requests[index % len(requests)]))
            index += clients
        connection.close()
        return exchanges

    by_client = await asyncio.gather(*(client(number) for number in range(clients)))
    ordered = sorted(itertools.chain(*by_client), key=lambda exchange: exchange.end)
    return LoadResult(tuple(ordered), start, _core_fraction(start, used))


def _core_fraction(start: float, used: float) -> float:
    """Return the fraction of one core that this process used since `start`."""
    return (time.process_time() - used) / (time.perf_counter() - start)


def due_times(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Return the seconds at which requests of a Poisson process are due, `rate` a second."""
    draw, count = random.Random(seed), max(1, round(rate * seconds))
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


async def arrivals(
    address: tuple[str, int], requests: Many[bytes], rate: float, seconds: float, seed: int = 0
) -> LoadResult:
    """Send requests at random times, `rate` a second in the mean, without waiting for answers.

    Free connections are used again, the last one first; others are opened as needed, up to
    `MAX_CONNECTIONS`. A request counts from the moment at which it is due, also if it then waits
    for a connection.
    """
    free, exchanges = list[_Connection](), list[Exchange]()
    late = deque[tuple[bytes, float]]()
    dues = due_times(rate, seconds, seed)
    start, used, ended, opened = time.perf_counter(), time.process_time(), asyncio.Event(), 0

    def send(connection: _Connection, raw: bytes, due: float) -> None:
        """Send a request; after its answer the connection is for the next one that waits."""

        def record(answer: asyncio.Future[Exchange]) -> None:
            """Record the exchange."""
            exchange = answer.result()
            exchanges.append(replace(exchange, seconds=exchange.end - due))
            if late:
                send(connection, *late.popleft())
            else:
                free.append(connection)
            if len(exchanges) == len(dues):
                ended.set()

        connection.send(raw).add_done_callback(record)

    for number, after in enumerate(dues):
        due = start + after
        if (ahead := due - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        elif number % 16 == 0:
            await asyncio.sleep(0)  # late: the answers still have to be read
        raw = requests[number % len(requests)]
        if free:
            send(free.pop(), raw, due)
        elif opened < MAX_CONNECTIONS:
            opened += 1
            send(_Connection(address), raw, due)
        else:
            late.append((raw, due))
    await ended.wait()
    for connection in free:
        connection.close()
    return LoadResult(tuple(exchanges), start, _core_fraction(start, used))
