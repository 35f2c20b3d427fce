"""Processes that share each step over gloo do what one does, start again, meet full disks and hang like one."""

import dataclasses
import errno
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore, TCPStore

from bothways.cli import main as cli
from bothways.cli.options import resumable, training
from bothways.core.errors import ConfigError, DivergedError, LostRankError, ResourceError
from bothways.core.source import Cursor
from bothways.training import checkpoint, meter, parallel, saved_state
from bothways.training.checkpoint import checkpoints, read_checkpoint
from bothways.training.loop import evaluate_losses
from bothways.training.meter import ENDED_BY_WATCHDOG, Watchdog, stragglers
from bothways.training.parallel import Plan, Sharding, lost_contact, plan_here, rank_device
from bothways.training.trackers import TensorBoard
from toy_training import (
    FITS,
    SINGLE,
    TRAINING,
    enter_ranks,
    equal,
    exit_code,
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


@pytest.mark.parametrize("name", FITS)
def test_gradients_and_weights_are_those_of_one_process(two, name):
    """Seven sequences weigh unevenly on ranks and microbatches; of one sequence, rank 1 has a void share."""
    size, config, count = FITS[name]
    alone = fit_toy(toy(dtype=torch.float64), steps(Cursor(), size), count, config=config)
    first, second = (found[name] for found in two[1])
    # The moments of a first step are its gradients.
    bounds = {"rtol": 1e-12, "atol": 1e-15} if count == 1 else {"rtol": 1e-9, "atol": 1e-11}
    for kind in ("moments",) if count == 1 else ("weights", "moments"):
        assert first[kind].keys() == alone[kind].keys()
        for parameter, expected in alone[kind].items():
            assert torch.equal(first[kind][parameter], second[kind][parameter])
            torch.testing.assert_close(first[kind][parameter], expected, **bounds)


def test_an_evaluation_is_over_all_ranks(two):
    data = [next(steps(Cursor(), 7))]
    alone = evaluate_losses(toy(dtype=torch.float64), data, SINGLE, precision="fp32")
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
    folders = [two[0] / name for name in ("whole", "stopped")]
    assert equal(*(torch.load(folder / "final.pt", weights_only=True) for folder in folders))
    recorded, again = ([line["step"] for line in metric_lines(folder)] for folder in folders)
    assert recorded == again


def test_one_process_can_go_on_with_the_checkpoint_of_two(two):
    before = read_checkpoint(checkpoints(two[0] / "alone")[-1])
    progress = session(two[0] / "alone")
    assert (before.progress.steps, progress.steps) == (6, 14)
    assert progress.tokens == metric_lines(two[0] / "whole")[-1]["tokens"]


ENVIRONMENT = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Plan()),
        ({"WORLD_SIZE": "1"}, Plan()),
        (ENVIRONMENT, Plan(3, 4, 1, 4)),
        (ENVIRONMENT | {"LOCAL_WORLD_SIZE": "2"}, Plan(3, 4, 1, 2)),
        (ENVIRONMENT | {"RANK": ""}, "RANK is ''"),
        (ENVIRONMENT | {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        (ENVIRONMENT | {"RANK": "4"}, "RANK is 4, but must be from 0 to 3"),
        (ENVIRONMENT | {"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        (ENVIRONMENT | {"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
    ],
)
def test_the_plan_is_the_one_in_the_environment_or_refused(monkeypatch, environment, expected):
    for name in (*ENVIRONMENT, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, Plan):
        assert plan_here() == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            plan_here()


def test_a_port_of_another_program_is_named(monkeypatch):
    for name, value in (ENVIRONMENT | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("localhost", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(LostRankError, match="in use") as caught:
            parallel._store(0, 4)
    assert caught.value.where == f"localhost:{port}"


def test_each_rank_has_the_device_of_its_local_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert rank_device(Plan(3, 4, 1), cuda) == torch.device("cuda", 1)
    assert rank_device(Plan(3, 4, 1), cpu) == cpu
    assert rank_device(Plan(), cuda) == cuda
    with pytest.raises(ResourceError, match="rank 2 needs CUDA device 2, but there are 2"):
        rank_device(Plan(2, 4, 2), cuda)


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


@pytest.mark.parametrize(("rank", "awaited"), [(0, "rank 1"), (2, "the main rank")])
def test_a_rank_that_does_not_come_is_named(rank, awaited, monkeypatch):
    monkeypatch.setattr(parallel, "MEETING", 0.1)
    with pytest.raises(ResourceError, match=f"^{awaited} has not come in .* minutes"):
        parallel.start_name(HashStore(), rank, 3)


def save_slowly(seconds: float) -> None:
    """Let the main rank take longer to save."""
    save = saved_state.save_checkpoint

    def slow(*arguments: object) -> None:
        time.sleep(seconds)
        save(*arguments)

    saved_state.save_checkpoint = slow


def end_with_a_slow_save(rank: int, world: int, port: int, folder: Path) -> None:
    """Stop after a signal to rank 1 in the last step, and note what was saved when this rank ends."""
    enter_ranks(rank, world, port)
    save_slowly(0.0 if rank else 0.2)
    plan = parallel.plan_here()
    with parallel.connected(plan, torch.device("cpu")):
        state = session(folder / "run", 13 if rank else None, plan=plan)
        saved = [path.name for path in checkpoint.checkpoints(folder / "run")]
        (folder / f"rank{rank}").write_text(str((f"step-{state.steps}", saved[-1])))
        os._exit(0)


def test_no_rank_ends_before_the_main_one_has_saved(tmp_path):
    (tmp_path / "run").mkdir()
    on_ranks(2, end_with_a_slow_save, tmp_path)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "('step-14', 'step-14')"
    assert not (tmp_path / "run/final.pt").exists()  # rank 0 is interrupted, too


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_rank_of_an_interrupted_run_ends_as_interrupted(rank, tmp_path, monkeypatch, capsys):
    """A rank that ended with 0 was finished for torchrun, which used its machine no more."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    for name, value in (ENVIRONMENT | ranks).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7/manifest.json").touch()
    with pytest.raises(KeyboardInterrupt), training(tmp_path, False, "cpu"):
        raise KeyboardInterrupt("Saved after step 7.")
    said = "Saved after step 7. If torchrun does not start it again: bothways"
    assert (said in capsys.readouterr().err) == (rank == "0")


def test_predictions_need_no_variables_of_torchrun(tmp_path, monkeypatch, capsys):
    """A launcher of another program may set only these two."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with resumable(tmp_path, device="cpu"):
        pass
    assert "kernels" in capsys.readouterr().err


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_events_that_cannot_be_written_are_one_message(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path / "tensorboard", 0)

    class Full:
        """A file on a full disk, whose buffer stays full until it is closed."""

        def write(self, data: bytes) -> None:
            raise FULL

        flush = close = lambda self: self.write(b"")

    tracker.close()
    tracker._file = Full()
    with pytest.raises(ResourceError, match="No space left") as caught:
        tracker.write({"step": 1, "loss": 2.0})
    assert caught.value.where == tmp_path / "tensorboard"
    tracker.close()


def end_at_a_full_disk(rank: int, world: int, port: int, folder: Path) -> None:
    """Save three kinds of checkpoints with a limit on the files of one rank, as a full disk has."""
    enter_ranks(rank, world, port)
    replicated = parallel.plan_here()
    sharded = dataclasses.replace(replicated, sharding=Sharding())
    whole, signals = saved_state.WHOLE_BYTES, signal.SIG_IGN
    signal.signal(signal.SIGXFSZ, signals)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    cases = (
        ("parts", sharded, 0, 1),
        ("whole", sharded, whole, 0),
        ("replicated", replicated, whole, 0),
    )
    for name, plan, limit, full in cases:
        (folder / name).mkdir(exist_ok=True)
        saved_state.WHOLE_BYTES = limit
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            with parallel.connected(plan, torch.device("cpu")):
                session(folder / name, plan=plan)
        except ResourceError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            (folder / f"{name}-{rank}").write_text(f"{type(error).__name__} {error}")
    os._exit(0)


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_the_same_message_on_all(tmp_path):
    on_ranks(2, end_at_a_full_disk, tmp_path)
    for name in ("parts", "whole", "replicated"):
        first, second = ((tmp_path / f"{name}-{rank}").read_text() for rank in range(2))
        assert first == second
        assert first.startswith(f"ResourceError {tmp_path / name / 'step-3'}: cannot be written: ")
        assert "File too large" in first
        assert first.count("\n") == 1
        assert "repeat the same call, with resume=True" in first
        assert not [*(tmp_path / name).glob(".writing-*")]


def save_for_longer_than_a_step(rank: int, world: int, port: int, folder: Path) -> None:
    enter_ranks(rank, world, port)
    save_slowly(0.0 if rank else 1.5)
    plan = parallel.plan_here()
    keep = dataclasses.replace(TRAINING.keep, best=None)
    training = dataclasses.replace(TRAINING, keep=keep, step_limit=0.75)
    with parallel.connected(plan, torch.device("cpu")):
        session(folder, plan=plan, training=training)


@pytest.mark.slow
def test_a_slow_checkpoint_of_one_rank_is_no_hang_of_the_others(tmp_path):
    on_ranks(2, save_for_longer_than_a_step, tmp_path)
    assert (tmp_path / "step-14" / "manifest.json").exists()


GLOO = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((), {}),
        ((1.0, 1.1), {}),
        ((1.0, 3.0), {1: 3.0}),
        ((1.0, 1.0, 1.0, 2.0), {3: 2.0}),
        ((4.0, 4.0, 4.0, 1.0), {}),
        ((0.0, 0.0), {}),
    ],
)
def test_a_straggler_takes_much_longer_than_the_median(seconds, expected):
    assert stragglers(seconds) == expected


def test_the_rank_whose_loss_is_no_number_is_named():
    inf = float("inf")
    meter._check(["masked", None], [[inf, inf], [inf, inf]])
    with pytest.raises(DivergedError, match=r"^step 7: the loss 'masked' is not finite on rank 1"):
        meter._check(["masked", None], [[9.0, 7.0], [7.0, 7.0]])
    with pytest.raises(DivergedError, match=r"^step 7: the gradient norm is not finite\n"):
        meter._check(["masked", None], [[inf, 7.0], [inf, 7.0]])


def hang(errors: Path) -> None:
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    with Watchdog(Plan(3, 4, 3), 0.2) as dog:
        dog.note("resting", 4)
        time.sleep(0.5)
        dog.note("reading its batch", 5)
        time.sleep(30)


def test_a_rank_that_hangs_says_what_it_was_doing_and_ends(tmp_path):
    assert exit_code(hang, tmp_path / "errors") == ENDED_BY_WATCHDOG
    errors = (tmp_path / "errors").read_text()
    assert "step 5: rank 3 has been reading its batch for more than 0.2 seconds" in errors
    assert "bothways inspect-step RUN 5;" in errors
    assert "Current thread" in errors or "Thread" in errors


@pytest.mark.parametrize("error", [DistNetworkError("Broken pipe"), RuntimeError(GLOO)])
def test_a_lost_rank_is_one_message(error, monkeypatch, capsys):
    def lose() -> None:
        with Watchdog(Plan(3, 4, 3), None) as dog:
            dog.note("exchanging gradients", 812)
            raise ValueError("in a checkpoint") from error

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(cli, "app", lambda *_, **__: lose())
    monkeypatch.setattr(cli, "rename_options", lambda _, words: words)
    with pytest.raises(SystemExit) as ended:
        cli.run_command_line()
    assert ended.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: step 812: rank 3 has lost contact with another rank")
    assert "with --resume" in second


def test_other_errors_of_a_step_stay_as_they_are(monkeypatch):
    diverged, interrupted = DivergedError("rank 1"), KeyboardInterrupt()
    diverged.__cause__ = interrupted.__cause__ = RuntimeError(GLOO)  # of a rank that ends, too
    for error in (RuntimeError("shapes differ"), diverged, interrupted):
        with pytest.raises(type(error)) as caught, Watchdog(Plan(3, 4, 3), None):
            raise error
        assert caught.value is error
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    lost = lost_contact(Plan(0, 2, 0), RuntimeError(GLOO))
    assert "while --max-restarts allows it" in str(lost)
