"""Two processes that share each step over gloo must do what one does."""

import pytest
import torch

from bothways.core.errors import ConfigError, ResourceError
from bothways.core.source import Cursor
from bothways.training.checkpoint import checkpoints, read_checkpoint
from bothways.training.loop import evaluate_losses
from bothways.training.parallel import Replicated, Single, plan_here, rank_device
from toy_training import (
    SINGLE,
    WHOLE,
    fit_toy,
    metric_lines,
    on_ranks,
    rank_main,
    session,
    steps,
    toy,
)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder in which two ranks ran, and what each found."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, rank_main, folder)
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("size", [6, 7, 1])
def test_gradients_are_those_of_one_process(two, size, rank):
    """Seven sequences weigh unevenly on ranks and microbatches; of one sequence, rank 1 has a void share."""
    alone = fit_toy(toy(dtype=torch.float64), steps(Cursor(), size), 1)
    shared = two[1][rank][f"{size} sequences, 1 steps"]
    for name, moment in alone["moments"].items():
        torch.testing.assert_close(shared["moments"][name], moment, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("size", [6, 7, 1])
def test_weights_stay_equal_on_the_ranks_and_to_one_process(two, size):
    alone = fit_toy(toy(dtype=torch.float64), steps(Cursor(), size), 3)
    first, second = (found[f"{size} sequences, 3 steps"] for found in two[1])
    for name, weight in alone["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("config", WHOLE, ids=lambda config: config.kind)
def test_updates_of_whole_matrices_are_those_of_one_process(two, config):
    alone = fit_toy(toy(dtype=torch.float64), steps(Cursor(), 7), 3, config=config)
    first, second = (found[config.kind] for found in two[1])
    for name, weight in alone["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-9, atol=1e-11)


def test_an_evaluation_is_over_all_ranks(two):
    alone = evaluate_losses(
        toy(dtype=torch.float64), [next(steps(Cursor(), 7))], SINGLE, precision="fp32"
    )
    first, second = (found["scores"] for found in two[1])
    assert first == second
    assert first["losses"] == pytest.approx(alone.losses, rel=1e-12)
    assert first["accuracies"] == alone.accuracies


def test_values_are_summed_by_name(two):
    assert [found["total"] for found in two[1]] == [{"a": 20.0, "b": 1.0}] * 2


def test_a_loss_that_is_no_number_on_one_rank_stops_all(two):
    first, second = (found["error"] for found in two[1])
    assert first == second
    assert first.startswith("step 3: the loss 'masked' is not finite")


def test_a_signal_to_one_rank_stops_all_at_the_same_step(two):
    assert [found["whole"] for found in two[1]] == [14, 14]
    assert [found["stopped"] for found in two[1]] == [6, 6]
    assert [found["resumed"] for found in two[1]] == [14, 14]


def test_the_ranks_go_by_one_clock(two):
    (first, passed), (second, _) = (found["whole seconds"] for found in two[1])
    assert first == second
    assert 0 < first < passed


def test_two_ranks_resume_to_the_weights_of_a_run_without_interruption(two):
    whole, resumed = (
        torch.load(two[0] / name / "final.pt", weights_only=True) for name in ("whole", "stopped")
    )
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
    recorded = [
        [line["step"] for line in metric_lines(two[0] / name)] for name in ("whole", "stopped")
    ]
    assert recorded[0] == recorded[1]


def test_one_process_can_go_on_with_the_checkpoint_of_two(two):
    before = read_checkpoint(checkpoints(two[0] / "alone")[-1])
    progress = session(two[0] / "alone")
    assert (before.progress.steps, progress.steps) == (6, 14)
    assert progress.tokens == metric_lines(two[0] / "whole")[-1]["tokens"]


ENVIRONMENT = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, Single()), ({"WORLD_SIZE": "1"}, Single()), (ENVIRONMENT, Replicated(3, 4, 1))],
)
def test_the_plan_is_the_one_in_the_environment(monkeypatch, environment, expected):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert plan_here() == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "", "RANK is ''"),
        ("LOCAL_RANK", "x", "LOCAL_RANK is 'x'"),
        ("RANK", "4", "RANK is 4, but must be from 0 to 3"),
    ],
)
def test_an_environment_that_is_no_torchruns_is_refused(monkeypatch, name, value, message):
    for key, good in ENVIRONMENT.items():
        monkeypatch.setenv(key, good)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        plan_here()


def test_each_rank_has_the_device_of_its_local_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert rank_device(Replicated(3, 4, 1), cuda) == torch.device("cuda", 1)
    assert rank_device(Replicated(3, 4, 1), cpu) == cpu
    assert rank_device(Single(), cuda) == cuda
    with pytest.raises(ResourceError, match="rank 2 needs CUDA device 2, but there are 2"):
        rank_device(Replicated(2, 4, 2), cuda)
