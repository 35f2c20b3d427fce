"""Fine-tuning: a pre-trained model and labelled data become a model for a task.

The run folder holds the checkpoints, `metrics.jsonl`, TensorBoard's events, the resolved
`config.toml`, and at the end `model/`: a Hugging Face folder (such as
BertForSequenceClassification with `id2label`, tokenizer and model card) with the record of the
training in `bothways.json`. `report.html` analyses the predictions on the dev data.

Fine-tuning on few labels fails in some seeds and not in others: the loss stays at that of the
label frequencies (Devlin et al. 2018, section 4.1; Mosbach et al. 2020, who call a run failed if
it does not beat the majority class, `Task.baseline`). `Failure` names the signs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bothways.core.config import reader as configs
from bothways.core.config.values import flatten, require_choice
from bothways.core.errors import Finding, argument, render
from bothways.core.files import local_path
from bothways.core.progress import SILENT, Progress, track
from bothways.core.report.html import can_write, metrics_html, write_html
from bothways.core.runtime.devices import choose_device, own_torch_state
from bothways.core.source import Sequence
from bothways.core.terminal import listed, quantity, result_line
from bothways.core.training_module import TrainingModule, VectorModule
from bothways.data.loader import ExampleBudget, ListSource, Loader, ahead, unchanged
from bothways.finetuning import data as labelled, few_shot, prepare
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import LabelledData, Rows, score, train_loader
from bothways.finetuning.distillation import TaughtModule
from bothways.finetuning.lora import merge_changes
from bothways.finetuning.prepare import learning_by_rows
from bothways.finetuning.stability import Stability, parameter_rules
from bothways.hub.adapter import LowRankChange, TrainedAdapter
from bothways.hub.model_card import Card, limits_of_finetuned, run_of
from bothways.hub.model_folder import save_model
from bothways.hub.provenance import model_facts, today
from bothways.hub.resolve import portable_name, resolve, resolve_run
from bothways.hub.static_embedding import static_folder
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.prediction import PredictPrecision
from bothways.prediction.analysis.report import analyse_encoded, analysis_report, is_analysed
from bothways.prediction.engine import PredictionCounts
from bothways.prediction.predictor import Predictor
from bothways.tasks.base import Direction, Metrics, TaskModel
from bothways.tasks.sentence_embedding.task import Embedder, save_sentence_encoder
from bothways.training import parallel
from bothways.training.checkpoint import CONFIG, FolderStore, MemoryStore, Store, run_folder
from bothways.training.loop import evaluate_losses
from bothways.training.run import OnEvent, TrainingPhase, TrainingRun
from bothways.training.schedules import RunState
from bothways.training.step_cost import forward_flops, peak_of

SAMPLE = 512  # training sequences that the loss is measured on
_PERFECT = ("accuracy", "exact", "em", "f1")  # 1 if all answers are right
LEARNED, CONVERGED = 0.02, 0.3
"""Smallest decrease of the loss, as a share of the baseline's, in a run that learns; the same in a
run with many classes that is near convergence."""
MANY_CLASSES = math.log(8)
"""The baseline's loss from which a task has many classes: that of eight equally frequent ones."""


@dataclass(frozen=True)
class Failure:
    """A run that learned nothing, nothing that the metrics show, or little.

    Attributes:
        reasons: the signs, each as one clause.
        unfinished: True if the run learned, but was stopped far from convergence.
    """

    reasons: tuple[str, ...]
    unfinished: bool = False

    @property
    def failed(self) -> tuple[str, ...]:
        """The reasons why the run counts as failed; empty if it is only unfinished."""
        return () if self.unfinished else self.reasons

    def __str__(self) -> str:
        verdict = "could learn more" if self.unfinished else "has probably failed"
        advice = "more epochs (training.until) or a higher rate (training.optimizer.lr)"
        if not self.unfinished:
            seed = render(argument(seed=1))
            advice = f"other seeds ({seed}), a lower rate (training.optimizer.lr) or more epochs"
        return f"this run {verdict}: {'; '.join(self.reasons)}. Try {advice}."


