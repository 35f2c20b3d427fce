"""One step of a pre-training run, done again: what was read, and what came of it.

Data and masks are keyed by their places, and what a run decides by its clock is in its record
(`training.step_record`). So a step can be repeated from the checkpoint before it: equal to the bit
on the same machine, if the run had one process. Of a run of several, the sequences and the rates
are the same; sums over ranks are rounded in another order, and dropout has draws of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bothways.core.advice import call
from bothways.core.batch import Batch
from bothways.core.config import reader as configs
from bothways.core.config.toml import read_toml
from bothways.core.errors import CheckpointError, ConfigError
from bothways.core.json_reader import parse_object, read_object
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import choose_device, own_torch_state, resolve_precision
from bothways.core.source import Cursor
from bothways.core.training_module import TrainingModule
from bothways.core.urls import is_url
from bothways.data.corpus import Corpus
from bothways.data.epoch_order import AllExcept, DocumentIds
from bothways.data.mixture import Corpora, Smoothed
from bothways.pretraining.build import build_models, loader_of, vocabulary_of
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.run import DATA, RunData, digests_of, phases_of
from bothways.training.average import Average
from bothways.training.checkpoint import checkpoints, read_checkpoint
from bothways.training.durations import Steps
from bothways.training.loop import fit, weighted_sum
from bothways.training.meter import Meter, StepReport
from bothways.training.optimizers import build_optimizer
from bothways.training.parallel import Single
from bothways.training.preflight.machine import compute_as
from bothways.training.run import TrainingPhase
from bothways.training.saved_state import RunTensors
from bothways.training.state import RunState
from bothways.training.step_record import StepEntries, recorded_steps


@dataclass(frozen=True)
class InspectedSequence:
    """A sequence of the step.

    Attributes:
        text: what the model read, as tokens.
        tokens: its length.
        losses: mean per target, by name.
        gradient_norm: of the update's loss, if this sequence were all that the step reads: of the
            size of the norm that the run records for a step.
    """

    text: str
    tokens: int
    losses: Mapping[str, float]
    gradient_norm: float


@dataclass(frozen=True)
class NormMismatch:
    """A step whose repeat is not what the run recorded.

    Attributes:
        step: its number.
        recorded, repeated: the gradient norms.
    """

    step: int
    recorded: float
    repeated: float


@dataclass(frozen=True)
class InspectedStep:
    """A step of a run.

    Attributes:
        step: its number, from 1.
        began: the step of the checkpoint from which the steps up to it were repeated; 0 for none.
        cursor: the place in the data at which it begins.
        sequences: in the order of the data.
        losses: of the whole step, by name, as the run records them.
        gradient_norm: of the whole step, before it is clipped.
        rate: the learning rate.
        ranks: processes that the run had.
        compared: the number of repeated steps with a recorded gradient norm.
        difference: the first of them with another norm; None if all are equal to the bit.
    """

    step: int
    began: int
    cursor: Cursor
    sequences: tuple[InspectedSequence, ...]
    losses: Mapping[str, float]
    gradient_norm: float
    rate: float
    ranks: int
    compared: int
    difference: NormMismatch | None


@own_torch_state()
def inspect_step(
    folder: Path,
    step: int,
    corpus: Corpus | Mapping[str, Corpus] | None = None,
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> InspectedStep:
    """Repeat a run from the checkpoint before a step, and compute each of its sequences alone.

    The folder of the run is not changed.

    Args:
        step: the number of an update, from 1.
        corpus: what the run was trained on; None for the corpora that it recorded.

    Raises:
        CheckpointError: the folder has no settings or records, or the corpus is another one or no
            longer there.
        ConfigError: the run has no such step.
    """
    repeat = Repeat.of(folder, step, corpus, choose_device(device), progress)
    began = repeat.state.steps
    repeat.advance(step - 1)
    cursor, devices = repeat.state.cursor, [repeat.device] if repeat.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # dropout in the step draws what it drew in the run
        sequences = repeat.sequences()
    report = repeat.advance(step)
    assert report is not None
    return InspectedStep(
        step, began, cursor, sequences, report.scores.losses, report.gradient_norm, report.rate,
        int(repeat.entries["ranks"][step - 1]), repeat.compared, repeat.difference,
    )  # fmt: skip


def recorded_data(folder: Path) -> RunData:
    """Return the recorded data of a run, besides its settings.

    Raises:
        CheckpointError: the folder has no such record.
    """
    if not (folder / "config.toml").is_file():
        raise CheckpointError("is not the folder of a pre-training run", where=folder)
    if not (folder / DATA).is_file():
        message = f"has no record of its data ({DATA}): a version without it trained this run"
        fix = "Its steps cannot be repeated. Train it again to inspect one."
        raise CheckpointError(message, where=folder, fix=fix)
    values = read_object(folder / DATA, CheckpointError)
    try:
        return RunData(**values)
    except TypeError as error:
        raise CheckpointError("is not the record of a run's data", where=folder / DATA) from error


def open_recorded(data: RunData, folders: Sequence[str] = ()) -> dict[str, Corpus]:
    """Open the corpora of a run by name.

    Args:
        folders: where they are now, in the order of the run; none if they are where they were.

    Raises:
        CheckpointError: a corpus is missing.
        ConfigError: there are fewer or more folders than corpora.
        DataError: a folder holds no corpus.
    """
    if folders and len(folders) != len(data.corpora):
        message = f"the run has {len(data.corpora)} corpora, and {len(folders)} are given"
        fix = f"Name them in its order: {', '.join(data.corpora.values())}."
        raise ConfigError(message, where="corpus", fix=fix)
    if not folders:
        for path in data.corpora.values():
            if not is_url(path) and not Path(path).is_dir():
                message = "the corpus of the run is no longer there"
                fix = f"Name its folder: {call('inspect-step', 'RUN', 'STEP', 'CORPUS')}"
                raise CheckpointError(message, where=path, fix=fix)
    paths = folders or [*data.corpora.values()]
    return {name: Corpus.open(path) for name, path in zip(data.corpora, paths, strict=True)}


@dataclass
class Repeat:
    """A run that is done again, one step after the other, by its record.

    Attributes:
        entries: what the run recorded before each step.
        norms: the gradient norms that the run recorded, by step.
        all_documents: whether no document was set aside.
        state: where it is.
        compared: the number of steps with a recorded norm that were repeated.
        difference: the first of them whose norm is another one.
    """

    settings: PretrainConfig
    corpora: Corpora
    training_module: TrainingModule
    optimizer: torch.optim.Optimizer
    device: torch.device
    entries: StepEntries
    norms: Mapping[int, float]
    chosen: Mapping[str, DocumentIds]
    state: RunState
    progress: Progress = SILENT
    compared: int = 0
    difference: NormMismatch | None = None

    @classmethod
    def of(
        cls,
        folder: Path,
        step: int,
        corpus: Corpus | Mapping[str, Corpus] | None,
        device: torch.device,
        progress: Progress = SILENT,
    ) -> Repeat:
        """Return a run at its newest checkpoint before a step; errors as `inspect_step`."""
        data, entries = recorded_data(folder), recorded_steps(folder)
        text = open_recorded(data) if corpus is None else corpus
        if isinstance(text, Mapping) and [*text] == [""]:
            text = text[""]
        settings = _settings(folder, text)
        corpora = Corpora.of(text, settings.mixture)
        if (digests := digests_of(settings, corpora)) != data.digests:
            names = [name for name, digest in digests.items() if digest != data.digests.get(name)]
            message = f"was trained on another {' and another '.join(names)}"
            fix = "Name what the run was trained on, several corpora in the same order."
            raise CheckpointError(message, where=folder, fix=fix)
        checkpoint_folder = _steps_before(folder, step, entries)
        models = build_models(settings, corpora.first)
        training_module = settings.objective.training_module(
            models, vocabulary_of(corpora, settings.objective)
        )
        training_module.to(device)
        for model in models.values():
            compute_as(model.encoder, settings.training, device)
        torch.manual_seed(settings.seed + 1)
        optimizer = build_optimizer(
            settings.training.optimizer,
            training_module.trained_parameters(),
            matrices=training_module.matrices(),
        )
        if settings.training.ema is not None:
            Average(training_module, settings.training.ema)  # checkpoints hold it
        state = RunState()
        if checkpoint_folder is not None:
            checkpoint = read_checkpoint(checkpoint_folder)
            state = checkpoint.restore(
                RunTensors(training_module, optimizer, Single()), checkpoint.config
            )
        documents = {
            name: corpus_part.split(settings.held_out, settings.seed)[0]
            if data.held_out
            else AllExcept(len(corpus_part))
            for name, corpus_part in corpora.parts.items()
        }
        return cls(
            settings, corpora, training_module, optimizer, device, entries, _norms(folder),
            documents, state, progress,
        )  # fmt: skip

    @functools.cached_property
    def phases(self) -> list[TrainingPhase]:
        """The phases of the run, with their data."""
        cpu = torch.device("cpu")
        return phases_of(self.settings, self.corpora, self.chosen, Single(), cpu)

    def advance(self, step: int) -> StepReport | None:
        """Train up to the end of a step; return the report of the last steps, if there are any.

        It begins after the last step that the run recorded in its metrics.
        """
        report: StepReport | None = None

        def on_step(state: RunState, meter: Meter) -> bool:
            """Compare the step with the record."""
            nonlocal report
            self.progress.advance(state.steps)
            if state.steps in self.norms or state.steps == step:
                report = meter.read()
                self._compare(state.steps, report.gradient_norm)
            return False

        self.progress.stage("repeating the steps before", step)
        training = self.settings.training
        while self.state.steps < step:
            phase = int(self.entries["phase"][self.state.steps])
            while self.state.phase < phase:
                self.state = self.state.next_phase()
            following = np.flatnonzero(self.entries["phase"][:step] > phase)
            end = int(following[0]) if len(following) else step
            self.state = fit(
                self.training_module, self.phases[phase].steps(self.state), self.optimizer,
                lambda state: float(self.entries["rate"][state.steps]), Single(),
                until=Steps(end), progress=self.state, on_step=on_step,
                precision=training.precision, clip_norm=training.clip_norm,
            )  # fmt: skip
        return report

    def _compare(self, step: int, norm: float) -> None:
        if step in self.norms:
            self.compared += 1
            if norm != self.norms[step] and self.difference is None:
                self.difference = NormMismatch(step, self.norms[step], norm)

    def sequences(self) -> tuple[InspectedSequence, ...]:
        """Compute each sequence of the next step alone; no weight changes."""
        phase = int(self.entries["phase"][self.state.steps])
        state = self.state
        while state.phase < phase:
            state = state.next_phase()
        loader = loader_of(
            self.settings, self.corpora, self.chosen, Single(), state.phase, state.ends
        )
        one_by_one = dataclasses.replace(loader, microbatch_tokens=1)
        data = next(iter(one_by_one.steps(state.cursor, state.tokens)))
        self.training_module.train()
        found = tuple(map(self._sequence, data.microbatches))
        self.training_module.zero_grad()
        return found

    def _sequence(self, batch: Batch) -> InspectedSequence:
        training_module = self.training_module
        dtype = resolve_precision(self.settings.training.precision, self.device)
        training_module.zero_grad()
        with torch.autocast(self.device.type, dtype, enabled=dtype is not torch.float32):
            losses = training_module(batch.to(self.device))
        weights = training_module.weights(batch)
        torch.autograd.backward(weighted_sum(losses, weights, training_module.coefficients))
        gradients = [p.grad for p in training_module.parameters() if p.grad is not None]
        return InspectedSequence(
            " ".join(self.corpora.tokenizer.token(id) for id in batch.ids.tolist()),
            batch.layout.tokens,
            {
                name: float(loss.total.detach()) / (weights[name] or 1.0)
                for name, loss in losses.items()
            },
            float(torch.nn.utils.get_total_norm(gradients)),
        )


def _settings(folder: Path, text: Corpus | Mapping[str, Corpus]) -> PretrainConfig:
    """Return the settings of a run, without its schedule, which its record replaces.

    A schedule may be a function, which a file cannot hold.
    """
    file = folder / "config.toml"
    tree = read_toml(file)
    if isinstance(tree.get("training"), dict):
        tree["training"]["schedule"] = "constant"
    try:
        settings = configs.read(PretrainConfig, tree)
    except ConfigError as error:
        raise ConfigError(error.what, where=f"{file}: {error.where}", fix=error.fix) from error
    if isinstance(text, Mapping) and settings.mixture is None:
        settings = dataclasses.replace(settings, mixture=Smoothed())
    return settings


def _steps_before(folder: Path, step: int, entries: StepEntries) -> Path | None:
    """Return the folder of the newest checkpoint that is older than a step, if there is one.

    Raises:
        ConfigError: the run has no such step.
        CheckpointError: a step from there on was not recorded.
    """
    if step < 1:
        raise ConfigError(f"must be at least 1, not {step}", where="step")
    if step > len(entries):
        message = f"the run ends with step {len(entries)}: there is no step {step}"
        raise ConfigError(message, where="step")
    numbers = {path: int(path.name.removeprefix("step-")) for path in checkpoints(folder)}
    earlier = [path for path, number in numbers.items() if number < step]
    began = numbers[earlier[-1]] if earlier else 0
    if np.isnan(entries["rate"][began:step]).any():
        message = f"steps {began + 1} to {step} were trained by a version that did not record them"
        fix = "Steps after the next checkpoint can be repeated."
        raise CheckpointError(message, where=folder, fix=fix)
    return earlier[-1] if earlier else None


def _norms(folder: Path) -> dict[int, float]:
    """Return the gradient norms that a run recorded, by step; a kill may have cut the last line."""
    file = folder / "metrics.jsonl"
    text = file.read_text("utf8", errors="replace") if file.is_file() else ""
    records = [parse_object(line, file, CheckpointError) for line in text.split("\n")[:-1]]
    return {
        int(record["step"]): record["gradient_norm"]
        for record in records
        if "gradient_norm" in record
    }
