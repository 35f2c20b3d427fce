"""Models made of some layers of another one: the start of a student."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from bothways.core.errors import ConfigError
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.model.positions import Learned

_BLOCK, _POSITION = "encoder.blocks.", "encoder.embedding.position.weight"
_SEGMENT = "encoder.embedding.segment.weight"


def spread_layers(count: int, depth: int) -> tuple[int, ...]:
    """Return `count` layers of 1 … `depth` from the first to the last, as even as they can be.

    For 6 of 12 they are DistilBERT's: 1, 3, 5, 8, 10, 12.
    """
    if count == 1:
        return (1,)
    return tuple(1 + int(n * (depth - 1) / (count - 1) + 0.5) for n in range(count))


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
    student = Model(encoder, model.specification)
    student.load_state_dict(_chosen(model.state_dict(), layers, not encoder.segments))
    student.kept = model.kept
    return student


def _chosen(state: dict[str, Tensor], layers: Sequence[int], folded: bool) -> dict[str, Tensor]:
    """Return the tensors of these layers under their new numbers, and all that are in none."""
    selected = {name: tensor for name, tensor in state.items() if not name.startswith(_BLOCK)}
    for number, layer in enumerate(layers):
        prefix = f"{_BLOCK}{layer - 1}."
        selected |= {
            f"{_BLOCK}{number}.{name.removeprefix(prefix)}": tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
    if folded and _SEGMENT in selected:
        selected[_POSITION] = selected[_POSITION] + selected.pop(_SEGMENT)[0]
    return selected
