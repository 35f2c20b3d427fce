"""Pre-training: from a corpus to a model folder with a head that predicts tokens and, by choice, a
next-sentence head.

The run folder holds the checkpoints, `metrics.jsonl`, TensorBoard's events, the configuration as
resolved and, at the end, `model/`, for ELECTRA `generator/`, and a page with the curves of
`metrics.jsonl`, and held-out metrics next to baselines.

The test of the learning rate (`run_rate_test`) is by Smith 2017, "Cyclical learning rates for
training neural networks", section 3.3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bothways.core.config import reader as configs
from bothways.core.config.values import flatten
from bothways.core.errors import ConfigError, DivergedError, setting
from bothways.core.progress import SILENT, Progress
from bothways.core.report import sections as s
from bothways.core.report.html import can_write, metrics_html, write_html
from bothways.core.runtime.devices import choose_device, device_of, own_torch_state
from bothways.core.source import TrainingStep
from bothways.core.terminal import quantity, result_line
from bothways.core.training_module import TrainingModule
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import Corpora, Smoothed
from bothways.data.epoch_order import AllExcept, DocumentIds
from bothways.data.loader import ahead
from bothways.hub.model_card import Card, data_of_corpus, limits_of_pretrained
from bothways.hub.model_folder import save_model
from bothways.hub.provenance import digest_of_model, today
from bothways.model.model import Encoder, Model
from bothways.model.positions import Rotary
from bothways.pretraining import build
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.evaluation import HeldOut, MixedHeldOut, with_probes
from bothways.pretraining.forecast import memory_demand, objective_flops
from bothways.training import parallel, run
from bothways.training.checkpoint import CONFIG, FolderStore, Keep, MemoryStore, run_folder
from bothways.training.optimizers import OptimizerConfig, peak_rate
from bothways.training.run import Event
from bothways.training.saved_state import averaged_weights
from bothways.training.schedules import RunState, Steps
from bothways.training.step_cost import choose_parallelism, peak_of
from bothways.training.trackers import read_records

MakeHeldOut = Callable[[TrainingModule, parallel.Plan], HeldOut]
"""Makes what evaluates a training module on text of its own."""


@dataclass(frozen=True)
class PretrainResult:
    """The result of a run.

    Attributes:
        training_module: with the weights of the last step.
        progress: at the end.
        metrics: of held-out documents, by name: "held-out/loss/masked", "held-out/accuracy/pair",
            "held-out/perplexity" …
        folder: the model folder; None in memory.
    """

    training_module: TrainingModule
    progress: RunState
    metrics: Mapping[str, float]
    folder: Path | None = None

    def __repr__(self) -> str:
        metrics = {name.removeprefix("held-out/"): value for name, value in self.metrics.items()}
        return result_line("PretrainResult", metrics, steps=self.progress.steps, folder=self.folder)

    def _repr_html_(self) -> str | None:
        steps = quantity(self.progress.steps, "step(s)")
        title = f"Pre-trained, {steps}, {self.progress.tokens:,} tokens"
        return metrics_html(title, {"value": self.metrics})

    @property
    def model(self) -> Model:
        """The model that is saved."""
        model = self.training_module.saved()["model"]
        assert isinstance(model, Model)
        return model


@own_torch_state()
def pretrain(
    settings: PretrainConfig,
    corpus: Corpus | Mapping[str, Corpus],
    folder: Path | None = None,
    *,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
    on_event: run.OnEvent = lambda event: None,
    held_out: MakeHeldOut | None = None,
) -> PretrainResult:
    """Pre-train on a corpus, or on several by name, and save the model in `folder/model`.

    Under `torchrun` each process is a rank.

    Args:
        folder: of this run: checkpoints, metrics, `config.toml`, `model/`; None for a run in
            memory, which ends with its last weights and saves nothing.
        resume: continue from the newest checkpoint in the folder, if there is one; without it,
            the folder must be new or empty.
        progress: receives stages, records, and the notes and warnings of the preflight.
        on_event: called after each step, report, evaluation and checkpoint.
        held_out: makes what evaluates the training module, on text of its own; then all documents
            of the corpus are trained on, whatever `settings.held_out` says. None: documents of the
            corpus.

    Raises:
        ResourceError: the folder is in use or holds another run.
        ConfigError, FolderError, TokenizerError: `settings.start` cannot be used.
        BothwaysError: the preflight finds errors, or a loss is not finite.
        KeyboardInterrupt: SIGINT, SIGTERM, SIGHUP or SIGUSR1 has ended the run after a step; in a
            folder, with a checkpoint.
    """
    plan, corpora = parallel.plan_here(), Corpora.of(corpus, settings.mixture)
    if len(corpora.parts) > 1 and settings.mixture is None:
        settings = dataclasses.replace(settings, mixture=Smoothed())
    progress = progress if parallel.is_main(plan) else SILENT
    used_device = parallel.rank_device(plan, choose_device(device))
    progress.stage("checking the data and the machine")
    for finding in build.preflight(settings, corpora, folder, used_device, plan):
        progress.message(f"{finding.severity}: {finding}")
    training_module = build.build_training_module(settings, corpora, used_device)
    # The main rank takes the folder before the ranks meet, so that none writes into another run's.
    with contextlib.ExitStack() as stack:
        if folder is not None and parallel.is_main(plan):
            stack.enter_context(run_folder(folder, resume=resume, progress=progress))
        stack.enter_context(parallel.connected(plan, used_device))
        digests = digests_of(settings, corpora)
        parallel.require_agreement(
            plan, flatten(configs.to_dict(settings)) | digests, files=("start",)
        )
        plan = choose_parallelism(
            plan, settings.sharding, memory_demand(settings), used_device, progress
        )
        flops = objective_flops(settings.objective, settings.encoder, settings.phases[0].length)
        peak = peak_of(flops, settings.training, used_device, plan)
        # After the peak, which draws the first time in a process.
        torch.manual_seed(settings.seed + 1 + plan.rank)
        train_ids, scoring = _split(settings, corpora, plan, training_module, held_out, progress)
        words = words_of_epoch(corpora, train_ids) if settings.word_milestones else 0.0

        def note_event(event: run.Event) -> None:
            """Save what is due before anyone hears of it."""
            if event.kind == "step" and folder is not None and plan.rank == 0:
                before, reached = training_run.before.epochs * words, event.progress.epochs * words
                for target in settings.word_milestones:
                    if before < target <= reached:
                        done = PretrainResult(training_module, event.progress, {})
                        _save_milestone(done, settings, corpora, folder, target)
            on_event(event)

        store: FolderStore | MemoryStore = MemoryStore()
        if folder is not None:  # checkpoints belong to the settings, the corpora and the models
            config, changeable = configs.to_dict(settings), configs.changeable_settings(settings)
            locations = {name: str(c.folder.absolute()) for name, c in corpora.parts.items()}
            data = dataclasses.asdict(RunData(locations, digests, held_out is None))
            records = {
                CONFIG: configs.to_toml(settings), DATA: json.dumps(data, ensure_ascii=False)
            }  # fmt: skip
            store = FolderStore(folder, config | digests, changeable, records)
        training_run = run.TrainingRun(
            training_module,
            phases_of(settings, corpora, train_ids, plan, training_module),
            settings.training,
            plan,
            store,
            evaluation=scoring,
            peak=peak,
            progress=progress,
            on_event=note_event,
        )
        state = training_run.train()
        # A session that made a step has ended with an evaluation.
        metrics = training_run.history[-1][1] if training_run.history else scoring(progress)
        done = PretrainResult(training_module, state, metrics)
        if folder is None:
            return done
        if parallel.is_main(plan):
            names = map(milestone_name, settings.word_milestones)
            if missing := [name for name in names if not (folder / name).is_dir()]:
                read = f"{state.epochs * words:,.0f} words were read"
                progress.message(f"note: {read}, and no model was saved as {', '.join(missing)}")
            _save(done, settings, corpora, folder)
            if can_write(page := folder / "report.html", progress):
                write_run_page(page, settings, done.metrics, state, used_device)
        return dataclasses.replace(done, folder=folder / "model")


DATA = "data.json"
"""The file of a run with its `RunData`."""


@dataclass(frozen=True)
class RunData:
    """What a run reads besides its settings, to repeat its steps.

    Attributes:
        corpora: the folders of the corpora, by name.
        digests: of the corpora together, and of each frozen model by role.
        held_out: whether documents are set aside; else all are trained on.
    """

    corpora: Mapping[str, str]
    digests: Mapping[str, str]
    held_out: bool


def digests_of(settings: PretrainConfig, corpora: Corpora) -> dict[str, str]:
    """Return the SHA-256 of the corpora, as "corpus", and of each frozen model by its role."""
    frozen = settings.objective.frozen_models.items()
    digests = {role: digest_of_model(source) for role, source in frozen}
    return {"corpus": corpora.fingerprint(), **digests}


def training_documents(
    settings: PretrainConfig, corpora: Corpora, held_out: bool = True
) -> dict[str, DocumentIds]:
    """Return the documents of each corpus to train on: all of them if none are held out."""
    if not held_out:
        return {name: AllExcept(len(corpus)) for name, corpus in corpora.parts.items()}
    share, seed = settings.held_out, settings.seed
    return {name: corpus.split(share, seed)[0] for name, corpus in corpora.parts.items()}


def _split(
    settings: PretrainConfig,
    corpora: Corpora,
    plan: parallel.Plan,
    training_module: TrainingModule,
    held_out: MakeHeldOut | None,
    progress: Progress,
) -> tuple[dict[str, DocumentIds], run.Evaluation]:
    """Return the documents to train on, by corpus, and the evaluation on the others, with probes.

    Raises:
        ConfigError: the ranks share a model, or the settings name a metric that there is not; and
            the errors of `with_probes`.
    """
    for name in ("word_milestones", "probes"):
        if getattr(settings, name) and plan.sharding is not None:
            message = "are not for ranks that share a model"
            raise ConfigError(message, where=name, fix=f"Set {setting('sharding', 'none')}.")
    evaluations = dict[str, HeldOut]()
    # The tokens of an evaluation are shared out: several corpora take no longer than one.
    tokens = max(1, settings.evaluation_tokens // len(corpora.parts))
    fewer = dataclasses.replace(settings, evaluation_tokens=tokens)
    for name, corpus in corpora.parts.items() if held_out is None else ():
        _, held_out_ids = corpus.split(settings.held_out, settings.seed)
        evaluations[name] = HeldOut(fewer, corpus, held_out_ids, plan, training_module)
    unprobed: HeldOut | MixedHeldOut
    if held_out is not None:
        unprobed = held_out(training_module, plan)
    else:
        mixed = {*evaluations} != {""}
        unprobed = MixedHeldOut(evaluations, corpora.shares) if mixed else evaluations[""]
    if settings.training.keep.best or settings.training.target:  # now, not when it is evaluated
        names = [*unprobed(steps=1), *(f"probe/accuracy/{name}" for name in settings.probe_names)]
        settings.training.check_metrics(names)
    scoring = with_probes(unprobed, settings, corpora.tokenizer, training_module, plan, progress)
    return training_documents(settings, corpora, held_out is None), scoring


def set_bases(training_module: TrainingModule, settings: PretrainConfig, phase: int) -> None:
    """Give the models of a run the rotary bases of a phase, by its number."""
    position = settings.encoder_of(settings.phases[phase]).position
    for module in training_module.modules():
        if isinstance(module, Model | Encoder) and isinstance(module.config.position, Rotary):
            module.config = dataclasses.replace(module.config, position=position)


def phases_of(
    settings: PretrainConfig,
    corpora: Corpora,
    documents: Mapping[str, DocumentIds],
    plan: parallel.Plan,
    training_module: TrainingModule | None,
) -> list[run.TrainingPhase]:
    """Return the phases of the run, each with its data from a cursor on.

    Args:
        documents: the documents to train on, by corpus.
        training_module: on its device; a phase that begins sets the rotary bases of its models.
            None: the data alone, on the CPU.
    """

    def steps(state: RunState) -> Iterable[TrainingStep]:
        """Return the data of the current phase."""
        if training_module is not None:
            set_bases(training_module, settings, state.phase)
        loader = build.loader_of(settings, corpora, documents, plan, state.phase, state.ends)
        loader = dataclasses.replace(loader, pad=settings.training.graphs)
        return ahead(loader, device, state.cursor, state.tokens)

    device = torch.device("cpu") if training_module is None else device_of(training_module)
    ends = np.cumsum([phase.share for phase in settings.phases])
    # The sum of shares in floating point may miss 1 by a rounding.
    ends[-1] = 1.0
    return [
        run.TrainingPhase(settings.training.end.part(float(end)), steps, phase.rate)
        for phase, end in zip(settings.phases, ends, strict=True)
    ]


def milestone_name(words: int) -> str:
    """Return the name of a milestone's folder, as in BabyLM: 3,000,000 words are chck_3M."""
    return f"chck_{words / 1e6:.12g}M"


