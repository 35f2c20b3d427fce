"""What a student is compared with its teacher by, one value for each loss.

| loss | compares | source |
|---|---|---|
| `SoftTargets` | softmax(z/T) over the vocabulary | DistilBERT (Sanh et al. 2019) |
| `MaskedTokens` | nothing: masked LM, from the text | DistilBERT |
| `CosineStates` | the directions of last vectors | DistilBERT |
| `HiddenStates` | embeddings and outputs of layers | TinyBERT (Jiao et al. 2019) |
| `AttentionScores` | queries · keys in layers | TinyBERT |
| `Relations` | queries, keys and values, each with themselves | MiniLMv2 (Wang et al. 2020) |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.targets import Targets

RELATIONS = ("queries", "keys", "values")
"""The losses of `Relations`, in the order of an encoder's projections."""


@dataclass(frozen=True)
class MaskedTokens:
    """Masked LM: cross-entropy of the hidden tokens; the loss "masked"."""

    weight: float = 1.0
    kind: Literal["masked_tokens"] = "masked_tokens"


@dataclass(frozen=True)
class SoftTargets:
    """T² · KL(teacher ‖ student) of softmax(z/T) over the vocabulary; the loss "soft".

    Attributes:
        weight: the factor of the mean over tokens.
        temperature: T.
        at: all tokens, as in DistilBERT's code by default, or the masked ones: less to compute.
    """

    weight: float = 1.0
    temperature: float = 2.0
    at: Literal["all", "masked"] = "all"
    kind: Literal["soft_targets"] = "soft_targets"


@dataclass(frozen=True)
class CosineStates:
    """1 − cosine of the last vectors; the loss "cosine"."""

    weight: float = 1.0
    kind: Literal["cosine"] = "cosine"


@dataclass(frozen=True)
class HiddenStates:
    """Squared error of embeddings and outputs of layers: the losses "embedding" and "hidden".

    The mean over tokens and features, summed over the layers of the student. If the widths differ,
    one linear map for all layers, which is not saved, makes the student's vectors as wide as the
    teacher's. TinyBERT's code has this map for equal widths, too.
    """

    weight: float = 1.0
    kind: Literal["hidden"] = "hidden"


@dataclass(frozen=True)
class AttentionScores:
    """Squared error of attention scores, before softmax; the loss "attention".

    The mean over heads and pairs of tokens of a sequence, summed over the layers of the student.
    """

    weight: float = 1.0
    kind: Literal["attention"] = "attention"


@dataclass(frozen=True)
class Relations:
    """KL(teacher ‖ student) of softmax(A Aᵀ/√d), for A the queries, keys and values of one layer.

    The heads of a layer are joined and cut again into relation heads of d features, for teacher and
    student alike, so that widths and numbers of attention heads may differ. The losses "queries",
    "keys" and "values" are means over relation heads and tokens. What the student's layer does
    after its projections gets no gradient.

    Source: Wang et al. 2020 (MiniLMv2), section 3.

    Attributes:
        weight: the factor of each of the three.
        heads: relation heads; they divide both widths.
        teacher_layer, student_layer: from 1; None for the last one.
    """

    weight: float = 1.0
    heads: int = 48
    teacher_layer: int | None = None
    student_layer: int | None = None
    kind: Literal["relations"] = "relations"


DistilLoss = MaskedTokens | SoftTargets | CosineStates | HiddenStates | AttentionScores | Relations


@dataclass(frozen=True)
class Counted(Targets):
    """1 for each token of a sequence that counts, `(tokens)`; 0 where a rank has nothing left."""

    weight: NDArray[np.float32] | Tensor

    def without_weight(self) -> Counted:
        """Return the weight 0."""
        return type(self)(np.zeros_like(self.weight))


def loss_names(loss: DistilLoss) -> tuple[str, ...]:
    """Return the names of a loss in the records of a run."""
    match loss:
        case MaskedTokens():
            return ("masked",)
        case SoftTargets():
            return ("soft",)
        case CosineStates():
            return ("cosine",)
        case HiddenStates():
            return "embedding", "hidden"
        case AttentionScores():
            return ("attention",)
        case Relations():
            return RELATIONS
        case _:
            assert_never(loss)
