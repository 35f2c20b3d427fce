"""Updates that are captured: batches of shapes that recur, equal losses, and what is refused."""

import functools

import numpy as np
import pytest
import torch

from bothways.core.batch import Batch, LabelTargets, WindowWeight, pack, pad_batch, round_up
from bothways.core.errors import ConfigError
from bothways.core.source import Sequence
from bothways.data.masking import Vocabulary
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule, MaskedLMNextSentence
from bothways.objectives.span_boundary import SpanBoundaryModule
from bothways.training.cuda_graph import GraphedUpdates
from bothways.training.optimizers import AdamW, Lamb, ParameterRule, build_optimizer
from bothways.training.parallel import Plan
from bothways.training.saved_state import RunTensors
from spread import in_turn

OBJECTIVE = MaskedLMNextSentence()
ENCODER = EncoderConfig(97, 16, 2, 2, 32, dropout=Dropouts(0.0, 0.0))
SPECIAL = np.arange(97) < 5
VOCABULARY = Vocabulary(SPECIAL, np.zeros(97, dtype=bool), 4)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def batch_of(lengths: list[int], rng: np.random.Generator) -> Batch:
    sequences = []
    for length in lengths:
        ids, segments = rng.integers(5, 97, length, dtype=np.int32), np.arange(length) > length // 2
        label = {"pair": LabelTargets(rng.integers(0, 2, 1))}
        plain = Sequence(ids, segments.astype(np.int8), label)
        sequences.append(OBJECTIVE.prepare(plain, VOCABULARY, rng))
    return pack(sequences)


def module() -> MaskedLMModule:
    return MaskedLMModule(Model(*OBJECTIVE.models(ENCODER)["model"]))


@pytest.mark.parametrize(("longest", "count"), in_turn([(5,), (16,), (100,), (512,)], [1, 7, 20]))
def test_what_fills_a_batch_changes_no_loss_and_no_gradient(longest, count, rng):
    learner = module().double()
    usual = batch_of(rng.integers(min(4, longest), longest + 1, count).tolist(), rng)
    more = pad_batch(usual)
    assert more.layout.tokens > usual.layout.tokens
    assert learner.weights(more) == learner.weights(usual)
    results = []
    for batch in (usual, more):
        learner.zero_grad()
        losses = learner(batch)
        (losses["masked"].total + 3 * losses["pair"].total).backward()
        gradients = [parameter.grad for parameter in learner.parameters()]
        results.append([x for loss in losses.values() for x in (loss.total, loss.hits)] + gradients)
    torch.testing.assert_close(*results)


def test_shapes_recur(rng):
    shapes = set()
    for _ in range(20):
        lengths = list[int]()
        while sum(lengths) < 2000:
            lengths.append(int(rng.integers(10, 17)))
        batch = pad_batch(batch_of(lengths, rng))
        shapes.add((batch.layout.max_seqlen, *map(len, batch.tensors())))
    assert len(shapes) <= 8


def test_counts_are_rounded_up():
    assert [round_up(n, 4) for n in (0, 1, 4, 5, 8, 9, 15, 17)] == [0, 1, 4, 5, 8, 10, 16, 20]
    assert all(n <= round_up(n, 16) <= n * 17 / 16 + 1 for n in range(5000))


def test_a_batch_with_other_targets_stays_as_it_is(rng):
    ids = np.arange(5, 9, dtype=np.int32)
    row = np.ones((1, 3), dtype=np.float32)
    for target in (LabelTargets(row), WindowWeight(row[0, :1])):
        batch = pack([Sequence(ids, np.zeros(4, dtype=np.int8), {"labels": target})])
        assert pad_batch(batch) is batch


@pytest.mark.parametrize(
    ("device", "config", "pull", "make", "needs"),
    [
        ("cpu", AdamW(), 0.0, MaskedLMModule, "an NVIDIA GPU"),
        ("cuda", Lamb(), 0.0, MaskedLMModule, "Adam as the optimizer of all parameters"),
        ("cuda", AdamW(), 0.1, MaskedLMModule, "Adam as the optimizer of all parameters"),
        ("cuda", AdamW(), 0.0, functools.partial(MaskedLMModule, z_loss=0.1), "an objective of"),
        ("cuda", AdamW(), 0.0, SpanBoundaryModule, "an objective of masked LM or of it with"),
    ],
)
def test_other_updates_are_refused(device, config, pull, make, needs, monkeypatch):
    monkeypatch.setattr("bothways.training.cuda_graph.device_of", lambda _: torch.device(device))
    learner = make(Model(*OBJECTIVE.models(ENCODER)["model"]))
    rule = ParameterRule(pull=pull)
    optimizer = build_optimizer(config, learner.named_parameters(), lambda _: rule)
    tensors = RunTensors(learner, optimizer, Plan())
    with pytest.raises(ConfigError, match=rf"training\.graphs: needs {needs}"):
        GraphedUpdates(tensors, torch.autocast("cpu"), 1.0)


def test_several_microbatches_are_refused(rng):
    batches = [batch_of([9, 4], rng)] * 2
    with pytest.raises(ConfigError, match=r"needs one microbatch an update"):
        object.__new__(GraphedUpdates)(batches, {})


def test_only_packed_sequences_are_computed_alike(rng, monkeypatch):
    batch = batch_of([9, 4], rng)
    assert not module().is_static(batch)  # a processor reads rectangles
    monkeypatch.setattr("bothways.model.attention.dispatch.has_varlen", lambda _: True)
    assert module().to("meta", torch.bfloat16).is_static(batch)
