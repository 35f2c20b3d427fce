"""Probes of a model in the course of its pre-training: minimal pairs, and linear probes.

Minimal pairs need no training (`tasks.masked_lm`). A linear probe is a logistic regression on the
mean of the last layer's vectors, standardised, scored by cross-validation on the same table: it
shows what can be read from frozen features (Alain and Bengio 2016). Both read the model as it is
and draw no random number, so a run with probes has the updates of one without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bothways.core.errors import ConfigError, DataError, require
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import device_of
from bothways.core.training_module import TrainingModule, evaluating
from bothways.data.loader import in_batches
from bothways.data.tables import open_table, separator_advice
from bothways.model.model import Model
from bothways.prediction.analysis.evaluation import COLUMNS, read_suite
from bothways.prediction.engine import evaluate_task
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.evaluation import HeldOut, MixedHeldOut
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.masked_lm.task import MinimalPairTask
from bothways.tasks.sentence_embedding.task import pool
from bothways.tasks.text_task import TextExample, example_of
from bothways.text.tokenizer import Tokenizer
from bothways.training.parallel import Plan, Sharded, from_main_rank

FOLDS = 5
"""Parts of a table: the model of each is fitted to the others."""
ITERATIONS = 1000
"""The most steps of the solver."""

Measure = Callable[[], float]
"""Computes the accuracy of a probe on the model as it is."""


@dataclass
class Probes:
    """An evaluation of held-out text, and the probes of a run, as metrics of one evaluation.

    Attributes:
        held_out: the evaluation without probes.
        measures: the probes by name.
        baselines: accuracies of a constant answer, as "majority/probe/NAME".
    """

    held_out: HeldOut | MixedHeldOut
    plan: Plan
    measures: dict[str, Measure] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)

    def __call__(self, progress: Progress = SILENT) -> dict[str, float]:
        """Return metrics by name, those of a probe as "probe/accuracy/NAME"; equal on all ranks."""
        metrics = self.held_out(progress)
        progress.stage("probing")
        probed = from_main_rank(
            self.plan,
            lambda: {
                f"probe/accuracy/{name}": measure() for name, measure in self.measures.items()
            },
        )
        return metrics | probed | self.baselines

    def names(self) -> Iterator[str]:
        """Yield the names of the metrics."""
        yield from self.held_out.names()
        yield from (f"probe/accuracy/{name}" for name in self.measures)


def with_probes(
    held_out: HeldOut | MixedHeldOut,
    settings: PretrainConfig,
    tokenizer: Tokenizer,
    training_module: TrainingModule,
    plan: Plan,
    progress: Progress,
) -> HeldOut | MixedHeldOut | Probes:
    """Return the evaluation of a run with its probes, whose data are read now.

    Raises:
        ConfigError: the run cannot be probed.
        DataError: a file cannot be read, or is too small for a linear probe.
        ResourceError: scikit-learn is not installed.
    """
    if not settings.probes:
        return held_out
    if isinstance(plan, Sharded):
        message = "cannot be computed by ranks that share a model"
        raise ConfigError(message, where="probes", fix="Set sharding=none.")
    model = training_module.saved().get("model")
    if not isinstance(model, Model):
        raise ConfigError("need a model that the run saves, and it saves none", where="probes")
    result, length = Probes(held_out, plan), max(phase.length for phase in settings.phases)
    for name, source in settings.probe_names.items():
        pairs = _pairs(source)
        if pairs:
            measure, baseline = _pair_measure(model, tokenizer, length, pairs), 0.5
        else:
            require("report", "a linear probe", "sklearn")
            measure, baseline = _linear_measure(
                model, tokenizer, length, source, settings.microbatch_tokens, progress
            )
        result.measures[name], result.baselines[f"majority/probe/{name}"] = measure, baseline
    return result


def _pairs(source: str) -> list[TextExample]:
    """Return the minimal pairs of a folder or a file; none if the file is another table."""
    if Path(source).is_dir():
        return [example for _, example in read_suite(Path(source))]
    rows = open_table(source).rows
    first = next(rows, None)
    if first is None or not {COLUMNS.text, COLUMNS.text_b} <= {*first.values}:
        return []
    return [example_of(row.values, COLUMNS, row.where) for row in (first, *rows)]


def _pair_measure(
    model: Model, tokenizer: Tokenizer, length: int, pairs: list[TextExample]
) -> Measure:
    """Return a function that computes the accuracy on minimal pairs by the head of tokens."""
    if not {"masked", "causal"} & {*model.heads}:
        message = "has minimal pairs, which need a model that predicts tokens"
        fix = "Give a labelled table, or another objective."
        raise ConfigError(message, where="probes", fix=fix)
    task = MinimalPairTask(variant="word_l2r").fitted(model)
    task_model = task.bind(model, tokenizer, (), length)

    def measure() -> float:
        with evaluating(model):
            return evaluate_task(task_model, pairs)["accuracy"]

    return measure


def _linear_measure(
    model: Model,
    tokenizer: Tokenizer,
    length: int,
    source: str,
    max_tokens: int,
    progress: Progress,
) -> tuple[Measure, float]:
    """Return a function for the accuracy of a linear probe, and the share of the largest class."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    try:
        reading = ClassificationTask().read(source)
    except DataError as error:
        # The task's error names options for its columns, and a run has none for those of a probe.
        names = open_table(source).names
        message = "is neither texts with labels nor minimal pairs: its columns are "
        message += ", ".join(names)
        fix = f"Call them text and label, or {COLUMNS.text} and {COLUMNS.text_b}."
        raise DataError(message, where=source, fix=separator_advice(names) or fix) from error
    task, examples = reading.task, [*reading.examples]
    encoded = task.encode(examples, tokenizer, task.labels(examples), length)
    sequences = [item.sequences[0] for item in encoded]
    labels = np.array([example.label for example in examples])
    counts = np.unique(labels, return_counts=True)[1]
    if len(counts) < 2 or counts.min() < 2:
        message = "a linear probe needs two labels or more, and two texts or more of each"
        raise DataError(message, where=source, fix="Add texts, or leave it out of probes.")
    if cut := sum(item.cut > 0 for item in encoded):
        progress.message(f"note: probes: {source}: {cut:,} texts are cut to {length} tokens")
    # A fold needs a text of each label: the rarest bounds their number.
    folds = StratifiedKFold(min(FOLDS, int(counts.min())))
    solver = make_pipeline(StandardScaler(), LogisticRegression(max_iter=ITERATIONS))

    def measure() -> float:
        # Read again at each evaluation: the vectors change with the weights.
        rows = np.empty((len(sequences), model.config.width))
        with evaluating(model), torch.no_grad():
            for indices, batch in in_batches(sequences, max_tokens, device_of(model)):
                rows[indices] = pool(model.encoder(batch).last, batch.layout, "mean").cpu().numpy()
        return float(cross_val_score(solver, rows, labels, cv=folds).mean())

    return measure, float(counts.max() / counts.sum())
