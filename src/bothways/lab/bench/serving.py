"""The measurements of `bothways bench serve`: threads, idle, full, and beyond full.

Each server is a process of `bothways serve` on the loopback address, asked from this process, which
takes a share of the same cores: figures are those of a machine that also runs its clients.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bothways.core.errors import ResourceError
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.limits import usable_cores
from bothways.lab.bench.load import (
    LoadResult,
    answered,
    arrivals,
    percentile,
    post,
    waiting_clients,
)
from bothways.prediction.predictor import Predictor, read_input
from bothways.serving.limits import Limits

CLIENTS = 32
"""That wait for answers, to find how much a server does."""
SHARE = 0.7
"""Of the most that a server does, at which arrivals show what users see."""
OVERLOAD = 10
MOST_ARRIVALS = 4000.0
"""Requests a second that this process can send."""
QUEUE = 8192
"""Tokens that wait under overload: enough for all cores, soon full."""
QUEUED_REQUESTS = 4
"""The longest requests that find room in that queue; it has more tokens if they need them."""
PATIENT = Limits(request_tokens=10**9, queue_tokens=10**9, deadline_seconds=3600.0)
"""Limits where clients wait for their answers: what they ask is bounded by their number, and a
server that is slow is to be measured, not refused."""
_WORDS = 20_000


def drawn_texts(predictor: Predictor, count: int, seed: int = 0) -> list[str]:
    """Return texts of random words of a model's vocabulary, as long as sentences and queries are.

    The number of words is log-normal: 12 in the median, 3 to 45 for 90 % of the texts.
    """
    draw, tokenizer = random.Random(seed), predictor.learner.tokenizer
    found = (tokenizer.token(id) for id in range(min(tokenizer.size, _WORDS)))
    words = [word for word in found if word.isalpha() and word.islower()] or ["a"]
    lengths = (round(draw.lognormvariate(2.5, 0.8)) for _ in range(count))
    return [" ".join(draw.choices(words, k=min(200, max(1, n)))) for n in lengths]


def input_of(predictor: Predictor, text: str) -> Any:
    """Return an input of a predictor's task with this text, as requests have it."""
    match predictor.learner.task.name:
        case "answer":
            return {"question": text, "context": text}
        case "choice":
            return {"context": text, "endings": [text, text]}
        case "fill":
            tokenizer = predictor.learner.tokenizer
            return f"{text} {tokenizer.token(tokenizer.specials.mask)}"
        case "prefer" | "rerank":
            return [text, text]
        case _:
            return text


def requests_of(predictor: Predictor, texts: Many[str], each: int) -> list[bytes]:
    """Return requests of `each` texts: of OpenAI's shape for vectors, else of the task's own.

    In a request to rank, the texts are the documents, and the first of them is the query.
    """
    groups = [texts[at : at + each] for at in range(0, len(texts) - each + 1, each)]
    if predictor.learner.task.name == "embed":
        more = {"encoding_format": "base64"}
        return [post("/v1/embeddings", {"input": group, **more}) for group in groups]
    if predictor.learner.task.name == "rerank":
        return [post("/rerank", {"query": group[0], "documents": group}) for group in groups]
    route = f"/{predictor.learner.task.name}"
    return [post(route, {"inputs": [input_of(predictor, t) for t in group]}) for group in groups]


@dataclass(frozen=True)
class Offline:
    """`predict` in this process with all threads.

    Attributes:
        tokens_per_second: over all texts, in batches.
        idle: the median milliseconds of one text alone.
        longest: the tokens of the text with most.
    """

    tokens_per_second: float
    idle: float
    longest: int


def measure_offline(predictor: Predictor, texts: Many[str]) -> Offline:
    """Time a predictor on texts."""
    learner = predictor.learner
    inputs = [input_of(predictor, text) for text in texts]
    inputs = [tuple(item) if isinstance(item, list) else item for item in inputs]
    examples = [read_input(learner, item, n) for n, item in enumerate(inputs, 1)]
    tokens = [sum(map(len, item.sequences)) for item in learner.encode(examples)]
    predictor(inputs[:100])
    start = time.perf_counter()
    predictor(inputs)
    rate = sum(tokens) / (time.perf_counter() - start)
    times = []
    for item in inputs[:100]:
        start = time.perf_counter()
        predictor(item)
        times.append(time.perf_counter() - start)
    return Offline(rate, 1e3 * statistics.median(times), max(tokens))


@dataclass(frozen=True)
class Division:
    """Processes and the threads of each."""

    workers: int
    threads: int


def divisions(cores: int) -> list[Division]:
    """Return one process with each number of threads that divides the cores."""
    return [Division(1, n) for n in range(1, cores + 1) if cores % n == 0]


@dataclass(frozen=True)
class Served:
    """What a server did.

    Attributes:
        division: its processes and threads.
        ready: seconds from its start until it answered.
        idle: one client with one text at a time.
        single, many: clients that wait, with one text a request, and with 32.
        arriving: arrivals at `SHARE` of what `single` did.
        beyond: arrivals at up to ten times of it, with a short queue.
        memory: MiB of all processes, before and after the load.
    """

    division: Division
    ready: float
    idle: LoadResult
    single: LoadResult
    many: LoadResult
    arriving: LoadResult
    beyond: LoadResult
    memory: tuple[float, float]


