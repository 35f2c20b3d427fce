"""The stages of a run are told in their order with what is done of them, and a terminal shows the time left."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bothways.core.stages import OnStage, counting, followed, followed_reading, part_of, stages
from bothways.finetuning import data as labelled
from bothways.finetuning import run as job
from bothways.finetuning.config import finetune_adam
from bothways.finetuning.data import LabelledData, label, predictions
from bothways.finetuning.failed_runs import training_loss
from bothways.finetuning.in_memory_run import start_from
from bothways.finetuning.prepare import FinetuneConfig
from bothways.finetuning.run import finetune
from bothways.model.config import EncoderConfig
from bothways.model.positions import Learned
from bothways.prediction.engine import PredictConfig
from bothways.prediction.predictor import open_task
from bothways.tasks.base import Reading
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_examples import TextExample
from bothways.training.durations import Steps
from toy_folder import VOCABULARY, make_examples, make_folder, make_tokenizer, write_tsv

SMALL = EncoderConfig(len(VOCABULARY), 32, 2, 2, 64, position=Learned(32))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> LabelledData:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return label(ClassificationTask(), tokenizer, make_examples(40, 0), make_examples(90, 1), 16)


def rises(shares: list[float]) -> bool:
    return all(0 <= before <= after <= 1 for before, after in pairwise([0.0, *shares]))


def test_a_terminal_shows_the_stage_and_the_time_left_and_forgets_them() -> None:
    stream, now = io.StringIO(), [0.0]
    console = Console(file=stream, force_terminal=True, width=100, get_time=lambda: now[0])
    with stages(console) as on_stage:
        on_stage("reading", 0.0)
        now[0] = 600.0
        on_stage("reading", 0.9)
        on_stage("scoring [0]", 0.0)  # from here on it is measured anew
        now[0] = 610.0
        on_stage("scoring [0]", 0.25)
    assert re.search(r"scoring \[0\].*0:00:3[01]", stream.getvalue())  # rich rounds up
    assert stream.getvalue().endswith("\x1b[2K")  # the line is erased


@pytest.mark.parametrize(
    "console", [{"quiet": True, "force_terminal": True}, {"force_terminal": False}]
)
def test_elsewhere_nothing_is_shown(console: dict[str, bool]) -> None:
    stream = io.StringIO()
    with stages(Console(file=stream, **console)) as on_stage:  # type: ignore[arg-type]
        on_stage("reading", None)
        on_stage("reading", 0.5)
    assert stream.getvalue().strip() == ""


def test_items_and_parts_tell_their_share_of_the_whole() -> None:
    told: list[float] = []
    assert list(followed("abcde", told.append, 2)) == list("abcde")
    assert told == [0, 0.4, 0.8]
    part_of(told.append, 60, 30, 120)(0.5)
    assert told[-1] == 0.625


def test_predictions_and_losses_tell_how_far_they_are_and_stay_the_same(data: LabelledData) -> None:
    task = data.definition.learner(
        start_from(SMALL, data.definition.heads(data.labels, None), 0),
        data.tokenizer,
        data.labels,
        16,
    )
    for pace, reports in (
        (PredictConfig(), 1),
        (PredictConfig(tokens=128), 4),
        (PredictConfig(window=32), 3),
    ):
        told: list[float] = []
        assert list(predictions(task, data, pace, told.append)) == list(
            predictions(task, data, pace)
        )
        assert len(told) >= reports
        assert rises(told)
        assert told[-1] == 1
    losses: list[float] = []
    assert training_loss(task, data.sequences, 64, losses.append) == training_loss(
        task, data.sequences, 64
    )
    assert len(losses) > 3
    assert rises(losses)


def test_examples_encoded_in_parts_are_as_those_encoded_together(
    data: LabelledData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelled, "ENCODED", 7)
    told: list[tuple[str, float | None]] = []
    parts = labelled.examine(
        data.definition,
        data.tokenizer,
        data.train_examples,
        data.dev_examples,
        16,
        lambda *now: told.append(now),
    )
    for mine, whole in ((parts.train, data.train), (parts.dev, data.dev)):
        assert len(mine) == len(whole)
        assert all(
            np.array_equal(a.sequences[0].ids, b.sequences[0].ids)
            for a, b in zip(mine, whole, strict=True)
        )
    assert told == [
        *(("tokenizing", at / 130) for at in range(0, 130, 7)),
        ("checking the data", None),
    ]


@pytest.mark.parametrize("known", [True, False])
def test_a_reading_is_told_as_it_is_read(known: bool) -> None:
    told, read = list[tuple[str, float | None]](), [0]

    def examples() -> Iterator[int]:
        for read[0] in range(1, 6):
            yield read[0]

    reading = Reading(ClassificationTask(), examples(), (lambda: read[0] / 5) if known else None)
    assert list(
        followed_reading(reading, "reading", lambda *now: told.append(now), 2).examples
    ) == [1, 2, 3, 4, 5]
    assert told == [("reading", share if known else None) for share in (0.2, 0.6, 1.0)]


@pytest.mark.parametrize("known", [True, False])
def test_a_tally_tells_after_each_batch_how_much_of_a_reading_is_done(
    known: bool, tmp_path: Path
) -> None:
    """Not how much of it is read: that is a window ahead."""
    told, read = list[tuple[float | None, float]](), [0]

    def examples() -> Iterator[TextExample]:
        for read[0] in range(1, 101):
            yield TextExample("a good day")

    opened = open_task(str(make_folder(tmp_path / "bert")), "embed", device="cpu")
    reading = Reading(opened.task.task, examples(), (lambda: read[0] / 100) if known else None)
    tally = counting(reading, lambda share, count: told.append((share, count)))
    assert len(list(opened.predict(reading, PredictConfig(window=40, tokens=64), tally))) == 100
    counts = [count for _, count in told]
    assert len(counts) > 6
    assert counts == sorted(counts)
    assert {40, 80, 100} <= set(counts)
    assert [share for share, _ in told] == (
        [pytest.approx(count / 100) for count in counts] if known else [None] * len(counts)
    )


def test_a_run_tells_all_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float | None]] = []

    @contextlib.contextmanager
    def noted(console: Console) -> Iterator[OnStage]:
        yield lambda stage, share: told.append((stage, share))

    monkeypatch.setattr(job, "stages", noted)
    model = make_folder(tmp_path / "bert")
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
    finetune(settings, tmp_path / "run", device="cpu")
    found = {
        stage: [share for _, share in group]
        for stage, group in groupby(told, key=lambda now: now[0])
    }
    assert list(found) == [
        f"reading {train}",
        f"reading {dev}",
        "reading the model",
        "tokenizing",
        "checking the data",
        "measuring the speed of training",
        f"fingerprint of {train}",
        f"fingerprint of {dev}",
        "measuring the speed of the machine",
        "reading the best weights",
        "measuring the training loss",
        "scoring the dev data",
        "saving the model",
        "analysing each answer",
        "writing the report",
    ]
    assert len(found[f"reading {train}"]) == 2
    assert found["measuring the speed of training"] == pytest.approx([0, 1 / 3, 2 / 3])
    assert found["scoring the dev data"] == found["analysing each answer"] == [1]
    assert all(rises([share for share in shares if share is not None]) for shares in found.values())
