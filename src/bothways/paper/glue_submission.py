"""GLUE's leaderboard: predictions on the test sets, in the files that gluebenchmark.com takes.

Each file begins with the line "index<TAB>prediction", and has a row for each of the test set, in its order. Labels are those of
the training files; scores of STS-B lie from 0 to 5. For WNLI, whose dev set misleads, the paper gives the majority class of the
training data (section 4.1, footnote): so is it here, with no run at all. AX, the diagnostic set, is by MNLI's model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bothways.core.atomic_files import replace_file
from bothways.core.stages import OnStage, counting, unseen
from bothways.data.tables import open_table
from bothways.paper.cells import CellOutcome
from bothways.paper.experiment import Request
from bothways.paper.glue import TASKS_OF_GLUE, GlueTask, source_of, write_split
from bothways.prediction.predictor import open_task

MAJORITY = "0"
"""Of WNLI's training data, 323 of 635."""
LOWEST, HIGHEST = 0.0, 5.0
"""The scores of STS-B."""


def write_submission(
    request: Request, outcomes: Iterable[CellOutcome], *, device: str, on_stage: OnStage = unseen
) -> list[Path]:
    """The files for every task that was run and has its test data, and WNLI's, in `out/submission`."""
    best = {
        outcome.experiment.name: outcome.best.folder
        for outcome in outcomes
        if outcome.best is not None
    }
    folder, files = request.out / "submission", []
    for task in TASKS_OF_GLUE:
        for name, split in task.files.items():
            if source_of(task, split, request.data) is None or (
                task.name != "WNLI" and task.name not in best
            ):
                continue
            test, _ = write_split(task, split, request)
            given = (
                _majority(test)
                if task.name == "WNLI"
                else _predicted(task, test, best[task.name], device, on_stage)
            )
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(
                folder / f"{name}.tsv", lambda file, given=given: write_predictions(given, file)
            )
            files.append(folder / f"{name}.tsv")
    return files


def write_predictions(predictions: Iterable[str], file: Path) -> None:
    """A file as the leaderboard takes it."""
    with file.open("w", encoding="utf8", newline="\n") as stream:
        stream.write("index\tprediction\n")
        stream.writelines(
            f"{index}\t{prediction}\n" for index, prediction in enumerate(predictions)
        )


def _majority(test: Path) -> Iterator[str]:
    return (MAJORITY for _ in open_table(str(test)).rows)


def _predicted(
    task: GlueTask, test: Path, folder: Path, device: str, on_stage: OnStage
) -> Iterator[str]:
    opened = open_task(str(folder), device=device)
    reading = opened.read(str(test), labelled=False)
    tally = counting(
        reading, lambda share, _: on_stage(f"predicting {task.name}'s test set", share)
    )
    for _, prediction in opened.predict(reading, counts=tally):
        yield prediction.label if task.labels else clip_score(prediction)


def clip_score(prediction: Any) -> str:
    """A score with three digits, no lower and no higher than STS-B has them."""
    return f"{min(max(prediction.score, LOWEST), HIGHEST):.3f}"
