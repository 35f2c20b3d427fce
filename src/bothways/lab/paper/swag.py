"""SWAG as fine-tuned by Devlin et al. 2018 (section 4.4, table 4).

Three epochs, a learning rate of 2e-5, batch 16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from bothways.lab.paper import experiment, published
from bothways.tasks.choice.task import ChoiceTask

NAME = "SWAG"
POINT = experiment.GridPoint(2e-5, 16, 3.0)
COLUMNS = {"dev": (NAME, "accuracy")}
NOTES = ("The labels of the test set are not public; these runs are scored on dev.",)


def swag_plan(request: experiment.Request) -> experiment.BenchmarkPlan:
    """Return the plan for train.csv and val.csv, the file names of SWAG's authors."""
    request.chosen((NAME,))
    return experiment.BenchmarkPlan(
        "SWAG (section 4.4, table 4)",
        (_experiment(request),),
        tuple(COLUMNS),
        {experiment.MEASURED: COLUMNS},
        published.TABLES["SWAG"],
        notes=NOTES,
    )


def _experiment(request: experiment.Request) -> experiment.Experiment | experiment.NotRun:
    train = experiment.find_file(request.data, "train.csv", "train.jsonl")
    dev = experiment.find_file(request.data, "val.csv", "val.jsonl")
    if train is None or dev is None:
        return experiment.NotRun(
            NAME, f"no {'train' if train is None else 'val'}.csv in {request.data}"
        )
    if request.limit is not None:
        # Both are rewritten: the columns of dev are read like those of training.
        data, limit = request.out / "data", request.limit
        train = str(experiment.write_rows(data / f"train-{limit}.jsonl", _rows(train, limit)))
        dev = str(experiment.write_rows(data / "val.jsonl", _rows(dev)))
    grid = experiment.grid_settings(request, ChoiceTask(), [POINT], train, dev)
    return experiment.Experiment(NAME, grid, request.seeds or 1)


def _rows(source: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    for example in itertools.islice(ChoiceTask().read(source).examples, limit):
        yield {"context": example.context, "endings": list(example.endings), "label": example.label}
