"""The queue before the model, and the one thread that computes.

No timer: while a batch is computed requests gather, and the next batch takes what waits, up to
`Limits.batch_tokens`. A request alone is computed at once. Batches take one sequence of each
request in turn, so that a request with thousands of texts does not hold up those with one.
Sequences are packed, so the order is free and nothing is padded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bothways.core.errors import BothwaysError, DivergedError, ResourceError
from bothways.prediction.engine import decode_finite, predict_encoded, predict_sequences
from bothways.serving.errors import Limits, RequestError, retry_after
from bothways.serving.models import ServedModel
from bothways.tasks.base import EncodedExample

if TYPE_CHECKING:
    from bothways.serving.exchange import Metrics

FIRST_RATE = 5000.0
"""Tokens a second that are assumed before the first batch."""
SMOOTHING = 0.1
"""The weight of the last batch in the mean rate."""
_log = logging.getLogger("bothways.serving")


@dataclass(frozen=True)
class ModelJob:
    """A piece of work of another kind than a prediction; it is a batch by itself.

    Attributes:
        tokens: that it takes as long as.
        compute: called in the model's thread.
    """

    tokens: int
    compute: Callable[[], Any]


@dataclass(eq=False)
class Ticket:
    """A request in the queue.

    Attributes:
        model, examples, encoded: what is computed; `encoded` may hold jobs, whose results are then
            the predictions.
        deadline: by `time.monotonic`.
        answer: the predictions, in order.
        route, size: that the request asked for, and the bytes of its body, for `refusal`; a size
            of None is not remembered.
        id: of the request, for the log.
        tokens: of all its sequences.
        queued, started, computed: by `time.perf_counter`: when it was queued, when its first batch
            began and its last one ended.
    """

    model: ServedModel
    examples: Many[Any]
    encoded: Many[EncodedExample | ModelJob]
    deadline: float
    answer: asyncio.Future[list[Any]]
    route: str = ""
    size: int | None = None
    id: str = ""
    tokens: int = 0
    queued: float = 0.0
    started: float = 0.0
    computed: float = 0.0
    units: deque[Unit] = field(default_factory=deque)
    predictions: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, dict[int, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_batch = self.model.reads_vocabulary
        for n, item in enumerate(self.encoded):
            if isinstance(item, ModelJob):
                self.tokens += item.tokens
                self.units.append(Unit(self, n, None, item.tokens))
                continue
            lengths = list(map(len, item.sequences))
            self.tokens += sum(lengths)
            # No sequences at all, such as a query without documents: there is still an answer.
            if is_batch or not lengths:
                self.units.append(Unit(self, n, None, sum(lengths)))
            else:
                self.units.extend(Unit(self, n, k, size) for k, size in enumerate(lengths))

    def add(self, unit: Unit, output: Any) -> None:
        """Keep what was computed for a unit; decode the example once it is complete.

        Raises:
            DivergedError: the output is not finite.
        """
        if unit.sequence is None:
            self.predictions[unit.example] = output
            return
        item, rows = self.encoded[unit.example], self.outputs.setdefault(unit.example, {})
        assert isinstance(item, EncodedExample)
        rows[unit.sequence] = output
        if len(rows) == len(item.sequences):
            # Sequences of an example may be computed in different batches and in any order.
            ordered = [rows[k] for k in range(len(rows))]
            del self.outputs[unit.example]
            task_model, example = self.model.task_model, self.examples[unit.example]
            self.predictions[unit.example] = decode_finite(task_model, example, item, ordered)


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit of computation: a sequence of an example, or (None) all of them."""

    ticket: Ticket
    example: int
    sequence: int | None
    tokens: int


