"""A significance test for two fine-tuned models on the same examples.

Each example has a grade from each model (`Task.grade`: 1 or 0 for a label). If the models were
alike, the sign of each difference would be random: the permutation test flips the signs. The
interval is a bootstrap over examples. For a model that was fine-tuned with several seeds, grades
are averaged per example first; the spread between seeds is given separately, since a test over
examples does not cover other seeds.

Sources: Dror et al., The hitchhiker's guide to testing statistical significance in NLP (2018);
Efron and Tibshirani 1993.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from bothways.core.errors import DataError, FolderError, require
from bothways.core.files import local_path
from bothways.core.progress import SILENT, Progress
from bothways.core.terminal import quantity
from bothways.hub.resolve import is_model_folder
from bothways.prediction.engine import counting
from bothways.prediction.opening import open_task, open_task_model
from bothways.tasks.base import examples_fingerprint
from bothways.tasks.columns import guess_note
from bothways.tasks.metrics import error_reduction, errors_text

RESAMPLES = 9999
"""Number of permutations (all, if there are fewer) and of bootstrap samples."""
CHANCE = 0.05
"""The p-value below which a difference is significant."""
_HELD = 2**24
"""Maximum number of values that a resampling holds at once."""


@dataclass(frozen=True)
class Side:
    """One of the two models.

    Attributes:
        name: its folder.
        grades: the mean over the examples, by seed.
    """

    name: str
    grades: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds and examples."""
        return float(np.mean(self.grades))

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds, with n − 1; None for a single one."""
        return float(np.std(self.grades, ddof=1)) if len(self.grades) > 1 else None


@dataclass(frozen=True)
class ModelComparison:
    """The result of a comparison.

    Attributes:
        difference: difference of the mean grades, B − A.
        error_reduction: the same difference relative to the errors of A (`tasks.metrics`); None
            for grades that are not fractions, such as log probabilities.
        interval: the 95 % confidence interval of the difference.
        p_value: the probability of a difference at least as large, in either direction, by chance.
    """

    a: Side
    b: Side
    examples: int
    difference: float
    error_reduction: float | None
    interval: tuple[float, float]
    p_value: float

    def __str__(self) -> str:
        low, high = self.interval
        errors = f", {errors_text(self.error_reduction)}" if self.error_reduction else ""
        interval = f"95 % interval {low:+.4f} to {high:+.4f}"
        counts = f"p = {self.p_value:.2g}, n = {self.examples:,}"
        text = f"{self.difference:+.4f}{errors} ({interval}, {counts})"
        if self.p_value >= CHANCE:
            names = f"{self.a.name} and {self.b.name}"
            return f"No difference is shown between {names}: {text} may be chance."
        better, worse = (self.b, self.a) if self.difference > 0 else (self.a, self.b)
        return f"{better.name} is better than {worse.name} on these examples: B − A is {text}."


def compare_runs(
    a: str,
    b: str,
    source: str,
    columns: Any = None,
    *,
    task: str | None = None,
    device: str = "auto",
    progress: Progress = SILENT,
) -> ModelComparison:
    """Grade both models on the same labelled examples.

    Args:
        a, b: model folders, folders of runs, or folders of several seeds (all of their `seed-N`
            count).
        source: a labelled file or a Hub data set.
        columns: the columns to read, of the type of the task's own. None: as in training.
        task: the task to compare in. None: the task that the first model was trained for.

    Raises:
        DataError: the models read different examples, there are fewer than two, or an example has
            no label.
        ConfigError: the task has no grade for a single example.
        ResourceError: SciPy is not installed.
        FolderError: the second model lacks the heads of the first one's task.
    """
    require("report", "a test of significance", "scipy")
    for folder in (*folders(a), *folders(b)):  # fail before reading all the data
        task = open_task_model(folder, task or default_task(folder), device="cpu").task.name
    grades, prints, notes = list[np.ndarray](), set[str](), set[str]()
    for name in (a, b):
        runs = list[list[float]]()
        for folder in folders(name):
            opened = open_task(folder, task, device=device)
            task_model, reading = opened.task_model, opened.read(source, columns, labelled=True)
            note = guess_note(source, reading, task_model.task, columns)
            if note and note not in notes:
                notes.add(note)
                progress.message(note)
            counter = counting(reading, progress, "grading")
            results = list(opened.predict_examples(reading, counts=counter))
            _check_number(len(results), source)
            task_model.score(iter(results))  # raises for an example without a label
            prints.add(examples_fingerprint(example for example, _ in results))
            runs.append([task_model.grade(example, prediction) for example, prediction in results])
        grades.append(np.array(runs, dtype=np.float64))
    if len(prints) > 1:
        message = f"{a} and {b} read different examples from it"
        fix = "Name the columns, so that both read the same texts and labels."
        raise DataError(message, where=source, fix=fix)
    graded = ~np.isnan(np.concatenate(grades)).any(0)
    if empty := int((~graded).sum()):
        counts = f"{empty:,} of {quantity(len(graded), 'example(s)')}"
        progress.message(f"note: {source}: {counts} left out, with nothing to grade")
    _check_number(int(graded.sum()), source)
    left, right = (runs[:, graded] for runs in grades)
    base, changed = (
        Side(name, tuple(runs.mean(1).tolist())) for name, runs in ((a, left), (b, right))
    )
    return contrast(base, changed, left.mean(0), right.mean(0))


def default_task(folder: str) -> str:
    """Return the task that a model was trained for; "likelihood" for a pre-trained model.

    Raises:
        FolderError: the model opens for neither.
    """
    try:
        return open_task_model(folder, device="cpu").task.name
    except FolderError:
        with contextlib.suppress(FolderError):
            return open_task_model(folder, "likelihood", device="cpu").task.name
        raise


def contrast(
    a: Side,
    b: Side,
    left: Float64[np.ndarray, " examples"],
    right_scores: Float64[np.ndarray, " examples"],
) -> ModelComparison:
    """Compare grades per example."""
    from scipy import __version__ as version, stats

    difference, count = right_scores - left, len(left)
    batch, draws = max(1, _HELD // count), np.random.default_rng(0)
    if not difference.any():
        return ModelComparison(a, b, count, 0.0, 0.0, (0.0, 0.0), 1.0)
    # The argument's name changed in SciPy 1.15.
    argument = "rng" if tuple(map(int, version.split(".")[:2])) >= (1, 15) else "random_state"
    options: Any = {"n_resamples": RESAMPLES, "batch": batch, "vectorized": True, argument: draws}
    # Signs are flipped for the test; differences are drawn with replacement for the interval.
    data = (difference,)
    test = stats.permutation_test(data, np.mean, permutation_type="samples", **options)
    intervals = stats.bootstrap(data, np.mean, method="percentile", **options).confidence_interval
    interval = float(intervals.low), float(intervals.high)
    # Grades are fractions up to 1, or negated squared errors and log probabilities up to 0, which
    # count no errors.
    is_fraction = max(left.max(), right_scores.max()) > 0
    means = float(left.mean()), float(right_scores.mean())
    reduction = error_reduction(*means) if is_fraction else None
    mean = float(difference.mean())
    return ModelComparison(a, b, count, mean, reduction, interval, float(test.pvalue))


def folders(name: str) -> list[str]:
    """Return the model folders of a name: those of its seeds, or the name itself."""
    seeds = sorted(
        path for path in local_path(name).glob("seed-*") if is_model_folder(path / "model")
    )
    return [str(path) for path in seeds] or [name]


def _check_number(count: int, source: str) -> None:
    if count < 2:
        message = f"there are too few examples to compare on: {count}"
        raise DataError(message, where=source, fix="Give two or more.")
