"""Evaluation on held-out documents: losses, accuracies, perplexity, and what counting reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bothways.core.progress import SILENT, Part, Progress, track
from bothways.core.runtime.devices import Precision, choose_device
from bothways.core.source import TrainingStep
from bothways.core.targets import IGNORED, LabelTargets, TokenTargets
from bothways.core.training_module import TrainingModule
from bothways.data.batching import TokenBudget
from bothways.data.corpus import Corpus
from bothways.data.epoch_order import AllExcept, DocumentIds, sample_clustered
from bothways.objectives.masked_lm import with_masking
from bothways.objectives.objective import Objective
from bothways.pretraining.build import build_models, loader_of, start_encoder, vocabulary_of
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.model_objective import scored_objective
from bothways.training.durations import Steps
from bothways.training.loop import evaluate
from bothways.training.meter import EvaluationScores
from bothways.training.optimizers import AdamW
from bothways.training.parallel import Plan, Single, all_gather, sum_over_ranks
from bothways.training.run import Training
from bothways.training.schedules import Constant
from bothways.training.trackers import score_values

COUNTED = 10_000_000
"""Tokens of the corpus from which the unigram baseline is counted, at most."""


class HeldOut:
    """Scores a learner on the same held-out sequences, with the same masks, at each call.

    The sequences are those of the longest phase, masked as `settings.evaluation_masking` says, so
    that runs with different masks compare. Besides losses, accuracies and the objective's own
    metrics it reports baselines: "unigram/…" for the losses of `TrainingModule.predicts` (token
    frequencies as probabilities, and always the most frequent token) and "majority/…" for other
    classes of sequences or tokens (their frequencies as probabilities, and always the most frequent
    class).

    Args:
        chosen: ids of the held-out documents.
        learner: to be scored, as it is at each call.
    """

    def __init__(
        self,
        settings: PretrainConfig,
        corpus: Corpus,
        chosen: DocumentIds,
        plan: Plan,
        learner: TrainingModule,
    ) -> None:
        longest = max(range(len(settings.phases)), key=lambda n: settings.phases[n].length)
        size = min(settings.evaluation_tokens, 8 * settings.microbatch_tokens)
        fixed = dataclasses.replace(
            settings,
            objective=with_masking(settings.objective, settings.evaluation_masking),
            phases=tuple(dataclasses.replace(phase, masking=None) for phase in settings.phases),
            data_copies=1,
            shuffle=None,
            batch=TokenBudget(size),
        )
        if settings.shuffle is not None:
            chosen = sample_clustered(corpus, chosen, settings.evaluation_tokens, settings.seed)
        loader = loader_of(fixed, corpus, chosen, plan, longest)
        self._steps = list(_up_to(settings.evaluation_tokens, loader.epoch()))
        self._learner, self._plan, self._settings = learner, plan, settings
        counts = np.bincount(corpus.tokens[:COUNTED], minlength=settings.encoder.vocab)
        self.baselines = self._unigram(counts) | self._majority()

    def __call__(self, progress: Progress = SILENT) -> dict[str, float]:
        """Return metrics by name; equal on all ranks."""
        return self.named(self.scores(progress)) | self.baselines

    def scores(self, progress: Progress = SILENT) -> EvaluationScores:
        """Return mean losses and accuracies; equal on all ranks."""
        return self._scores(track(self._steps, progress, "evaluating"))

    def names(self) -> Iterator[str]:
        """Yield the names of the metrics, from a first step, which the first name costs."""
        yield from self.named(self._scores(self._steps[:1])) | self.baselines

    def _scores(self, steps: Iterable[TrainingStep]) -> EvaluationScores:
        precision = self._settings.training.precision
        return evaluate(self._learner, steps, self._plan, precision=precision)

    def named(self, scores: EvaluationScores) -> dict[str, float]:
        """Return scores and the objective's own metrics by name."""
        more = self._settings.objective.metrics(scores, self._learner.predicts)
        named = {f"held-out/{name}": value for name, value in more.items()}
        return score_values(scores, "held-out/") | named

    def _targets(self, cls: type[Any], field: str) -> dict[str, NDArray[np.int64]]:
        """Return all targets of a class on this rank, by name."""
        parts: dict[str, list[NDArray[np.int64]]] = {}
        for batch in (batch for step in self._steps for batch in step.microbatches):
            for name, target in batch.targets.items():
                if isinstance(target, cls):
                    parts.setdefault(name, []).append(np.asarray(getattr(target, field)))
        return {name: np.concatenate(columns) for name, columns in parts.items()}

    def _unigram(self, counts: NDArray[np.int64]) -> dict[str, float]:
        """Return what token frequencies alone reach."""
        surprise = -np.log((counts + 1) / (counts.sum() + len(counts)))
        result = {}
        for name, ids in self._targets(TokenTargets, "ids").items():
            if name not in self._learner.predicts:
                continue  # classes of tokens, such as original and replaced
            sums = sum_over_ranks(
                self._plan,
                {
                    "n": float(len(ids)),
                    "loss": float(surprise[ids].sum()),
                    "hits": float((ids == counts.argmax()).sum()),
                },
            )
            result[f"unigram/loss/{name}"] = sums["loss"] / sums["n"]
            result[f"unigram/accuracy/{name}"] = sums["hits"] / sums["n"]
        return result

    def _majority(self) -> dict[str, float]:
        """Return what class frequencies alone reach."""
        result, predicts = {}, self._learner.predicts
        classes = self._targets(LabelTargets, "labels") | {
            name: ids
            for name, ids in self._targets(TokenTargets, "ids").items()
            if name not in predicts
        }
        for name, labels in classes.items():
            if not np.issubdtype(labels.dtype, np.integer):
                continue  # scores
            known = labels[labels != IGNORED]
            highest = all_gather(self._plan, torch.tensor(known.max(initial=0))).max()
            counts = np.bincount(known, minlength=int(highest) + 1)
            shares = all_gather(self._plan, torch.from_numpy(counts)).sum(0).numpy()
            shares = shares / max(1, shares.sum())
            result[f"majority/loss/{name}"] = float(-(shares * np.log(shares + 1e-12)).sum())
            result[f"majority/accuracy/{name}"] = float(shares.max())
        return result


