"""Ranks that are started again at a store that outlives them, as torchrun's agents keep it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
from torch.distributed import HashStore, TCPStore

from bothways.training import parallel
from toy_training import enter_ranks, processes


def meet(rank: int, port: int, found: Path) -> None:
    """Meet the other rank, and end without a farewell, as one that is killed."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    enter_ranks(rank, 2, port)
    plan = parallel.plan_here()
    with parallel.connected(plan, torch.device("cpu")):
        total = parallel.total(plan, {"rank": rank + 1.0})["rank"]
        (found / str(rank)).write_text(str(total))
        parallel.total(plan, {})
        os._exit(9)


def test_ranks_that_are_started_again_find_each_other_and_not_those_that_were_killed(
    tmp_path: Path,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        ranks = [
            processes().Process(target=meet, args=(rank, store.port, tmp_path / name))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [9, 9]
        assert [(tmp_path / name / str(rank)).read_text() for rank in range(2)] == ["3.0", "3.0"]


def test_a_start_has_a_name_of_its_own_that_all_its_ranks_know() -> None:
    store, world, starts = HashStore(), 3, []
    for _ in range(3):
        names: dict[int, str] = {}

        def agree(rank: int, names: dict[int, str] = names) -> None:
            names[rank] = parallel.start_name(store, rank, world)

        ranks = [threading.Thread(target=agree, args=(rank,)) for rank in range(world)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
        assert sorted(names) == [0, 1, 2]
        assert len({*names.values()}) == 1
        starts.append(names[0])
    assert len({*starts}) == 3
