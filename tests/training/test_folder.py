import json
import os
import shutil
import signal
import threading

import pytest

from bothways.core.errors import ResourceError
from bothways.core.files import replace_file
from bothways.training.checkpoint import catch_signals, resume_command, run_folder
from heard_progress import Heard
from toy_training import processes


def hold(folder, connection):
    with run_folder(folder, resume=False):
        connection.send("open")
        connection.recv()


def refuse(folder, message, resume=True):
    with pytest.raises(ResourceError, match=message) as caught, run_folder(folder, resume=resume):
        pass
    return caught.value


@pytest.fixture
def held(tmp_path):
    """A folder that another process has open, and that process."""
    ours, theirs = processes().Pipe()
    process = processes().Process(target=hold, args=(tmp_path / "run", theirs))
    process.start()
    assert ours.recv() == "open"
    yield tmp_path / "run", process
    if process.is_alive():
        ours.send("close")
    process.join(60)
    ours.close()
    theirs.close()


def test_a_rank_that_is_started_again_waits_for_the_one_before_it(held, monkeypatch):
    folder, process = held
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    ending, heard = threading.Timer(0.3, process.kill), Heard()
    ending.start()
    with run_folder(folder, resume=True, progress=heard):
        assert json.loads((folder / ".owner.json").read_text())["pid"] == os.getpid()
    ending.join()
    assert f"is in use by process {process.pid} on " in heard.messages[0]


def test_what_a_kill_left_half_written_is_swept(tmp_path):
    with run_folder(tmp_path / "run", resume=False) as folder:
        (folder / ".writing-step-3").mkdir()
        (folder / ".writing-step-3" / "model.safetensors").write_bytes(b"half")
    with run_folder(folder, resume=False):
        assert sorted(path.name for path in folder.iterdir()) == [".lock", ".owner.json", ".run"]


def test_a_refused_run_leaves_nothing_behind(tmp_path):
    with (
        pytest.raises(ValueError, match="refused"),
        run_folder(tmp_path / "runs" / "a", resume=False),
    ):
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == []
    with run_folder(tmp_path / "b", resume=False):
        pass
    with pytest.raises(ValueError, match="refused"), run_folder(tmp_path / "b", resume=True):
        raise ValueError("refused")
    assert (tmp_path / "b" / ".run").exists()


def test_checkpoints_of_an_earlier_run_are_kept_unless_it_is_resumed(tmp_path):
    with run_folder(tmp_path / "run", resume=False) as folder:
        (folder / "step-3").mkdir()
    error = refuse(folder, "holds the checkpoints of an earlier run", resume=False)
    assert "resume=True" in str(error.fix)
    with run_folder(folder, resume=True):
        assert (folder / "step-3").is_dir()


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for resume in (True, False):
        refuse(tmp_path, "is not empty, and not the folder of a run", resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.txt"
    replace_file(file, lambda place: place.write_text("old"))

    def fail(place):
        place.write_text("new")
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceError, match="No space left"):
        replace_file(file, fail)
    assert (file.read_text(), len(list(tmp_path.iterdir()))) == ("old", 1)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_a_further_ctrl_c_ends_the_program(first, capfd):
    before = signal.getsignal(first)
    with catch_signals() as signals:
        assert signals == []
        signal.raise_signal(first)  # in this thread, unlike os.kill
        signal.raise_signal(signal.SIGTERM)
        assert signals == [first, signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(first) is before
    message = f"{first.name}: the run saves after this step and ends. To continue, repeat the same"
    assert message in capfd.readouterr().err


def test_outside_the_main_thread_signals_are_left_alone():
    def opened():
        with catch_signals() as signals:
            found.append(signals)

    found, before = [], signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=opened)
    thread.start()
    thread.join()
    assert found == [[]]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_resume_command_is_the_one_that_was_given(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (
        resume_command(["pretrain", "my run", "--resume", "--until=9 steps"])
        == "bothways pretrain 'my run' '--until=9 steps' --resume"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (
        resume_command(["pretrain", "run"])
        == "torchrun --nproc-per-node=2 -m bothways pretrain run --resume"
    )
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert resume_command(["pretrain", "run"]) == (
        "torchrun --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=first:29500 --nproc-per-node=2 "
        "-m bothways pretrain run --resume"
    )


def remove_and_write(folder):
    shutil.rmtree(folder)
    (folder / "metrics.jsonl").touch()


def test_a_folder_that_was_removed_is_one_message(tmp_path):
    with (
        pytest.raises(ResourceError, match="was removed while the run was writing to it"),
        run_folder(tmp_path / "run", resume=False) as folder,
    ):
        remove_and_write(folder)