class MixedHeldOut:
    """Scores a learner on the held-out text of each corpus, and on all of them.

    The total is the mean over the corpora, weighted by their shares of the sequences. The metrics
    of a corpus have its name in theirs: "held-out/en/loss/masked", "unigram/en/loss/masked".

    Args:
        parts: by the name of the corpus.
        shares: of the sequences drawn from each; they add up to 1.
    """

    def __init__(self, parts: Mapping[str, HeldOut], shares: Mapping[str, float]) -> None:
        self._parts, self._shares = parts, shares
        tables = {name: part.baselines for name, part in parts.items()}
        self._baselines = self._by_corpus(tables) | self._mean(tables)

    def __call__(self, progress: Progress = SILENT) -> dict[str, float]:
        """Return metrics by name; equal on all ranks."""
        scores = {
            name: part.scores(Part(progress, name) if name else progress)
            for name, part in self._parts.items()
        }
        whole = EvaluationScores(
            self._mean({name: each.losses for name, each in scores.items()}),
            self._mean({name: each.accuracies for name, each in scores.items()}),
            self._mean({name: each.rates for name, each in scores.items()}),
        )
        named = {name: part.named(scores[name]) for name, part in self._parts.items()}
        total = next(iter(self._parts.values())).named(whole)
        return total | self._by_corpus(named) | self._baselines

    def names(self) -> Iterator[str]:
        """Yield the names of the metrics, from a first step of each corpus."""
        tables = {name: dict.fromkeys(part.names(), 0.0) for name, part in self._parts.items()}
        yield from {**self._mean(tables), **self._by_corpus(tables)}

    def _mean(self, tables: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the weighted mean of what all tables have."""
        first, *others = tables.values()
        common = [key for key in first if all(key in table for table in others)]
        return {
            key: sum(self._shares[name] * table[key] for name, table in tables.items())
            for key in common
        }

    @staticmethod
    def _by_corpus(tables: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return all tables as one, with the corpus after the first part of each name."""
        return {
            "/".join([key.split("/", 1)[0], name, key.split("/", 1)[1]]): value
            for name, table in tables.items()
            for key, value in table.items()
        }


def evaluate_on_corpus(
    source: str,
    corpus: Corpus,
    *,
    length: int = 128,
    tokens: int = COUNTED // 10,
    device: str = "auto",
    objective: Objective | None = None,
    documents: DocumentIds | None = None,
    precision: Precision = "auto",
) -> dict[str, float]:
    """Return the metrics of a pre-trained model on a corpus, masked by a fixed seed.

    Args:
        source: a model folder, the folder of a run or a Hub id, with the vocabulary of the corpus.
        length: tokens of a sequence, at most.
        tokens: tokens of the corpus that are read, at most.
        objective: what is scored; None for that of the model (`scored_objective`).
        documents: ids of the documents that are read; None for all.

    Raises:
        ConfigError: the corpus has another vocabulary, or a discriminator no generator.
        FolderError: the model has no head that predicts tokens.
    """
    encoder = start_encoder(source)
    usual = objective or scored_objective(source)
    settings = PretrainConfig(
        encoder,
        Training(Steps(1), AdamW(), Constant(), precision),
        usual,
        (PretrainPhase(min(length, encoder.max_positions)),),
        evaluation_tokens=tokens,
        start=source,
    )
    where = choose_device(device)
    models = build_models(settings, corpus)
    learner = usual.learner(models, vocabulary_of(corpus, usual)).to(where)
    chosen = AllExcept(len(corpus)) if documents is None else documents
    scored = HeldOut(settings, corpus, chosen, Single(), learner)()
    return {name.removeprefix("held-out/"): value for name, value in scored.items()}


def _up_to(tokens: int, steps: Iterator[TrainingStep]) -> Iterator[TrainingStep]:
    """Yield steps until they have this many tokens together; at least one."""
    for step in steps:
        yield step
        tokens -= step.tokens
        if tokens <= 0:
            return
