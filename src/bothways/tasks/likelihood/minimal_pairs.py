"""Minimal pairs: of two texts, which one a masked language model finds more likely.

The texts of a pair differ in one point of grammar, and the first is right, as in BLiMP (Warstadt et
al. 2020). A model is right if the pseudo-log-likelihood of the first text is higher (Salazar et al.
2020). No label and no training is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from bothways.core.errors import DataError
from bothways.tasks.base import (
    Direction,
    EncodedExample,
    Metrics,
    Output,
    TaskLearner,
    nothing_to_score,
)
from bothways.tasks.likelihood.task import LikelihoodScorer, LikelihoodTask
from bothways.tasks.predictions import PreferencePrediction
from bothways.tasks.text_examples import HOW, TextColumns, TextExample
from bothways.tasks.zero_shot import MaskedTask
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class _EncodedPair(EncodedExample):
    """The sequences of the first text, then those of the second.

    Attributes:
        first: number of sequences of the first text.
    """

    first: int


@dataclass(frozen=True)
class MinimalPairTask(MaskedTask[PreferencePrediction]):
    """The choice between two texts by their pseudo-log-likelihood.

    Attributes:
        variant: what is masked with a token; see `LikelihoodTask`.
    """

    metric: ClassVar[str] = "accuracy"
    window: ClassVar[int] = 128
    learner_type: ClassVar[type[TaskLearner[Any, Any]]] = LikelihoodScorer

    variant: Literal["original", "word_l2r"] = "original"
    kind: Literal["prefer"] = "prefer"

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Return the accuracy."""
        return {"accuracy": "highest"}

    def check_columns(self, columns: TextColumns, where: str) -> None:
        """Raise a DataError for single texts."""
        if columns.text_b is None:
            what = f"has one text a row, {columns.text!r}; two are compared, the right one first"
            raise DataError(what, where=where, fix=HOW)

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """Return the sequences of both texts; errors as `LikelihoodTask.encode`."""
        texts = [
            TextExample(text, where=example.where)
            for example in examples
            for text in (example.text, example.text_b or "")
        ]
        every = LikelihoodTask(variant=self.variant).encode(texts, tokenizer, labels, length)
        return [
            _EncodedPair(
                a.sequences + b.sequences, a.tokens + b.tokens, a.cut + b.cut, len(a.sequences)
            )
            for a, b in zip(every[::2], every[1::2], strict=True)
        ]

    def decode(
        self,
        example: TextExample,
        encoded: EncodedExample,
        outputs: Many[Output],
        tokenizer: Tokenizer,
        labels: Many[str],
    ) -> PreferencePrediction:
        """Return the pseudo-log-likelihoods of both texts."""
        assert isinstance(encoded, _EncodedPair)
        sums = [float(output[0]) for output in outputs]
        first, second = sums[: encoded.first], sums[encoded.first :]
        return PreferencePrediction(math.fsum(first), math.fsum(second))

    def score(
        self, results: Iterable[tuple[TextExample, PreferencePrediction]], labels: Many[str]
    ) -> Metrics:
        """Return "accuracy", the share of pairs whose first text is more likely, and "pairs"."""
        right = [self.grade(example, prediction, labels) for example, prediction in results]
        if not right:
            raise nothing_to_score("pair")
        return {"accuracy": sum(right) / len(right), "pairs": len(right)}

    def grade(
        self, example: TextExample, prediction: PreferencePrediction, labels: Many[str]
    ) -> float:
        """Return 1 if the first text is more likely than the second, else 0."""
        return float(prediction.first > prediction.second)
