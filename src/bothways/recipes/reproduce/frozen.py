"""The feature-based rows of table 7 (section 5.3): the mean of several BiLSTMs on the vectors of one frozen encoder.

The vectors are computed once for all restarts. A restart that is finished is read from its result; one that was interrupted
begins anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console

from bothways.recipes.features import FeatureConfig, FeatureData, fit_features, prepare_features
from bothways.recipes.reproduce.experiment import Frozen
from bothways.recipes.reproduce.runner import Outcome, Result, identity, read_result, write_result


def run_frozen(experiment: Frozen, out: Path, *, device: str, console: Console) -> Outcome:
    """Run what is not yet run; errors as `recipes.features.feature_based`.

    Raises:
        ResourceError: a folder holds the result of other settings or other data.
    """
    home, sources = out / "runs" / experiment.name, {"train": experiment.settings.train, "dev": experiment.settings.dev}
    data: FeatureData | None = None
    results = []
    for seed in range(experiment.seeds):
        settings, folder = dataclasses.replace(experiment.settings, seed=seed), home / f"seed{seed}"
        found = read_result(folder, settings, sources)
        said = f"{experiment.name}, run {seed + 1} of {experiment.seeds}"
        console.print(said if found is None else f"{said}: done before", highlight=False, soft_wrap=True)
        if found is None:
            data = data or prepare_features(settings, home / "features", [settings.layers], device=device)
            found = _fit(data, settings, sources, folder, device)
        results.append(found)
    return Outcome(experiment, tuple(results), tuple(results))


def _fit(data: FeatureData, settings: FeatureConfig, sources: dict[str, str], folder: Path, device: str) -> Result:
    done = fit_features(data, settings, device=device)
    folder.mkdir(parents=True, exist_ok=True)
    metrics = dict(done.metrics)
    result = Result(
        folder, *identity(settings, sources), metrics, metrics["f1"], done.progress.steps, done.progress.seconds, ""
    )
    write_result(result)
    return result
