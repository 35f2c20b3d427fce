"""Evaluation on held-out documents: losses, accuracies, perplexity, and what counting reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bothways.core.batch import IGNORED, LabelTargets, TokenTargets
from bothways.core.errors import ConfigError, DataError, FolderError, require
from bothways.core.progress import SILENT, Part, Progress, track
from bothways.core.runtime.devices import Precision, choose_device, device_of, own_torch_state
from bothways.core.source import TrainingStep
from bothways.core.training_module import TrainingModule, evaluating
from bothways.data.corpus import Corpus
from bothways.data.epoch_order import AllExcept, DocumentIds
from bothways.data.loader import in_batches
from bothways.data.tables import open_table, separator_advice
from bothways.hub.model_folder import LoadedModel, load_model
from bothways.hub.resolve import resolve, resolve_run
from bothways.model.families.catalogue import family_for
from bothways.model.heads import token_head
from bothways.model.model import Model
from bothways.objectives import replaced_tokens
from bothways.objectives.gpt_bert import GPTBERT
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence
from bothways.objectives.objective import Objective
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.prediction.analysis.evaluation import COLUMNS, read_suite
from bothways.prediction.engine import evaluate_task
from bothways.pretraining import build
from bothways.pretraining.config import PretrainConfig, PretrainPhase, default_objective
from bothways.tasks.base import required
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.masked_lm.task import MinimalPairTask
from bothways.tasks.sentence_embedding.task import pool
from bothways.tasks.text_task import TextExample, example_of
from bothways.text.tokenizer import Tokenizer
from bothways.training import parallel
from bothways.training.loop import evaluate_losses
from bothways.training.meter import EvaluationScores, score_values
from bothways.training.optimizers import AdamW
from bothways.training.run import Evaluation, Training
from bothways.training.schedules import Constant, Steps

COUNTED = 10_000_000
"""Tokens of the corpus from which the unigram baseline is counted, at most."""


class HeldOut:
    """Scores a training module on the same held-out sequences, with the same masks, at each call.

    The sequences are the longest phase's, masked as `settings.evaluation_masking` says, so
    that runs with different masks compare. Besides losses, accuracies and the objective's own
    metrics it reports baselines: "unigram/…" for the losses of `TrainingModule.predicts` (token
    frequencies as probabilities, and always the most frequent token) and "majority/…" for other
    classes of sequences or tokens (their frequencies as probabilities, and always the most frequent
    class).
    """

    def __init__(
        self,
        settings: PretrainConfig,
        corpus: Corpus,
        document_ids: DocumentIds,
        plan: parallel.Plan,
        training_module: TrainingModule,
    ) -> None:
        loader = build.held_out_loader(settings, corpus, document_ids, plan)
        self._steps, tokens = list[TrainingStep](), 0
        for step in loader.epoch():
            self._steps.append(step)
            tokens += step.tokens
            if tokens >= settings.evaluation_tokens:
                break
        self._training_module, self._plan, self._settings = training_module, plan, settings
        counts = np.bincount(corpus.tokens[:COUNTED], minlength=settings.encoder.vocab)
        self.baselines = self._unigram(counts) | self._majority()

    def __call__(self, progress: Progress = SILENT, steps: int | None = None) -> dict[str, float]:
        """Return metrics by name, of the first steps or of all; equal on all ranks."""
        return self.named(self.scores(progress, steps)) | self.baselines

    def scores(self, progress: Progress = SILENT, steps: int | None = None) -> EvaluationScores:
        """Return mean losses and accuracies of the first steps, or all; equal on all ranks."""
        precision = self._settings.training.precision
        tracked = track(self._steps[:steps], progress, "evaluating")
        return evaluate_losses(self._training_module, tracked, self._plan, precision=precision)

    def named(self, scores: EvaluationScores) -> dict[str, float]:
        """Return scores and the objective's own metrics by name."""
        extra = self._settings.objective.metrics(scores, self._training_module.predicts)
        metrics = {f"held-out/{name}": value for name, value in extra.items()}
        return score_values(scores, "held-out/") | metrics

    def _targets(self, cls: type[Any], field: str) -> dict[str, NDArray[np.int64]]:
        """Return all targets of a class on this rank, by name."""
        collected: dict[str, list[NDArray[np.int64]]] = {}
        for batch in (batch for step in self._steps for batch in step.microbatches):
            for name, target in batch.targets.items():
                if isinstance(target, cls):
                    collected.setdefault(name, []).append(np.asarray(getattr(target, field)))
        return {name: np.concatenate(columns) for name, columns in collected.items()}

    def _unigram(self, counts: NDArray[np.int64]) -> dict[str, float]:
        surprise = -np.log((counts + 1) / (counts.sum() + len(counts)))
        result = {}
        for name, ids in self._targets(TokenTargets, "ids").items():
            if name not in self._training_module.predicts:
                continue  # classes of tokens, such as original and replaced
            hits = float((ids == counts.argmax()).sum())
            values = {"n": float(len(ids)), "loss": float(surprise[ids].sum()), "hits": hits}
            sums = parallel.sum_over_ranks(self._plan, values)
            if sums["n"]:
                result[f"unigram/loss/{name}"] = sums["loss"] / sums["n"]
                result[f"unigram/accuracy/{name}"] = sums["hits"] / sums["n"]
        return result

    def _majority(self) -> dict[str, float]:
        result, predicts = {}, self._training_module.predicts
        classes = self._targets(LabelTargets, "labels") | self._targets(TokenTargets, "ids")
        for name, labels in classes.items():
            if name in predicts or not np.issubdtype(labels.dtype, np.integer):
                continue  # tokens of the vocabulary, and scores
            labelled = labels[labels != IGNORED]
            highest = parallel.all_gather(self._plan, torch.tensor(labelled.max(initial=0))).max()
            counts = np.bincount(labelled, minlength=int(highest) + 1)
            shares = parallel.all_gather(self._plan, torch.from_numpy(counts)).sum(0).numpy()
            shares = shares / max(1, shares.sum())
            occurring = shares[shares > 0]
            result[f"majority/loss/{name}"] = float((occurring * np.log(1 / occurring)).sum())
            result[f"majority/accuracy/{name}"] = float(shares.max())
        return result


