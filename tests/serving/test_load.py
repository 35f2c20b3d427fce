"""Many requests at a time: answers, order, refusals, deadlines, clients that leave, the end."""

import asyncio
import functools
import json
import random
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import numpy as np
import pytest

from bothways.core.errors import FolderError, ResourceError
from bothways.model.kernels import library
from bothways.prediction import engine
from bothways.serving import batcher
from bothways.serving.app import App, app
from bothways.serving.errors import Limits, retry_after
from bothways.serving.exchange import read_body
from commands import run_line
from running_server import classify, exchange, running, wait_for
from toy_folder import save_classifier
from toy_predictors import TASKS, predictor

KINDS = ("classify", "tag", "answer", "embed", "fill")


def waiting(application: App, tokens: int) -> None:
    """Return when so many tokens are in the queue."""
    wait_for(lambda: application.batcher.queued_tokens == tokens)


def fill_queue(application: App, ask: Callable[[], Any]) -> list[Future[Any]]:
    """Let a text be computed, at the gate, and 25 wait: 100 tokens."""
    pool = ThreadPoolExecutor(26)
    first = pool.submit(ask)
    wait_for(lambda: application.batcher._busy_since)
    others = [pool.submit(ask) for _ in range(25)]
    waiting(application, 100)
    return [first, *others]


