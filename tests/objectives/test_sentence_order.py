"""Sentence order prediction: its pairs, its loss against transformers, and a run from start to folder."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bothways.core.batch import pack
from bothways.core.errors import ConfigError, DataError
from bothways.core.sequence import Sequence
from bothways.core.source import Cursor, rng
from bothways.data.corpus import Corpus, write_corpus
from bothways.data.corpus_source import CorpusSource
from bothways.data.documents import Document
from bothways.data.loader import ExampleBudget
from bothways.data.masking import Chosen, Masking, Spans, Vocabulary
from bothways.data.segments import NextSentence, PairPlan, SentenceOrder
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.model import Model
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.objectives.span_boundary import (
    OFFSETS,
    MaskedLMSpanBoundary,
    SpanBoundaryModule,
    _boundaries,
)
from bothways.pretraining.build import fit_to_corpus, vocabulary_of
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.run import pretrain
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear, Steps


def plans(corpus: Corpus, segments: SentenceOrder) -> list[PairPlan]:
    """All pairs of the first epoch."""
    chosen = np.arange(len(corpus.documents) - 1)
    source = CorpusSource(corpus, corpus.tokenizer.template, segments, chosen, 5)
    stream = source.read(Cursor())
    return [plan for plan, _ in itertools.takewhile(lambda item: item[1].epoch == 0, stream)]


def test_half_of_the_pairs_are_swapped_and_the_label_says_which(corpus):
    pairs = plans(corpus, SentenceOrder(512, short=0.0))
    labels = np.array([pair.label for pair in pairs])
    assert abs(labels.mean() - 0.5) < 3 * 0.5 / np.sqrt(len(labels))
    for pair in pairs:
        assert (pair.b == pair.a_stop) == (pair.label == 0), "in order: B begins where A ends"
        assert (pair.a == pair.b_stop) == (pair.label == 1), "swapped: A begins where B ends"


def test_every_token_is_read_once(corpus):
    pairs = plans(corpus, SentenceOrder(512, short=0.0))
    read = np.zeros(len(corpus.tokens), dtype=int)
    for pair in pairs:
        read[pair.a : pair.a_stop] += 1
        read[pair.b : pair.b_stop] += 1
    assert read.max() == 1
    assert read.mean() > 0.98, "the last pair is not among them"


def test_long_pairs_are_cut_to_the_length(corpus):
    pairs = plans(corpus, SentenceOrder(12, short=0.5))
    assert max(pair.length for pair in pairs) == 12
    assert min(min(pair.a_stop - pair.a, pair.b_stop - pair.b) for pair in pairs) >= 1


@pytest.fixture
def lone(corpus, tmp_path) -> Corpus:
    """Documents of one sentence."""
    words = ["cat", "dog", "owl", "fox"]
    texts = [
        f"The {a} sees the {b} {'now ' * n}."
        for n, (a, b) in enumerate(itertools.product(words, words))
    ]
    documents = [Document(text, f"made:{n}") for n, text in enumerate(texts)]
    return write_corpus(documents, corpus.tokenizer, tmp_path / "lone", workers=1)


def test_a_sentence_alone_is_split_dropped_or_paired(lone):
    split = plans(lone, SentenceOrder(64, 0.0, "split"))
    assert all(pair.b == pair.a_stop or pair.a == pair.b_stop for pair in split)
    random = plans(lone, SentenceOrder(64, 0.0, "random"))
    assert {pair.label for pair in random} == {1}
    with pytest.raises(DataError, match="no sentence_order sequence can be made"):
        plans(lone, SentenceOrder(64, 0.0, "drop"))
    (finding,) = SentenceOrder(64, 0.0, "drop").check(lone)
    assert (finding.severity, finding.where) == ("error", "objective.segments.single")
    assert "single=split" in str(finding.fix)
    said = [finding.what for finding in SentenceOrder().check(lone)]
    assert any("documents are one sentence" in what for what in said)


@pytest.mark.parametrize(
    "segments",
    [SentenceOrder(12), SentenceOrder(24, single="drop"), NextSentence(12), NextSentence(20)],
)
def test_the_tokens_that_are_cut_off_are_counted(corpus, segments):
    """Against the plans of an epoch, pair by pair; the text of random segments is read elsewhere."""
    source = CorpusSource(corpus, corpus.tokenizer.template, segments, np.arange(len(corpus)), 5)
    read: set[int] = set()
    for plan, following in source.read(Cursor()):
        read |= set(range(plan.a, plan.a_stop))
        if plan.label == 0 or isinstance(segments, SentenceOrder):
            read |= set(range(plan.b, plan.b_stop))
        if following.epoch > 0:
            break
    expected = 1 - len(read) / len(corpus.tokens)
    (what,) = (f.what for f in segments.check(corpus) if "are left out" in f.what)
    assert float(what.split("%")[0]) / 100 == pytest.approx(expected, abs=0.015)
    assert expected > 0.05


def test_a_run_opens_in_transformers_with_the_same_loss(corpus, tmp_path):
    from transformers import AlbertForPreTraining

    shape = dataclasses.replace(
        fit_to_corpus(preset("albert-base-v2"), corpus.tokenizer),
        width=32, depth=2, heads=2, intermediate_size=64, embedding=16,
    )  # fmt: skip
    objective = MaskedLMSentenceOrder()
    training = Training(Steps(3), AdamW(lr=1e-3), Linear(0.1), precision="fp32")
    config = PretrainConfig(
        shape, training, objective, (PretrainPhase(48),), ExampleBudget(8), held_out=0.1,
        evaluation_tokens=400,
    )  # fmt: skip
    done = pretrain(config, corpus, tmp_path / "run")
    assert {"held-out/accuracy/pair", "majority/accuracy/pair"} <= done.metrics.keys()

    folder = tmp_path / "run" / "model"
    theirs, info = AlbertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.eval()
    training_module = objective.training_module(
        {"model": load_model(folder).model}, vocabulary_of(corpus, objective)
    ).eval()
    segments = SentenceOrder(48)
    source = CorpusSource(corpus, corpus.tokenizer.template, segments, np.arange(20), 5)
    for number, plan in enumerate(plans(corpus, segments)[:6]):
        rng = np.random.default_rng(number)
        sequence = objective.prepare(source.build(plan), vocabulary_of(corpus, objective), rng)
        batch = pack([sequence])
        with torch.no_grad():
            losses, weights = training_module(batch), training_module.weights(batch)
            masked = sequence.targets["masked"]
            labels = torch.full((1, len(sequence)), -100)
            labels[0, torch.from_numpy(masked.index)] = torch.from_numpy(masked.ids)
            wanted = theirs(
                input_ids=batch.ids[None],
                token_type_ids=batch.segments[None],
                labels=labels,
                sentence_order_label=torch.tensor([plan.label]),
            ).loss
        mine = sum(loss.total / weights[name] for name, loss in losses.items())
        torch.testing.assert_close(mine, wanted, rtol=0, atol=2e-6)


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
