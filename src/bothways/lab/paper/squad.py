"""SQuAD 1.1 and 2.0 as fine-tuned by Devlin et al. 2018 (sections 4.2 and 4.3, tables 2 and 3).

1.1: three epochs, batch 32; 2.0: two epochs, batch 48; both with a learning rate of 5e-5. The
no-answer threshold of 2.0 is the one with the highest F1 on dev. Predictions on dev are written in
the format of the official scorer.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bothways.core.atomic_files import replace_text
from bothways.core.progress import SILENT, Progress
from bothways.lab.paper import experiment, published
from bothways.lab.paper.cells import CellOutcome
from bothways.prediction.engine import counting
from bothways.prediction.predictor import open_task
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnsweringTask

VERSIONS = {
    "v1.1": experiment.GridPoint(5e-5, 32, 3.0),
    "v2.0": experiment.GridPoint(5e-5, 48, 2.0),
}
"""The setting of each version, by its name in file names."""
COLUMNS = {
    "1.1 EM": ("v1.1", "em"),
    "1.1 F1": ("v1.1", "f1"),
    "2.0 EM": ("v2.0", "em"),
    "2.0 F1": ("v2.0", "f1"),
}
NOTES = (
    "These runs are scored on dev, with one model and without TriviaQA: compare them to such rows.",
)


def squad_plan(request: experiment.Request) -> experiment.BenchmarkPlan:
    """Return the plan for train-v1.1.json, dev-v1.1.json and the same of v2.0."""
    return experiment.BenchmarkPlan(
        "SQuAD (sections 4.2 and 4.3, tables 2 and 3)",
        tuple(_experiment(version, request) for version in request.chosen(tuple(VERSIONS))),
        tuple(COLUMNS),
        {experiment.MEASURED: COLUMNS},
        published.TABLES["SQUAD"],
        notes=NOTES,
    )


def _experiment(
    version: str, request: experiment.Request
) -> experiment.Experiment | experiment.NotRun:
    train, dev = (
        experiment.find_file(request.data, f"{split}-{version}.json") for split in ("train", "dev")
    )
    if train is None or dev is None:
        split = "train" if train is None else "dev"
        return experiment.NotRun(version, f"no {split}-{version}.json in {request.data}")
    task, source = QuestionAnsweringTask(), Path(train)
    if request.limit is not None:
        rows = map(_row, itertools.islice(task.read(train).examples, request.limit))
        source = experiment.write_rows(
            request.out / "data" / f"train-{version}-{request.limit}.jsonl", rows
        )
    grid = experiment.grid_settings(request, task, [VERSIONS[version]], source, dev)
    return experiment.Experiment(version, grid, request.seeds or 1)


def _row(question: Question) -> dict[str, Any]:
    texts, starts = [text for text, _ in question.answers], [at for _, at in question.answers]
    return {
        "id": question.id,
        "question": question.question,
        "context": question.context,
        "answers": {"text": texts, "answer_start": starts},
    }


def write_squad_predictions(
    request: experiment.Request,
    outcomes: Iterable[CellOutcome],
    *,
    device: str,
    progress: Progress = SILENT,
) -> list[Path]:
    """Write the best run's answers on dev and its no-answer scores, for each version.

    predictions-v1.1.json: {id: text}; null_odds-v1.1.json: {id: score}.
    """
    files = []
    for outcome in outcomes:
        if outcome.best is None:
            continue
        name = outcome.experiment.name
        dev = experiment.find_file(request.data, f"dev-{name}.json") or ""
        predictions = list(_predictions(outcome.best, dev, device, progress))
        for kind, values in (
            ("predictions", {id: text for id, text, _ in predictions}),
            ("null_odds", {id: score for id, _, score in predictions}),
        ):
            file = request.out / f"{kind}-{name}.json"
            text = json.dumps(values, ensure_ascii=False, indent=1)
            replace_text(file, text)
            files.append(file)
    return files


def _predictions(
    folder: Path, dev: str, device: str, progress: Progress
) -> Iterator[tuple[str, str, float]]:
    """Yield id, answer and no-answer score of each question."""
    predictor = open_task(str(folder), device=device)
    reading = predictor.read(dev, labelled=False)
    counts = counting(reading, progress, "predicting dev for the official scorer")
    for _, prediction in predictor.predict_examples(reading, counts=counts):
        yield prediction.id, prediction.text, prediction.null_difference
