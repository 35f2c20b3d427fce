"""Counts and durations of a server in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bothways.core.errors import optional

SECONDS = tuple(0.0005 * 2**n for n in range(18))
"""Upper bounds of durations, 0.5 ms to 65 s."""
SIZES = tuple(float(2**n) for n in range(15))


class Metrics:
    """The metrics of one server, in a registry of their own.

    Labels have few values: routes and models that exist, statuses of the catalogue.

    Args:
        queued_tokens: returns the tokens that wait.
        ready: returns whether the server is ready.
    """

    def __init__(self, queued_tokens: Callable[[], float], ready: Callable[[], bool]) -> None:
        with optional("serve", "serving"):
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        kept: dict[str, Any] = {"registry": self.registry}
        labels = ("route", "model", "status")
        self._requests = Counter("bothways_requests", "Requests answered.", labels, **kept)
        self._seconds = Histogram(
            "bothways_request_seconds",
            "From the first byte of a request to its answer.",
            ("route",),
            buckets=SECONDS,
            **kept,
        )
        self._queue = Histogram(
            "bothways_queue_seconds",
            "From queue to model.",
            buckets=SECONDS,
            **kept,
        )
        self._batch_seconds = Histogram(
            "bothways_batch_seconds", "Computation of a batch.", buckets=SECONDS, **kept
        )
        self._batch_tokens = Histogram(
            "bothways_batch_tokens", "Tokens of a batch.", buckets=SIZES, **kept
        )
        self._batch_sequences = Histogram(
            "bothways_batch_sequences", "Sequences of a batch.", buckets=SIZES, **kept
        )
        self._texts = Counter("bothways_texts", "Inputs answered.", ("model",), **kept)
        self._tokens = Counter("bothways_tokens", "Tokens of inputs answered.", ("model",), **kept)
        self._cut = Counter(
            "bothways_truncated_texts", "Inputs longer than the model reads.", ("model",), **kept
        )
        Gauge("bothways_queue_tokens", "Tokens that wait.", **kept).set_function(queued_tokens)
        Gauge("bothways_ready", "1 if new requests are welcome.", **kept).set_function(
            lambda: float(ready())
        )

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

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