def measure(
    folder: str,
    predictor: Predictor,
    texts: Many[str],
    division: Division,
    seconds: float,
    queue: int,
) -> Served:
    """Measure a server.

    Args:
        folder: what is served.
        predictor: of the folder; its task decides what requests are.
        texts: of the requests.
        division: processes and threads.
        seconds: of each load.
        queue: tokens that wait under overload.

    Raises:
        ResourceError: it did not start, or it refused or failed what it should answer.
    """
    ones, groups = requests_of(predictor, texts, 1), requests_of(predictor, texts, 32)
    task = predictor.learner.task.name
    with _server(folder, task, division, PATIENT) as (place, process, ready):

        def asked(requests: Many[bytes], clients: int, most: float = seconds) -> LoadResult:
            """Ask by clients that wait."""
            return answered(asyncio.run(waiting_clients(place, requests, clients, most)))

        asked(groups, CLIENTS, min(1.0, seconds))
        before = memory(process)
        idle, single, many = asked(ones, 1), asked(ones, CLIENTS), asked(groups, CLIENTS)
        peak = len(single.exchanges) / seconds
        arriving = answered(asyncio.run(arrivals(place, ones, SHARE * peak, seconds)))
        after = memory(process)
    short = replace(PATIENT, queue_tokens=queue, request_tokens=queue)
    with _server(folder, task, division, short) as (place, process, _):
        asyncio.run(waiting_clients(place, ones, CLIENTS, min(1.0, seconds)))
        rate = min(MOST_ARRIVALS, OVERLOAD * peak)
        beyond = answered(asyncio.run(arrivals(place, ones, rate, seconds)), 429)
    return Served(division, ready, idle, single, many, arriving, beyond, (before, after))


@contextmanager
def _server(
    folder: str, task: str, division: Division, limits: Limits
) -> Iterator[tuple[tuple[str, int], int, float]]:
    """Run `bothways serve`: its address, its process, and the seconds until it answered."""
    words = [sys.executable, "-m", "bothways", "serve", f"model={folder}", "--task", task]
    words += ["--port", "0", "--log", "errors"]
    for name, most in asdict(limits).items():
        words += ["--limit", f"{name}={most}"]
    words += ["--threads", str(division.threads)]
    start = time.perf_counter()
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            banner = process.stderr.readline()
            address = re.search(r"http://([\d.]+):(\d+)", banner)
            if address is None:
                raise ResourceError(f"the server did not start: {banner.strip()}", where="serve")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # never full
            place = (address[1], int(address[2]))
            _await(place)
            yield place, process.pid, time.perf_counter() - start
        finally:
            process.send_signal(signal.SIGTERM)


def _await(place: tuple[str, int], patience: float = 60.0) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(place).close()
            return
        except ConnectionRefusedError as error:
            if time.monotonic() > until:
                raise ResourceError("the server does not answer", where="serve") from error
            time.sleep(0.01)


def memory(process: int) -> float:
    """Return the resident memory of a process and those below it in MiB; NaN where unknown."""
    try:
        numbers = Path(f"/proc/{process}/task/{process}/children").read_text("utf8").split()
        pages = int(Path(f"/proc/{process}/statm").read_text("utf8").split()[1])
    except OSError:
        return float("nan")
    below = sum(memory(int(number)) for number in numbers)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 + below


@dataclass(frozen=True)
class ServerComparison:
    """All measurements: `offline`, and each server."""

    offline: Offline
    servers: tuple[Served, ...]

    @property
    def best(self) -> Served:
        """The server that computes most for clients with one text."""
        return max(self.servers, key=lambda served: served.single.tokens_per_second)


def compare_divisions(
    folder: str,
    predictor: Predictor,
    texts: Many[str],
    seconds: float,
    progress: Progress = SILENT,
) -> ServerComparison:
    """Measure `predict`, then a server of each division; errors as `measure`."""
    chosen = divisions(usable_cores())
    progress.stage("predicting in this process", total=None)
    offline = measure_offline(predictor, texts)
    queue, found = max(QUEUE, QUEUED_REQUESTS * offline.longest), []
    for division in chosen:
        progress.stage(f"serving by {division.workers} × {division.threads} threads", total=None)
        found.append(measure(folder, predictor, texts, division, seconds, queue))
    return ServerComparison(offline, tuple(found))


def row(served: Served, offline: Offline) -> Iterator[str]:
    """Yield the cells of a server in the table of `bothways bench serve`."""
    yield f"{served.division.workers} × {served.division.threads}"
    yield f"{served.ready:.1f}"
    yield _times(served.idle.seconds())
    for load in (served.single, served.many):
        share = load.tokens_per_second / offline.tokens_per_second
        yield f"{load.tokens_per_second:,.0f} ({share:.0%})"
    yield _times(served.arriving.seconds())
    yield f"{served.beyond.tokens_per_second / served.single.tokens_per_second:.0%}"
    yield f"{served.beyond.generator:.2f}"
    refused = served.beyond.seconds(429)
    yield _times(served.beyond.seconds())
    yield f"{len(refused):,}"
    yield _times(refused) if refused else "–"
    yield f"{served.memory[0]:.0f}, {served.memory[1]:.0f}"


def _times(seconds: Many[float]) -> str:
    return f"{percentile(seconds, 50):,.1f}, {percentile(seconds, 99):,.1f}"


TITLES = (
    "processes × threads",
    "s until it answers",
    "idle: ms",
    "1 text: tokens/s",
    "32 texts: tokens/s",
    f"at {SHARE:.0%}: ms",
    "overload: tokens/s kept",
    "– generator: cores",
    "– accepted: ms",
    "– refused",
    "– refused: ms",
    "MiB before, after",
)
"""The rows of the table, in the order of `row`; times are the median and the 99th percentile."""
SIDE_BY_SIDE = 3
"""Servers in a table, so that it fits in 80 columns."""
