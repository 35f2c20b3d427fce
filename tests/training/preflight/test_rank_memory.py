"""The memory of a rank by its parts, and the placement chosen for it."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bothways.core.batch import Batch, pack
from bothways.core.errors import ResourceError
from bothways.core.source import Sequence
from bothways.core.training_module import hidden_matrices
from bothways.data.masking import Vocabulary
from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead, PairHead
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.model.positions import Disentangled
from bothways.objectives import distillation
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.forecast import memory_demand
from bothways.pretraining.recipes import modern
from bothways.training import optimizers
from bothways.training.run import Training
from bothways.training.schedules import Constant, Steps
from bothways.training.step_cost import (
    USABLE,
    LossFloats,
    MemoryDemand,
    choose_placement,
    kept_floats,
)
from commands import run_line
from spread import in_turn
from toy_training import SGD

CPU, GPU = torch.device("cpu"), torch.device("cuda")
VOCABULARY, WIDTH, DEPTH = 1000, 64, 4
ENCODER = EncoderConfig(VOCABULARY, WIDTH, DEPTH, 2, 4 * WIDTH)
TRAINING = Training(Steps(1), optimizers.AdamW(), Constant(), precision="fp32")
DEMAND = MemoryDemand(
    ((ENCODER, (MaskedHead(), PairHead())),),
    length=128,
    microbatch=1024,
    training=TRAINING,
    losses=LossFloats(2 * 0.15 * VOCABULARY),
)
BLOCK = 12 * WIDTH**2 + 13 * WIDTH
"""Four matrices of attention and two of the feed-forward layer, their biases, two LayerNorms."""


def test_blocks_are_counted_apart_from_the_rest():
    assert (DEMAND.counts.blocks, DEMAND.counts.largest) == (DEPTH * BLOCK, BLOCK)
    assert DEMAND.parameters == parameter_table(*DEMAND.models[0]).total
    two = dataclasses.replace(DEMAND, models=(*DEMAND.models, *DEMAND.models), shared=7)
    assert (two.counts.blocks, two.counts.largest) == (2 * DEPTH * BLOCK, BLOCK)
    assert two.parameters == 2 * DEMAND.parameters - 7
    demands = (dataclasses.replace(each, losses=LossFloats()) for each in (DEMAND, two))
    one, both = (demand.memory(CPU) for demand in demands)
    assert both.total == 2 * one.total - 16 * 7
    assert two.saved == 12 * two.parameters


def test_the_parts_of_a_whole_rank():
    memory = DEMAND.memory(CPU)
    kept = kept_floats(ENCODER, 128, CPU, precision="fp32") + 2 * 0.15 * VOCABULARY
    assert memory.weights == memory.gradients == 4 * DEMAND.parameters
    assert memory.optimizer == 8 * DEMAND.parameters
    assert memory.activations == pytest.approx(4 * 1024 * kept)
    assert memory.gathered == 0


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.AdamW(lr="auto"), optimizers.Lamb(), optimizers.Muon(),
        functools.partial(torch.optim.SGD, lr=0.1),
        SGD,
        functools.partial(torch.optim.AdamW, amsgrad=True),
    ],
)  # fmt: skip
def test_the_moments_are_those_that_the_optimizer_keeps(optimizer):
    encoder = dataclasses.replace(ENCODER, depth=2)
    model = Model(encoder, (MaskedHead(), PairHead()))
    matrices = hidden_matrices(model)
    given = dataclasses.replace(optimizer, lr=1.0) if hasattr(optimizer, "kind") else optimizer
    real = optimizers.build_optimizer(given, model.named_parameters(), matrices=matrices)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.update(real, None)
    kept = sum(
        value.nbytes
        for parameter, state in real.state.items()
        for value in state.values()
        if value.shape == parameter.shape
    )
    training = dataclasses.replace(TRAINING, optimizer=optimizer)
    models = ((encoder, (MaskedHead(), PairHead())),)
    demand = dataclasses.replace(DEMAND, models=models, training=training)
    assert demand.memory(CPU).optimizer == kept
    assert demand.saved == 4 * demand.parameters + kept
    assert demand.memory(CPU, 4).optimizer == kept / 4


def test_a_shard_holds_its_part_and_what_it_gathers():
    whole, shard = DEMAND.memory(CPU), DEMAND.memory(CPU, 4)
    assert shard.weights == whole.weights / 4
    assert shard.optimizer == whole.optimizer / 4
    assert shard.activations == whole.activations
    assert shard.gathered == 8 * (2 * BLOCK + DEMAND.parameters - DEPTH * BLOCK)


def test_a_device_of_another_machine_needs_no_driver():
    """Its attention kernels keep no probabilities, so that a token takes as much at any length."""
    assert DEMAND.memory(GPU) == dataclasses.replace(DEMAND, length=16).memory(GPU)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_largest_microbatch_is_the_last_that_fits(shards):
    free = 1.5 * DEMAND.memory(CPU, shards).total
    most = DEMAND.largest_microbatch(free, CPU, shards)
    for tokens, fits in ((most, True), (most + 1, False)):
        each = dataclasses.replace(DEMAND, microbatch=tokens)
        assert each.fits(free, CPU, shards) == fits
    assert DEMAND.largest_microbatch(1.0, CPU) == 0


def test_the_simplest_placement_that_fits_is_chosen():
    # Weights and moments outweigh the activations of few tokens, so that shards are smaller.
    models = ((dataclasses.replace(ENCODER, depth=40), (MaskedHead(),)),)
    demand = dataclasses.replace(DEMAND, models=models, microbatch=128)
    whole = 1.001 * demand.memory(CPU).total / USABLE
    shard = 1.001 * demand.memory(CPU, 8).total / USABLE
    assert shard < whole
    assert choose_placement(demand, 1, whole, CPU).placement == "single"
    assert choose_placement(demand, 8, whole, CPU).placement == "replicated"
    chosen = choose_placement(demand, 8, shard, CPU)
    assert chosen.placement == "sharded"
    assert chosen.memory == demand.memory(CPU, 8)
    with pytest.raises(ResourceError, match=r"of memory on each rank\.$"):
        choose_placement(demand, 8, shard / 50, CPU)


def test_each_remedy_of_a_refusal_fits():
    recomputed = dataclasses.replace(DEMAND, training=dataclasses.replace(TRAINING, recompute=True))
    free = 1.001 * recomputed.memory(CPU).total / USABLE
    with pytest.raises(ResourceError, match=r"^memory: a step takes") as refused:
        choose_placement(DEMAND, 1, free, CPU)
    fix = refused.value.fix or ""
    assert 'This would fit: **{"training.recompute": True}; ' in fix
    [tokens] = map(int, re.findall(r"microbatch_tokens=(\d+)", fix))
    assert tokens % DEMAND.length == 0
    for demand in (recomputed, dataclasses.replace(DEMAND, microbatch=tokens)):
        assert choose_placement(demand, 1, free, CPU).placement == "single"

    one = dataclasses.replace(DEMAND, microbatch=128)
    free = 1.001 * one.memory(CPU, 4).total / USABLE
    with pytest.raises(ResourceError) as refused:
        choose_placement(one, 1, free, CPU)
    [ranks] = map(int, re.findall(r"(\d+) ranks, sharded", refused.value.fix or ""))
    assert ranks == 4


LENGTH, SEQUENCES = 64, 48
TEACHER = EncoderConfig(VOCABULARY, 128, 4, 2, 512)
DISTILBERT = distillation.SoftTargets(), distillation.MaskedTokens(), distillation.CosineStates()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    save_model(folder, Model(TEACHER, (MaskedHead(),)), tokenizer)
    return str(folder)


def peak(run: Callable[[], object]) -> int:
    """Return the bytes that torch's allocator holds at the most, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return int(max(np.cumsum(changes)))


