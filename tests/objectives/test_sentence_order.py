"""Sentence order prediction: its pairs, its loss against transformers, and a run from start to folder."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from bothways.core.batch import pack
from bothways.core.errors import DataError
from bothways.core.source import Cursor
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.corpus_source import CorpusSource
from bothways.data.documents import Document
from bothways.data.loader import ExampleBudget
from bothways.data.segments import NextSentence, PairPlan, SentenceOrder
from bothways.hub.model_folder import load_model
from bothways.model.families.catalogue import preset
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
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
    return build_corpus(documents, corpus.tokenizer, tmp_path / "lone", workers=1)


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
