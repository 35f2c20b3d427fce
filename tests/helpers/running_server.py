"""A server on the loopback address in a thread of the test."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from bothways.serving.app import App
from bothways.serving.run import Server, bind, url_of


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Return when a condition is true; fail after some seconds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


@contextmanager
def serving(application: App, **options: int) -> Iterator[tuple[str, Server, threading.Thread]]:
    """The URL of a server of which the test decides when it stops, the server and its thread.

    Options of the socket are by name, such as SO_SNDBUF.
    """
    bound = bind("127.0.0.1", 0)
    for name, value in options.items():
        bound.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    server = Server(application)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    try:
        # The text at the start has been computed, and its batch has ended.
        wait_for(lambda: server.started and application.batcher._busy_since is None)
        yield url_of(bound), server, thread
    except BaseException:
        server.should_exit = True
        raise
    finally:
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def running(application: App) -> Iterator[str]:
    """The URL of a server that answers by the app until the context is left."""
    with serving(application) as (url, server, _):
        try:
            yield url
        finally:
            server.should_exit = True


def classify(url: str, inputs: Any = "good film", **options: Any) -> httpx.Response:
    """The response of a classifier, whatever it is."""
    return httpx.post(f"{url}/classify", json={"inputs": inputs}, **{"timeout": 30, **options})


def answer(client: httpx.Client, path: str, body: Any) -> Any:
    """The JSON of an answer without an error."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(client: httpx.Client, path: str, body: Any) -> tuple[int, str, str | None, str]:
    """The status, code, field and message of an error."""
    response = client.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"], error["message"]


def connect(url: str) -> socket.socket:
    """A connection to a server."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def exchange(url: str, *parts: bytes, close: bool = False, pause: float = 0.0) -> bytes:
    """The bytes that a server sends for others, until it closes; `close` ends what is sent."""
    received = b""
    with connect(url) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            if close:
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                received += data
        except (ConnectionResetError, BrokenPipeError):
            pass
    return received
