"""Work that goes on next to the training: one job at a time, whose error is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from bothways.training.parallel import Plan, Sharded


class Background:
    """Runs jobs in a thread, one after the other."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: Any = None

    def group(self, plan: Plan) -> Any:
        """Return the ranks as a group of its own, in which jobs exchange values; None for one rank.

        All ranks call this, not in a job.
        """
        if self._group is None and isinstance(plan, Sharded):
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group

    def run(self, job: Callable[[], object]) -> None:
        """Start a job when the one before is done.

        Raises:
            Exception: that of the job before.
        """
        self.wait()

        def work() -> None:
            """Do the job and keep its error."""
            try:
                job()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="saving")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
