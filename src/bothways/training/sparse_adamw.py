"""AdamW where a gradient has few rows: an embedding table of which the data names a part.

A row that has had no gradient yet has moments of 0, so Adam leaves it alone, but for the decay. So the update of a table with a
sparse gradient is that of the rows that have had one; the result is what the dense update gives. Fine-tuning a model with a
large vocabulary spends much of its time on rows that no text names otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.optim.adamw import adamw


@torch.no_grad()
def update_rows(
    group: dict[str, Any],
    weight: nn.Parameter,
    state: dict[str, Tensor],
    seen: Int[Tensor, " seen"],
    scale: Tensor | None,
    skip: Tensor,
) -> Int[Tensor, " now"]:
    """One step of AdamW on a table by its sparse gradient, which is coalesced.

    Args:
        group: of the optimizer, with its rate, betas, epsilon and decay.
        weight: the table `(vocab, width)`.
        state: its moments, of the whole table, and its step.
        seen: the rows that have had a gradient before, ascending.
        scale: what gradients are divided by; none for 1.
        skip: 1 where nothing is to change.

    Returns:
        The rows that have had a gradient now.
    """
    assert weight.grad is not None
    rows, gradients = weight.grad.indices()[0], weight.grad.values()
    now: Tensor = torch.unique(torch.cat([seen, rows]))
    dense = gradients.new_zeros(len(now), gradients.shape[1]).index_copy(
        0, torch.searchsorted(now, rows), gradients
    )
    whole = [weight.data, state["exp_avg"], state["exp_avg_sq"]]
    weight.add_(
        weight, alpha=-(1 - float(skip)) * group["lr"] * group["weight_decay"]
    )  # 1 − x would lose digits of x
    parts = [table.index_select(0, now) for table in whole]
    adamw(
        [parts[0]], [dense], [parts[1]], [parts[2]], [], [state["step"]],
        fused=True, grad_scale=scale, found_inf=skip, amsgrad=False, maximize=False,
        beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=0.0, eps=group["eps"],
    )  # fmt: skip
    for table, part in zip(whole, parts, strict=True):
        table.index_copy_(0, now, part)
    return now
