"""A convolution beside the first layer: how DeBERTa v2 takes in n-grams (He et al. 2020, appendix A.5)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bothways.core.layout import Layout
from bothways.kernels.dropout import Dropout
from bothways.model.block import activate
from bothways.model.config import EncoderConfig
from bothways.model.norm import layer_norm
from bothways.model.positions import Convolution


class NgramConvolution(nn.Module):
    """y ← LayerNorm(y + f(convolution of x)), with x the embeddings and y what the first layer gives.

    Beyond the ends of a sequence lie zeros.
    """

    def __init__(self, config: EncoderConfig, convolution: Convolution) -> None:
        super().__init__()
        self.activation = convolution.activation
        size, groups = convolution.size, convolution.groups
        self.conv = nn.Conv1d(config.width, config.width, size, padding=size // 2, groups=groups)
        self.dropout = Dropout(config.dropout_at("mlp"))
        self.norm = layer_norm(config)

    def forward(
        self, x: Float[Tensor, "tokens width"], y: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "tokens width"]:
        """`x`: the embeddings. `y`: what the first layer gives."""
        parts = [
            part.unpad(self.conv(part.pad(x).transpose(1, 2)).transpose(1, 2))
            for part in layout.rectangles
        ]
        result: Tensor = self.norm(y + activate(self.activation, self.dropout(torch.cat(parts))))
        return result
