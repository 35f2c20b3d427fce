"""What a forward pass does once a batch, which `forward_flops`, a count for each token, leaves out."""

from collections.abc import Iterable

import torch

from bothways.model.config import EncoderConfig
from bothways.model.embedding import row_of
from bothways.model.heads import Head, MaskedHead
from bothways.model.positions import Disentangled


def batch_flops(config: EncoderConfig, heads: Iterable[Head], longest: int) -> float:
    """Operations that make keys and queries of relative positions, in all layers, where the longest sequence is so long."""
    if not isinstance(config, EncoderConfig) or not isinstance(config.position, Disentangled):
        return 0.0
    position = config.position
    decoded = 2 if position.absolute == "decoder" and MaskedHead() in tuple(heads) else 0
    first, last = row_of(position, torch.tensor([1 - longest, longest - 1])).tolist()
    matrices = (
        3 if position.shared else len(position.terms)
    )  # with the content's, values are made as well
    return float((config.steps + decoded) * 2 * (last - first + 1) * matrices * config.width**2)
