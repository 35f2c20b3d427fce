"""Two processes with a part of the model each must do what one does, and continue each other's runs."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bothways.core.errors import BothwaysError, CheckpointError, ConfigError, ResourceError
from bothways.core.source import Cursor
from bothways.training import parallel, saved_state
from bothways.training.checkpoint import checkpoints, latest_checkpoint, read_checkpoint
from bothways.training.optimizers import BertAdam
from bothways.training.parallel import Plan, Sharding, from_main_rank, is_sharded, sharded
from toy_training import TRAINING, Toy, enter_ranks, fit_toy, on_ranks, session, steps, toy

FIT: dict[str, Any] = {"until": 8, "config": BertAdam(lr=0.01), "clip_norm": 0.5}
"""Steps of the optimizer whose state begins before the first; AdamW is in test_sharded_matrices."""
AVERAGED = dataclasses.replace(TRAINING, ema=0.9)


def work(rank: int, world: int, port: int, folder: Path) -> None:
    """What each of two ranks does; what it found is written to the folder."""
    enter_ranks(rank, world, port)
    plan = dataclasses.replace(parallel.plan_here(), sharding=Sharding())
    with parallel.connected(plan, torch.device("cpu")):
        found = {**_fitted(plan), **_refused(plan), **_runs(plan, folder)}
    found["threads"] = [
        place.read_text().strip() for place in Path("/proc/self/task").glob("*/comm")
    ]
    torch.save(found, folder / f"rank{rank}.pt")


def _fitted(plan: Plan) -> dict[str, object]:
    training_module = toy(dtype=torch.float64)
    mine = steps(Cursor(), 7, 2, plan.rank, 2)  # as many microbatches on each rank
    found: dict[str, object] = {"fitted": fit_toy(training_module, mine, plan=plan, **FIT)}
    found["restored"] = (
        type(training_module) is Toy
        and not any(is_sharded(p) for p in training_module.parameters())
        and not training_module._forward_pre_hooks
    )
    training_module = toy()
    with sharded(training_module, plan):
        held = sum(p.to_local().numel() for p in training_module.parameters())
    found["held"] = held, sum(p.numel() for p in training_module.parameters())
    return found


def _refused(plan: Plan) -> dict[str, object]:
    found: dict[str, object] = {}
    training_module = toy()
    training_module.inner.partial = True
    with pytest.raises(ConfigError) as partial, sharded(training_module, plan):
        pass
    found["refused"] = str(partial.value)

    def fail() -> None:
        raise CheckpointError("is gone", where="step-3")

    with pytest.raises(CheckpointError) as failed:
        from_main_rank(plan, fail)
    found["shared"] = str(failed.value), from_main_rank(plan, lambda: plan.rank)
    return found


def _runs(plan: Plan, folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    session(folder / "in_one_file", 5 if plan.rank else None, plan=plan)
    found["one file"] = [
        path.name for path in (folder / "in_one_file").glob("step-*/*.safetensors")
    ]
    saved_state.WHOLE_BYTES = 0
    session(folder / "parts", 5 if plan.rank else None, plan=plan, training=AVERAGED)
    torch.distributed.barrier()
    if plan.rank == 0:
        shutil.copytree(folder / "parts", folder / "alone")
    torch.distributed.barrier()
    found["parts"] = session(folder / "parts", plan=plan, training=AVERAGED).steps
    (folder / f"of rank {plan.rank}").mkdir()
    with pytest.raises(ResourceError) as unseen:
        session(folder / f"of rank {plan.rank}", plan=plan)
    found["unseen"] = str(unseen.value)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("sharded")
    for name in ("in_one_file", "parts"):
        (folder / name).mkdir()
    on_ranks(2, work, folder)
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_no_thread_of_a_group_is_left(two):
    """While Python ends, such a thread can end the process by SIGABRT."""
    for found in two[1]:
        assert not [name for name in found["threads"] if "gloo" in name]


def test_clipped_steps_are_those_of_one_process_and_the_module_is_itself_again(two):
    alone = fit_toy(toy(dtype=torch.float64), steps(Cursor(), 7), **FIT)
    first, second = (found["fitted"] for found in two[1])
    for part in ("weights", "moments"):
        assert first[part].keys() == alone[part].keys()
        for name, expected in alone[part].items():
            assert torch.equal(first[part][name], second[part][name])
            torch.testing.assert_close(first[part][name], expected, rtol=1e-8, atol=1e-10)
    assert all(found["restored"] for found in two[1])


def test_each_rank_holds_a_part(two):
    (first, whole), (second, _) = (found["held"] for found in two[1])
    assert first + second == whole
    assert abs(first - second) < 0.2 * whole


def test_what_may_lack_gradients_is_refused(two):
    assert two[1][1]["refused"].startswith(
        "sharding: a step of this model may leave some parameters"
    )


def test_machines_of_other_sizes_share_over_all():
    plan = Plan(0, 3, 0, 2, Sharding(over="machine"))
    message = (
        r"^sharding\.over: 3 ranks are not a multiple of the 2 .*\n.*\"sharding\.over\": \"all\""
    )
    with pytest.raises(ConfigError, match=message), sharded(toy(), plan):
        pass


def test_the_main_rank_decides_for_all_and_its_error_is_raised_by_all(two):
    assert [found["shared"] for found in two[1]] == [("step-3: is gone", 0)] * 2


def test_a_rank_without_the_folder_of_the_run_is_named(two):
    for found in two[1]:
        assert "of rank 1: is another folder on rank 1" in found["unseen"]
        assert "room" not in found["unseen"]


def test_a_run_stopped_on_one_rank_resumes_from_parts(two):
    folder = two[0]
    assert [found["parts"] for found in two[1]] == [14, 14]
    newest = latest_checkpoint(folder / "alone")
    assert newest is not None
    assert sorted(path.name for path in (newest / "shards").iterdir()) == [
        "00000.safetensors", "00001.safetensors",
    ]  # fmt: skip
    assert len({path.stat().st_mode for path in newest.rglob("*.*")}) == 1
    assert read_checkpoint(newest).progress.steps == 6
    # One process continues it: other draws of dropout, the same data.
    assert session(folder / "alone", training=AVERAGED).steps == 14
    assert (checkpoints(folder / "alone")[-1] / "model.safetensors").exists()


def test_a_small_sharded_model_is_saved_whole(two):
    assert set(two[1][0]["one file"]) == {"model.safetensors"}
    assert session(two[0] / "in_one_file").steps == 14


def test_a_damaged_or_missing_part_is_told(two):
    newest = latest_checkpoint(two[0] / "parts")
    assert newest is not None
    part = newest / "shards" / "00001.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + b"x")
    with pytest.raises(BothwaysError, match=r"shards/00001.safetensors is damaged or was changed"):
        read_checkpoint(newest)
    part.unlink()
    with pytest.raises(BothwaysError, match=r"shards/00001.safetensors is missing"):
        read_checkpoint(newest)
    part.write_bytes(whole)


def test_parts_of_another_model_do_not_fit(two):
    newest = latest_checkpoint(two[0] / "parts")
    assert newest is not None
    other = toy()
    other.inner = nn.Linear(8, 9)
    with pytest.raises(CheckpointError, match=r"shards does not fit this model: .*inner\.bias"):
        saved_state.load_weights(newest, other)
