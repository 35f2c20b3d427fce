import errno
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bothways
from bothways.core.errors import CheckpointError, ResourceError
from bothways.core.files import file_digest, replace_file
from bothways.core.source import Cursor
from bothways.training import saved_state
from bothways.training.checkpoint import (
    Best,
    DamagedError,
    FolderStore,
    Keep,
    best_checkpoint,
    catch_signals,
    checkpoints,
    latest_checkpoint,
    prune,
    read_checkpoint,
    resume_command,
    run_folder,
)
from bothways.training.optimizers import AdamW, build_optimizer
from bothways.training.parallel import Plan
from bothways.training.saved_state import RunTensors, save_checkpoint
from bothways.training.schedules import RunState
from heard_progress import Heard
from toy_training import CONFIG, SINGLE, Taught, equal, exit_code, processes, toy


def trained():
    """A training module and its optimizer, whose state is not that of the beginning."""
    training_module = toy()
    optimizer = build_optimizer(AdamW(lr=0.01), training_module.named_parameters())
    for parameter in training_module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return training_module, optimizer


def save(run, training_module, optimizer, progress, metrics=None):
    tensors = RunTensors(training_module, optimizer, SINGLE)
    save_checkpoint(run, tensors, progress, metrics=metrics or {}, config=CONFIG)
    return run / f"step-{progress.steps}"


def save_at(run, step, metrics=None):
    progress = RunState(steps=step, tokens=step * 30, cursor=Cursor(1, 0, step))
    return save(run, *trained(), progress, metrics)


def restore(folder, training_module=None, config=CONFIG, plan=SINGLE):
    training_module = training_module or toy()
    optimizer = build_optimizer(AdamW(lr=0.01), training_module.named_parameters())
    return read_checkpoint(folder).restore(RunTensors(training_module, optimizer, plan), config)


@pytest.fixture
def saved(tmp_path):
    return save_at(tmp_path, 7, {"loss": 2.5})


def test_everything_comes_back(tmp_path):
    training_module, optimizer = trained()
    progress = RunState(3, 90, 0.5, 1.25, Cursor(0, 2, 1), 1, (Cursor(0, 1, 4),))
    save(tmp_path, training_module, optimizer, progress, {"loss": 2.5})
    expected = torch.rand(3)
    again = toy()
    other = build_optimizer(AdamW(lr=0.5), again.named_parameters())
    found = read_checkpoint(tmp_path / "step-3")
    assert found.restore(RunTensors(again, other, SINGLE), CONFIG) == progress
    assert found.metrics == {"loss": 2.5}
    assert found.config == {"model": {"dropout": 0.2}, "betas": [0.9, 0.999]}
    assert torch.equal(torch.rand(3), expected)
    assert equal(training_module, again)
    for ours, theirs in zip(training_module.parameters(), again.parameters(), strict=True):
        moments = other.state[theirs]
        assert all(torch.equal(v, moments[name]) for name, v in optimizer.state[ours].items())
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.01]


def test_tied_weights_come_back_tied(tmp_path):
    def tied():
        training_module = toy()
        training_module.decoder.weight = training_module.words.weight
        return training_module

    training_module = tied()
    nn.init.normal_(training_module.words.weight)
    again, optimizer = tied(), build_optimizer(AdamW(), training_module.named_parameters())
    restore(save(tmp_path, training_module, optimizer, RunState(steps=1)), again)
    assert torch.equal(again.decoder.weight, training_module.words.weight)
    assert again.decoder.weight is again.words.weight


