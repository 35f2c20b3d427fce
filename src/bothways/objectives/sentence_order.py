"""Masked LM and sentence order prediction, as ALBERT (Lan et al. 2019, section 3.1).

The pair head predicts whether two consecutive segments are in order (0) or swapped (1), the meaning
of `sentence_order_label` in transformers' AlbertForPreTraining.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.data.masking import Masking
from bothways.data.segments import SentenceOrder
from bothways.objectives.masked_lm import MaskedObjective


@dataclass(frozen=True)
class MaskedLMSentenceOrder(MaskedObjective):
    """Masked LM and sentence order prediction on pairs of consecutive segments."""

    segments: SentenceOrder = SentenceOrder()
    masking: Masking = Masking()
    z_loss: float = 0.0
    kind: Literal["masked_lm_sop"] = "masked_lm_sop"
    pairs = True
