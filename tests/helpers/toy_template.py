"""[CLS] A [SEP] B [SEP] with 2 as [CLS] and 3 as [SEP]."""

import numpy as np

from bothways.text.template import Gap, Template


def gap(id: int, segment: int = 0) -> Gap:
    return Gap(np.array([id], dtype=np.int32), np.array([segment], dtype=np.int8))


TEMPLATE = Template(gap(2), gap(3), gap(2), gap(3), gap(3, 1))
