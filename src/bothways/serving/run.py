"""The models of a server by the words of a command, and an HTTP server for their app.

It is uvicorn, with deadlines for slow clients and an orderly end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
import time
from asyncio import TimerHandle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence as Many
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import orjson

from bothways.core.errors import ConfigError, ResourceError, optional, require_unset
from bothways.core.terminal import ErrorStream
from bothways.hub.provenance import digest_of_model, model_facts
from bothways.prediction import PredictPrecision
from bothways.prediction.opening import open_task
from bothways.prediction.search.index import Index
from bothways.serving.app import App, requests_log
from bothways.serving.errors import RequestError
from bothways.serving.models import ServedModel, check_name
from bothways.serving.search import open_indexes
from bothways.tasks.catalogue import is_task, task_kind

KEYS = "BOTHWAYS_API_KEY"
"""Environment variable: keys of a server, separated by blanks."""


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Read the keys in a file, one a line; without a file those in `KEYS`, none if it is not set.

    Raises:
        ConfigError: the file cannot be read; the file or the variable has no key.
    """
    if file is None and KEYS not in os.environ:
        return ()
    try:
        text = os.environ[KEYS] if file is None else file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=file) from error
    if not (keys := tuple(text.split())):
        fix = f"Unset {KEYS}, or set it to a key." if file is None else "Write one a line."
        raise ConfigError("has no key", where=file or KEYS, fix=fix)
    return keys


NamedModel = tuple[str, str | None]
"""A folder and the task to open it for; None for its own."""


def open_app(
    models: Mapping[str, NamedModel],
    indexes: Mapping[str, str] = MappingProxyType({}),
    *,
    length: int | None = None,
    device: str = "auto",
    precision: PredictPrecision = "fp32",
    **options: Any,
) -> App:
    """Open models and indexes, and return an app that answers by them; errors as `open_task`.

    Args:
        models: model folders, folders of runs or Hub ids, by the names that requests use.
        indexes: folders of indexes, by the names that requests use.
        length, device, precision: as `open_task`.
        options: `limits`, `keys`, `hosts` and `playground` of `serving.app`.
    """
    opened = dict[str, ServedModel]()
    for name, (folder, task) in models.items():
        predictor = open_task(
            folder, task, length=length, device=device, precision=precision, batch_invariant=True
        )
        digest = digest_of_model(folder)
        facts = model_facts(folder, predictor.task_model.labels)
        opened[name] = ServedModel(name, predictor, int(time.time()), digest, facts)
    return App(opened, indexes=open_indexes(indexes, opened.values(), length), **options)


def named_models(
    models: Many[str], task: str | None = None, indexes: Iterable[str] = ()
) -> dict[str, NamedModel]:
    """Return the models that words such as FOLDER, NAME=FOLDER and NAME=FOLDER:TASK name.

    Args:
        task: of models for which no task is named.
        indexes: folders of indexes; without words their models are served.

    Raises:
        ConfigError: there is none; a name occurs twice, or has other characters than letters,
            digits, ".", "_" and "-"; a task is unknown.
    """
    if not models and (folders := [*indexes]):
        require_unset("is of models, and none is named", "Leave it out, or name one.", task=task)
        models = [*dict.fromkeys(f"{Index(folder).record.model}:embed" for folder in folders)]
    if not models:
        fix = "Name one: FOLDER, or NAME=FOLDER."
        raise ConfigError("there is no model to serve", where="models", fix=fix)
    models_by_name: dict[str, NamedModel] = {}
    for word in models:
        name, equals, target = word.partition("=")
        # A folder may have "=" in its path, as those of a sweep, also before :TASK.
        if not equals or Path(word).exists() or Path(word.rpartition(":")[0] or word).exists():
            equals, target = "", word
        # A folder with a colon in its name, or a Hub id, is whole.
        folder, colon, word_task = target.rpartition(":")
        if not colon or Path(target).exists() or not (is_task(word_task) or Path(folder).exists()):
            folder, colon = target, ""
        if not equals:
            path = Path(folder)
            name = path.resolve().name if path.exists() else path.name
        _check_name(name, models_by_name, "models")
        models_by_name[name] = folder, task_kind(word_task) if colon else task
    return models_by_name


def named_indexes(words: Many[str]) -> dict[str, str]:
    """Return the folders of indexes that words such as FOLDER and NAME=FOLDER name.

    Raises:
        ConfigError: a name occurs twice, or has other characters than those of models.
    """
    folders = dict[str, str]()
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or Path(word).exists():
            name, folder = Path(word).resolve().name, word
        _check_name(name, folders, "index")
        folders[name] = folder
    return folders


