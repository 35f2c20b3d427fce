"""Losses as sums: cross-entropy with weighted classes, among choices and of spans, on normalisers,
and of independent labels and numbers. That over a vocabulary is `kernels.cross_entropy`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bothways.core.batch import IGNORED, Layout, SpanTargets
from bothways.core.runtime.tuning import TUNING
from bothways.core.training_module import Loss
from bothways.model.kernels.cross_entropy import cross_entropy


def weighted_cross_entropy(
    logits: Float[Tensor, "targets classes"],
    labels: Int[Tensor, " targets"],
    classes: Float[Tensor, " classes"],
    smoothing: float = 0.0,
    weight: Float[Tensor, " targets"] | float = 1.0,
) -> Loss:
    """Cross-entropy with a weight for each class, and a share of every target spread evenly over
    all classes.

    Σ over targets of (1 − ε)·w[label]·(−log p[label]) + ε/C · Σ over classes c of w[c]·(−log
    p[c]), with p the softmax, C the number of classes and ε the smoothing (Szegedy et al. 2016,
    section 7). Divided by Σ w[label] it is what torch's `cross_entropy(weight=w,
    label_smoothing=ε, reduction="mean")` says: its normaliser is the weights of the labels alone.

    Args:
        classes: w, above 0.
        smoothing: ε, in [0, 1).
        weight: a factor of each target's loss.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    counted, w = labels != IGNORED, classes.to(exact)
    # Any class is valid for `gather`; the product with `counted` removes these targets.
    label = labels.masked_fill(~counted, 0)
    surprise = -torch.log_softmax(logits.to(exact), 1)
    of_label = w[label] * surprise.gather(1, label[:, None])[:, 0]
    spread = (w * surprise).mean(1)
    total = (((1 - smoothing) * of_label + smoothing * spread) * counted * weight).sum()
    return Loss(total, ((logits.argmax(1) == labels) & counted).sum())


def z_loss(logits: Float[Tensor, "targets classes"]) -> Loss:
    """Return Σ over targets of log² Z, with Z = Σ over classes of exp(logit), in fp32 or finer.

    It keeps the normaliser of a softmax near 1, which cross-entropy leaves free. The gradient of a
    row is 2 · log Z · softmax(logits). Some rows at a time are computed again in the backward
    pass, so that no array of the size of the logits is kept.

    Source: Chowdhery et al. 2022 (PaLM), section 5.
    """
    elements = TUNING.loss_chunk_elements_cuda if logits.is_cuda else TUNING.loss_chunk_elements_cpu
    chunks = torch.split(logits, max(1, elements // logits.shape[1]))
    sums = [checkpoint(_squares, z, use_reentrant=False, preserve_rng_state=False) for z in chunks]
    return Loss(torch.stack(sums).sum())


def _squares(logits: Float[Tensor, "rows classes"]) -> Float[Tensor, ""]:
    exact = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(exact).logsumexp(1).square().sum()


def choice_cross_entropy(
    scores: Float[Tensor, " choices"],
    counts: Int[Tensor, " questions"],
    labels: Int[Tensor, " questions"],
) -> Loss:
    """−Σ over questions of log softmax(scores of its choices)[label]; the choices of the first
    question come first.

    Source: Devlin et al. 2018, section 4.4. Questions may have different numbers of choices.

    Args:
        counts: number of choices of each question.
        labels: number of the right choice, from 0; `IGNORED` counts for nothing.
    """
    # As wide as if all choices were of one question: the most of any is not known without waiting
    # for a GPU.
    width = max(1, len(scores))
    filled = torch.arange(width, device=scores.device) < counts[:, None]
    table = scores.new_full(filled.shape, -torch.inf).masked_scatter(filled, scores)
    return cross_entropy(table, labels)


def binary_cross_entropy(
    logits: Float[Tensor, "sequences labels"],
    labels: Float[Tensor, "sequences labels"],
    weight: Float[Tensor, "sequences 1"] | float = 1.0,
) -> Loss:
    """−Σ over sequences and labels of y·log σ(z) + (1 − y)·log(1 − σ(z)), summed in fp32 or finer.

    Entries of `labels` that are NaN count for nothing. The mean over the others is over sequences
    × labels, that of torch's BCEWithLogitsLoss and of transformers. A hit is an entry on the right
    side of one half. The loss of each sequence is multiplied by `weight`.
    """
    labelled, exact = ~labels.isnan(), torch.promote_types(logits.dtype, torch.float32)
    y = labels.nan_to_num(0.0).to(exact)
    entries = F.binary_cross_entropy_with_logits(logits.to(exact), y, reduction="none")
    return Loss((entries * labelled * weight).sum(), (((logits > 0) == (y > 0.5)) & labelled).sum())


def squared_error(
    outputs: Float[Tensor, " targets"],
    scores: Float[Tensor, " targets"],
    weight: Float[Tensor, " targets"] | float = 1.0,
) -> Loss:
    """Σ weight · (output − score)², summed in fp32 or finer; NaN scores count for nothing.

    Divided by the number of the others it is the mean that transformers trains by where the
    problem is "regression".
    """
    labelled = ~scores.isnan()
    difference = outputs.to(torch.promote_types(outputs.dtype, torch.float32)) - scores.nan_to_num(
        0.0
    )
    return Loss((difference.square() * labelled * weight).sum())


def span_loss(scores: Float[Tensor, "tokens 2"], layout: Layout, targets: SpanTargets) -> Loss:
    """Σ over sequences of −(log p(start) + log p(end)) / 2, in fp32 or finer; a hit has both right.

    Args:
        scores: scores of each token as a start and as an end.
        targets: their positions in the batch; sequences of weight 0 count for nothing.
    """
    z = scores.to(torch.promote_types(scores.dtype, torch.float32))
    start, end, counted = (
        torch.as_tensor(values) for values in (targets.start, targets.end, targets.weight)
    )
    owner = layout.sequence_ids[:, None].expand_as(z)
    # log Σ exp over the tokens of each sequence, shifted by its maximum as `logsumexp` is.
    top = z.new_full((layout.sequences, 2), -torch.inf).scatter_reduce(0, owner, z.detach(), "amax")
    sums = torch.zeros_like(top).index_add(
        0, layout.sequence_ids, (z - top[layout.sequence_ids]).exp()
    )
    target_scores = torch.stack([z[start, 0], z[end, 1]], 1)
    total = ((top + sums.log() - target_scores).mean(1) * counted.to(z.dtype)).sum()
    hits = ((target_scores == top).all(1) & (counted > 0)).sum()
    return Loss(total, hits)
