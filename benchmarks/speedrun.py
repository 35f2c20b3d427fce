"""A speedrun: pre-training in little time, by fixed rules.

    python benchmarks/speedrun.py [SETTING=VALUE …] --text FILE … --held-out FILE --out FOLDER
    python benchmarks/speedrun.py [SETTING=VALUE …] --text FILE … --blimp FOLDER --out FOLDER

There are two tracks: the time from the first update to a fixed held-out loss, and the accuracy on
minimal pairs after at most eight hours with ten million words. Vocabulary and corpus are not on the
clock. The entry of a record is OUT/entry.json; docs/speedrun.md has the rules and the board.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import assert_never

import bothways
from bothways.core.config import reader as configs
from bothways.core.config.values import require_at_least, require_choice
from bothways.core.errors import ConfigError, DataError, os_errors
from bothways.core.files import replace_file, replace_text
from bothways.core.progress import SILENT, Progress, terminal_progress
from bothways.core.runtime.devices import choose_device, describe_device
from bothways.core.terminal import time_text
from bothways.core.training_module import TrainingModule
from bothways.data.corpus import Corpus, write_corpus
from bothways.data.documents import read_documents
from bothways.lab.paper.pretraining_runs import corpus_of_text
from bothways.lab.sweeps.runs import Run, Series, SweepFolder, SweepOutcome, run_all
from bothways.model.families.catalogue import preset
from bothways.model.kernels.library import describe_kernels
from bothways.objectives.masked_lm import MaskedLM, MaskedLMModule
from bothways.prediction.analysis.evaluation import evaluate_suite, open_pairs, read_suite
from bothways.prediction.predictor import Predictor
from bothways.pretraining import PretrainRecipe
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.evaluation import HeldOut
from bothways.pretraining.recipes import RECIPES
from bothways.pretraining.run import pretrain, read_records
from bothways.tasks.base import Metrics
from bothways.training.parallel import Plan
from bothways.training.run import Event, Target
from bothways.training.schedules import Hours

METRIC = "held-out/loss/masked"
"""The loss that a record is about, in nats."""
ACCURACY = "mean"
"""The mean of the accuracies of the phenomena, the metric of minimal pairs."""
ENTRY = "entry.json"
_WORD = re.compile(r"\S+")
EVALUATIONS = 60
"""Evaluations of a run of the length of the track, unless settings say otherwise."""
SEEDS = 3
"""Runs of a record."""


@dataclass(frozen=True)
class LossTrack:
    """The time to a held-out loss: masked LM on full sentences, 15 % masked, the same for all.

    On English Wikipedia word frequencies alone reach about 7.0 nats.

    Attributes:
        held_out: the file to score on.
        target: the loss to reach, in nats.
        vocabulary: tokens of the WordPiece vocabulary, learned from the training text.
        length: of the sequences that are scored, in tokens.
        tokens: of held-out text that are scored.
        limit: the length of a run, unless settings say otherwise.
    """

    held_out: str
    target: float = 5.0
    vocabulary: int = 8000
    length: int = 128
    tokens: int = 100_000
    limit: Hours = Hours(1.0)


@dataclass(frozen=True)
class PairTrack:
    """The accuracy on minimal pairs that little text and little time give.

    Attributes:
        suite: the folder of minimal pairs, such as BLiMP's data; see `read_suite`.
        words: of the training text that are read, from its beginning.
        vocabulary: tokens of the WordPiece vocabulary, learned from these words.
        limit: the longest run.
    """

    suite: Path
    words: int = 10_000_000
    vocabulary: int = 8000
    limit: Hours = Hours(8.0)


@dataclass(frozen=True)
class LossRun(Run):
    """A run to a held-out loss. It is made in one session: an interrupted one begins again."""

    settings: PretrainConfig
    track: LossTrack
    corpus: Corpus = field(repr=False)
    held_out: Corpus = field(repr=False)

    def digests(self) -> dict[str, str]:
        """Return the sha256 of both corpora."""
        pair = {"corpus": self.corpus, "held-out": self.held_out}
        return {name: corpus.fingerprint for name, corpus in pair.items()}

    def start(self, folder: Path, sweep: SweepFolder, progress: Progress) -> SweepOutcome:
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
            device=sweep.device,
            progress=progress,
            on_event=on_event,
            held_out=self.scoring,
        )
        at = done.progress
        return SweepOutcome(self.name, dict(done.metrics), (), METRIC, "lowest", at.steps, seconds)

    def scoring(self, training_module: TrainingModule, plan: Plan) -> HeldOut:
        """Build the evaluation, which is the same for every record."""
        if not isinstance(training_module, MaskedLMModule):
            message = f"{self.settings.objective.kind!r} has no masked LM loss to score"
            raise ConfigError(message, where="objective", fix="Set objective=masked_lm.")
        fixed = PretrainConfig(
            self.settings.encoder,
            self.settings.training,
            MaskedLM(),
            (PretrainPhase(self.track.length),),
            evaluation_tokens=self.track.tokens,
        )
        return HeldOut(fixed, self.held_out, np.arange(len(self.held_out)), plan, training_module)


@dataclass(frozen=True)
class PairRun(Run):
    """A run whose model is asked for minimal pairs. An interrupted one continues."""

    settings: PretrainConfig
    track: PairTrack
    corpus: Corpus = field(repr=False)

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the corpus."""
        return {"corpus": self.corpus.fingerprint}

    def start(self, folder: Path, sweep: SweepFolder, progress: Progress) -> SweepOutcome:
        """Train for the time of the track, and score the model that is saved at the end."""
        resume, device = sweep.resume, sweep.device
        done = pretrain(
            self.settings, self.corpus, folder, resume=resume, device=device, progress=progress
        )
        pairs = Predictor(open_pairs(folder, device=device))
        scores = evaluate_suite(pairs, self.track.suite, progress)
        phenomena = scores.groups["phenomenon"].items()
        metrics = {name: sum(right) / len(right) for name, right in phenomena}
        at = done.progress
        metrics[ACCURACY] = scores.mean
        return SweepOutcome(self.name, metrics, (), ACCURACY, "highest", at.steps, at.seconds)


