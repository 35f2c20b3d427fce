"""One fine-tuning run with several seeds: the spread of its results.

For the large model on small sets the paper takes the best of several restarts on the dev data
(Devlin et al. 2018, section 4.1). That number hides the spread: Dodge et al. 2020, Mosbach et al.
2020.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from bothways.core.config.values import is_integer
from bothways.core.errors import ConfigError
from bothways.finetuning.config import FinetuneConfig
from bothways.lab.sweeps import runs

MOST_RUNS = 10_000
"""Maximum number of runs of a series."""


@dataclass(frozen=True)
class SeedSpread:
    """The metric over the seeds; runs that diverged are excluded.

    Attributes:
        metric: name of the metric that chooses the best run.
        mean, median, best: values of the metric.
        deviation: the standard deviation, with n − 1; None for a single run.
        failed: number of runs that failed or diverged; those that failed without diverging count
            in the metric.
    """

    metric: str
    mean: float
    median: float
    best: float
    deviation: float | None
    failed: int


def parse_seeds(text: str, start: int = 0) -> tuple[int, ...]:
    """Return the seeds that a text names: "5" → five from `start` on; "3,14,15" → these; "7," → 7.

    Raises:
        ConfigError: the text has another form, a number of seeds below 1, or a seed twice.
    """
    numbers = [number.strip() for number in text.split(",")]
    if len(numbers) == 1 and is_integer(numbers[0]) and int(numbers[0]):
        if int(numbers[0]) > MOST_RUNS:
            message = f"{text.strip()!r} is more than {MOST_RUNS:,} runs"
            fix = "Write a smaller number, or one seed with a comma, such as 12345,."
            raise ConfigError(message, where="seeds", fix=fix)
        return tuple(range(start, start + int(numbers[0])))
    if len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    seeds = tuple(int(number) for number in numbers if is_integer(number))
    if "," not in text or len(seeds) != len(numbers) or len(set(seeds)) != len(seeds):
        fix = "Write a number of seeds, such as 5, or the seeds, such as 3,14,15."
        raise ConfigError(f"{text!r} does not name seeds", where="seeds", fix=fix)
    return seeds


def finetune_seeds(
    settings: FinetuneConfig, seeds: Many[int], folder: runs.SweepFolder
) -> runs.Series:
    """Fine-tune once per seed, in `seed-N`.

    `model` is the best run's, `seeds.json` lists all results. A seed is the head's and, unless
    `order_seed` is set, of the order of the data and dropout. Raises the errors of `runs.run_all`.
    """
    planned = [
        runs.FinetuneRun(f"seed-{seed}", dataclasses.replace(settings, seed=seed)) for seed in seeds
    ]
    series = runs.run_all(planned, folder)
    runs.keep_best(series, folder.out)
    spread = seed_spread(series)
    summary = {} if spread is None else dataclasses.asdict(spread)
    runs.write_sweep_report(folder.out / "seeds.json", summary, series)
    return series


def seed_spread(series: runs.Series) -> SeedSpread | None:
    """Return the spread of the metric over the runs; None if all diverged."""
    best = series.best
    if best is None:
        return None
    values = [run.metrics[best.metric] for run in series.scored]
    return SeedSpread(
        best.metric,
        statistics.fmean(values),
        statistics.median(values),
        best.metrics[best.metric],
        float(np.std(values, ddof=1)) if len(values) > 1 else None,
        sum(bool(run.failed) for run in series.runs),
    )
