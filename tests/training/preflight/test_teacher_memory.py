"""The memory of distillation: what a teacher adds to a step, counted and measured."""

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bothways.cli.main import app
from bothways.core.batch import Batch, pack
from bothways.core.sequence import Sequence
from bothways.data.masking import Vocabulary
from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.model.positions import Disentangled
from bothways.objectives import distillation
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.forecast import memory_demand
from bothways.pretraining.recipes import modern
from bothways.training.step_cost import MemoryDemand, kept_floats

CPU = torch.device("cpu")
LENGTH, SEQUENCES, VOCABULARY = 64, 48, 1000
TEACHER = EncoderConfig(VOCABULARY, 128, 4, 2, 512)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    save_model(folder, Model(TEACHER, (MaskedHead(),)), tokenizer)
    return str(folder)


def peak(run: Callable[[], object]) -> int:
    """Return the bytes that torch's allocator holds at the most, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
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
        (
            128,
            2,
            (distillation.SoftTargets(), distillation.MaskedTokens(), distillation.CosineStates()),
            1.25,
        ),
        # The teacher's pass is the peak: a small student keeps less than a large block holds.
        (32, 1, (distillation.Relations(heads=4),), 1.4),
    ],
    ids=["distilbert", "minilm"],
)
def test_the_forecast_is_what_a_step_takes(teacher, width, depth, losses, most):
    student = EncoderConfig(VOCABULARY, width, depth, 2, 4 * width)
    settings = settings_for(teacher, student, *losses)
    objective = settings.objective
    assert isinstance(objective, distillation.Distillation)
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


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("hidden", [128, 512])
def test_a_pass_without_gradient_holds_what_the_widest_block_does(hidden, relative):
    config = dataclasses.replace(TEACHER, intermediate_size=hidden)
    if relative:
        config = dataclasses.replace(config, position=Disentangled())
    model, batch = (
        Model(config, ()).eval(),
        batch_for(distillation.Distillation("none", (distillation.CosineStates(),))),
    )
    with torch.inference_mode():
        model.encoder(batch)
        held = peak(lambda: model.encoder(batch)) / 4 / batch.layout.tokens
    assert 0.95 < kept_floats(config, LENGTH, CPU, False, "fp32", learning=False) / held < 1.2


def test_a_shard_holds_its_part_of_the_teacher(teacher):
    demand: MemoryDemand = memory_demand(
        settings_for(teacher, TEACHER, distillation.CosineStates())
    )
    whole, shard = demand.memory(CPU), demand.memory(CPU, 4)
    assert shard.frozen == whole.frozen / 4
    alone = dataclasses.replace(demand, frozen=()).memory(CPU, 4)
    block = 12 * 128**2 + 13 * 128
    outside = demand.frozen_counts.parameters - 4 * block
    assert shard.gathered == alone.gathered + 4 * (2 * block + outside)
    free = 2 * whole.total
    most = demand.largest_microbatch(free, CPU)
    for tokens, fits in ((most, True), (most + 1, False)):
        assert dataclasses.replace(demand, microbatch=tokens).fits(free, CPU) == fits


def test_plan_counts_the_teacher(teacher, capsys):
    words = ["plan", "bert-tiny", "--teacher", teacher, "--recipe", "minilm"]
    words += ["--tokens", "1e6", "--hardware", "l4"]
    app([*words, "--json"], result_action="return_value")
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["frozen"] == 4 * parameter_table(TEACHER, ()).total
    app(words, result_action="return_value")
    assert "teacher" in capsys.readouterr().out
