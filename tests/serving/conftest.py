"""A model folder for the servers of a module, and the address of its application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bothways.serving.app import App
from running_server import running
from toy_folder import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert")


@pytest.fixture(scope="module")
def url(application: App) -> Iterator[str]:
    with running(application) as url:
        yield url
