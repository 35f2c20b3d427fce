"""Losses of sentence vectors: equal to sentence-transformers, to formulas in float64, and to pins."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer import losses as peers
from torch import Tensor

from bothways.core.errors import ConfigError
from bothways.tasks.sentence_embedding import losses
from bothways.tasks.sentence_embedding.losses import (
    AnglE,
    CoSENT,
    InBatchSoftmax,
    MarginMSE,
    SupervisedContrastive,
    TeacherKL,
    TextTargets,
)

WIDTH = 7  # odd: AnglE pads it
GTE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def grouped(examples: int, documents: int, scores: Tensor | None = None) -> TextTargets:
    """Return the targets of examples with an anchor and equally many documents, all texts distinct."""
    roles = [losses.ANCHOR, losses.POSITIVE, *[losses.OTHER] * (documents - 1)] * examples
    values = torch.full((examples, documents + 1), torch.nan, dtype=torch.float64)
    if scores is not None:
        values[:, 1:] = scores.reshape(examples, -1)
    return TextTargets(torch.tensor(roles), torch.arange(len(roles)), values.flatten())


def drawn(texts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(texts, WIDTH, generator=generator, dtype=torch.float64)
    return (x + 0.5).requires_grad_()


SCORES = torch.tensor([0.1, 0.9, 0.4, 0.4, 0.0, 0.7], dtype=torch.float64)
CASES: dict[str, tuple[losses.VectorLoss, int, Callable[[Any], Any], Tensor | None]] = {
    "softmax": (InBatchSoftmax(), 1, peers.MultipleNegativesRankingLoss, None),
    "softmax with negatives": (
        InBatchSoftmax(0.2), 3,
        lambda model: peers.MultipleNegativesRankingLoss(model, scale=5.0), None,
    ),
    "both": (
        InBatchSoftmax(0.1, "both"), 2,
        lambda model: peers.MultipleNegativesRankingLoss(
            model, 10.0, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ), None,
    ),
    "all": (
        InBatchSoftmax(0.1, "all"), 2,
        lambda model: peers.MultipleNegativesRankingLoss(model, 10.0, directions=GTE), None,
    ),
    "cosent": (CoSENT(), 1, peers.CoSENTLoss, SCORES),
    "angle": (AnglE(), 1, peers.AnglELoss, SCORES),
    "margins": (MarginMSE(), 3, peers.MarginMSELoss, torch.randn(18, dtype=torch.float64)),
    "kl": (
        TeacherKL(0.5), 3,
        lambda model: peers.DistillKLDivLoss(model, temperature=0.5),
        torch.randn(18, dtype=torch.float64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_sentence_transformers(name):
    loss, documents, make, scores = CASES[name]
    x = drawn(6 * (documents + 1), seed=len(name))
    texts = grouped(6, documents, scores)
    ours = loss(x, texts) / 6
    (gradient,) = torch.autograd.grad(ours, x)
    columns = list(x.view(6, documents + 1, WIDTH).unbind(1))
    labels = None if scores is None else scores.reshape(6, -1).squeeze(1)
    theirs = make(torch.nn.Identity()).compute_loss_from_embeddings(columns, labels)
    (expected,) = torch.autograd.grad(theirs, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # they compute in fp32
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_regression_is_the_mean_squared_error():
    x = drawn(12, 3)
    cosines = torch.cosine_similarity(x[::2], x[1::2])
    expected = (cosines - SCORES).square().sum()
    torch.testing.assert_close(losses.CosineRegression()(x, grouped(6, 1, SCORES)), expected)


def test_classes_are_the_formula_of_the_paper():
    x, classes = drawn(7, 4), [5, 5, 2, 2, 2, 9, 5]
    texts = TextTargets(torch.zeros(7).long(), torch.tensor(classes), torch.full((7,), torch.nan))
    z, expected = torch.nn.functional.normalize(x), 0.0
    for i in range(7):
        others = [a for a in range(7) if a != i]
        positives = [p for p in others if classes[p] == classes[i]]
        normaliser = torch.logsumexp(torch.stack([z[i] @ z[a] / 0.07 for a in others]), 0)
        for p in positives:
            expected -= (z[i] @ z[p] / 0.07 - normaliser) / len(positives)
    torch.testing.assert_close(SupervisedContrastive()(x, texts), expected)
    alone = TextTargets(torch.zeros(2).long(), torch.arange(2), torch.full((2,), torch.nan))
    assert float(SupervisedContrastive()(drawn(2, 1), alone).detach()) == 0.0


@pytest.mark.parametrize("directions", ["query", "both", "all"])
def test_right_documents_of_a_query_are_no_negatives(directions):
    """Of queries 0 and 2 the text is one, as of documents 1 and 3, query 4 and document 2, and
    query 1 and document 4.
    """
    x = drawn(10, 6)
    keys = torch.tensor([7, 20, 1, 21, 7, 22, 3, 21, 22, 1])
    texts = TextTargets(torch.tensor([0, 1] * 5), keys, torch.full((10,), torch.nan))
    total = InBatchSoftmax(0.1, directions)(x, texts)
    z = torch.nn.functional.normalize(x)
    q, d = z[::2], z[1::2]
    asked, given = keys[::2].tolist(), keys[1::2].tolist()
    right = {7: {7, 20, 22}, 1: {1, 21}, 3: {3, 21}, 22: {22, 1}}  # texts by that of a query
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(5):
        known, others = right[asked[i]], [j for j in range(5) if j != i]
        forward = [q[i] @ d[j] for j in range(5) if j == i or given[j] not in known]
        backward = [q[j] @ d[i] for j in range(5) if j == i or given[i] not in right[asked[j]]]
        queries = [q[i] @ q[j] for j in others if asked[j] not in known]
        documents = [d[i] @ d[j] for j in others if given[j] not in known]
        logits = [torch.stack(side) / 0.1 for side in (forward, backward, queries, documents)]
        match directions:
            case "query":
                normaliser = logits[0].logsumexp(0)
            case "both":
                normaliser = (logits[0].logsumexp(0) + logits[1].logsumexp(0)) / 2
            case _:
                normaliser = torch.cat(logits).logsumexp(0)
        expected = expected + normaliser - q[i] @ d[i] / 0.1
    torch.testing.assert_close(total, expected)


def test_candidates_within_the_margin_of_the_positive_are_dropped():
    x, texts = drawn(10, 8), grouped(5, 1)
    z = torch.nn.functional.normalize(x)
    similarities = z[::2] @ z[1::2].T
    expected = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(similarities):
        kept = [row[j] for j in range(5) if j == i or row[j] <= row[i] - 0.1]
        expected = expected + torch.stack(kept).div(0.05).logsumexp(0) - row[i] / 0.05
    torch.testing.assert_close(InBatchSoftmax(margin=0.1)(x, texts), expected)


class Given(torch.nn.Module):
    """A model whose vectors are among its features."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.name]}


