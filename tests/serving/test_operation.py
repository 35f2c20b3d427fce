"""A server in operation: folders replaced while it answers, spans, several processes."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bothways.cli.main import app as cli
from bothways.core.errors import BothwaysError, ConfigError, FolderError
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.provenance import digest_of_folder
from bothways.model.heads import LabelHead, PoolerHead, TagHead
from bothways.model.model import Model
from bothways.prediction import engine
from bothways.prediction.predictor import open_task
from bothways.serving import batcher
from bothways.serving.app import app, requests_log
from bothways.serving.deployment import Deployment, NamedModel, Reloader, events_log
from bothways.serving.run import bind, serve, url_of
from bothways.serving.tracing import tracing
from bothways.serving.workers import Workers, _say, _usable, pinned_cores
from running_server import running
from toy_folder import make_folder
from toy_predictors import TEXTS, predictor

two_cores = pytest.mark.skipif(len(_usable()) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert")


def write(folder: Path, base: Path, seed: int, head: Any = None, scale: float = 1.0) -> Path:
    """A model folder with random weights of a head."""
    torch.manual_seed(seed)
    loaded = load_model(base)
    heads = (TagHead(3),) if head == "tag" else (PoolerHead(), LabelHead(2))
    model = Model(loaded.model.config, heads, loaded.model.encoder)
    for parameter in model.heads.parameters():
        parameter.data.mul_(scale)
    labels = ("O", "B-X", "I-X") if head == "tag" else ("neg", "pos")
    shutil.rmtree(folder, ignore_errors=True)
    save_model(folder, model, loaded.tokenizer(), labels=labels)
    return folder


def until(condition: Any, seconds: float = 90.0) -> None:
    """Return when a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def answer(folder: Path) -> Any:
    made = open_task(folder, batch_invariant=True)(TEXTS[0])
    return json.loads(json.dumps(made.to_json()))