@dataclass(frozen=True)
class RecordRequest:
    """The settings of a record.

    Attributes:
        text: files to train on; vocabulary and corpus are built in `out`, or reused.
        track: measure with its fixed settings.
        out: folder for corpus, runs and the entry.
        model, recipe: preset and recipe to start from.
        config: TOML file with settings, or None.
        overrides: settings by dotted path.
        seeds: number of runs.
    """

    text: tuple[str, ...]
    track: LossTrack | PairTrack
    out: Path
    model: str = "bert-mini"
    recipe: str = "modern"
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    seeds: int = SEEDS

    def __post_init__(self) -> None:
        require_at_least(1, seeds=self.seeds)
        require_choice(PretrainRecipe, "recipe", self.recipe)

    def settings(self, corpus: Corpus) -> PretrainConfig:
        """Return the settings of a run: a recipe of the length of the track, changed by the user.

        Raises:
            ConfigError: a wrong setting, or one that the rules of the track fix.
        """
        track = self.track
        base = RECIPES[self.recipe](fit_to_corpus(preset(self.model), corpus.tokenizer))
        target = Target(METRIC, track.target) if isinstance(track, LossTrack) else None
        every = track.limit.part(1 / EVALUATIONS)
        training = dataclasses.replace(
            base.training,
            until=track.limit,
            evaluate=every,
            save=every if target is None else None,
            target=target,
        )
        settings = configs.load(
            PretrainConfig,
            base=dataclasses.replace(base, training=training),
            file=self.config,
            overrides=self.overrides,
        )
        _check_rules(settings, track)
        return settings


def _check_rules(settings: PretrainConfig, track: LossTrack | PairTrack) -> None:
    """Raise ConfigError if settings change what a track fixes."""
    target, until = settings.training.target, settings.training.until
    match track:
        case LossTrack():
            if target != Target(METRIC, track.target):
                message = f"is fixed by the track: {METRIC} at most {track.target:g}"
                raise ConfigError(message, where="training.target", fix="Leave it out.")
            if (positions := settings.encoder.max_positions) < track.length:
                message = f"has {positions} positions, and {track.length} are scored"
                location = "encoder.position.max_positions"
                raise ConfigError(message, where=location, fix="Set it higher.")
        case PairTrack():
            if not isinstance(until, Hours) or until.count > track.limit.count:
                message = f"is {until}, and a run of this track takes at most {track.limit}"
                fix = f'Give a time, such as "{track.limit}".'
                raise ConfigError(message, where="training.until", fix=fix)
        case _:
            assert_never(track)


def first_words(files: Sequence[str], count: int, file: Path, progress: Progress = SILENT) -> None:
    """Write the documents that have the first `count` words of texts, as JSON lines.

    Words are what white space separates. The last document ends with the last word.

    Raises:
        DataError: a file cannot be read, or there is no word.
        ResourceError: `file` cannot be written.
    """

    def write(path: Path) -> None:
        """Write the documents to a new file."""
        left = count
        progress.stage("reading the first words", count)
        with path.open("w", encoding="utf8") as out:
            for document in read_documents(files):
                words = [
                    word.span() for word in itertools.islice(_WORD.finditer(document.text), left)
                ]
                if words:
                    text = document.text[: words[-1][1]]
                    out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                if not (left := left - len(words)):
                    break
                progress.advance(count - left)
        if left == count:
            raise DataError("holds no word", where=", ".join(files), fix="Give files with text.")

    with os_errors(file, "Choose another folder."):
        file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, write)