def batch_for(objective: distillation.Distillation) -> Batch:
    draw = np.random.default_rng(0)
    special = np.arange(VOCABULARY) < 5
    vocabulary = Vocabulary(special, np.zeros_like(special), 4)
    sequences = []
    for _ in range(SEQUENCES):
        ids = draw.integers(5, VOCABULARY, LENGTH, dtype=np.int32)
        plain = Sequence(ids, np.zeros(LENGTH, np.int8), {})
        sequences.append(objective.prepare(plain, vocabulary, draw))
    return pack(sequences)


def settings_for(
    teacher: str, student: EncoderConfig, *losses: distillation.DistilLoss
) -> PretrainConfig:
    usual = modern(student)
    return dataclasses.replace(
        usual,
        objective=distillation.Distillation(teacher, losses),
        phases=(PretrainPhase(LENGTH),),
        microbatch_tokens=LENGTH * SEQUENCES,
        training=dataclasses.replace(usual.training, precision="fp32"),
    )


@pytest.mark.parametrize(
    ("width", "depth", "losses", "most"),
    [
        (128, 2, DISTILBERT, 1.25),
        # The teacher's pass is the peak: a small student keeps less than a large block holds.
        (32, 1, (distillation.Relations(heads=4),), 1.4),
    ],
    ids=["distilbert", "minilm"],
)
def test_the_forecast_is_what_a_step_takes(teacher, width, depth, losses, most):
    student = EncoderConfig(VOCABULARY, width, depth, 2, 4 * width)
    settings = settings_for(teacher, student, *losses)
    objective = settings.objective
    specs = objective.models(student)
    models = {role: Model(*spec) for role, spec in specs.items()}
    special = np.zeros(VOCABULARY, dtype=bool)
    training_module = objective.training_module(models, Vocabulary(special, special, 4)).train()
    batch = batch_for(objective)

    def step() -> None:
        parts = [loss.total for loss in training_module(batch).values()]
        torch.autograd.backward(torch.stack(parts).sum())

    step()  # allocates the gradients
    demand = memory_demand(settings)
    forecast, without = demand.memory(CPU), dataclasses.replace(demand, frozen=()).memory(CPU)
    measured = peak(step)
    assert 0.9 < forecast.activations / measured < most
    assert forecast.frozen == 4 * parameter_table(*specs["teacher"]).total > without.frozen == 0
    assert sum(p.numel() for p in models["teacher"].parameters()) == forecast.frozen / 4
    assert forecast.total - forecast.activations == 16 * demand.parameters + forecast.frozen
    assert demand.saved == dataclasses.replace(demand, frozen=()).saved


