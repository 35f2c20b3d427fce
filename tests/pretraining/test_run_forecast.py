"""The forecast of a run: counted, computed from data sheets or measured, and refused with a remedy."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.runtime.cards import CARDS, NETWORK
from bothways.data.loader import ExampleBudget, TokenBudget, TokenRamp, budget_at
from bothways.data.masking import Masking
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.distillation import Distillation, Relations, SoftTargets
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence
from bothways.objectives.span_boundary import MaskedLMSpanBoundary
from bothways.pretraining import forecast as forecasting
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.forecast import (
    LAUNCHES,
    Cards,
    forecast_run,
    measure_step,
    memory_demand,
    objective_flops,
    predicted_share,
)
from bothways.pretraining.recipes import ON_GPU, RECIPES, settings_of
from bothways.training.checkpoint import Best, Keep
from bothways.training.schedules import Epochs, Hours, Steps, Tokens
from bothways.training.step_cost import StepSeconds
from commands import run_line

CPU, CARD = torch.device("cpu"), CARDS["a100"]


def settings(name: str = "bert-base", **training: Any) -> PretrainConfig:
    """A run whose updates are all alike."""
    usual = settings_of("modern", preset(name), "weights")
    usual = dataclasses.replace(usual, start=None)
    values = {"until": Tokens(10**9)} | training
    return dataclasses.replace(usual, training=dataclasses.replace(usual.training, **values))


def test_the_time_of_a_card_is_operations_over_its_rate():
    """BERT-base, counted here from its matrices: 12 blocks, and the head on 15 % of the tokens."""
    plan = forecast_run(settings(), Cards(CARD))
    h, layers, n, vocabulary, predicted = 768, 12, 128, 30522, 0.15
    attention, tail = 2 * 3 * h * h + 4 * h * n, 2 * (h * h + 8 * h * h)
    head = predicted * 2 * (h * h + h * vocabulary)
    read = predicted + 1 / n  # of the last block: masked tokens and [CLS]
    pair = (2 * h * h + 4 * h) / n
    forward = layers * attention + (layers - 1 + read) * tail + head + pair
    assert plan.operations_per_token == pytest.approx(3 * forward, rel=1e-3)
    assert plan.seconds["training"] == pytest.approx(3 * forward * 1e9 / (0.25 * 312e12), rel=1e-3)
    assert plan.parameters == 110_106_428
    assert plan.updates == math.ceil(1e9 / 8192)
    assert plan.seconds["updates"] == pytest.approx(plan.updates * 28 * plan.parameters / 2039e9)
    assert plan.seconds["exchange"] == 0
    assert plan.checkpoint == 12 * plan.parameters
    assert plan.checkpoints == math.ceil(plan.updates / 1000)
    assert plan.total == sum(plan.seconds.values())


@pytest.mark.parametrize(
    ("shape", "tokens", "length", "gibibytes"),
    [("base", 32_768, 512, 12.86), ("base", 2048, 128, 2.28), ("large", 16_384, 512, 19.14)],
)
def test_the_memory_of_a_step_is_near_that_of_the_benchmark(shape, tokens, length, gibibytes):
    """docs/log.md, 2026-12-01: masked LM with pairs in bf16, one microbatch; before cross-entropy kept less, an H200 held 13.3, 2.3 and 19.4."""
    run = dataclasses.replace(
        settings(f"bert-{shape}"), microbatch_tokens=tokens, phases=(PretrainPhase(length),),
        objective=MaskedLMNextSentence(),
    )  # fmt: skip
    forecast = memory_demand(run).memory(torch.device("cuda"))
    assert forecast.total - forecast.gradients == pytest.approx(gibibytes * 2**30, rel=0.05)


@pytest.mark.parametrize(
    ("name", "length", "tokens", "training", "gibibytes"),
    [
        ("bert-tiny", 128, 65_536, {}, 3.95), ("bert-base", 128, 16_384, {}, 7.56),
        ("bert-base", 128, 16_384, {"precision": "fp32"}, 14.30),
        ("bert-base", 512, 16_384, {"recompute": True}, 3.41),
        ("deberta-v3-base", 512, 8192, {}, 7.31),
        ("deberta-v3-base", 512, 8192, {"precision": "fp32"}, 11.96),
        ("modernbert-base", 1024, 16_384, {}, 10.83),
        ("modernbert-base", 1024, 16_384, {"precision": "fp32"}, 22.16),
        ("longformer-base-4096", 2048, 16_384, {}, 7.63),
        ("longformer-base-4096", 2048, 16_384, {"precision": "fp32"}, 23.07),
        ("bigbird-roberta-base", 2048, 16_384, {}, 13.10),
        ("bigbird-roberta-base", 512, 16_384, {}, 8.72),
    ],
)  # fmt: skip
def test_the_memory_of_a_step_is_near_what_the_allocator_counts(
    name, length, tokens, training, gibibytes
):
    """docs/log.md, 2026-12-01: `short` in one phase and microbatch, with the vocabulary of BERT."""
    run = ON_GPU["short"](dataclasses.replace(preset(name), vocab=30_522, pad=0))
    run = dataclasses.replace(
        run, microbatch_tokens=tokens, phases=(PretrainPhase(length),),
        objective=MaskedLM(masking=Masking(0.4)),
        training=dataclasses.replace(run.training, **training),
    )  # fmt: skip
    forecast = memory_demand(run).memory(torch.device("cuda"))
    assert forecast.total - forecast.gradients == pytest.approx(gibibytes * 2**30, rel=0.12)


@pytest.mark.parametrize("name", ["bert-mini", "deberta-v3-xsmall"])
@pytest.mark.parametrize("free", [2e9, 4e9, 24e9])
def test_the_largest_microbatch_is_the_last_that_fits(name, free):
    """Also where a chunk of the predictions is full, after which a token takes less."""
    cuda = torch.device("cuda")
    demand = memory_demand(ON_GPU["short"](preset(name)))
    most = demand.largest_microbatch(free, cuda)
    fits = [dataclasses.replace(demand, microbatch=most + n).fits(free, cuda) for n in (0, 1)]
    assert fits == [True, False]


def test_the_speed_of_a_run_is_near_what_an_h200_reached():
    """The same place: BERT-base by `short` read 18.6 million tokens in 45 seconds."""
    run = dataclasses.replace(ON_GPU["short"](preset("bert-base")), batch=TokenBudget(32_768))
    until = dataclasses.replace(run.training, until=Hours(45 / 3600))
    forecast = forecast_run(dataclasses.replace(run, training=until), Cards(CARDS["h200"]))
    assert forecast.tokens == pytest.approx(18.6e6, rel=0.15)


@pytest.mark.parametrize(
    ("objective", "share"),
    [
        (MaskedLM(masking=Masking(0.3)), 0.3),
        (CausalLM(), 1.0),
        (Distillation("teacher"), 1.0),
        (Distillation("teacher", (SoftTargets(at="masked"),), masking=Masking(0.3)), 0.3),
        (Distillation("teacher", (Relations(heads=2),), masking=None), 0.0),
    ],
)
def test_predictions_are_of_the_tokens_that_a_loss_reads(objective, share):
    assert predicted_share(objective) == share


def test_the_network_of_the_boundary_loss_is_counted():
    """Two borders and a distance to the width, to that of the table, and to the vocabulary."""
    spans, h, vocabulary = MaskedLMSpanBoundary(), 768, 30522
    flops, without = (
        objective_flops(each, preset("bert-base"), 128)
        for each in (spans, MaskedLM(masking=spans.masking))
    )
    network = (2 * h + 200) * h + h * h + h * vocabulary
    assert flops - without == pytest.approx(2 * 0.15 * network)


def test_ranks_divide_the_work_and_add_an_exchange():
    one, eight = (forecast_run(settings(), Cards(CARD, count)) for count in (1, 8))
    assert eight.choice.placement == "replicated"
    assert eight.seconds["training"] == pytest.approx(one.seconds["training"] / 8)
    # With 1,024 tokens a rank waits for the launches of its kernels.
    compute = one.operations_per_token * 1024 / (0.25 * CARD.bf16)
    assert eight.seconds["updates"] == pytest.approx(eight.updates * (12 * LAUNCHES - compute))
    assert one.seconds["updates"] < eight.seconds["updates"]
    # 1,024 tokens a rank: the backward pass hides less than the gradients take.
    sent = 2 * 4 * one.parameters * (7 / 8) / CARD.link
    hidden = one.operations_per_token * 1024 / (0.25 * CARD.bf16) * 2 / 3
    assert eight.seconds["exchange"] == pytest.approx(eight.updates * max(0, sent - hidden))
    many = dataclasses.replace(settings(), batch=dataclasses.replace(settings().batch, n=2**20))
    assert forecast_run(many, Cards(CARD, 8)).seconds["exchange"] == 0
    # Sixteen ranks are on two machines, and the gradients go through their network.
    sixteen = forecast_run(settings(), Cards(CARD, 16))
    sent = 2 * 4 * one.parameters * (15 / 16) / NETWORK
    assert sixteen.seconds["exchange"] == pytest.approx(sixteen.updates * (sent - hidden / 2))


def test_ranks_that_share_a_model_gather_its_weights_in_each_pass():
    """Two microbatches of 512 tokens a rank: two passes each, and the gradients once."""
    usual, card = settings("bert-large"), CARDS["l4"]
    wide = dataclasses.replace(usual.encoder, width=4096, intermediate_size=16_384, depth=8)
    run = dataclasses.replace(usual, encoder=wide, microbatch_tokens=512)
    plan = forecast_run(run, Cards(card, 8))
    assert plan.choice.placement == "sharded"
    sent = (1 + 2 * 2) * 4 * plan.parameters * (7 / 8) / card.link
    compute = plan.operations_per_token * 1024 / (0.25 * card.bf16)
    assert plan.seconds["exchange"] == pytest.approx(plan.updates * (sent - compute / 3))
    update = max(28 * plan.parameters / 8 / card.bandwidth, 8 * LAUNCHES - compute)
    assert plan.seconds["updates"] == pytest.approx(plan.updates * update)


def test_recomputation_takes_longer_and_leaves_more_room():
    usual, again = (forecast_run(settings(recompute=on), Cards(CARD)) for on in (False, True))
    assert 1.2 < again.seconds["training"] / usual.seconds["training"] < 1.34
    assert again.operations_per_token == usual.operations_per_token
    assert again.largest > 3 * usual.largest


def test_hours_are_the_other_way_round():
    plan = forecast_run(settings(until=Hours(2.0), evaluate=None), Cards(CARD, 4))
    work = sum(plan.seconds[name] for name in ("training", "updates", "exchange"))
    assert work == pytest.approx(7200, rel=1e-3)
    same = forecast_run(settings(until=Tokens(int(plan.tokens)), evaluate=None), Cards(CARD, 4))
    assert same.total == pytest.approx(plan.total, rel=1e-3)
    assert forecast_run(settings(until=Steps(100)), Cards(CARD)).tokens == 100 * 8192


@pytest.mark.parametrize("until", [Hours(1.0), Steps(300), Tokens(300 * 8192)])
def test_evaluations_and_checkpoints_are_within_a_length_in_hours(until, monkeypatch):
    """But for those at its end. In other units, all of them are on top of the work."""
    per = StepSeconds((1e-3,), 0.5, per_byte=1e-6)
    monkeypatch.setattr(forecasting, "measure_step", lambda *_: per)
    monkeypatch.setattr(forecasting.devices, "memory_available", lambda _: 2**34)
    run = settings("bert-tiny", until=until, evaluate=Steps(50), save=Steps(20))
    plan = forecast_run(dataclasses.replace(run, evaluation_tokens=90_000), "cpu")
    evaluation, checkpoint = 30.0, 1e-6 * plan.checkpoint
    count = math.ceil(plan.updates / 50)
    assert plan.seconds["evaluation"] == pytest.approx(count * evaluation)
    assert plan.seconds["checkpoints"] == pytest.approx(math.ceil(plan.updates / 20) * checkpoint)
    work = plan.tokens * 1e-3 + plan.updates * 0.5
    pauses = plan.seconds["evaluation"] + plan.seconds["checkpoints"]
    assert plan.total == pytest.approx(work + pauses)
    if isinstance(until, Hours):
        within = plan.total - evaluation - checkpoint
        assert within == pytest.approx(3600, abs=evaluation + checkpoint + 9)
        short = settings("bert-tiny", until=Hours(1e-3), evaluate=Steps(50), save=Steps(20))
        assert forecast_run(short, "cpu").updates == 1
    else:
        assert plan.updates == 300


def test_a_ramp_of_budgets_has_more_updates():
    """Against `budget_at`, update by update."""
    ramp = TokenRamp(512, 8192, 8_000_000)
    run = dataclasses.replace(settings(until=Tokens(20_000_000)), batch=ramp)
    read, updates = 0, 0
    while read < 20_000_000:
        read += budget_at(ramp, read).n
        updates += 1
    plan = forecast_run(run, Cards(CARD))
    assert plan.updates == pytest.approx(updates, rel=0.01)
    hours = dataclasses.replace(run, training=dataclasses.replace(
        run.training, evaluate=None,
        until=Hours(sum(plan.seconds[n] for n in ("training", "updates")) / 3600),
    ))  # fmt: skip
    again = forecast_run(hours, Cards(CARD))
    assert again.tokens == pytest.approx(20_000_000, rel=1e-3)
    assert again.updates == pytest.approx(plan.updates, rel=1e-3)


def test_a_price_is_of_each_card_and_hour():
    plan = forecast_run(settings(), Cards(CARD, 8), price=2.5)
    assert plan.cost == pytest.approx(2.5 * 8 * plan.total / 3600)
    with pytest.raises(ConfigError, match="price: must be at least 0"):
        forecast_run(settings(), Cards(CARD), price=-1.0)


def test_the_time_here_is_made_of_what_was_measured(tmp_path, monkeypatch):
    per = StepSeconds((1e-3,), 0.5, per_byte=1e-9)
    monkeypatch.setattr(forecasting, "measure_step", lambda *_: per)
    monkeypatch.setattr(forecasting.devices, "memory_available", lambda _: 2**34)
    run = settings("bert-tiny", until=Steps(2000), evaluate=Steps(1000), save=None)
    plan = forecast_run(run, "cpu", out=tmp_path)
    assert plan.seconds == {
        "training": pytest.approx(2000 * 8192 * 1e-3),
        "updates": 1000.0,
        "exchange": 0.0,
        "evaluation": pytest.approx(2 * 200_000 * 1e-3 / 3),
        "checkpoints": pytest.approx(12e-9 * plan.parameters),
    }
    assert plan.rate == pytest.approx(2000 * 8192 / (2000 * 8.192 + 1000))
    assert plan.assumed == ()


def test_phases_count_by_what_they_read(monkeypatch):
    """Nine tenths of the updates, of the tokens or of the time at 128 tokens, the rest at 512."""
    monkeypatch.setattr(forecasting, "measure_step", lambda *_: StepSeconds((1e-3, 2e-3), 1.0))
    monkeypatch.setattr(forecasting.devices, "memory_available", lambda _: 2**34)
    run = dataclasses.replace(
        settings("bert-tiny"), batch=ExampleBudget(100),
        phases=(PretrainPhase(128, 0.9), PretrainPhase(512, 0.1)),
    )  # fmt: skip

    def plan(until: Any, **more: Any) -> forecasting.RunForecast:
        training = dataclasses.replace(run.training, until=until, **more)
        changed = dataclasses.replace(run, training=training)
        return forecast_run(changed, "cpu", corpus_tokens=1e6)

    steps, tokens = plan(Steps(1000)), plan(Tokens(64_000_000))
    assert steps.tokens == 900 * 12_800 + 100 * 51_200
    assert steps.seconds["training"] == pytest.approx(900 * 12.8 + 100 * 102.4)
    assert tokens.updates == 4500 + 125
    assert tokens.seconds["training"] == pytest.approx(57_600 + 12_800)
    hours = plan(Hours(10.0), evaluate=None)  # an update takes 13.8 or 103.4 s
    assert hours.updates == math.ceil(32_400 / 13.8 + 3600 / 103.4)
    per = [3 * objective_flops(run.objective, run.encoder, length) for length in (128, 512)]
    read = [900 * 12_800, 100 * 51_200]
    mean = (per[0] * read[0] + per[1] * read[1]) / sum(read)
    assert steps.operations_per_token == pytest.approx(mean)


def test_what_is_done_by_epochs_or_with_each_evaluation_is_counted():
    run = settings(until=Epochs(2.0), evaluate=Epochs(0.1), save=Epochs(0.5))
    assert forecast_run(run, Cards(CARD), corpus_tokens=1e9).checkpoints == 4
    best = dataclasses.replace(run.training, keep=Keep(best=Best("held-out/loss/masked", "lowest")))
    kept = forecast_run(dataclasses.replace(run, training=best), Cards(CARD), corpus_tokens=1e9)
    assert kept.checkpoints == 20
    once = dataclasses.replace(run.training, evaluate=None)
    other = forecast_run(dataclasses.replace(run, training=once), Cards(CARD), corpus_tokens=1e9)
    assert kept.seconds["evaluation"] == pytest.approx(20 * other.seconds["evaluation"])


TINY = EncoderConfig(100, 32, 2, 2, 64)


@pytest.mark.parametrize("recipe", ["modern", "electra", "albert", "spanbert", "deberta_v3"])
def test_a_step_of_any_recipe_can_be_measured(recipe, tmp_path):
    run = RECIPES[recipe](TINY)
    phases = tuple(PretrainPhase(32, phase.share) for phase in run.phases)
    run = dataclasses.replace(run, phases=phases)
    per = measure_step(run, CPU, tmp_path)
    assert len(per.per_token) == len(run.phases)
    assert all(0 < seconds < 1 for seconds in per.per_token)
    assert 0 < per.update < 10
    assert per.per_byte > 0
    assert [*tmp_path.iterdir()] == []


def command(*words: object) -> None:
    run_line("plan", *words)


def test_the_command_prints_tables_or_one_object(corpus, capsys):
    words = ("bert-tiny", "--corpus", corpus.folder, "--hardware", "H100", "--price", 3)
    command(*words)
    shown = capsys.readouterr().out
    assert "A run on NVIDIA H100 SXM" in shown
    assert "placement: single, because there is one rank: a step takes " in shown
    names = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert {"updates", "time: updates", "checkpoints", "time in all"} <= {*names}
    assert len(names) == len({*names})
    assert "assumed: 25% of 989 TFLOP/s" in shown
    command(*words, "--ranks", 2, "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["tokens"] == corpus.manifest.counts.tokens
    assert values["placement"] == "replicated"
    parts = ("weights", "gradients", "optimizer", "activations", "gathered")
    assert values["memory"]["total"] == sum(values["memory"][name] for name in parts)
    assert values["cost"] == pytest.approx(3 * 2 * values["seconds"]["total"] / 3600)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bert-base",), r"training\.until: .* of a corpus, and none is named\n  Give --tokens N"),
        (("bert-base", "--tokens", "0"), "tokens: must be at least 1, not 0.0"),
        (("bert-base", "--tokens", "1e9", "--hardware", "h10"), r"no card 'h10'.*\n.*'h100'"),
        (("bert-base", "--tokens", "1e9", "--ranks", "2"), "ranks: is for cards"),
        (("bert-base", "--tokens", "1e9", "--utilisation", "0.4"), "utilisation: is for cards"),
        (("bert-base", "--tokens", "1e9", "--hardware", "l4", "--utilisation", "2"), "must be above 0 and at most 1"),
        (("bert-base", "--tokens", "1e9", "--hardware", "l4", "--device", "cpu"), "device: is of this"),
        (("bert-base", "until=1h", "--until", "2h", "--hardware", "l4"), "until: is given as an option and"),
        (("bert-base", "--tokens", "1e9", "--hardware", "l4", "--ranks", "0"), "ranks: must be at least 1"),
        (("bert-base", "--tokens", "1e9", "--recipe", "soup"), "recipe: unknown recipe 'soup'"),
        (("bert-bse", "--tokens", "1e9"), "did you mean 'bert-base'"),
        (("bert-base", "--corpus", "nowhere"), "nowhere"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(words, message):
    with pytest.raises((ConfigError, DataError, ResourceError), match=message):
        command(*words)
