"""The stages of a run are told in their order with what is done of them, and a terminal shows the time left."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bothways.finetuning import data as labelled
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import LabelledData, label, predictions
from bothways.finetuning.failed_runs import training_loss
from bothways.finetuning.prepare import start_from
from bothways.finetuning.run import finetune
from bothways.model.config import EncoderConfig
from bothways.model.positions import Learned
from bothways.prediction.engine import PredictConfig, counting
from bothways.prediction.predictor import open_task
from bothways.tasks.base import Reading
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_examples import TextExample
from bothways.training.durations import Steps
from heard_progress import Heard
from toy_folder import VOCABULARY, make_examples, make_folder, make_tokenizer, write_tsv

SMALL = EncoderConfig(len(VOCABULARY), 32, 2, 2, 64, position=Learned(32))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> LabelledData:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return label(ClassificationTask(), tokenizer, make_examples(40, 0), make_examples(90, 1), 16)


def rises(shares: list[float]) -> bool:
    return all(0 <= before <= after for before, after in pairwise([0.0, *shares]))


def test_predictions_and_losses_tell_how_far_they_are_and_stay_the_same(
    data: LabelledData, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = data.task.learner(
        start_from(SMALL, data.task.heads(data.labels, None), 0),
        data.tokenizer,
        data.labels,
        16,
    )
    whole = list(predictions(task, data))
    for window, reports in ((4096, 1), (32, 3)):
        monkeypatch.setattr(type(data.task), "window", window)
        heard = Heard()
        assert list(predictions(task, data, heard)) == whole
        ((name, total, done),) = heard.stages
        assert (name, total, done[-1]) == ("scoring the dev data", 90, 90)
        assert len(done) >= reports
        assert rises(done)
    heard = Heard()
    assert training_loss(task, data.sequences, 64, heard) == training_loss(task, data.sequences, 64)
    ((name, total, done),) = heard.stages
    assert (name, done[-1]) == ("measuring the training loss", total)
    assert len(done) > 3
    assert rises(done)


def test_examples_encoded_in_parts_are_as_those_encoded_together(
    data: LabelledData, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("known", [True, False])
def test_a_tally_tells_after_each_batch_how_much_of_a_reading_is_done(
    known: bool, tmp_path: Path
) -> None:
    """Not how much of it is read: that is a window ahead."""
    heard, read = Heard(), [0]

    def examples() -> Iterator[TextExample]:
        for read[0] in range(1, 101):
            yield TextExample("a good day")

    opened = open_task(str(make_folder(tmp_path / "bert")), "embed", device="cpu")
    reading = Reading(opened.learner.task, examples(), (lambda: read[0] / 100) if known else None)
    counts = counting(reading, heard, "embedding")
    assert (
        len(list(opened.predict_examples(reading, PredictConfig(window=40, tokens=64), counts)))
        == 100
    )
    ((name, total, done),) = heard.stages
    assert (name, total) == ("embedding", 1.0 if known else None)
    assert len(done) > 6
    assert rises(done)
    assert {40, 80, 100} <= {round(each * (100 if known else 1)) for each in done}


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_run_tells_all_its_stages(tmp_path: Path, in_folder: bool) -> None:
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
    finetune(settings, tmp_path / "run" if in_folder else None, device="cpu", progress=heard)
    assert heard.names == [
        f"reading {train}",
        f"reading {dev}",
        "reading the model",
        "tokenizing",
        "checking the data",
        "measuring the speed of training",
        "measuring the time of an update",
        f"fingerprint of {train}",
        f"fingerprint of {dev}",
        "measuring the speed of the machine",
        "training",
        "scoring the dev data",
        "training",
        "reading the best weights",
        *(("saving the model",) * in_folder),  # before anything that could fail
        "measuring the training loss",
        "scoring the dev data",
        *(("saving the model", "analysing each answer", "writing the report") * in_folder),
    ]
    assert len(heard.done(f"reading {train}")) == 2
    assert heard.done("measuring the speed of training") == [0, 1, 2]
    assert heard.done("scoring the dev data")[-1] == 20
    assert all(rises(done) for _, _, done in heard.stages)
