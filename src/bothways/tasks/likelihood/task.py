"""How likely a masked model finds a text: pseudo-log-likelihood (Salazar et al. 2020) and pseudo-perplexity.

Each token is hidden in turn and predicted from all the others; the sum of the log probabilities is the text's pseudo-log-
likelihood (PLL). Hiding one piece of a word while its other pieces are seen makes long words look likely, so the variant
"word_l2r" (Kauf & Ivanova 2023) hides the pieces of the word to the right of it too.

Notable choices. A text of n tokens is n sequences, which share one array of ids: what is hidden is written in on the device.
The head computes at the one token that is predicted. A text longer than the model is read in pieces, one after the other, each
seen alone, so that no token is left out. The pseudo-perplexity of many texts is exp(−ΣPLL / Σtokens); special tokens are seen
but not predicted, and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.batch import Batch
from bothways.core.errors import DataError
from bothways.core.sequence import Sequence
from bothways.core.targets import TokenTargets
from bothways.model.head_config import Head, MaskedHead
from bothways.model.model import Model
from bothways.tasks.predictions import LikelihoodPrediction
from bothways.tasks.task import Direction, Metrics
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.tasks.text_examples import NOT_NAMED, TextColumns, TextExample
from bothways.tasks.zero_shot import ROWS, ZeroShotTask, counts_of, vocabulary_logits
from bothways.text.template import assemble
from bothways.text.tokenizer import Encoded, Tokenizer

Variant = Literal["original", "word_l2r"]


@dataclass(frozen=True)
class LikelihoodTask(ZeroShotTask[LikelihoodPrediction]):
    """The pseudo-log-likelihood of texts.

    Attributes:
        columns: where the texts are.
        variant: what is hidden with a token: nothing else, or the rest of its word too.
    """

    metric: ClassVar[str] = "pseudo_perplexity"
    window: ClassVar[int] = 256

    columns: TextColumns = NOT_NAMED
    variant: Variant = "original"
    kind: Literal["likelihood"] = "likelihood"

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """The masked head."""
        return (MaskedHead(),)

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Of a token."""
        return {"pseudo_perplexity": "lowest"}

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """A sequence for each token, whose targets are the hidden tokens: first the one that is predicted.

        Raises:
            DataError: a text with a mask, whose token is not known.
        """
        texts = tokenizer.encode_with_offsets([example.text for example in examples])
        return [
            self._input(example, text, tokenizer, length)
            for example, text in zip(examples, texts, strict=True)
        ]

    def _input(
        self, example: TextExample, text: Encoded, tokenizer: Tokenizer, length: int
    ) -> EncodedExample:
        mask = tokenizer.specials.mask
        if mask in text.ids:
            fix = "Find out what belongs there: --task fill."
            raise DataError(
                f"the text holds {tokenizer.token(mask)}, which has no likelihood",
                where=example.where,
                fix=fix,
            )
        sequences = []
        first, room = len(tokenizer.template.before), length - tokenizer.template.single
        for start in range(0, len(text.ids), room):
            part = slice(start, start + room)
            bare = assemble(text.ids[part], None, tokenizer.template)
            for index in self._hidden(text.words[part], first):
                targets = {"masked": TokenTargets(index, bare.ids[index].astype(np.int64))}
                sequences.append(Sequence(bare.ids, bare.segments, targets))
        return EncodedExample(tuple(sequences), len(text.ids), 0)

    def _hidden(self, words: NDArray[np.int32], first: int) -> list[NDArray[np.int64]]:
        """The places that are hidden to predict each token, itself first; words `(tokens)`, the first at place `first`."""
        starts = np.arange(first, len(words) + first)
        match self.variant:
            case "original":
                stops = starts + 1
            case "word_l2r":
                stops = np.searchsorted(words, words, side="right") + first
            case _:
                assert_never(self.variant)
        return [
            np.arange(start, stop, dtype=np.int64)
            for start, stop in zip(starts, stops, strict=True)
        ]

    def task(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> LikelihoodScorer:
        """With a model that has the head "masked"."""
        return LikelihoodScorer(self, model, tokenizer, labels, length)


class LikelihoodScorer(TaskLearner[TextExample, LikelihoodPrediction]):
    """A model with the head "masked", as a task."""

    def outputs(self, batch: Batch) -> list[Output]:
        """The natural logarithm of the probability of each sequence's first hidden token `(1)`."""
        targets = cast(TokenTargets, batch.targets["masked"])
        index, truth = cast(Tensor, targets.index), cast(Tensor, targets.ids)
        counts = torch.tensor(
            counts_of(batch.layout.sequence_ids[index], batch.layout.sequences), device=index.device
        )
        first = counts.cumsum(0) - counts
        ids = batch.ids.index_fill(0, index, self.tokenizer.specials.mask)
        hidden = Batch(ids, batch.segments, batch.layout)
        logits = vocabulary_logits(self.model, hidden, index[first])
        found = zip(logits, torch.split(truth[first], ROWS), strict=True)
        logs = torch.cat(
            [part.log_softmax(-1).gather(1, wanted[:, None]) for part, wanted in found]
        )
        return list(logs.cpu().numpy())

    def decode(self, example: TextExample, outputs: Many[Output]) -> LikelihoodPrediction:
        """The tokens of the text, each with its log probability."""
        (ids,) = self.tokenizer.encode([example.text])
        return LikelihoodPrediction(
            tuple(map(self.tokenizer.token, ids)), tuple(float(output[0]) for output in outputs)
        )

    def score(self, results: Iterable[tuple[TextExample, LikelihoodPrediction]]) -> Metrics:
        """ "pseudo_perplexity" of all texts together, "pll", their pseudo-log-likelihood in nats, and what was counted.

        Raises:
            DataError: there is no token.
        """
        texts, tokens, total = 0, 0, 0.0
        for _, prediction in results:
            texts, tokens, total = (
                texts + 1,
                tokens + len(prediction.tokens),
                total + prediction.log_likelihood,
            )
        if not tokens:
            raise DataError(
                "there is no token to score", fix="Give at least one text that is not empty."
            )
        return {
            "pseudo_perplexity": float(np.exp(-total / tokens)),
            "pll": total,
            "tokens": tokens,
            "texts": texts,
        }

    def grade(self, example: TextExample, prediction: LikelihoodPrediction) -> float:
        """The mean log probability of a token."""
        return prediction.log_likelihood / max(1, len(prediction.tokens))
