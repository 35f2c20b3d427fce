"""The errors of the server, one catalogue of codes and one JSON shape, and its limits.

{"error": {"message": "…", "type": "…", "code": "…", "param": "…"}, "error_type": "…"}

`error` is as OpenAI's clients read it; `error_type` repeats the code for clients of TEI.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError

_CODES_BY_STATUS = {
    400: "invalid_json bad_request",
    401: "unauthorized",
    403: "forbidden_host",
    404: "not_found model_not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large too_many_texts text_too_long too_many_tokens",
    415: "unsupported_media_type",
    422: "invalid empty wrong_task",
    499: "client_left",
    429: "overloaded",
    500: "internal not_finite",
    503: "not_ready draining",
    504: "deadline",
}
STATUS = {code: status for status, codes in _CODES_BY_STATUS.items() for code in codes.split()}
"""The status of each code. Nobody receives 499: it is in logs and metrics."""

FAILURES = ("internal", "not_finite")
"""Codes of a model that fails."""
TRY_AGAIN = (429, 503)
"""Statuses that come with the seconds until a client should try again."""


class RequestError(Exception):
    """A request that is not answered.

    Args:
        code: a key of `STATUS`.
        message: what was given, what is allowed, and what to do.
        param: the field of the request, if one is at fault.
        headers: of the response. Those of `TRY_AGAIN` have `retry-after`, by default a second.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.status = code, message, param, STATUS[code]
        retry = retry_after(1) if self.status in TRY_AGAIN else {}
        self.headers = {**retry, **(headers or {})}

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "code": self.code, "param": self.param}
        return {"error": error, "error_type": self.code}


def check_limit(code: str, subject: str, value: int, name: str, limit: int) -> None:
    """Refuse a request beyond a limit, with the name of the limit."""
    if value > limit:
        message = f"{subject}: {value:,} is above the limit of {limit:,} ({name})"
        raise RequestError(code, message, param=name)


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header with the seconds until a client should try again, from 1 to 60."""
    return {"retry-after": str(min(60, max(1, math.ceil(seconds))))}


@dataclass(frozen=True)
class Limits:
    """Limits of requests and of waiting.

    Attributes:
        body_bytes: of a request.
        texts: inputs of a request, such as texts to embed or documents to rank.
        text_characters: of one input, before it is tokenized; an item of a list, such as a word,
            counts as one at least.
        request_characters: of all inputs, where a query counts once for each of its documents.
        request_tokens: of all sequences of a request; those of a long text or of a likelihood have
            more tokens than the text.
        queue_tokens: that wait for the model. A request is accepted or refused as a whole.
        batch_tokens: of sequences that are computed together.
        connections: open at the same time; some more for requests that compute nothing.
        head_seconds: until the headers of a request have arrived.
        body_seconds: until its body has arrived.
        deadline_seconds: until its answer, and until a client has read it. Clients may ask for less
            by the header `x-request-timeout`.
        drain_seconds: for requests that are under way when the server stops.
    """

    body_bytes: int = 8 << 20
    texts: int = 2048
    text_characters: int = 200_000
    request_characters: int = 8 << 20
    request_tokens: int = 131_072
    queue_tokens: int = 131_072
    batch_tokens: int = 1024
    connections: int = 1000
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    deadline_seconds: float = 60.0
    drain_seconds: float = 25.0

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = {field.name: getattr(self, field.name)}
            require_range("(0, inf]", "limits", fix=None, **limit)
        if self.request_tokens > self.queue_tokens:
            message = f"{self.request_tokens} tokens do not fit in a queue of {self.queue_tokens}"
            fix = "Set limits.queue_tokens to at least as many."
            raise ConfigError(message, where="limits.request_tokens", fix=fix)

    def check(self, name: str, subject: str, value: int) -> None:
        """Refuse a request in which there is more of a subject than the limit of this name."""
        check_limit(_CODES[name], subject, value, name, getattr(self, name))


_CODES = {
    "body_bytes": "body_too_large", "texts": "too_many_texts", "text_characters": "text_too_long",
    "request_characters": "text_too_long", "request_tokens": "too_many_tokens",
}  # fmt: skip

DEFAULT_LIMITS = Limits()
