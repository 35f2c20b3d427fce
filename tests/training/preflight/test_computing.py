"""What a run's speed is compared with, and what its ranks draw, as two ranks hand it to the loop that is theirs together."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from bothways.core.runtime import devices
from bothways.data.masking import Masking
from bothways.finetuning import run as fine_tuning
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.prepare import prepare_run
from bothways.model.heads import LabelHead, MaskedHead, PairHead, PoolerHead
from bothways.pretraining import run as pre_training
from bothways.pretraining.evaluation import HeldOut
from bothways.pretraining.forecast import predicted_share
from bothways.training import parallel, run as loop, step_cost as computing
from bothways.training.parallel import Plan
from bothways.training.schedules import Steps
from bothways.training.step_cost import forward_flops
from toy_folder import make_examples, make_folder, write_tsv
from toy_pretraining import small_run

RATE = 5e9
FP32 = replace(finetune_adam(), until=Steps(2), precision="fp32")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def measured(monkeypatch) -> None:
    """A machine whose matrix products are known, of twice the speed in half the precision."""
    monkeypatch.setattr(computing.devices, "gemm_rate", lambda _, dtype: RATE * 4 / dtype.itemsize)
    monkeypatch.setattr(devices, "has_bf16", lambda _: True)


@pytest.mark.parametrize("world", [1, 2, 6])
def test_a_step_is_three_forward_passes_on_all_ranks(world):
    plan = Plan() if world == 1 else Plan(0, world, 0)
    assert computing.peak_of(100.0, FP32, CPU, plan) == world * RATE / 300
    bf16 = replace(FP32, precision="bf16")
    assert computing.peak_of(100.0, bf16, CPU, plan) == world * 2 * RATE / 300


def on_two_ranks(
    begin: Callable[[], object], seed: int, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """What each rank of a run hands to the loop to compare with; they draw by the seed and their number."""
    peaks, draws = [], []

    def train(run: loop.TrainingRun) -> None:
        assert run.peak is not None
        peaks.append(run.peak)
        draws.append(torch.rand(4))
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.TrainingRun, "train", train)
    monkeypatch.setattr(parallel, "connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(parallel, "require_agreement", lambda *_, **__: None)
    for rank in (0, 1):
        monkeypatch.setattr(parallel, "plan_here", lambda rank=rank: Plan(rank, 2, rank))
        with pytest.raises(KeyboardInterrupt):
            begin()
    assert not torch.equal(*draws)
    torch.manual_seed(seed + 1)
    assert torch.equal(torch.rand(4), draws[0])
    return peaks


class Unasked(HeldOut):
    """Held-out text that is not scored: the real one asks the other rank."""

    def __init__(self, *_: object) -> None:
        pass


def test_ranks_that_pre_train_draw_by_their_number(corpus, tmp_path, monkeypatch):
    # The ranks of this test are not connected.
    settings = small_run(corpus, Steps(2), sharding=None)
    settings = replace(settings, objective=replace(settings.objective, masking=Masking(rate=0.3)))
    monkeypatch.setattr(pre_training, "HeldOut", Unasked)
    begin = partial(pre_training.pretrain, settings, corpus, tmp_path / "run")
    peaks = on_two_ranks(begin, settings.seed, monkeypatch)
    forward = forward_flops(
        settings.encoder,
        (MaskedHead(), PoolerHead(), PairHead()),
        32,
        predicted_share(settings.objective),
    )
    assert peaks == [2 * RATE / (3 * forward)] * 2


def test_ranks_that_fine_tune_draw_by_their_number(tmp_path, monkeypatch):
    train = str(write_tsv(tmp_path / "train.tsv", make_examples(32, 0)))
    settings = FinetuneConfig(
        model=str(make_folder(tmp_path / "bert")), train=train, training=FP32, length=16
    )
    begin = partial(fine_tuning.finetune, settings, tmp_path / "run", device="cpu")
    peaks = on_two_ranks(begin, settings.ordered_by, monkeypatch)
    ready = prepare_run(settings, tmp_path / "other", CPU)
    lengths = [len(sequence.ids) for sequence in ready.data.sequences]
    forward = forward_flops(
        ready.task_model.model.config, (LabelHead(2), PoolerHead()), sum(lengths) // len(lengths)
    )
    assert peaks == [2 * RATE / (3 * forward)] * 2
