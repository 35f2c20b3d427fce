"""Google's initialisation: weights from a normal cut off at 2σ, biases 0, LayerNorms at 1 and 0.

Source: Devlin et al. 2018, appendix A.2; the reference code's `truncated_normal_initializer(0.02)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Within it, new modules have names and shapes, and no memory for their weights, which are then assigned."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Leaves out random draws: for weights without memory, torch would import its compiler to make nothing of them.

    That took longer than all the rest of loading a small model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func.__name__.endswith(("normal_", "uniform_")):
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def initialise(module: nn.Module, initial_range: float) -> None:
    """Set every Linear, Conv1d, Embedding, LayerNorm and LSTM under `module` to its start, with torch's default generator."""
    for part in module.modules():
        match part:
            case nn.Linear() | nn.Conv1d():
                truncated_normal(part.weight, initial_range)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
            case nn.Embedding():
                truncated_normal(part.weight, initial_range)
            case nn.LayerNorm():
                nn.init.ones_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
            case nn.LSTM():
                part.reset_parameters()
                _open_forget_gates(part)


@torch.no_grad()
def _open_forget_gates(lstm: nn.LSTM) -> None:
    """Biases 0, those of forget gates 1: at the start nothing is forgotten (Jozefowicz et al. 2015, section 2.2)."""
    cells = lstm.hidden_size
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias"):
            parameter.zero_()
        if name.startswith("bias_ih"):
            parameter[cells : 2 * cells] = (
                1.0  # the gates in torch's order: input, forget, cell, output
            )


@torch.no_grad()
def truncated_normal(weight: Tensor, sigma: float) -> None:
    """Fill with draws from N(0, σ²), drawing again what lies outside 2σ.

    torch's own goes through the inverse error function, which takes several seconds for a BERT-base.
    """
    weight.normal_(0, sigma)
    while weight.device.type != "meta" and (outside := weight.abs() > 2 * sigma).any():
        weight[outside] = torch.empty(int(outside.sum()), device=weight.device).normal_(0, sigma)
