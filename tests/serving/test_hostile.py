"""Hostile bytes, texts, clients and moments: the server answers, refuses or closes, and goes on."""

import json
import logging
import math
import signal
import socket
import threading
import time

import httpx
import pytest
from hypothesis import given, strategies as some

from bothways.serving.app import App, app, requests_log
from bothways.serving.errors import Limits
from bothways.serving.run import _JsonLines, bind, logged_as_json, url_of
from running_server import classify, connect, exchange, serving, wait_for


@pytest.fixture(scope="module")
def application(predictors) -> App:
    return app({name: predictors[name] for name in ("classify", "embed")})


def statuses(application: App) -> set[str]:
    """The statuses of all requests so far."""
    rows = application.metrics.text().decode().splitlines()
    found = [row for row in rows if row.startswith("bothways_requests_total{")]
    return {row.split('status="')[1][:3] for row in found}


BODY = b'{"inputs": "a good film"}'
HEAD = b"POST /classify HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
EDITS = some.tuples(some.integers(0, len(WHOLE)), some.integers(0, 8), some.binary(max_size=6))


@given(
    some.sampled_from([WHOLE, CHUNKED, b"GET /live HTTP/1.1\r\n\r\n", WHOLE + WHOLE]),
    some.lists(EDITS, max_size=3),
)
def test_damaged_requests_on_a_socket(application, url, raw, edits):
    for start, size, new in edits:
        raw = raw[:start] + new + raw[start + size :]
    exchange(url, raw, close=True)
    assert {status for status in statuses(application) if status >= "500"} == set()
    assert httpx.get(f"{url}/live").status_code == 200


HOSTILE = [
    "\ufdfa" * 20_000, "a" + "\u0301" * 100_000, "a" * 190_000, "\u200b\u202e\x00\x1b" * 5_000,
    "\U0001f600\u200d" * 20_000, "\ud7ff\ue000\uffff\U0010ffff", " " * 100_000, "!" * 50_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(8))
def test_hostile_texts_are_answered(url, text):
    start = time.process_time()
    response = classify(url, text)
    assert response.status_code == 200, response.text[:300]
    assert time.process_time() - start < 5  # nothing is quadratic


def test_a_client_that_leaves_in_the_middle_of_a_body(application, url):
    with connect(url) as connection:
        connection.sendall(WHOLE[:-5])
    wait_for(lambda: "499" in statuses(application))


def test_a_log_that_cannot_be_written_stops_nothing(url):
    tried = threading.Event()

    class Full:
        def write(self, text: str) -> None:
            tried.set()
            raise OSError(28, "No space left on device")

        flush = write

    handler = logging.StreamHandler(Full())
    handler.setFormatter(_JsonLines())
    requests_log.addHandler(handler)
    requests_log.setLevel(logging.INFO)
    try:
        assert classify(url).status_code == 200
        assert tried.wait(20)  # the line is written after the answer
        assert classify(url).status_code == 200
    finally:
        requests_log.removeHandler(handler)
        requests_log.setLevel(logging.NOTSET)


def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with bind("::1", 0) as bound:
        assert url_of(bound).startswith("http://[::1]:")


def test_a_server_may_wait_for_its_requests_without_a_limit(predictors):
    endless = app(predictors["classify"], limits=Limits(drain_seconds=math.inf))
    with serving(endless) as (url, server, _):
        assert server.config.timeout_graceful_shutdown is None
        assert httpx.get(f"{url}/live").status_code == 200
        server.should_exit = True


@pytest.mark.parametrize("count", [40, 400])  # answers of 15 kB, and of 150 kB
def test_a_client_that_does_not_read_loses_its_connection(predictors, count):
    application = app(predictors["embed"], limits=Limits(deadline_seconds=1.0))
    with serving(application, SO_SNDBUF=4096) as (url, server, _):
        body = json.dumps({"inputs": ["a good film"] * count}).encode()
        raw = WHOLE.replace(b"classify", b"embed").partition(b"content-length")[0]
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            connection.sendall(raw + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
            wait_for(lambda: not server.server_state.connections)
        assert httpx.get(f"{url}/ready").status_code == 200
        server.should_exit = True


@pytest.mark.parametrize("signals", [1, 2])
def test_signals_under_load(predictors, gate, signals):
    application = app(predictors["classify"], limits=Limits(batch_tokens=16))
    answers: list[int] = []
    with serving(application) as (url, server, thread):

        def ask() -> None:
            try:
                answers.append(classify(url).status_code)
            except httpx.HTTPError:
                answers.append(0)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        threads[0].start()
        wait_for(lambda: application.batcher._busy_since)  # it is computed, by itself
        for each in threads[1:]:
            each.start()
        wait_for(lambda: application.batcher.queued_tokens == 11 * 4)
        for _ in range(signals):
            server.handle_exit(signal.SIGTERM, None)
        if signals == 2:  # it ends by itself, without the batch that is computed
            wait_for(lambda: answers)
        gate.release(100)
        for each in threads:
            each.join(30)
        thread.join(30)
    assert len(answers) == 12
    if signals == 1:
        assert answers == [200] * 12  # none is lost
    else:
        assert set(answers) <= {0, 200, 503}
        assert answers.count(200) < 12


def test_requests_that_the_end_cuts_short_are_answered_and_recorded(predictors, gate, capsys):
    """Each was an exception with a traceback in the log, and in no metric."""
    application = app(predictors["classify"], limits=Limits(drain_seconds=1.0))
    answers: list[int] = []
    with logged_as_json(requests=True), serving(application) as (url, server, _):
        ask = threading.Thread(target=lambda: answers.append(classify(url).status_code))
        ask.start()
        wait_for(lambda: application.batcher._busy_since is not None)
        server.handle_exit(signal.SIGTERM, None)
        ask.join(30)
        gate.release(10)
    assert answers == [503]
    assert "503" in statuses(application)
    log = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["status"] for line in log if "status" in line] == [503]
    assert not any("traceback" in line for line in log)
