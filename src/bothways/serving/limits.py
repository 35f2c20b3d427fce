"""The limits of a server, each with a name that its errors mention."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bothways.core.errors import ConfigError
from bothways.serving.errors import check_limit


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
        connections: open at the same time.
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
            value = getattr(self, field.name)
            if not value > 0:
                message = f"must be above 0, not {value}"
                raise ConfigError(message, where=f"limits.{field.name}")
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