@pytest.mark.skipif(not library.multiplies("fp32"), reason="no kernels: equal to rounding only")
def test_answers_under_load_are_those_of_the_predictor_to_the_bit(predictors):
    draw = random.Random(3)
    calls = []
    for _ in range(48):
        kind = draw.choice(KINDS)
        calls.append((kind, draw.choices(TASKS[kind][1][:12], k=draw.choice((1, 1, 1, 2, 9)))))
    application = app(predictors, limits=Limits(batch_tokens=96))

    async def ask(client: httpx.AsyncClient, kind: str, inputs: list[Any]) -> Any:
        await asyncio.sleep(draw.random() / 5)
        body = {"inputs": inputs} | ({"normalize": False} if kind == "embed" else {})
        response = await client.post(f"/{kind}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def ask_all(url: str) -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, *call) for call in calls))

    with running(application) as url:
        found = asyncio.run(ask_all(url))
    mixed = application.metrics.text().decode()
    samples = [mixed.split(f"bothways_batch_sequences_{name} ")[1] for name in ("count", "sum")]
    batches, sequences = (float(sample.split()[0]) for sample in samples)
    assert sequences > 1.5 * batches  # requests did share batches
    predict = functools.cache(lambda kind, item: predictors[kind](item))
    for (kind, inputs), answers in zip(calls, found, strict=True):
        for number, (item, answer) in enumerate(zip(inputs, answers, strict=True), 1):
            alone = predict(kind, item)
            if kind == "embed":
                assert np.array_equal(np.float32(answer), alone.vectors[0])
                continue
            fields = json.loads(json.dumps(alone.to_json()))
            assert answer == fields | ({"id": str(number)} if kind == "answer" else {})


def test_requests_without_room_are_refused_unread(predictors, gate, monkeypatch):
    """Until the queue is shorter, what is no shorter than a refused request is refused, too."""
    bodies = []

    async def read(*arguments: Any) -> dict[str, Any]:
        bodies.append(await read_body(*arguments))
        return bodies[-1]

    monkeypatch.setattr(sys.modules[App.__module__], "read_body", read)
    limits = Limits(queue_tokens=100, request_tokens=100, batch_tokens=16)
    application = app(predictors["classify"], limits=limits, keys=["k"])
    key = {"authorization": "Bearer k"}
    with running(application) as url, httpx.Client(base_url=url, timeout=30) as client:

        def ask(text: str = "good film", route: str = "/classify", **more: str) -> httpx.Response:
            return client.post(route, json={"inputs": text}, headers=key | more)

        answers = fill_queue(application, ask)
        bodies.clear()
        for text, read_so_far in (("good film", 1), ("good film", 1), ("good film " * 9, 1)):
            refused = ask(text)
            assert (refused.status_code, len(bodies)) == (429, read_so_far)
            error = refused.json()["error"]
            assert error["code"] == "overloaded"
            assert "(queue_tokens)" in error["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert ask(**{"x-request-id": "mine"}).headers["x-request-id"] == "mine"
        assert ask("good film" * 3000).status_code == 429  # the app refuses what is this long
        assert len(bodies) == 1
        assert ask("a").status_code == 429  # shorter: it might have had room
        assert ask(route="/predict").status_code == 429
        assert len(bodies) == 3
        assert ask(authorization="Bearer other").status_code == 401
        body = json.dumps({"inputs": "good film"}).encode()
        head = "POST /classify HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        one, last = f"{head}\r\n".encode() + body, f"{head}connection: close\r\n\r\n".encode()
        found = exchange(url, one[:-5], one[-5:] + one + one, last, body, pause=0.05)
        assert found.count(b"HTTP/1.1 429 ") == 4
        assert found.lower().count(b"connection: close") == 1
        application.limits = replace(limits, head_seconds=0.3)
        assert exchange(url, one[:-5]).startswith(b"HTTP/1.1 408 ")  # nothing waits without end
        assert len(bodies) == 3
        gate.release(100)
        assert {answer.result().status_code for answer in answers} == {200}
        assert application.batcher.queued_tokens == 0
        assert ask().status_code == 200
        counted = application.metrics.text().decode()
        assert 'bothways_requests_total{model="",route="/classify",status="429"}' in counted


def test_a_refusal_is_forgotten_when_the_queue_becomes_shorter_meanwhile(
    predictors, gate, monkeypatch
):
    """Remembered for an empty queue, it would refuse every request from then on."""
    limits = Limits(queue_tokens=100, request_tokens=100, batch_tokens=100)
    application = app(predictors["classify"], limits=limits)

    def slow(seconds: float) -> dict[str, str]:
        gate.release(100)  # all that waits is computed while the refusal is made
        time.sleep(0.3)
        return retry_after(seconds)

    with running(application) as url:
        answers = fill_queue(application, lambda: classify(url))
        monkeypatch.setattr(batcher, "retry_after", slow)
        assert classify(url).status_code == 429
        assert [answer.result().status_code for answer in answers] == [200] * 26
        assert application.batcher.queued_tokens == 0
        assert classify(url).status_code == 200


def test_one_text_overtakes_a_request_with_many(predictors, gate):
    application = app(predictors["classify"], limits=Limits(batch_tokens=16))
    with running(application) as url, ThreadPoolExecutor(2) as pool:
        many = pool.submit(classify, url, ["good film"] * 40)
        waiting(application, 36 * 4)  # the first batch waits at the gate
        one = pool.submit(classify, url)
        waiting(application, 37 * 4)
        gate.release(2)
        one.result(10)
        assert not many.done()
        gate.release(100)
        many.result()


def test_deadlines_and_clients_that_leave_free_the_queue(predictors, gate):
    application = app(predictors["classify"], limits=Limits(batch_tokens=4))
    with running(application) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(classify, url)
        wait_for(lambda: application.batcher._busy_since)
        late = classify(url, headers={"x-request-timeout": "0.05"})
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline"
        assert application.batcher.queued_tokens == 0
        with pytest.raises(httpx.ReadTimeout):
            classify(url, timeout=0.2)
        waiting(application, 0)
        gate.release()
        first.result()
        left = 'route="/classify",status="499"} 1.0'
        wait_for(lambda: left in application.metrics.text().decode())
        metrics = application.metrics.text().decode()
        assert "bothways_batch_tokens_count 2.0" in metrics  # the start, and the first request
        assert classify(url, headers={"x-request-timeout": "nan"}).status_code == 400


def test_a_text_that_fails_is_alone_in_failing(predictors, monkeypatch):
    bad = predictors["classify"].task_model.tokenizer.encode("awful")[0]

    def sometimes(task: Any, sequences: Any, *rest: Any) -> Any:
        if any(bad in sequence.ids for sequence in sequences):
            raise RuntimeError("out of memory")
        return engine.predict_sequences(task, sequences, *rest)

    monkeypatch.setattr(batcher, "predict_sequences", sometimes)
    texts = ["good", "awful", "film", "a good film", "the film was awful"]
    with running(app(predictors["classify"])) as url, ThreadPoolExecutor(5) as pool:
        answers = pool.map(functools.partial(classify, url), texts)
        expected = [500 if "awful" in text else 200 for text in texts]
        assert [answer.status_code for answer in answers] == expected


def test_weights_that_are_not_numbers_are_named(folder, caplog):
    broken = predictor(folder, "classify")
    with running(app(broken)) as url:
        broken.task_model.model.heads["labels"].dense.bias.data.fill_(float("nan"))
        answer = classify(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_finite")
    assert ["not finite" in record.getMessage() for record in caplog.records] == [True]


def test_a_process_without_its_threads_is_not_served(predictors, monkeypatch):
    """As a worker of a program that has made the app before it forks, `gunicorn --preload`."""
    forked = app({"films": predictors["classify"]})
    fault = ResourceError("a model was opened before this process was forked", where="model")
    monkeypatch.setattr(batcher, "predict_sequences", Mock(side_effect=fault))
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    receive, send = AsyncMock(side_effect=messages), AsyncMock()
    asyncio.run(forked({"type": "lifespan"}, receive, send))
    (answer,) = send.await_args.args
    assert answer["type"] == "lifespan.startup.failed"
    assert re.search("films: the model cannot compute a text: .*forked", answer["message"])


def test_a_model_that_computes_no_numbers_is_not_served(folder, tmp_path):
    def overflow(model):
        for name, parameter in model.heads.named_parameters():
            parameter.data.fill_(3e38 if "labels" in name else 1.0)

    save_classifier(tmp_path / "films", folder, change=overflow)
    message = r"films: the model cannot compute a text: .* not finite"
    with pytest.raises(FolderError, match=message):
        run_line("serve", tmp_path / "films", "--port", 0)
    receive, send = AsyncMock(return_value={"type": "lifespan.startup"}), AsyncMock()
    asyncio.run(app({"films": str(tmp_path / "films")})({"type": "lifespan"}, receive, send))
    (answer,) = send.await_args.args  # any server then stops
    assert answer["type"] == "lifespan.startup.failed"
    assert re.search(message, answer["message"])