def test_it_holds_what_it_says(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    files = {"model.safetensors", "state.pt", "progress.json"}
    assert set(manifest["files"]) == files == {p.name for p in saved.iterdir()} - {"manifest.json"}
    assert all(file_digest(saved / name) == value for name, value in manifest["files"].items())
    assert manifest["bothways"] == bothways.__version__
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1


def refused(folder, message, kind=CheckpointError, **options):
    """A run that resumes skips a checkpoint with a DamagedError, and deletes it later."""
    with pytest.raises(CheckpointError, match=message) as caught:
        restore(folder, **options)
    assert type(caught.value) is kind
    assert str(caught.value.where) in {str(folder), str(folder / "manifest.json")}
    return caught.value


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "progress.json"])
def test_truncated_changed_or_missing_file_is_refused_by_name(saved, name):
    content = (saved / name).read_bytes()
    for damaged in (content[: len(content) // 2], content[:-1] + bytes([content[-1] ^ 1])):
        (saved / name).write_bytes(damaged)
        refused(saved, f"{name} is damaged", DamagedError)
    (saved / name).unlink()
    refused(saved, f"{name} is missing", DamagedError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[1]", "holds a JSON list, not an object"),
        (b'{"format": 1, "files": ["state.pt"]}', "manifest.json is damaged"),
        (b"[" * 10**5, "brackets nested too deeply"),
        (b'{"format": ' + b"1" * 5000 + b"}", "too many digits"),
        (None, "is not a checkpoint: manifest.json cannot be read"),
    ],
)
def test_a_damaged_or_missing_manifest_is_refused(saved, content, message):
    (saved / "manifest.json").unlink()
    if content is not None:
        (saved / "manifest.json").write_bytes(content)
    refused(saved, message, DamagedError)


@pytest.mark.parametrize("change", [{"format": 9, "bothways": "9.0"}, {"format": []}])
def test_another_format_is_refused(saved, change):
    manifest = json.loads((saved / "manifest.json").read_text()) | change
    (saved / "manifest.json").write_text(json.dumps(manifest))
    message = f"is of format {change['format']}, by bothways {manifest['bothways']}; bothways "
    error = refused(saved, re.escape(message))
    assert "reads formats 1 and 3" in error.what


def test_another_run_is_refused_and_the_difference_named(saved):
    other = {**CONFIG, "model": {"dropout": 0.3}}
    message = r"of another run: model.dropout was 0.2, is 0.3\n"
    error = refused(saved, message, config=other)
    assert "a run in another folder" in error.fix
    assert "config.toml" not in error.fix
    (saved.parent / "config.toml").write_text("seed = 0")
    assert str(saved.parent / "config.toml") in refused(saved, message, config=other).fix
    many = CONFIG | {f"key{number}": number for number in range(8)}
    refused(saved, "key0 was 'not set', is 0; .*; 3 more", config=many)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda other: setattr(other, "inner", nn.Linear(8, 9)),
            "model.safetensors .*inner.weight",
        ),
        (lambda other: setattr(other, "extra", nn.Linear(2, 2)), "model.safetensors .*extra"),
        (lambda other: other.words.requires_grad_(False), "state.pt "),
    ],
)
def test_another_model_or_optimizer_is_refused(saved, change, message):
    change(other := toy())
    message = message.replace(" ", " does not fit this model: ")
    refused(saved, message, training_module=other)


def sign_again(folder):
    """Make the manifest agree with the files, as one who means harm would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: file_digest(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_pickle_that_runs_code_is_refused(saved, tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harmed"),)

    (saved / "state.pt").write_bytes(pickle.dumps(Harm(), protocol=2))
    sign_again(saved)
    refused(saved, "state.pt does not fit this model")
    assert not (tmp_path / "harmed").exists()


def test_files_of_another_form_are_refused(saved):
    (saved / "model.safetensors").write_bytes(b"no tensors")
    sign_again(saved)
    refused(saved, "model.safetensors does not fit this model")
    (saved / "progress.json").write_text('{"progress": {"steps": 7}, "metrics": []}')
    sign_again(saved)
    refused(saved, r"progress.json is damaged\n", DamagedError)


def test_a_machine_that_lacks_the_folder_is_one_message(saved):
    checkpoint = read_checkpoint(saved)
    shutil.rmtree(saved)
    training_module, optimizer = trained()
    with pytest.raises(ResourceError, match="cannot be read") as caught:
        checkpoint.restore(RunTensors(training_module, optimizer, SINGLE), CONFIG)
    assert caught.value.where == saved


def test_the_latest_is_the_one_of_the_highest_step(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for step in (9, 100, 20):
        save_at(tmp_path, step)
    (tmp_path / "step-x").mkdir()
    (tmp_path / ".writing-step-200").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-9", "step-20", "step-100"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100"


LOWEST, HIGHEST = Best("dev/f1", "lowest"), Best("dev/f1", "highest")
NAN = math.nan
SCORED = [{"dev/f1": score} for score in (3.0, 1.0, 4.0, 1.0)] + [{}]
"""Evaluations at four checkpoints, and a fifth checkpoint without one."""


@pytest.mark.parametrize(
    ("keep", "evaluations", "best", "stay"),
    [
        (Keep(1), SCORED, None, [5]),
        (Keep(3), SCORED, None, [3, 4, 5]),
        (Keep(2, LOWEST), SCORED, 2, [2, 4, 5]),
        (Keep(1, HIGHEST), SCORED, 3, [3, 5]),
        (Keep(1, Best("f1", "highest")), SCORED, None, [5]),
        (Keep(1, LOWEST), [{"dev/f1": x} for x in (NAN, 0.5, 0.4, 0.45, NAN)], 3, [3, 5]),
        (Keep(1, HIGHEST), [{"dev/f1": x} for x in (NAN, 0.5, 0.4, 0.45, NAN)], 2, [2, 5]),
        # Without any number, and of equal ones, the oldest.
        (Keep(1, LOWEST), [{"dev/f1": NAN}] * 2, 1, [1, 2]),
        (Keep(1, HIGHEST), [{"dev/f1": NAN}] * 2, 1, [1, 2]),
        (Keep(1, LOWEST), [{"dev/f1": 1.0}] * 2, 1, [1, 2]),
        # Early F1 of many labels is 0 everywhere: the first checkpoint would stay the best.
        (Keep(1, HIGHEST), [{"dev/f1": 0.0, "dev/loss/x": x} for x in (0.2, 0.1, 0.15)], 2, [2, 3]),
    ],
)
def test_the_newest_and_the_best_stay(tmp_path, keep, evaluations, best, stay):
    for step, metrics in enumerate(evaluations, 1):
        save_at(tmp_path, step, metrics)
        if step in (2, len(evaluations)):  # of five, several are deleted at once
            prune(tmp_path, keep)
    if keep.best is not None:
        expected = None if best is None else tmp_path / f"step-{best}"
        assert best_checkpoint(tmp_path, keep.best) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}" for step in stay]


def test_saving_at_the_same_step_again_replaces_the_checkpoint(tmp_path):
    save_at(tmp_path, 1, {"loss": 1.0})
    save_at(tmp_path, 1, {"loss": 2.0})
    assert read_checkpoint(tmp_path / "step-1").metrics == {"loss": 2.0}


def assert_only(run, *names):
    assert sorted(path.name for path in run.iterdir()) == sorted(names)
    for name in names:
        read_checkpoint(run / name)


@pytest.mark.parametrize("flush", range(1, 7))
def test_a_full_disk_is_said_and_leaves_what_was_saved(tmp_path, monkeypatch, flush):
    save_at(tmp_path, 1)
    count, real = iter(range(1, 100)), os.fsync

    def fsync(handle):
        if next(count) == flush:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ResourceError, match="No space left on device") as caught:
        save_at(tmp_path, 2)
    assert caught.value.where == tmp_path / "step-2"
    # The sixth flush is of the folder that holds the checkpoints, after the new one took its place.
    assert_only(tmp_path, "step-1", *(["step-2"] if flush == 6 else []))


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "progress.json"])
def test_a_file_that_the_disk_does_not_give_is_no_damage(tmp_path, monkeypatch, name):
    """A resumed run deletes the checkpoints that it skips, and the next reading may succeed."""
    save_at(tmp_path, 1)
    save_at(tmp_path, 2)
    usual, bad = Path.open, tmp_path / "step-2" / name

    def failing(path, *arguments, **named):
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return usual(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(ResourceError, match="cannot be read: Input/output error") as caught:
        FolderStore(tmp_path, CONFIG)._choose()
    assert Path(caught.value.where) == bad
    monkeypatch.undo()
    found, notes = FolderStore(tmp_path, CONFIG)._choose()
    assert (found.folder, notes) == (tmp_path / "step-2", [])


def fills_the_disk(run, limit):
    """Write with a limit on the size of files, which the operating system enforces as it does the end of a disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save_at(run, 2)
    except ResourceError as error:
        os._exit(42 if "File too large" in error.what else 43)
    os._exit(0)


