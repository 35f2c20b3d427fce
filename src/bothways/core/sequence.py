"""One model input on the CPU, before it is packed with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bothways.core.batch import Targets

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Sequence:
    """`ids` `(n)`: token ids, [CLS] and [SEP] included. `segments` `(n)`: 0 for A, 1 for B. `targets`: one per objective."""

    ids: Ids
    segments: NDArray[np.int8]
    targets: Mapping[str, Targets] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)
