"""A server in operation: its log, its signals, spans, and the digest of a folder."""

import json
import logging
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bothways.hub.provenance import digest_of_model
from bothways.serving import run
from bothways.serving.app import requests_log
from bothways.serving.compatible import info
from bothways.serving.errors import DEFAULT_LIMITS
from commands import run_line
from running_server import wait_for
from toy_folder import save_classifier


@pytest.fixture
def films(folder, tmp_path) -> Path:
    """A model folder with a label head at random."""
    return save_classifier(tmp_path / "films", folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_after_the_requests_under_way(number, films, monkeypatch, capsys):
    names = ("bothways.serving", "uvicorn.error", "asyncio", requests_log.name)
    loggers = [logging.getLogger(name) for name in names]

    def states() -> list[object]:
        return [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]

    before, text = states(), "the film is good"
    lines: list[Any] = []
    monkeypatch.setenv("BOTHWAYS_API_KEY", "secret")
    pool = ThreadPoolExecutor(1)

    def ask() -> list[int]:
        """The statuses of requests before the signal and after it."""
        url = lines[0].split(" on ")[1].split(",")[0]
        with httpx.Client(base_url=url, headers={"x-api-key": "secret"}, timeout=60) as client:

            def classify() -> int:
                return client.post("/classify", json={"inputs": text}).status_code

            try:
                wrong = httpx.post(f"{url}/classify", json={"inputs": "a"}, timeout=60)
                early = [client.get("/ready").status_code, classify(), wrong.status_code]
            finally:
                os.kill(os.getpid(), number)  # else the server never ends
            wait_for(lambda: client.get("/ready").status_code == 503)
            return [*early, classify()]

    def print_line(line: str) -> None:
        lines.append(line)
        lines.append(pool.submit(ask))

    monkeypatch.setattr(run, "print_line", print_line)
    run_line("serve", films, "--port", 0, "--drain-delay", 0.5)
    assert lines[0].startswith("serving films (classify) on http://127.0.0.1:")
    assert lines[1].result() == [200, 200, 401, 200]
    log = capsys.readouterr().err
    assert {json.loads(row)["status"] for row in log.splitlines()} == {200, 401, 503}
    assert text not in log
    assert "secret" not in log
    assert states() == before
    requests_log.info({"event": "later"})
    assert capsys.readouterr().err == ""


def test_a_server_may_open_as_many_files_as_it_may_have_connections(films):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed: list[int] = []

    def opened() -> None:
        allowed.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.kill(os.getpid(), signal.SIGTERM)

    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with run.bind("127.0.0.1", 0) as bound:
            run.run_server(run.open_app({"films": (str(films), None)}), bound, opened=opened)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed[0] > 2 * DEFAULT_LIMITS.connections


def test_a_server_needs_nothing_that_windows_lacks(films, monkeypatch):
    answers: list[bytes] = []
    for name in ("SIGHUP", "SIGPIPE"):
        monkeypatch.delattr(signal, name)
    monkeypatch.delattr(select, "poll")
    monkeypatch.setitem(sys.modules, "resource", None)

    def ask(address: tuple[str, int]) -> None:
        try:
            with socket.create_connection(address, 30) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                client.shutdown(socket.SHUT_WR)
                answers.append(b"".join(iter(lambda: client.recv(4096), b"")))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with run.bind("127.0.0.1", 0) as bound, ThreadPoolExecutor(1) as pool:
        application = run.open_app({"films": (str(films), None)})
        run.run_server(application, bound, opened=lambda: pool.submit(ask, bound.getsockname()))
    assert b"HTTP/1.1 200 OK" in answers[0]


def test_the_digest_is_of_what_predictions_depend_on(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    digest = digest_of_model(str(copy))
    assert digest == digest_of_model(str(folder))
    served = run.open_app({"bert": (str(copy), "fill")})
    assert [model["digest"] for model in info(served.models)["models"]] == [digest]
    (copy / "notes.txt").write_text("a")
    assert digest_of_model(str(copy)) == digest
    for name in ("modules.json", "1_Pooling/config.json", "config.json"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(f'{{"{name}": 1}}')
        assert digest_of_model(str(copy)) != digest
        digest = digest_of_model(str(copy))
    moved = {"train": "moved.tsv"}
    of_the_run = {
        "bothways": "9", "date": "2031-01-01", "seconds": 2.5, "settings": moved, "pretraining": moved,
    }  # fmt: skip
    for record, equal in ((of_the_run, True), ({"length": 7}, False), ({"source": {}}, False)):
        (copy / "bothways.json").write_text(json.dumps(record))
        assert (digest_of_model(str(copy)) == digest) is equal
    # In older folders of sentence-transformers the pooling is around the model.
    shutil.copytree(folder, tmp_path / "old" / "0_Transformer")
    modules = [{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}]
    (tmp_path / "old" / "modules.json").write_text(json.dumps(modules))
    digest = digest_of_model(str(tmp_path / "old"))
    (tmp_path / "old" / "1_Pooling").mkdir()
    (tmp_path / "old" / "1_Pooling" / "config.json").write_text("{}")
    assert digest_of_model(str(tmp_path / "old")) != digest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.slow
def test_a_log_on_a_full_disk_is_told_on_the_output(films):
    call = [sys.executable, "-m", "bothways", "serve", str(films), "--port", "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(call, stdout=-1, stderr=full, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "standard error cannot be written" in done.stdout
