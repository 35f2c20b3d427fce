"""The measurements of `bothways bench serve`: loads, and what is made of them."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bothways.cli.bench import server_tables
from bothways.cli.main import app as cli
from bothways.core.errors import ConfigError, ResourceError
from bothways.core.terminal import show_lines
from bothways.lab.bench import serving as bench
from bothways.lab.bench.load import (
    Exchanged,
    LoadResult,
    answered,
    arrivals,
    due_times,
    percentile,
    post,
    waiting_clients,
)
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
def place(application: App) -> Iterator[tuple[str, int]]:
    with running(application) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def counted(application: App, status: int) -> float:
    rows = application.metrics.text().decode().splitlines()
    wanted = [row for row in rows if f'status="{status}"' in row and "requests_total" in row]
    return sum(float(row.split()[-1]) for row in wanted)


def test_waiting_clients_count_every_answer(application: App, place: tuple[str, int]) -> None:
    before = counted(application, 200)
    requests = [post("/classify", {"inputs": text}) for text in TEXTS[:7]]
    load = asyncio.run(waiting_clients(place, requests, 3, 0.5))
    until = time.monotonic() + 5  # a request is counted after its answer
    while counted(application, 200) - before < len(load.exchanges) and time.monotonic() < until:
        time.sleep(0.01)
    assert counted(application, 200) - before == len(load.exchanges) == len(load.seconds()) > 3
    lengths = {
        len(e.sequences[0])
        for e in application.models.named("default").learner.encode(
            application.models.named("default").examples(TEXTS[:7], application.limits)
        )
    }
    assert {done.tokens for done in load.exchanges} <= lengths
    assert load.tokens_per_second == pytest.approx(
        sum(done.tokens for done in load.exchanges) / 0.5, rel=0.5
    )


def test_arrivals_do_not_wait_for_the_server(
    application: App, place: tuple[str, int], monkeypatch: pytest.MonkeyPatch
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
    load = asyncio.run(arrivals(place, requests, 200.0, 0.5))
    thread.join()
    assert 0 < load.generator < 2
    statuses = [done.status for done in load.exchanges]
    assert statuses.count(200) + statuses.count(429) == 100
    assert statuses.count(429) >= 40  # they arrived while none was answered
    assert max(load.seconds()) > 0.3  # the first waited until the last had arrived


def test_arrivals_are_due_at_random_times_at_their_rate() -> None:
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
        Exchanged(200, 0.1, 11.0, 30),
        Exchanged(429, 0.1, 19.0, 0),
        Exchanged(200, 1.0, 12.0, 10),
    )
    load = LoadResult(exchanges, 10.0)
    assert load.tokens_per_second == 20.0
    assert LoadResult((), 0.0).tokens_per_second == 0.0


def test_every_task_has_requests_that_are_answered(predictors: dict[str, Predictor]) -> None:
    names = {kind: each for kind, each in predictors.items() if kind != "label"}
    with running(app(names)) as url:
        host, port = url.removeprefix("http://").split(":")
        for each in names.values():
            for size in (1, 3):
                requests = bench.requests_of(each, TEXTS[:3], size)
                assert len(requests) == 3 // size
                load = asyncio.run(waiting_clients((host, int(port)), requests[:1], 1, 0.0))
                assert [done.status for done in load.exchanges] == [200]
                assert load.exchanges[0].tokens > 0


def test_drawn_texts_have_real_lengths(predictors: dict[str, Predictor]) -> None:
    texts = bench.drawn_texts(predictors["classify"], 2000)
    words = sorted(len(text.split()) for text in texts)
    assert 11 <= words[1000] <= 13
    assert words[100] <= 4
    assert 40 < words[1900] < 60
    assert texts == bench.drawn_texts(predictors["classify"], 2000)
    offline = bench.measure_offline(predictors["answer"], texts[:20])
    assert offline.tokens_per_second > 0
    assert bench.measure_offline(predictors["choice"], texts[:20]).idle > 0


def test_divisions_use_all_cores() -> None:
    assert bench.divisions(2) == [bench.Division(1, 1), bench.Division(1, 2)]
    assert [division.threads for division in bench.divisions(12)] == [1, 2, 3, 4, 6, 12]


def test_a_refusal_ends_a_measurement_and_the_connection_is_opened_again(
    application: App, place: tuple[str, int]
) -> None:
    """60 texts of four tokens where 200 are allowed, and a body above its limit."""
    good, long = (post("/classify", {"inputs": ["good film"] * n}) for n in (1, 60))
    load = asyncio.run(waiting_clients(place, [long], 1, 0.0))
    with pytest.raises(ResourceError, match=r"status 413: .*too_many_tokens"):
        answered(load)
    assert answered(load, 413) is load
    large = post("/classify", {"inputs": "a" * application.limits.body_bytes})
    load = asyncio.run(arrivals(place, [large, good], 20.0, 0.2))
    assert sorted(done.status for done in load.exchanges) == [200, 200, 413, 413]
    nobody = asyncio.run(waiting_clients(("127.0.0.1", 9), [good], 1, 0.0))
    assert [done.status for done in nobody.exchanges] == [0]


def test_patient_servers_refuse_no_client_that_waits(predictors: dict[str, Predictor]) -> None:
    """A slow server passes the deadline that a server has by itself; one that is measured has none."""
    requests = bench.requests_of(predictors["embed"], TEXTS[:32], 32)
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


def test_the_table_names_the_best_server_and_fits() -> None:
    def load(seconds: float, status: int = 200) -> LoadResult:
        return LoadResult((Exchanged(status, seconds, seconds, 100),), 0.0)

    servers = tuple(
        bench.Served(bench.Division(n, 8 // n), 1.0, load(0.004), load(1 / n), load(1 / n),
                     load(10.0), load(0.5), (9900.0, 9910.0))
        for n in (1, 2, 4, 8)
    )  # fmt: skip
    found = bench.ServerComparison(bench.Offline(0.4, 2.0, 9), servers)
    assert found.best.division.workers == 8
    cells = list(bench.row(servers[1], found.offline))
    assert cells[:4] == ["2 × 4", "1.0", "4.0, 4.0", "200 (50000%)"]
    assert cells[7] == "0.00"
    assert cells[9:11] == ["0", "–"]
    console = Console(width=80, record=True, file=StringIO())
    tables = server_tables(found)
    assert [len(table.columns) for table in tables] == [4, 2]
    show_lines(console, *tables)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for cell in (*bench.TITLES, *cells):
        assert cell in text  # nothing is cut or broken


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve"], "serve needs a model"),
        (["small", "folder"], "only serve takes one"),
        (["serve", "folder", "--seconds", "0"], "above 0"),
    ],
)
def test_mistakes_of_the_command(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli(["bench", *words], result_action="return_value")


def test_a_file_with_few_texts_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "bert")
    (tmp_path / "texts.txt").write_text("a\n\nb\n")
    with pytest.raises(ConfigError, match="has 2 lines of text"):
        cli(["bench", "serve", str(folder), "--texts", str(tmp_path / "texts.txt")],
            result_action="return_value")  # fmt: skip