@pytest.mark.parametrize("limit", [1000, 4000, 10_000])
def test_a_write_that_fails_within_safetensors_or_torch_is_said(tmp_path, limit):
    """The weights take 3.4 kB, the optimizer's state 18 kB."""
    save_at(tmp_path, 1)
    assert exit_code(fills_the_disk, tmp_path, limit) == 42
    assert_only(tmp_path, "step-1")


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    save_at(tmp_path, 1)
    monkeypatch.setattr(saved_state, "disk_free", lambda path: 1000)
    with pytest.raises(ResourceError, match="a checkpoint takes 0 MiB, but only 0 MiB are free"):
        save_at(tmp_path, 2)
    assert_only(tmp_path, "step-1")


def test_an_error_that_is_not_the_disks_is_left_as_it_is(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(saved_state, "save_file", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        save_at(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_more_ranks_than_before_draw_anew(saved):
    """A rank that had no state gets one of its own, the same each time."""
    draws = []
    for rank in (0, 1, 1):
        restore(saved, plan=Plan(rank, 2, rank))
        draws.append(torch.rand(4))
    assert torch.equal(draws[1], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_frozen_parts_are_not_in_a_checkpoint_and_survive_its_restoration(tmp_path):
    training_module = Taught()
    optimizer = build_optimizer(AdamW(), training_module.trained_parameters())
    folder = save(tmp_path, training_module, optimizer, RunState(steps=1))
    assert not any(name.startswith("teacher") for name in load_file(folder / "model.safetensors"))
    other = Taught()
    with torch.no_grad():
        other.teacher.words.weight.fill_(7.0)
    saved_state.load_weights(folder, other)
    assert torch.equal(other.words.weight, training_module.words.weight)
    assert bool((other.teacher.words.weight == 7).all())


def hold(folder, connection):
    with run_folder(folder, resume=False):
        connection.send("open")
        time.sleep(60)


def refuse(folder, message, resume=True):
    with pytest.raises(ResourceError, match=message) as caught, run_folder(folder, resume=resume):
        pass
    return caught.value


def test_a_rank_that_is_started_again_waits_for_the_one_before_it(tmp_path, monkeypatch):
    reader, writer = processes().Pipe()
    folder, heard = tmp_path / "run", Heard()
    process = processes().Process(target=hold, args=(folder, writer), daemon=True)
    process.start()
    assert reader.recv() == "open"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    threading.Timer(0.3, process.kill).start()
    with run_folder(folder, resume=True, progress=heard):
        assert json.loads((folder / ".owner.json").read_text())["pid"] == os.getpid()
    process.join()
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