@pytest.mark.parametrize("margin", [None, 0.05])
@pytest.mark.parametrize("documents", [1, 2])
def test_a_guide_drops_what_it_ranks_above_the_positive(margin, documents):
    size = 6 * (documents + 1)
    x, guide = drawn(size, 2), drawn(size, 3).detach()
    units = torch.nn.functional.normalize(guide)
    targets = dataclasses.replace(grouped(6, documents), guide=units)
    loss = InBatchSoftmax(0.1, margin=margin, guide="a folder")(x, targets)

    peer = peers.GISTEmbedLoss.__new__(peers.GISTEmbedLoss)
    torch.nn.Module.__init__(peer)  # without tokenizers, which it would compare
    peer.model, peer.guide, peer.must_retokenize = Given("x"), Given("guide"), False
    peer.temperature, peer.margin, peer.margin_strategy = 0.1, margin or 0.0, "absolute"
    peer.contrast_anchors = peer.contrast_positives = peer.gather_across_devices = False
    peer.similarity_fct = torch.nn.CosineSimilarity(dim=-1)
    peer.cross_entropy_loss = torch.nn.CrossEntropyLoss()
    step = documents + 1
    columns = [{"x": x[n::step], "guide": guide[n::step]} for n in range(step)]
    expected = peer(columns, None)
    torch.testing.assert_close(loss / 6, expected)
    unguided = InBatchSoftmax(0.1)(x, targets)
    assert 0 < loss.item() < unguided.item()
    (ours,) = torch.autograd.grad(loss / 6, x)
    (theirs,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(ours, theirs)
    if documents == 1:  # against all other texts, which the peer does not have in this form
        (q, gq), (d, gd) = ((torch.nn.functional.normalize(x[n::2]), units[n::2]) for n in (0, 1))
        bar, own = (gq * gd).sum(-1, keepdim=True) - (margin or 0.0), torch.eye(6, dtype=torch.bool)
        sides = [(q @ d.T, (gq @ gd.T > bar) & ~own), (d @ q.T, (gd @ gq.T > bar) & ~own)]
        sides += [(q @ q.T, (gq @ gq.T > bar) | own), (d @ d.T, (gd @ gd.T > bar) | own)]
        assert all((dropped & ~own).any() for _, dropped in sides)
        logits = torch.cat([cosines.masked_fill(out, -torch.inf) for cosines, out in sides], 1)
        expected = (logits.div(0.1).logsumexp(1) - (q * d).sum(-1) / 0.1).sum()
        loss = InBatchSoftmax(0.1, "all", margin=margin, guide="a folder")(x, targets)
        torch.testing.assert_close(loss, expected)


def test_widths_are_a_mean_and_fillers_are_dropped():
    x, texts = drawn(12, 9), grouped(6, 1)
    loss = InBatchSoftmax()
    expected = (loss(x[:, :3], texts) + loss(x, texts)) / 2
    torch.testing.assert_close(losses.at_widths(loss, x, texts, (3, WIDTH)), expected)
    assert losses.at_widths(loss, x, texts, ()) == loss(x, texts)
    weighted = (3 * loss(x[:, :3], texts) + loss(x, texts)) / 4
    torch.testing.assert_close(losses.at_widths(loss, x, texts, (3, WIDTH), (3.0, 1.0)), weighted)
    pair = TextTargets(*np.array([[0, 1], [1, 2]]), np.zeros(2, dtype=np.float32))
    assert pair.without_weight().roles.tolist() == [losses.FILLER] * 2


@pytest.mark.parametrize("make", [InBatchSoftmax, CoSENT, AnglE, SupervisedContrastive, TeacherKL])
def test_temperatures_are_above_0(make):
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError) as caught:
            make(temperature=value)
        assert caught.value.where == "temperature"


@pytest.mark.parametrize("make", [InBatchSoftmax, CoSENT, AnglE, SupervisedContrastive])
def test_a_scale_is_no_temperature_of_cosines(make):
    with pytest.raises(ConfigError, match=r"at most 1.*20(.|\n)*inverse") as caught:
        make(temperature=20.0)
    assert caught.value.where == "temperature"
    assert TeacherKL(temperature=20.0).temperature == 20
