"""Layers that are trained in place of others: low-rank changes by the paper's formula, and scores in their own units."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import bothways
from bothways.core.errors import ConfigError
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.lora import LoRA, LoRALinear, ScaledLinear, add_changes, merge_changes
from bothways.finetuning.prepare import prepare_run
from bothways.finetuning.run import finetune
from bothways.finetuning.stability import Stability
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction.opening import open_task
from bothways.tasks.base import OutputScale
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.training import step_cost as machine
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Steps
from small_models import SHAPES, batch_for
from spread import in_turn
from toy_folder import VOCABULARY, file_settings, make_data
from toy_task import fit_task

FAST = dataclasses.replace(
    finetune_adam(), until=Steps(60), evaluate=Steps(30), optimizer=AdamW(lr=1e-2), precision="fp32"
)


@pytest.fixture
def settings(folder, tmp_path) -> FinetuneConfig:
    return file_settings(folder, tmp_path, 96, 40, training=FAST, lora=LoRA(rank=2, alpha=4.0))


def moved(module: nn.Module) -> None:
    """Give the changes, which begin at zero, an effect."""
    for part in module.modules():
        if isinstance(part, LoRALinear):
            nn.init.normal_(part.out, std=2.0)


@pytest.mark.parametrize(
    ("stacked", "changed"), [(1, (0,)), (3, (0, 1, 2)), (3, (0, 2)), (2, (0, 1))]
)
@pytest.mark.parametrize("bias", [True, False])
def test_the_formula_of_the_paper(stacked, changed, bias):
    """h = W₀ x + (α / r) · B A x (Hu et al. 2021, equation 3), for each of the stacked matrices."""
    torch.manual_seed(stacked + len(changed))
    linear = nn.Linear(10, 6 * stacked, bias).double()
    layer = LoRALinear(linear, LoRA(rank=4, alpha=6.0), stacked, changed)
    x = torch.randn(2, 5, 10, dtype=torch.float64)
    assert torch.equal(layer(x), linear(x))
    moved(layer)
    weight = linear.weight.detach().clone()
    for at, number in enumerate(changed):
        a, b = layer.into.detach()[4 * at : 4 * at + 4], layer.out.detach()[at]
        weight[6 * number : 6 * number + 6] += 6.0 / 4 * b @ a
    expected = nn.functional.linear(x, weight, linear.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    merged = layer.merged()
    assert type(merged) is nn.Linear
    torch.testing.assert_close(merged.weight.detach(), weight, rtol=1e-13, atol=1e-13)
    assert merged.bias is linear.bias


@pytest.mark.parametrize(
    ("name", "lora"),
    in_turn([(name,) for name in SHAPES], [LoRA(2), LoRA(3, matrices="query_value")], [*SHAPES]),
)
def test_each_family_is_changed_and_merged(name, lora):
    config = SHAPES[name]
    torch.manual_seed(0)
    if not isinstance(config, EncoderConfig):
        with pytest.raises(ConfigError, match=r"^lora: changes the matrices of attention"):
            add_changes(Model(config, ()), lora, 0)
        return
    model = Model(config, (PoolerHead(), LabelHead(3))).double().eval()
    batch, before = batch_for(config), model.state_dict()
    plain = model.encoder(batch).last
    state = torch.get_rng_state()
    add_changes(model, lora, 0)
    assert torch.equal(torch.get_rng_state(), state)
    trained = {key for key, weight in model.named_parameters() if weight.requires_grad}
    new = model.state_dict().keys() - before.keys()
    assert trained == new | {key for key in before if key.startswith("heads.")}
    torch.testing.assert_close(model.encoder(batch).last, plain)
    moved(model)
    changed = model.encoder(batch).last
    assert not torch.allclose(changed, plain, atol=1e-2)
    changed.square().sum().backward()
    reached = {key for key, weight in model.named_parameters() if weight.grad is not None}
    assert reached == new
    merge_changes(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    torch.testing.assert_close(model.encoder(batch).last, changed, rtol=1e-7, atol=1e-7)
    ends = {key.split(".")[-2] for key in after if not torch.equal(after[key], before[key])}
    grouped = config.key_value_heads is not None
    low = {"query", "key_value"} if grouped else {"qkv", "global_qkv"}
    every = {*low, "out", "up", "down"} - {"global_qkv"}
    assert ends <= low if lora.matrices == "query_value" else ends >= every


def test_a_run_saves_a_usual_folder(settings, folder, tmp_path):
    done = finetune(settings, tmp_path / "run", device="cpu")
    assert done.metrics["accuracy"] > 0.9
    places = folder, tmp_path / "run/model"
    start, end = (load_model(place).model.encoder.state_dict() for place in places)
    changed = {key for key, value in end.items() if not torch.equal(value, start[key])}
    assert changed == {
        f"blocks.{block}.{name}.weight"
        for block in range(2)
        for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }
    text = "the film was great"
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model").eval()
    predictor = open_task(tmp_path / "run/model")
    ids = torch.tensor([[2, *load_model(tmp_path / "run/model").tokenizer.encode(text), 3]])
    expected = theirs(ids).logits.detach().softmax(-1)[0]
    found = predictor(text).probabilities
    for label, number in theirs.config.label2id.items():
        assert abs(found[label] - float(expected[number])) < 1e-6
    card = (tmp_path / "run/model/README.md").read_text()
    assert "| lora | rank 2, alpha 4.0, matrices all |" in card


def test_the_forecast_of_memory_counts_what_is_trained(settings, monkeypatch):
    loads = []
    real = machine.check_machine
    monkeypatch.setattr(
        "bothways.finetuning.prepare.check_machine",
        lambda load, *rest: loads.append(load) or real(load, *rest),
    )
    for each in (settings, dataclasses.replace(settings, lora=None)):
        prepare_run(each, None, torch.device("cpu"))
    low, full = (load.memory(torch.device("cpu")) for load in loads)
    assert low.weights == full.weights
    # Two blocks of A and B for six matrices; the pooler and the label head are trained whole.
    count = 2 * 2 * (4 * (32 + 32) + 2 * (32 + 64)) + 32 * 32 + 32 + 2 * 32 + 2
    assert (low.gradients, low.optimizer) == (4 * count, 8 * count)
    assert full.gradients == full.weights


def test_frozen_parts_have_no_changes():
    model = Model(SHAPES["no dropout"], (PoolerHead(), LabelHead(2)))
    add_changes(model, LoRA(), 0, frozen=2)
    blocks = [
        any(isinstance(m, LoRALinear) for m in block.modules()) for block in model.encoder.blocks
    ]
    assert blocks == [False, *[True] * (len(blocks) - 1)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LoRA(rank=0), r"lora\.rank: must be at least 1, not 0"),
        (lambda: LoRA(alpha=0.0), r"lora\.alpha: must be above 0, not 0\.0"),
        (lambda: LoRA(alpha=float("nan")), r"lora\.alpha: must be above 0, not nan"),
        (
            lambda: FinetuneConfig(lora=LoRA(), stability=Stability(reinitialise=1)),
            r"stability\.reinitialise: changes the encoder's own weights",
        ),
        (
            lambda: FinetuneConfig(lora=LoRA(), stability=Stability(pull=0.5)),
            r"stability\.pull: changes the encoder's own weights",
        ),
        (
            lambda: FinetuneConfig(lora=LoRA(adapter_only=True), task=SentenceEmbeddingTask()),
            r"lora\.adapter_only: is not for embed",
        ),
    ],
)
def test_settings_that_are_refused(build, message):
    assert FinetuneConfig(lora=LoRA(), task=SentenceEmbeddingTask()).lora == LoRA()
    with pytest.raises(ConfigError, match=f"^{message}"):
        build()


def test_random_weights_are_refused(tmp_path):
    config = EncoderConfig(len(VOCABULARY), 16, 1, 2, 32, position=Learned(32))
    method = FinetuneConfig(FAST, 16, lora=LoRA())
    with pytest.raises(ConfigError, match=r"^lora: keeps the encoder's weights"):
        fit_task(config, make_data(tmp_path, 40), method, device="cpu")
    only = FinetuneConfig(FAST, 16, lora=LoRA(adapter_only=True))
    with pytest.raises(ConfigError, match=r"^lora\.adapter_only: .* this model is in memory"):
        fit_task(config, make_data(tmp_path, 40), only, device="cpu")
    with pytest.raises(ConfigError, match=r"^start: a model in memory and examples of data\.label"):
        fit_task(config, [{"text": "a", "label": "b"}], method, device="cpu")


WORDS = {"the": 0, "film": 0, "good": 1, "bad": -1, "fine": 1, "dull": -1, "and": 0}


def make_rows(count: int, seed: int) -> list[dict[str, object]]:
    draw = random.Random(seed)
    texts = [draw.choices(list(WORDS), k=5) for _ in range(count)]
    return [
        {"text": " ".join(text), "score": 10_000 + 3000 * sum(WORDS[word] for word in text)}
        for text in texts
    ]


@pytest.mark.parametrize("training", [False, True])
def test_the_merged_layer_computes_the_same(training):
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 1), torch.randn(5, 8)
    scaled = ScaledLinear(plain, OutputScale(1e4, 3e3)).train(training)
    assert dict(scaled.named_parameters()).keys() == {"weight", "bias"}
    expected = (x.double() @ plain.weight.double().T + plain.bias.double()) * 3e3 + 1e4
    torch.testing.assert_close(scaled(x).double(), expected, rtol=1e-6, atol=0)
    merged = scaled.merged()
    assert type(merged) is nn.Linear
    assert merged.training is training
    torch.testing.assert_close(merged(x).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 2}}], ids=["", "lora"])
def test_scores_far_from_0_are_learned_and_saved_in_a_usual_head(folder, tmp_path, settings):
    done = bothways.finetune(
        str(folder), train=make_rows(160, 0), dev=make_rows(40, 1), out=tmp_path / "run",
        task=RegressionTask(), until="40 steps", lr=1e-2, length=16, progress=False,
        **settings,
    )  # fmt: skip
    assert done.metrics["mse"] < done.baseline["mse"] / 3
    assert any("the head learns them in these units" in each.what for each in done.findings)
    texts = [str(row["text"]) for row in make_rows(6, 2)]
    own = [each.score for each in done.predictor()(texts)]
    again = bothways.load(tmp_path / "run")
    np.testing.assert_allclose([each.score for each in again(texts)], own, rtol=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    with torch.no_grad():
        theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    np.testing.assert_allclose(theirs.numpy(), own, rtol=1e-5)
