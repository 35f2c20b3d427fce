"""One step of a pre-training run, done again: what was read, and what came of it.

Data and masks are keyed by their places, and what a run decides by its clock is in its record
(`training.trackers`). So a step can be repeated from the checkpoint before it: equal to the bit
on the same machine, if the run had one process. Of a run of several, the sequences and the rates
are the same; sums over ranks are rounded in another order, and dropout has draws of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bothways.core.batch import Batch, pack
from bothways.core.config import reader as configs
from bothways.core.config.values import read_toml, require_at_least
from bothways.core.errors import CheckpointError, ConfigError, call
from bothways.core.files import read_object
from bothways.core.progress import SILENT, Progress
from bothways.core.report.sections import TokenSequence
from bothways.core.runtime.devices import choose_device, own_torch_state
from bothways.core.source import Cursor
from bothways.core.training_module import hidden_matrices
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import Corpora
from bothways.pretraining import run
from bothways.pretraining.build import build_training_module, loader_of
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.training_inputs import describe_sequence
from bothways.training.checkpoint import CONFIG, checkpoints, read_checkpoint
from bothways.training.loop import Loop, arithmetic_of, weighted_sum
from bothways.training.meter import Meter, StepReport
from bothways.training.optimizers import build_optimizer
from bothways.training.parallel import Plan
from bothways.training.saved_state import Average, RunTensors
from bothways.training.schedules import RunState, Steps
from bothways.training.trackers import read_records, recorded_steps


@dataclass(frozen=True)
class InspectedSequence:
    """A sequence of the step.

    Attributes:
        losses: mean per target, by name.
        gradient_norm: of the update's loss, if this sequence were all that the step reads: of the
            size of the norm that the run records for a step.
    """

    read: TokenSequence
    losses: Mapping[str, float]
    gradient_norm: float


@dataclass(frozen=True)
class NormMismatch:
    """A step whose repeat has another gradient norm than the run recorded."""

    step: int
    recorded: float
    repeated: float


@dataclass(frozen=True)
class InspectedStep:
    """A step of a run.

    Attributes:
        began: the step of the checkpoint from which the steps up to it were repeated; 0 for none.
        cursor: the place in the data at which it begins.
        losses: of the whole step, by name, as the run records them.
        gradient_norm: of the whole step, before it is clipped.
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
def repeat_step(
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
    repeat = Repeat(folder, step, corpus, choose_device(device), progress)
    began, devices = repeat.state.steps, [repeat.device] if repeat.device.type == "cuda" else []
    repeat.advance(step - 1)
    cursor = repeat.state.cursor
    with torch.random.fork_rng(devices):  # dropout in the step draws what it drew in the run
        sequences = repeat.sequences()
    report = repeat.advance(step)
    assert report is not None
    return InspectedStep(
        step, began, cursor, sequences, report.scores.losses, report.gradient_norm, report.rate,
        int(repeat.entries["ranks"][step - 1]), repeat.compared, repeat.difference,
    )  # fmt: skip


def recorded_data(folder: Path) -> run.RunData:
    """Return the recorded data of a run, besides its settings.

    Raises:
        CheckpointError: the folder has no such record.
    """
    if not (folder / run.DATA).is_file():
        message = f"is not the folder of a pre-training run: it has no {run.DATA}"
        raise CheckpointError(message, where=folder, fix="Give the folder of such a run.")
    values = read_object(folder / run.DATA, CheckpointError)
    try:
        return run.RunData(**values)
    except TypeError as error:
        message = "is not the record of a run's data"
        raise CheckpointError(message, where=folder / run.DATA) from error


def open_recorded(data: run.RunData, folders: Sequence[str] = ()) -> dict[str, Corpus]:
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
            if not Path(path).is_dir():
                message = "the corpus of the run is no longer there"
                fix = f"Name its folder: {call('inspect-step', 'RUN', 'STEP', 'CORPUS')}"
                raise CheckpointError(message, where=path, fix=fix)
    paths = folders or [*data.corpora.values()]
    return {name: Corpus.open(path) for name, path in zip(data.corpora, paths, strict=True)}


class Repeat:
    """A run that is done again, one step after the other, by its record.

    It begins at the newest checkpoint before a step; arguments and errors as `repeat_step`.

    Attributes:
        entries: what the run recorded before each step.
        compared: the number of steps with a recorded gradient norm that were repeated.
        difference: the first of them whose norm is another one.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        corpus: Corpus | Mapping[str, Corpus] | None,
        device: torch.device,
        progress: Progress = SILENT,
    ) -> None:
        data, self.entries = recorded_data(folder), recorded_steps(folder)
        text = open_recorded(data) if corpus is None else corpus
        # A schedule may be a function, which a file cannot hold; the record replaces it.
        file = folder / CONFIG
        tree = read_toml(file)
        if isinstance(tree.get("training"), dict):
            tree["training"]["schedule"] = "constant"
            if device.type == "cpu":  # on which a run of a GPU is repeated without these
                tree["training"] |= {"compiled": False, "graphs": False}
        try:
            settings = configs.read(PretrainConfig, tree)
        except ConfigError as error:
            fix = "The run wrote this file: undo what was changed in it."
            raise ConfigError(error.what, where=f"{file}: {error.where}", fix=fix) from error
        self.settings = settings
        corpora = self.corpora = Corpora.of(text, settings.mixture)
        if (digests := run.digests_of(settings, corpora)) != data.digests:
            names = [name for name, digest in digests.items() if digest != data.digests.get(name)]
            message = f"was trained on another {' and another '.join(names)}"
            fix = "Name what the run was trained on, several corpora in the same order."
            raise CheckpointError(message, where=folder, fix=fix)
        require_at_least(1, step=step)
        if step > len(self.entries):
            message = f"the run ends with step {len(self.entries)}: there is no step {step}"
            raise ConfigError(message, where="step")
        # The newest checkpoint that is older than the step; all steps from there on are needed.
        numbers = {path: int(path.name.removeprefix("step-")) for path in checkpoints(folder)}
        candidates = [path for path, number in numbers.items() if number < step]
        began = numbers[candidates[-1]] if candidates else 0
        if np.isnan(self.entries["rate"][began:step]).any():
            message = f"steps {began + 1} to {step} were trained by a version that kept no record"
            fix = "Steps after the next checkpoint can be repeated."
            raise CheckpointError(message, where=folder, fix=fix)
        module = self.training_module = build_training_module(settings, corpora, device)
        torch.manual_seed(settings.seed + 1)
        parameters, matrices = module.trained_parameters(), hidden_matrices(module)
        optimizer = build_optimizer(settings.training.optimizer, parameters, matrices=matrices)
        if settings.training.ema is not None:
            Average(module, settings.training.ema)  # checkpoints hold it
        self._tensors, self.state = RunTensors(module, optimizer, Plan()), RunState()
        if candidates:
            checkpoint = read_checkpoint(candidates[-1])
            self.state = checkpoint.restore(self._tensors, checkpoint.config)
        self.documents = run.training_documents(settings, corpora, data.held_out)
        file = folder / "metrics.jsonl"
        self._norms = {
            int(record["step"]): record["gradient_norm"]
            for record in (read_records(file) if file.is_file() else ())
            if "gradient_norm" in record
        }
        self.device, self._progress = device, progress
        self.compared = 0
        self.difference: NormMismatch | None = None

    def advance(self, step: int) -> StepReport | None:
        """Train up to the end of a step; return the report of the last steps, if there are any.

        It begins after the last step that the run recorded in its metrics.
        """
        report: StepReport | None = None

        def on_step(state: RunState, meter: Meter) -> bool:
            nonlocal report
            self._progress.advance(state.steps)
            recorded = self._norms.get(state.steps)
            if recorded is not None or state.steps == step:
                report = meter.read()
            if recorded is not None and report is not None:
                self.compared += 1
                if report.gradient_norm != recorded and self.difference is None:
                    self.difference = NormMismatch(state.steps, recorded, report.gradient_norm)
            return False

        self._progress.stage("repeating the steps before", step)
        training, module = self.settings.training, self._tensors.training_module
        phases = run.phases_of(self.settings, self.corpora, self.documents, Plan(), module)
        loop = Loop(
            self._tensors,
            lambda state: float(self.entries["rate"][state.steps]),
            on_step,
            precision=training.precision,
            clip_norm=training.clip_norm,
        )
        while self.state.steps < step:
            phase = self._begin_phase()
            # Train to the end of the phase, or to the requested step within it.
            following = np.flatnonzero(self.entries["phase"][:step] > phase)
            end = int(following[0]) if len(following) else step
            self.state = loop.train(phases[phase].steps(self.state), Steps(end), self.state)
        return report

    def _begin_phase(self) -> int:
        """Go to the phase of the next step, if that begins one; return its number."""
        phase = int(self.entries["phase"][self.state.steps])
        while self.state.phase < phase:
            self.state = self.state.next_phase()
        run.set_bases(self.training_module, self.settings, phase)
        return phase

    def sequences(self) -> tuple[InspectedSequence, ...]:
        """Compute each sequence of the next step alone; no weight changes."""
        phase, state = self._begin_phase(), self.state
        loader = loader_of(self.settings, self.corpora, self.documents, Plan(), phase, state.ends)
        data = next(iter(loader.steps(state.cursor, state.tokens)))
        segments = self.settings.segments_of(self.settings.phases[phase])
        self.training_module.train()
        inspected = []
        pairs = itertools.islice(loader.sequences(state.cursor), data.sequences)
        for number, (original, prepared) in enumerate(pairs, 1):
            read = describe_sequence(
                f"Sequence {number:,}", original, prepared, self.corpora.tokenizer, segments.classes
            )
            inspected.append(InspectedSequence(read, *self._compute(pack([prepared]))))
        self.training_module.zero_grad()
        return tuple(inspected)

    def _compute(self, batch: Batch) -> tuple[dict[str, float], float]:
        """Return the losses of a batch, and the norm of the gradient."""
        training_module = self.training_module
        training_module.zero_grad()
        with arithmetic_of(self.settings.training.precision, self.device):
            losses = training_module(batch.to(self.device))
        weights = training_module.weights(batch)
        torch.autograd.backward(weighted_sum(losses, weights, training_module.coefficients))
        # Weights that this sequence does not reach have no gradient.
        gradients = [p.grad for p in training_module.parameters() if p.grad is not None]
        totals = {name: float(loss.total.detach()) for name, loss in losses.items()}
        means = {name: total / (weights[name] or 1.0) for name, total in totals.items()}
        return means, float(torch.nn.utils.get_total_norm(gradients))
