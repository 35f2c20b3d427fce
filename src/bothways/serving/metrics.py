"""Counts and durations of a server in the format of Prometheus."""

from __future__ import annotations

import functools
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
        queue_tokens: the limit of what may wait.
        is_ready: whether new requests are welcome, asked when the metrics are read.
    """

    def __init__(self, queue_tokens: int, is_ready: Callable[[], bool]) -> None:
        with optional("serve", "serving"):
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        counter = functools.partial(Counter, **options)
        seconds = functools.partial(Histogram, buckets=SECONDS, **options)
        sizes = functools.partial(Histogram, buckets=SIZES, **options)
        gauge = functools.partial(Gauge, **options)
        labels = ("route", "model", "status")
        self._requests = counter("bothways_requests", "Requests answered.", labels)
        description = "From the first byte of a request to its answer."
        self._seconds = seconds("bothways_request_seconds", description, ("route",))
        self._queue = seconds("bothways_queue_seconds", "From queue to model.")
        self._batch_seconds = seconds("bothways_batch_seconds", "Computation of a batch.")
        self._batch_tokens = sizes("bothways_batch_tokens", "Tokens of a batch.")
        self._batch_sequences = sizes("bothways_batch_sequences", "Sequences of a batch.")
        self._texts = counter("bothways_texts", "Inputs answered.", ("model",))
        self._tokens = counter("bothways_tokens", "Tokens of inputs answered.", ("model",))
        description = "Inputs longer than the model reads."
        self._cut = counter("bothways_truncated_texts", description, ("model",))
        self._queued = gauge("bothways_queue_tokens", "Tokens that wait.")
        description = "Tokens that may wait; more are refused."
        gauge("bothways_queue_limit_tokens", description).set(queue_tokens)
        description = "1 while new requests are welcome, else 0."
        gauge("bothways_ready", description).set_function(lambda: float(is_ready()))
        description = "When the model was opened, in seconds since 1970."
        self._loaded = gauge("bothways_model_opened_seconds", description, ("model",))

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

    def queue(self, tokens: int) -> None:
        """Keep the number of tokens that wait."""
        self._queued.set(tokens)

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
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
