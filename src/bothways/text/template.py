"""[CLS] A [SEP] and [CLS] A [SEP] B [SEP]: how texts become one input (Devlin et al. 2018, figure 2)."""

from __future__ import annotations

import numpy as np

from bothways.core.sequence import Ids, Sequence
from bothways.text.files import Specials


def assemble(a: Ids, b: Ids | None, specials: Specials) -> Sequence:
    """One or two texts `(n)`, `(m)` → [CLS] A [SEP] (B [SEP]); segment 0 up to the first [SEP], 1 after it."""
    first = [[specials.cls], a, [specials.sep]]
    second = [] if b is None else [b, [specials.sep]]
    ids = np.concatenate([*first, *second]).astype(np.int32)
    segments = np.zeros(len(ids), dtype=np.int8)
    segments[len(a) + 2 :] = 1
    return Sequence(ids, segments)
