"""Machines that leave a run and join it, each a torchrun of its own here (`make test-elastic`)."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from child_processes import children

pytestmark = pytest.mark.elastic

STEPS = 3000
Start = Callable[[], "subprocess.Popen[bytes]"]


def newest(out: Path) -> int:
    """The step of the newest checkpoint of a run."""
    names = (path.name.removeprefix("step-") for path in out.glob("step-*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def records(out: Path) -> list[dict[str, float]]:
    """The records that are complete; none before the first."""
    lines = [line for file in out.glob("metrics.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def pretraining(corpus: Path, out: Path, *settings: str) -> list[str]:
    return [
        "-m", "bothways", "pretrain", str(corpus), "--out", str(out), "--resume",
        "--model", "bert-tiny", "--device", "cpu", "encoder.width=32",
        "encoder.intermediate_size=64", "batch.kind=examples", f"training.until={STEPS} steps",
        "training.report=5 steps", "training.precision=fp32", "held_out=0.1",
        "evaluation_tokens=400", *settings,
    ]  # fmt: skip


SMOOTH = (
    "encoder.dropout.hidden=0", "encoder.dropout.attention=0", "batch.n=8", "training.save=20 steps"
)  # fmt: skip
"""Settings of a run that depends on its ranks by rounding alone."""


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory) -> Path:
    """The folder of the same run in one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    subprocess.run(
        [sys.executable, *pretraining(corpus.folder, out, *SMOOTH)], check=True, capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    return out


@pytest.fixture
def machine(corpus, tmp_path) -> Iterator[Start]:
    """Start a further machine; they meet at a store of this process, which outlives them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1",
        "--max-restarts=10", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-conf=is_host=0,last_call_timeout=3,keep_alive_interval=1", "--rdzv-id=run",
        *pretraining(corpus.folder, tmp_path / "run", *SMOOTH),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started: list[subprocess.Popen[bytes]] = []
    log = (tmp_path / "log").open("wb")

    def start() -> subprocess.Popen[bytes]:
        agent = subprocess.Popen(torchrun, stdout=log, stderr=log, env=environment)
        started.append(agent)
        return agent

    try:
        yield start
    finally:
        for agent in started:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(60)
        log.close()
        print((tmp_path / "log").read_text()[-5000:])


def reach(out: Path, done: Callable[[], bool], limit: float = 120) -> None:
    end = time.monotonic() + limit
    while not done():
        assert time.monotonic() < end, f"still at step {newest(out)}"
        time.sleep(0.05)


def ranks_by_step(out: Path) -> list[tuple[int, int]]:
    """The numbers of ranks in their order, each with the first step of a record with them."""
    found: list[tuple[int, int]] = []
    for record in records(out):
        if "learning_rate" in record:
            ranks = sum(name.endswith("/seconds") for name in record) or 1
            if not found or found[-1][0] != ranks:
                found.append((ranks, int(record["step"])))
    return found


@pytest.mark.parametrize("leaves", ["the first is killed", "the second is told to leave"])
def test_a_run_goes_on_without_a_machine_and_with_it_when_it_is_back(
    leaves, machine, alone, tmp_path
):
    out = tmp_path / "run"
    first, second = machine(), machine()
    reach(out, lambda: len(ranks_by_step(out)) > 0 and ranks_by_step(out)[-1][0] == 2)
    at = newest(out)
    reach(out, lambda: newest(out) >= at + 20)
    if leaves == "the first is killed":
        gone, rank = first, children(first.pid)
        gone.kill()
        os.kill(*rank, signal.SIGKILL)
        stays = second
    else:
        gone, stays = second, first
        gone.terminate()
    gone.wait(60)
    left = newest(out)
    reach(out, lambda: ranks_by_step(out)[-1][0] == 1)
    assert ranks_by_step(out)[-1][1] <= left + 20 + 5  # nothing is done again but since the save
    back = machine()
    reach(out, lambda: ranks_by_step(out)[-1][0] == 2)
    assert (stays.wait(240), back.wait(60)) == (0, 0)

    assert [ranks for ranks, _ in ranks_by_step(out)][-3:] == [2, 1, 2]
    usual = {record["step"]: record["tokens"] for record in records(alone)}
    tokens = {record["step"]: record["tokens"] for record in records(out)}
    assert {step: tokens.get(step) for step in usual} == usual
    one, other = (load_file(each / "model" / "model.safetensors") for each in (alone, out))
    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


KILLS = int(os.environ.get("BOTHWAYS_KILLS", "20"))


@pytest.mark.parametrize("sharding", ["none", "sharding"])
def test_a_rank_killed_at_random_loses_no_more_than_the_last_checkpoint(sharding, corpus, tmp_path):
    draws, out = random.Random(1), tmp_path / "run"
    setting = "sharding=none" if sharding == "none" else "sharding.kind=sharding"
    log = (tmp_path / "log").open("w")
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        f"--max-restarts={KILLS + 5}", "--monitor-interval=0.2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]  # fmt: skip
    words = pretraining(corpus.folder, out, "batch.n=4", "training.save=10 steps", setting)
    agent = subprocess.Popen(
        [*torchrun, *words], stdout=log, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    killed = 0
    kills = KILLS if sharding == "none" else max(1, KILLS // 4)
    try:
        while killed < kills and agent.poll() is None:
            saved = newest(out)
            limit = time.monotonic() + 120
            # After a further checkpoint, at any moment: also in the middle of the next one.
            while newest(out) <= saved and agent.poll() is None and time.monotonic() < limit:
                time.sleep(0.05)
            time.sleep(draws.random())
            if (ranks := children(agent.pid)) and agent.poll() is None:
                os.kill(draws.choice(ranks), signal.SIGKILL)
                killed += 1
        assert agent.wait(600) == 0
    finally:
        if agent.poll() is None:
            agent.terminate()
            agent.wait(60)
        log.close()
        text = (tmp_path / "log").read_text()
    assert killed == kills, text[-3000:]
    steps = {record["step"] for record in records(out)}
    assert {*range(5, STEPS + 1, 5)} <= steps  # none is missing
    assert (out / "model" / "model.safetensors").exists()
