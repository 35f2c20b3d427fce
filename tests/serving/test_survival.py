"""Whatever a request does to the model's thread, the other requests are answered, and the probes tell the truth."""

import contextlib
import logging
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bothways.core.errors import ResourceError
from bothways.serving import run
from bothways.serving.app import App, app
from bothways.serving.batcher import Batcher, Ticket
from bothways.serving.errors import Limits, RequestError
from running_server import classify, running, wait_for
from toy_predictors import TASKS

ODD: list[Any] = [
    "", " ", "\x00", "\u200b", "[MASK]", ["", ""], {}, {"text": ""},
    {"query": "a", "documents": []}, {"query": "", "documents": ["", ""]},
    {"context": "a", "endings": []}, {"context": "", "endings": ["", ""]},
    {"words": []}, {"words": ["", ""]}, {"question": "", "context": ""},
]  # fmt: skip
"""Inputs that some task reads, or encodes to no sequence, and others refuse."""


class Panic(BaseException):
    """A stand-in for the panic of a Rust library, which is no `Exception`."""


@pytest.fixture
def application(predictors) -> App:
    return app({name: predictors[name] for name in ("classify", "regress")})


@pytest.fixture
def url(application) -> Iterator[str]:
    with running(application) as url:
        yield url


def live(url: str) -> int:
    return httpx.get(f"{url}/live").status_code


def test_inputs_that_encode_to_nothing_are_answered_or_refused(predictors):
    with running(app(predictors)) as url, httpx.Client(base_url=url, timeout=20) as client:
        for name in TASKS:
            route = "" if name == "rerank" else predictors[name].task_model.task.name
            path = f"/models/{name}/{route}"
            for value in ODD:
                response = client.post(path, json={"inputs": [value]})
                assert response.status_code in (200, 422), (path, value, response.text)
        assert (live(url), classify(url).status_code) == (200, 200)


@pytest.mark.parametrize("kind", [Panic, SystemExit, MemoryError])
def test_an_exception_of_the_model_is_delivered_to_its_request(
    kind, application, url, monkeypatch, caplog
):
    def fail(batch: Any) -> Any:
        raise kind("broken")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "bothways.serving"):
        patch.setattr(application.models.named("regress").task_model, "outputs", fail)
        body = {"inputs": ["a", "b"]}
        headers = {"x-request-id": "a-1"}
        response = httpx.post(f"{url}/regress", json=body, headers=headers, timeout=20)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "a-1" in response.json()["error"]["message"]
    assert any("a-1" in record.getMessage() and record.exc_info for record in caplog.records)
    assert (live(url), classify(url).status_code) == (200, 200)
    assert application.batcher.queued_tokens == 0


def test_a_fault_of_the_queue_costs_one_request(application, url, monkeypatch):
    take, calls = Batcher._take, []

    def fail_once(self: Batcher) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise IndexError("pop from an empty deque")
        return take(self)

    monkeypatch.setattr(Batcher, "_take", fail_once)
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda _: classify(url).status_code, range(4)))
    assert sorted(statuses) == [200, 200, 200, 500]
    assert live(url) == 200
    assert application.batcher.queued_tokens == 0


@pytest.mark.parametrize("kind", [Panic, RuntimeError])
def test_a_tokenizer_that_fails_fails_its_request_alone(
    kind, application, url, monkeypatch, caplog
):
    def fail(*_: Any) -> Any:
        raise kind("secret of the tokenizer")

    for text in ("a", "a " * 5000):  # in the event loop, and in a thread
        with monkeypatch.context() as patch:
            patch.setattr(application.models.named("regress").task_model, "encode", fail)
            response = httpx.post(f"{url}/regress", json={"inputs": [text, "b"]}, timeout=20)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
        assert "secret" not in response.text
        assert classify(url).status_code == 200
    assert "secret of the tokenizer" in caplog.text


def test_liveness_fails_while_a_batch_is_stuck(application, url, monkeypatch):
    computing, go_on = threading.Event(), threading.Event()
    task_model = application.models.named("classify").task_model
    outputs = task_model.outputs

    def wait(batch: Any) -> Any:
        computing.set()
        assert go_on.wait(20)
        return outputs(batch)

    monkeypatch.setitem(App._live.__globals__, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(task_model, "outputs", wait)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(classify, url)
        assert computing.wait(20)
        threading.Event().wait(0.1)
        assert live(url) == 500
        go_on.set()
        assert answer.result().status_code == 200
    wait_for(lambda: live(url) == 200)  # the answer is sent before the batch has ended


def test_a_request_after_the_end_of_the_thread_is_refused(application):
    """The server ends soon, but not at once."""
    batcher, model = application.batcher, application.models.named("classify")
    batcher._thread = threading.Thread()
    batcher._thread.start()
    batcher._thread.join()
    examples = model.examples(["a"], application.limits)
    with pytest.raises(RequestError, match="the thread of the model has ended") as caught:
        batcher.submit(Ticket(model, examples, model.encode(examples), math.inf, Future()))
    assert caught.value.code == "internal"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_model_thread_has_ended_says_so_and_ends(predictors, monkeypatch):
    application = app(predictors["classify"])
    opened, bound = threading.Event(), run.bind("127.0.0.1", 0)

    def break_thread(*_: Any) -> Any:
        raise Panic

    def probe() -> None:
        assert opened.wait(20)
        monkeypatch.setattr(Batcher, "_take", break_thread)
        monkeypatch.setattr(Batcher, "_end", break_thread)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            classify(run.url_of(bound))

    thread = threading.Thread(target=probe)
    thread.start()
    with pytest.raises(ResourceError) as caught:
        run.run_server(application, bound, opened=opened.set)
    thread.join(20)
    assert caught.value.where == "serve"
    assert caught.value.what == "the thread of the model has ended"


def test_bodies_that_never_end_leave_memory_and_room_for_others(predictors):
    application = app(predictors["classify"], limits=Limits(body_bytes=100_000))
    head = (
        "POST /classify HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        "content-length: 100000\r\n\r\n"
    )
    large = b'{"inputs": "%s"}' % (b"a" * 80_000)
    with running(application) as url, contextlib.ExitStack() as clients:
        address = httpx.URL(url)
        for _ in range(16):
            client = clients.enter_context(socket.create_connection((address.host, address.port)))
            client.sendall(head.encode() + b" " * 99_000)
        wait_for(lambda: application._buffered == 16 * 99_000)
        json = {"content-type": "application/json"}
        refused = httpx.post(f"{url}/classify", content=large, headers=json)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "overloaded"
        assert classify(url).status_code == 200
        clients.close()
        wait_for(lambda: application._buffered == 0)
        assert httpx.post(f"{url}/classify", content=large, headers=json).status_code == 200
    assert application._buffered == 0
