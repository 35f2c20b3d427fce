"""Ranks that are killed under torchrun: the run goes on from its last checkpoint.

Each start of torchrun takes seconds, so these tests are behind a marker: `make test-elastic`.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_runs import newest, ranks_of, records

pytestmark = pytest.mark.elastic

KILLS = int(os.environ.get("BOTHWAYS_KILLS", "20"))
STEPS = 3000


def command(corpus: Path, out: Path, *settings: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        f"--max-restarts={KILLS + 5}", "--monitor-interval=0.2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", "-m", "bothways", "pretrain", str(corpus),
        "--out", str(out), "--resume", "--model", "bert-tiny", "--device", "cpu",
        "encoder.width=32", "encoder.intermediate_size=64", "batch.kind=examples", "batch.n=4",
        f"training.until={STEPS} steps", "training.save=10 steps", "training.report=5 steps",
        "training.precision=fp32", "held_out=0.1", "evaluation_tokens=400", *settings,
    ]  # fmt: skip


@pytest.mark.parametrize("sharding", ["none", "sharding"])
def test_a_rank_killed_at_random_loses_no_more_than_the_last_checkpoint(sharding, corpus, tmp_path):
    draws, out = random.Random(1), tmp_path / "run"
    setting = "sharding=none" if sharding == "none" else "sharding.kind=sharding"
    log = (tmp_path / "log").open("w")
    agent = subprocess.Popen(
        command(corpus.folder, out, setting), stdout=log, stderr=subprocess.STDOUT,
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
            if (ranks := ranks_of(agent.pid)) and agent.poll() is None:
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
