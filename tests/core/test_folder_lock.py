"""A folder is one process' at a time, and free again however that process ended."""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from bothways.core.errors import ConfigError, ResourceError, os_errors
from bothways.core.files import LOCK, OWNER, lock_folder, replace_folder

HOLD = """
import sys, time
from pathlib import Path
from bothways.core.files import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path) -> subprocess.Popen[str]:
    """Another process that holds the folder `tmp_path`/a."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    with process, process.stdout:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_error_of_a_folder_that_is_deleted_meanwhile_stays(tmp_path):
    def deleted() -> None:
        with lock_folder(tmp_path / "a") as folder:
            shutil.rmtree(folder)
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        deleted()


def test_another_process_is_named_and_its_death_frees_the_folder(tmp_path, holder):
    who = f"a: is in use by process {holder.pid} on {platform.node()}"
    with pytest.raises(ResourceError, match=who), lock_folder(tmp_path / "a"):
        pass
    (tmp_path / "a" / OWNER).unlink()
    with pytest.raises(ResourceError, match="by another process"), lock_folder(tmp_path / "a"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock_folder(tmp_path / "a") as folder:
        assert folder == tmp_path / "a"


def test_nothing_is_left_but_the_lock(tmp_path):
    with lock_folder(tmp_path / "b" / "c") as folder:
        assert (folder / OWNER).exists()
    assert {path.name for path in folder.iterdir()} <= {LOCK}
    with lock_folder(folder):
        pass


@pytest.mark.parametrize("lock", [lock_folder, replace_folder])
def test_a_lock_is_released_where_open_files_cannot_be_deleted(tmp_path, monkeypatch, lock):
    unlink = Path.unlink

    def unlink_closed(path: Path, missing_ok: bool = False) -> None:
        if path.name in {LOCK, ".writing-use-a"}:
            raise PermissionError(13, "is used by another process", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_closed)
    with pytest.raises(ValueError, match="refused"), lock(tmp_path / "a"):
        raise ValueError("refused")
    with lock(tmp_path / "a") as folder:
        (folder / "file").touch()
    assert (tmp_path / "a" / "file").exists()


@pytest.mark.parametrize("name", [".lock", ".owner.json"])
def test_a_link_in_a_folder_that_others_made_is_not_written_through(tmp_path, name):
    (tmp_path / "other").write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "other")
    with contextlib.suppress(ResourceError), lock_folder(folder):  # the lock itself is refused
        pass
    assert (tmp_path / "other").read_text() == "precious"


def test_a_failure_leaves_nothing_behind(tmp_path):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "new" / "inner", tmp_path / "empty"):
        with pytest.raises(ValueError, match="refused"), lock_folder(place):
            raise ValueError("refused")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["empty"]
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "work").touch()
    with pytest.raises(ValueError, match="refused"), lock_folder(tmp_path / "kept"):
        raise ValueError("refused")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["work"]
    with contextlib.suppress(ValueError), lock_folder(tmp_path / "kept") as folder:
        (folder / "more").touch()
        raise ValueError("refused")
    assert {LOCK, "work", "more"} == {path.name for path in (tmp_path / "kept").iterdir()}


def test_what_the_process_before_has_written_stays(tmp_path):
    lock = FileLock(tmp_path / LOCK)
    lock.acquire()

    def end(message: str) -> None:
        """Write, and end, once the other process waits."""
        (tmp_path / "work").touch()
        lock.release()

    waiting = lock_folder(tmp_path, 30.0, SimpleNamespace(message=end), begun={"work"})
    with pytest.raises(ValueError, match="refused"), waiting:
        raise ValueError("refused")
    assert (tmp_path / "work").exists()


def test_a_place_that_cannot_be_a_folder(tmp_path):
    place = tmp_path / "file" / "sub"
    place.parent.touch()
    with pytest.raises(ResourceError, match="written: Not a directory"), lock_folder(place):
        pass


def test_refusals_of_the_system_alone_are_translated(tmp_path):
    message = r"cannot be written: No space left\n  Make room\."
    with pytest.raises(ResourceError, match=message), os_errors(tmp_path, "Make room."):
        raise OSError(28, "No space left")
    with pytest.raises(RuntimeError, match="a bug"), os_errors(tmp_path, "Make room."):
        raise RuntimeError("a bug")


def test_a_url_is_no_folder_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for open_to_write in (lock_folder, replace_folder):
        url = Path("s3://bucket/run")
        with pytest.raises(ConfigError, match="s3://bucket/run: is a URL"), open_to_write(url):
            pass
    assert not list(tmp_path.iterdir())
