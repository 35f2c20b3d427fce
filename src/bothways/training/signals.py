"""Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal: the run finishes its step and saves.

Clouds send SIGTERM before they take a machine away, Slurm the signal that a job asks for: SIGUSR1
by custom.

A second Ctrl-C ends the program at once.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

# Windows has neither SIGHUP nor SIGUSR1.
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    *(getattr(signal, name) for name in ("SIGHUP", "SIGUSR1") if hasattr(signal, name)),
)


class Interruption:
    """Notes the first of the signals while it is open, and restores the handlers.

    Signals reach the main thread alone: opened in another thread, it changes nothing.
    """

    def __init__(self) -> None:
        self.by: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """True if a signal has come."""
        return self.by is not None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays so: `nohup` ignores SIGHUP.
            self._before = {
                number: signal.signal(number, self._note)
                for number in _SIGNALS
                if signal.getsignal(number) != signal.SIG_IGN
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = self.by or signal.Signals(number)
        # Not through sys.stderr: the signal may have come in the middle of a write to it.
        with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of the output, too
            os.write(
                2,
                f"\n{self.by.name}: the run saves after this step and ends. "
                "Ctrl-C ends it at once.\n".encode(),
            )


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command that resumes a run started with these arguments, under torchrun if needed.

    Of a run on several machines it is the command for each machine.

    >>> resume_command(["pretrain", "my run"])
    "bothways pretrain 'my run' --resume"
    """
    words = ["bothways", *(word for word in arguments if word != "--resume"), "--resume"]
    if ranks := os.environ.get("LOCAL_WORLD_SIZE"):
        machines, several = int(os.environ.get("WORLD_SIZE", ranks)) // int(ranks), []
        if machines > 1:
            endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            several = [f"--nnodes={machines}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        words = ["torchrun", *several, f"--nproc-per-node={ranks}", "-m", *words]
    return shlex.join(words)
