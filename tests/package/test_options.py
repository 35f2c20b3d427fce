"""The tasks that the command line offers are those that there are."""

from __future__ import annotations

from typing import get_args

from bothways.commands.options import AnyTask, FineTask
from bothways.tasks.catalogue import ALL_TASKS, TASKS


def test_the_command_line_offers_every_task() -> None:
    assert get_args(FineTask) == tuple(TASKS)
    assert get_args(AnyTask) == tuple(ALL_TASKS)
