"""BERT or RoBERTa → Longformer, a start for training on long texts (Beltagy et al. 2020, section
5).

The position embeddings are repeated, so that neighbours keep the vectors of neighbours; the
projections of global tokens start as copies of those of all tokens. Up to the window, and without
global tokens, the outputs are those of the original model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bothways.attention.patterns import Window
from bothways.core.errors import ConfigError
from bothways.families import roberta
from bothways.families.longformer import LONGFORMER
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead, PoolerHead
from bothways.model.init import without_weights
from bothways.model.model import Model
from bothways.model.positions import Learned

_POSITIONS = "encoder.embedding.position.weight"


POSITIONS, WINDOW = 4096, 512
"""The authors' values of the longest input and of the tokens that each one attends to."""


def lengthened(model: Model, positions: int = POSITIONS, window: int = WINDOW) -> Model:
    """Return the encoder as a Longformer, with the masked LM head, or else the pooler.

    Args:
        positions: the longest input, in tokens.
        window: tokens that each one attends to, on both sides together.

    Raises:
        ConfigError: the window is odd or below 2, there are fewer positions than before, the model
            has neither head, or its encoder is not that of a BERT or RoBERTa.
    """
    if window < 2 or window % 2:
        raise ConfigError(f"must be an even number above 0, not {window}", where="window")
    old = model.config
    if (
        not isinstance(old, EncoderConfig)
        or not isinstance(old.position, Learned)
        or old.pad is None
    ):
        raise ConfigError(_OTHER, where="encoder.position", fix=_FIX)
    if positions < old.position.max_positions:
        what = f"must be at least the model's {old.position.max_positions}, not {positions}"
        raise ConfigError(what, where="positions")
    head = next((head for head in (MaskedHead(), PoolerHead()) if head.kind in model.heads), None)
    if head is None:
        what = "a Longformer is made of a model with a masked LM head or a pooler"
        raise ConfigError(what, where="heads", fix=_FIX)
    config = _long(old, old.pad, positions, window)
    if LONGFORMER.config_rules.write(config) is None or (
        head == MaskedHead() and (old.readout.masked or old.activation) != "gelu"
    ):
        raise ConfigError(_OTHER, where="encoder", fix=_FIX)
    with without_weights():
        result = Model(config, (head,))
    result.load_state_dict(
        _weights(model, old.position, config, list(result.state_dict())), assign=True
    )
    result.kept = model.kept
    return result.eval()


_OTHER = "this encoder differs from Longformer's by more than the attention"
_FIX = "Give a BERT or RoBERTa as it was pre-trained, with exact GELU."


def _long(old: EncoderConfig, pad: int, positions: int, window: int) -> EncoderConfig:
    """Return the configuration of the Longformer; its positions count from the padding id."""
    patterns = (Window(window // 2, global_attention=True),)
    readout = replace(roberta.base().readout, output=old.readout.output)
    return replace(old, position=Learned(positions, pad + 1), patterns=patterns, readout=readout)


def _weights(
    model: Model, place: Learned, config: EncoderConfig, names: list[str]
) -> dict[str, Tensor]:
    state = model.state_dict()
    unused, rows = state[_POSITIONS].split([place.offset, place.max_positions])
    assert isinstance(config.position, Learned)
    first = rows.new_zeros(config.position.offset, rows.shape[1])
    first[: len(unused)] = unused[: len(first)]
    times = -(-config.position.max_positions // place.max_positions)
    tiled = torch.cat([first, rows.repeat(times, 1)[: config.position.max_positions]])
    return {
        name: tiled if name == _POSITIONS else state[name.replace(".global_qkv.", ".qkv.")].clone()
        for name in names
    }
