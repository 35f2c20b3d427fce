"""One step of a pre-training run, done again: what was read, and what came of it.

Data and masks are keyed by their places, so that a step can be repeated from the checkpoint before
it, in one process, whatever the number of ranks that the run had. Dropout is that of a run of one
process from that checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bothways.core.config import reader as configs
from bothways.core.errors import CheckpointError, ConfigError
from bothways.core.learner import Learner
from bothways.core.progress import SILENT, Progress
from bothways.core.source import Cursor
from bothways.data.corpus import Corpus
from bothways.data.epoch_order import DocumentIds
from bothways.data.mixture import Corpora, Smoothed
from bothways.preflight.machine import compute_as
from bothways.pretraining.build import build_models, mixed_loader_of, vocabulary_of
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.run import phases_of
from bothways.runtime.devices import choose_device, own_torch_state, resolve_precision
from bothways.training.average import Average
from bothways.training.checkpoint import Checkpoint, checkpoints, read_checkpoint
from bothways.training.loop import fit
from bothways.training.optimizers import build_optimizer
from bothways.training.parallel import Single
from bothways.training.run import TrainingPhase
from bothways.training.schedules import rate_factor
from bothways.training.state import RunState


@dataclass(frozen=True)
class InspectedSequence:
    """A sequence of the step.

    Attributes:
        text: what the model read, as tokens.
        tokens: its length.
        losses: mean per target, by name.
        gradient_norm: of the losses of this sequence alone, as the sum over its targets.
    """

    text: str
    tokens: int
    losses: Mapping[str, float]
    gradient_norm: float


@dataclass(frozen=True)
class InspectedStep:
    """A step of a run.

    Attributes:
        step: its number, from 1.
        began: the step of the checkpoint from which the steps up to it were repeated; 0 for none.
        cursor: the place in the data at which it begins.
        sequences: in the order of the data.
    """

    step: int
    began: int
    cursor: Cursor
    sequences: tuple[InspectedSequence, ...]


@own_torch_state()
def inspect_step(
    folder: Path,
    step: int,
    corpus: Corpus | Mapping[str, Corpus],
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> InspectedStep:
    """Repeat a run from the checkpoint before a step, and compute each of its sequences alone.

    The folder of the run is not changed.

    Args:
        step: the number of an update, from 1.
        corpus: what the run was trained on.

    Raises:
        CheckpointError: the folder has no settings, or the corpus is another one.
        ConfigError: the run has no such step.
    """
    file = folder / "config.toml"
    if not file.is_file():
        raise CheckpointError("is not the folder of a pre-training run", where=folder)
    settings = configs.load(PretrainConfig, file=file)
    if isinstance(corpus, Mapping) and settings.mixture is None:
        settings = dataclasses.replace(settings, mixture=Smoothed())
    corpora, where = Corpora.of(corpus, settings.mixture), choose_device(device)
    models = build_models(settings, corpora.first)
    learner = settings.objective.learner(models, vocabulary_of(corpora, settings.objective))
    learner.to(where)
    for model in models.values():
        compute_as(model.encoder, settings.training, where)
    torch.manual_seed(settings.seed + 1)
    optimizer = build_optimizer(
        settings.training.optimizer, learner.trained_parameters(), matrices=learner.matrices()
    )
    if settings.training.ema is not None:
        Average(learner, settings.training.ema)  # checkpoints hold it
    state = RunState()
    before = _before(folder, step)
    if before is not None:
        if before.config.get("corpus") != corpora.fingerprint():
            fix = "Name the corpora that the run was trained on, in the same order."
            raise CheckpointError("was trained on another corpus", where=folder, fix=fix)
        state = before.restore(learner, optimizer, Single(), before.config)
    began = state.steps
    phases = _phases(settings, corpora)
    state = _repeated(learner, optimizer, settings, phases, state, step, progress)
    return InspectedStep(
        step, began, state.cursor, _sequences(learner, settings, corpora, state, where)
    )


def _before(folder: Path, step: int) -> Checkpoint | None:
    """Return the newest checkpoint that is older than a step."""
    if step < 1:
        raise ConfigError(f"must be at least 1, not {step}", where="step")
    steps = {path: int(path.name.removeprefix("step-")) for path in checkpoints(folder)}
    older = [path for path, number in steps.items() if number < step]
    return read_checkpoint(older[-1]) if older else None


def _chosen(settings: PretrainConfig, corpora: Corpora) -> dict[str, DocumentIds]:
    return {
        name: part.split(settings.held_out, settings.seed)[0]
        for name, part in corpora.parts.items()
    }


def _phases(settings: PretrainConfig, corpora: Corpora) -> list[TrainingPhase]:
    return phases_of(settings, corpora, _chosen(settings, corpora), Single(), torch.device("cpu"))


def _repeated(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    settings: PretrainConfig,
    phases: list[TrainingPhase],
    state: RunState,
    step: int,
    progress: Progress,
) -> RunState:
    """Train up to the step before; return the state there."""
    training = settings.training
    progress.stage("repeating the steps before", step - 1)

    def on_step(now: RunState, meter: object) -> bool:
        """Return True before the step."""
        progress.advance(now.steps)
        return now.steps >= step - 1

    while True:
        phase = phases[state.phase]
        if state.steps < step - 1 and state.share(phase.until) < 1:
            state = fit(
                learner, phase.steps(state), optimizer,
                rate_factor(training.schedule, training.end), Single(),
                until=phase.until, progress=state, on_step=on_step,
                precision=training.precision, clip_norm=training.clip_norm,
            )  # fmt: skip
        if state.share(phase.until) < 1:
            return state
        if state.phase + 1 == len(phases):
            what = f"the run ends with step {state.steps}: there is no step {step}"
            raise ConfigError(what, where="step")
        state = state.next_phase()


def _sequences(
    learner: Learner,
    settings: PretrainConfig,
    corpora: Corpora,
    state: RunState,
    device: torch.device,
) -> tuple[InspectedSequence, ...]:
    """Compute each sequence of the next step alone."""
    chosen = _chosen(settings, corpora)
    loader = mixed_loader_of(settings, corpora, chosen, Single(), state.phase, state.ends)
    one_by_one = dataclasses.replace(loader, microbatch_tokens=1)
    data = next(iter(one_by_one.steps(state.cursor, state.tokens)))
    dtype = resolve_precision(settings.training.precision, device)
    learner.train()
    result = []
    for batch in data.microbatches:
        learner.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            losses = learner(batch.to(device))
        torch.autograd.backward(torch.stack([loss.total for loss in losses.values()]).sum())
        gradients = [p.grad for p in learner.parameters() if p.grad is not None]
        weights = learner.weights(batch)
        result.append(
            InspectedSequence(
                " ".join(corpora.tokenizer.token(each) for each in batch.ids.tolist()),
                batch.layout.tokens,
                {
                    name: float(loss.total.detach()) / (weights[name] or 1.0)
                    for name, loss in losses.items()
                },
                float(torch.nn.utils.get_total_norm(gradients)),
            )
        )
    learner.zero_grad()
    return tuple(result)
