"""Optimizers of whole matrices, average, z-loss, ramps and WSD in runs from a corpus to a folder."""

import dataclasses
import itertools
import json

import pytest
import torch

from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError
from bothways.core.source import Cursor
from bothways.core.training_module import TrainingModule
from bothways.data.corpus import Corpus
from bothways.data.loader import TokenRamp
from bothways.data.mixture import Corpora
from bothways.hub.model_folder import load_model
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.masked_lm import MaskedLM
from bothways.pretraining.build import build_models, fit_to_corpus, loader_of, vocabulary_of
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.recipes import modern
from bothways.pretraining.run import pretrain
from bothways.training.checkpoint import checkpoints
from bothways.training.optimizers import AdamW, Lamb, Muon, OptimizerConfig, StableAdamW
from bothways.training.parallel import Single
from bothways.training.run import Event, Training
from bothways.training.schedules import WSD, Cosine, Steps, Tokens

OPTIMIZERS = [Lamb(lr=0.02), StableAdamW(lr=5e-3), Muon(lr=0.02, others=AdamW(lr=5e-3))]


def settings(corpus: Corpus, optimizer: OptimizerConfig, **changes: object) -> PretrainConfig:
    return PretrainConfig(
        EncoderConfig(corpus.tokenizer.size, 32, 2, 2, 64, dropout=Dropouts(0.1, 0.1)),
        Training(
            Tokens(24_000), optimizer, Cosine(0.1), clip_norm=None, ema=0.9, report=Steps(1),
            save=Steps(7),
        ),
        MaskedLM(z_loss=1e-3),
        (PretrainPhase(16, 0.3), PretrainPhase(48, 0.7)),
        TokenRamp(200, 1200, 16_000),
        held_out=0.1,
        evaluation_tokens=1500,
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(
    "optimizer",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in OPTIMIZERS[:-1]), OPTIMIZERS[-1]],
    ids=lambda config: config.kind,
)
def test_a_run_learns_and_resumes_to_equal_weights(optimizer, precision, corpus, tmp_path):
    config = settings(corpus, optimizer)
    exact = dataclasses.replace(config.training, precision=precision)
    config = dataclasses.replace(config, training=exact)

    def cut(event: Event) -> None:
        if event.kind == "checkpoint" and event.progress.steps == 14:
            raise InterruptedError

    try:
        done = pretrain(config, corpus, tmp_path / "whole")
    except ConfigError:
        assert precision == "bf16"
        pytest.skip("this processor has no bf16")
    assert done.metrics["held-out/loss/masked"] < done.metrics["unigram/loss/masked"] - 0.1
    assert 0 < done.metrics["held-out/loss/z"] < 200, "without its coefficient"
    with pytest.raises(InterruptedError):
        pretrain(config, corpus, tmp_path / "cut", on_event=cut)
    again = pretrain(config, corpus, tmp_path / "cut", resume=True)
    assert again.metrics == done.metrics
    saved = [load_model(tmp_path / name / "model").model.state_dict() for name in ("whole", "cut")]
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())
    ours = done.model.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in saved[0].items())


def test_the_average_is_saved_and_the_log_shows_growing_updates(corpus, tmp_path):
    config = settings(corpus, Muon())
    done = pretrain(config, corpus, tmp_path / "run")
    averaged = load_model(tmp_path / "run" / "model").model.state_dict()
    from safetensors.torch import load_file

    stored = load_file(checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    name = "encoder.blocks.0.attention.qkv.weight"
    assert torch.equal(averaged[name], stored[f"average.model/{name.replace('.', '/')}"])
    assert not torch.allclose(averaged[name], stored[f"model.{name}"])
    assert torch.equal(done.model.state_dict()[name], averaged[name])
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    read = [0, *(line["tokens"] for line in lines if "learning_rate" in line)]
    sizes = [after - before for before, after in itertools.pairwise(read)]
    assert max(sizes[:3]) <= 300
    assert max(sizes) > 1100
    assert all("loss/z" in line for line in lines if "learning_rate" in line)


@pytest.mark.parametrize("objective", [MaskedLM(z_loss=0.5), CausalLM(z_loss=0.5)])
def test_the_z_loss_is_a_loss_of_its_own_over_all_predictions(objective, corpus):
    encoder = preset("bert-tiny" if isinstance(objective, MaskedLM) else "gpt2")
    encoder = dataclasses.replace(fit_to_corpus(encoder, corpus.tokenizer), depth=1)
    config = dataclasses.replace(modern(encoder), objective=objective)
    training_module = objective.training_module(
        build_models(config, corpus), vocabulary_of(corpus, objective)
    ).eval()
    plain = dataclasses.replace(objective, z_loss=0.0)
    without = plain.training_module(
        training_module.saved(), vocabulary_of(corpus, objective)
    ).eval()
    documents = {"": corpus.split(0.1, 0)[0]}
    loader = loader_of(config, Corpora.of(corpus, None), documents, Single())
    batch = next(iter(loader.steps(Cursor()))).microbatches[0]
    assert training_module.coefficients == {"z": 0.5}
    assert without.coefficients == {}
    with torch.no_grad():
        losses, others = training_module(batch), without(batch)
    assert losses.keys() == {*others, "z"} == training_module.weights(batch).keys()
    assert all(torch.equal(losses[name].total, loss.total) for name, loss in others.items())
    assert training_module.weights(batch)["z"] == sum(without.weights(batch).values())
    # log Z of a fresh model with small logits is near that of equal logits.
    mean = (losses["z"].total / training_module.weights(batch)["z"]).sqrt().item()
    assert mean == pytest.approx(torch.tensor(corpus.tokenizer.size).log().item(), rel=0.05)


@pytest.mark.parametrize("kind", [MaskedLM, CausalLM])
@pytest.mark.parametrize("coefficient", [-1e-4, float("nan")])
def test_a_z_loss_that_is_subtracted_is_refused(kind, coefficient):
    with pytest.raises(ConfigError, match="must be at least 0") as caught:
        kind(z_loss=coefficient)
    assert caught.value.where == "objective.z_loss"


def test_settings_are_read_from_words_and_files(corpus, tmp_path):
    words = [
        "training.optimizer=muon", "training.optimizer.others.lr=1e-3", "training.ema=0.99",
        "training.schedule.kind=wsd", "training.schedule.shape=sqrt", "objective=masked_lm",
        "objective.z_loss=1e-4", "batch.kind=token_ramp", "batch.start=100", "batch.over=5000",
        "batch.n=1000",
    ]  # fmt: skip
    config = configs.load(PretrainConfig, base=modern(preset("bert-tiny")), overrides=words)
    assert config.training.optimizer == Muon(others=AdamW(lr=1e-3, betas=(0.9, 0.95)))
    assert config.training.schedule == WSD(warmup=0.06, shape="sqrt")  # the recipe's warm-up
    assert config.batch == TokenRamp(100, 1000, 5000)
    (tmp_path / "c.toml").write_text(configs.to_toml(config))
    assert configs.load(PretrainConfig, file=tmp_path / "c.toml") == config


def test_a_module_without_declared_matrices_has_none():
    assert TrainingModule().matrices() == {}
