"""Numbers of rows that come again.

oneDNN, which multiplies in bf16 on a CPU, plans every shape anew that it has not met: 1 to 8 ms for each of the three products
of a dense layer, 20 ms with a vocabulary, longer than they take for some hundred tokens. Packed batches hardly ever have the
same number of tokens twice; so training gives such layers a round number of rows, of which the last are zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bothways.kernels.library import traced


def round_rows(rows: int) -> int:
    """At most an eighth more, and of any number between n and 2n one of nine."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def on_round_rows(
    compute: Callable[..., Float[Tensor, "filled outputs"]], *x: Float[Tensor, "rows inputs"]
) -> Float[Tensor, "rows outputs"]:
    """What is computed of rows, each by itself; in round numbers of them where a CPU learns in bf16."""
    rows = len(x[0])
    learns = (
        x[0].device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.is_grad_enabled()
        and not traced()
    )
    more = round_rows(rows) - rows if learns else 0
    return compute(*(F.pad(part, (0, 0, 0, more)) for part in x))[:rows] if more else compute(*x)
