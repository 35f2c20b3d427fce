"""Norms, and initialisation: a normal truncated at 2σ, biases 0, LayerNorms 1 and 0.

Sources: Devlin et al. 2018, appendix A.2; `truncated_normal_initializer(0.02)` in Google's code.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bothways.model.config import EncoderConfig, PreNorm


def layer_norm(config: EncoderConfig, width: int | None = None) -> nn.LayerNorm | nn.RMSNorm:
    """Return the norm of a configuration, over `width` or the encoder's features."""
    if config.norm == "rms":
        return nn.RMSNorm(width or config.width, config.norm_epsilon)
    return nn.LayerNorm(width or config.width, config.norm_epsilon, bias=config.bias.norm)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Let new modules have names and shapes but no memory for weights, to be assigned later."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Leaves out random draws.

    For weights without memory, torch would import its compiler to do nothing with them, which takes
    longer than all the rest of loading a small model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = kwargs or {}
        if func.__name__.endswith(("normal_", "uniform_")):
            return args[0] if args else arguments["tensor"]
        return func(*args, **arguments)


def initialise(module: nn.Module, config: EncoderConfig, outputs: tuple[str, ...] = ()) -> None:
    """Initialise Linear, Conv1d, Embedding and norm layers with torch's generator.

    Blocks of pre-norm encoders add their outputs to one residual path: the matrices that write to
    it have σ/√(2·depth) (Radford et al. 2019, section 2.3; Shoeybi et al. 2019).

    Args:
        outputs: names of further matrices with that σ, in ModernBERT's order alone.
    """
    scaled = config.initial_range / math.sqrt(2 * config.depth)
    outputs = outputs if config.order == PreNorm(embedding=True) else ()
    if isinstance(config.order, PreNorm):
        outputs = (*outputs, "attention.out", "mlp.down")
    for name, submodule in module.named_modules():
        match submodule:
            case nn.Linear() | nn.Conv1d():
                sigma = scaled if name.endswith(outputs) else config.initial_range
                truncated_normal(submodule.weight, sigma)
                if submodule.bias is not None:
                    nn.init.zeros_(submodule.bias)
            case nn.Embedding():
                truncated_normal(submodule.weight, config.initial_range)
            case nn.LayerNorm():
                nn.init.ones_(submodule.weight)
                if submodule.bias is not None:
                    nn.init.zeros_(submodule.bias)
            case nn.RMSNorm():
                nn.init.ones_(submodule.weight)


@torch.no_grad()
def truncated_normal(weight: Tensor, sigma: float) -> None:
    """Fill with draws from N(0, σ²), repeating those outside 2σ.

    torch's own version uses the inverse error function, which takes seconds for a BERT-base.
    """
    weight.normal_(0, sigma)
    while weight.device.type != "meta" and (outside := weight.abs() > 2 * sigma).any():
        weight[outside] = torch.empty(int(outside.sum()), device=weight.device).normal_(0, sigma)