def _check_name(name: str, known: Container[str], where: str) -> None:
    check_name(name, where, "Give one: NAME=FOLDER.")
    if name in known:
        kind = "models" if where == "models" else "indexes"
        message = f"two {kind} are called {name!r}"
        raise ConfigError(message, where=where, fix="Give each a name: NAME=FOLDER.")


with optional("serve", "serving"):
    import httptools
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from bothways.serving.exchange import Exchange

HEAD_BYTES = 64 << 10
"""The most bytes of a request before its body."""
SHORT_BODY = 16 << 10
"""Bytes of a body up to which a request is refused without a call of the app."""
_LONG_HEAD = f"the headers are above the limit of {HEAD_BYTES:,} bytes"
_CROWDED = "there are too many connections (connections)"
OTHER_FILES = 100
"""Open files of a server other than connections, at most."""
SPARE_CONNECTIONS = 100
"""Connections beyond the limit in which requests that compute nothing are answered."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
KEEP_ALIVE_SECONDS = 75
"""An idle connection is closed after more than the 60 s after which nginx and the load balancers of
clouds close theirs: a request on a connection that is being closed fails, with 502."""
RESET_SECONDS = 0.1
"""Between looks at whether a client that sends no more has left."""


class Connection(HttpToolsProtocol):
    """A connection with deadlines: uvicorn itself waits without end for a request to arrive.

    One timer runs from the first byte of a request, or from the opening of the connection, until
    its headers are complete; another from the first byte that the system does not take for the
    client, which reads too slowly, until there is none left.

    While the queue is full, a short request is refused without a call of the app: under overload
    refusals are most of what a server does. In a connection beyond the limit all requests are
    refused that compute; probes and metrics are answered, or a server that is only busy would be
    restarted.

    Offers to speak another protocol (`Upgrade: h2c` of Java and of `curl --http2`) are declined by
    an answer in HTTP/1.1, for which the parser has to read their bodies. A client that has closed
    its sending side only gets its answer.
    """

    _arriving: TimerHandle | None = None
    _stalled: TimerHandle | None = None
    _head_bytes = 0
    _in_body = False
    _unread: tuple[Exchange, RequestError] | None = None
    _half_closed: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the first timer; close a connection beyond the spare ones."""
        super().connection_made(transport)
        # Or the last 64 KiB of an answer that nobody reads would keep the connection for ever.
        transport.set_write_buffer_limits(high=0)
        excess = len(self.connections) - self._app.limits.connections
        self._is_spare = excess > 0
        if excess > SPARE_CONNECTIONS:
            self._refuse("overloaded", _CROWDED)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        for timer in (self._arriving, self._stalled, self._half_closed):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bound the size of what comes before a body, and the time it takes."""
        # The rest of a body whose request was answered before it has come, as a refused one is, has
        # the time of an idle connection.
        if not (self._in_body and self._is_idle) or self._unread:
            if self._arriving is None and self._is_idle:
                self._expect_head()
            self._head_bytes += len(data)
            self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("this is not an HTTP/1.1 request")
        if self._arriving and not self._unread and self._head_bytes > HEAD_BYTES:
            self._refuse("bad_request", _LONG_HEAD)

    def _parse(self, data: bytes) -> None:
        """Parse bytes; of a request with an upgrade once more, without it.

        At an upgrade the parser takes the body for bytes of the other protocol.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            remaining = data[upgrade.args[0] :]
            if self.parser.get_method() == b"CONNECT":
                self._refuse("method_not_allowed", "CONNECT is not served")
                return
            version = self.parser.get_http_version().encode()
            lines = [b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))]
            dropped = (b"upgrade", b"http2-settings")
            lines += [b": ".join(header) for header in self.headers if header[0] not in dropped]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._parse(b"\r\n".join([*lines, b"", b""]) + remaining)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that sends no more, and waits for its answer.

        One that has left altogether looks the same, until its system refuses some bytes: the
        interim answer is for these to be refused.
        """
        if self._is_idle or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        if self.cycle.scope["http_version"] != "1.0" and not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if hasattr(select, "poll"):  # on Windows one that has left is noticed by its answer alone
            self._look_for_reset()
        return True

    def _look_for_reset(self) -> None:
        client = self.transport.get_extra_info("socket")
        poll = select.poll()
        poll.register(client.fileno(), 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            self.transport.abort()
        else:
            self._half_closed = self.loop.call_later(RESET_SECONDS, self._look_for_reset)

    def on_headers_complete(self) -> None:
        """Stop the timer: the app has a deadline for the body."""
        if self.parser.should_upgrade():  # `_parse` reads the request again
            return
        if sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            self._refuse("bad_request", _LONG_HEAD)
            raise ValueError(_LONG_HEAD)  # ends the parser
        self._in_body, self._unread = True, self._refused_unread()
        if self._unread is None:
            self._stop_waiting()
            self._unset_keepalive_if_required()  # these may have come with the rest of a body
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of a body on, unless the request is refused."""
        if self._unread is None and not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body; answer a request that is refused."""
        if self.parser.should_upgrade():
            return
        self._in_body = False
        if self._unread is None:
            super().on_message_complete()
            return
        (exchange, error), self._unread = self._unread, None
        self._stop_waiting()
        close = self._is_spare or not self.parser.should_keep_alive()
        size = self._write(error, {"x-request-id": exchange.id}, close=close)
        seconds = time.perf_counter() - exchange.start
        self._app.record(exchange, error.status, size, seconds)
        self.on_response_complete()

    def _refused_unread(self) -> tuple[Exchange, RequestError] | None:
        """Return a request that is refused, and why; None if it goes to the app."""
        app = self._app
        if self.parser.get_method() != b"POST" or not (self._is_spare or app.batcher.refusals):
            return None
        exchange = Exchange.of(self.headers)
        short = exchange.size is not None and exchange.size <= SHORT_BODY
        readable = short and self._is_idle and not self.expect_100_continue
        if self._is_spare:
            if readable:
                return exchange, RequestError("overloaded", _CROWDED)
            self._refuse("overloaded", _CROWDED)
            raise ValueError(_CROWDED)  # ends the parser
        exchange.route = self.url.partition(b"?")[0].decode("latin-1")
        error = app.refuse_unread(exchange) if readable else None
        return None if error is None else (exchange, error)

    def pause_writing(self) -> None:
        """Abort the connection if the client does not read all for too long."""
        super().pause_writing()
        seconds = self._app.limits.deadline_seconds
        self._stalled = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read all, or the system holds the rest."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP in the form of all errors."""
        self._refuse("bad_request", msg)

    @property
    def _app(self) -> App:
        app = self.config.app
        assert isinstance(app, App)
        return app

    @property
    def _is_idle(self) -> bool:
        """True if there is no request before to be answered."""
        return self.cycle is None or self.cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._arriving = self.loop.call_later(self._app.limits.head_seconds, self._too_slow)

    def _too_slow(self) -> None:
        if not self._head_bytes:  # an idle connection
            self.transport.close()
            return
        seconds = self._app.limits.head_seconds
        self._refuse("request_timeout", f"the request took more than {seconds:g} s (head_seconds)")

    def _refuse(self, code: str, message: str) -> None:
        if self.transport.is_closing():
            return
        self._write(RequestError(code, message), {}, close=True)

    def _write(self, error: RequestError, extra: Mapping[str, str], *, close: bool) -> int:
        """Write an error as a response with further headers; return the bytes of its body."""
        body = orjson.dumps(error.to_json())
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-content-type-options": "nosniff",
            **({"connection": "close"} if close else {}),
            **extra,
            **error.headers,
        }
        lines = [f"HTTP/1.1 {error.status} ", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        if close:
            self.transport.close()
        return len(body)


class Server(uvicorn.Server):
    """A server whose /ready answers 503 before it stops.

    The first signal makes `/ready` fail; after `delay` seconds, in which load balancers notice, no
    more connections are accepted, and requests under way are finished. The second signal stops it
    at once.

    Args:
        delay: seconds between the first signal and the end of accepting connections.
        opened: called when all models have computed a text and connections are accepted.

    Attributes:
        fault: why it ended by itself; None if it did not.
    """

    def __init__(
        self, app: App, delay: float = 0.0, opened: Callable[[], None] = lambda: None
    ) -> None:
        drain = app.limits.drain_seconds
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(drain)) if math.isfinite(drain) else None,
        )
        super().__init__(config)
        self.app, self.delay, self.opened = app, delay, opened
        self.fault: str | None = None
        self._exit_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; at the second signal stop at once."""
        if self._exit_at is not None:
            self.should_exit = self.force_exit = True
            return
        self.app.draining = True  # a signal must not wait for a lock, which the loop may have
        self._exit_at = time.monotonic() + self.delay

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Try the models, then accept connections; errors as `App.start` and `bind`."""
        await self.app.start()
        for bound in sockets or ():
            # Two sockets may be bound to a port, but only one can listen.
            with _address_errors("{}:{}".format(*bound.getsockname())):
                bound.listen(self.config.backlog)
        await super().startup(sockets)
        self.opened()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; once forced, abort connections: since Python 3.12 asyncio waits for them."""

        async def abort_connections() -> None:
            while not self.force_exit:
                await asyncio.sleep(0.05)
            for connection in list(self.server_state.connections):
                connection.transport.abort()

        forced = asyncio.create_task(abort_connections())
        await super().shutdown(sockets)
        forced.cancel()

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop."""
        self.fault = self.app.batcher.fault(math.inf)
        if self.fault is not None:  # no request would ever be answered
            self.should_exit = self.force_exit = True
        if self._exit_at is not None and time.monotonic() >= self._exit_at:
            self.should_exit = True
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; port 0 for any that is free.

    Raises:
        ResourceError: the port is taken, or the address is not one of this machine.
    """
    with contextlib.ExitStack() as stack, _address_errors(f"{host}:{port}"):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = stack.enter_context(socket.socket(family, kind, protocol))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        stack.pop_all()
    return bound


@contextlib.contextmanager
def _address_errors(address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:  # the second for "a..b", which is no name of a host
        fix = "Choose another; --port 0 takes any port that is free."
        message = f"cannot be listened on: {getattr(error, 'strerror', error)}"
        raise ResourceError(message, where=address, fix=fix) from error


def url_of(bound: socket.socket) -> str:
    """Return the address of a socket as a URL."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def print_line(line: str) -> None:
    """Print that the server answers; end, and say why, if the log cannot be written."""
    log = sys.stderr if isinstance(sys.stderr, ErrorStream) else ErrorStream(sys.stderr)
    print(line, file=log, flush=True)
    if isinstance(log.failure, OSError):
        print(f"error: standard error cannot be written: {log.failure.strerror}", flush=True)
        raise SystemExit(2)


