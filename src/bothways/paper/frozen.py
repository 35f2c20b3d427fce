"""The feature-based rows of table 7 (section 5.3): the mean of several BiLSTMs on the vectors of
one frozen encoder.

The vectors are computed once for all restarts. A restart that is finished is read from its result;
an interrupted one starts again.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from rich.console import Console

from bothways.core.errors import DivergedError
from bothways.core.progress import OnShare
from bothways.core.stages import stages
from bothways.core.terminal import say
from bothways.finetuning.feature_data import FeatureConfig
from bothways.finetuning.frozen_features import FeatureData, fit_features, prepare_features
from bothways.paper.cells import (
    CellOutcome,
    CellResult,
    diverged,
    identity,
    read_result,
    scored,
    write_result,
)
from bothways.paper.experiment import Frozen


def run_frozen(experiment: Frozen, out: Path, *, device: str, console: Console) -> CellOutcome:
    """Run what is not yet run; errors as `recipes.features.feature_based`.

    Raises:
        ResourceError: a folder holds the result of other settings, other data or another model.
    """
    data: FeatureData | None = None
    results = []
    with stages(console) as on_stage:
        for number, settings in enumerate(frozen_restarts(experiment), 1):
            found = is_frozen_finished(experiment, settings, out)
            said = f"{experiment.name}, run {number} of {experiment.seeds}"
            say(console, said if found is None else f"{said}: done before")
            if found is None:
                place, on_share = (
                    features_folder(experiment, out),
                    partial(on_stage, "computing features"),
                )
                data = data or prepare_features(
                    settings, place, [settings.layers], device=device, on_share=on_share
                )
                found = _fit(
                    data,
                    settings,
                    _folder(experiment, settings, out),
                    device,
                    partial(on_stage, f"training, {said}"),
                )
                if found.failure:
                    say(console, f"warning: {found.failure}")
            results.append(found)
    return CellOutcome(experiment, tuple(results), tuple(scored(results)))


def frozen_restarts(experiment: Frozen) -> list[FeatureConfig]:
    """Return the settings of every run."""
    return [dataclasses.replace(experiment.settings, seed=seed) for seed in range(experiment.seeds)]


def is_frozen_finished(experiment: Frozen, settings: FeatureConfig, out: Path) -> CellResult | None:
    """Return the result of a finished run, or `None`.

    Raises:
        ResourceError: it belongs to other settings, other data or another model.
    """
    return read_result(_folder(experiment, settings, out), settings, _sources(settings))


def features_folder(experiment: Frozen, out: Path) -> Path:
    """Return the folder of the vectors of all runs."""
    return out / "runs" / experiment.name / "features"


def _folder(experiment: Frozen, settings: FeatureConfig, out: Path) -> Path:
    return out / "runs" / experiment.name / f"seed{settings.seed}"


def _sources(settings: FeatureConfig) -> dict[str, str]:
    return {"train": settings.train, "dev": settings.dev}


def _fit(
    data: FeatureData, settings: FeatureConfig, folder: Path, device: str, on_share: OnShare
) -> CellResult:
    mine = identity(settings, _sources(settings))
    try:
        done = fit_features(
            data,
            settings,
            device=device,
            on_step=lambda at: on_share(at.share(settings.training.end)),
        )
    except DivergedError as error:
        result = diverged(error, folder, *mine)
    else:
        metrics, progress = dict(done.metrics), done.progress
        result = CellResult(
            folder, *mine, metrics, metrics["f1"], progress.steps, progress.seconds, ""
        )
    write_result(result)
    return result
