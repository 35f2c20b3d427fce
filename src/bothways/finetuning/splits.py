"""Dev data as a share or a fold of the training data: stratified, seeded, and without leaks.

    "20%", "0.2"      a fifth of the examples
    "fold 2 of 5"     the second of five parts, each of which is dev data once

Examples that belong together are on one side: those of a group, if a column names groups, else
those with equal texts, questions on one context, documents of one query, sentences of one document
(`Task.passages`). These units are sorted by the class of their examples (`Task.stratum`) and,
within a class, by a hash of content and seed, and dealt in this order to the side that lacks most:
each class, set of labels or range of scores has its share to within a unit. The order of the rows
and where they come from make no difference.

A label that only dev data would have cannot be scored: its examples go to the training data.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Sequence as Many
from dataclasses import dataclass
from typing import Any

from bothways.core.config.values import require_seed
from bothways.core.errors import ConfigError, DataError, Finding, argument
from bothways.core.terminal import quantity
from bothways.tasks.base import Task, examples_fingerprint

QUANTILES = 10
"""The ranges of scores, of equal numbers of examples, each of which has its share."""
_SHARE = re.compile(r"\s*(?:(\d+(?:\.\d*)?)\s*%|(0?\.\d+|1\.0*|0(?:\.0*)?))\s*")
_FOLD = re.compile(r"fold (\d+) of (\d+)")


@dataclass(frozen=True)
class Split:
    """How dev data is split from training data.

    Attributes:
        group: the column of a table whose equal values stay together, such as a user or a patient.
        seed: seed of the split; not the run's, so that runs of several seeds compare.
    """

    group: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)


@dataclass(frozen=True)
class DevPart:
    """The part of the training data that is dev data.

    Attributes:
        shares: fraction of each side; the first is training data, or each is a fold.
        side: the number of the dev data among them.
    """

    shares: tuple[float, ...]
    side: int

    def __str__(self) -> str:
        if len(self.shares) == 2 and self.side == 1:
            return f"{100 * self.shares[1]:.4g}%"
        return f"fold {self.side + 1} of {len(self.shares)}"


def fold_name(number: int, folds: int) -> str:
    """Return the name of a fold as dev data; the first is 1."""
    return f"fold {number} of {folds}"


def parse_part(dev: object) -> DevPart | None:
    """Return the part that `dev` names; None for the name of a file.

        0.2, "0.2", "20%" → a fifth         "fold 1 of 5" → the first fold

    Raises:
        ConfigError: a share that is not above 0 and below 1, or a fold that does not exist.
    """
    text = str(dev)
    if match := _FOLD.fullmatch(text):
        number, folds = map(int, match.groups())
        if not (1 <= number <= folds and folds >= 2):
            raise ConfigError(f"there is no {text}", where="dev", fix="Count folds from 1.")
        return DevPart((1 / folds,) * folds, number - 1)
    is_number = isinstance(dev, int | float)
    match = _SHARE.fullmatch(text)
    if match is None and not is_number:
        return None
    share = float(match[1]) / 100 if match and match[1] else float(match[2] if match else dev)  # type: ignore[arg-type]
    if not 0 < share < 1:
        message = f"{text} is not a share of the training data"
        fix = f"Give one above 0 and below 1: {argument(dev='20%')}. A file of this name is ./NAME."
        raise ConfigError(message, where="dev", fix=fix)
    return DevPart((1 - share, share), 1)


@dataclass(frozen=True)
class SplitResult:
    """Examples by side, in their order.

    Attributes:
        dev_rows: the places of the dev examples among all, from 0.
        findings: notes for the user.
    """

    train: list[Any]
    dev: list[Any]
    dev_rows: list[int]
    findings: tuple[Finding, ...]

    def examples(self) -> list[Any]:
        """Return the examples of both sides, in the order of the source."""
        train, dev, dev_rows = iter(self.train), iter(self.dev), {*self.dev_rows}
        count = len(self.train) + len(self.dev)
        return [next(dev if row in dev_rows else train) for row in range(count)]


def split_examples(
    task: Task[Any, Any],
    examples: Many[Any],
    dev_part: DevPart,
    split: Split = Split(),
    groups: Many[Hashable] | None = None,
) -> SplitResult:
    """Split training examples.

    Raises:
        DataError: one side would be empty.
    """
    keys = task.passages(examples) if groups is None else groups
    units: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        units.setdefault(key, []).append(index)
    sides, ordered = _deal(task, examples, list(units.values()), dev_part, split.seed)
    moved, dev_side = 0, dev_part.side
    by = f"groups of {split.group!r}" if groups is not None else "different texts or passages"
    of = f"{quantity(len(examples), 'example(s)')} in {len(units):,} {by}"
    if len(dev_part.shares) > 2 and len({*sides}) < len(dev_part.shares):
        message = f"{len(dev_part.shares)} folds of {of} leave some without an example"
        raise DataError(message, where="dev", fix=f"Give at most {len({*sides})} folds.")
    train = [e for e, side in zip(examples, sides, strict=True) if side != dev_side]
    # Units whose labels the training data would lack move to it.
    train_labels = {*task.labels(train)}
    for unit in ordered:
        if sides[unit[0]] == dev_side and not train_labels.issuperset(
            labels := task.labels([examples[index] for index in unit])
        ):
            train_labels |= {*labels}
            moved += len(unit)
            for index in unit:
                sides[index] = dev_side - 1 if dev_side else 1
    train = [e for e, side in zip(examples, sides, strict=True) if side != dev_side]
    dev_rows = [index for index, side in enumerate(sides) if side == dev_side]
    dev = [examples[index] for index in dev_rows]
    if not train or not dev:
        message = f"{dev_part} of {of} is {'all of them' if dev else 'no example'}"
        raise DataError(message, where="dev", fix="Give another share, or a file with dev data.")
    count = f"{len(dev):,} of {quantity(len(examples), 'example(s)')}, in {len(units):,} {by}"
    message = f"{dev_part} of the training data, {count}; seed {split.seed}"
    notes = [Finding("rows", "note", message, "dev")]
    if moved:
        alone = quantity(moved, "example(s)")
        message = f"{alone} with labels that no other has stay in training data"
        notes.append(Finding("labels", "note", message, "dev"))
    return SplitResult(train, dev, dev_rows, tuple(notes))


def _deal(
    task: Task[Any, Any], examples: Many[Any], units: Many[list[int]], dev_part: DevPart, seed: int
) -> tuple[list[int], list[list[int]]]:
    """Return the side of each example, and the units in an order that their content decides."""
    values = [task.stratum(example) for example in examples]
    scores = sorted(value for value in values if isinstance(value, float))
    counts = Counter(label for value in values if isinstance(value, tuple) for label in value)

    def key(value: Hashable) -> tuple[Any, ...]:
        """Return a key by which examples of one kind are neighbours.

        Scores give their range, sets of labels the rarest label, then the set.
        """
        if isinstance(value, float):
            return bisect.bisect_left(scores, value) * QUANTILES // len(scores), "", ()
        if isinstance(value, tuple):
            count, rarest = min(((counts[label], str(label)) for label in value), default=(0, ""))
            return count, rarest, tuple(sorted(map(str, value)))
        return 0, str(value), ()

    strata = [key(value) for value in values]
    kinds = (Counter(strata[index] for index in unit) for unit in units)
    # Of several that are most frequent the last by name: the order of the rows must not matter.
    usual = [max(kind.items(), key=lambda item: (item[1], item[0]))[0] for kind in kinds]
    largest = dict[Any, int]()
    for stratum, unit in zip(usual, units, strict=True):
        largest[stratum] = max(largest.get(stratum, 0), len(unit))

    def order(dealt: tuple[Any, list[int]]) -> tuple[Any, ...]:
        """Return the key by which a unit is sorted: its usual stratum, its size, its content.

        A large unit overfills its side, which is paid for by the units that follow: strata with
        large units are last.
        """
        stratum, unit = dealt
        # By content: another order of the rows gives the same split.
        content = "".join(sorted(examples_fingerprint([examples[index]]) for index in unit))
        mixed = hashlib.sha256(f"{seed} {content}".encode()).digest()
        return largest[stratum], stratum, -len(unit), mixed

    sides, filled, total = [0] * len(examples), [0] * len(dev_part.shares), 0
    # Neighbours are alike: dealt in turn to the side that lacks most, each side gets its share of
    # every kind.
    ordered = [unit for _, unit in sorted(zip(usual, units, strict=True), key=order)]
    for unit in ordered:
        total += len(unit)
        lacks = [share * total - size for share, size in zip(dev_part.shares, filled, strict=True)]
        # Rounded, so that sums of shares in floating point do not decide between equal sides.
        side = max(range(len(lacks)), key=lambda at: round(lacks[at], 9))
        filled[side] += len(unit)
        for row in unit:
            sides[row] = side
    return sides, ordered
