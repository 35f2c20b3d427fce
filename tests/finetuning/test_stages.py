"""The stages of a run are told in their order with what is done of them, and a terminal shows the time left."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from bothways.finetuning import data as labelled
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import LabelledData, label
from bothways.finetuning.run import finetune
from bothways.model.config import EncoderConfig
from bothways.model.positions import Learned
from bothways.tasks.classification.task import ClassificationTask
from bothways.training.schedules import Steps
from heard_progress import Heard
from toy_folder import VOCABULARY, make_examples, make_folder, make_tokenizer, write_tsv

SMALL = EncoderConfig(len(VOCABULARY), 32, 2, 2, 64, position=Learned(32))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> LabelledData:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return label(ClassificationTask(), tokenizer, make_examples(40, 0), make_examples(90, 1), 16)


def rises(shares: list[float]) -> bool:
    return all(0 <= before <= after for before, after in pairwise([0.0, *shares]))


def test_examples_encoded_in_parts_are_as_those_encoded_together(data, monkeypatch):
    monkeypatch.setattr(labelled, "ENCODED", 7)
    heard = Heard()
    parts = labelled.examine(
        data.task,
        data.tokenizer,
        data.train_examples,
        data.dev_examples,
        16,
        progress=heard,
    )
    for mine, whole in ((parts.train, data.train), (parts.dev, data.dev)):
        assert len(mine) == len(whole)
        assert all(
            np.array_equal(a.sequences[0].ids, b.sequences[0].ids)
            for a, b in zip(mine, whole, strict=True)
        )
    assert heard.stages == [
        ("tokenizing", 130, list(range(0, 130, 7))),
        ("checking the data", None, []),
    ]


@pytest.mark.usefixtures("pages")
def test_a_run_tells_all_its_stages(tmp_path):
    heard, model = Heard(), make_folder(tmp_path / "bert")
    train, dev = (
        write_tsv(tmp_path / "train.tsv", make_examples(300, 0)),
        write_tsv(tmp_path / "dev.tsv", make_examples(20, 1)),
    )
    settings = FinetuneConfig(
        model=str(model),
        train=str(train),
        dev=str(dev),
        length=16,
        training=dataclasses.replace(finetune_adam(), until=Steps(1)),
    )
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
