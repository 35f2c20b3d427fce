"""GPT-BERT: its losses by the formula in float64, its draws, runs that are cut and resumed, and its folder in transformers."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from bothways.core.batch import pack
from bothways.core.errors import ConfigError
from bothways.core.sequence import Sequence
from bothways.core.source import rng
from bothways.data.corpus import Corpus
from bothways.data.loader import ExampleBudget
from bothways.data.masking import Masking, Vocabulary
from bothways.hub.model_folder import load_model
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.model import Model, recorded_attentions
from bothways.objectives.gpt_bert import GPTBERT
from bothways.objectives.masked_lm import MaskedLM
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.evaluation import scored_objective
from bothways.pretraining.forecast import predicted_share
from bothways.pretraining.run import pretrain
from bothways.training.loop import weighted_sum
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear, Steps
from toy_training import enter_ranks, on_ranks

SIZE, SPECIAL = 40, np.arange(40) < 5
VOCABULARY = Vocabulary(SPECIAL, np.zeros(SIZE, bool), 4)
CONFIG = EncoderConfig(
    SIZE, 16, 2, 2, 24, segments=2, dropout=Dropouts(0.0, 0.0), initial_range=0.4
)


def draw_sequences(objective, lengths=(9, 3, 12, 7, 12, 5), seed=0):
    draw = np.random.default_rng(seed)
    plain = [
        Sequence(np.array([2, *draw.integers(5, SIZE, n - 2), 3], np.int32), np.zeros(n, np.int8))
        for n in lengths
    ]
    return [objective.prepare(s, VOCABULARY, rng(seed, "t", index=i)) for i, s in enumerate(plain)]


def layer_norm(x, module):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + module.eps) * module.weight + module.bias


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def formula(model, sequences):
    """Sums of both losses and their normalisers² over padded rows, in plain torch."""
    encoder, head, longest = model.encoder, model.heads["masked"], max(map(len, sequences))
    totals, squares = dict.fromkeys(("masked", "next"), 0.0), dict.fromkeys(("masked", "next"), 0.0)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    seen = torch.zeros(len(sequences), longest, longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        n = len(sequence)
        ids[row, :n] = torch.from_numpy(sequence.ids.astype(np.int64))
        seen[row, :, :n] = True
        if sequence.causal:
            seen[row] &= torch.ones(longest, longest, dtype=torch.bool).tril()
    e = encoder.embedding
    x = e.token.weight[ids] + e.segment.weight[0] + e.position.weight[:longest]
    x = layer_norm(x, e.norm)
    for block in encoder.blocks:
        q, k, v = (
            (x @ w.T + b).view(len(sequences), longest, 2, 8).transpose(1, 2)
            for w, b in zip(
                block.attention.qkv.weight.chunk(3), block.attention.qkv.bias.chunk(3), strict=True
            )
        )
        scores = (q @ k.mT / 8**0.5).masked_fill(~seen[:, None], -1e300)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out, up, down = block.attention.out, block.mlp.up, block.mlp.down
        x = layer_norm(x + mixed @ out.weight.T + out.bias, block.attention_norm)
        inner = gelu(x @ up.weight.T + up.bias)
        x = layer_norm(x + inner @ down.weight.T + down.bias, block.mlp_norm)
    h = layer_norm(gelu(x @ head.dense.weight.T + head.dense.bias), head.norm)
    logits = h @ e.token.weight.T + head.bias
    for row, sequence in enumerate(sequences):
        for name in totals:
            target = sequence.targets[name]
            for place, id in zip(target.index.tolist(), target.ids.tolist(), strict=True):
                normaliser = logits[row, place - 1].logsumexp(0)
                totals[name] = totals[name] + normaliser - logits[row, place - 1, id]
                squares[name] = squares[name] + normaliser**2
    return totals, squares


def make_module(objective):
    torch.manual_seed(4)
    module = objective.training_module(
        {role: Model(*spec) for role, spec in objective.models(CONFIG).items()}, VOCABULARY
    )
    return module.double()


@pytest.mark.parametrize("training", [False, True])
def test_losses_and_gradients_are_those_of_the_formula(training):
    objective = GPTBERT(masking=Masking(0.4), causal=0.4, z_loss=0.1)
    sequences = draw_sequences(objective)
    assert {s.causal for s in sequences} == {False, True}
    module = make_module(objective).train(training)
    batch = pack(sequences)
    losses, weights = module(batch), module.weights(batch)
    totals, squares = formula(module.model, sequences)
    for name in totals:
        torch.testing.assert_close(losses[name].total, totals[name], rtol=1e-11, atol=0)
        torch.testing.assert_close(losses[f"z/{name}"].total, squares[name], rtol=1e-11, atol=0)
        assert (
            weights[name]
            == weights[f"z/{name}"]
            == sum(len(s.targets[name].ids) for s in sequences)
        )
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


def test_a_batch_is_its_sequences_one_by_one():
    objective = GPTBERT(masking=Masking(0.4), causal=0.4)
    sequences = draw_sequences(objective)
    module = make_module(objective)
    together = module(pack(sequences))
    for name in ("masked", "next"):
        parts = [module(pack([sequence]))[name].total for sequence in sequences]
        torch.testing.assert_close(together[name].total, sum(parts), rtol=1e-11, atol=0)


def test_causal_sequences_see_no_later_token_and_others_all():
    objective = GPTBERT(masking=Masking(0.4), causal=0.4)
    sequences = draw_sequences(objective)
    model = make_module(objective).model
    with recorded_attentions(model.encoder) as layers:
        model.encoder(pack(sequences))
    for attentions in layers:
        for sequence, attention in zip(sequences, attentions, strict=True):
            later = attention.triu(1)
            assert (later == 0).all() if sequence.causal else (attention > 0).all()


def test_kinds_are_drawn_by_the_key_and_masks_are_those_of_masked_lm():
    both, masked = GPTBERT(causal=0.3), MaskedLM()
    lengths = (12,) * 2000
    drawn = draw_sequences(both, lengths)
    causal = np.array([s.causal for s in drawn])
    assert abs(causal.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / len(causal))
    for mine, theirs in itertools.islice(
        zip(drawn, draw_sequences(masked, lengths), strict=True), 200
    ):
        if mine.causal:
            assert mine.targets["next"].index.tolist() == list(range(1, 12))
            assert mine.targets["next"].ids.tolist() == mine.ids[1:].tolist()
            assert not len(mine.targets["masked"].ids)
        else:
            assert not len(mine.targets["next"].ids)
            np.testing.assert_array_equal(mine.ids, theirs.ids)
            np.testing.assert_array_equal(
                mine.targets["masked"].index, theirs.targets["masked"].index
            )
    for share, kinds in ((0.0, {False}), (1.0, {True})):
        assert {s.causal for s in draw_sequences(GPTBERT(causal=share))} == kinds


def test_what_cannot_be_read_from_left_to_right_is_refused():
    with pytest.raises(ConfigError, match=r"objective\.causal: must be in \[0, 1\], not 1\.5"):
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


def settings_for(corpus, steps=4, **changes):
    shape = dataclasses.replace(
        fit_to_corpus(preset("bert-mini"), corpus.tokenizer),
        width=32, depth=2, heads=2, intermediate_size=64,
    )  # fmt: skip
    training = Training(Steps(steps), AdamW(lr=1e-3), Linear(0.1), precision="fp32", save=Steps(2))
    config = PretrainConfig(
        shape, training, GPTBERT(causal=0.4, z_loss=1e-4), (PretrainPhase(48),),
        ExampleBudget(8), held_out=0.1, evaluation_tokens=2000,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def test_a_run_is_the_same_in_other_microbatches_and_after_a_resume(corpus, tmp_path):
    settings = settings_for(corpus)
    plain = dataclasses.replace(settings.encoder, dropout=Dropouts(0.0, 0.0))
    whole = pretrain(dataclasses.replace(settings, encoder=plain), corpus)
    cut = pretrain(dataclasses.replace(settings, encoder=plain, microbatch_tokens=60), corpus)
    names = {"held-out/loss/masked", "held-out/loss/next", "held-out/perplexity/next"}
    assert names <= whole.metrics.keys()
    assert "held-out/perplexity" not in whole.metrics
    for name in names:
        assert cut.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5)

    def stop(event):
        if event.kind == "checkpoint" and event.progress.steps == 2:
            raise KeyboardInterrupt

    unbroken = pretrain(settings_for(corpus), corpus, tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        pretrain(settings_for(corpus), corpus, tmp_path / "run", on_event=stop)
    resumed = pretrain(settings_for(corpus), corpus, tmp_path / "run", resume=True)
    assert resumed.metrics == unbroken.metrics
    for name, tensor in unbroken.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def share_a_run(rank: int, world: int, port: int, settings: PretrainConfig, source, folder) -> None:
    enter_ranks(rank, world, port)
    pretrain(settings, Corpus.open(source), folder)


def test_two_ranks_train_as_one(corpus, tmp_path):
    settings = settings_for(corpus)
    plain = dataclasses.replace(settings.encoder, dropout=Dropouts(0.0, 0.0))
    settings = dataclasses.replace(settings, encoder=plain)
    on_ranks(2, share_a_run, settings, corpus.folder, tmp_path / "run")
    alone, shared = pretrain(settings, corpus), load_model(tmp_path / "run" / "model")
    for name, value in alone.metrics.items():
        assert shared.extra["metrics"][name] == pytest.approx(value, rel=1e-5), name


def test_the_folder_opens_in_transformers_both_ways(corpus, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    pretrain(settings_for(corpus), corpus, tmp_path / "run")
    folder = tmp_path / "run" / "model"
    loaded = load_model(folder).model
    assert loaded.config.readout.shifted
    masked, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert type(masked).__name__ == "BertForMaskedLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    causal = AutoModelForCausalLM.from_pretrained(folder, is_decoder=True)
    for causally, theirs in ((False, masked.eval()), (True, causal.eval())):
        ids = np.array([2, 7, 4, 9, 10, 3], np.int32)
        sequence = Sequence(ids, np.zeros(6, np.int8), causal=causally)
        batch = pack([sequence])
        with torch.no_grad():
            mine = loaded(batch, heads=["masked"]).logits["masked"]
            expected = theirs(batch.ids[None], token_type_ids=batch.segments[None]).logits[0]
        # The outputs at a position are for the token after it
        torch.testing.assert_close(mine[1:], expected[:-1], rtol=1e-4, atol=1e-5)
    assert scored_objective(str(folder)) == GPTBERT().evaluated


def test_a_bert_continues_as_a_gpt_bert(corpus, tmp_path):
    settings = settings_for(corpus, steps=1)
    pretrain(dataclasses.replace(settings, objective=MaskedLM()), corpus, tmp_path / "bert")
    bert = tmp_path / "bert" / "model"
    assert not load_model(bert).model.config.readout.shifted
    done = pretrain(dataclasses.replace(settings, start=str(bert)), corpus)
    assert done.model.config.readout.shifted


def test_predictions_are_forecast():
    assert predicted_share(GPTBERT(masking=Masking(0.2), causal=0.25)) == 0.25 + 0.75 * 0.2