def words_of_epoch(corpora: Corpora, documents: Mapping[str, DocumentIds]) -> float:
    """Return the words that a run on these documents of the only corpus reads in an epoch.

    They are the share of these documents of the tokens, times all words, separated by white space.
    """
    [(name, corpus)] = corpora.parts.items()
    ids, counts = documents[name], corpus.manifest.counts
    assert isinstance(ids, AllExcept)
    begins, ends = (corpus.sentences[corpus.documents[n]] for n in (ids.without, ids.without + 1))
    return (counts.words or 0) * (1 - int((ends - begins).sum()) / counts.tokens)


def _save_milestone(
    done: PretrainResult, settings: PretrainConfig, corpora: Corpora, folder: Path, words: int
) -> None:
    """Write the model as it is, as the milestone of `words` words."""
    card, record = _card(done, settings, corpora)
    path, extra = folder / milestone_name(words), {**record, "words": words}
    with averaged_weights(done.training_module):
        save_model(path, done.model, corpora.tokenizer, card=card, extra=extra)


def _save(done: PretrainResult, settings: PretrainConfig, corpora: Corpora, folder: Path) -> None:
    """Write a model folder for each role, with the settings and what was reached."""
    card, record = _card(done, settings, corpora)
    # "model" is the last one: once it is there, the run is complete.
    models = done.training_module.saved()
    for role in sorted(models, key=lambda role: role == "model"):
        model = models[role]
        assert isinstance(model, Model)
        title = card.title if role == "model" else f"A pre-trained {role}"
        titled = dataclasses.replace(card, title=title)
        save_model(folder / role, model, corpora.tokenizer, card=titled, extra=record)


