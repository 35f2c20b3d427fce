"""Folders and predictors that several modules take, and that no test changes."""

from pathlib import Path

import pytest

from bothways.prediction.predictor import Predictor
from toy_bulk import make_classifier
from toy_folder import make_folder
from toy_masked import make_masked
from toy_predictors import TASKS, predictor


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A BERT with random weights."""
    return make_folder(tmp_path_factory.mktemp("place") / "bert")


@pytest.fixture(scope="session")
def predictors(folder) -> dict[str, Predictor]:
    """One for each task, in fp32."""
    return {name: predictor(folder, name) for name in TASKS}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A classifier of two labels, with random weights."""
    return str(make_classifier(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def masked(tmp_path_factory) -> str:
    """A model with a masked head, whose vectors differ more."""
    place = tmp_path_factory.mktemp("masked")
    make_masked(place)
    return str(place / "model")
