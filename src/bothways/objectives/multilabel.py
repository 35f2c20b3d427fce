"""Cross-entropy where every label holds or does not, each by itself, as a sum."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bothways.core.loss import Loss


def binary_cross_entropy(logits: Float[Tensor, "sequences labels"], labels: Float[Tensor, "sequences labels"]) -> Loss:
    """−Σ over sequences and labels of y·log σ(z) + (1 − y)·log(1 − σ(z)), summed in fp32 or finer.

    Entries of `labels` that are NaN count for nothing. The mean over the others is over sequences × labels, that of torch's
    BCEWithLogitsLoss and of transformers. A hit is an entry on the right side of one half.
    """
    known, exact = ~labels.isnan(), torch.promote_types(logits.dtype, torch.float32)
    y = labels.nan_to_num(0.0).to(exact)
    each = F.binary_cross_entropy_with_logits(logits.to(exact), y, reduction="none")
    return Loss((each * known).sum(), (((logits > 0) == (y > 0.5)) & known).sum())
