"""A server in operation: its log, its signals, spans, and the digest of a folder."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bothways.cli.main import app as cli
from bothways.core.errors import BothwaysError
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.provenance import digest_of_model
from bothways.model.heads import LabelHead, PoolerHead, TagHead
from bothways.model.model import Model
from bothways.serving.app import requests_log
from bothways.serving.run import Deployment, NamedModel, bind, run_server, url_of
from toy_folder import make_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_has_ended_leaves_the_loggers_as_they_were(number, base, tmp_path, capsys):
    names = ("bothways.serving", "uvicorn.error", requests_log.name)
    loggers = [logging.getLogger(name) for name in names]

    def states() -> list[object]:
        return [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]

    before = states()
    deployment = Deployment({"films": NamedModel(str(write(tmp_path / "films", base, 1)))})
    opened = threading.Event()

    def connect() -> None:
        """Be accepted as soon as the server says that it is there."""
        socket.create_connection(bound.getsockname(), timeout=20).close()
        opened.set()

    def stop() -> None:
        """Ask once, then send the signal, without which the server never ends."""
        assert opened.wait(90)
        try:
            httpx.get(f"{url_of(bound)}/live", timeout=60)
        finally:
            os.kill(os.getpid(), number)

    with bind("127.0.0.1", 0) as bound:
        asking = threading.Thread(target=stop)
        asking.start()
        run_server(deployment.app(), bound, deployment, opened=connect)
        asking.join()
    assert '"route":"/live"' in capsys.readouterr().err
    assert states() == before
    requests_log.info({"event": "later"})
    assert capsys.readouterr().err == ""


def test_the_digest_is_of_what_predictions_depend_on(base, tmp_path):
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


def test_a_server_needs_a_thread(base):
    with pytest.raises(BothwaysError, match="threads"):
        cli(["serve", str(base), "--port", "0", "--threads", "0"], result_action="return_value")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.slow
def test_a_log_on_a_full_disk_is_told_on_the_output(base, tmp_path):
    folder = write(tmp_path / "films", base, 1)
    call = [sys.executable, "-m", "bothways", "serve", str(folder), "--port", "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(call, stdout=-1, stderr=full, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "standard error cannot be written" in done.stdout
