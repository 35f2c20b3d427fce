"""Signals where no job catches them: one word and the status that shells know, no traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bothways.cli import main as cli

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture
def as_at_the_start() -> Iterator[None]:
    """The handlers of a process that has just begun."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def import_error() -> ImportError:
    """As a package written in C raises it, which Ctrl-C interrupts."""
    error = ImportError("initialization failed")
    error.__cause__ = KeyboardInterrupt()
    return error


def zip_error() -> ValueError:
    """As zipfile raises it, which a second Ctrl-C leaves with an open file."""
    error = ValueError("Can't close the ZIP file")
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.usefixtures("as_at_the_start")
@pytest.mark.parametrize(
    "event", [KeyboardInterrupt(), import_error(), zip_error(), *ENDING], ids=repr
)
def test_an_interruption_ends_with_130(event, monkeypatch, capsys):
    """Other signals as Ctrl-C, so that a job says how to continue; the default says nothing."""

    def interrupted(*words: object) -> None:
        if isinstance(event, BaseException):
            raise event
        assert signal.getsignal(event) != signal.SIG_DFL
        os.kill(os.getpid(), event)

    monkeypatch.setattr("bothways.cli.inspection._find", interrupted)
    monkeypatch.setattr("sys.argv", ["bothways", "describe", "bert-base"])
    with pytest.raises(SystemExit) as status:
        cli.run_command_line()
    assert status.value.code == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    if event in ENDING:
        assert signal.getsignal(event) == signal.SIG_DFL


@pytest.mark.usefixtures("as_at_the_start")
@pytest.mark.parametrize("rank", [False, True])
def test_what_is_ignored_stays_so_and_a_rank_has_no_handler(rank, monkeypatch, capsys):
    if rank:
        monkeypatch.setenv("RANK", "1")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr("sys.argv", ["bothways", "describe", "bert-tiny"])
    cli.run_command_line()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) == rank
    assert "bert-tiny" in capsys.readouterr().out


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback(tmp_path):
    """The command line and what it imports take a tenth of a second."""
    file = tmp_path / "cyclopts.py"
    file.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    process = subprocess.run(
        [sys.executable, "-m", "bothways", "--version"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (-signal.SIGINT, b"")
