"""Losses of sentence vectors: they compare the vectors of all texts of a step.

A loss is a value; `loss(vectors, texts)` returns the sum over the examples of a step. Vectors are
compared in fp32, whatever the model computes in: in bf16, scores that differ would tie.

| loss | an example | formula, with s the cosine of two vectors |
|---|---|---|
| InBatchSoftmax | anchor, positive, negatives … | −log softmax over documents d of s(q, d)/T |
| CoSENT | two texts, score | log(1 + Σ exp((s_i − s_j)/T)) over pairs with y_i < y_j |
| AnglE | two texts, score | CoSENT of the angle between halves of the vectors |
| CosineRegression | two texts, score | (s − y)² |
| SupervisedContrastive | text, class | −mean over the class of log softmax of s/T |
| MarginMSE | query, documents, teacher's scores | (margin of the dot products − the teacher's)² |
| TeacherKL | query, documents, teacher's scores | KL(softmax(t/T) ‖ softmax(s/T)) · T² |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from bothways.core.batch import Targets, onto
from bothways.core.config.reader import CHANGEABLE
from bothways.core.config.values import require_range

ANCHOR, POSITIVE, OTHER, FILLER = 0, 1, 2, -1


@dataclass(frozen=True)
class TextTargets(Targets):
    """What a loss knows of each text of an example, the anchor first; `(texts)` each.

    Indices that follow from the roles are on the roles' device. With vectors on a GPU that is the
    processor: how many there are is known there without waiting for the GPU.

    Attributes:
        roles: ANCHOR, POSITIVE or OTHER; FILLER for texts that carry no weight.
        keys: equal for texts of one content, by which right documents of other queries are
            recognised; for texts with a class, the key of the class.
        scores: the score of a pair at its second text, or a teacher's score of each document;
            NaN for none.
        guide: the unit vectors of a guide `(texts, guide width)`; of width 0 without one.
    """

    roles: NDArray[np.int64] | Tensor
    keys: NDArray[np.int64] | Tensor
    scores: NDArray[np.float32] | Tensor
    guide: NDArray[np.float32] | Tensor = field(
        default_factory=lambda: np.empty((1, 0), dtype=np.float32)
    )

    def without_weight(self) -> TextTargets:
        """Return the same texts as fillers."""
        return dataclasses.replace(self, roles=np.full_like(self.roles, FILLER))

    @property
    def anchors(self) -> Int[Tensor, " examples"]:
        """The indices of the first texts of the examples."""
        return (torch.as_tensor(self.roles) == ANCHOR).nonzero()[:, 0]

    @property
    def documents(self) -> Int[Tensor, " documents"]:
        """The indices of all other texts."""
        return (torch.as_tensor(self.roles) != ANCHOR).nonzero()[:, 0]

    @property
    def owners(self) -> Int[Tensor, " documents"]:
        """The example of each document."""
        return ((torch.as_tensor(self.roles) == ANCHOR).cumsum(0) - 1)[self.documents]

    def documents_of(self, role: int) -> Int[Tensor, " documents"]:
        """Return the indices, among the documents, of those with a role."""
        return (torch.as_tensor(self.roles)[self.documents] == role).nonzero()[:, 0]


class _Tempered:
    """A loss of cosines with a temperature: above 1, all would weigh alike."""

    temperature: float

    def __post_init__(self) -> None:
        fix = "It is the inverse of a scale: 0.05 for 20."
        require_range("(0, 1]", fix=fix, temperature=self.temperature)


@dataclass(frozen=True)
class InBatchSoftmax(_Tempered):
    """Cross-entropy of the positive among all documents of the step (InfoNCE, van den Oord 2018).

    The negatives of all examples are candidates of each query. A candidate that is the query, or
    a positive of it elsewhere in the step, is dropped: by its text, since dropout makes the vectors
    of equal texts differ.

    Attributes:
        temperature: T in exp(s/T).
        directions: "query" ranks the documents for each query; "both" also the queries for each
            positive, and takes the mean; "all" puts queries and documents of both sides into one
            softmax (GTE, Li et al. 2023).
        margin: candidates with s > s(positive) − margin are dropped as likely positives; None
            keeps them, or is 0 with a guide.
        guide: a folder of another model of vectors, whose cosines are compared with the margin
            (Solatorio 2024); None for cosines of the vectors themselves.
    """

    temperature: float = 0.05
    directions: Literal["query", "both", "all"] = "query"
    margin: float | None = None
    guide: str | None = field(default=None, metadata=CHANGEABLE)  # known by its SHA-256
    kind: Literal["softmax"] = "softmax"

    def __call__(self, vectors: Float[Tensor, "texts width"], texts: TextTargets) -> Tensor:
        """Return the sum over queries."""
        keys, move = torch.as_tensor(texts.keys), onto(vectors.device)
        anchors, others, owners = map(move, (texts.anchors, texts.documents, texts.owners))
        units = functional.normalize(vectors, dim=-1)
        queries, documents = units[anchors], units[others]
        document_keys, query_keys = keys[others], keys[anchors]
        rows = torch.arange(len(queries), device=keys.device)
        # positives[i] is the column of the positive of query i
        positives = move(texts.documents_of(POSITIVE))
        same_query = (query_keys[:, None] == query_keys).float()

        def answers(texts: Tensor) -> Bool[Tensor, "queries texts"]:
            """Return True for the keys of a query and of its positives in all examples."""
            matches = (document_keys[positives][:, None] == texts).float()
            return (query_keys[:, None] == texts) | (same_query @ matches > 0)

        answering = answers(document_keys)
        forward = queries @ documents.T
        of_positive = forward[rows, positives]
        # the vectors by which likely positives are recognised
        guides = units.detach() if self.guide is None else torch.as_tensor(texts.guide).to(units)
        guide_queries, guide_documents = guides[anchors], guides[others]
        margin = 0.0 if self.guide is not None and self.margin is None else self.margin
        bar = (guide_queries * guide_documents[positives]).sum(-1)

        def likely(side: Tensor, candidates: Tensor) -> Bool[Tensor, "queries candidates"]:
            """Return True for candidates that are as close as the positive."""
            similarities = side @ candidates.T
            if margin is None:
                return torch.zeros_like(similarities, dtype=torch.bool)
            return similarities > bar[:, None] - margin

        dropped = answering | likely(guide_queries, guide_documents)
        dropped = dropped.index_put((rows, positives), torch.zeros_like(rows, dtype=torch.bool))
        sides = [_logits(forward, dropped, self.temperature)]
        if self.directions != "query":
            backward = queries @ documents[positives].T  # (queries, positives)
            other_queries = answering[:, positives].T | likely(
                guide_documents[positives], guide_queries
            )
            other_queries = other_queries.fill_diagonal_(False)
            sides.append(_logits(backward.T, other_queries, self.temperature))
        if self.directions == "all":
            alike = answers(query_keys) | likely(guide_queries, guide_queries)
            among_queries = _logits(queries @ queries.T, alike, self.temperature)
            related = (owners == rows[:, None]) | answering
            related = related | likely(guide_documents[positives], guide_documents)
            among_documents = documents[positives] @ documents.T
            sides += [among_queries, _logits(among_documents, related, self.temperature)]
            normaliser = torch.cat(sides, dim=1).logsumexp(1)
        else:
            normaliser = torch.stack([side.logsumexp(1) for side in sides]).mean(0)
        return (normaliser - of_positive / self.temperature).sum()


@dataclass(frozen=True)
class CoSENT(_Tempered):
    """Order of the cosines of pairs as that of their scores (Huang et al. 2024).

    It is a number for all pairs of a step, which is weighted as their mean.

    Attributes:
        temperature: T in exp((s_i − s_j)/T).
    """

    temperature: float = 0.05
    kind: Literal["cosent"] = "cosent"

    def __call__(self, vectors: Float[Tensor, "texts width"], texts: TextTargets) -> Tensor:
        """Return the loss, times the number of pairs."""
        first, second, scores = _pairs(vectors, texts)
        return _ordered((first * second).sum(-1) / self.temperature, scores)


@dataclass(frozen=True)
class AnglE(_Tempered):
    """CoSENT of |cos + sin|, which has a gradient where the cosine is flat (Li and Li 2024).

    The halves of a vector are the real and the imaginary part. The order of the two texts matters.

    Attributes:
        temperature: as in CoSENT.
    """

    temperature: float = 0.05
    kind: Literal["angle"] = "angle"

    def __call__(self, vectors: Float[Tensor, "texts width"], texts: TextTargets) -> Tensor:
        """Return the loss, times the number of pairs."""
        odd = vectors.shape[-1] % 2
        first, second, scores = _pairs(functional.pad(vectors, (0, odd)), texts)
        real, imaginary = first.chunk(2, dim=-1)
        other_real, other_imaginary = second.chunk(2, dim=-1)
        cosines = (first * second).sum(-1)
        sines = (imaginary * other_real - real * other_imaginary).sum(-1)
        return _ordered((cosines + sines).abs() / self.temperature, scores)


@dataclass(frozen=True)
class CosineRegression:
    """The squared difference of the cosine and the score, which is a number from −1 to 1."""

    kind: Literal["cosine"] = "cosine"

    def __call__(self, vectors: Float[Tensor, "texts width"], texts: TextTargets) -> Tensor:
        """Return the sum over pairs."""
        first, second, scores = _pairs(vectors, texts)
        return ((first * second).sum(-1) - scores).square().sum()


@dataclass(frozen=True)
class SupervisedContrastive(_Tempered):
    """Texts of a class against all others: the mean of logs (Khosla et al. 2020, equation 2).

    Attributes:
        temperature: T in exp(s/T).
    """

    temperature: float = 0.07
    kind: Literal["classes"] = "classes"

    def __call__(self, vectors: Float[Tensor, "texts width"], texts: TextTargets) -> Tensor:
        """Return the sum over texts; one that is alone in its class in the step adds nothing."""
        units, keys = functional.normalize(vectors, dim=-1), torch.as_tensor(texts.keys)
        itself = torch.eye(len(keys), dtype=torch.bool, device=keys.device)
        logits = _logits(units @ units.T, itself, self.temperature)
        alike = (keys[:, None] == keys) & ~itself
        logs = (logits - logits.logsumexp(1, keepdim=True)).masked_fill(~alike, 0.0)
        return -(logs.sum(1) / alike.sum(1).clamp_min(1)).sum()


@dataclass(frozen=True)
class MarginMSE:
    """The margins of a cross-encoder between positive and negatives (Hofstätter et al. 2020).

    Scores are dot products of the vectors: those of unit length cannot reach a teacher's logits.
    """

    kind: Literal["margin_mse"] = "margin_mse"

    def __call__(self, vectors: Float[Tensor, "texts width"], texts: TextTargets) -> Tensor:
        """Return the sum over queries of the mean over their negatives."""
        scores, teacher = _documents(vectors, texts)
        positives, negatives = texts.documents_of(POSITIVE), texts.documents_of(OTHER)
        # The query of each negative; queries are numbered from 0 in order.
        at = texts.owners[negatives]
        counts = at.bincount(minlength=len(positives)).clamp_min(1)
        positives, negatives, at, counts = map(
            onto(vectors.device), (positives, negatives, at, counts)
        )
        margins = scores[positives][at] - scores[negatives]
        target = teacher[positives][at] - teacher[negatives]
        totals = scores.new_zeros(len(positives)).index_add(0, at, (margins - target).square())
        return (totals / counts).sum()


@dataclass(frozen=True)
class TeacherKL:
    """The distribution of a cross-encoder over the documents of a query.

    Attributes:
        temperature: T for both; the loss is multiplied by T² (Hinton et al. 2015).
    """

    temperature: float = 1.0
    kind: Literal["kl"] = "kl"

    def __post_init__(self) -> None:
        require_range("(0, inf)", temperature=self.temperature)

    def __call__(self, vectors: Float[Tensor, "texts width"], texts: TextTargets) -> Tensor:
        """Return the sum over queries."""
        scores, teacher = _documents(vectors, texts)
        counts = texts.owners.bincount().tolist()
        total = scores.new_zeros(())
        for student, target in zip(scores.split(counts), teacher.split(counts), strict=True):
            log_p = (target / self.temperature).log_softmax(0)
            log_q = (student / self.temperature).log_softmax(0)
            total = total + (log_p.exp() * (log_p - log_q)).sum()
        return total * self.temperature**2


VectorLoss = (
    InBatchSoftmax
    | CoSENT
    | AnglE
    | CosineRegression
    | SupervisedContrastive
    | MarginMSE
    | TeacherKL
)


def at_widths(
    loss: VectorLoss,
    vectors: Float[Tensor, "texts width"],
    texts: TextTargets,
    widths: tuple[int, ...],
    weights: tuple[float, ...] = (),
) -> Tensor:
    """Return the mean of a loss over the first components of vectors (Kusupati et al. 2022).

    Args:
        widths: the numbers of components; none for all components.
        weights: the weight of each; none for equal ones.
    """
    chosen = widths or (vectors.shape[-1],)
    shares = weights or (1.0,) * len(chosen)
    pairs = zip(shares, chosen, strict=True)
    losses = torch.stack([share * loss(vectors[:, :width], texts) for share, width in pairs])
    return losses.sum() / sum(shares)


def _logits(
    similarities: Float[Tensor, "rows columns"], dropped: Bool[Tensor, "rows columns"], t: float
) -> Float[Tensor, "rows columns"]:
    return (similarities / t).masked_fill(dropped, -torch.inf)


def _pairs(vectors: Tensor, texts: TextTargets) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unit vectors of the first and of the second texts, and the scores of the pairs."""
    units = functional.normalize(vectors, dim=-1)
    first, second = map(onto(vectors.device), (texts.anchors, texts.documents))
    return units[first], units[second], torch.as_tensor(texts.scores)[second]


def _documents(vectors: Tensor, texts: TextTargets) -> tuple[Tensor, Tensor]:
    """Return for each document its dot product with its query, and its score."""
    queries, documents = map(onto(vectors.device), (texts.anchors[texts.owners], texts.documents))
    scores = (vectors[queries] * vectors[documents]).sum(-1)
    return scores, torch.as_tensor(texts.scores)[documents]


def _ordered(
    similarities: Float[Tensor, " pairs"], scores: Float[Tensor, " pairs"]
) -> Float[Tensor, ""]:
    """Return n · log(1 + Σ exp(s_i − s_j)) over pairs with y_i < y_j, in n log n operations."""
    scores, order = scores.sort()
    similarities = similarities[order]
    # suffix[k] = log Σ_{j ≥ k} exp(−s_j); ties in y are no pairs, so i begins behind its equals
    suffix = (-similarities.flip(0)).logcumsumexp(0).flip(0)
    suffix = torch.cat([suffix, suffix.new_full((1,), -torch.inf)])
    above = torch.searchsorted(scores, scores, right=True)
    terms = torch.cat([similarities.new_zeros(1), similarities + suffix[above]])
    return len(scores) * terms.logsumexp(0)
