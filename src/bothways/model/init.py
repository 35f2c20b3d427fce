"""Google's initialisation: weights from a normal cut off at 2σ, biases 0, LayerNorms at 1 and 0.

Source: Devlin et al. 2018, appendix A.2; the reference code's `truncated_normal_initializer(0.02)`.
"""

from __future__ import annotations

from torch import nn


def initialise(module: nn.Module, initial_range: float) -> None:
    """Set every Linear, Embedding and LayerNorm under `module` to its starting value, with torch's default generator."""
    for part in module.modules():
        match part:
            case nn.Linear():
                nn.init.trunc_normal_(part.weight, std=initial_range, a=-2 * initial_range, b=2 * initial_range)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
            case nn.Embedding():
                nn.init.trunc_normal_(part.weight, std=initial_range, a=-2 * initial_range, b=2 * initial_range)
            case nn.LayerNorm():
                nn.init.ones_(part.weight)
                nn.init.zeros_(part.bias)
