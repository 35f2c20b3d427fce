"""A server in operation: its log, its signals, spans, and the digest of a folder."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bothways.cli.main import app as cli
from bothways.core.errors import BothwaysError, ConfigError
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.provenance import digest_of_model
from bothways.model.heads import LabelHead, PoolerHead, TagHead
from bothways.model.model import Model
from bothways.serving.app import app, requests_log
from bothways.serving.deployment import Deployment, NamedModel
from bothways.serving.run import bind, serve, url_of
from bothways.serving.tracing import tracing
from running_server import running
from toy_folder import make_folder
from toy_predictors import TEXTS, predictor


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_has_ended_leaves_the_loggers_as_they_were(
    number: int, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("bothways.serving", "uvicorn.error", requests_log.name)
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
        os.kill(os.getpid(), number)

    with bind("127.0.0.1", 0) as bound:
        asking = threading.Thread(target=stop)
        asking.start()
        serve(application, bound, deployment)
        asking.join()
    assert '"route":"/live"' in capsys.readouterr().err
    assert states() == before
    requests_log.info({"event": "later"})
    assert capsys.readouterr().err == ""


def test_the_digest_is_of_what_predictions_depend_on(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(base, folder)
    digest = digest_of_model(str(folder), whole=True)
    assert digest == digest_of_model(str(base), whole=True)
    (folder / "notes.txt").write_text("a")
    assert digest_of_model(str(folder), whole=True) == digest
    for name in ("modules.json", "1_Pooling/config.json", "config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'{{"{name}": 1}}')
        assert digest_of_model(str(folder), whole=True) != digest
        digest = digest_of_model(str(folder), whole=True)


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


def test_mistakes_of_tracing_and_threads(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*words: str) -> None:
        cli(["serve", str(base), "--port", "0", *words], result_action="return_value")

    with pytest.raises(ConfigError, match="'localhost' is no URL"):
        tracing("localhost")
    with pytest.raises(BothwaysError, match="threads"):
        serve("--threads", "0")
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(BothwaysError, match=r'pip install "bothways\[otel\]"'):
        serve("--traces", "http://localhost:4318")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_log_on_a_full_disk_is_told_on_the_output(base: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "films", base, 1)
    call = [sys.executable, "-m", "bothways", "serve", str(folder), "--port", "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(call, stdout=-1, stderr=full, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "standard error cannot be written" in done.stdout
