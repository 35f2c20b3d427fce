"""A server of a model on this machine: idle, full and overloaded, with each number of threads.

    python benchmarks/serving.py MODEL [--task NAME] [--texts FILE] [--seconds 5]

Each server is a process of `bothways serve` on the loopback address. Its clients are this process,
on the same cores: a server whose clients are on another machine is faster.

Texts are random words, as long as sentences and queries, or the lines of a file. The loads:

- idle: one client, one text at a time.
- 1 text, 32 texts: 32 clients that wait for their answers; tokens a second, and their ratio to
  predictions in one process without HTTP.
- at 70 %: arrivals at random times (a Poisson process) at 70 % of the rate for single texts.
- overload: arrivals at up to ten times that rate, with a queue of 8,192 tokens.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator, Sequence as Many
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from load import LoadResult, arrivals, percentile, post, require_answers, waiting_clients
from rich.console import Console
from rich.table import Table

from bothways.core.errors import ConfigError, ResourceError
from bothways.core.runtime.devices import choose_device, describe_device
from bothways.core.runtime.process import usable_cores
from bothways.model.kernels.library import describe_kernels
from bothways.prediction.opening import open_task
from bothways.prediction.predictor import Predictor, read_input
from bothways.serving.errors import Limits

CLIENTS = 32
"""Clients that wait for answers, to find the highest rate of a server."""
LOAD = 0.7
"""Fraction of the highest rate at which arrivals show the latency of users."""
OVERLOAD = 10
MAX_ARRIVALS = 4000.0
"""Requests a second that this process can send."""
QUEUE = 8192
"""Tokens of the queue under overload: enough for all cores, soon full."""
QUEUED_REQUESTS = 4
"""Number of the longest requests that the queue has room for, with more tokens if needed."""
PATIENT = Limits(request_tokens=10**9, queue_tokens=10**9, deadline_seconds=3600.0)
"""Limits for clients that wait: their number bounds the load, and a slow server is measured instead
of refusing requests."""
_WORDS = 20_000


def drawn_texts(predictor: Predictor, count: int) -> list[str]:
    """Draw texts of random words of a model's vocabulary, as long as sentences and queries are.

    The number of words is log-normal: 12 in the median, 3 to 45 for 90 % of the texts.
    """
    draw, tokenizer = random.Random(0), predictor.task_model.tokenizer
    tokens = map(tokenizer.token, range(min(tokenizer.size, _WORDS)))
    words = [word for word in tokens if word.isalpha() and word.islower()] or ["a"]
    lengths = (round(draw.lognormvariate(2.5, 0.8)) for _ in range(count))
    return [" ".join(draw.choices(words, k=min(200, max(1, n)))) for n in lengths]


def make_input(predictor: Predictor, text: str) -> Any:
    """Make an input of a predictor's task with this text, as requests have it."""
    match predictor.task_model.task.name:
        case "answer":
            return {"question": text, "context": text}
        case "choice":
            return {"context": text, "endings": [text, text]}
        case "fill":
            tokenizer = predictor.task_model.tokenizer
            return f"{text} {tokenizer.token(tokenizer.specials.mask)}"
        case "prefer" | "rerank":
            return [text, text]
        case _:
            return text


def make_requests(predictor: Predictor, texts: Many[str], size: int) -> list[bytes]:
    """Make requests of `size` texts: OpenAI-compatible for vectors, else to the task's route.

    In a request to rank, the texts are the documents, and the first of them is the query.
    """
    groups = [texts[at : at + size] for at in range(0, len(texts) - size + 1, size)]
    if predictor.task_model.task.name == "embed":
        body = {"encoding_format": "base64"}
        return [post("/v1/embeddings", {"input": group, **body}) for group in groups]
    if predictor.task_model.task.name == "rerank":
        return [post("/rerank", {"query": group[0], "documents": group}) for group in groups]
    route = f"/{predictor.task_model.task.name}"
    return [post(route, {"inputs": [make_input(predictor, t) for t in group]}) for group in groups]


