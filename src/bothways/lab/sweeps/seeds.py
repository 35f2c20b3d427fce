"""One fine-tuning run with several seeds: the spread of its results.

For the large model on small sets the paper takes the best of several restarts on the dev data
(Devlin et al. 2018, section 4.1). That number hides the spread: Dodge et al. 2020, Mosbach et al.
2020.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections.abc import Sequence as Many
from dataclasses import dataclass

from bothways.core.errors import ConfigError
from bothways.finetuning.config import FinetuneConfig
from bothways.lab.sweeps import runs

MOST_RUNS = 10_000
"""Maximum number of runs of a series."""
Seed = int | tuple[int, int]
"""One seed for a whole run, or one for the head and one for the order of the data and dropout."""


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


def parse_seeds(text: str, start: int = 0) -> tuple[Seed, ...]:
    """Return the seeds that a text names.

        "5" → five seeds from `start` on; "3,14,15" → these; "7," → this one
        "2x3" → two seeds of the head, each with three seeds of the order

    Raises:
        ConfigError: the text has another form, a number of seeds below 1, or a seed twice.
    """
    counts = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip())
    if counts and int(counts[1]) * int(counts[2] or 1) > MOST_RUNS:
        message = f"{text.strip()!r} is more than {MOST_RUNS:,} runs"
        fix = "Write a smaller number, or one seed with a comma, such as 12345,."
        raise ConfigError(message, where="seeds", fix=fix)
    if crossed := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip()):
        heads, orders = (range(start, start + int(count)) for count in crossed.groups())
        return tuple(itertools.product(heads, orders))
    numbers = [number.strip() for number in text.split(",")]
    if len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    elif len(numbers) == 1 and numbers[0].isdecimal() and int(numbers[0]) > 0:
        return tuple(range(start, start + int(numbers[0])))
    seeds = tuple(int(number) for number in numbers if number.isdecimal())
    if "," not in text or len(seeds) != len(numbers) or len(set(seeds)) != len(seeds):
        fix = (
            "Write a number of seeds, such as 5, the seeds, such as 3,14,15, or numbers of heads "
            "and orders, such as 5x3."
        )
        raise ConfigError(f"{text!r} does not name seeds", where="seeds", fix=fix)
    return seeds


def finetune_seeds(
    settings: FinetuneConfig, seeds: Many[Seed], folder: runs.SweepFolder
) -> runs.Series:
    """Fine-tune once per seed, in `seed-N` or `seed-N-order-M`.

    `model` is the best run's, `seeds.json` lists all results. A single seed is the head's
    and, unless `order_seed` is set, of the order of the data and dropout. Raises the errors of
    `runs.run_all`.
    """
    series = runs.run_all((_run(settings, seed) for seed in seeds), folder)
    if series.finished:
        runs.keep_best(series, folder)
        summary = seed_spread(series)
        runs.write_sweep_report(
            folder.out / "seeds.json", dataclasses.asdict(summary) if summary else {}, series.runs
        )
    return series


def _run(settings: FinetuneConfig, seed: Seed) -> runs.FinetuneRun:
    """Return the run of a seed."""
    match seed:
        case int():
            return runs.FinetuneRun(f"seed-{seed}", dataclasses.replace(settings, seed=seed))
        case head, order:
            crossed = dataclasses.replace(settings, seed=head, order_seed=order)
            return runs.FinetuneRun(f"seed-{head}-order-{order}", crossed)


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
        statistics.stdev(values) if len(values) > 1 else None,
        sum(bool(run.failed) for run in series.runs),
    )
