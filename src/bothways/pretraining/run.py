"""Pre-training: from a corpus to a model folder with a head that predicts tokens and, by choice, a
next-sentence head.

The run folder holds the checkpoints, `metrics.jsonl`, TensorBoard's events, the configuration as
resolved and, at the end, `model/` and, for ELECTRA, `generator/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bothways.core.config import reader as configs
from bothways.core.config.values import flatten
from bothways.core.errors import installed
from bothways.core.files import replace_text
from bothways.core.progress import SILENT, Progress
from bothways.core.report.html import metrics_html
from bothways.core.runtime.devices import choose_device, device_of, own_torch_state
from bothways.core.source import TrainingStep
from bothways.core.terminal import result_line
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
from bothways.pretraining.evaluation import HeldOut, MixedHeldOut
from bothways.pretraining.forecast import memory_demand, objective_flops
from bothways.pretraining.milestones import Milestones, words_of_epoch
from bothways.pretraining.probes import with_probes
from bothways.pretraining.run_page import write_run_page
from bothways.training import parallel, run
from bothways.training.checkpoint import FolderStore, MemoryStore, run_folder
from bothways.training.run import Training
from bothways.training.saved_state import averaged_weights
from bothways.training.schedules import RunState
from bothways.training.step_cost import choose_parallelism, peak_of

MakeHeldOut = Callable[[TrainingModule, parallel.Plan], HeldOut]
"""Makes what evaluates a training module on text of its own."""


@dataclass(frozen=True)
class PretrainResult:
    """The result of a run.

    Attributes:
        training_module: with the weights of the last step.
        progress: at the end; short of the configured length if the run was interrupted.
        metrics: of held-out documents, by name: "held-out/loss/masked", "held-out/accuracy/pair",
            "held-out/perplexity" …
        folder: the model folder; None for an interrupted run.
    """

    training_module: TrainingModule
    progress: RunState
    metrics: Mapping[str, float]
    folder: Path | None = None

    def __repr__(self) -> str:
        metrics = {name.removeprefix("held-out/"): value for name, value in self.metrics.items()}
        steps = self.progress.steps
        return result_line("PretrainResult", metrics, steps=steps, folder=self.folder)

    def _repr_html_(self) -> str | None:
        title = f"Pre-trained, {self.progress.steps:,} steps, {self.progress.tokens:,} tokens"
        return metrics_html(title, {"value": self.metrics})

    @property
    def model(self) -> Model:
        """The model that is saved."""
        model = self.training_module.saved()["model"]
        assert isinstance(model, Model)
        return model

    def finished(self, training: Training) -> bool:
        """Return True if the run reached its configured end."""
        return self.progress.finished(training.end)


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

    Under `torchrun` each process is a rank. SIGINT, SIGTERM, SIGHUP and SIGUSR1 end the run
    after a step, with a checkpoint.

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
        if folder is not None and parallel.is_main(plan):
            locations = {name: str(c.folder.absolute()) for name, c in corpora.parts.items()}
            data = RunData(locations, digests, held_out is None)
            text = json.dumps(dataclasses.asdict(data), ensure_ascii=False)
            replace_text(folder / DATA, text)
        train_ids, unprobed = _split(settings, corpora, plan, training_module, held_out)
        scoring = with_probes(
            unprobed, settings, corpora.tokenizer, training_module, plan, progress
        )
        for setting in (settings.training.keep, settings.training.target):
            if setting is not None:  # now, not at the first evaluation
                setting.check(scoring.names())
        corpus_name, first = next(iter(corpora.parts.items()))
        milestones = Milestones(
            folder or Path(),
            words_of_epoch(first, train_ids[corpus_name]),
            settings.word_milestones,
            plan,
            lambda path, words, state: _save_milestone(
                PretrainResult(training_module, state, {}), settings, corpora, path, words
            ),
            progress,
        )

        def note_event(event: run.Event) -> None:
            """Save what is due before anyone hears of it."""
            milestones(event)
            on_event(event)

        store: FolderStore | MemoryStore = MemoryStore()
        if folder is not None:  # checkpoints belong to the settings, the corpora and the models
            config, changeable = configs.to_dict(settings), configs.changeable_settings(settings)
            store = FolderStore(folder, config | digests, changeable, configs.to_toml(settings))
        state = run.TrainingRun(
            training_module,
            phases_of(settings, corpora, train_ids, plan, training_module),
            settings.training,
            plan,
            store,
            evaluation=scoring,
            peak=peak,
            progress=progress,
            on_event=note_event,
        ).train()
        milestones.report_rest(state)
        done = PretrainResult(training_module, state, {})
        if not state.finished(settings.training.end):
            return done
        done = dataclasses.replace(done, metrics=scoring(progress))
        if folder is None:
            return done
        if parallel.is_main(plan):
            _save(done, settings, corpora, folder)
            if installed("matplotlib", "jinja2"):
                write_run_page(folder / "report.html", settings, done.metrics, state, used_device)
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
    return {
        "corpus": corpora.fingerprint(),
        **{role: digest_of_model(source) for role, source in frozen},
    }


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
) -> tuple[dict[str, DocumentIds], HeldOut | MixedHeldOut]:
    """Return the documents to train on, by corpus, and the evaluation on the others."""
    train_ids = training_documents(settings, corpora, held_out is None)
    if held_out is not None:
        return train_ids, held_out(training_module, plan)
    # The tokens of an evaluation are shared out: several corpora take no longer than one.
    fewer = dataclasses.replace(
        settings, evaluation_tokens=max(1, settings.evaluation_tokens // len(corpora.parts))
    )
    evaluations = dict[str, HeldOut]()
    for name, corpus in corpora.parts.items():
        _, held_out_ids = corpus.split(settings.held_out, settings.seed)
        evaluations[name] = HeldOut(fewer, corpus, held_out_ids, plan, training_module)
    return train_ids, evaluations[""] if {*evaluations} == {""} else MixedHeldOut(
        evaluations, corpora.shares
    )


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
        return ahead(loader.steps(state.cursor, state.tokens), device)

    device = torch.device("cpu") if training_module is None else device_of(training_module)
    ends = np.cumsum([phase.share for phase in settings.phases])
    # The sum of shares in floating point may miss 1 by a rounding.
    ends[-1] = 1.0
    return [
        run.TrainingPhase(settings.training.end.part(float(end)), steps, phase.rate)
        for phase, end in zip(settings.phases, ends, strict=True)
    ]


def _save_milestone(
    done: PretrainResult, settings: PretrainConfig, corpora: Corpora, path: Path, words: int
) -> None:
    """Write a folder of the model as it is after so many words."""
    card, record = _card(done, settings, corpora)
    with averaged_weights(done.training_module):
        save_model(path, done.model, corpora.tokenizer, card=card, extra={**record, "words": words})


def _save(done: PretrainResult, settings: PretrainConfig, corpora: Corpora, folder: Path) -> None:
    """Write a model folder for each role, with the settings and what was reached."""
    card, record = _card(done, settings, corpora)
    # "model" is the last one: once it is there, the run is complete.
    for role, model in sorted(
        done.training_module.saved().items(), key=lambda item: item[0] == "model"
    ):
        assert isinstance(model, Model)
        titled = (
            card if role == "model" else dataclasses.replace(card, title=f"A pre-trained {role}")
        )
        save_model(folder / role, model, corpora.tokenizer, card=titled, extra=record)


def _card(
    done: PretrainResult, settings: PretrainConfig, corpora: Corpora
) -> tuple[Card, dict[str, object]]:
    """Return the model card and the record of a run."""
    digest = corpora.fingerprint()
    data: dict[str, object] = {}
    for name, corpus in corpora.parts.items():
        data |= {f"{name} {key}".strip(): v for key, v in data_of_corpus(corpus, digest).items()}
    card = Card(
        "A pre-trained encoder",
        f"Pre-trained with bothways on {corpora.documents:,} documents, "
        f"{done.progress.tokens:,} tokens read.",
        flatten(configs.to_dict(settings)),
        done.metrics,
        data,
        limits_of_pretrained(
            done.model.config,
            (phase.length for phase in settings.phases),
            done.progress.tokens,
            corpora.tokens,
        ),
    )
    record: dict[str, object] = {
        "pretraining": configs.to_dict(settings),
        "corpus": digest,
        "tokens": done.progress.tokens,
        "date": today(),
        "metrics": dict(done.metrics),
    }
    return card, record
