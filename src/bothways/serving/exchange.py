"""One request over HTTP: reading its body, and what is logged and counted of it.

The playground is a page to try models in a browser, with the files of one folder. It loads nothing
from elsewhere and runs no inline script, and its content security policy makes the browser enforce
both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bothways.core.files import DuplicateKey, unique_keys
from bothways.serving.errors import Limits, RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
DISCARD_SECONDS, PAUSE_SECONDS = 5.0, 0.2
_CHECK_KEYS = json.JSONDecoder(object_pairs_hook=unique_keys).decode
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(eq=False)
class Exchange:
    """One request and what becomes of it.

    Attributes:
        id: echoed in `x-request-id`.
        request_headers: of the request, by names in lower case.
        route: for metrics: a path of the table, never one that a client made up.
        size: bytes of the body by its header; None if there is none.
        buffered: bytes of the body that were read.
        start: by `time.perf_counter`.
        deadline: by `time.monotonic`, once the body has been read.
        model, texts, tokens, cut: of the answer, once known.
        seconds: duration of `tokenize`, `queue`, `compute` and `search`, where the request got to.
        headers: of the response.
    """

    id: str
    request_headers: Mapping[str, str]
    size: int | None
    route: str = "unknown"
    start: float = field(default_factory=time.perf_counter)
    deadline: float = math.inf
    buffered: int = 0
    model: str = ""
    texts: int = 0
    tokens: int = 0
    cut: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Iterable[tuple[bytes, bytes]]) -> Exchange:
        """Return the exchange that begins now, with the client's own id if it gives a fit one."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}
        id, length = headers.get("x-request-id", ""), headers.get("content-length", "")
        id = id if _ID.fullmatch(id) else uuid.uuid4().hex
        return cls(id, headers, int(length) if length.isdecimal() else None)


class ClientLeft(Exception):
    """The client has closed the connection."""


async def read_body(
    headers: Mapping[str, str],
    receive: Receive,
    limits: Limits,
    size: int = 0,
    hold: Callable[[int], RequestError | None] = lambda _: None,
) -> bytes:
    """Return the body of a request, which says that it is plain JSON in UTF-8.

    Args:
        size: the bytes of the body by its header.
        hold: counts further bytes; returns the refusal if they exceed the memory of bodies.

    Raises:
        RequestError: it says something else, is too large or comes too slowly.
        ClientLeft: the client closed the connection.
    """
    kind, _, parameters = headers.get("content-type", "").lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w.:-]+)", parameters)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        message = f"send the body uncompressed, not with content-encoding: {coding[:50]}"
        identity = {"accept-encoding": "identity"}
        raise RequestError("unsupported_media_type", message, headers=identity)
    if kind.strip() != "application/json":
        media_type = kind.strip() or "nothing"
        message = f"send JSON, with content-type: application/json, not {media_type[:50]!r}"
        raise RequestError("unsupported_media_type", message)
    # ASCII is a part of UTF-8.
    if charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        message = f"JSON is in UTF-8, not in charset={charset[1][:50]}"
        raise RequestError("unsupported_media_type", message)
    if size > limits.body_bytes and "expect" not in headers:  # else the client waits for a sign
        await _discard(receive)
    limits.check("body_bytes", "bytes", size)
    try:
        return await asyncio.wait_for(_read(receive, limits, hold), limits.body_seconds)
    except asyncio.TimeoutError:
        message = f"the body took more than {limits.body_seconds:g} s (body_seconds)"
        raise RequestError("request_timeout", message) from None


