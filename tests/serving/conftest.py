"""A model folder for the servers of a module, and the address of its application."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bothways.prediction import engine
from bothways.serving import batcher
from running_server import running
from toy_folder import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert")


@pytest.fixture
def gate(monkeypatch) -> Iterator[threading.Semaphore]:
    """Released once for each batch that may be computed after the text at the start."""
    free = threading.Semaphore(1)

    def wait(*arguments: Any) -> Any:
        assert free.acquire(timeout=20)
        return engine.predict_sequences(*arguments)

    monkeypatch.setattr(batcher, "predict_sequences", wait)
    yield free
    free.release(1000)


@pytest.fixture(scope="module")
def url(application) -> Iterator[str]:
    with running(application) as url:
        yield url


@pytest.fixture(scope="module")
def client(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
