"""Numbers of rows that recur, for products in bf16 on a CPU.

oneDNN plans every new shape: 1 to 8 ms for each of the three products of a linear layer, 20 ms with
a vocabulary, longer than the products of some hundred tokens take. Packed batches hardly ever have
the same number of tokens twice; so in training such layers get a round number of rows, of which the
last are zeros.

| device | autocast in bf16, with gradients | rows |
|---|---|---|
| CPU | yes | filled up to a round number |
| any other | | as they are |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bothways.kernels.library import is_tracing


def round_rows(rows: int) -> int:
    """Return a number at most an eighth above `rows`, one of nine between any n and 2n."""
    # Four leading binary digits stay, rounded up: 8, 9, … 15, 16, 18, … 30, 32, 36, …
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def on_round_rows(
    compute: Callable[..., Float[Tensor, "filled outputs"]], *x: Float[Tensor, "rows inputs"]
) -> Float[Tensor, "rows outputs"]:
    """Return `compute(*x)`, a row-wise function, computed for a bucketed number of rows."""
    rows = len(x[0])
    # Products in fp32 are MKL's, which plans nothing; predictions have packed layers.
    learns = x[0].is_cpu and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    extra = round_rows(rows) - rows if learns and not is_tracing() else 0
    return compute(*(F.pad(part, (0, 0, 0, extra)) for part in x))[:rows] if extra else compute(*x)
