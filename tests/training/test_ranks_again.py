"""Ranks that are started again at a store that outlives them, as torchrun's agents keep it."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.distributed import HashStore, TCPStore

from bothways.cli.training import conclude_pretraining
from bothways.pretraining.run import PretrainResult
from bothways.training import checkpoint, parallel
from bothways.training.saved_state import NewCheckpoint
from bothways.training.schedules import RunState
from toy_training import Toy, enter_ranks, on_ranks, session


def meet(rank: int, world: int, port: int, found: Path) -> None:
    """Meet the other rank, and end without a farewell, as one that is killed."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    enter_ranks(rank, world, port)
    plan = parallel.plan_here()
    with parallel.connected(plan, torch.device("cpu")):
        total = parallel.sum_over_ranks(plan, {"rank": rank + 1.0})["rank"]
        (found / str(rank)).write_text(str(total))
        parallel.sum_over_ranks(plan, {})
        os._exit(9)


def test_ranks_that_are_started_again_find_each_other_and_not_those_that_were_killed(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        on_ranks(2, meet, tmp_path / name, port=store.port, code=9)
        assert [(tmp_path / name / str(rank)).read_text() for rank in range(2)] == ["3.0", "3.0"]


def test_a_start_has_a_name_of_its_own_that_all_its_ranks_know():
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


def end_with_a_slow_save(rank: int, world: int, port: int, folder: Path) -> None:
    """Stop after a signal to rank 1, and note what was saved when this rank ends."""
    enter_ranks(rank, world, port)
    plan, write = parallel.plan_here(), NewCheckpoint.write

    def slow(new: NewCheckpoint, *arguments: object) -> None:
        time.sleep(0.0 if rank else 0.5)
        write(new, *arguments)

    NewCheckpoint.write = slow
    with parallel.connected(plan, torch.device("cpu")):
        state = session(folder / "run", 4 if rank else None, plan=plan)
        saved = [path.name for path in checkpoint.checkpoints(folder / "run")]
        (folder / f"rank{rank}").write_text(str((f"step-{state.steps}", saved[-1])))
        os._exit(0)


def test_no_rank_ends_before_the_main_one_has_saved(tmp_path):
    (tmp_path / "run").mkdir()
    on_ranks(2, end_with_a_slow_save, tmp_path)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [
        "('step-5', 'step-5')"
    ] * 2


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_rank_of_an_interrupted_run_ends_as_interrupted(rank, monkeypatch, capsys):
    """A rank that ended with 0 was finished for torchrun, which used its machine no more."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    done = PretrainResult(Toy(), RunState(steps=7), {})
    with pytest.raises(KeyboardInterrupt):
        conclude_pretraining(done, Console(stderr=True))
    said = "Saved after step 7. If torchrun does not start it again: bothways"
    assert (said in capsys.readouterr().err) == (rank == "0")