class Batcher:
    """A queue and the thread that computes what waits in it.

    Attributes:
        queued_tokens: that wait.
        rate: tokens a second, a running mean.
        refusals: by route, the bytes and the error of the shortest request that had no room since
            the queue last became shorter.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.queued_tokens, self.rate = 0, FIRST_RATE
        self.refusals: dict[str, tuple[int, RequestError]] = {}
        self._tickets: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._busy_since: float | None = None
        self._heartbeat = time.monotonic()
        self._thread = threading.Thread()

    def start(self) -> None:
        """Start the thread, for the first time or after `stop`."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bothways-model", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the batch under way; what waits is not computed."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def fault(self, bound: float) -> str | None:
        """Return the fault of a thread that computes nothing any more; None if it is well.

        Args:
            bound: seconds of one batch, or of no batch while requests wait.
        """
        if self._stopping or self._thread.ident is None:
            return None
        if not self._thread.is_alive():
            return "the thread of the model has ended"
        working = self._busy_since is not None or bool(self._tickets)
        if working and time.monotonic() - self._heartbeat > bound:
            return f"the model has been computing one batch for more than {bound:g} s"
        return None

    def submit(self, ticket: Ticket) -> None:
        """Queue a request.

        Raises:
            RequestError: it has too many tokens, or there is no room for it.
        """
        self.limits.check("request_tokens", "tokens", ticket.tokens)
        if (fault := self.fault(math.inf)) is not None:
            raise RequestError("internal", fault)
        if not ticket.units:
            self._deliver(ticket, [])
            return
        with self._changed:
            # A refusal is remembered before the queue can become shorter. Remembered later, it
            # might stay when the queue is empty, and refuse every request from then on.
            if self.queued_tokens + ticket.tokens > self.limits.queue_tokens:
                bound = f"{self.limits.queue_tokens:,} (queue_tokens)"
                message = f"the queue is full: {self.queued_tokens:,} tokens wait, and with "
                message += f"{ticket.tokens:,} more there would be above {bound}"
                wait = retry_after(self.queued_tokens / self.rate)
                error = RequestError("overloaded", message, headers=wait)
                if ticket.size is not None and not self.refusal(ticket.route, ticket.size):
                    self.refusals[ticket.route] = ticket.size, error
                raise error
            ticket.queued = time.perf_counter()
            if not self._tickets and self._busy_since is None:
                self._heartbeat = time.monotonic()  # the thread has waited for this request
            self._queue(ticket.tokens)
            self._tickets.append(ticket)
            self._changed.notify()

    def refusal(self, route: str, size: int | None) -> RequestError | None:
        """Return the refusal of a request without room; None if it has to be read to know.

        Until the queue becomes shorter, a request has no room if one of the same route that is no
        longer had none. To read and tokenize it would take time that the model needs.
        """
        least, error = self.refusals.get(route, (0, None))
        if error is None or size is None or size < least:
            return None
        return RequestError(error.code, error.message, headers=error.headers)

    def cancel(self, ticket: Ticket) -> None:
        """Remove the pending work of a request from the queue."""
        with self._changed, contextlib.suppress(ValueError):
            self._tickets.remove(ticket)
            self._drop(ticket)

    def _queue(self, added: int) -> None:
        self.queued_tokens += added
        if added < 0:
            self.refusals = {}
        self.metrics.queued.set(self.queued_tokens)

    def _drop(self, ticket: Ticket) -> None:
        self._queue(-sum(unit.tokens for unit in ticket.units))
        ticket.units.clear()

    # ---- the thread of the model ----

    def _run(self) -> None:
        """Compute batches until `stop`. No exception ends the thread that all requests need."""
        while not self._stopping:
            units: list[Unit] = []
            try:
                with self._changed:
                    while not (self._tickets or self._stopping):
                        self._changed.wait()
                    if self._stopping:
                        return
                    units = self._take()
                    self._heartbeat = time.monotonic()
                    self._busy_since = self._heartbeat if units else None
                if units:
                    self._compute(units)
            except BaseException as error:  # also panics of Rust and SystemExit
                with self._changed:  # the requests of the batch; of no batch the next one
                    batch = {id(unit.ticket): unit.ticket for unit in units}
                    failed = [*batch.values()] or list(self._tickets)[:1]
                for ticket in failed:
                    self._end(ticket, error)
            finally:
                self._busy_since = None

    def _take(self) -> list[Unit]:
        """Take the next batch: of the oldest request's model, one unit of each request in turn."""
        moment = time.monotonic()
        for ticket in [ticket for ticket in self._tickets if ticket.deadline < moment]:
            self._tickets.remove(ticket)
            self._drop(ticket)
            self._deliver(ticket, late())
        if not self._tickets:
            return []
        model, max_tokens = self._tickets[0].model, self.limits.batch_tokens
        taken: list[Unit] = []
        turn = deque(ticket for ticket in self._tickets if ticket.model is model)
        tokens = 0
        while turn:
            ticket = turn.popleft()
            unit = ticket.units[0]
            is_single = unit.sequence is None or (taken and taken[0].sequence is None)
            if taken and (tokens + unit.tokens > max_tokens or is_single):
                continue  # later ones may still fit
            taken.append(ticket.units.popleft())
            tokens += unit.tokens
            if ticket.units:
                turn.append(ticket)
        self._queue(-tokens)
        # The next batch begins with a request that had the least of this one.
        shares = {id(unit.ticket) for unit in taken}
        waiting = [ticket for ticket in self._tickets if ticket.units]
        served = [ticket for ticket in waiting if id(ticket) in shares]
        unserved = [ticket for ticket in waiting if id(ticket) not in shares]
        self._tickets = deque([*unserved, *served])
        return taken

    def _compute(self, units: list[Unit]) -> None:
        start = time.perf_counter()
        tokens = sum(unit.tokens for unit in units)
        for unit in units:
            unit.ticket.started = unit.ticket.started or start
        for unit, result in zip(units, self._outputs(units), strict=True):
            try:
                if isinstance(result, BaseException):
                    raise result
                unit.ticket.add(unit, result)
            except BaseException as error:
                self._end(unit.ticket, error)
        end = time.perf_counter()
        # An exponential average: the time that new requests wait is estimated by it.
        self.rate += SMOOTHING * (tokens / max(end - start, 1e-6) - self.rate)
        self.metrics.batch(tokens, len(units), end - start)
        for ticket in {id(unit.ticket): unit.ticket for unit in units}.values():
            if len(ticket.predictions) == len(ticket.encoded):
                ticket.computed = end
                self._deliver(ticket, [ticket.predictions[n] for n in range(len(ticket.encoded))])

    def _outputs(self, units: list[Unit]) -> list[Any]:
        """Return an output or an error for each unit; a batch that fails is computed one by one."""
        task_model = units[0].ticket.model.task_model
        max_tokens = max(self.limits.batch_tokens, units[0].tokens)
        encoded: list[Any] = [unit.ticket.encoded[unit.example] for unit in units]
        try:
            if units[0].sequence is None:  # the only one
                if isinstance(encoded[0], ModelJob):
                    return [encoded[0].compute()]
                examples = [units[0].ticket.examples[units[0].example]]
                return [value for _, value in predict_encoded(task_model, examples, encoded)]
            pairs = zip(encoded, units, strict=True)
            sequences = [item.sequences[unit.sequence] for item, unit in pairs]
            return list(predict_sequences(task_model, sequences, max_tokens))
        except BaseException as error:
            # One unit that fails must not fail the others of its batch: each is computed alone.
            if len(units) == 1:
                return [error]
            return [result for unit in units for result in self._outputs([unit])]

    def _end(self, ticket: Ticket, error: BaseException) -> None:
        """Take a request out of the queue, and answer it by the error that it has caused."""
        with self._changed, contextlib.suppress(ValueError):
            self._drop(ticket)
            self._tickets.remove(ticket)
        self._deliver(ticket, internal(error, ticket.id))

    def _deliver(self, ticket: Ticket, result: list[Any] | RequestError) -> None:
        # Clients in tests of an app may have a loop for each request.
        with contextlib.suppress(RuntimeError):  # the loop is closed
            ticket.answer.get_loop().call_soon_threadsafe(settle, ticket.answer, result)


def settle(answer: asyncio.Future[list[Any]], result: list[Any] | Exception) -> None:
    """Give a request its predictions or its error, unless it has one already."""
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def late() -> RequestError:
    """Return the error for a request whose deadline has passed."""
    message = "the answer was not ready in time (deadline_seconds, or x-request-timeout)"
    return RequestError("deadline", message, headers={"retry-after": "1"})


def internal(error: BaseException, id: str) -> RequestError:
    """Return the error that a client receives for a failure; the log has the rest, with the id."""
    if isinstance(error, DivergedError):
        _log.error("the prediction of request %s failed: %s", id, error.what)
        return RequestError("not_finite", error.what)
    if isinstance(error, ResourceError):  # of this process, such as threads that a fork has ended
        _log.error("request %s failed: %s", id, error)
        return RequestError("internal", error.message("json"))
    if isinstance(error, BothwaysError):
        return RequestError("invalid", error.message("json"), param="inputs")
    _log.error("request %s failed", id, exc_info=error)
    message = f"the request failed; the server's log has the reason at the request {id}"
    return RequestError("internal", message)
