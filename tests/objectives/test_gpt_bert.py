"""GPT-BERT: its losses by the formula in float64, its draws, runs that are cut and resumed, and its folder in transformers."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from bothways.core.batch import pack
from bothways.core.errors import ConfigError
from bothways.core.source import Sequence
from bothways.data.corpus import Corpus
from bothways.data.masking import Masking
from bothways.hub.model_folder import load_model
from bothways.model.attention.patterns import Causal
from bothways.model.config import Dropouts, EncoderConfig, Readout
from bothways.model.families.catalogue import preset
from bothways.model.model import Encoder
from bothways.objectives.gpt_bert import GPTBERT
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.evaluation import scored_objective
from bothways.pretraining.forecast import predicted_share
from bothways.pretraining.run import pretrain
from bothways.training.loop import weighted_sum
from toy_objective import SIZE, build_module, check_resume, draw_sequences, short_run
from toy_training import check_splits, enter_ranks, on_ranks

CONFIG = EncoderConfig(
    SIZE, 16, 2, 2, 24, segments=2, dropout=Dropouts(0.0, 0.0), initial_range=0.4
)
LENGTHS = (9, 3, 12, 7, 12, 5)


def formula(model, sequences):
    """Sums of both losses and of their normalisers², each sequence alone; causal ones by a causal encoder."""
    causal = Encoder(dataclasses.replace(CONFIG, patterns=(Causal(),)))
    weights = dict(model.encoder.named_parameters())
    totals, squares = Counter(), Counter()
    for sequence in sequences:
        batch = pack([Sequence(sequence.ids, sequence.segments)])
        hidden = (
            functional_call(causal, weights, batch) if sequence.causal else model.encoder(batch)
        )
        logits = model.heads["masked"](hidden.last, hidden.table)
        for name in ("masked", "next"):
            target = sequence.targets[name]
            rows = logits[torch.from_numpy(target.index) - 1]
            totals[name] += F.cross_entropy(rows, torch.from_numpy(target.ids), reduction="sum")
            squares[name] += rows.logsumexp(1).square().sum()
    return totals, squares


@pytest.mark.parametrize("training", [False, True])
def test_losses_and_gradients_are_those_of_the_formula(training):
    objective = GPTBERT(masking=Masking(0.4), causal=0.4, z_loss=0.1)
    sequences = draw_sequences(objective, LENGTHS)
    assert {s.causal for s in sequences} == {False, True}
    module = build_module(objective, CONFIG).double().train(training)
    batch = pack(sequences)
    losses, weights = module(batch), module.weights(batch)
    totals, squares = formula(module.model, sequences)
    for name in totals:
        torch.testing.assert_close(losses[name].total, totals[name], rtol=1e-11, atol=0)
        torch.testing.assert_close(losses[f"z/{name}"].total, squares[name], rtol=1e-11, atol=0)
        count = sum(len(s.targets[name].ids) for s in sequences)
        assert weights[name] == weights[f"z/{name}"] == count
    loss = weighted_sum(losses, weights, module.coefficients)
    expected = sum(
        share * (totals[name] + 0.1 * squares[name]) / weights[name]
        for name, share in (("masked", 0.6), ("next", 0.4))
    )
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    parameters = list(module.parameters())
    mine = torch.autograd.grad(loss, parameters, materialize_grads=True)
    theirs = torch.autograd.grad(expected, parameters, materialize_grads=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)
    check_splits(module, sequences)


def test_a_vector_that_both_heads_read_has_both_gradients(monkeypatch):
    """The token after [CLS] is predicted from its vector, which the head of pairs reads, too."""
    objective = MaskedLMNextSentence(masking=Masking(0.4))
    module = build_module(objective, dataclasses.replace(CONFIG, readout=Readout(shifted=True)))
    batch = pack(draw_sequences(objective, LENGTHS))

    def gradients() -> tuple[torch.Tensor, ...]:
        loss = weighted_sum(module.double()(batch), module.weights(batch), {})
        return torch.autograd.grad(loss, [*module.parameters()], materialize_grads=True)

    few, forward = gradients(), Encoder.forward
    monkeypatch.setattr(Encoder, "forward", lambda encoder, batch, only: forward(encoder, batch))
    for a, b in zip(few, gradients(), strict=True):
        torch.testing.assert_close(a, b)


def test_kinds_are_drawn_by_the_key_and_masks_are_those_of_masked_lm():
    both, masked = GPTBERT(causal=0.3), MaskedLM()
    drawn = draw_sequences(both, (12,) * 600)
    causal = np.array([s.causal for s in drawn])
    assert abs(causal.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / len(causal))
    for mine, theirs in zip(drawn, draw_sequences(masked, (12,) * 200), strict=False):
        if mine.causal:
            assert mine.targets["next"].index.tolist() == list(range(1, 12))
            assert mine.targets["next"].ids.tolist() == mine.ids[1:].tolist()
            assert not len(mine.targets["masked"].ids)
        else:
            assert not len(mine.targets["next"].ids)
            np.testing.assert_array_equal(mine.ids, theirs.ids)
            indices = (each.targets["masked"].index for each in (mine, theirs))
            np.testing.assert_array_equal(*indices)
    for share, kinds in ((0.0, {False}), (1.0, {True})):
        assert {s.causal for s in draw_sequences(GPTBERT(causal=share), LENGTHS)} == kinds


def test_what_cannot_be_read_from_left_to_right_is_refused():
    with pytest.raises(ConfigError, match=r"objective\.causal: must be from 0 to 1, not 1\.5"):
        GPTBERT(causal=1.5)
    for name, reason in (
        ("longformer-base-4096", "global tokens"),
        ("bigbird-roberta-base", "blocks"),
        ("deberta-v2-xlarge", "a convolution of n-grams"),
    ):
        with pytest.raises(ConfigError, match=reason):
            GPTBERT().models(preset(name))
    with pytest.raises(ConfigError, match="reads from left to right"):
        GPTBERT().models(preset("gpt2"))


OBJECTIVE = GPTBERT(causal=0.4, z_loss=1e-4)


@pytest.fixture(scope="module")
def unbroken(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return folder, pretrain(short_run(corpus, OBJECTIVE, "bert-mini"), corpus, folder)


def test_a_run_is_the_same_after_a_resume(unbroken, corpus, tmp_path):
    settings = short_run(corpus, OBJECTIVE, "bert-mini")
    check_resume(settings, corpus, tmp_path / "run", unbroken[1])


def share_a_run(rank: int, world: int, port: int, settings: PretrainConfig, source, folder) -> None:
    enter_ranks(rank, world, port)
    pretrain(settings, Corpus.open(source), folder)


def test_two_ranks_in_microbatches_train_as_one(corpus, tmp_path):
    settings = short_run(corpus, OBJECTIVE, "bert-mini", dropout=Dropouts(0.0, 0.0))
    whole = pretrain(settings, corpus)
    names = {"held-out/loss/masked", "held-out/loss/next", "held-out/perplexity/next"}
    assert names <= whole.metrics.keys()
    assert "held-out/perplexity" not in whole.metrics
    parts = dataclasses.replace(settings, microbatch_tokens=60)
    on_ranks(2, share_a_run, parts, corpus.folder, tmp_path / "run")
    shared = load_model(tmp_path / "run" / "model")
    for name, value in whole.metrics.items():
        assert shared.extra["metrics"][name] == pytest.approx(value, rel=1e-5), name


def test_the_folder_opens_in_transformers_both_ways(unbroken):
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    folder = unbroken[0] / "model"
    loaded = load_model(folder).model
    assert loaded.config.readout.shifted
    masked, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert type(masked).__name__ == "BertForMaskedLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    causal = AutoModelForCausalLM.from_pretrained(folder, is_decoder=True)
    for causally, theirs in ((False, masked.eval()), (True, causal.eval())):
        ids = np.array([2, 7, 4, 9, 10, 3], np.int32)
        batch = pack([Sequence(ids, np.zeros(6, np.int8), causal=causally)])
        with torch.no_grad():
            mine = loaded(batch, heads=["masked"]).logits["masked"]
            expected = theirs(batch.ids[None], token_type_ids=batch.segments[None]).logits[0]
        # The outputs at a position are for the token after it
        torch.testing.assert_close(mine[1:], expected[:-1], rtol=1e-4, atol=1e-5)
    assert scored_objective(str(folder)) == GPTBERT(causal=0.5)


def test_a_bert_continues_as_a_gpt_bert(corpus, tmp_path):
    settings = short_run(corpus, OBJECTIVE, "bert-mini", steps=1)
    pretrain(dataclasses.replace(settings, objective=MaskedLM()), corpus, tmp_path / "bert")
    bert = tmp_path / "bert" / "model"
    assert not load_model(bert).model.config.readout.shifted
    done = pretrain(dataclasses.replace(settings, start=str(bert)), corpus)
    assert done.model.config.readout.shifted


def test_predictions_are_forecast():
    assert predicted_share(GPTBERT(masking=Masking(0.2), causal=0.25)) == 0.25 + 0.75 * 0.2
