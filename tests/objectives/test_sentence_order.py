"""Sentence order prediction: its pairs, its loss against transformers, and a run from start to folder."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bothways.core.batch import pack
from bothways.core.errors import ConfigError, DataError
from bothways.core.source import Cursor, Sequence
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import CorpusSource
from bothways.data.masking import Chosen, Masking, Spans
from bothways.data.segments import NextSentence, PairPlan, SentenceOrder
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.objectives.span_boundary import (
    OFFSETS,
    MaskedLMSpanBoundary,
    SpanBoundaryModule,
    _boundaries,
)
from bothways.pretraining.build import vocabulary_of
from bothways.pretraining.run import pretrain
from toy_corpora import write_texts
from toy_objective import SIZE, build_module, check_resume, draw_sequences, short_run
from toy_training import check_splits


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
    texts = (
        f"The {a} sees the {b} {'now ' * n}."
        for n, (a, b) in enumerate(itertools.product(words, words))
    )
    return write_texts(tmp_path / "lone", corpus.tokenizer, texts)


def test_a_sentence_alone_is_split_dropped_or_paired(lone):
    split = plans(lone, SentenceOrder(64, 0.0, "split"))
    assert all(pair.b == pair.a_stop or pair.a == pair.b_stop for pair in split)
    random = plans(lone, SentenceOrder(64, 0.0, "random"))
    assert {pair.label for pair in random} == {1}
    with pytest.raises(DataError, match="no sentence_order sequence can be made"):
        plans(lone, SentenceOrder(64, 0.0, "drop"))
    (finding,) = SentenceOrder(64, 0.0, "drop").check(lone)
    assert (finding.severity, finding.where) == ("error", "objective.segments.single")
    assert 'single": "split"' in str(finding)
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

    objective = MaskedLMSentenceOrder()
    config = short_run(corpus, objective, "albert-base-v2", steps=3, embedding=16)
    done = pretrain(config, corpus, tmp_path / "run")
    assert {"held-out/accuracy/pair", "majority/accuracy/pair"} <= done.metrics.keys()

    folder = tmp_path / "run" / "model"
    theirs = AlbertForPreTraining.from_pretrained(folder).eval()
    vocabulary, models = vocabulary_of(corpus, objective), {"model": load_model(folder).model}
    module = objective.training_module(models, vocabulary).eval()
    segments = SentenceOrder(48)
    source = CorpusSource(corpus, corpus.tokenizer.template, segments, np.arange(20), 5)
    for number, plan in enumerate(plans(corpus, segments)[:6]):
        rng = np.random.default_rng(number)
        sequence = objective.prepare(source.build(plan), vocabulary, rng)
        batch = pack([sequence])
        with torch.no_grad():
            losses, weights = module(batch), module.weights(batch)
            masked = sequence.targets["masked"]
            labels = torch.full((1, len(sequence)), -100)
            labels[0, torch.from_numpy(masked.index)] = torch.from_numpy(masked.ids)
            wanted = theirs(
                input_ids=batch.ids[None], token_type_ids=batch.segments[None], labels=labels,
                sentence_order_label=torch.tensor([plan.label]),
            ).loss  # fmt: skip
        mine = sum(loss.total / weights[name] for name, loss in losses.items())
        torch.testing.assert_close(mine, wanted, rtol=0, atol=2e-6)


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


@pytest.fixture
def module() -> SpanBoundaryModule:
    config = EncoderConfig(SIZE, width=32, depth=2, heads=2, intermediate_size=48)
    return build_module(MaskedLMSpanBoundary(boundary=3.0), config).double()


SPANS = MaskedLMSpanBoundary(masking=Masking(0.3, Spans(), decided_by="unit"))


def test_the_loss_is_the_formula(module):
    """h = LN(gelu(W [x_left; x_right; p] + b)), y = LN(gelu(W' h + b')), softmax(E y + c), as loops in float64."""
    sequences = draw_sequences(SPANS)
    batch = pack(sequences)
    losses, weights = module(batch), module.weights(batch)
    head, model, total, count = module.boundary, module.model, 0.0, 0
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
            for layer, norm in ((head.first, head.first_norm), (head.second, head.second_norm)):
                row = F.layer_norm(F.gelu(layer(row)), (32,), norm.weight, norm.bias, norm.eps)
            logits = table @ row + head.bias
            place = chosen.index(at)
            total -= torch.log_softmax(logits, 0)[sequence.targets["masked"].ids[place]].item()
            count += 1
    assert weights["boundary"] == count
    assert module.coefficients == {"boundary": 3.0}
    check_splits(module, sequences)
    assert losses["boundary"].total.item() == pytest.approx(total, rel=1e-12)


def test_the_boundary_network_of_a_run_resumes(corpus, tmp_path):
    config = short_run(corpus, MaskedLMSpanBoundary(), "bert-base-cased")
    whole = pretrain(config, corpus, tmp_path / "run")
    assert {"held-out/loss/masked", "held-out/loss/boundary"} <= whole.metrics.keys()
    check_resume(config, corpus, tmp_path / "two", whole)


def test_other_encoders_are_refused():
    with pytest.raises(ConfigError, match="does not fit this encoder"):
        MaskedLMSpanBoundary().models(preset("gpt2"))


def test_its_gradient_reaches_the_borders_alone(module, monkeypatch):
    batch = pack(draw_sequences(SPANS))
    encode, kept = module.model.encoder.forward, []

    def spy(*args, **kwargs):
        hidden = encode(*args, **kwargs)
        hidden.last.retain_grad()
        kept.append(hidden.last)
        return hidden

    monkeypatch.setattr(module.model.encoder, "forward", spy)
    module(batch)["boundary"].total.backward()
    reached = set(torch.nonzero(kept[0].grad.abs().sum(1)).flatten().tolist())
    targets = batch.targets["boundary"]
    assert reached == {*targets.left.tolist(), *targets.right.tolist()}
