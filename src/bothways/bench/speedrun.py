"""A speedrun: the time from the first update to a fixed held-out loss, on fixed text.

Everything may change but the text, the vocabulary and the held-out loss: masked LM on full
sentences of 128 tokens, 15 % of them masked, the same for all. docs/speedrun.md has the rules and
the board.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bothways
from bothways.core.atomic_files import replace_file
from bothways.core.config import reader as configs
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError
from bothways.core.learner import Learner
from bothways.core.progress import SILENT, Progress
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.documents import read_documents
from bothways.families.catalogue import preset
from bothways.kernels.library import describe_kernels
from bothways.objectives.masked_lm import MaskedLM, MaskedLMLearner
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.evaluation import HeldOut
from bothways.pretraining.from_text import corpus_of_text
from bothways.pretraining.recipes import RECIPES
from bothways.pretraining.run import pretrain
from bothways.pretraining.run_page import read_records
from bothways.runtime.devices import choose_device, describe_device
from bothways.sweeps.runs import Series, SweepFolder, SweepOutcome, run_all
from bothways.training.durations import Hours, part_of
from bothways.training.early_stopping import Target
from bothways.training.parallel import Plan
from bothways.training.run import Event

METRIC = "held-out/loss/masked"
"""The loss that a record is about, in nats."""
ENTRY = "entry.json"
EVALUATIONS = 60
"""Evaluations of a run of the length of the track, unless settings say otherwise."""


@dataclass(frozen=True)
class Track:
    """The fixed part of a speedrun.

    Attributes:
        target: the held-out loss to reach, in nats.
        vocabulary: tokens of the WordPiece vocabulary, learned from the training text.
        length: of the sequences that are scored, in tokens.
        tokens: of held-out text that are scored.
        seeds: runs of a record.
        limit: the longest run.
    """

    target: float
    vocabulary: int = 8000
    length: int = 128
    tokens: int = 100_000
    seeds: int = 3
    limit: Hours = Hours(1.0)


CPU = Track(target=5.0)
"""Two cores of a CPU, English Wikipedia: word frequencies alone reach about 7.0 nats."""


@dataclass(frozen=True)
class SpeedRun:
    """One run of a record. It is made in one session: an interrupted one begins again."""

    name: str
    settings: PretrainConfig
    track: Track
    corpus: Corpus = field(repr=False)
    held_out: Corpus = field(repr=False)

    def digests(self) -> dict[str, str]:
        """Return the sha256 of both corpora."""
        pair = {"corpus": self.corpus, "held-out": self.held_out}
        return {name: corpus.fingerprint for name, corpus in pair.items()}

    def start(
        self, folder: Path, *, resume: bool, device: str, progress: Progress
    ) -> SweepOutcome | None:
        """Train to the target; the time is that of the evaluation that reached it."""
        if folder.exists():
            shutil.rmtree(folder)
        seconds = 0.0

        def on_event(event: Event) -> None:
            """Note the time of the newest checkpoint, evaluation included."""
            nonlocal seconds
            if event.kind == "checkpoint":
                seconds = event.progress.seconds

        done = pretrain(
            self.settings,
            self.corpus,
            folder,
            device=device,
            progress=progress,
            on_event=on_event,
            held_out=self.scoring,
        )
        if not done.finished(self.settings.training):
            return None
        at = done.progress
        return SweepOutcome(self.name, dict(done.metrics), (), METRIC, "lowest", at.steps, seconds)

    def scoring(self, learner: Learner, plan: Plan) -> HeldOut:
        """Return what scores every record alike, whatever it is trained on."""
        if not isinstance(learner, MaskedLMLearner):
            what = f"{self.settings.objective.kind!r} has no masked LM loss, which a speedrun is to"
            raise ConfigError(what, where="objective", fix="Set objective=masked_lm.")
        fixed = PretrainConfig(
            self.settings.encoder,
            self.settings.training,
            MaskedLM(),
            (PretrainPhase(self.track.length),),
            evaluation_tokens=self.track.tokens,
        )
        return HeldOut(fixed, self.held_out, np.arange(len(self.held_out)), plan, learner)


@dataclass(frozen=True)
class RecordRequest:
    """What the user asks for.

    Attributes:
        text: files to train on; vocabulary and corpus are built in `out`, or found there. This is
            not on the clock.
        held_out: the file to score on.
        out: folder for corpus, runs and the entry.
        model, recipe: to start from.
        config: a TOML file with settings; None for none.
        overrides: settings by dotted path.
        seeds: number of runs; None for the track's.
    """

    text: tuple[str, ...]
    held_out: str
    out: Path
    track: Track = CPU
    model: str = "bert-mini"
    recipe: str = "modern"
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    seeds: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, seeds=self.seeds)
        if self.recipe not in RECIPES:
            what = f"unknown recipe {self.recipe!r}; there are: {', '.join(RECIPES)}"
            raise ConfigError(what, where="recipe")

    def settings(self, corpus: Corpus) -> PretrainConfig:
        """Return the settings of a run: a recipe of the length of the track, changed by the user.

        Raises:
            ConfigError: a wrong setting, fewer positions than are scored, or another target.
        """
        track = self.track
        base = RECIPES[self.recipe](fit_to_corpus(preset(self.model), corpus.tokenizer))
        training = dataclasses.replace(
            base.training,
            until=track.limit,
            evaluate=part_of(track.limit, 1 / EVALUATIONS),
            save=None,
            target=Target(METRIC, track.target),
        )
        settings = configs.load(
            PretrainConfig,
            base=dataclasses.replace(base, training=training),
            file=self.config,
            overrides=self.overrides,
        )
        if settings.training.target != training.target:
            what = f"is fixed by the track: {METRIC} at most {track.target:g}"
            raise ConfigError(what, where="training.target", fix="Leave it out.")
        if settings.encoder.max_positions < track.length:
            what = f"has {settings.encoder.max_positions} positions, and {track.length} are scored"
            raise ConfigError(what, where="encoder.position.max_positions", fix="Set it higher.")
        return settings


def speedrun(
    request: RecordRequest, *, device: str = "auto", progress: Progress = SILENT
) -> dict[str, Any]:
    """Make the runs of a record that are not finished; write and return its entry.

    Raises:
        BothwaysError: a file cannot be read, or a setting is wrong.
        KeyboardInterrupt: interrupted; the same command makes the runs that are left.
    """
    out, track = request.out, request.track
    corpus = corpus_of_text(request.text, out, track.vocabulary, progress)
    documents = read_documents([request.held_out])
    scored = build_corpus(documents, corpus.tokenizer, out / "held-out", progress=progress)
    settings = request.settings(corpus)
    runs = [
        SpeedRun(f"seed-{seed}", dataclasses.replace(settings, seed=seed), track, corpus, scored)
        for seed in range(request.seeds or track.seeds)
    ]
    place = SweepFolder(out / "runs", True, device, progress)
    series = run_all(runs, place)
    if not series.finished:
        raise KeyboardInterrupt
    entry = _entry(track, settings, series, place, device) | runs[0].digests()
    text = json.dumps(entry, indent=1) + "\n"
    replace_file(out / ENTRY, lambda file: file.write_text(text, encoding="utf8"))
    return entry


def _entry(
    track: Track, settings: PretrainConfig, series: Series, place: SweepFolder, device: str
) -> dict[str, Any]:
    """Return a record as plain values."""
    seconds = [run.seconds for run in series.runs]
    losses = [run.metrics.get(METRIC) for run in series.runs]
    reached = [loss is not None and loss <= track.target for loss in losses]
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "bothways": bothways.__version__,
        "commit": _commit(),
        "hardware": describe_device(choose_device(device)),
        "kernels": describe_kernels(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "track": dataclasses.asdict(track),
        "reached": all(reached),
        "mean seconds": statistics.fmean(seconds),
        "runs": [
            {
                "seed": seed,
                "reached": reached[seed],
                "seconds": run.seconds,
                "steps": run.steps,
                "loss": losses[seed],
                "curve": _curve(place.out / run.name / "metrics.jsonl"),
            }
            for seed, run in enumerate(series.runs)
        ],
        "settings": configs.to_dict(settings),
    }


def _curve(file: Path) -> list[list[float]]:
    """Return seconds, tokens and held-out loss of each evaluation."""
    records = read_records(file) if file.exists() else []
    names = ("seconds", "tokens", METRIC)
    return [[float(r[name]) for name in names] for r in records if METRIC in r]


def _commit(run: Callable[..., Any] = subprocess.run) -> str | None:
    """Return the commit of a checkout of the library; None for an installed one."""
    command = ["git", "-C", str(Path(bothways.__file__).parent), "rev-parse", "HEAD"]
    try:
        found = run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return str(found.stdout).strip()
