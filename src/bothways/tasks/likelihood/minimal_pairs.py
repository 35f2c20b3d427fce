"""Minimal pairs: of two texts, which one a language model finds more likely.

The texts of a pair differ in one point of grammar, and the first is right, as in BLiMP (Warstadt et
al. 2020). A model is right if the log-likelihood of the first text is higher: for a masked language
model the pseudo-log-likelihood (Salazar et al. 2020), for one that reads left to right the sum of
log p(token | tokens before it). No label and no training is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import assert_never

from bothways.core.advice import argument
from bothways.core.batch import Batch, TokenTargets, next_tokens
from bothways.core.errors import DataError
from bothways.core.sequence import Sequence
from bothways.model.heads import Head, MaskedHead, NextTokenHead
from bothways.tasks import base
from bothways.tasks.likelihood.task import LikelihoodTask, MaskedScorer
from bothways.tasks.predictions import PreferencePrediction
from bothways.tasks.text_task import EncodedTexts, TextColumns, TextExample
from bothways.tasks.zero_shot import ROWS, MaskedTask
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer


class PairScorer(MaskedScorer[PreferencePrediction]):
    """Minimal pairs with a model that has the head of the task's variant; see `TaskModel`."""

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return for each sequence `(1)` the log-likelihood, or that of its masked token."""
        if "masked" in batch.targets:
            return super().outputs(batch)
        hidden = self.model.encoder(batch)
        sums = torch.zeros(batch.layout.sequences, dtype=torch.float64, device=batch.ids.device)
        targets = batch.target("next", TokenTargets)
        for rows, ids in zip(
            torch.split(torch.as_tensor(targets.index), ROWS),
            torch.split(torch.as_tensor(targets.ids), ROWS),
            strict=True,
        ):
            logits = self.model.heads["causal"](hidden.last[rows], hidden.table).float()
            logs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].double()
            sums.index_add_(0, batch.layout.sequence_ids[rows], logs)
        return list(sums[:, None].float().cpu().numpy())

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> PreferencePrediction:
        """Return the log-likelihoods of both texts."""
        assert isinstance(encoded, EncodedTexts)
        first, second = encoded.by_text([float(output[0]) for output in outputs])
        return PreferencePrediction(math.fsum(first), math.fsum(second))


@dataclass(frozen=True)
class MinimalPairTask(MaskedTask[PreferencePrediction]):
    """The choice between two texts by their log-likelihood.

    Attributes:
        variant: "original" and "word_l2r" are for masked models (`LikelihoodTask`), "causal" is for
            models that read left to right. Without a setting it is the one for the model's head.
    """

    aliases: ClassVar[Many[str]] = ("blimp", "minimal-pairs")
    metric: ClassVar[str] = "accuracy"
    metrics: ClassVar[Mapping[str, base.Direction]] = {"accuracy": "highest"}
    window: ClassVar[int] = 128
    model_class: ClassVar[type[base.TaskModel[Any, Any]]] = PairScorer

    variant: Literal["original", "word_l2r", "causal"] = "original"
    kind: Literal["prefer"] = "prefer"

    def fitted(self, heads: Collection[str]) -> MinimalPairTask:
        """Return the task with the variant for the head that predicts tokens."""
        return dataclasses.replace(self, variant="causal") if "causal" in heads else self

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Return the head that predicts tokens."""
        match self.variant:
            case "original" | "word_l2r":
                return (MaskedHead(),)
            case "causal":
                return (NextTokenHead(),)
            case _:
                assert_never(self.variant)

    def check_columns(self, columns: TextColumns, where: str) -> None:
        """Raise a DataError for single texts."""
        if columns.text_b is None:
            message = f"has one text a row, {columns.text!r}; two are compared, the right one first"
            fix = f"Name both: {argument(text='NAME', text_b='NAME')}."
            raise DataError(message, where=where, fix=fix)

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedTexts]:
        """Return the sequences of both texts; errors as `LikelihoodTask.encode`."""
        texts = [
            TextExample(text, where=example.where)
            for example in examples
            for text in (example.text, example.text_b or "")
        ]
        encoded: list[base.EncodedExample]
        match self.variant:
            case "original" | "word_l2r":
                scored = LikelihoodTask(variant=self.variant)
                encoded = scored.encode(texts, tokenizer, labels, length)
            case "causal":
                encoded = self._encode_texts(texts, tokenizer, length)
            case _:
                assert_never(self.variant)
        pairs = zip(encoded[::2], encoded[1::2], strict=True)
        return [EncodedTexts.of(pair) for pair in pairs]

    def _encode_texts(
        self, texts: Many[TextExample], tokenizer: Tokenizer, length: int
    ) -> list[base.EncodedExample]:
        """Return each text as a sequence, or as several if it is longer than the model reads."""
        room = length - tokenizer.template.single

        def pieces(ids: Any) -> Iterator[Sequence]:
            """Yield the sequences of a text."""
            for start in range(0, len(ids), room):
                bare = assemble(ids[start : start + room], None, tokenizer.template)
                yield dataclasses.replace(bare, targets={"next": next_tokens(bare.ids)})

        encoded = tokenizer.encode([text.text for text in texts])
        return [base.EncodedExample(tuple(pieces(ids)), len(ids), 0) for ids in encoded]

    def score(
        self, results: Iterable[tuple[TextExample, PreferencePrediction]], labels: Many[str]
    ) -> base.Metrics:
        """Return "accuracy", the share of pairs whose first text is more likely, and "pairs"."""
        correct = [self.grade(example, prediction, labels) for example, prediction in results]
        if not correct:
            raise base.nothing_to_score("pair")
        return {"accuracy": sum(correct) / len(correct), "pairs": len(correct)}

    def grade(
        self, example: TextExample, prediction: PreferencePrediction, labels: Many[str]
    ) -> float:
        """Return 1 if the first text is more likely than the second, else 0."""
        return float(prediction.first > prediction.second)
