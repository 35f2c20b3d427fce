"""A folder of a small BERT for the runs of a module, under the two names that tests give it."""

from pathlib import Path

import pytest

from toy_folder import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    return folder
