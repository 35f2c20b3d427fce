"""One fine-tuning with several seeds: how much of a result is luck.

For the large model on small sets the paper takes the best of several restarts on the dev data (Devlin et al. 2018, section
4.1). The spread is what such a number leaves out: Dodge et al. 2020, Mosbach et al. 2020.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections.abc import Sequence as Many
from dataclasses import dataclass

from bothways.core.errors import ConfigError
from bothways.finetuning.prepare import FinetuneConfig
from bothways.sweeps.runs import Series, SweepFolder, run_all, write_sweep_report

Seed = int | tuple[int, int]
"""Of all that is random in a run; or that of the head, and that of the order of the data with dropout."""


@dataclass(frozen=True)
class SeedSpread:
    """The metric over the seeds; runs that diverged have none.

    Attributes:
        metric: by which the best run is chosen.
        mean, median, best: of it.
        deviation: the standard deviation, with n − 1; 0 for a single run.
        failed: how many runs failed or diverged; those that only failed are among the numbers.
    """

    metric: str
    mean: float
    median: float
    best: float
    deviation: float
    failed: int


def parse_seeds(text: str, first: int = 0) -> tuple[Seed, ...]:
    """ "5" → five seeds from `first` on; "3,14,15" → these; "7," → this one; "2x3" → two heads, each with three orders.

    Raises:
        ConfigError: it is none of these, a number of seeds below 1, or a seed twice.
    """
    if crossed := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip()):
        heads, orders = (range(first, first + int(count)) for count in crossed.groups())
        return tuple(itertools.product(heads, orders))
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and not parts[-1]:
        parts.pop()
    elif len(parts) == 1 and parts[0].isdecimal() and int(parts[0]) > 0:
        return tuple(range(first, first + int(parts[0])))
    seeds = tuple(int(part) for part in parts if part.isdecimal())
    if "," not in text or len(seeds) != len(parts) or len(set(seeds)) != len(seeds):
        fix = "Write how many, such as 5, or which, such as 3,14,15, or how many heads times how many orders, such as 5x3."
        raise ConfigError(f"{text!r} are no seeds", where="seeds", fix=fix)
    return seeds


def finetune_seeds(settings: FinetuneConfig, seeds: Many[Seed], place: SweepFolder) -> Series:
    """Fine-tune once per seed, in `seed-N` or `seed-N-order-M`; `model` is the best one's, `seeds.json` says what all came to.

    A single seed is that of the head and, unless `order_seed` holds that fixed, of the order of the data and dropout. Errors
    are those of `series.run_all`.
    """
    series = run_all((_run(settings, seed) for seed in seeds), place)
    if series.finished:
        summary = seed_spread(series)
        write_sweep_report(
            place.out / "seeds.json", dataclasses.asdict(summary) if summary else {}, series.runs
        )
    return series


def _run(settings: FinetuneConfig, seed: Seed) -> tuple[str, FinetuneConfig]:
    """The folder and the settings of a run."""
    match seed:
        case int():
            return f"seed-{seed}", dataclasses.replace(settings, seed=seed)
        case head, order:
            return f"seed-{head}-order-{order}", dataclasses.replace(
                settings, seed=head, order_seed=order
            )


def seed_spread(series: Series) -> SeedSpread | None:
    """The metric over the runs; none if all diverged."""
    best = series.best
    if best is None:
        return None
    values = [run.metrics[best.metric] for run in series.scored]
    return SeedSpread(
        best.metric,
        statistics.fmean(values),
        statistics.median(values),
        best.metrics[best.metric],
        statistics.stdev(values) if len(values) > 1 else 0.0,
        sum(bool(run.failed) for run in series.runs),
    )