class _JsonLines(logging.Formatter):
    """One JSON object a line: the time, and what is said of a request, or a message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        if isinstance(record.msg, dict):
            fields: dict[str, Any] = record.msg
        else:
            fields = {"level": record.levelname.lower(), "message": record.getMessage()}
            if record.exc_info:
                fields["traceback"] = self.formatException(record.exc_info)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return orjson.dumps({"time": f"{stamp}.{int(record.msecs):03d}Z", **fields}).decode()


@contextlib.contextmanager
def logged_as_json(*, requests: bool) -> Iterator[None]:
    """Write what the server logs to standard error; one line a request, if asked for.

    At the end loggers are as before.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    # A request that is cancelled after `drain_seconds` is no fault: it is answered 503, and has a
    # line of its own. uvicorn logs it with a traceback.
    cancelled = asyncio.CancelledError
    handler.addFilter(lambda log: not (log.exc_info and isinstance(log.exc_info[1], cancelled)))
    names = ("bothways.serving", "uvicorn.error", "asyncio")
    roots = [logging.getLogger(name) for name in names]
    loggers = [*roots, requests_log]
    states = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in roots:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    requests_log.setLevel(logging.INFO if requests else logging.WARNING)
    try:
        yield
    finally:
        for logger, handlers, propagate, level in states:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def run_server(
    app: App,
    bound: socket.socket,
    *,
    requests: bool = True,
    delay: float = 0.0,
    opened: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal ends it; see `Server`.

    Meanwhile the log is written as JSON to standard error.

    Args:
        requests: whether each request is a line of the log.
        delay: seconds between a signal to stop and the end of accepting connections.
        opened: called when all models have computed a text and connections are accepted.

    Raises:
        FolderError: a model fails.
        ResourceError: the thread of the models has ended, so that nothing is answered any more.
    """
    server = Server(app, delay, opened)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        import resource

        # The usual 1,024 files are fewer than a burst of connections: each that is accepted beyond
        # them would be a traceback in the log, not a refusal.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = app.limits.connections + SPARE_CONNECTIONS + server.config.backlog
        files += OTHER_FILES
        files = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, server.handle_exit)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does at its start
    with logged_as_json(requests=requests):
        asyncio.run(server.serve([bound]))
        if server.fault is not None:
            fix = "Start the server again; its log has the reason."
            raise ResourceError(server.fault, where="serve", fix=fix)
