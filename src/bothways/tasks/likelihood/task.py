"""Pseudo-log-likelihood of texts (Salazar et al. 2020) and pseudo-perplexity.

Each token is masked in turn and predicted from all others; the sum of the log probabilities is the
text's pseudo-log-likelihood (PLL). Masking one piece of a word while its other pieces are visible
makes long words look likely, so the variant "word_l2r" (Kauf & Ivanova 2023) also masks the pieces
of the word to the right of the predicted one.

A text of n tokens is n sequences that share one array of ids: masks are written on the device. The
head is computed at the predicted token only. A text longer than the model's input is read in
pieces, one after the other and each by itself, so that no token is dropped. The pseudo-perplexity
of several texts is exp(−ΣPLL / Σtokens); special tokens are visible but not predicted, and do not
count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.advice import argument
from bothways.core.batch import Batch, TokenTargets
from bothways.core.errors import DataError
from bothways.core.loss import perplexity
from bothways.core.sequence import Sequence
from bothways.tasks import base
from bothways.tasks.predictions import LikelihoodPrediction
from bothways.tasks.text_task import TextExample
from bothways.tasks.zero_shot import ROWS, MaskedTask, vocabulary_logits
from bothways.text.template import assemble
from bothways.text.tokenizer import Encoded, Tokenizer


class MaskedScorer(base.TaskModel[TextExample, base.P]):
    """A task on likelihoods with a model that has the head "masked"; see `TaskModel`."""

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return the log probability of each sequence's first masked token `(1)`, in nats."""
        targets = batch.target("masked", TokenTargets)
        index, truth = torch.as_tensor(targets.index), torch.as_tensor(targets.ids)
        owners = batch.layout.sequence_ids[index]
        counts = torch.bincount(owners, minlength=batch.layout.sequences)
        first = counts.cumsum(0) - counts
        ids = batch.ids.index_fill(0, index, self.tokenizer.specials.mask)
        masked = Batch(ids, batch.segments, batch.layout)
        logits = vocabulary_logits(self.model, masked, index[first])
        logs = torch.cat(
            [
                chunk.log_softmax(-1).gather(1, wanted[:, None])
                for chunk, wanted in zip(logits, torch.split(truth[first], ROWS), strict=True)
            ]
        )
        return list(logs.cpu().numpy())


class LikelihoodScorer(MaskedScorer[LikelihoodPrediction]):
    """The likelihood of texts with a model that has the head "masked"; see `TaskModel`."""

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> LikelihoodPrediction:
        """Return the tokens of the text, each with its log probability."""
        ids = [item.target("masked", TokenTargets).ids[0] for item in encoded.sequences]
        tokens = tuple(self.tokenizer.token(int(id)) for id in ids)
        return LikelihoodPrediction(tokens, tuple(float(output[0]) for output in outputs))


@dataclass(frozen=True)
class LikelihoodTask(MaskedTask[LikelihoodPrediction]):
    """The pseudo-log-likelihood of texts.

    Attributes:
        variant: what is masked with a token: nothing else, or the rest of its word too.
    """

    aliases: ClassVar[Many[str]] = ("perplexity", "pll")
    model_class: ClassVar[type[base.TaskModel[Any, Any]]] = LikelihoodScorer
    metric: ClassVar[str] = "pseudo_perplexity"
    metrics: ClassVar[Mapping[str, base.Direction]] = {"pseudo_perplexity": "lowest"}
    window: ClassVar[int] = 256

    variant: Literal["original", "word_l2r"] = "original"
    kind: Literal["likelihood"] = "likelihood"

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return a sequence for each token; its targets are the masked tokens, the predicted first.

        Raises:
            DataError: a text has a mask, whose token is unknown.
        """
        texts = tokenizer.encode_with_offsets([example.text for example in examples])
        return [
            self._encode(example, text, tokenizer, length)
            for example, text in zip(examples, texts, strict=True)
        ]

    def _encode(
        self, example: TextExample, text: Encoded, tokenizer: Tokenizer, length: int
    ) -> base.EncodedExample:
        mask = tokenizer.specials.mask
        if mask in text.ids:
            message = f"the text has a {tokenizer.token(mask)}, whose token is unknown"
            raise DataError(
                message, where=example.where, fix=f"To predict it, use {argument(task='fill')}."
            )
        sequences = []
        first, room = len(tokenizer.template.before), length - tokenizer.template.single
        for start in range(0, len(text.ids), room):
            chunk = slice(start, start + room)
            bare = assemble(text.ids[chunk], None, tokenizer.template)
            for index in self._masked(text.words[chunk], first):
                targets = {"masked": TokenTargets(index, bare.ids[index].astype(np.int64))}
                sequences.append(Sequence(bare.ids, bare.segments, targets))
        return base.EncodedExample(tuple(sequences), len(text.ids), 0)

    def _masked(self, words: NDArray[np.int32], first: int) -> list[NDArray[np.int64]]:
        """Return the positions to mask for each predicted token, itself first.

        Args:
            words: the word of each token, ascending `(tokens)`.
            first: the position of the first token.
        """
        starts = np.arange(first, len(words) + first)
        match self.variant:
            case "original":
                stops = starts + 1
            case "word_l2r":
                stops = np.searchsorted(words, words, side="right") + first
            case _:
                assert_never(self.variant)
        pairs = zip(starts, stops, strict=True)
        return [np.arange(start, stop, dtype=np.int64) for start, stop in pairs]

    def score(
        self, results: Iterable[tuple[TextExample, LikelihoodPrediction]], labels: Many[str]
    ) -> base.Metrics:
        """Return "pseudo_perplexity" of all texts, their "pll" in nats, and counts."""
        texts, tokens, total = 0, 0, 0.0
        for _, prediction in results:
            texts, tokens = texts + 1, tokens + len(prediction.tokens)
            total += prediction.log_likelihood
        if not tokens:
            raise base.nothing_to_score("token")
        mean = perplexity(-total / tokens)
        return {"pseudo_perplexity": mean, "pll": total, "tokens": tokens, "texts": texts}

    def grade(
        self, example: TextExample, prediction: LikelihoodPrediction, labels: Many[str]
    ) -> float:
        """Return the mean log probability of a token."""
        return prediction.log_likelihood / max(1, len(prediction.tokens))
