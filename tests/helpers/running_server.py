"""A server on the loopback address in a thread of the test."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bothways.serving.app import App
from bothways.serving.run import Server, bind, url_of


@contextmanager
def running(application: App) -> Iterator[str]:
    """The URL of a server that answers by the app until the context is left."""
    bound = bind("127.0.0.1", 0)
    server = Server(application)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    try:
        until = time.monotonic() + 30
        # The text at the start has been computed, and its batch has ended.
        while not server.started or application.batcher.busy_seconds():
            assert time.monotonic() < until
            time.sleep(0.005)
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