@pytest.mark.parametrize(("hidden", "relative"), in_turn([(128,), (512,)], [False, True]))
def test_a_pass_without_gradient_holds_what_the_widest_block_does(hidden, relative):
    config = dataclasses.replace(TEACHER, intermediate_size=hidden)
    if relative:
        config = dataclasses.replace(config, position=Disentangled())
    model = Model(config, ()).eval()
    batch = batch_for(distillation.Distillation("none", (distillation.CosineStates(),)))
    with torch.inference_mode():
        model.encoder(batch)
        held = peak(lambda: model.encoder(batch)) / 4 / batch.layout.tokens
    assert 0.95 < kept_floats(config, LENGTH, CPU, False, "fp32", learning=False) / held < 1.2


def test_a_shard_holds_its_part_of_the_teacher(teacher):
    demand = memory_demand(settings_for(teacher, TEACHER, distillation.CosineStates()))
    whole, shard = demand.memory(CPU), demand.memory(CPU, 4)
    assert shard.frozen == whole.frozen / 4
    alone = dataclasses.replace(demand, frozen=()).memory(CPU, 4)
    block = 12 * 128**2 + 13 * 128
    outside = demand.frozen_counts.parameters - 4 * block
    assert shard.gathered == alone.gathered + 4 * (2 * block + outside)


def test_plan_counts_the_teacher(teacher, capsys):
    words = ["plan", "bert-tiny", "--teacher", teacher, "--recipe", "minilm"]
    words += ["--tokens", "1e6", "--hardware", "l4"]
    run_line(*words, "--json")
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["frozen"] == 4 * parameter_table(TEACHER, ()).total
    run_line(*words)
    assert "teacher" in capsys.readouterr().out
