"""One request over HTTP: reading its body, and what is logged of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import orjson

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
    model: str = ""
    texts: int = 0
    tokens: int = 0
    cut: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Iterable[tuple[bytes, bytes]]) -> Exchange:
        """Return the exchange that begins now, with the client's own id if it gives a fit one.

        Args:
            raw: names and values of the headers.
        """
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}
        id, length = headers.get("x-request-id", ""), headers.get("content-length", "")
        id = id if _ID.fullmatch(id) else uuid.uuid4().hex
        return cls(id, headers, int(length) if length.isdecimal() else None)


class ClientLeft(Exception):
    """The client has closed the connection."""


async def read_body(
    headers: Mapping[str, str], receive: Receive, limits: Limits, size: int = 0
) -> bytes:
    """Return the body of a request, which says that it is plain JSON in UTF-8.

    Args:
        size: the bytes of the body by its header.

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
        return await asyncio.wait_for(_read(receive, limits), limits.body_seconds)
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
        body = orjson.loads(data)
        _CHECK_KEYS(data.decode())  # {"text": "a", "text": "b"}: orjson keeps the last one
    except DuplicateKey as error:
        name = str(error)[:100]
        raise RequestError("invalid", f"{name} is there twice", param=name) from None
    except (ValueError, RecursionError) as error:  # orjson's are ValueErrors
        raise RequestError("invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("bad_request", "the body must be a JSON object")
    return body


async def _read(receive: Receive, limits: Limits) -> bytes:
    """Return a whole body."""
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limits.body_bytes and message.get("more_body", False):
            await _discard(receive)
        limits.check("body_bytes", "bytes", size)
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
    extra = [(k.encode(), v.encode()) for k, v in exchange.headers.items()]
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", exchange.id.encode()),
            (b"x-content-type-options", b"nosniff"),
            *extra,
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": b"" if head else body})


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


def log_line(exchange: Exchange, status: int, size: int, seconds: float) -> dict[str, Any]:
    """Build the log entry of a request: never a text, a key or an address."""
    return {
        "id": exchange.id,
        "route": exchange.route,
        "model": exchange.model,
        "status": status,
        "texts": exchange.texts,
        "tokens": exchange.tokens,
        "truncated": exchange.cut,
        "tokenize_ms": round(1000 * exchange.seconds["tokenize"], 3),
        "queue_ms": round(1000 * exchange.seconds["queue"], 3),
        "model_ms": round(1000 * exchange.seconds["compute"], 3),
        "total_ms": round(1000 * seconds, 3),
        "bytes": size,
    }
