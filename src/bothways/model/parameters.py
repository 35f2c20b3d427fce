"""The parameters of a model, part by part.

They are counted on a model without memory for its weights, so the figures hold for every family.
The textbook says that a BERT has V·H + 12·L·H² parameters. That leaves out positions, segments,
biases, LayerNorms and heads: about one in a hundred for the base size.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bothways.core.errors import ConfigError
from bothways.model.config import EncoderConfig
from bothways.model.heads import Head
from bothways.model.init import without_weights
from bothways.model.model import Model


@dataclass(frozen=True)
class ParameterEntry:
    """A part of a model.

    Attributes:
        part: its name.
        tensors: shapes and how many of each, such as "12 × (768, 768)".
        count: its parameters.
        textbook: whether V·H + 12·L·H² counts it.
    """

    part: str
    tensors: str
    count: int
    textbook: bool = False


@dataclass(frozen=True)
class ParameterTable:
    """All parts of a model; a tensor that two parts share belongs to the first."""

    entries: tuple[ParameterEntry, ...]

    @property
    def textbook(self) -> int:
        """Parameters that V·H + 12·L·H² counts."""
        return sum(entry.count for entry in self.entries if entry.textbook)

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(entry.count for entry in self.entries)


_TEXTBOOK = {
    "token embedding": r"encoder\.embedding\.token\.weight",
    "attention: query, key, value, output": (
        r"encoder\.blocks\..*attention\.(qkv(\.\w+)?|out)\.weight"
    ),
    "feed-forward": r"encoder\.blocks\..*mlp\.(up|down)\.weight",
}
_PARTS = _TEXTBOOK | {
    "attention of global tokens": r"encoder\.blocks\..*\.global_qkv\.weight",
    "position embedding": r"encoder\.embedding\.position\..*",
    "relative positions": r"encoder\.relative\..*",
    "relative positions: keys and queries": r"encoder\.blocks\..*\.position_(key|query)\..*",
    "convolution": r"encoder\.convolution\..*",
    "segment embedding": r"encoder\.embedding\.segment\..*",
    "task embedding": r"encoder\.embedding\.task\..*",
    "embedding to width": r"encoder\.embedding\.project\..*",
    "attention biases": r"encoder\.blocks\..*attention\..*bias",
    "feed-forward biases": r"encoder\.blocks\..*mlp\..*bias",
    "LayerNorms": r"encoder\..*norm\..*",
}
"""The names of the tensors of an encoder's parts; the first pattern that fits decides."""


def parameter_table(config: EncoderConfig, heads: Iterable[Head] = ()) -> ParameterTable:
    """Count the parameters of the encoder and of these heads, with the pooler if they read it.

    Raises:
        ConfigError: a tensor would be too large for any machine.
    """
    try:
        with without_weights():
            model = Model(config, heads)
    except RuntimeError as error:  # torch's, for sizes beyond 64 bits
        raise ConfigError(f"the tensors would be too large: {error}", where="encoder") from error
    patterns = _PARTS | {head.title: rf"heads\.{head.kind}\..*" for head in model.specification}
    shapes_by_component: dict[str, list[tuple[int, ...]]] = {
        component: [] for component in patterns
    }
    for name, parameter in model.named_parameters():
        component = next(
            component for component, names in patterns.items() if re.fullmatch(names, name)
        )
        shapes_by_component[component].append(tuple(parameter.shape))
    entries = list[ParameterEntry]()
    for component, shapes in shapes_by_component.items():
        if shapes:
            # Equal shapes are written once.
            tensors = " + ".join(
                f"{f'{count} × ' if count > 1 else ''}({', '.join(f'{side:,}' for side in shape)})"
                for shape, count in Counter(shapes).items()
            )
            total = sum(map(math.prod, shapes))
            entries.append(ParameterEntry(component, tensors, total, component in _TEXTBOOK))
    return ParameterTable(tuple(entries))