def json_object(data: bytes, url: bytes) -> dict[str, Any]:
    """Return the object in a body.

    Raises:
        RequestError: it is not a JSON object, a key stands in it twice, or the URL has fields
            (`b"top_k=1"`).
    """
    if url:
        raise RequestError("bad_request", "the URL has fields: they belong into the body")
    try:
        text = data.decode()
        body = orjson.loads(data)
        _CHECK_KEYS(text)  # {"text": "a", "text": "b"}: orjson keeps the last one
    except UnicodeDecodeError as error:  # of which orjson says "surrogates not allowed"
        message = f"the body is not UTF-8 at byte {error.start:,}; JSON is in UTF-8"
        raise RequestError("invalid_json", message) from None
    except DuplicateKey as error:
        name = str(error)[:100]
        raise RequestError("invalid", f"{name} is there twice", param=name) from None
    except (ValueError, RecursionError) as error:  # orjson's are ValueErrors
        raise RequestError("invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("bad_request", "the body must be a JSON object")
    return body


async def _read(
    receive: Receive, limits: Limits, hold: Callable[[int], RequestError | None]
) -> bytes:
    """Return a whole body."""
    chunks, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limits.body_bytes and message.get("more_body", False):
            await _discard(receive)
        limits.check("body_bytes", "bytes", size)
        if (refusal := hold(len(chunk))) is not None:
            chunks.clear()
            if message.get("more_body", False):
                await _discard(receive)
            raise refusal
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _discard(receive: Receive) -> None:
    """Read and drop the rest of a body that is too large, for `DISCARD_SECONDS` at most.

    To close a connection while its client still sends resets it, and the client does not see why.
    A client that has stopped for `PAUSE_SECONDS` waits for the answer.
    """
    until = time.monotonic() + DISCARD_SECONDS
    pending = True
    with contextlib.suppress(asyncio.TimeoutError):
        while pending and time.monotonic() < until:
            message = await asyncio.wait_for(receive(), PAUSE_SECONDS)
            pending = message["type"] == "http.request" and message.get("more_body", False)


async def respond(
    send: Send, status: int, body: bytes, kind: str, exchange: Exchange, head: bool
) -> None:
    """Send a response; without its body if `head` is true, as HEAD asks."""
    headers = {
        "content-type": kind,
        "content-length": str(len(body)),
        "x-request-id": exchange.id,
        "x-content-type-options": "nosniff",
    }
    lines = (*headers.items(), *exchange.headers.items())
    raw = [(name.encode(), value.encode()) for name, value in lines]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": b"" if head else body})


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


SECONDS = tuple(0.0005 * 2**n for n in range(18))
"""Upper bounds of durations, 0.5 ms to 65 s."""
SIZES = tuple(float(2**n) for n in range(15))


class Metrics:
    """The metrics of one server, in a registry of their own.

    Labels have few values: routes and models that exist, statuses of the catalogue.

    Args:
        queue_tokens: the limit of what may wait.
        is_ready: whether new requests are welcome, asked when the metrics are read.
    """

    def __init__(self, queue_tokens: int, is_ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry, "namespace": "bothways"}
        counter = functools.partial(Counter, **options)
        seconds = functools.partial(Histogram, buckets=SECONDS, **options)
        sizes = functools.partial(Histogram, buckets=SIZES, **options)
        gauge = functools.partial(Gauge, **options)
        self._requests = counter("requests", "Requests answered.", ("route", "model", "status"))
        description = "From the first byte of a request to its answer."
        self._seconds = seconds("request_seconds", description, ("route",))
        self._queue = seconds("queue_seconds", "From queue to model.")
        self._batch_seconds = seconds("batch_seconds", "Computation of a batch.")
        self._batch_tokens = sizes("batch_tokens", "Tokens of a batch.")
        self._batch_sequences = sizes("batch_sequences", "Sequences of a batch.")
        self._texts = counter("texts", "Inputs answered.", ("model",))
        self._tokens = counter("tokens", "Tokens of inputs answered.", ("model",))
        self._cut = counter("truncated_texts", "Inputs longer than the model reads.", ("model",))
        self.queued = gauge("queue_tokens", "Tokens that wait.")
        gauge("queue_limit_tokens", "Tokens that may wait; more are refused.").set(queue_tokens)
        ready = gauge("ready", "1 while new requests are welcome, else 0.")
        ready.set_function(lambda: float(is_ready()))
        description = "When the model was opened, in seconds since 1970."
        self._loaded = gauge("model_opened_seconds", description, ("model",))

    def request(self, route: str, model: str, status: int, seconds: float) -> None:
        """Count a request, answered or refused."""
        self._requests.labels(route, model, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answered(self, model: str, texts: int, tokens: int, cut: int, queued: float) -> None:
        """Count the inputs of a request that was answered."""
        self._texts.labels(model).inc(texts)
        self._tokens.labels(model).inc(tokens)
        self._cut.labels(model).inc(cut)
        self._queue.observe(queued)

    def batch(self, tokens: int, sequences: int, seconds: float) -> None:
        """Count a batch."""
        self._batch_seconds.observe(seconds)
        self._batch_tokens.observe(tokens)
        self._batch_sequences.observe(sequences)

    def loaded(self, model: str, created: int) -> None:
        """Keep when a model was opened, and show its counters from the first scrape on.

        Prometheus computes no increase for a counter that first appears with a value above 0, so
        an alert would miss the first one.
        """
        self._loaded.labels(model).set(created)
        for counter in (self._texts, self._tokens, self._cut):
            counter.labels(model)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


KINDS = {"html": "html", "css": "css", "js": "javascript"}
"""The subtypes of the files, by suffix."""
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""The headers of the page and its files, next to those of every response."""


@dataclass(frozen=True)
class Page:
    """A file for a browser with its content type, and the status and headers of its response."""

    body: bytes
    kind: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)


MOVED = Page(b"", "text/plain", 308, {**HEADERS, "location": "../play"})
"""The answer to `/play/`, from which the files of the page would have other addresses."""


@functools.cache
def pages() -> Mapping[str, Page]:
    """Return the files of the playground by path: the page itself is `/play`."""
    files = dict[str, Page]()
    for file in (resources.files("bothways.serving") / "page").iterdir():
        kind = f"text/{KINDS[file.name.rpartition('.')[2]]}; charset=utf-8"
        files[f"/play/{file.name}"] = Page(file.read_bytes(), kind)
    return {"/play": files.pop("/play/index.html"), **files}
