"""The server as an ASGI app: routes, keys, hosts, limits, errors, logs.

    connection → head → key, host, route → body → JSON → `Query` → tokenize → queue → answer

Large requests are read, split and tokenized in a thread, a chunk at a time; the rest happens in the
event loop, but for computing.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from bothways.core.errors import ConfigError, FolderError, call, optional
from bothways.prediction.opening import open_task
from bothways.prediction.predictor import Predictor
from bothways.serving import compatible
from bothways.serving.batcher import SMOOTHING, Batcher, Ticket, internal, late, settle
from bothways.serving.errors import DEFAULT_LIMITS, FAILURES, Limits, RequestError, retry_after
from bothways.serving.explain import EXPLAIN
from bothways.serving.models import Models, ServedModel, check_name, example_ranges
from bothways.serving.routes import PROBES, ROUTES, document
from bothways.serving.search import ServedIndex, open_indexes
from bothways.serving.shapes import Answer, Query

with optional("serve", "serving"):
    import orjson

    from bothways.serving.exchange import (
        MOVED,
        ClientLeft,
        Exchange,
        Metrics,
        Page,
        Receive,
        Scope,
        Send,
        disconnected,
        json_object,
        pages,
        read_body,
        respond,
    )

INLINE_BYTES = 4000
"""Bytes of a body up to which it is read and tokenized in the event loop: some 0.2 ms."""
SMALL_BODY, LARGE_BODIES = 64 << 10, 16
"""Bytes of a body that always has room; larger ones are held up to 16 times the largest size, from
their first byte to their answer. The connections alone would allow 8 GB."""
METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
NUMBERS = orjson.OPT_SERIALIZE_NUMPY
T = TypeVar("T")
Work = Callable[..., Awaitable[Any]]
"""Calls a function with arguments, by the deadline of a request; see `App._work`."""
STUCK_SECONDS = 120.0
"""A batch that takes longer means that the process should be restarted."""
OpenedFrom = Predictor | str | Path
"""A predictor, or the folder to open one from."""
requests_log = logging.getLogger("bothways.serving.requests")


class App:
    """An ASGI app for predictors; see `app`.

    Attributes:
        draining: set when the server is about to stop: `/ready` then fails, and requests are still
            answered.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        limits: Limits = DEFAULT_LIMITS,
        keys: Many[str] = (),
        hosts: Many[str] | None = None,
        playground: bool = False,
        indexes: Mapping[str, ServedIndex] = MappingProxyType({}),
    ) -> None:
        if not models:
            raise ConfigError("there is no model to serve", where="predictors")
        keys = _listed(keys)  # an iterator would be empty below, and the server without keys
        hosts = None if hosts is None else _listed(hosts)
        if not all(keys):  # which a request without a key would give
            fix = "Check the variable that gives it."
            raise ConfigError("a key is empty", where="keys", fix=fix)
        for name, words in (("keys", keys), ("hosts", hosts or ())):
            if not all(isinstance(word, str) for word in words):
                raise ConfigError("must be texts", where=name, fix=f'Give a list: {name}=["…"].')
        self.limits = limits
        self.hosts = None if hosts is None else tuple(map(_host_name, hosts))
        self._files = pages() if playground else {}
        self._posts = {**ROUTES, **({"/explain": EXPLAIN} if playground else {})}
        self.models = Models(models, indexes, limits)
        self.draining, self._warm = False, False
        # Clients send keys beyond ASCII in two encodings.
        latin = [key.encode("latin-1") for key in keys if max(map(ord, key), default=0) < 256]
        utf8 = [key.encode(errors="surrogateescape") for key in keys]  # from the environment
        self._keys = [*dict.fromkeys([*utf8, *latin])]
        self.metrics = Metrics(limits.queue_tokens, lambda: self._warm and not self.draining)
        self._routes: dict[str, Callable[[], Any]] = {
            "/live": self._live,
            **dict.fromkeys(("/", "/ready", "/health", "/ping"), self._ready),
            "/info": lambda: compatible.info(self.models),
            "/metrics": lambda: Page(self.metrics.text(), METRICS_KIND, headers={}),
            # Cached: to build the document holds up all other requests for a tenth of a second.
            "/openapi.json": functools.cache(
                lambda: document(self.models, guarded=bool(keys), playground=playground)
            ),
            **{path: functools.partial(self._files.__getitem__, path) for path in self._files},
            "/v1/models": lambda: {
                "object": "list",
                "data": [compatible.described(model) for model in self.models],
            },
        }
        for model in self.models:
            self.metrics.loaded(model.name, model.created)
        self.batcher = Batcher(limits, self.metrics)
        self._searches, self._search_seconds = 0, 0.0
        self._buffered = 0
        self._started: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the model's thread, and compute one text by each model.

        Raises:
            FolderError: a model fails.
        """
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self.batcher.start()
        self._tokenizers = ThreadPoolExecutor(1, thread_name_prefix="bothways-tokenizer")
        self._searchers = ThreadPoolExecutor(1, thread_name_prefix="bothways-search")
        for model in self.models:
            try:
                # A long one, so that the first request finds memory and kernels ready.
                examples = model.examples(model.long_inputs(self.limits), self.limits)
                encoded, answer = model.encode(examples), loop.create_future()
                self.batcher.submit(Ticket(model, examples, encoded, math.inf, answer))
                await answer
            except RequestError as error:
                if error.code not in FAILURES:  # a limit, such as a likelihood that is too long
                    continue
                message = f"the model cannot compute a text: {error.message}"
                fix = f"Predict with it alone: {call('predict', 'MODEL')}"
                raise FolderError(message, where=model.name, fix=fix) from error
        self._warm = True

    async def stop(self) -> None:
        """End the threads; `start` begins again."""
        self.draining = True
        if self._started is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.batcher.stop)
            self._tokenizers.shutdown(wait=False)
            self._searchers.shutdown(wait=False)
        self._started, self._warm, self.draining = None, False, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection of an ASGI server."""
        match scope["type"]:
            case "lifespan":
                while True:
                    try:
                        message = await receive()
                    except asyncio.CancelledError:  # the server stops at once
                        return
                    if message["type"] != "lifespan.startup":
                        await self.stop()
                        await send({"type": "lifespan.shutdown.complete"})
                        return
                    try:
                        await self.start()
                    except FolderError as error:
                        await send({"type": "lifespan.startup.failed", "message": str(error)})
                        return
                    await send({"type": "lifespan.startup.complete"})
            case "http":
                if not self._warm:
                    await self.start()
                await self._respond(scope, receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1000})

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope["headers"])
        status, body, kind = 200, b"", "application/json"
        failure: RequestError | None = None
        stopped: asyncio.CancelledError | None = None
        try:
            result = await self._result(scope, receive, exchange)
            if isinstance(result, Page):
                status, body, kind = result.status, result.body, result.kind
                exchange.headers.update(result.headers)
            else:
                body = result if isinstance(result, bytes) else orjson.dumps(result)
        except ClientLeft:
            status = 499
        except asyncio.CancelledError as error:  # the server has waited for `drain_seconds`
            stopped, failure = error, RequestError("draining", "the server has stopped")
        except RequestError as error:
            failure = error
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # also panics of Rust and SystemExit
            failure = internal(error, exchange.id)
        self._buffered -= exchange.buffered
        if failure is not None:
            status, body = failure.status, orjson.dumps(failure.to_json())
            exchange.headers.update(failure.headers)
            if status in (408, 413):  # the rest of the body is not read
                exchange.headers["connection"] = "close"
        seconds = time.perf_counter() - exchange.start
        if status != 499:
            await respond(send, status, body, kind, exchange, scope["method"] == "HEAD")
        self.record(exchange, status, len(body), seconds)
        if stopped is not None:
            raise stopped

    def record(self, exchange: Exchange, status: int, size: int, seconds: float) -> None:
        """Count and log a request that was answered, and the bytes of the answer."""
        self.metrics.request(exchange.route, exchange.model, status, seconds)
        if requests_log.isEnabledFor(logging.INFO):
            fields = {  # never a text, a key or an address
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
            requests_log.info(fields)

    def refuse_unread(self, exchange: Exchange) -> RequestError | None:
        """Return the refusal of a request before its body is read.

        None if it is to be read: it may have room, or another error comes first.
        """
        try:
            self._check_host(exchange.request_headers)
            self._check_key(exchange.request_headers)
        except RequestError:
            return None
        return self.batcher.refusal(exchange.route, exchange.size)

    # ---- routes ----

    async def _result(self, scope: Scope, receive: Receive, exchange: Exchange) -> Any:
        """Return a response: a page, or a value for JSON, maybe written already."""
        headers = exchange.request_headers
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/") or "/"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise RequestError("bad_request", "there are several headers host")
        # Load balancers and Kubernetes probe by an address, not by a name of the server.
        if path not in PROBES:
            self._check_host(headers)
            if path not in self._files:
                self._check_key(headers)
        if path == "/play" and path in self._files and scope["path"].endswith("/"):
            return MOVED
        gets, name = self._routes, None  # which compute nothing
        if of_model := re.fullmatch(r"(/v1)?/models/([^/]*)(/.*)?", path, re.DOTALL):
            version, name, route = of_model.groups("")
            path = f"/v1/models/{{name}}{route}" if version else route or "/"
            model = self.models.named(name)
            gets = {"/v1/models/{name}": lambda: compatible.described(model), "/ready": self._ready}
        allowed = [m for m, table in (("GET", gets), ("POST", self._posts)) if path in table]
        if not allowed:
            raise RequestError("not_found", f"there is no {path[:200]!r}; GET /info lists models")
        exchange.route = "/ready" if (method, path) == ("GET", "/") else path  # POST / computes
        if method not in allowed:
            message = f"{path} takes {' and '.join(allowed)}, not {method[:20]}"
            allow = {"allow": ", ".join(allowed)}
            raise RequestError("method_not_allowed", message, headers=allow)
        if method == "GET":
            return gets[path]()
        if (full := self.batcher.refusal(exchange.route, exchange.size)) is not None:
            raise full
        hold = functools.partial(self._hold, exchange)
        data = await read_body(headers, receive, self.limits, exchange.size or 0, hold)
        exchange.deadline = time.monotonic() + self._seconds(headers)
        work = functools.partial(self._work, len(data) > INLINE_BYTES, exchange.deadline)
        reading = await work(self._query, path, data, scope.get("query_string", b""), name)
        if not isinstance(reading, tuple):
            return reading
        query, examples = reading
        return await self._answer(query, examples, work, receive, exchange)

    def _hold(self, exchange: Exchange, count: int) -> RequestError | None:
        """Count bytes of a body in memory; return the refusal of a large one without room."""
        exchange.buffered += count
        self._buffered += count
        if (
            exchange.buffered <= SMALL_BODY
            or self._buffered <= LARGE_BODIES * self.limits.body_bytes
        ):
            return None
        exchange.headers["connection"] = "close"  # the rest of the body is not read
        message = f"large requests hold {self._buffered:,} bytes"
        return RequestError("overloaded", message, headers=retry_after(1.0))

    async def _search(self, search: Callable[[], Any], exchange: Exchange) -> Any:
        """Search in the thread of indexes; refuse a search that would wait beyond its deadline."""
        wait = self._searches * self._search_seconds
        if wait > exchange.deadline - time.monotonic():
            message = f"{self._searches:,} searches wait, for some {wait:.1f} s"
            raise RequestError("overloaded", message, headers=retry_after(wait))
        queued = time.perf_counter()
        self._searches += 1
        try:
            began, result = await self._in_thread(
                self._searchers, exchange.deadline, lambda: (time.perf_counter(), search())
            )
        finally:
            self._searches -= 1
        ended = time.perf_counter()
        self._search_seconds += SMOOTHING * (ended - began - self._search_seconds)
        exchange.seconds["queue"] += began - queued
        exchange.seconds["search"] += ended - began
        return result

    @staticmethod
    async def _in_thread(
        threads: ThreadPoolExecutor, deadline: float, function: Callable[..., T], *arguments: Any
    ) -> T:
        result = asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
        try:
            return await asyncio.wait_for(result, deadline - time.monotonic())
        except asyncio.TimeoutError:
            raise late() from None

    async def _work(
        self, large: bool, deadline: float, function: Callable[..., T], *arguments: Any
    ) -> T:
        """Call a function: for a large request in a thread.

        Between any two calls of a thread those for other requests have their turn, and the deadline
        is looked at.
        """
        if deadline <= time.monotonic():
            raise late()
        if not large:
            return function(*arguments)
        return await self._in_thread(self._tokenizers, deadline, function, *arguments)

    def _query(self, path: str, data: bytes, url: bytes, name: str | None) -> Any:
        """Return the query in a body with its examples, or an answer that needs no model."""
        body = json_object(data, url)
        body = body if name is None else {**body, "model": name}
        query = self._posts[path].query(self.models, body)
        if not isinstance(query, Query):
            return query
        # A search by words alone needs no model.
        empty = query.searches and not query.inputs
        return query, [] if empty else self._examples(query)

    def _examples(self, query: Query) -> list[Any]:
        return query.model.examples(query.inputs, self.limits, query.input_name)

    def _live(self) -> Any:
        if (fault := self.batcher.fault(STUCK_SECONDS)) is not None:
            raise RequestError("internal", fault)
        return {"status": "live"}

    def _ready(self) -> Any:
        if self.draining:
            raise RequestError("draining", "the server is stopping")
        return {"status": "ready"}

    # ---- what is asked of every request ----

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse names that are not this server's: a web page cannot reach it by DNS rebinding."""
        if self.hosts is None:
            return
        host = _host_name(headers.get("host", ""))
        if host not in self.hosts:
            message = f"the host {host[:100]!r} is not served: see --allow-host, or hosts in Python"
            raise RequestError("forbidden_host", message)

    def _check_key(self, headers: Mapping[str, str]) -> None:
        if not self._keys:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key_text = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = key_text.encode("latin-1")  # the bytes of the header
        matches = [hmac.compare_digest(key, sent) for key in self._keys]
        if not any(matches):
            challenge = {"www-authenticate": "Bearer"}
            message = "give a key of this server: Authorization: Bearer KEY"
            raise RequestError("unauthorized", message, headers=challenge)

    # ---- computing ----

    async def _answer(
        self, query: Query, examples: list[Any], work: Work, receive: Receive, exchange: Exchange
    ) -> Any:
        """Compute, and write the answer."""
        exchange.model, answer = query.model.name, Answer(query.model, (), (), ())
        if examples:
            answer = await self._compute(query, examples, work, receive, exchange)
        _describe(exchange)
        if not query.searches:
            return await work(lambda: orjson.dumps(query.write(answer), option=NUMBERS))
        result = await self._search(functools.partial(query.write, answer), exchange)
        _describe(exchange)
        if not isinstance(result, Query):
            return orjson.dumps(result)
        # The documents that were found, for a cross-encoder.
        work = functools.partial(self._work, True, exchange.deadline)
        examples = await work(self._examples, result)
        return await self._answer(result, examples, work, receive, exchange)

    async def _compute(
        self, query: Query, examples: list[Any], work: Work, receive: Receive, exchange: Exchange
    ) -> Answer:
        model, loop = query.model, asyncio.get_running_loop()
        began, encoded = time.perf_counter(), []
        # In chunks: after each the limits and the deadline are looked at, and others have a turn.
        for start, stop in example_ranges(model, examples):
            encoded += await work(model.encode, examples[start:stop])
            tokens = sum(len(sequence) for item in encoded for sequence in item.sequences)
            which = "" if stop == len(examples) else f" of the first {stop:,} inputs"
            self.limits.check("request_tokens", f"tokens{which}", tokens)
        cut = [n for n, item in enumerate(encoded, 1) if item.cut]
        if cut and not query.truncate:
            name, length = query.input_name(cut[0]), model.task_model.length
            message = f"{name} has more than {length} tokens, and truncate is false"
            raise RequestError("text_too_long", message, param="truncate")
        units: Any = encoded
        if query.jobs is not None:  # it may have to read weights
            units = await loop.run_in_executor(self._tokenizers, query.jobs, examples, encoded)
        exchange.seconds["tokenize"] += time.perf_counter() - began
        source = exchange.route, exchange.size, exchange.id
        ticket = Ticket(model, examples, units, exchange.deadline, loop.create_future(), *source)
        self.batcher.submit(ticket)
        predictions = await self._wait(ticket, receive)
        answer = Answer(model, examples, encoded, predictions)
        exchange.texts += len(examples)
        exchange.tokens += answer.tokens
        exchange.cut += answer.cut
        waited = ticket.started - ticket.queued
        exchange.seconds["queue"] += waited
        exchange.seconds["compute"] += ticket.computed - ticket.started
        self.metrics.answered(model.name, len(examples), answer.tokens, answer.cut, waited)
        return answer

    def _seconds(self, headers: Mapping[str, str]) -> float:
        """Return the seconds for a request: the limit, or less if the client asks for it."""
        value = headers.get("x-request-timeout")
        if value is None:
            return self.limits.deadline_seconds
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not seconds > 0:
            message = "x-request-timeout must be a number of seconds above 0"
            raise RequestError("bad_request", message, param="x-request-timeout")
        return min(seconds, self.limits.deadline_seconds)

    async def _wait(self, ticket: Ticket, receive: Receive) -> list[Any]:
        """Return the predictions; take the request out of the queue if nobody waits for it."""
        answer = ticket.answer
        left = asyncio.ensure_future(disconnected(receive))
        left.add_done_callback(lambda _: settle(answer, ClientLeft()))
        seconds = max(0.0, ticket.deadline - time.monotonic())
        timer = answer.get_loop().call_later(seconds, settle, answer, late())
        try:
            return await answer
        finally:
            timer.cancel()
            left.cancel()
            if not ticket.computed:
                self.batcher.cancel(ticket)


def _listed(values: Any) -> list[Any]:
    return [*values] if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def _host_name(host: str) -> str:
    """Return the name in a header `host` in lower case, such as `::1` of `[::1]:8080`."""
    return re.sub(r"(^[^:]*|\]):\d*$", r"\1", host).strip("[]").lower()


def _describe(exchange: Exchange) -> None:
    """Write the headers of what was computed."""
    exchange.headers["x-compute-tokens"] = str(exchange.tokens)
    exchange.headers["x-truncated"] = str(exchange.cut)
    names = {"tok": "tokenize", "queue": "queue", "model": "compute", "search": "search"}
    exchange.headers["server-timing"] = ", ".join(
        f"{name};dur={1000 * exchange.seconds[phase]:.2f}"
        for name, phase in names.items()
        if name != "search" or "search" in exchange.seconds
    )


def app(
    predictors: OpenedFrom | Mapping[str, OpenedFrom],
    *,
    limits: Limits = DEFAULT_LIMITS,
    keys: Many[str] = (),
    hosts: Many[str] | None = None,
    playground: bool = False,
    indexes: Mapping[str, str | Path] = MappingProxyType({}),
) -> App:
    """Return an ASGI app that answers requests by predictors.

    Any ASGI server runs it, and other apps can mount it. All predictors are computed by one thread,
    in batches; open them with `batch_invariant=True`, as folders are opened, so that no answer
    depends on other requests.

    Args:
        predictors: by the names that requests use, or the folders to open them from; one without a
            name is called "default".
        limits: what is accepted, and for how long.
        keys: of which clients must give one; empty for none. Probes need no key.
        hosts: names in the header `host` that are answered; None for all.
        playground: whether there is a page to try the models, `/play`, and `/explain`. The page
            itself needs no key, and asks for one.
        indexes: folders of indexes by name, which `/search` answers from by the vectors of a
            predictor that is served.

    Raises:
        ConfigError: there is no predictor, a name has other characters than letters, digits, ".",
            "_" and "-", a key is empty, or an argument has another type.
        FolderError: a model cannot be read, an index is damaged, or no predictor is for it.
        ResourceError: a package of the extra `serve` is not installed.

    Examples:
        >>> application = app({"films": "my-classifier"})
        >>> list(application.models.by_name)
        ['films']
    """
    if not isinstance(limits, Limits):
        raise ConfigError("must be Limits", where="limits", fix="Give Limits(texts=100), for one.")
    if not isinstance(indexes, Mapping):
        fix = 'Give their names: indexes={"NAME": FOLDER}.'
        raise ConfigError("must be folders by name", where="indexes", fix=fix)
    by_name = predictors if isinstance(predictors, Mapping) else {"default": predictors}
    for name in (*by_name, *indexes):
        check_name(name, "predictors" if name in by_name else "indexes", "Choose another name.")
    models = dict[str, ServedModel]()
    for name, source in by_name.items():
        if isinstance(source, str | Path):
            predictor = open_task(source, batch_invariant=True)
        elif isinstance(source, Predictor):
            predictor = source
        else:
            fix = 'Give several by their names: {"NAME": FOLDER, …}.'
            raise ConfigError("must be a predictor or its folder", where="predictors", fix=fix)
        models[name] = ServedModel(name, predictor, int(time.time()))
    return App(models, limits, keys, hosts, playground, open_indexes(indexes, models.values()))
