"""Checkpoints that are written in the background, while training goes on."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bothways.core.errors import ResourceError
from bothways.training.saved_state import NewCheckpoint
from bothways.training.store import Background
from toy_training import TRAINING, session


def test_an_error_beside_the_training_is_raised_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: NewCheckpoint, *arguments: object) -> None:
        raise ResourceError("cannot be written: No space left on device", where=self.folder)

    monkeypatch.setattr(NewCheckpoint, "write", fail)
    keep = dataclasses.replace(TRAINING.keep, asynchronous=True)
    with pytest.raises(ResourceError, match=r"step-3: cannot be written"):
        session(tmp_path, training=dataclasses.replace(TRAINING, keep=keep))


def test_what_is_saved_beside_the_training_is_of_the_step_at_which_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, slow = NewCheckpoint.write, threading.Event()

    def late(self: NewCheckpoint, *arguments: Any) -> None:
        slow.wait(0.05)
        write(self, *arguments)

    monkeypatch.setattr(NewCheckpoint, "write", late)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    beside = dataclasses.replace(
        TRAINING, keep=dataclasses.replace(TRAINING.keep, asynchronous=True)
    )
    session(tmp_path / "a", 5, training=beside)
    session(tmp_path / "b", 5)
    for part in ("model.safetensors", "state.pt"):
        assert (tmp_path / "a/step-6" / part).stat().st_size
    session(tmp_path / "a", training=beside)
    session(tmp_path / "b")
    one, other = (torch.load(tmp_path / name / "final.pt") for name in "ab")
    assert all(torch.equal(other[name], weight) for name, weight in one.items())


def test_jobs_are_done_one_after_the_other() -> None:
    done: list[int] = []
    jobs = Background()
    for number in range(3):
        jobs.run(lambda number=number: (time.sleep(0.01), done.append(number)))
    jobs.wait()
    assert done == [0, 1, 2]
