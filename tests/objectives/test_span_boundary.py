"""The span boundary objective: its targets, its loss by the formula in float64, and a run from start to folder."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bothways.core.batch import pack
from bothways.core.errors import ConfigError
from bothways.core.sequence import Sequence
from bothways.core.source import rng
from bothways.data.corpus import Corpus
from bothways.data.loader import ExampleBudget
from bothways.data.masking import Chosen, Masking, Spans, Vocabulary
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.model import Model
from bothways.objectives.span_boundary import (
    OFFSETS,
    MaskedLMSpanBoundary,
    SpanBoundaryModule,
    _boundaries,
)
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.run import pretrain
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear, Steps

SIZE = 50


def sequence_of(*ids: int) -> Sequence:
    return Sequence(np.array(ids, np.int32), np.zeros(len(ids), np.int8))


def test_targets_by_hand():
    chosen = Chosen(np.array([2, 3, 6]), np.array([0, 0, 1]))
    targets = _boundaries(sequence_of(0, 10, 11, 12, 13, 14, 15, 1), chosen)
    assert targets.left.tolist() == [1, 1, 5]
    assert targets.right.tolist() == [4, 4, 7]
    assert targets.offset.tolist() == [0, 1, 0]
    assert targets.ids.tolist() == [11, 12, 15]


def test_spans_at_an_end_and_places_far_inside_have_no_target():
    """Without [CLS] and [SEP], as a tokenizer may be, a span can touch the ends."""
    text = sequence_of(*range(5, 45))
    assert len(_boundaries(text, Chosen(np.array([0, 1]), np.array([0, 0]))).ids) == 0
    assert len(_boundaries(text, Chosen(np.array([38, 39]), np.array([0, 0]))).ids) == 0
    long = _boundaries(text, Chosen(np.arange(5, 35), np.zeros(30, np.int64)))
    assert long.offset.tolist() == list(range(OFFSETS))


def vocabulary() -> Vocabulary:
    special = np.arange(SIZE) < 5
    return Vocabulary(special, np.arange(SIZE) > 40, 4, counts=np.arange(SIZE))


@pytest.fixture
def training_module() -> SpanBoundaryModule:
    config = EncoderConfig(SIZE, width=32, depth=2, heads=2, intermediate_size=48)
    config = dataclasses.replace(config, initial_range=0.3)
    torch.manual_seed(0)
    training_module = SpanBoundaryModule(
        Model(*MaskedLMSpanBoundary().models(config)["model"])
    ).double()
    for parameter in training_module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return training_module.eval()


def draw_batch(count: int = 5):
    r = np.random.default_rng(4)
    objective = MaskedLMSpanBoundary(masking=Masking(0.3, Spans(), decided_by="unit"))
    texts = [
        sequence_of(2, *r.integers(5, SIZE, size=r.integers(8, 30)).tolist(), 3)
        for _ in range(count)
    ]
    return [objective.prepare(text, vocabulary(), rng(n, "test")) for n, text in enumerate(texts)]


def test_the_loss_is_the_formula(training_module):
    """h = LN(gelu(W [x_left; x_right; p] + b)), y = LN(gelu(W' h + b')), softmax(E y + c), as loops in float64."""
    sequences = draw_batch()
    batch = pack(sequences)
    losses, weights = training_module(batch), training_module.weights(batch)
    head, model, total, count = training_module.boundary, training_module.model, 0.0, 0
    table = model.encoder.embedding.token.weight
    for sequence in sequences:
        x = model.encoder(pack([sequence])).last
        chosen = sequence.targets["masked"].index.tolist()
        for at in chosen:
            start, end = at, at
            while start - 1 in chosen:
                start -= 1
            while end + 1 in chosen:
                end += 1
            if at - start >= OFFSETS:
                continue
            row = torch.cat([x[start - 1], x[end + 1], head.place.weight[at - start]])
            row = F.layer_norm(
                F.gelu(head.first(row)),
                (32,),
                head.first_norm.weight,
                head.first_norm.bias,
                head.first_norm.eps,
            )
            row = F.layer_norm(
                F.gelu(head.second(row)),
                (32,),
                head.second_norm.weight,
                head.second_norm.bias,
                head.second_norm.eps,
            )
            logits = table @ row + head.bias
            place = chosen.index(at)
            total -= torch.log_softmax(logits, 0)[sequence.targets["masked"].ids[place]].item()
            count += 1
    assert weights["boundary"] == count
    assert losses["boundary"].total.item() == pytest.approx(total, rel=1e-12)


def test_without_weights_the_loss_is_that_of_the_bias(training_module):
    with torch.no_grad():
        training_module.boundary.second_norm.weight.zero_()
        training_module.boundary.second_norm.bias.zero_()
    batch = pack(draw_batch())
    ids = torch.as_tensor(batch.targets["boundary"].ids)
    expected = F.cross_entropy(
        training_module.boundary.bias.expand(len(ids), -1), ids, reduction="sum"
    )
    assert training_module(batch)["boundary"].total.item() == pytest.approx(
        expected.item(), rel=1e-12
    )


def test_its_gradient_reaches_the_borders_alone(training_module, monkeypatch):
    batch = pack(draw_batch())
    encode, kept = training_module.model.encoder.forward, []

    def spy(*args, **kwargs):
        hidden = encode(*args, **kwargs)
        hidden.last.retain_grad()
        kept.append(hidden.last)
        return hidden

    monkeypatch.setattr(training_module.model.encoder, "forward", spy)
    training_module(batch)["boundary"].total.backward()
    reached = set(torch.nonzero(kept[0].grad.abs().sum(1)).flatten().tolist())
    targets = batch.targets["boundary"]
    assert reached == {*targets.left.tolist(), *targets.right.tolist()}


def config_of(corpus: Corpus, steps: int) -> PretrainConfig:
    shape = dataclasses.replace(
        fit_to_corpus(preset("bert-base-cased"), corpus.tokenizer),
        width=32,
        depth=2,
        heads=2,
        intermediate_size=64,
    )
    training = Training(Steps(steps), AdamW(lr=1e-3), Linear(0.1), precision="fp32", save=Steps(2))
    return PretrainConfig(
        shape, training, MaskedLMSpanBoundary(), (PretrainPhase(48),), ExampleBudget(8), held_out=0.1,
        evaluation_tokens=400,
    )  # fmt: skip


def test_a_run_opens_in_transformers_and_its_boundary_network_resumes(corpus, tmp_path):
    from transformers import BertForMaskedLM

    whole = pretrain(config_of(corpus, 4), corpus, tmp_path / "run")
    assert {"held-out/loss/masked", "held-out/loss/boundary"} <= whole.metrics.keys()
    _, info = BertForMaskedLM.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any(
        "boundary" in name
        for name, _ in load_model(tmp_path / "run" / "model").model.named_parameters()
    )

    stop = lambda event: event.kind == "checkpoint" and event.progress.steps == 2  # noqa: E731

    class Stopped(Exception):
        pass

    def at_two(event) -> None:
        if stop(event):
            raise Stopped

    with pytest.raises(Stopped):
        pretrain(config_of(corpus, 4), corpus, tmp_path / "two", on_event=at_two)
    resumed = pretrain(config_of(corpus, 4), corpus, tmp_path / "two", resume=True)
    for name, tensor in whole.training_module.state_dict().items():
        assert torch.equal(tensor, resumed.training_module.state_dict()[name]), name


def test_other_encoders_are_refused():
    with pytest.raises(ConfigError, match="does not fit this encoder"):
        MaskedLMSpanBoundary().models(preset("gpt2"))
