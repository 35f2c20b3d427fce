"""A model folder for the servers of a module, and the address of its application."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from running_server import running
from toy_folder import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert")


@pytest.fixture(scope="module")
def url(application) -> Iterator[str]:
    with running(application) as url:
        yield url


@pytest.fixture(scope="module")
def client(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
