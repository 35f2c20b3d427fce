"""Models made from another one: of some of its layers, as a student's start, or a larger shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from bothways.core.errors import ConfigError
from bothways.model.block import Attention
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.model.positions import Learned

_BLOCK, _POSITION = "encoder.blocks.", "encoder.embedding.position.weight"
_SEGMENT = "encoder.embedding.segment.weight"


def _origin(name: str, layers: Sequence[int]) -> str:
    """Return the name of a weight in another model, of which a model has these layers, from 1."""
    if not name.startswith(_BLOCK):
        return name
    number, rest = name.removeprefix(_BLOCK).split(".", 1)
    return f"{_BLOCK}{layers[int(number)] - 1}.{rest}"


def spread_layers(count: int, depth: int) -> tuple[int, ...]:
    """Return `count` layers of 1 … `depth` from the first to the last, as even as they can be.

    For 6 of 12 they are DistilBERT's: 1, 3, 5, 8, 10, 12.
    """
    if count == 1:
        return (1,)
    return tuple(1 + int(n * (depth - 1) / (count - 1) + 0.5) for n in range(count))


GROWING = ("depth", "width", "heads", "intermediate_size")
"""Settings that may be larger than in the model a run starts from."""


def growth_obstacles(model: EncoderConfig, encoder: EncoderConfig) -> list[str]:
    """Return the settings for which `encoder` is not a larger shape of `model`."""
    names = [name for name in GROWING if getattr(encoder, name) < getattr(model, name)]
    if model.width // model.heads != encoder.width // encoder.heads:
        names.append("heads")
    like = dataclasses.replace(
        encoder, dropout=model.dropout, **{name: getattr(model, name) for name in GROWING}
    )
    names += layer_differences(model, like)
    return names if model.sharing is None else [*names, "sharing"]


def grow(model: Model, encoder: EncoderConfig) -> Model:
    """Return a model of a larger shape that repeats the weights of a smaller one.

    Each matrix of the smaller model is in the middle of the larger one and is repeated around it,
    queries, keys, values and gates each by themselves and by whole heads; layers are repeated in
    order. ModernBERT-large starts so from the base size (Warner et al. 2024, section 2.2.2; Rae et
    al. 2021, appendix G.3.3 for the layers).

    Raises:
        ConfigError: the encoder is smaller or differs in more than size and dropout.
    """
    if names := growth_obstacles(model.config, encoder):
        message = f"is not a larger shape of the model that it starts from: {', '.join(names)}"
        fix = "Only depth, width, heads of the same size and intermediate_size may be larger."
        raise ConfigError(message, where="encoder", fix=fix)
    larger, state = Model(encoder, model.specification), model.state_dict()
    layers = spread_layers(encoder.depth, model.config.depth)
    stacks, head_size = dict[str, int](), encoder.width // encoder.heads
    for prefix, module in larger.named_modules():
        for name, count in getattr(module, "hidden_matrices", {}).items():
            stem = f"{prefix}.{name.removesuffix('weight')}"
            stacks[f"{stem}weight"] = stacks[f"{stem}bias"] = count
        if isinstance(module, Attention):
            stacks[f"{prefix}.bias"] = 2  # of queries and values
    weights = dict[str, Tensor]()
    for name, tensor in larger.state_dict().items():
        source, count = state[_origin(name, layers)], stacks.get(name, 1)
        in_heads, output = ".attention." in name, ".attention.out." in name
        rows = source.unflatten(0, (count, -1)) if source.ndim else source
        for axis, size in enumerate(tensor.shape):
            unit = head_size if in_heads and output == (axis == 1) else 1
            # Repeated around its middle, by whole units.
            stop, length = size // count if axis == 0 else size, rows.shape[axis + 1]
            offset = (stop - length) // 2 // unit * unit
            rows = rows.index_select(axis + 1, (torch.arange(stop) - offset) % length)
        weights[name] = rows.flatten(0, 1) if source.ndim else rows
    larger.load_state_dict(weights)
    larger.kept = model.kept
    return larger


def layer_differences(model: EncoderConfig, encoder: EncoderConfig) -> list[str]:
    """Return the settings for which `encoder` cannot have the layers of `model`."""
    folds = not encoder.segments and isinstance(model.position, Learned)
    like = dataclasses.replace(
        encoder,
        depth=model.depth,
        dropout=model.dropout,
        readout=model.readout,
        segments=model.segments if folds else encoder.segments,
    )
    names = [field.name for field in dataclasses.fields(like)]
    return [name for name in names if getattr(like, name) != getattr(model, name)]


def with_layers(model: Model, encoder: EncoderConfig, layers: Sequence[int]) -> Model:
    """Return a model of shape `encoder` with these layers of another one, and its heads.

    Without a segment embedding, that of segment 0 is added to the positions: the same vectors for
    a text of one segment. (DistilBERT's own code drops it.)

    Args:
        layers: from 1, one for each of the encoder's.

    Raises:
        ConfigError: the encoder differs in more than layers, segments, dropout and readout, or a
            layer does not exist.
    """
    source, location = model.config, "start_layers"
    if source.sharing is not None:
        message = "cannot be chosen: the layers of this model share their weights"
        raise ConfigError(
            message, where=location, fix="Leave them out, or start from another model."
        )
    if len(layers) != encoder.depth or not all(1 <= layer <= source.depth for layer in layers):
        message = (
            f"must be {encoder.depth} layers, one for each of the encoder, "
            f"from 1 to {source.depth}, not {', '.join(map(str, layers))}"
        )
        raise ConfigError(message, where=location, fix=f"Set encoder.depth={len(layers)}.")
    if names := layer_differences(source, encoder):
        message = f"the encoder differs from the model that it starts from in {', '.join(names)}"
        fix = "Only depth, segments, dropout and readout may differ; or leave start_layers out."
        raise ConfigError(message, where="encoder", fix=fix)
    student, state = Model(encoder, model.specification), model.state_dict()
    selected = {name: state[_origin(name, layers)] for name in student.state_dict()}
    if not encoder.segments and _SEGMENT in state:
        selected[_POSITION] = state[_POSITION] + state[_SEGMENT][0]
    student.load_state_dict(selected)
    student.kept = model.kept
    return student
