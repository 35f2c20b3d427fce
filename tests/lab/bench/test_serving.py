"""The load generator and the requests of benchmarks/serving.py."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from load import (
    Exchange,
    LoadResult,
    arrivals,
    due_times,
    percentile,
    post,
    require_answers,
    waiting_clients,
)

import serving as bench
from bothways.core.errors import ResourceError
from bothways.prediction import engine
from bothways.prediction.predictor import Predictor
from bothways.serving import batcher
from bothways.serving.app import App, app
from bothways.serving.limits import Limits
from running_server import running
from toy_folder import make_folder
from toy_predictors import TASKS, TEXTS, predictor


@pytest.fixture(scope="module")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Predictor]:
    folder = make_folder(tmp_path_factory.mktemp("place") / "bert")
    return {name: predictor(folder, name) for name in TASKS}


@pytest.fixture(scope="module")
def application(predictors: dict[str, Predictor]) -> App:
    limits = Limits(queue_tokens=200, request_tokens=200)
    return app(predictors["classify"], limits=limits)


@pytest.fixture(scope="module")
def address(application: App) -> Iterator[tuple[str, int]]:
    with running(application) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def counted(application: App, status: int) -> float:
    rows = application.metrics.text().decode().splitlines()
    wanted = [row for row in rows if f'status="{status}"' in row and "requests_total" in row]
    return sum(float(row.split()[-1]) for row in wanted)


def test_waiting_clients_count_answers(application: App, address: tuple[str, int]) -> None:
    before = counted(application, 200)
    requests = [post("/classify", {"inputs": text}) for text in TEXTS[:7]]
    load = asyncio.run(waiting_clients(address, requests, 3, 0.5))
    until = time.monotonic() + 5  # a request is counted after its answer
    while counted(application, 200) - before < len(load.exchanges) and time.monotonic() < until:
        time.sleep(0.01)
    assert counted(application, 200) - before == len(load.exchanges) == len(load.seconds()) > 3
    lengths = {
        len(e.sequences[0])
        for e in application.models.named("default").task_model.encode(
            application.models.named("default").examples(TEXTS[:7], application.limits)
        )
    }
    assert {done.tokens for done in load.exchanges} <= lengths
    assert load.tokens_per_second == pytest.approx(
        sum(done.tokens for done in load.exchanges) / 0.5, rel=0.5
    )


def test_arrivals_do_not_wait(
    application: App, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stands still: requests arrive on, and their time counts from when they were due."""
    stands = threading.Event()

    def wait(*arguments: Any) -> Any:
        assert stands.wait(20)
        return engine.predict_sequences(*arguments)

    monkeypatch.setattr(batcher, "predict_sequences", wait)
    refused = counted(application, 429)

    def go_on() -> None:  # once nearly all requests have arrived
        until = time.monotonic() + 15
        while counted(application, 429) - refused < 40 and time.monotonic() < until:
            time.sleep(0.01)
        stands.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    requests = [post("/classify", {"inputs": "good film"})]  # four tokens: 50 wait and one is begun
    load = asyncio.run(arrivals(address, requests, 200.0, 0.5))
    thread.join()
    assert 0 < load.generator < 2
    statuses = [done.status for done in load.exchanges]
    assert statuses.count(200) + statuses.count(429) == 100
    assert statuses.count(429) >= 40  # they arrived while none was answered
    assert max(load.seconds()) > 0.3  # the first waited until the last had arrived


def test_due_times_are_poisson() -> None:
    """The gaps of a Poisson process are exponential: their deviation is their mean."""
    times = due_times(300.0, 20.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) == 6000
    assert statistics.mean(gaps) == pytest.approx(1 / 300, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)
    assert sum(gap > 1 / 300 for gap in gaps) / 5999 == pytest.approx(math.exp(-1), abs=0.02)


def test_percentiles_and_rates() -> None:
    assert percentile([0.001] * 99 + [1.0], 50) == pytest.approx(1.0)
    assert math.isnan(percentile([], 50))
    exchanges = (
        Exchange(200, 0.1, 11.0, 30),
        Exchange(429, 0.1, 19.0, 0),
        Exchange(200, 1.0, 12.0, 10),
    )
    load = LoadResult(exchanges, 10.0)
    assert load.tokens_per_second == 20.0
    assert LoadResult((), 0.0).tokens_per_second == 0.0


def test_requests_of_tasks_are_answered(predictors: dict[str, Predictor]) -> None:
    names = {kind: opened for kind, opened in predictors.items() if kind != "label"}
    with running(app(names)) as url:
        host, port = url.removeprefix("http://").split(":")
        for opened in names.values():
            for size in (1, 3):
                requests = bench.make_requests(opened, TEXTS[:3], size)
                assert len(requests) == 3 // size
                load = asyncio.run(waiting_clients((host, int(port)), requests[:1], 1, 0.0))
                assert [done.status for done in load.exchanges] == [200]
                assert load.exchanges[0].tokens > 0


def test_drawn_texts_have_realistic_lengths(predictors: dict[str, Predictor]) -> None:
    texts = bench.drawn_texts(predictors["classify"], 2000)
    words = sorted(len(text.split()) for text in texts)
    assert 11 <= words[1000] <= 13
    assert words[100] <= 4
    assert 40 < words[1900] < 60
    assert texts == bench.drawn_texts(predictors["classify"], 2000)
    offline = bench.measure_offline(predictors["answer"], texts[:20])
    assert offline.tokens_per_second > 0
    assert bench.measure_offline(predictors["choice"], texts[:20]).idle > 0


def test_refusal_is_error_and_connection_reopens(
    application: App, address: tuple[str, int]
) -> None:
    """60 texts of four tokens where 200 are allowed, and a body above its limit."""
    good, long = (post("/classify", {"inputs": ["good film"] * n}) for n in (1, 60))
    load = asyncio.run(waiting_clients(address, [long], 1, 0.0))
    with pytest.raises(ResourceError, match=r"status 413: .*too_many_tokens"):
        require_answers(load)
    assert require_answers(load, 413) is load
    large = post("/classify", {"inputs": "a" * application.limits.body_bytes})
    load = asyncio.run(arrivals(address, [large, good], 20.0, 0.2))
    assert sorted(done.status for done in load.exchanges) == [200, 200, 413, 413]
    nobody = asyncio.run(waiting_clients(("127.0.0.1", 9), [good], 1, 0.0))
    assert [done.status for done in nobody.exchanges] == [0]


def test_patient_limits_refuse_nothing(predictors: dict[str, Predictor]) -> None:
    """A slow server passes the deadline that a server has by itself; one that is measured has none."""
    requests = bench.make_requests(predictors["embed"], TEXTS[:32], 32)
    slow = app(predictors["embed"], limits=Limits(deadline_seconds=0.001))
    for application, statuses in (
        (slow, {504}),
        (app(predictors["embed"], limits=bench.PATIENT), {200}),
    ):
        with running(application) as url:
            host, port = url.removeprefix("http://").split(":")
            load = asyncio.run(waiting_clients((host, int(port)), requests, 8, 0.0))
        assert len(load.exchanges) == 8
        assert {done.status for done in load.exchanges} == statuses
