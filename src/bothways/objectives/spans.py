"""The loss of a span: which token it begins with, and which it ends with (Devlin et al. 2018, section 4.2).

Two softmaxes over the tokens of each sequence, in a batch where sequences lie end to end: what belongs together is told by the
owner of each token, so nothing is padded and no sequence sees another. The log-likelihoods of start and end are averaged, as in
google-research/bert run_squad.py; the paper adds them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.batch import SpanTargets
from bothways.core.layout import Layout
from bothways.core.loss import Loss


def span_loss(scores: Float[Tensor, "tokens 2"], layout: Layout, targets: SpanTargets) -> Loss:
    """Σ over sequences of −(log p(start) + log p(end)) / 2, in fp32 or finer; a hit has both right.

    Args:
        scores: of each token as a start and as an end.
        targets: their positions in the batch; sequences of weight 0 count for nothing.
    """
    z = scores.to(torch.promote_types(scores.dtype, torch.float32))
    start, end, counted = (torch.as_tensor(part) for part in (targets.start, targets.end, targets.weight))
    owner = layout.owner[:, None].expand_as(z)
    top = z.new_full((layout.sequences, 2), -torch.inf).scatter_reduce(0, owner, z.detach(), "amax")
    sums = torch.zeros_like(top).index_add(0, layout.owner, (z - top[layout.owner]).exp())
    chosen = torch.stack([z[start, 0], z[end, 1]], 1)
    total = ((top + sums.log() - chosen).mean(1) * counted.to(z.dtype)).sum()
    hits = ((chosen == top).all(1) & (counted > 0)).sum()
    return Loss(total, hits)
