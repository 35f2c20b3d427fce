"""The command line in this process, with standard error on a pseudo-terminal and standard output elsewhere."""

import contextlib
import dataclasses
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bothways.cli import main as cli
from commands import shell_words

NUMBERS = re.compile(rb"[\d,.:%e-]*\d[\d,.:%e-]*")
"""Numbers in an output, which may be times."""
_SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


@dataclass(frozen=True)
class Run:
    """What a command did.

    Attributes:
        status: the exit status, or the text that `sys.exit` was given.
        output: the bytes of standard output.
        messages: the bytes of standard error, as the terminal or the pipe received them.
    """

    status: int | str
    output: bytes
    messages: bytes


@contextlib.contextmanager
def _collected(descriptor: int) -> Iterator[list[bytes]]:
    """Read a pipe or the master side of a terminal until its writers have closed it.

    A process that the command has started may live on and keep it open: then until all is read.
    """
    blocks: list[bytes] = []
    written = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux reports the end of a pseudo-terminal
            while True:
                last = written.is_set()
                readable = select.select([descriptor], [], [], 0.2)[0]
                if readable and (block := os.read(descriptor, 2**16)):
                    blocks.append(block)
                elif readable or last:
                    return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield blocks
    finally:
        written.set()
        reader.join()
        os.close(descriptor)


def run_command(
    words: list[str],
    output: Path,
    *,
    terminal: bool = True,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
    reader_ends: bool = False,
    columns: int = 80,
) -> Run:
    """Run `bothways WORDS > OUTPUT`, on the level of file descriptors, so that code in C is seen, too.

    Args:
        terminal: standard error is a terminal; otherwise a pipe.
        reader_ends: standard output is a pipe whose reader has gone.
        columns: the width of the terminal.
    """
    master, slave = pty.openpty() if terminal else os.pipe()
    if terminal:
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST  # newlines stay as they are
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    if reader_ends:
        read_end, target = os.pipe()
        os.close(read_end)
    else:
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    source, typed = os.pipe()
    os.write(typed, stdin.encode())
    os.close(typed)
    kept = [os.dup(number) for number in (0, 1, 2)]
    streams = sys.stdin, sys.stdout, sys.stderr
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    status: int | str = 0
    with _collected(master) as messages, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bothways", *words])
        for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm-256color")
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        try:
            for number, opened in enumerate((source, target, slave)):
                os.dup2(opened, number)
                os.close(opened)
            sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf8")
            sys.stdout = io.TextIOWrapper(
                io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf8"
            )
            sys.stderr = io.TextIOWrapper(
                io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf8", line_buffering=True
            )
            try:
                cli.run_command_line()
            except SystemExit as ended:
                status = ended.code or 0
            finally:
                sys.stdout.flush()  # Python does it at exit
                sys.stderr.flush()
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams
            for number, descriptor in enumerate(kept):
                os.dup2(descriptor, number)
                os.close(descriptor)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Run(status, b"" if reader_ends else output.read_bytes(), b"".join(messages))


def run_line(line: str, folder: Path, name: str, **options: Any) -> Run:
    """Run words as in a shell, with a new place for OUT; in the output that is its name again."""
    out = folder / f"out-{name}"
    words = [word.replace("OUT", str(out)) for word in shell_words(line)]
    done = run_command(words, folder / f"{name}.output", **options)
    return dataclasses.replace(done, output=done.output.replace(str(out).encode(), b"OUT"))
