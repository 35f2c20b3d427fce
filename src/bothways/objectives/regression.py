"""The squared error of scores, as a sum (Devlin et al. 2018, section 4.1, for STS-B)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.loss import Loss


def squared_error(outputs: Float[Tensor, " targets"], scores: Float[Tensor, " targets"]) -> Loss:
    """Σ (output − score)², summed in fp32 or finer. Scores that are NaN count for nothing.

    Divided by the number of the others it is the mean that transformers trains by where the problem is "regression".
    """
    known = ~scores.isnan()
    difference = outputs.to(torch.promote_types(outputs.dtype, torch.float32)) - scores.nan_to_num(0.0)
    return Loss((difference.square() * known).sum())