def speedrun(
    request: RecordRequest, *, device: str = "auto", progress: Progress = SILENT
) -> dict[str, Any]:
    """Make the runs of a record that are not finished; write and return its entry.

    Raises:
        BothwaysError: a file cannot be read, or a setting is wrong.
        KeyboardInterrupt: interrupted; the same command makes the runs that are left.
    """
    out, track = request.out, request.track
    text = request.text
    if isinstance(track, PairTrack):
        for _ in read_suite(track.suite):  # errors now, not after hours of training
            pass
        text = (str(out / "text.jsonl"),)
        first_words(request.text, track.words, out / "text.jsonl", progress)
    corpus = corpus_of_text(text, out, track.vocabulary, progress)
    settings = request.settings(corpus)
    seeded = {
        f"seed-{seed}": dataclasses.replace(settings, seed=seed) for seed in range(request.seeds)
    }
    runs: list[LossRun | PairRun]
    if isinstance(track, PairTrack):
        runs = [PairRun(name, run, track, corpus) for name, run in seeded.items()]
    else:
        documents = read_documents([track.held_out])
        scored = write_corpus(documents, corpus.tokenizer, out / "held-out", progress=progress)
        runs = [LossRun(name, run, track, corpus, scored) for name, run in seeded.items()]
    folder = SweepFolder(out / "runs", True, device, progress)
    series = run_all(runs, folder)
    entry = _entry(track, settings, series, folder, device) | runs[0].digests()
    replace_text(out / ENTRY, json.dumps(entry, indent=1) + "\n")
    return entry


def _entry(
    track: LossTrack | PairTrack,
    settings: PretrainConfig,
    series: Series,
    folder: SweepFolder,
    device: str,
) -> dict[str, Any]:
    """Return a record as plain values."""
    runs = [
        {"seed": seed, "seconds": run.seconds, "steps": run.steps}
        | _result(track, run.metrics)
        | {"curve": _curve(folder.out / run.name / "metrics.jsonl")}
        for seed, run in enumerate(series.runs)
    ]
    overall: dict[str, bool | float | None]
    if isinstance(track, LossTrack):
        overall = {"reached": all(run["reached"] for run in runs)}
    else:
        scores = [run["accuracy"] for run in runs]
        overall = {"mean accuracy": None if None in scores else statistics.fmean(scores)}
    # The times of runs that end without the target are no times to it.
    seconds = statistics.fmean(run.seconds for run in series.runs)
    overall["mean seconds"] = None if overall.get("reached") is False else seconds
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "bothways": bothways.__version__,
        "commit": _commit(),
        "hardware": describe_device(choose_device(device)),
        "kernels": describe_kernels(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "track": configs.to_dict(track),
        **overall,
        "runs": runs,
        "settings": configs.to_dict(settings),
    }


def _result(track: LossTrack | PairTrack, metrics: Metrics) -> dict[str, Any]:
    """Return the measures of a run by its track; those of a run that diverged are None."""
    if isinstance(track, LossTrack):
        loss = metrics.get(METRIC)
        return {"reached": loss is not None and loss <= track.target, "loss": loss}
    phenomena = {name: value for name, value in metrics.items() if name != ACCURACY}
    return {"accuracy": metrics.get(ACCURACY), "phenomena": phenomena}


def _curve(file: Path) -> list[list[float]]:
    """Return seconds, tokens and held-out loss of each evaluation."""
    records = read_records(file) if file.exists() else []
    names = ("seconds", "tokens", METRIC)
    return [[float(r[name]) for name in names] for r in records if METRIC in r]


def _commit() -> str | None:
    """Return the commit of a checkout of the library; None for an installed one."""
    command = ["git", "-C", str(Path(bothways.__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return str(done.stdout).strip()


def main() -> None:
    """Make a record, and print the result of each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE")
    parser.add_argument("--text", nargs="+", required=True, help="files to train on")
    track_options = parser.add_mutually_exclusive_group(required=True)
    track_options.add_argument("--held-out", help="text file whose loss is to be reached")
    track_options.add_argument("--blimp", type=Path, help="folder of minimal pairs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="bert-mini", help="preset to start from")
    parser.add_argument("--recipe", default="modern", help="recipe to start from")
    parser.add_argument("--config", type=Path, help="TOML file with settings")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of runs")
    parser.add_argument("--target", type=float, default=5.0, help="held-out loss in nats")
    parser.add_argument("--device", default="auto")
    options = parser.parse_intermixed_args()
    track: LossTrack | PairTrack
    if options.blimp is None:
        track = LossTrack(options.held_out, options.target)
    else:
        track = PairTrack(options.blimp)
    request = RecordRequest(
        tuple(options.text), track, options.out, options.model, options.recipe, options.config,
        tuple(options.overrides), options.seeds,
    )  # fmt: skip
    with terminal_progress() as progress:
        entry = speedrun(request, device=options.device, progress=progress)
    for run in entry["runs"]:
        score = run["loss" if options.blimp is None else "accuracy"]
        result = "diverged" if score is None else f"{score:.3f}"
        print(
            f"seed {run['seed']}: {result} in {time_text(run['seconds'])}, {run['steps']:,} steps"
        )
    if options.blimp is None:
        reached = sum(run["reached"] for run in entry["runs"])
        print(f"{reached} of {len(entry['runs'])} runs reached {options.target:g} nats")
    if entry["mean seconds"] is not None:
        print(f"mean time: {time_text(entry['mean seconds'])}")
    print(f"Written: {options.out / ENTRY}")


if __name__ == "__main__":
    main()
