"""Masked LM on replaced tokens: the likelihood by its formula, which tokens count, and runs in memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bothways.core.batch import pack
from bothways.core.keyed_rng import rng
from bothways.core.sequence import Sequence
from bothways.data.batching import ExampleBudget
from bothways.data.corpus import Corpus
from bothways.data.masking import Vocabulary
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.model import Model
from bothways.objectives import replaced_lm
from bothways.objectives.replaced_lm import ReplacedLM, ReplacedLMModule, restored
from bothways.objectives.replaced_tokens import GeneratorObjective, ReplacedTokens
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.run import pretrain
from bothways.training.durations import Steps
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear

SIZE = 50
VOCABULARY = Vocabulary(np.arange(SIZE) < 5, np.arange(SIZE) > 40, 4)


def shape_of(vocab: int = SIZE) -> EncoderConfig:
    small = preset("electra-small-discriminator")
    assert isinstance(small, EncoderConfig)
    return dataclasses.replace(
        small, vocab=vocab, width=16, depth=1, heads=2, intermediate_size=16, embedding=8
    )


def build_training_module(objective: ReplacedLM) -> ReplacedLMModule:
    torch.manual_seed(0)
    models = {role: Model(*spec) for role, spec in objective.models(shape_of()).items()}
    training_module = objective.training_module(models, VOCABULARY)
    for parameter in training_module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return training_module.double().eval()


def sequences(objective: GeneratorObjective, count: int = 4) -> list[Sequence]:
    r, result = np.random.default_rng(4), []
    for number in range(count):
        ids = np.array([2, *r.integers(5, SIZE, size=r.integers(8, 30)), 3], np.int32)
        text = Sequence(ids, np.zeros(len(ids), np.int8))
        result.append(objective.prepare(text, VOCABULARY, rng(number, "test")))
    return result


def test_the_likelihood_is_the_formula() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 9, dtype=torch.double, requires_grad=True)
    scores = torch.randn(6, dtype=torch.double, requires_grad=True)
    original, given = torch.tensor([0, 3, 8, 2, 2, 5]), torch.tensor([0, 3, 1, 2, 7, 4])
    copy, plain = torch.sigmoid(-scores), logits.softmax(1)
    rows = [
        copy[i] * (given[i] == original[i]) + (1 - copy[i]) * plain[i, original[i]]
        for i in range(6)
    ]
    expected = torch.stack(rows).log().sum()
    found = restored(logits, scores, given == original, original)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(expected, (logits, scores))
    for ours, theirs in zip(torch.autograd.grad(found, (logits, scores)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("judged", ["all", "masked"])
@pytest.mark.parametrize("chunk", [2 * SIZE, None])
def test_the_loss_is_of_the_original_tokens(
    judged: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk is not None:
        tuning = dataclasses.replace(replaced_lm.TUNING, loss_chunk_elements_cpu=chunk)
        monkeypatch.setattr(replaced_lm, "TUNING", tuning)
    objective = ReplacedLM(judged=judged)  # type: ignore[arg-type]
    training_module = build_training_module(objective)
    batch = pack(sequences(objective))
    read = []
    hook = training_module.model.encoder.register_forward_pre_hook(
        lambda module, arguments: read.append(arguments[0])
    )
    losses = training_module(batch)
    hook.remove()
    (changed,) = read
    masked = batch.targets["masked"]
    index = torch.as_tensor(masked.index)
    original = batch.ids.index_copy(0, index, torch.as_tensor(masked.ids))
    assert (changed.ids[index] != batch.ids[index]).any(), "masks have been replaced"
    assert (changed.ids != original).any()
    hidden = training_module.model.encoder(changed)
    plain = training_module.model.heads["masked"](hidden.last, hidden.table).softmax(1)
    if judged == "all":
        copy = torch.sigmoid(-training_module.model.heads["replaced"](hidden.last, changed.layout))
        p = (1 - copy) * plain.gather(1, original[:, None])[:, 0]
        p = p + copy * (changed.ids == original)
    else:
        assert set(training_module.model.heads) == {"masked"}
        p = plain.gather(1, original[:, None])[index, 0]
    assert training_module.weights(batch)["replaced"] == len(p)
    torch.testing.assert_close(losses["replaced"].total, -p.log().sum(), rtol=1e-9, atol=0)
    (losses["replaced"].total / len(p)).backward()
    assert all(
        each.grad is not None and each.grad.abs().sum() > 0
        for each in training_module.model.encoder.blocks.parameters()
    )
    generator = training_module.generator.encoder
    assert generator.embedding.token is training_module.model.encoder.embedding.token
    assert all(each.grad is None for each in generator.blocks.parameters())


def test_a_discriminator_may_judge_the_masked_tokens_alone() -> None:
    for judged in ("all", "masked"):
        objective = ReplacedTokens(judged=judged)  # type: ignore[arg-type]
        for each in sequences(objective):
            targets = each.targets["replaced"]
            wanted = each.targets["masked"].index if judged == "masked" else range(len(each))
            assert targets.judged.tolist() == list(wanted)
            assert len(targets.draws) == len(each.targets["masked"].ids)


@pytest.mark.parametrize(
    "objective", [ReplacedLM(), ReplacedLM(judged="masked"), ReplacedTokens(judged="masked")]
)
def test_it_is_pre_trained(objective: GeneratorObjective, corpus: Corpus) -> None:
    encoder = fit_to_corpus(shape_of(), corpus.tokenizer)
    training = Training(Steps(12), AdamW(lr=1e-2), Linear(0.1), precision="fp32")
    settings = PretrainConfig(
        encoder, training, objective, (PretrainPhase(32),), ExampleBudget(16),
        held_out=0.1, evaluation_tokens=500, evaluation_masking=objective.masking,
    )  # fmt: skip
    done = pretrain(settings, corpus, device="cpu")
    assert done.metrics["held-out/loss/masked"] < done.metrics["unigram/loss/masked"] * 1.2
    assert np.isfinite(done.metrics["held-out/loss/replaced"])
    assert set(done.training_module.saved()) == {"model", "generator"}
