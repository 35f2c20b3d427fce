"""One model input on the CPU, before it is packed with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bothways.core.batch import Targets, TargetsT

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Sequence:
    """An example that must not be split between batches: a text, a pair, or several choices.

    Attributes:
        ids: token ids `(n)`, [CLS] and [SEP] included.
        segments: 0 for A, 1 for B `(n)`.
        targets: by objective.
        parts: the lengths of its texts, which do not attend to each other, such as the choices
            of a question; empty for a single text.
        global_attention_mask: True for global tokens `(n)`; None if there are none.
        word_starts: True where a word begins `(n)`, any value at special tokens; None where the
            vocabulary alone says so.
        causal: whether each token attends to itself and to those before it alone, in an encoder
            that is bidirectional otherwise.
    """

    ids: Ids
    segments: NDArray[np.int8]
    targets: Mapping[str, Targets] = field(default_factory=dict)
    parts: tuple[int, ...] = ()
    global_attention_mask: NDArray[np.bool_] | None = None
    word_starts: NDArray[np.bool_] | None = None
    causal: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def target(self, name: str, cls: type[TargetsT]) -> TargetsT:
        """Return the targets called `name`, which must be of type `cls`; its arrays are NumPy's."""
        from bothways.core.batch import target_of

        return target_of(self.targets, name, cls)