class Site:
    """A folder that is served, and what is asked of it."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "bothways.serving.events")
        self.records = caplog.records
        deployment = Deployment({"films": NamedModel(str(folder))})
        self.application = deployment.app()
        self.reloader = Reloader(self.application, deployment)
        self.url = ""

    def ask(self) -> Any:
        asked = {"inputs": TEXTS[0]}
        return httpx.post(f"{self.url}/classify", json=asked, timeout=30).json()

    def described(self) -> Any:
        return httpx.get(f"{self.url}/info").json()["models"][0]

    def signal(self) -> None:
        loop = self.application.batcher._loop
        assert loop is not None
        loop.call_soon_threadsafe(self.reloader.request)

    def reload(self, result: str) -> dict[str, Any]:
        """The line of the log for a pass over the folder."""
        before = len(self.records)
        self.signal()
        until(lambda: len(self.records) > before)
        line: Any = self.records[-1].msg
        assert (line["event"], line["model"], line["result"]) == ("reload", "films", result)
        return line


def test_a_folder_is_replaced_while_requests_are_answered(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "films", base, 1)
    site, first = Site(folder, caplog), answer(folder)
    gate, gated = threading.Semaphore(0), threading.Event()

    def wait(*arguments: Any) -> Any:
        assert not gated.is_set() or gate.acquire(timeout=60)
        return engine.predict_sequences(*arguments)

    monkeypatch.setattr(batcher, "predict_sequences", wait)
    with running(site.application) as site.url:
        assert site.ask() == first
        assert site.described()["digest"] == digest_of_folder(str(folder))
        assert abs(site.described()["since"] - time.time()) < 60
        site.reload("unchanged")

        gated.set()  # a request begins with the old model, and is answered by it
        under_way: list[Any] = []
        thread = threading.Thread(target=lambda: under_way.append(site.ask()))
        thread.start()
        until(site.application.batcher.busy_seconds)
        old = site.described()["digest"]
        write(folder, base, 2)
        gated.clear()
        before = len(caplog.records)
        site.signal()
        time.sleep(0.2)
        assert site.described()["digest"] == old
        gate.release()
        thread.join(30)
        assert under_way == [first]
        until(lambda: len(caplog.records) > before)
        assert caplog.records[-1].msg["result"] == "replaced"  # type: ignore[index]
        assert site.ask() == answer(folder) != first
        assert site.described()["digest"] == digest_of_folder(str(folder)) != old


def test_a_broken_folder_leaves_the_old_model(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "films", base, 1)
    site, first = Site(folder, caplog), answer(folder)
    with running(site.application) as site.url:
        (folder / "config.json").write_text("{")
        assert "the old model stays" in site.reload("failed")["message"]
        assert site.ask() == first
        write(folder, base, 3, head="tag")
        assert "is for tag" in site.reload("failed")["message"]
        write(folder, base, 3, scale=float("nan"))
        site.reload("failed")
        shutil.rmtree(folder)
        site.reload("failed")
        assert site.ask() == first
        write(folder, base, 2)
        site.reload("replaced")
        assert site.ask() == answer(folder) != first
        counts = httpx.get(f"{site.url}/metrics").text
        assert 'bothways_reloads_total{model="films",result="failed"} 4.0' in counts
        assert 'bothways_reloads_total{model="films",result="replaced"} 1.0' in counts


def test_keys_are_read_again(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bothways.serving.events")
    file = tmp_path / "keys"
    file.write_text("first\nshared\n")
    deployment = Deployment(
        {"films": NamedModel(str(write(tmp_path / "films", base, 1)))}, keys=file
    )
    application = deployment.app()
    reloader = Reloader(application, deployment)

    def statuses() -> list[int]:
        """What each key is answered with, and a request without one."""
        keys: list[dict[str, str]] = [{"x-api-key": k} for k in ("first", "shared", "next")]
        return [httpx.get(f"{url}/info", headers=key).status_code for key in [*keys, {}]]

    def reload(result: str) -> Any:
        before = len(caplog.records)
        loop = application.batcher._loop
        assert loop is not None
        loop.call_soon_threadsafe(reloader.request)
        until(lambda: len(caplog.records) == before + 2)  # of the keys, and of the folder
        line: Any = caplog.records[before].msg
        assert (line["event"], line["result"]) == ("keys", result)
        return line

    with running(application) as url:
        assert statuses() == [200, 200, 401, 401]
        assert reload("unchanged")["count"] == 2
        file.write_text("shared next")
        assert reload("replaced")["count"] == 2
        assert statuses() == [401, 200, 200, 401]
        file.write_text("\n")  # no key is not a server that is open to all
        assert "the old keys stay: " in reload("failed")["message"]
        assert statuses() == [401, 200, 200, 401]
        file.unlink()
        reload("failed")
        assert statuses() == [401, 200, 200, 401]
        file.write_bytes(b"\xef\xbb\xbffirst")  # as Windows' Notepad writes it
        reload("replaced")
        assert statuses() == [200, 401, 401, 401]
    assert not any(k in str(record.msg) for record in caplog.records for k in ("first", "shared"))


def test_a_server_that_has_ended_leaves_the_loggers_as_they_were(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("bothways.serving", "uvicorn.error", requests_log.name, events_log.name)
    loggers = [logging.getLogger(name) for name in names]

    def states() -> list[object]:
        return [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]

    before = states()
    deployment = Deployment({"films": NamedModel(str(write(tmp_path / "films", base, 1)))})
    application = deployment.app()

    def stop() -> None:
        """Ask once, then send the signal."""
        until(application.is_ready)
        httpx.get(f"{url_of(bound)}/live")
        os.kill(os.getpid(), signal.SIGTERM)

    with bind("127.0.0.1", 0) as bound:
        asking = threading.Thread(target=stop)
        asking.start()
        serve(application, bound, deployment)
        asking.join()
    assert '"route":"/live"' in capsys.readouterr().err
    assert states() == before
    events_log.info({"event": "later"})
    assert capsys.readouterr().err == ""


def test_the_digest_is_of_what_predictions_depend_on(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(base, folder)
    digest = digest_of_folder(str(folder))
    assert digest == digest_of_folder(str(base))
    (folder / "notes.txt").write_text("a")
    assert digest_of_folder(str(folder)) == digest
    for name in ("modules.json", "1_Pooling/config.json", "config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'{{"{name}": 1}}')
        assert digest_of_folder(str(folder)) != digest
        digest = digest_of_folder(str(folder))


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_is_a_span_with_its_phases(base: Path) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason="needs bothways[otel]")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    application = app(predictor(base, "classify"), tracer=provider.get_tracer("test"))
    with running(application) as url:
        start = time.time_ns()
        headers = {"traceparent": PARENT, "x-request-id": "a-1"}
        httpx.post(f"{url}/classify", json={"inputs": TEXTS[0]}, headers=headers)
        httpx.get(f"{url}/ready")
        httpx.post(f"{url}/classify", json={"inputs": 1})
        until(lambda: len(kept.get_finished_spans()) >= 5)
    *phases, whole, refused = kept.get_finished_spans()
    assert [span.name for span in phases] == ["tokenize", "queue", "compute"]
    assert (whole.name, refused.name) == ("POST /classify", "POST /classify")
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{whole.parent.span_id:016x}" == PARENT.split("-")[2]
    assert {span.parent.span_id for span in phases} == {whole.context.span_id}
    times = [t for span in phases for t in (span.start_time, span.end_time)]
    slack = 2_000_000  # two clocks are compared
    assert start - slack <= whole.start_time <= times[0] + slack
    assert times == sorted(times)
    assert times[-1] <= whole.end_time + slack
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["bothways.request.id"] == "a-1"
    assert refused.attributes["http.response.status_code"] == 422
    assert refused.parent is None
    assert not any(TEXTS[0] in str(span.attributes) for span in kept.get_finished_spans())


def test_mistakes_of_tracing_and_workers(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*words: str) -> None:
        cli(["serve", str(base), "--port", "0", *words], result_action="return_value")

    with pytest.raises(ConfigError, match="'localhost' is no URL"):
        tracing("localhost")
    many = str(4 * (os.cpu_count() or 1))
    with pytest.raises(ConfigError, match="and there are"):
        serve("--workers", many, "--threads", "1")
    with pytest.raises(BothwaysError, match="workers"):
        serve("--workers", "0")
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(BothwaysError, match=r'pip install "bothways\[otel\]"'):
        serve("--traces", "http://localhost:4318")


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bothways.serving.workers._usable", lambda: {0, 1, 2, 3, 5, 7, 8})
    assert pinned_cores(3, None) == [[0, 1], [2, 3], [5, 7]]
    assert pinned_cores(2, 3) == [[0, 1, 2], [3, 5, 7]]
    with pytest.raises(ConfigError, match="2 workers of 4 threads need 8 cores, and there are 7"):
        pinned_cores(2, 4)


@contextlib.contextmanager
def command(*words: object) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """`bothways serve` in a process; its address and the lines that it logs."""
    call = [sys.executable, "-m", "bothways", "serve", *map(str, words), "--port", "0"]
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        banner = process.stderr.readline()
        lines: list[str] = []
        stream = process.stderr
        reader = threading.Thread(target=lambda: lines.extend(iter(stream.readline, "")))
        reader.start()
        try:
            found = re.search(r"http://[\d.]+:\d+", banner)
            assert found, (banner, lines)
            yield found[0], process, lines
        finally:
            process.kill() if process.poll() is None else None
            reader.join(20)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_log_on_a_full_disk_is_told_on_the_output(base: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "films", base, 1)
    call = [sys.executable, "-m", "bothways", "serve", str(folder), "--port", "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(call, stdout=-1, stderr=full, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "standard error cannot be written" in done.stdout


def children(process: subprocess.Popen[str]) -> list[int]:
    """The processes below one that answer, not the helper of multiprocessing."""
    numbers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        n for n in map(int, numbers) if b"spawn_main" in Path(f"/proc/{n}/cmdline").read_bytes()
    ]


@two_cores
def test_two_processes_answer_on_one_socket(base: Path, tmp_path: Path) -> None:
    folder, keys = write(tmp_path / "films", base, 1), tmp_path / "keys"
    keys.write_text("first")
    words = (folder, "--workers", 2, "--threads", 1, "--api-key-file", keys)
    with command(*words) as (url, process, lines):
        key = {"x-api-key": "first"}

        def reached() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{url}/ready").status_code == 200
            return False

        def metric(name: str) -> float:
            rows = httpx.get(f"{url}/metrics", headers=key).text.splitlines()
            return sum(float(row.split()[-1]) for row in rows if row.startswith(name))

        def ask() -> Any:
            body = {"inputs": TEXTS[0]}
            return httpx.post(f"{url}/classify", json=body, headers=key, timeout=30).json()

        until(lambda: reached() and metric("bothways_ready") == 2)
        cores = [os.sched_getaffinity(child) for child in children(process)]
        assert len(cores) == 2
        assert all(len(each) == 1 for each in cores)
        first = answer(folder)
        assert [ask() for _ in range(40)] == [first] * 40
        assert metric('bothways_requests_total{model="films",route="/classify"') == 40

        os.kill(children(process)[0], signal.SIGKILL)
        until(lambda: "worker" in "".join(lines))
        assert [ask() for _ in range(20)] == [first] * 20  # the other one answers
        until(lambda: metric("bothways_ready") == 2)
        assert metric('bothways_requests_total{model="films",route="/classify"') == 60

        write(folder, base, 2)
        keys.write_text("second")
        process.send_signal(signal.SIGHUP)
        until(lambda: sum('"replaced"' in line for line in lines) == 4)  # key and folder, twice
        assert ask()["error"]["code"] == "unauthorized"
        key["x-api-key"] = "second"
        second = answer(folder)
        assert [ask() for _ in range(10)] == [second] * 10
        below = children(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        until(lambda: not any(Path(f"/proc/{child}").exists() for child in below))


def test_a_process_whose_parent_has_ended_says_nothing() -> None:
    parent, pipe = multiprocessing.Pipe()
    parent.close()
    with pipe:
        _say(pipe)  # it is starting; it stops once it reads the end of the pipe
        _say(pipe, ConfigError("no"))


def test_the_process_above_accepts_no_connections_when_it_stops() -> None:
    with bind("127.0.0.1", 0) as bound:
        workers = Workers(Deployment({}), bound, [], lambda: None)
        workers._pass_on(signal.SIGHUP)
        assert bound.fileno() >= 0
        workers._pass_on(signal.SIGTERM)
        assert bound.fileno() == -1  # those below have their own, until they stop


@two_cores
def test_what_processes_cannot_open_is_one_error(tmp_path: Path) -> None:
    words = ["serve", str(tmp_path / "nowhere"), "--workers", "2", "--port", "0"]
    with pytest.raises(FolderError, match=r"nowhere: no such folder"):
        cli(words, result_action="return_value")
