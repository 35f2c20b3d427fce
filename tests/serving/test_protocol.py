"""HTTP at its edges, by bytes on a socket, and by the clients of other languages, where these are installed."""

import json
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bothways.serving import run
from bothways.serving.app import App, app
from running_server import connect, exchange, running, wait_for
from toy_predictors import TEXTS

FOREIGN = Path(__file__).parent / "foreign"
BODY = json.dumps({"inputs": [f"{TEXTS[0]} – naïve", TEXTS[1]]}, ensure_ascii=False)
LONG = json.dumps({"inputs": [TEXTS[0] * 20] * 300})
"""More than a buffer of a socket or of the server holds."""


@pytest.fixture(scope="module")
def application(predictors) -> App:
    return app(predictors["classify"])


@pytest.fixture(scope="module")
def answer(url) -> bytes:
    return httpx.post(f"{url}/classify", content=BODY.encode(), headers=JSON).content


JSON = {"content-type": "application/json"}


def head(*lines: str, version: str = "1.1", length: int | None = len(BODY.encode())) -> bytes:
    sized = [] if length is None else [f"content-length: {length}"]
    first = [f"POST /classify HTTP/{version}", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*first, *sized, *lines, "", ""]).encode()


def chunked(body: bytes, size: int = 16) -> bytes:
    pieces = [body[n : n + size] for n in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in [*pieces, b""])


UPGRADES = [
    ("connection: Upgrade, HTTP2-Settings, close", "upgrade: h2c", "http2-settings: AAMAAABkAAQ"),
    ("connection: close, upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
    ("upgrade: h2c", "connection: keep-alive, upgrade", "connection: close"),
]


@pytest.mark.parametrize("lines", UPGRADES)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_offers_of_other_protocols_keep_the_body(lines, pieces, url, answer):
    whole = head(*lines) + BODY.encode()
    border = whole.index(b"\r\n\r\n") + 4
    parts = {1: [whole], 2: [whole[:border], whole[border:]]}.get(
        pieces, [whole[:60], whole[60 : border + 5], whole[border + 5 :]]
    )
    received = exchange(url, *parts, pause=0.02)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(answer)
    in_chunks = head(*lines, "transfer-encoding: chunked", length=None) + chunked(BODY.encode())
    assert exchange(url, in_chunks).endswith(answer)


def test_an_offer_is_declined_for_each_request_of_a_connection(url, answer):
    offer = head("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AA")
    last = head("connection: close") + BODY.encode()
    received = exchange(url, offer + BODY.encode(), last, pause=0.05)
    assert received.count(answer) == 2
    get = b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    assert exchange(url, get, last, pause=0.05).count(b"HTTP/1.1 200 ") == 2
    assert b" 405 " in exchange(url, b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n").splitlines()[0]


@pytest.mark.parametrize("coding", ["content-length: 200000", "transfer-encoding: chunked"])
def test_a_body_that_comes_after_its_answer_is_no_request(url, coding):
    """A request that is refused by its head is answered while its body is on the way."""
    lines = head(coding, length=None).replace(b"/classify", b"/nothing")
    body = b" " * 200_000 if "length" in coding else chunked(b" " * 200_000, 10_000)
    last = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    received = exchange(url, lines, body, lines, body, last, pause=0.1)
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"404", b"404", b"200"]


def test_a_request_that_comes_with_the_rest_of_a_body_is_answered(predictors, gate, monkeypatch):
    monkeypatch.setattr(run, "KEEP_ALIVE_SECONDS", 0.3)
    with running(app(predictors["classify"])) as url, connect(url) as connection:
        connection.sendall(head(length=4).replace(b"/classify", b"/nothing"))
        time.sleep(0.1)
        connection.sendall(b"    " + head("connection: close") + BODY.encode())
        threading.Timer(0.6, gate.release).start()
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"404", b"200"]


