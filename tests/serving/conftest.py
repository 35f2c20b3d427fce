"""A model folder with predictors, which no test changes, and the address of the application of a module."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bothways.prediction import engine
from bothways.prediction.predictor import Predictor
from bothways.serving import batcher
from running_server import running
from toy_folder import make_folder
from toy_predictors import TASKS, predictor


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert")


@pytest.fixture(scope="session")
def predictors(folder) -> dict[str, Predictor]:
    """One for each task; no answer depends on other requests."""
    return {name: predictor(folder, name, batch_invariant=True) for name in TASKS}


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