def distinct_answers(
    results: Iterable[tuple[Any, Any]], answers: list[Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the same results; append the first answer, and the first that differs from it."""
    for example, prediction in results:
        if len(answers) < 2 and prediction.signature not in answers:
            answers.append(prediction.signature)
        yield example, prediction


def training_loss(
    training_module: TrainingModule,
    sequences: Many[Sequence],
    microbatch_tokens: int,
    progress: Progress = SILENT,
) -> float:
    """Return the mean loss on an even sample of the training data, without dropout."""
    sample = sequences[:: max(1, len(sequences) // SAMPLE)]
    source, size = ListSource(sample, None), ExampleBudget(len(sample))
    steps = Loader(source, unchanged, size, microbatch_tokens, 0).epoch()
    ones = [dataclasses.replace(s, microbatches=(b,)) for s in steps for b in s.microbatches]
    tracked = track(ones, progress, "measuring the training loss")
    scores = evaluate_losses(training_module, tracked, parallel.Plan(), precision="fp32")
    return sum(scores.losses.values())


def signs_of_training(loss: float, baseline: Metrics) -> tuple[tuple[str, ...], bool]:
    """Return the sign of a failed or unfinished run in the training loss; True for the latter."""
    expected = baseline.get("loss", 0.0)
    unfinished = expected >= MANY_CLASSES and (1 - LEARNED) * expected > loss
    if expected <= 0 or loss < (1 - (CONVERGED if unfinished else LEARNED)) * expected:
        return (), False
    below = "near" if unfinished else "hardly below" if loss < expected else "not below"
    message = f"{below} that of the majority baseline, {expected:.4f}"
    return (f"its training loss, {loss:.4f}, is {message}",), unfinished


def signs_of_scores(
    metrics: Metrics,
    baseline: Metrics,
    metric: str,
    direction: Direction,
    answers: Many[Any],
    count: int,
    before: Metrics | None = None,
) -> tuple[str, ...]:
    """Return the signs of a failed run in the dev metrics; none if one answer is right for all.

    Args:
        answers: a single one if all `count` dev examples have it.
        before: dev metrics of the model before training, where that had all of its weights.
    """
    if baseline.get("accuracy") == 1 or any(metrics.get(name) == 1 for name in _PERFECT):
        return ()
    signs, value, expected = [], metrics[metric], baseline.get(metric)
    better = 1 if direction == "highest" else -1
    if len(answers) == 1 < count:
        text = repr(answers[0])
        if isinstance(answers[0], frozenset):  # a set of labels
            text = " and ".join(sorted(map(repr, answers[0]))) or "nothing"
        signs.append(f"it answers {text} for all {count:,} dev examples")
    if expected is not None and better * value <= better * expected:
        majority = f"the majority baseline, {expected:.4f}"
        signs.append(f"its {metric} on the dev data, {value:.4f}, is not better than {majority}")
    if before and better * value < better * before[metric]:
        earlier = f"before training, {before[metric]:.4f}"
        signs.append(f"its {metric} on the dev data, {value:.4f}, is worse than {earlier}")
    return tuple(signs)


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run.

    Attributes:
        task_model: the model with the best weights on the dev data; without it, the last ones.
        metrics: metrics of these weights on the dev data; empty without it.
        baseline: metrics of the majority baseline on the dev data, as far as it has them: of the
            best answer that does not depend on the input, such as the most frequent class.
        before: dev metrics before training, of a model that began with all of its weights, such as
            a sentence encoder; empty where a head began at random.
        progress: state at the end.
        settings: settings of the run, with the rate and the length that were chosen for it.
        history: (epochs, metrics) of every evaluation in this session.
        failure: signs that the run failed, or could learn more; None if there is none.
        findings: warnings and notes of the preflight.
        folder: the model folder of a run in a folder; None in memory.
        origin: the data and the model of the run, for the record in `bothways.json`.
        changes: the low-rank changes of a run with `lora`, by layer; they are part of the weights.
    """

    task_model: TaskModel[Any, Any]
    metrics: Metrics
    progress: RunState
    settings: FinetuneConfig
    history: tuple[tuple[float, Metrics], ...] = ()
    failure: Failure | None = None
    findings: tuple[Finding, ...] = ()
    folder: Path | None = None
    card: Card | None = None
    baseline: Metrics = field(default_factory=dict)
    before: Metrics = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, LowRankChange] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return result_line(
            "FinetuneResult", self.metrics, steps=self.progress.steps, folder=self.folder
        )

    def _repr_html_(self) -> str | None:
        steps = quantity(self.progress.steps, "step(s)")
        title = f"Fine-tuned for {self.task_model.task.name}, {steps}"
        return metrics_html(title, {"dev": self.metrics, **self.compared()})

    def compared(self) -> dict[str, Metrics]:
        """Return what the metrics are compared with, by name, as far as it has any of them."""
        named = {"before training": self.before, "majority baseline": self.baseline}
        return {n: values for n, values in named.items() if values.keys() & self.metrics.keys()}

    def predictor(self, precision: PredictPrecision = "fp32") -> Predictor:
        """Return the model prepared for predictions.

        Raises:
            ConfigError: an unknown precision.
        """
        fix = "Call the predictor with inputs: result.predictor()(inputs)."
        require_choice(PredictPrecision, "precision", precision, fix=fix)
        return Predictor(self.task_model, precision)

    def save(self, folder: str | Path) -> Path:
        """Save the model as a Hugging Face folder that `bothways.load` opens; return its path.

        Raises:
            ResourceError: the folder cannot be written.
        """
        path, task, lora = local_path(folder), self.task_model.task, self.settings.lora
        adapter = None
        if lora is not None and lora.adapter_only:
            base = portable_name(self.origin["base"]["name"])
            adapter = TrainedAdapter(base, lora.alpha / lora.rank, self.changes)
        record = {
            "task": configs.to_dict(task),
            "length": self.task_model.length,
            "settings": configs.to_dict(self.settings),
            "steps": self.progress.steps,
            "seconds": round(self.progress.seconds, 1),
            "early": self.progress.early,
            "date": today(),
            "metrics": dict(self.metrics),
            "before": dict(self.before),
            "failure": list(self.failure.failed) if self.failure else [],
            **self.origin,
        }
        if isinstance(self.task_model, Embedder):
            save_sentence_encoder(path, self.task_model, self.card, record)
            return path
        trained, files = self.task_model, task.program_files(self.task_model.length)
        save_model(
            path, trained.model, trained.tokenizer, labels=trained.labels, problem=task.problem,
            card=self.card, extra=record, extra_files=files, adapter=adapter,
        )  # fmt: skip
        return path


def build_card(done: FinetuneResult, run: prepare.PreparedRun) -> Card:
    """Build the model card of a trained model."""
    settings, data = run.settings, run.data
    plain = configs.to_dict(settings)
    labels = f": {listed(data.labels, 5)}" if data.labels else ""
    warning = f" Warning: {done.failure}" if done.failure else ""
    task = done.task_model.task
    order = {} if settings.order_seed is None else {"seed of the order": settings.order_seed}
    lora = {} if settings.lora is None else vars(settings.lora)
    lora_settings = {name: value for name, value in lora.items() if value is not False}
    return Card(
        title=f"{Path(settings.model).name} fine-tuned on {Path(settings.train).name}",
        summary=f"Fine-tuned for the task {task.name}{labels}.{warning}",
        settings={
            "base model": settings.model,
            "length": data.length,
            "batch": _words(plain["batch"]),
            "optimizer": _words(plain["training"]["optimizer"]),
            "schedule": _words(plain["training"]["schedule"]),
            "run": run_of(settings.training.end, done.progress),
            "seed": settings.seed,
            **_differences(task, type(task)()),
            **_differences(settings.stability, Stability()),
            **({"lora": _words(lora_settings)} if lora_settings else {}),
            **order,
        },
        metrics={f"dev {name}": value for name, value in done.metrics.items()},
        data=run.sources,
        limits=limits_of_finetuned(data.length, settings.seed, done.findings, bool(data.dev)),
    )


def _differences(config: Any, default: Any) -> dict[str, object]:
    """Return the settings that differ, by readable names; columns belong to the data."""
    defaults, values = configs.to_dict(default), configs.to_dict(config)
    changed = [name for name in values if values[name] != defaults[name] and name != "columns"]
    return {name.replace("_", " "): values[name] for name in changed}


def _words(plain: str | dict[str, Any]) -> str:
    """Return plain values on one line, such as a member of a union: "adamw, lr 5e-05, …"."""
    if isinstance(plain, str):
        return plain
    values = dict(plain)
    kind = [values.pop("kind")] if "kind" in values else []
    return ", ".join([*kind, *(f"{name} {value}" for name, value in values.items())])


@own_torch_state(torch.float32)
def finetune(  # noqa: PLR0913 – one independent value per question that a run answers
    settings: FinetuneConfig,
    folder: Path | None = None,
    *,
    train: Rows | LabelledData | None = None,
    dev: Rows | None = None,
    start: Model | EncoderConfig | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
    on_event: OnEvent = lambda event: None,
) -> FinetuneResult:
    """Fine-tune a model, and save it in `folder/model`.

    Under `torchrun` each process is a rank.

    Args:
        folder: folder of this run: checkpoints, metrics, `config.toml`, `model/`, `report.html`;
            None for a run in memory, which keeps the best weights alone.
        train, dev: rows to read instead of the sources that the settings name; with `start`,
            `train` is what `data.label` returns.
        start: a model in memory whose encoder and pooler are copied, or a configuration for random
            weights, for many runs on the same examples in memory; None for the model that the
            settings name.
        resume: continue from the checkpoints in the folder; otherwise it must not hold any.
        progress: receives stages, records, and the notes and warnings of the preflight.
        on_event: called after each step, report, evaluation and checkpoint.

    Raises:
        BothwaysError: the data or the machine is not suitable (one message lists all problems), or
            a loss or a gradient is not finite.
        ConfigError: two settings contradict each other, or do not fit the task or the model.
        FolderError: the model cannot be read.
        KeyboardInterrupt: SIGINT, SIGTERM, SIGHUP or SIGUSR1 has ended the run after a step; in a
            folder, with a checkpoint.
        ResourceError: the run folder is in use, holds another run, or cannot be written.
    """
    plan = parallel.plan_here()
    progress = progress if parallel.is_main(plan) else SILENT
    if device == "auto" and settings.model and static_folder(resolve(resolve_run(settings.model))):
        device = "cpu"  # for static vectors
    torch_device = parallel.rank_device(plan, choose_device(device))
    with contextlib.ExitStack() as stack:
        if folder is not None and parallel.is_main(plan):
            stack.enter_context(run_folder(folder, resume=resume, progress=progress))
        stack.enter_context(parallel.connected(plan, torch_device))
        run = prepare.prepare_run(
            settings, folder, torch_device, progress, train=train, dev=dev, start=start
        )
        identity = run.identity()
        parallel.require_agreement(plan, flatten(identity))
        settings, task_model, data = run.settings, run.task_model, run.data
        for remark in prepare.remarks(run):
            progress.message(remark)
        peak = _measure_peak(run, torch_device, plan, progress) if run.sources else None
        store: Store = MemoryStore()
        if folder is not None:
            changeable = configs.changeable_settings(settings)
            records = {CONFIG: configs.to_toml(settings)}
            store = FolderStore(folder, identity, changeable, records)
        training, seed = prepare.training_of(settings, data), settings.ordered_by
        module, sequences = _trained(task_model, data, settings)
        evaluate = functools.partial(score, task_model, data, settings)
        before = _score_start(run, progress)
        steps = train_loader(sequences, settings, seed, plan.rank, plan.world)
        torch.manual_seed(seed + 1 + plan.rank)
        phase = TrainingPhase(training.end, lambda state: ahead(steps, torch_device, state.cursor))
        training_run = TrainingRun(
            module,
            [phase],
            training,
            plan,
            store,
            evaluation=evaluate if data.dev else None,
            peak=peak,
            rules=parameter_rules(settings.stability, task_model.model, run.fresh),
            progress=progress,
            on_event=on_event,
        )
        with learning_by_rows(task_model.model, torch_device, plan.world, training.optimizer):
            state = training_run.train()
        history = tuple((epochs, _unprefixed(metrics)) for epochs, metrics in training_run.history)
        done = FinetuneResult(
            task_model, {}, state, settings, history, findings=run.findings, before=before
        )
        if parallel.is_main(plan) and training.keep.best is not None:
            progress.stage("reading the best weights")
            store.load_best(module, training.keep.best)
        done = dataclasses.replace(done, changes=merge_changes(task_model.model))
        few_shot.fit_head(task_model, data.sequences, settings)
        if not parallel.is_main(plan):
            return done
        if state.early:
            reason = "no evaluation improved within training.early_stopping"
            progress.message(f"note: ended at epoch {state.epochs:.4g}: {reason}")
        task_model.eval()
        _save(done, run, folder, progress)  # whatever may happen while it is scored
        metrics, baseline, failure = _conclude(task_model, data, settings, before, progress)
        done = dataclasses.replace(done, metrics=metrics, baseline=baseline, failure=failure)
        done = _save(done, run, folder, progress)
        if folder is not None and settings.dev is not None:
            _write_report(run, folder, progress)
        return done


def _score_start(run: prepare.PreparedRun, progress: Progress) -> Metrics:
    """Return the dev metrics of the model as it begins; none without dev data, or if a head of it
    begins at random.
    """
    if not run.data.dev or run.fresh:
        return {}
    metrics = _unprefixed(score(run.task_model, run.data, run.settings, progress))
    metric = run.settings.chosen_by
    progress.message(f"before training: {metric} {metrics[metric]:.4f} on the dev data")
    return metrics


def _unprefixed(metrics: Metrics) -> Metrics:
    """Return dev metrics of a record, "dev/accuracy", by their own names."""
    return {name.removeprefix("dev/"): value for name, value in metrics.items()}


def _trained(
    task_model: TaskModel[Any, Any], data: LabelledData, settings: FinetuneConfig
) -> tuple[TrainingModule, list[Sequence]]:
    """Return the module that is trained, and the sequences that it reads."""
    if (few := settings.few_shot) is not None:
        pairs = few_shot.sample_pairs(data.sequences, few, settings.ordered_by)
        return few_shot.pair_module(task_model, few), pairs
    taught = settings.teacher and TaughtModule(task_model, settings.teacher)
    return taught or task_model, data.sequences


def _measure_peak(
    run: prepare.PreparedRun, device: torch.device, plan: parallel.Plan, progress: Progress
) -> float:
    """Measure the peak speed of the machine in tokens a second, for sequences of average length."""
    progress.stage("measuring the speed of the machine")
    model, data = run.task_model.model, run.data
    length = max(1, data.tokens // len(data.sequences))
    forward = forward_flops(model.config, model.specification, length)
    return peak_of(forward, run.settings.training, device, plan)


def _write_report(run: prepare.PreparedRun, folder: Path, progress: Progress) -> None:
    """Write a report on the model's answers to the dev data."""
    source, page = run.settings.sources["dev"], folder / "report.html"
    if not is_analysed(run.data.task) or not can_write(page, progress):
        return
    task_model, data, settings = run.task_model, run.data, run.settings
    progress.stage("analysing each answer", len(data.dev))
    counts = PredictionCounts(on_count=progress.advance)
    analysis = analyse_encoded(task_model, labelled.dev_windows(data), counts=counts)
    progress.stage("writing the report")
    facts = model_facts(folder, data.labels)
    write_html(analysis_report(task_model, analysis, str(folder), source, facts, settings), page)


def _save(
    done: FinetuneResult, run: prepare.PreparedRun, folder: Path | None, progress: Progress
) -> FinetuneResult:
    """Save the model, if the run has a folder; return the result with its card and its folder."""
    if not run.sources:
        return done
    done = dataclasses.replace(done, card=build_card(done, run), origin=run.origin())
    if folder is None:
        return done
    progress.stage("saving the model")
    return dataclasses.replace(done, folder=done.save(folder / "model"))


def _conclude(
    task_model: TaskModel[Any, Any],
    data: LabelledData,
    settings: FinetuneConfig,
    before: Metrics,
    progress: Progress,
) -> tuple[Metrics, Metrics, Failure | None]:
    """Tune a trained task on the dev data, score it, and look for signs of failure.

    Returns:
        Its metrics and the majority baseline's, empty without dev data; and the signs that it
        failed, or could learn more, None if there is none.
    """
    size, loss = settings.microbatch_tokens, math.nan
    if not isinstance(task_model, VectorModule):  # whose loss depends on the size of a step
        loss = training_loss(task_model, data.sequences, size, progress)
    reasons, unfinished = signs_of_training(loss, data.task.baseline(data.train_examples))
    metrics: Metrics = {}
    baseline: Metrics = {}
    if data.dev:
        metric = settings.chosen_by
        results = labelled.predictions(task_model, data, progress, "tuning on the dev data")
        task_model.task = task_model.tuned(results, metric)  # such as thresholds
        answers = list[Any]()
        results = distinct_answers(labelled.predictions(task_model, data, progress), answers)
        metrics = labelled.scored(results, task_model.score, settings.own_metrics)
        direction = settings.directions(data.task, data.labels)[metric]
        baseline = data.task.baseline(data.dev_examples)  # as in the report
        count = len(data.dev)
        signs = signs_of_scores(metrics, baseline, metric, direction, answers, count, before)
        reasons = signs if signs and unfinished else (*signs, *reasons)
        unfinished = unfinished and not signs
    return metrics, baseline, Failure(reasons, unfinished) if reasons else None
