"""What users get wrong on the command line is one message each, before anything is computed."""

import errno
import io
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bothways.cli import main as cli
from bothways.cli import mistakes
from bothways.cli.options import run_progress, stop_saved
from bothways.core.errors import BothwaysError, ResourceError


@pytest.mark.parametrize(
    "line",
    [
        "tokenizer encode other.txt mine.txt --tokenizer vocabulary --out mine.txt",
        "tokenizer encode other.txt --tokenizer mine.txt --out ./mine.txt",
        "tokenizer encode mine.txt --tokenizer vocabulary --out link.txt",
        "embed model mine.txt --out sub/../mine.txt",
        "evaluate model ~/mine.txt --report mine.txt",
        "convert sub --out sub/.",
    ],
)
def test_no_input_is_written_over(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "mine.txt").write_text("dear to me")
    (tmp_path / "link.txt").symlink_to("mine.txt")
    with pytest.raises(ResourceError, match="the output is also an input"):
        cli.app(line.split(), result_action="return_value")
    assert (tmp_path / "mine.txt").read_text() == "dear to me"


def test_a_gpu_without_memory_is_no_traceback(monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cli, "app", full)
    monkeypatch.setattr(mistakes, "rename_options", lambda _, words: words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: out of GPU memory\n  In training, halve microbatch_tokens")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_an_error_of_the_disk_that_no_job_expects_is_no_traceback(number, monkeypatch, capsys):
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "run/parts")

    monkeypatch.setattr(cli, "app", failing)
    monkeypatch.setattr(mistakes, "rename_options", lambda _, words: words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"error: run/parts: cannot be read or written: {os.strerror(number)}\n")
    assert said.count("\n") == 2


def test_an_output_is_full_only_if_it_is(tmp_path):
    """A file that cannot be written has no name in the error of a write: the output was blamed."""
    for name, full in ((tmp_path / "out", False), (os.devnull, False), ("/dev/full", True)):
        if name != "/dev/full" or Path(name).exists():  # Linux has it
            with Path(name).open("w") as file:
                assert cli._is_full(file.fileno()) == full


@pytest.mark.parametrize("saved", ["", "run/step-3", "seed-0/step-3"])
def test_a_run_that_is_interrupted_outside_of_a_step_says_how_to_go_on(
    saved, tmp_path, monkeypatch
):
    """While it reads the data or saves the model."""
    console = Console(file=io.StringIO(), width=300)
    monkeypatch.setattr(sys, "argv", ["bothways", "pretrain", "corpus", "--out", "run"])
    if saved:
        (tmp_path / saved).mkdir(parents=True)
        (tmp_path / saved / "manifest.json").touch()
    with pytest.raises(KeyboardInterrupt), run_progress(tmp_path, console):
        raise KeyboardInterrupt
    said = console.file.getvalue()
    if saved:
        assert "The checkpoints are kept. To resume: bothways pretrain corpus" in said
        assert "--resume" in said
    else:
        assert "Stopped before the first checkpoint: the same command begins again." in said


def test_the_line_that_goes_on_is_the_one_that_was_given(monkeypatch):
    console = Console(file=io.StringIO(), width=300)
    monkeypatch.setattr(sys, "argv", ["bothways", "finetune", "m", "d.tsv", "fresh=[pooler]"])
    with pytest.raises(KeyboardInterrupt):
        stop_saved(console)
    assert "fresh=[pooler]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("word", "path"), [("~/run", "/home/me/run"), ("--out=~/run", "--out=/home/me/run")]
)
def test_the_home_folder_is_found_where_the_shell_leaves_it_to_us(word, path, monkeypatch):
    given: list[str] = []
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(cli, "app", lambda words, **_: given.extend(words))
    monkeypatch.setattr(mistakes, "rename_options", lambda _, words: words)
    monkeypatch.setattr(sys, "argv", ["bothways", word, "--text=a~/b", "~"])
    cli.main()
    assert given == [path, "--text=a~/b", "~"]


def test_a_port_in_use_is_one_message():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            BothwaysError, match=rf"^127\.0\.0\.1:{port}: cannot be listened on: Addr"
        ):
            cli.app(["serve", "bert", f"--port={port}"], result_action="return_value")
