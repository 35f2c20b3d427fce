"""SWAG as Devlin et al. 2018 fine-tune on it (section 4.4, table 4): three epochs, a rate of 2e-5, batch 16."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from bothways.paper import published
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
from bothways.tasks.choice.task import ChoiceTask

NAME = "SWAG"
POINT = Point(2e-5, 16, 3.0)
COLUMNS = {"dev": (NAME, "accuracy")}
NOTES = ("The labels of the test set are not public; these runs are on dev.",)


def swag_plan(request: Request) -> BenchmarkPlan:
    """The one experiment, of files called train.csv and val.csv, as SWAG's authors have them."""
    request.chosen((NAME,))
    return BenchmarkPlan(
        "SWAG (section 4.4, table 4)",
        (_experiment(request),),
        tuple(COLUMNS),
        {MEASURED: COLUMNS},
        published.SWAG,
        notes=NOTES,
    )


def _experiment(request: Request) -> Experiment | NotRun:
    train, dev = find(request, "train.csv", "train.jsonl"), find(request, "val.csv", "val.jsonl")
    if train is None or dev is None:
        return NotRun(NAME, f"no {'train' if train is None else 'val'}.csv in {request.data}")
    if (
        request.limit is not None
    ):  # both are written anew: the columns of dev are read as those of training
        train = str(
            write_rows(
                request.out / "data" / f"train-{request.limit}.jsonl", _rows(train, request.limit)
            )
        )
        dev = str(write_rows(request.out / "data" / "val.jsonl", _rows(dev)))
    return Experiment(NAME, grid_of(request, ChoiceTask(), [POINT], train, dev), request.seeds or 1)


def _rows(source: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    for example in itertools.islice(ChoiceTask().read(source).examples, limit):
        yield {"context": example.context, "endings": list(example.endings), "label": example.label}
