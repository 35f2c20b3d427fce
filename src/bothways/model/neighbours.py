"""The neighbours of tokens, as language models predict them: from the left, or from both sides."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from bothways.core.sequence import Sequence
from bothways.core.targets import Targets, TokenTargets
from bothways.model.encoder import Hidden
from bothways.model.heads import Neighbour
from bothways.model.model import Model


def with_neighbours(sequence: Sequence, neighbours: tuple[Neighbour, ...]) -> Sequence:
    """Return the sequence with the neighbours of its tokens as targets."""
    ids, places = sequence.ids.astype(np.int64), np.arange(len(sequence))
    found = {
        "next": TokenTargets(places[:-1], ids[1:]),
        "previous": TokenTargets(places[1:], ids[:-1]),
    }
    targets: dict[str, Targets] = {name: found[name] for name in neighbours}
    return dataclasses.replace(sequence, targets=targets)


def neighbour_logits(
    model: Model, hidden: Hidden, rows: Int[Tensor, " rows"], neighbour: Neighbour
) -> Float[Tensor, "rows vocab"]:
    """Return the logits of the tokens next to these positions, by a "causal" or a "bilm" head."""
    logits: Tensor
    if "bilm" in model.heads:
        logits = model.heads["bilm"](hidden.last[rows], hidden.table, neighbour)
    else:
        logits = model.heads["causal"](hidden.last[rows], hidden.table)
    return logits
