"""Checkpoints at a URL: complete or not there, and enough to continue on another machine."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

fsspec = pytest.importorskip("fsspec", reason="needs the extra 'remote'")

from bothways.core import urls  # noqa: E402
from bothways.core.errors import ConfigError, ResourceError  # noqa: E402
from bothways.training.checkpoint import checkpoints  # noqa: E402
from bothways.training.remote import Remote  # noqa: E402
from bothways.training.run import Training  # noqa: E402
from bothways.training.saved_state import NewCheckpoint  # noqa: E402
from bothways.training.store import Background  # noqa: E402
from toy_training import TRAINING, metric_lines, session  # noqa: E402


def kept_at(url: str, **more: Any) -> Training:
    keep = dataclasses.replace(TRAINING.keep, remote=url, **more)
    return dataclasses.replace(TRAINING, keep=keep)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(urls, "WAITS", (0.0,))
    return f"file://{tmp_path}/far/run"


def test_a_run_continues_on_another_machine(url: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "whole").mkdir()
    assert session(tmp_path / "here", 5, training=kept_at(url)).steps == 6
    assert [*Remote(url).checkpoints()] == [path.name for path in checkpoints(tmp_path / "here")]
    assert session(tmp_path / "there", training=kept_at(url)).steps == 14
    assert session(tmp_path / "whole").steps == 14
    one, other = (torch.load(tmp_path / name / "final.pt") for name in ("whole", "there"))
    assert all(torch.equal(other[name], weight) for name, weight in one.items())
    steps = [[line["step"] for line in metric_lines(tmp_path / n)] for n in ("whole", "there")]
    assert steps[0] == steps[1]
    assert [*Remote(url).checkpoints()] == [path.name for path in checkpoints(tmp_path / "there")]


def test_memory_is_a_place_too_and_saving_goes_on_beside_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"memory://{tmp_path.name}"
    assert session(tmp_path, training=kept_at(place, asynchronous=True)).steps == 14
    assert [*Remote(place).checkpoints()] == [path.name for path in checkpoints(tmp_path)]


def test_half_an_upload_is_never_used(url: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    session(tmp_path / "here", 5, training=kept_at(url))
    far = tmp_path / "far" / "run"
    (far / "step-6" / "manifest.json").unlink()
    assert [*Remote(url).checkpoints()] == ["step-4"]
    shutil.rmtree(tmp_path / "here")
    (tmp_path / "here").mkdir()
    notes: list[str] = []

    class Noted:
        def stage(self, name: str, total: float | None = None) -> None: ...
        def advance(self, done: float, note: str | None = None) -> None: ...
        def message(self, text: str) -> None:
            notes.append(text)

    assert session(tmp_path / "here", training=kept_at(url), progress=Noted()).steps == 14
    assert notes[0] == f"note: copied step-4 from {url}"


def test_a_file_damaged_on_the_way_is_refused(url: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    session(tmp_path / "here", 5, training=kept_at(url))
    (tmp_path / "far" / "run" / "step-6" / "state.pt").write_bytes(b"")
    with pytest.raises(ResourceError, match=r"step-6: state.pt is damaged"):
        Remote(url).fetch("step-6", tmp_path / "other")
    assert not (tmp_path / "other" / "step-6").exists()


def test_a_transfer_that_fails_is_done_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second transfer fails; with three failures in a row the run would end."""
    count = itertools.count()
    put = Remote._put

    def unsteady(self: Remote, file: Path, place: str) -> None:
        if next(count) % 2 == 0:
            raise OSError("the connection was reset")
        put(self, file, place)

    monkeypatch.setattr(Remote, "_put", unsteady)
    (tmp_path / "here").mkdir()
    assert session(tmp_path / "here", training=kept_at(url)).steps == 14
    assert len(Remote(url).checkpoints()) == len(checkpoints(tmp_path / "here"))

    def gone(self: Remote, file: Path, place: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(Remote, "_put", gone)
    (tmp_path / "later").mkdir()
    with pytest.raises(ResourceError, match=r"writing .*: no route to host"):
        session(tmp_path / "later", training=kept_at(f"{url}2"))
    assert checkpoints(tmp_path / "later")  # what was saved here is whole


def test_a_url_that_no_package_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training.keep.remote: Protocol not known: gopher"):
        Remote("gopher://hole/run")


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
