"""Held-out documents: how well a model in pre-training predicts text that it does not learn from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.progress import OnShare, untold
from bothways.core.source import TrainingStep
from bothways.core.stages import followed
from bothways.data.batching import TokenBudget
from bothways.data.corpus import Corpus
from bothways.pretraining.build import Learning, loader_of
from bothways.pretraining.config import PretrainConfig
from bothways.training.loop import evaluate
from bothways.training.parallel import Plan, total
from bothways.training.trackers import flat

COUNTED = 10_000_000
"""Tokens of the corpus from which the unigram baseline is counted, at most."""


class HeldOut:
    """Scores a learner on the same held-out sequences, masked in the same way, each time it is called.

    The sequences are those of the longest phase. Beside the losses and accuracies stand the perplexity of predicted tokens, of
    both directions together where there are two, and the unigram baseline: always the most frequent token, and the frequencies
    as probabilities.

    Args:
        chosen: numbers of the documents that are held out.
        learner: to be scored, as it is at each call.
    """

    def __init__(
        self,
        settings: PretrainConfig,
        corpus: Corpus,
        chosen: NDArray[Any],
        plan: Plan,
        learner: Learning,
    ) -> None:
        longest = max(settings.phases, key=lambda phase: phase.length)
        size = min(settings.evaluation_tokens, 8 * settings.microbatch_tokens)
        fixed = dataclasses.replace(settings, data_copies=1, batch=TokenBudget(size))
        loader = loader_of(fixed, corpus, chosen, longest, plan, learner)
        self._steps = list(_up_to(settings.evaluation_tokens, loader.epoch()))
        self._learner, self._plan, self._precision = learner, plan, settings.training.precision
        self._unigram = self._baseline(
            np.bincount(corpus.tokens[:COUNTED], minlength=settings.encoder.vocab)
        )

    def __call__(self, on_share: OnShare = untold) -> dict[str, float]:
        """Metrics by name; equal on all ranks."""
        return self._metrics(followed(self._steps, on_share))

    def names(self) -> list[str]:
        """Of the metrics, found by a first step."""
        return list(self._metrics(self._steps[:1]))

    def _metrics(self, steps: Iterable[TrainingStep]) -> dict[str, float]:
        scores = evaluate(self._learner, steps, self._plan, precision=self._precision)
        loss = float(np.mean([scores.losses[name] for name in self._learner.predicts]))
        perplexity = math.exp(min(loss, 700.0))
        return flat(scores, "held-out/") | {"held-out/perplexity": perplexity} | self._unigram

    def _baseline(self, counts: NDArray[np.int64]) -> dict[str, float]:
        """What a model would reach that knows nothing but how frequent each token is."""
        return dict(
            pair for name in self._learner.predicts for pair in self._unigrams(name, counts).items()
        )

    def _unigrams(self, name: str, counts: NDArray[np.int64]) -> dict[str, float]:
        hidden = [
            np.asarray(b.targets[name].ids)  # type: ignore[attr-defined]
            for step in self._steps
            for b in step.microbatches
        ]
        ids = np.concatenate(hidden)
        surprise = -np.log((counts + 1) / (counts.sum() + len(counts)))
        sums = total(
            self._plan,
            {
                "n": float(len(ids)),
                "loss": float(surprise[ids].sum()),
                "hits": float((ids == counts.argmax()).sum()),
            },
        )
        return {
            f"unigram/loss/{name}": sums["loss"] / sums["n"],
            f"unigram/accuracy/{name}": sums["hits"] / sums["n"],
        }


def _up_to(tokens: int, steps: Iterator[TrainingStep]) -> Iterator[TrainingStep]:
    """Steps until they have so many tokens together; at least one."""
    for step in steps:
        yield step
        tokens -= step.tokens
        if tokens <= 0:
            return
