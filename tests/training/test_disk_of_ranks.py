"""A disk that is full or slow for one rank: every rank says so, or waits."""

import dataclasses
import errno
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from bothways.core.errors import CheckpointError, ResourceError
from bothways.training import parallel, saved_state
from bothways.training.parallel import Sharding, Single
from bothways.training.saved_state import NewCheckpoint
from bothways.training.trackers import TensorBoard
from toy_training import TRAINING, enter_ranks, on_ranks, session

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def parts_of(tensor: torch.Tensor) -> NewCheckpoint:
    return NewCheckpoint(Path(), Single(), {}, {"weight": tensor}, {}, {}, in_parts=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_error_of_a_disk_is_not_hidden_in_the_report_about_ranks(tmp_path, monkeypatch):
    """torch raises a `BaseException` whose text is a traceback."""

    def full(handle: int) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device \(rank 0\)"):
            parts_of(torch.ones(4)).write_parts(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_that_cannot_be_read_is_one_message(tmp_path):
    parts_of(torch.ones(4)).write_parts(tmp_path)
    for part in (tmp_path / "shards").glob("*.distcp"):
        part.unlink()
    with pytest.raises(CheckpointError, match=r"shards cannot be read: .* \(rank 0\)"):
        saved_state._read_parts(tmp_path, {"weights/weight": torch.zeros(4)}, "weights/")


def test_events_that_cannot_be_written_are_one_message(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path / "tensorboard", 0)

    class Full:
        """A file on a full disk, whose buffer stays full until it is closed."""

        def write(self, data: bytes) -> None:
            raise FULL

        flush = close = lambda self: self.write(b"")

    tracker.close()
    tracker._file = Full()
    with pytest.raises(ResourceError, match="No space left") as caught:
        tracker.write({"step": 1, "loss": 2.0})
    assert caught.value.where == tmp_path / "tensorboard"
    tracker.close()


def end_at_a_full_disk(rank: int, world: int, port: int, folder: Path) -> None:
    """Save three kinds of checkpoints with a limit on the files of one rank, as a full disk has."""
    enter_ranks(rank, world, port)
    replicated = parallel.plan_here()
    sharded = parallel.shard(replicated, Sharding())
    whole, signals = saved_state.WHOLE_BYTES, signal.SIG_IGN
    signal.signal(signal.SIGXFSZ, signals)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    cases = {
        "parts": (sharded, 0, 1),
        "whole": (sharded, whole, 0),
        "replicated": (replicated, whole, 0),
    }
    for name, (plan, limit, full) in cases.items():
        (folder / name).mkdir(exist_ok=True)
        saved_state.WHOLE_BYTES = limit
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            with parallel.connected(plan, torch.device("cpu")):
                session(folder / name, plan=plan)
        except ResourceError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            (folder / f"{name}-{rank}").write_text(f"{type(error).__name__} {error}")
    os._exit(0)


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_the_same_message_on_all(tmp_path):
    on_ranks(2, end_at_a_full_disk, tmp_path)
    for name in ("parts", "whole", "replicated"):
        first, second = ((tmp_path / f"{name}-{rank}").read_text() for rank in range(2))
        assert first == second
        assert first.startswith(f"ResourceError {tmp_path / name / 'step-3'}: cannot be written: ")
        assert "File too large" in first
        assert first.count("\n") == 1
        assert "repeat the same call, with resume=True" in first
        assert not [*(tmp_path / name).glob(".writing-*")]
    assert "(rank 1)" in (tmp_path / "parts-0").read_text()


def save_slowly(rank: int, world: int, port: int, folder: Path) -> None:
    """Save for longer than a step may take, on the main rank."""
    enter_ranks(rank, world, port)
    plan, write = parallel.plan_here(), NewCheckpoint.write

    def slow(new: NewCheckpoint, *arguments: object) -> None:
        time.sleep(0.0 if rank else 1.5)
        write(new, *arguments)

    NewCheckpoint.write = slow
    keep = dataclasses.replace(TRAINING.keep, best=None)
    training = dataclasses.replace(TRAINING, keep=keep, step_limit=0.75)
    with parallel.connected(plan, torch.device("cpu")):
        session(folder, plan=plan, training=training)


@pytest.mark.slow
def test_a_slow_checkpoint_of_one_rank_is_no_hang_of_the_others(tmp_path):
    on_ranks(2, save_slowly, tmp_path)
    assert (tmp_path / "step-14" / "manifest.json").exists()