def test_bodies_in_chunks_with_patience_and_uncompressed(url, answer):
    body, close = BODY.encode(), "connection: close"
    in_chunks = head(close, "transfer-encoding: chunked", length=None)
    assert exchange(url, in_chunks, chunked(body, 7)).endswith(answer)
    with_trailers = chunked(body)[:-2] + b"x-checksum: 1\r\n\r\n"
    assert exchange(url, in_chunks, with_trailers).endswith(answer)
    received = exchange(url, head(close, "expect: 100-continue"), body, pause=0.1)
    assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert received.endswith(answer)
    assert exchange(url, head(close, "content-encoding: identity"), body).endswith(answer)
    assert exchange(url, head(version="1.0"), body).endswith(answer)
    alive = head("connection: keep-alive", version="1.0")
    assert exchange(url, alive, body).endswith(answer)
    long = head(close, length=len(LONG)) + LONG.encode()
    assert exchange(url, long).count(b'"label"') == 300


def test_compressed_bodies_and_other_media_types_are_refused(url):
    for headers, allowed in (
        ({**JSON, "content-encoding": "gzip"}, "identity"),
        ({"content-type": "application/json; charset=latin-1"}, None),
        ({"content-type": "text/plain"}, None),
    ):
        response = httpx.post(f"{url}/classify", content=BODY.encode(), headers=headers)
        assert response.status_code == 415
        assert response.json()["error"]["code"] == "unsupported_media_type"
        assert response.headers.get("accept-encoding") == allowed
    utf8 = {"content-type": 'Application/JSON; charset="UTF-8"'}
    assert httpx.post(f"{url}/classify", content=BODY.encode(), headers=utf8).status_code == 200


def test_a_client_that_sends_no_more_gets_its_answers(url, answer):
    body = BODY.encode()
    assert exchange(url, head(), body, close=True).endswith(answer)
    assert exchange(url, head(version="1.0"), body, close=True).endswith(answer)
    both = (head() + body) * 2
    assert exchange(url, both, close=True).count(answer) == 2
    assert exchange(url, head(), body[:-5], close=True) == b""


def test_a_client_that_has_left_is_not_computed_for(application, url):
    texts = json.dumps({"inputs": [f"{TEXTS[0]} {n}" for n in range(2000)]}).encode()
    with connect(url) as connection:
        connection.sendall(head(length=len(texts)) + texts)
        wait_for(lambda: application.batcher.queued_tokens > 5000)
    wait_for(lambda: application.batcher.queued_tokens == 0)
    assert 'status="499"' in httpx.get(f"{url}/metrics").text


def test_several_hosts_are_refused(url):
    received = exchange(url, head("host: example.com", "connection: close") + BODY.encode())
    assert received.startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_are_answered_in_order(url, answer):
    get = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = head("connection: close") + BODY.encode()
    received = exchange(url, head() + BODY.encode() + get + last)
    first, second, third = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert (first.endswith(answer), third.endswith(answer)) == (True, True)
    assert second.endswith(b'{"status":"live"}')


def lines_of(command: list[Any], **more: Any) -> list[bytes]:
    """The lines that a client prints."""
    program = command[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    result = subprocess.run(command, capture_output=True, timeout=180, check=False, **more)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.splitlines()


HEADERS = ("transfer-encoding: chunked", "expect: 100-continue")
CURL = [[], ["--http2"], ["--http1.0"], *(["-H", line] for line in HEADERS)]


@pytest.mark.parametrize("options", CURL, ids=lambda options: " ".join(options) or "usual")
def test_curl(options, url, answer):
    sent = ["-d", "@-", "-H", "content-type: application/json", f"{url}/classify"]
    assert lines_of(["curl", "-s", "-m", "20", *options, *sent], input=BODY.encode()) == [answer]
    with_long = lines_of(["curl", "-s", "-m", "60", *options, *sent], input=LONG.encode())
    assert with_long[0].count(b'"label"') == 300


@pytest.mark.clients
@pytest.mark.parametrize(
    ("command", "count"),
    [
        (["java", FOREIGN / "Client.java"], 9),
        (["go", "run", FOREIGN / "client.go"], 5),
        (["node", FOREIGN / "client.mjs"], 4),
    ],
    ids=["java", "go", "node"],
)
def test_clients_of_other_languages(command, count, url, answer):
    lines = lines_of([*command, f"{url}/classify", BODY])
    assert len(lines) >= count
    assert set(lines) == {b"200 " + answer}
