"""Every family's structure in a small size, and a batch for it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bothways.core.batch import Batch, Layout
from bothways.model.attention.patterns import Blocks, Full, Window
from bothways.model.config import Dropouts, EncoderConfig, Gated, Sharing
from bothways.model.families.catalogue import PRESETS, preset
from bothways.model.heads import (
    ChoiceHead,
    Head,
    LabelHead,
    MaskedHead,
    NextTokenHead,
    PairHead,
    PoolerHead,
    ReplacedHead,
    SpanHead,
    TagHead,
)
from bothways.model.model import Model
from bothways.model.positions import Disentangled, Rotary

LENGTHS = [70, 9, 70, 21, 1]
EVERY_HEAD: dict[str, Head] = {
    head.kind: head
    for head in (
        MaskedHead(), PoolerHead(), PairHead(), LabelHead(3), TagHead(3), SpanHead(), ChoiceHead(),
        ReplacedHead(), NextTokenHead(),
    )
}  # fmt: skip
"""The library's heads by kind."""
SMALL = EncoderConfig(50, 16, 3, 2, 24, dropout=Dropouts(0.2, 0.3))


def shrunk(config: EncoderConfig) -> EncoderConfig:
    """The family's own structure in a small size, with dropout wherever it has some."""
    small: dict[type, dict[str, int]] = {Window: {"radius": 3}, Blocks: {"size": 4}}
    patterns = tuple(replace(each, **small.get(type(each), {})) for each in config.patterns)
    mlp = replace(config.mlp, dropout=0.2) if isinstance(config.mlp, Gated) else config.mlp
    dropout = replace(config.dropout, hidden=0.2, attention=0.3)
    sizes: dict[str, Any] = {
        "vocab": 50, "width": 16, "depth": 3, "heads": 2, "intermediate_size": 24, "pad": 0,
        "embedding": config.embedding and 8, "key_value_heads": config.key_value_heads and 1,
    }  # fmt: skip
    position = config.position
    if isinstance(position, Disentangled) and position.convolution is not None:
        position = replace(position, convolution=replace(position.convolution, groups=2))
    return replace(config, patterns=patterns, mlp=mlp, dropout=dropout, position=position, **sizes)


DISTINCT = {repr(shrunk(preset(name))): name for name in PRESETS}
SHAPES: dict[str, EncoderConfig] = {name: shrunk(preset(name)) for name in DISTINCT.values()} | {
    "shared": replace(SMALL, depth=4, sharing=Sharing(groups=2, layers_per_group=2)),
    "window": replace(SMALL, patterns=(Window(2), Full()), position=Rotary(128)),
    "no dropout": replace(SMALL, dropout=Dropouts(0.0, 0.0)),
    "one layer": replace(SMALL, depth=1),
}


def batch_for(config: EncoderConfig, lengths: list[int] = LENGTHS) -> Batch:
    layout, generator = Layout.of(lengths), torch.Generator().manual_seed(3)
    ids = torch.randint(4, config.vocab, (layout.tokens,), generator=generator)
    has_global = isinstance(config, EncoderConfig) and config.has_global_attention
    chosen = layout.positions == 0 if has_global else None
    return Batch(ids, torch.zeros_like(ids), layout, {}, chosen)


def kept_bytes(model: Model, batch: Batch) -> int:
    """Bytes that a forward pass of the encoder keeps for the backward pass, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # each storage once, alive so that no other takes its place

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.encoder(batch)
    return sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights)