class MixedHeldOut:
    """Scores a training module on the held-out text of each corpus, and on all of them.

    The total is the mean over the corpora, weighted by their shares of the sequences. The metrics
    of a corpus have its name in theirs: "held-out/en/loss/masked", "unigram/en/loss/masked".
    """

    def __init__(self, corpora: Mapping[str, HeldOut], shares: Mapping[str, float]) -> None:
        self._parts, self._shares = corpora, shares
        tables = {name: held_out.baselines for name, held_out in corpora.items()}
        self._baselines = self._by_corpus(tables) | self._mean(tables)

    def __call__(self, progress: Progress = SILENT, steps: int | None = None) -> dict[str, float]:
        """Return metrics by name, of the first steps or of all; equal on all ranks."""
        scores = {
            name: held_out.scores(Part(progress, name) if name else progress, steps)
            for name, held_out in self._parts.items()
        }
        means = (
            self._mean({name: getattr(one, kind) for name, one in scores.items()})
            for kind in ("losses", "accuracies", "rates")
        )
        tables = {name: held_out.named(scores[name]) for name, held_out in self._parts.items()}
        total = next(iter(self._parts.values())).named(EvaluationScores(*means))
        return total | self._by_corpus(tables) | self._baselines

    def _mean(self, tables: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the weighted mean of what all tables have."""
        reference, *remaining = tables.values()
        common = [key for key in reference if all(key in table for table in remaining)]
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


@own_torch_state()
def evaluate_on_corpus(
    source: str,
    corpus: Corpus,
    *,
    length: int = 128,
    tokens: int = COUNTED // 10,
    device: str = "auto",
    objective: Objective | None = None,
    precision: Precision = "auto",
) -> dict[str, float]:
    """Return the metrics of a pre-trained model on a corpus, masked by a fixed seed.

    Args:
        source: a model folder, the folder of a run or a Hub id, with the vocabulary of the corpus.
        length: tokens of a sequence, at most.
        tokens: tokens of the corpus that are read, at most.
        objective: what is scored; None for the model's (`scored_objective`).

    Raises:
        ConfigError: the corpus has another vocabulary, or a discriminator no generator.
        FolderError: the model has no head that predicts tokens.
    """
    encoder = build.start_encoder(source)
    scored = objective or scored_objective(source)
    settings = PretrainConfig(
        encoder,
        Training(Steps(1), AdamW(), Constant(), precision),
        scored,
        (PretrainPhase(min(length, encoder.max_positions)),),
        evaluation_tokens=tokens,
        start=source,
    )
    training_module = build.build_training_module(settings, corpus, choose_device(device))
    documents = AllExcept(len(corpus))
    metrics = HeldOut(settings, corpus, documents, build.SINGLE, training_module)()
    return {name.removeprefix("held-out/"): value for name, value in metrics.items()}


def scored_objective(source: str) -> Objective:
    """Return the objective by which a pre-trained model is scored: it uses all of its heads.

    The labels of a pair head are those that the model was trained on: the order of two segments for
    an ALBERT or where the folder's record says so, else whether they follow each other.

    Raises:
        ConfigError: a discriminator has no generator next to it.
        FolderError: the model has no head that predicts tokens or detects replaced ones.
    """
    loaded = load_model(resolve(resolve_run(source)))
    kinds = {head.kind for head in loaded.model.specification}
    kind = token_head(loaded.model.config).kind
    if kind in kinds:
        if kind != "masked":
            return default_objective(loaded.model.config)
        if loaded.model.config.readout.shifted:
            return GPTBERT().evaluated
        # A pair head without the pooler that feeds it cannot be computed.
        if not {"pooler", "pair"} <= kinds:
            return MaskedLM()
        trained = loaded.extra.get("pretraining")
        objective = trained.get("objective") if isinstance(trained, dict) else None
        if isinstance(objective, dict) and "kind" in objective:
            by_order = objective["kind"] == MaskedLMSentenceOrder.kind
        else:
            family = family_for(loaded.model.config, loaded.tokenizer.kind)
            by_order = family is not None and family.model_type == "albert"
        return MaskedLMSentenceOrder() if by_order else MaskedLMNextSentence()
    if "replaced" in kinds:
        return replaced_tokens_of(loaded, source)
    message = f"has no head that predicts tokens: it has {', '.join(sorted(kinds)) or 'none'}"
    fix = "Give a pre-trained model. A fine-tuned one is scored on labelled data."
    raise FolderError(message, where=source, fix=fix)


def replaced_tokens_of(loaded: LoadedModel, source: str) -> replaced_tokens.ReplacedTokens:
    """Return the objective of a discriminator and the generator next to it.

    Raises:
        ConfigError: there is no generator.
    """
    folder = build.start_folders(source, ("generator",)).get("generator")
    if folder is None:
        absent = "the generator that replaces them is not next to it"
        message = f"{source} detects replaced tokens: {absent}"
        fix = "Give the folder of a run, with model/ and generator/, or the generator alone."
        raise ConfigError(message, where="model", fix=fix)
    generator, encoder = load_model(folder).model, loaded.model.config
    # Dropout changes no evaluation: it must not make the shapes differ.
    other = generator.config.with_dropout_of(encoder)
    narrower = replaced_tokens.Narrower(min(1.0, other.width / encoder.width))
    shallower = replaced_tokens.Shallower(min(1.0, other.depth / encoder.depth))
    shapes: list[replaced_tokens.Narrower | replaced_tokens.Shallower] = [narrower, shallower]
    fitting = [shape for shape in shapes if replaced_tokens.generator_of(encoder, shape) == other]
    shape = [*fitting, narrower][0]
    name = "encoder.embedding.token.weight"
    tables = [model.state_dict()[name] for model in (loaded.model, generator)]
    shared = tables[0].shape == tables[1].shape and torch.equal(*tables)
    return replaced_tokens.ReplacedTokens(generator=shape, sharing="shared" if shared else "none")


Measure = Callable[[], float]
"""Computes the accuracy of a probe on the model as it is."""


def with_probes(
    held_out: HeldOut | MixedHeldOut,
    settings: PretrainConfig,
    tokenizer: Tokenizer,
    training_module: TrainingModule,
    plan: parallel.Plan,
    progress: Progress,
) -> Evaluation:
    """Return the evaluation of a run with its probes, whose data are read now.

    The accuracy of a probe is "probe/accuracy/NAME", the majority baseline's
    "majority/probe/NAME".

    Raises:
        ConfigError: the run cannot be probed.
        DataError: a file cannot be read, or is too small for a linear probe.
        ResourceError: scikit-learn is not installed.
    """
    if not settings.probes:
        return held_out
    model = training_module.saved().get("model")
    if not isinstance(model, Model):
        raise ConfigError("need a model that the run saves, and it saves none", where="probes")
    length = max(phase.length for phase in settings.phases)
    measures, baselines = dict[str, Measure](), dict[str, float]()
    for name, source in settings.probe_names.items():
        pairs = _pairs(source)
        if pairs:
            measure, baseline = _pair_measure(model, tokenizer, length, pairs), 0.5
        else:
            require("report", "a linear probe", "sklearn")
            measure, baseline = _linear_measure(
                model, tokenizer, length, source, settings.microbatch_tokens, progress
            )
        measures[name], baselines[f"majority/probe/{name}"] = measure, baseline

    def evaluate(progress: Progress = SILENT) -> dict[str, float]:
        """Return metrics by name; equal on all ranks."""
        metrics = held_out(progress)
        progress.stage("probing")
        # Where tables are sums of others, the model is a copy of what it was at the beginning.
        model.load_state_dict(training_module.saved()["model"].state_dict())
        scores = parallel.from_main_rank(
            plan, lambda: {name: measure() for name, measure in measures.items()}
        )
        return metrics | {f"probe/accuracy/{n}": score for n, score in scores.items()} | baselines

    return evaluate


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
    if not any(head.of_vocabulary for head in model.specification):
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
        columns = ", ".join(names)
        message = f"is neither texts with labels nor minimal pairs: its columns are {columns}"
        fix = f"Call them text and label, or {COLUMNS.text} and {COLUMNS.text_b}."
        raise DataError(message, where=source, fix=separator_advice(names) or fix) from error
    task, examples = reading.task, [*reading.examples]
    encoded = task.encode(examples, tokenizer, task.labels(examples), length)
    sequences = [item.sequences[0] for item in encoded]
    labels = np.array([required(example.label, example.where) for example in examples])
    counts = np.unique(labels, return_counts=True)[1]
    if len(counts) < 2 or counts.min() < 2:
        message = "a linear probe needs two labels or more, and two texts or more of each"
        raise DataError(message, where=source, fix="Add texts, or leave it out of probes.")
    if cut := sum(item.cut > 0 for item in encoded):
        progress.message(f"note: probes: {source}: {cut:,} texts are cut to {length} tokens")
    # A fold needs a text of each label: the rarest bounds their number.
    folds = StratifiedKFold(min(5, int(counts.min())))
    solver = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))

    def measure() -> float:
        # Read again at each evaluation: the vectors change with the weights.
        rows = np.empty((len(sequences), model.config.width))
        with evaluating(model), torch.no_grad():
            for indices, batch in in_batches(sequences, max_tokens, device_of(model)):
                rows[indices] = pool(model.encoder(batch).last, batch.layout, "mean").cpu().numpy()
        return float(cross_val_score(solver, rows, labels, cv=folds).mean())

    return measure, float(counts.max() / counts.sum())