def _card(
    done: PretrainResult, settings: PretrainConfig, corpora: Corpora
) -> tuple[Card, dict[str, object]]:
    """Return the model card and the record of a run."""
    digest = corpora.fingerprint()
    data: dict[str, object] = {}
    for name, corpus in corpora.parts.items():
        data |= {f"{name} {key}".strip(): v for key, v in data_of_corpus(corpus, digest).items()}
    tokens, tree = done.progress.tokens, configs.to_dict(settings)
    lengths = (phase.length for phase in settings.phases)
    limits = limits_of_pretrained(done.model.config, lengths, tokens, corpora.tokens)
    documents = f"{sum(map(len, corpora.parts.values())):,} documents"
    summary = f"Pre-trained with bothways on {documents}, {tokens:,} tokens read."
    card = Card("A pre-trained encoder", summary, flatten(tree), done.metrics, data, limits)
    record: dict[str, object] = {"pretraining": tree, "corpus": digest, "tokens": tokens}
    return card, record | {"date": today(), "metrics": dict(done.metrics)}


POINTS = 200
"""Maximum number of points of a curve."""
BASELINES = {"unigram": "unigram baseline", "majority": "majority baseline"}
"""Prefixes of the metrics of baselines, and their names in a chart."""
_TOKENS, _UNITS = "million tokens read", {"loss": "nats", "accuracy": "share"}

