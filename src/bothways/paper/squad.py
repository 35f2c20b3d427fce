"""SQuAD 1.1 and 2.0 as Devlin et al. 2018 fine-tune on them (sections 4.2 and 4.3, tables 2 and 3).

1.1: three epochs, batch 32; 2.0: two epochs, batch 48; both at a rate of 5e-5. For 2.0 the threshold below which there is no
answer is the one of the highest F1 on dev. Predictions on dev are written as the official scorer takes them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bothways.core.atomic_files import replace_file
from bothways.core.stages import OnStage, counting, unseen
from bothways.paper import published
from bothways.paper.cells import CellOutcome
from bothways.paper.experiment import (
    MEASURED,
    BenchmarkPlan,
    Experiment,
    NotRun,
    Point,
    Request,
    find,
    grid_of,
    write_rows,
)
from bothways.prediction.predictor import open_task
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnsweringTask

VERSIONS = {"v1.1": Point(5e-5, 32, 3.0), "v2.0": Point(5e-5, 48, 2.0)}
"""By the name that its files have."""
COLUMNS = {
    "1.1 EM": ("v1.1", "em"),
    "1.1 F1": ("v1.1", "f1"),
    "2.0 EM": ("v2.0", "em"),
    "2.0 F1": ("v2.0", "f1"),
}
NOTES = (
    "These runs are on dev, one model each and without TriviaQA: compare them with those rows.",
)


def squad_plan(request: Request) -> BenchmarkPlan:
    """Both versions, of files called train-v1.1.json and dev-v1.1.json."""
    chosen = request.chosen(tuple(VERSIONS))
    experiments = tuple(_experiment(version, request) for version in chosen)
    return BenchmarkPlan(
        "SQuAD (sections 4.2 and 4.3, tables 2 and 3)",
        experiments,
        tuple(COLUMNS),
        {MEASURED: COLUMNS},
        published.SQUAD,
        notes=NOTES,
    )


def _experiment(version: str, request: Request) -> Experiment | NotRun:
    names = {split: f"{split}-{version}.json" for split in ("train", "dev")}
    files = {split: find(request, name) for split, name in names.items()}
    train, dev = files["train"], files["dev"]
    if train is None or dev is None:
        return NotRun(version, f"no {names['train' if train is None else 'dev']} in {request.data}")
    source: Path | str = train
    if request.limit is not None:
        rows = map(
            _row, itertools.islice(QuestionAnsweringTask().read(train).examples, request.limit)
        )
        source = write_rows(request.out / "data" / f"train-{version}-{request.limit}.jsonl", rows)
    return Experiment(
        version,
        grid_of(request, QuestionAnsweringTask(), [VERSIONS[version]], source, dev),
        request.seeds or 1,
    )


def _row(question: Question) -> dict[str, Any]:
    answers = {
        "text": [text for text, _ in question.answers],
        "answer_start": [start for _, start in question.answers],
    }
    return {
        "id": question.id,
        "question": question.question,
        "context": question.context,
        "answers": answers,
    }


def write_squad_predictions(
    request: Request, outcomes: Iterable[CellOutcome], *, device: str, on_stage: OnStage = unseen
) -> list[Path]:
    """The best run's answers on dev, {id: text}, and the odds of no answer, {id: score}, for each version that was run."""
    files = []
    for name, best in {
        done.experiment.name: done.best.folder for done in outcomes if done.best is not None
    }.items():
        found = list(_predictions(best, find(request, f"dev-{name}.json") or "", device, on_stage))
        for what, values in (
            ("predictions", {id: text for id, text, _ in found}),
            ("null_odds", {id: x for id, _, x in found}),
        ):
            file = request.out / f"{what}-{name}.json"
            text = json.dumps(values, ensure_ascii=False, indent=1)
            replace_file(file, lambda place, text=text: place.write_text(text, encoding="utf8"))
            files.append(file)
    return files


def _predictions(
    folder: Path, dev: str, device: str, on_stage: OnStage
) -> Iterator[tuple[str, str, float]]:
    opened = open_task(str(folder), device=device)
    reading = opened.read(dev, labelled=False)
    tally = counting(
        reading, lambda share, _: on_stage("predicting dev for the official scorer", share)
    )
    for _, prediction in opened.predict(reading, counts=tally):
        yield prediction.id, prediction.text, prediction.null_difference
