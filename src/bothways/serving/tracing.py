"""Spans of requests for OpenTelemetry, an optional package.

A request is one span, named as its route, which continues the trace of the header `traceparent`
(W3C Trace Context); within it are `tokenize`, `queue` and `compute`. Spans are made when the
request is complete, from the times that its exchange has kept: nothing is done before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from bothways.core.errors import ConfigError, optional

if TYPE_CHECKING:
    from bothways.serving.exchange import Exchange

_ALWAYS = ("/live", "/ready", "/health", "/ping", "/metrics")
"""Routes without spans: probes and scrapes."""


class Tracing:
    """Writes the spans of requests.

    Args:
        tracer: of OpenTelemetry's API.
    """

    def __init__(self, tracer: Any) -> None:
        with optional("otel", "tracing"):
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace, self._tracer = trace, tracer
        self._extract = TraceContextTextMapPropagator().extract

    def record(
        self, exchange: Exchange, method: str, headers: Mapping[str, str], status: int
    ) -> None:
        """Write the spans of a request that has been answered."""
        if exchange.route in _ALWAYS:
            return
        ahead = time.time() - time.perf_counter()

        def clock(seconds: float) -> int:
            """Return the nanoseconds since 1970 of a moment of the process' own clock."""
            return int((seconds + ahead) * 1e9)

        parent = self._extract(
            {k: headers[k] for k in ("traceparent", "tracestate") if k in headers}
        )
        span = self._tracer.start_span(
            f"{method} {exchange.route}",
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            start_time=clock(exchange.start),
            attributes={
                "http.request.method": method,
                "http.route": exchange.route,
                "http.response.status_code": status,
                "bothways.request.id": exchange.id,
                "bothways.model": exchange.model,
                "bothways.texts": exchange.texts,
                "bothways.tokens": exchange.tokens,
            },
        )
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        within = self._trace.set_span_in_context(span)
        for name, start, end in exchange.phases:
            phase_span = self._tracer.start_span(name, context=within, start_time=clock(start))
            phase_span.end(clock(end))
        span.end(clock(time.perf_counter()))


def require_tracing(endpoint: str) -> SplitResult:
    """Return the parts of a collector's address.

    Raises:
        ConfigError: it is not a URL.
        ResourceError: a package of the extra `otel` is not installed.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        fix = "Give one like http://localhost:4318."
        raise ConfigError(f"{endpoint!r} is no URL", where="traces", fix=fix)
    with optional("otel", "tracing"):
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401
    return url


def tracing(endpoint: str) -> Tracing:
    """Return spans that are sent to a collector, by OTLP over HTTP.

    The variables of OpenTelemetry apply, such as OTEL_SERVICE_NAME (default: bothways),
    OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER.

    Args:
        endpoint: such as http://localhost:4318; `/v1/traces` is added unless there is a path.

    Raises:
        ConfigError, ResourceError: as `require_tracing`.
    """
    url = require_tracing(endpoint)
    with optional("otel", "tracing"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

    import os

    from bothways import __version__

    address = endpoint if url.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    names = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "bothways"}
    provider = TracerProvider(resource=Resource.create(names))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(address)))
    return Tracing(provider.get_tracer("bothways.serving", __version__))