Records = Sequence[Mapping[str, Any]]
"""The lines of a run's `metrics.jsonl`."""


def curves(records: Records, metrics: Mapping[str, float], note: str = "") -> Iterator[s.Curves]:
    """Yield the training and held-out loss and accuracy of each target over the tokens read.

    Args:
        metrics: of the end of the run, with baselines such as "unigram/loss/masked".
    """
    keys = dict.fromkeys(key for record in records for key in record)
    for name in (key for key in keys if key.startswith(("loss/", "accuracy/"))):
        kind, target = name.split("/", 1)
        lines = [metric_line("training", records, name)]
        for key in keys:  # also "held-out/CORPUS/loss/…", of several corpora
            if key.startswith("held-out/") and key.endswith(f"/{name}"):
                source = key.removesuffix(f"/{name}").replace("/", ", ", 1)
                lines.append(metric_line(source, records, key))
        baselines = {
            title: metrics[f"{prefix}/{name}"]
            for prefix, title in BASELINES.items()
            if f"{prefix}/{name}" in metrics
        }
        title, percent = f"{kind.capitalize()}: {target}", kind == "accuracy"
        yield s.Curves(title, _TOKENS, _UNITS[kind], lines, baselines, percent, note)


def write_run_page(
    file: Path,
    settings: PretrainConfig,
    metrics: Mapping[str, float],
    progress: RunState,
    device: torch.device,
    lead: s.Report | None = None,
) -> None:
    """Write the page of a finished run next to its `metrics.jsonl`.

    Args:
        lead: the title, the headline and the first sections of another kind of run.

    Raises:
        CheckpointError: the records cannot be read.
        ResourceError: the page cannot be written.
    """
    records = read_records(file.with_name("metrics.jsonl"))
    held_out: list[list[Any]] = []
    for key, value in metrics.items():
        if key.startswith("held-out/"):
            name = key.removeprefix("held-out/")
            # The baseline of this metric, if it has one: unigrams or the majority.
            constant = [f"{k}/{name}" for k in BASELINES if f"{k}/{name}" in metrics]
            held_out.append([name, value, metrics[constant[0]] if constant else None])
    headline = ", ".join(
        f"{name} {s.readable_number(value)}"
        for name, value, _ in held_out
        if isinstance(value, float) and name in {"loss/masked", "perplexity"}
    )
    charts = [*curves(records, metrics)]
    for name in (name for name in metrics if name.startswith("probe/")):
        target = name.removeprefix("probe/accuracy/")
        baselines = {BASELINES["majority"]: metrics[f"majority/probe/{target}"]}
        lines, title = [metric_line(target, records, name)], f"Probe: {target}"
        charts.append(s.Curves(title, _TOKENS, "share", lines, baselines, True))
    for name, title, unit in (
        ("learning_rate", "Learning rate", "peak of all groups"),
        ("gradient_norm", "Gradient norm", "before clipping"),
    ):
        line = metric_line(title.lower(), records, name)
        if line.x:
            charts.append(s.Curves(title, _TOKENS, unit, [line]))
    lead = lead or s.Report("Pre-training", headline, "", ())
    steps = quantity(progress.steps, "step(s)")
    report = s.Report(
        f"{lead.title}: {file.parent.name}",
        lead.headline or steps,
        f"{steps}, {progress.tokens:,} tokens, {progress.epochs:.3g} epochs, "
        f"{progress.seconds / 60:,.1f} minutes.",
        (
            *lead.sections,
            *charts,
            s.TableSection("Held-out documents", ["metric", "value", "baseline"], held_out),
            s.Details("Settings", (s.settings_table(settings),)),
        ),
        s.colophon(device),
    )
    write_html(report, file)


