"""Processes that predict parts: the bytes of one process, whatever is killed on the way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bothways.prediction.bulk.folder import PARTS, SUCCESS
from bothways.prediction.bulk.parts import BulkRequest
from bothways.prediction.bulk.run import predict_files
from child_processes import children
from toy_bulk import make_classifier, make_rows, write_rows

PARTS_OF_ALL = 60


def wait_for(out: Path, parts: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until this many parts are finished."""
    for _ in range(6000):
        if len([*(out / PARTS).glob("*.json")]) >= parts:
            return
        assert process.poll() is None
        time.sleep(0.01)
    raise AssertionError(f"{parts} parts take more than a minute")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_workers_and_a_killed_run_lose_and_repeat_nothing(tmp_path):
    model = str(make_classifier(tmp_path))
    file = write_rows(tmp_path / "rows.jsonl", make_rows(2 * PARTS_OF_ALL))
    asked = BulkRequest(model, (file,), rows=2, keep=("id",))
    predict_files(asked, tmp_path / "reference")
    out = tmp_path / "out"
    words = ["predict", model, file, "--out", str(out), "--rows=2", "--keep=id", "--processes=2"]
    process = subprocess.Popen([sys.executable, "-m", "bothways", *words])
    try:
        wait_for(out, 1, process)
        workers = children(process.pid)
        os.kill(workers[0], signal.SIGKILL)
        wait_for(out, 10, process)
        assert {*children(process.pid)} != {*workers}
    finally:
        process.kill()
        process.wait()
    assert not (out / SUCCESS).exists()
    finished = len([*(out / PARTS).glob("[!.]*.json")])  # without one that was being written
    done = predict_files(asked, out)
    assert (done.rows, done.parts, done.again) == (2 * PARTS_OF_ALL, PARTS_OF_ALL, finished)
    for part in (tmp_path / "reference").glob("part-*"):
        assert (out / part.name).read_bytes() == part.read_bytes()
    assert len([*out.glob("part-*")]) == PARTS_OF_ALL
