"""The load generator and the requests of benchmarks/serving.py."""

import asyncio
import itertools
import math
import statistics
from collections.abc import Iterator

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
from bothways.prediction.predictor import Predictor
from bothways.serving.app import App, app
from bothways.serving.errors import Limits
from running_server import running
from toy_folder import make_folder
from toy_predictors import TASKS, TEXTS, predictor


@pytest.fixture(scope="module")
def predictors(tmp_path_factory) -> dict[str, Predictor]:
    folder = make_folder(tmp_path_factory.mktemp("place") / "bert")
    return {name: predictor(folder, name) for name in TASKS}


@pytest.fixture(scope="module")
def application(predictors) -> App:
    limits = Limits(queue_tokens=200, request_tokens=200)
    return app(predictors["classify"], limits=limits)


@pytest.fixture(scope="module")
def address(application) -> Iterator[tuple[str, int]]:
    with running(application) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def test_due_times_are_poisson():
    """The gaps of a Poisson process are exponential: their deviation is their mean."""
    times = due_times(300.0, 20.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) == 6000
    assert statistics.mean(gaps) == pytest.approx(1 / 300, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)
    assert sum(gap > 1 / 300 for gap in gaps) / 5999 == pytest.approx(math.exp(-1), abs=0.02)


def test_percentiles_and_rates():
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


def test_requests_of_tasks_are_answered(predictors):
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


def test_refusal_is_error_and_connection_reopens(application, address):
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
