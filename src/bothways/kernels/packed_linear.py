"""Dense layers whose weights lie as the kernels of a CPU read them, oneDNN's or the library's own, for predictions.

A product of few rows with a matrix as a checkpoint has it spends most of its time on putting the matrix in order, each time
anew. Packed once, a text of 17 tokens goes through the layers of MiniLM on two threads in less than half the time; for a
thousand tokens nothing changes.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from bothways.core.errors import ConfigError
from bothways.kernels import library as native
from bothways.kernels.library import Feature
from bothways.kernels.linear import Dense, refuse_gradients

FEW = 192
"""Up to so many rows panels of weights are faster than a matrix as it lies, on one core of Cascade Lake 1.8 times for 18 rows
of 384 features, 1.2 for 128, 1.0 for 1,024."""


class Prepared(nn.Module):
    """A layer made of another one for predictions alone: it has no gradients, and is in no folder."""

    def get_extra_state(self) -> NoReturn:
        """ConfigError: the layer is in no state_dict, so that no folder is written without its weights."""
        what = "layers that are prepared for predictions are made in memory and never saved"
        raise ConfigError(what, where="precision", fix="Save the model that they were made from.")


class PackedLinear(Prepared):
    """A dense layer in fp32 or bf16, its weights packed; for predictions alone.

    Args:
        linear: what it stands for; later changes of its weights are not seen.
        dtype: of the product, and of what it gives.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach().to(dtype).contiguous(), None
        )
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype).contiguous()

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """x·Wᵀ + b.

        Raises:
            ConfigError: gradients are asked for.
        """
        refuse_gradients(self, x)
        if x.dtype is not self.dtype:
            x = x.to(self.dtype)
        product = torch.ops.mkldnn._linear_pointwise.default(
            x, self.packed, self.bias, "none", [], ""
        )
        result: Tensor = product
        return result


class PanelLinear(Prepared):
    """A dense layer by the library's own kernel, in fp32 where rows are few; for predictions alone.

    | dtype | processor | rows | product |
    |---|---|---|---|
    | bf16 | | any | `panels.Dense` |
    | fp32 | with AMX | any | `panels.Dense` |
    | fp32 | any other | up to `FEW` | `panels.Dense` |
    | fp32 | the same | more | torch's |

    Args:
        linear: what it stands for.
        dtype: of the product, and of what it gives.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        weight = linear.weight.detach().to(dtype)
        self.bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self.product = Dense(weight, None, self.bias, dtype)
        self.most = (
            math.inf
            if dtype is torch.bfloat16 or Feature.TILES in native.kernel_features()
            else float(FEW)
        )
        """Rows for which the kernel is chosen."""
        self.weight = (
            weight if self.most < math.inf else None
        )  # where it is for all there are the panels alone

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """x·Wᵀ + b.

        Raises:
            ConfigError: gradients are asked for.
        """
        refuse_gradients(self, x)
        if self.weight is None or len(x) <= self.most:
            return self.product(x)
        return F.linear(x.float(), self.weight, self.bias)
