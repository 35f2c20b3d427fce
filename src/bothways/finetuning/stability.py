"""Measures that keep fine-tuning on few labels stable: changes of the start and of the optimizer.

The parts of a model have levels, as in ELECTRA: the embeddings 0, block i (from 1) i, the pooler
depth + 1, the heads depth + 2, where depth is the number of blocks that have weights. Bias
correction, warm-up and longer runs, which help as much, are settings of `training.run.Training`.

Sources: Zhang et al., Revisiting few-sample BERT fine-tuning (2020); Mosbach et al., On the
stability of fine-tuning BERT (2020); Li et al., Explicit inductive bias for transfer learning
(2018); Clark et al. (2020) and their code for ELECTRA.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import torch

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError
from bothways.core.source import rng
from bothways.model.init import initialise
from bothways.model.model import Model
from bothways.training.optimizers import ParameterRule, ParameterRules


@dataclass(frozen=True)
class Stability:
    """The stability measures of a fine-tuning run. The defaults change nothing.

    Attributes:
        layer_decay: the rate of a part at level l is the run's rate times this to the power of
            (depth + 2 − l).
        reinitialise: number of top blocks that start at random, together with the pooler.
        frozen: number of parts that are not trained, from below: embeddings, block 1, block 2 …; 1
            is the embeddings alone.
        pull: decay toward the pre-trained weights, per unit of rate, in addition to the
            optimizer's `decay` toward 0. For L2-SP alone, set `decay` to 0.
    """

    layer_decay: float = 1.0
    reinitialise: int = 0
    frozen: int = 0
    pull: float = 0.0

    def __post_init__(self) -> None:
        require_range("(0, 1]", "stability", layer_decay=self.layer_decay)
        require_at_least(
            0, "stability", reinitialise=self.reinitialise, frozen=self.frozen, pull=self.pull
        )


def level(name: str, depth: int) -> int:
    """Return the level of a parameter of a `Model` or of its training module."""
    name = name.removeprefix("model.")
    if block := re.match(r"encoder\.blocks\.(\d+)\.", name):
        return int(block[1]) + 1
    if name.startswith(("encoder.embedding.", "encoder.relative.")):
        return 0
    if name.startswith("encoder.convolution."):
        return 1
    return depth + 1 if name.startswith(("encoder.", "heads.pooler.")) else depth + 2


def is_pretrained(name: str, stability: Stability, depth: int, fresh: Collection[str]) -> bool:
    """Return True if a parameter starts from pre-training: not heads, nor what is fresh."""
    last_level = depth + 1 if stability.reinitialise == 0 else depth - stability.reinitialise
    pooler = name.removeprefix("model.").startswith("heads.pooler.")
    return level(name, depth) <= last_level and not (pooler and "pooler" in fresh)


def parameter_rules(
    stability: Stability, model: Model, fresh: Collection[str] = ()
) -> ParameterRules:
    """Return a function of the rate and pull of each parameter, for `build_optimizer`."""
    depth = len(model.encoder.blocks)

    def rule(name: str) -> ParameterRule:
        """Return the rule of a parameter; the factors are those of ELECTRA's code."""
        pull = stability.pull if is_pretrained(name, stability, depth, fresh) else 0.0
        return ParameterRule(float(stability.layer_decay ** (depth + 2 - level(name, depth))), pull)

    return rule


def apply_stability(
    model: Model, stability: Stability, seed: int, fresh: Collection[str] = ()
) -> None:
    """Prepare a loaded model in place: reinitialise parts, freeze others, mix dense layers.

    Draws are keyed by the seed; torch's generator is unchanged.

    Args:
        fresh: heads that start at random.

    Raises:
        ConfigError: the encoder has too few blocks, or a part would be both frozen and new.
    """
    depth, new = len(model.encoder.blocks), stability.reinitialise
    if new > depth:
        message = f"the encoder has {depth} blocks, not {new}"
        fix = f"Set it to {depth} or less."
        raise ConfigError(message, where="stability.reinitialise", fix=fix)
    freezable = depth + 1 - new
    if stability.frozen > freezable:
        parts = f"{freezable} parts to freeze (embeddings and blocks that keep their weights)"
        message = f"there are {parts}, not {stability.frozen}"
        raise ConfigError(message, where="stability.frozen", fix=f"Set it to {freezable} or less.")
    pooler = [model.heads["pooler"]] if "pooler" in model.heads else []
    # A generator of its own: other random draws of the run stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng(seed, "reinitialise").integers(2**63)))
        for module in [*list(model.encoder.blocks)[depth - new :], *pooler] if new else []:
            initialise(module, model.config)
    for name, parameter in model.named_parameters():
        if level(name, depth) < stability.frozen:
            parameter.requires_grad_(False)