@dataclass(frozen=True)
class Offline:
    """`predict` in this process with all threads.

    Attributes:
        tokens_per_second: speed over all texts, in batches.
        idle: median milliseconds of one text alone.
        max_tokens: tokens of the longest text.
    """

    tokens_per_second: float
    idle: float
    max_tokens: int


def measure_offline(predictor: Predictor, texts: Many[str]) -> Offline:
    """Time a predictor on texts."""
    task_model = predictor.task_model
    inputs = [make_input(predictor, text) for text in texts]
    inputs = [tuple(item) if isinstance(item, list) else item for item in inputs]
    examples = [read_input(task_model, item, n) for n, item in enumerate(inputs, 1)]
    tokens = [sum(map(len, item.sequences)) for item in task_model.encode(examples)]
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
class ServerTimes:
    """The measurements of a server.

    Attributes:
        threads: number of threads.
        ready: seconds from the start until the first answer.
        idle: load of one client with one text at a time.
        single, many: loads of clients that wait, with one text a request, and with 32.
        arriving: arrivals at `LOAD` of the rate of `single`.
        overload: arrivals at up to ten times that rate, with a short queue.
        memory: MiB of all processes, before and after the load.
    """

    threads: int
    ready: float
    idle: LoadResult
    single: LoadResult
    many: LoadResult
    arriving: LoadResult
    overload: LoadResult
    memory: tuple[float, float]


def measure(
    folder: str,
    predictor: Predictor,
    texts: Many[str],
    threads: int,
    seconds: float,
    queue: int,
) -> ServerTimes:
    """Measure a server.

    Args:
        predictor: predictor of the folder; its task decides the form of requests.
        seconds: duration of each load.
        queue: tokens of the queue under overload.

    Raises:
        ResourceError: it did not start, or it refused or failed what it should answer.
    """
    singles, groups = make_requests(predictor, texts, 1), make_requests(predictor, texts, 32)
    task = predictor.task_model.task.name
    with _server(folder, task, threads, PATIENT) as (address, process, ready):

        def load(requests: Many[bytes], clients: int, duration: float = seconds) -> LoadResult:
            """Send requests by clients that wait."""
            waiting = waiting_clients(address, requests, clients, duration)
            return require_answers(asyncio.run(waiting))

        load(groups, CLIENTS, min(1.0, seconds))
        before = memory(process)
        idle, single, many = load(singles, 1), load(singles, CLIENTS), load(groups, CLIENTS)
        peak = len(single.exchanges) / seconds
        arriving = require_answers(asyncio.run(arrivals(address, singles, LOAD * peak, seconds)))
        after = memory(process)
    short = replace(PATIENT, queue_tokens=queue, request_tokens=queue)
    with _server(folder, task, threads, short) as (address, process, _):
        asyncio.run(waiting_clients(address, singles, CLIENTS, min(1.0, seconds)))
        rate = min(MAX_ARRIVALS, OVERLOAD * peak)
        overload = require_answers(asyncio.run(arrivals(address, singles, rate, seconds)), 429)
    return ServerTimes(threads, ready, idle, single, many, arriving, overload, (before, after))


@contextmanager
def _server(
    folder: str, task: str, threads: int, limits: Limits
) -> Iterator[tuple[tuple[str, int], int, float]]:
    """Run `bothways serve`; yield its address, process id and seconds until the first answer."""
    words = [sys.executable, "-m", "bothways", "serve", f"model={folder}", "--task", task]
    words += ["--port", "0", "--log", "errors"]
    for name, limit in asdict(limits).items():
        words += ["--limit", f"{name}={limit}"]
    words += ["--threads", str(threads)]
    start = time.perf_counter()
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            banner = process.stderr.readline()
            match = re.search(r"http://([\d.]+):(\d+)", banner)
            if match is None:
                raise ResourceError(f"the server did not start: {banner.strip()}", where="serve")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # never full
            address = (match[1], int(match[2]))
            wait_for_server(address)
            yield address, process.pid, time.perf_counter() - start
        finally:
            process.send_signal(signal.SIGTERM)


