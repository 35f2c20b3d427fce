"""The stages of a run are told in their order with what is done of them, and a terminal shows the time left."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bothways.finetuning import data as labelled
from bothways.finetuning.config import finetune_adam
from bothways.finetuning.data import LabelledData
from bothways.finetuning.run import finetune
from bothways.training.schedules import Steps
from heard_progress import Heard
from toy_folder import file_settings, make_data, make_folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> LabelledData:
    return make_data(tmp_path_factory.mktemp("tokenizer"), 40, 90)


def rises(shares: list[float]) -> bool:
    return all(0 <= before <= after for before, after in pairwise([0.0, *shares]))


def test_examples_encoded_in_parts_are_as_those_encoded_together(data, monkeypatch):
    monkeypatch.setattr(labelled, "ENCODED", 7)
    heard, examples = Heard(), (data.train_examples, data.dev_examples)
    parts = labelled.examine(data.task, data.tokenizer, *examples, 16, progress=heard)
    for chunked, whole in ((parts.train, data.train), (parts.dev, data.dev)):
        for a, b in zip(chunked, whole, strict=True):
            assert np.array_equal(a.sequences[0].ids, b.sequences[0].ids)
    assert heard.stages == [
        ("tokenizing", 130, list(range(0, 130, 7))),
        ("checking the data", None, []),
    ]


@pytest.mark.usefixtures("pages")
def test_a_run_tells_all_its_stages(tmp_path):
    heard, training = Heard(), replace(finetune_adam(), until=Steps(1))
    settings = file_settings(make_folder(tmp_path / "bert"), tmp_path, 300, 20, training=training)
    train, dev = settings.train, settings.dev
    finetune(settings, tmp_path / "run", device="cpu", progress=heard)
    assert heard.names == [
        f"reading {train}",
        f"reading {dev}",
        "reading the model",
        "tokenizing",
        "checking the data",
        f"fingerprint of {train}",
        f"fingerprint of {dev}",
        "measuring the speed of the machine",
        "training",
        "scoring the dev data",
        "training",
        "reading the best weights",
        "saving the model",  # before anything that could fail
        "measuring the training loss",
        "scoring the dev data",
        "saving the model",
        "analysing each answer",
        "writing the report",
    ]
    assert len(heard.done(f"reading {train}")) == 2
    assert heard.done("scoring the dev data")[-1] == 20
    assert all(rises(done) for _, _, done in heard.stages)