def metric_line(title: str, records: Records, name: str) -> s.Line:
    """Return the values of a metric, neighbours averaged so that at most `POINTS` remain."""
    points = [(record["tokens"] / 1e6, record[name]) for record in records if name in record]
    size = max(1, math.ceil(len(points) / POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    xs, ys = ([sum(p[axis] for p in group) / len(group) for group in groups] for axis in (0, 1))
    return s.Line(title, xs, ys)


LOWEST, HIGHEST = 1e-6, 1.0
"""The rates of the first and the last step."""
_SMOOTHING = 0.9
_BROKEN = 1.5
"""Times the lowest smoothed loss at which the test ends."""


@dataclass(frozen=True)
class RateTest:
    """The loss of each step of a run whose rate grows by the same factor from step to step.

    Attributes:
        rates: of the steps, the last one where the loss had risen or was not finite.
        losses: the sum of the objective's losses, each a mean over its targets.
    """

    rates: Sequence[float]
    losses: Sequence[float]

    @property
    def smoothed(self) -> list[float]:
        """The moving average of the losses, Σ 0.9ᵗ⁻ⁱ lᵢ / Σ 0.9ᵗ⁻ⁱ."""
        sums = accumulate(self.losses, lambda total, loss: _SMOOTHING * total + loss)
        weights = accumulate(self.losses, lambda total, _: _SMOOTHING * total + 1, initial=0.0)
        return [total / weight for total, weight in zip(sums, list(weights)[1:], strict=True)]

    @property
    def suggestion(self) -> float:
        """A tenth of the rate with the lowest smoothed loss: the loss still falls there."""
        smoothed = self.smoothed
        return self.rates[smoothed.index(min(smoothed))] / 10

    def __repr__(self) -> str:
        return f"RateTest(suggestion={self.suggestion:.2g}, steps={len(self.rates)})"


class _RisenError(Exception):
    """Ends the test: the loss is far above its lowest value."""


def run_rate_test(
    settings: PretrainConfig,
    corpus: Corpus | Mapping[str, Corpus],
    steps: int,
    device: str,
    progress: Progress,
) -> RateTest:
    """Run the first phase of these settings with growing rates, in memory.

    Raises:
        BothwaysError: as `pretrain`; a loss that is not finite only ends the test, but for that
            of the first step.
    """
    optimizer = settings.training.optimizer
    if not isinstance(optimizer, OptimizerConfig):
        message = "is a function, whose rate is not known"
        fix = "Name one, such as adamw, with its settings."
        raise ConfigError(message, where="training.optimizer", fix=fix)
    peak = peak_rate(optimizer)
    factor = (HIGHEST / LOWEST) ** (1 / max(1, steps - 1))
    training = dataclasses.replace(
        settings.training, until=Steps(steps), report=Steps(1), evaluate=None, save=None,
        ema=None, keep=Keep(), early_stopping=None, target=None, trackers=(),
        schedule=lambda share: LOWEST / peak * factor ** round(share * steps),
    )  # fmt: skip
    phases = (dataclasses.replace(settings.phases[0], share=1.0, rate=1.0),)
    settings = dataclasses.replace(
        settings, training=training, phases=phases, evaluation_tokens=1, probes=(),
        word_milestones=(),
    )  # fmt: skip
    rates, losses = list[float](), list[float]()

    def note(event: Event) -> None:
        if event.kind == "report":
            rates.append(event.values["learning_rate"])
            losses.append(sum(v for name, v in event.values.items() if name.startswith("loss/")))
            smoothed = RateTest(rates, losses).smoothed
            if smoothed[-1] > _BROKEN * min(smoothed):
                raise _RisenError

    try:
        pretrain(settings, corpus, device=device, progress=progress, on_event=note)
    except _RisenError:
        pass
    except DivergedError:
        if not losses:  # the first step, whose rate is the lowest
            raise
    return RateTest(rates, losses)