def wait_for_server(address: tuple[str, int], patience: float = 60.0) -> None:
    """Wait until a server accepts connections; raise ResourceError after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(address).close()
            return
        except ConnectionRefusedError as error:
            if time.monotonic() > deadline:
                raise ResourceError("the server does not answer", where="serve") from error
            time.sleep(0.01)


def memory(process: int) -> float:
    """Return the resident memory of a process and its children in MiB; NaN where unknown."""
    try:
        numbers = Path(f"/proc/{process}/task/{process}/children").read_text("utf8").split()
        pages = int(Path(f"/proc/{process}/statm").read_text("utf8").split()[1])
    except OSError:
        return float("nan")
    children = sum(memory(int(number)) for number in numbers)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 + children


def table_rows(server: ServerTimes, offline: Offline) -> Iterator[tuple[str, str]]:
    """Yield the rows of a server in the table; times are the median and the 99th percentile."""
    yield "threads", str(server.threads)
    yield "s until it answers", f"{server.ready:.1f}"
    yield "idle: ms", _times(server.idle.seconds())
    for name, load in (("1 text", server.single), ("32 texts", server.many)):
        ratio = load.tokens_per_second / offline.tokens_per_second
        yield f"{name}: tokens/s", f"{load.tokens_per_second:,.0f} ({ratio:.0%})"
    yield f"at {LOAD:.0%}: ms", _times(server.arriving.seconds())
    kept = server.overload.tokens_per_second / server.single.tokens_per_second
    yield "overload: tokens/s kept", f"{kept:.0%}"
    yield "– generator: cores", f"{server.overload.generator:.2f}"
    yield "– accepted: ms", _times(server.overload.seconds())
    refused = server.overload.seconds(429)
    yield "– refused", f"{len(refused):,}"
    yield "– refused: ms", _times(refused) if refused else "–"
    yield "MiB before, after", f"{server.memory[0]:.0f}, {server.memory[1]:.0f}"


def _times(seconds: Many[float]) -> str:
    return f"{percentile(seconds, 50):,.1f}, {percentile(seconds, 99):,.1f}"


def main() -> None:
    """Measure predictions in this process, then a server with each number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--task")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    predictor = open_task(arguments.model, arguments.task, batch_invariant=True)
    texts = drawn_texts(predictor, 2000)
    if arguments.texts is not None:
        texts = [line for line in arguments.texts.read_text("utf8").splitlines() if line.strip()]
        if len(texts) < 32:
            raise ConfigError(f"has {len(texts)} of at least 32 texts", where=arguments.texts)
    console, offline = Console(), measure_offline(predictor, texts)
    cores, servers = usable_cores(), []
    queue = max(QUEUE, QUEUED_REQUESTS * offline.max_tokens)
    for threads in (n for n in range(1, cores + 1) if cores % n == 0):
        servers.append(
            measure(arguments.model, predictor, texts, threads, arguments.seconds, queue)
        )
    tables = [dict(table_rows(server, offline)) for server in servers]
    table = Table()
    for name in ("", *("" for _ in servers)):
        table.add_column(name, justify="right" if table.columns else "left")
    for name in tables[0]:
        table.add_row(name, *(rows[name] for rows in tables))
    console.print(table)
    speed = f"{offline.tokens_per_second:,.0f} tokens/s, {offline.idle:.2f} ms for one text"
    fastest = max(servers, key=lambda server: server.single.tokens_per_second)
    console.print(f"in one process: {speed}")
    console.print(f"fastest for single texts: --threads {fastest.threads}")
    console.print(f"{describe_device(choose_device('cpu'))}, {describe_kernels()}")


if __name__ == "__main__":
    main()
