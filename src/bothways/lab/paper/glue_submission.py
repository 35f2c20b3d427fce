"""GLUE's leaderboard: predictions on the test sets, as gluebenchmark.com takes them.

Each file begins with the line "index<TAB>prediction" and has one row per row of the test set, in
its order. Labels are the training files'; scores of STS-B are clipped to 0 to 5. For WNLI,
whose dev set misleads, the paper submits the majority class of the training data (section 4.1,
footnote); so does this module, without a run. MNLI's model predicts AX, the diagnostic set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bothways.core.atomic_files import make_folder, replace_file
from bothways.core.progress import SILENT, Progress
from bothways.data.tables import open_table
from bothways.lab.paper.cells import CellOutcome
from bothways.lab.paper.experiment import Request
from bothways.lab.paper.glue import TASKS_OF_GLUE, GlueTask, source_of, write_split
from bothways.prediction.engine import counting
from bothways.prediction.predictor import open_task

MAJORITY = "0"
"""Majority class of WNLI's training data: 323 of 635."""
LOWEST, HIGHEST = 0.0, 5.0
"""Range of the scores of STS-B."""


def write_submission(
    request: Request,
    outcomes: Iterable[CellOutcome],
    *,
    device: str,
    progress: Progress = SILENT,
) -> list[Path]:
    """Write WNLI's file and those of all finished tasks with test data to `out/submission`."""
    best = {done.experiment.name: done.best for done in outcomes if done.best is not None}
    folder, files = request.out / "submission", []
    for task in TASKS_OF_GLUE:
        for name, split in task.files.items():
            ready = task.name == "WNLI" or task.name in best
            if not ready or source_of(task, split, request.data) is None:
                continue
            test, _ = write_split(task, split, request)
            predictions = (
                (MAJORITY for _ in open_table(str(test)).rows)
                if task.name == "WNLI"
                else _predicted(task, test, best[task.name], device, progress)
            )
            make_folder(folder)
            file = folder / f"{name}.tsv"
            replace_file(file, lambda path, rows=predictions: write_predictions(rows, path))
            files.append(file)
    return files


def write_predictions(predictions: Iterable[str], file: Path) -> None:
    """Write a file in the leaderboard's format."""
    with file.open("w", encoding="utf8", newline="\n") as stream:
        stream.write("index\tprediction\n")
        stream.writelines(f"{index}\t{value}\n" for index, value in enumerate(predictions))


def _predicted(
    task: GlueTask, test: Path, folder: Path, device: str, progress: Progress
) -> Iterator[str]:
    predictor = open_task(str(folder), device=device)
    reading = predictor.read(str(test), labelled=False)
    counts = counting(reading, progress, f"predicting {task.name}'s test set")
    for _, prediction in predictor.predict_examples(reading, counts=counts):
        yield prediction.label if task.labels else clip_score(prediction)


def clip_score(prediction: Any) -> str:
    """Format a score with three digits, clipped to the range of STS-B."""
    return f"{min(max(prediction.score, LOWEST), HIGHEST):.3f}"
