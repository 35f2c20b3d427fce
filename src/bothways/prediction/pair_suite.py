"""Suites of minimal pairs: files of JSON lines, one for each phenomenon, as BLiMP's.

A row has `sentence_good` and `sentence_bad`; a phenomenon is a file. Rows that name a `field` or a
`linguistics_term` are counted under it, too (Warstadt et al. 2020, table 2).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bothways.core.errors import DataError
from bothways.core.progress import SILENT, Progress
from bothways.data.tables import open_table
from bothways.data.text_io import COMPRESSED
from bothways.prediction.predictor import Predictor, open_task_model
from bothways.tasks.base import TaskModel
from bothways.tasks.likelihood.minimal_pairs import MinimalPairTask
from bothways.tasks.text_examples import TextColumns, TextExample, example_of

COLUMNS = TextColumns("sentence_good", "sentence_bad")
GROUPS = ("phenomenon", "linguistics_term", "field")
"""Groupings of accuracies: the file, and two columns of BLiMP."""


@dataclass
class SuiteScores:
    """Accuracies of a suite of minimal pairs.

    Attributes:
        variant: how a text's likelihood was computed, see `MinimalPairTask`.
        groups: for each pair, whether its first text is the more likely one: by the names in
            `GROUPS`, then by the name of the group.
    """

    variant: str
    groups: dict[str, dict[str, list[bool]]] = field(
        default_factory=lambda: {name: {} for name in GROUPS}
    )

    def add(self, groups: dict[str, str], correct: bool) -> None:
        """Count a pair in its groups."""
        for name, value in groups.items():
            self.groups[name].setdefault(value, []).append(correct)

    @property
    def pairs(self) -> int:
        """The number of all pairs."""
        return sum(map(len, self.groups["phenomenon"].values()))

    @property
    def accuracy(self) -> float:
        """The accuracy on all pairs."""
        return sum(map(sum, self.groups["phenomenon"].values())) / self.pairs

    @property
    def mean(self) -> float:
        """The mean of the accuracies of the phenomena, whatever their numbers of pairs."""
        return statistics.fmean(map(statistics.fmean, self.groups["phenomenon"].values()))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        groups = {
            name: {value: sum(pairs) / len(pairs) for value, pairs in sorted(group.items())}
            for name, group in self.groups.items()
            if group
        }
        overall = {"accuracy": self.accuracy, "mean": self.mean, "pairs": self.pairs}
        return {**overall, "variant": self.variant, **groups}


def open_pairs(
    folder: str | Path,
    settings: Iterable[str] = (),
    *,
    length: int | None = None,
    device: str = "auto",
) -> TaskModel[Any, Any]:
    """Open a model for the task "prefer"; without settings, masked models hide the rest of a word.

    Arguments and errors as `open_task_model`.
    """
    overrides = tuple(settings)
    task_model = open_task_model(folder, "prefer", length=length, device=device, settings=overrides)
    if task_model.task == MinimalPairTask() and not overrides:
        task_model.task = MinimalPairTask(variant="word_l2r")
    return task_model


def evaluate_suite(predictor: Predictor, folder: Path, progress: Progress = SILENT) -> SuiteScores:
    """Return the accuracies of a model on the files of a folder.

    Args:
        predictor: opened for the task "prefer".
        folder: with .jsonl files, plain or compressed.

    Raises:
        DataError: no such folder or no file in it; a row without the two sentences.
    """
    scores = SuiteScores(predictor.task_model.task.variant)  # type: ignore[attr-defined]
    waiting = deque[dict[str, str]]()

    def examples() -> Iterator[TextExample]:
        for groups, example in read_suite(folder, progress):
            waiting.append(groups)
            yield example

    for example, prediction in predictor.predict_examples(examples()):
        scores.add(waiting.popleft(), bool(predictor.task_model.grade(example, prediction)))
    return scores


def read_suite(
    folder: Path, progress: Progress = SILENT
) -> Iterator[tuple[dict[str, str], TextExample]]:
    """Yield each pair of a suite with its groups by the names in `GROUPS`.

    Errors as `evaluate_suite`.
    """
    files = suite_files(folder)
    progress.stage("minimal pairs", len(files))
    for done, (name, file) in enumerate(files.items()):
        progress.advance(done, name)
        for row in open_table(str(file)).rows:
            groups = {key: str(row.values[key]) for key in GROUPS[1:] if row.values.get(key)}
            yield {"phenomenon": name, **groups}, example_of(row.values, COLUMNS, row.where)


def suite_files(folder: Path) -> dict[str, Path]:
    """Return the files of a suite by phenomenon, in the order of their names.

    Raises:
        DataError: no such folder, or no file of JSON lines in it.
    """
    fix = "Give a folder of .jsonl files with sentence_good and sentence_bad, such as BLiMP's data."
    if not folder.is_dir():
        raise DataError("is not a folder", where=folder, fix=fix)
    endings = [f".jsonl{suffix}" for suffix in ("", *COMPRESSED)]
    files = {
        file.name.split(".jsonl")[0]: file
        for file in sorted(folder.iterdir())
        if file.name.endswith(tuple(endings))
    }
    if not files:
        raise DataError("has no .jsonl file", where=folder, fix=fix)
    return files
