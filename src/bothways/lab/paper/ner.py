"""CoNLL-2003 as fine-tuned by Devlin et al. 2018 (section 5.3, table 7).

Each sentence is read with as much of the surrounding document as fits, without a CRF; the first
token of a word gives its tag. The setting is chosen on dev from the grid of appendix A.3 by one run
each; F1 is the mean of five restarts. Use a cased model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from bothways.core.atomic_files import make_folder, replace_text
from bothways.core.errors import ConfigError
from bothways.data.text_io import read_lines
from bothways.hub.hf_config import read_hf_config
from bothways.hub.resolve import resolve, resolve_run
from bothways.lab.features.data import FeatureConfig
from bothways.lab.features.tagger import BiLSTMTagger
from bothways.lab.paper import published
from bothways.lab.paper.experiment import (
    BenchmarkPlan,
    Experiment,
    GridPoint,
    NotRun,
    Request,
    find_file,
    grid_settings,
)
from bothways.model.layer_mix import LayerChoice, chosen_layers
from bothways.tasks.tagging.task import TaggingTask

NAME = "CoNLL-2003"
FILES = {
    "train": ("eng.train", "train.txt"),
    "dev": ("eng.testa", "valid.txt"),
    "test": ("eng.testb", "test.txt"),
}
"""File names of the splits, those of the shared task first."""
LENGTH = 512
GRID = tuple(
    GridPoint(rate, batch, epochs, LENGTH)
    for batch in (16, 32)
    for rate in (5e-5, 3e-5, 2e-5)
    for epochs in (2.0, 3.0, 4.0)
)
DEFAULT_POINT = GridPoint(5e-5, 32, 3.0, LENGTH)
"""The setting without the grid."""
SEEDS = 5
CHOICES: dict[str, LayerChoice] = {
    "embeddings": "embeddings",
    "second-to-last": "second_to_last",
    "last": "last",
    "sum-last-four": "weighted_last_four",
    "concat-last-four": "concat_last_four",
    "sum-all": "weighted_all",
}
"""The feature-based rows of table 7, by the name of their task."""
TAGGER = BiLSTMTagger()
"""Two layers of 768 units, as in the paper."""
MEASURED = {
    "this run, fine-tuned": {"dev": (NAME, "f1"), "test": (NAME, "test/f1")},
    **{f"this run, {choice}": {"dev": (choice, "f1")} for choice in CHOICES},
}


def ner_plan(request: Request) -> BenchmarkPlan:
    """Return the plan for files with the word first, the tag last, and -DOCSTART- lines."""
    experiments = tuple(_experiment(name, request) for name in request.chosen((NAME, *CHOICES)))
    names = {experiment.name for experiment in experiments}
    return BenchmarkPlan(
        "Named entities, CoNLL-2003 (section 5.3, table 7)",
        experiments,
        ("dev", "test"),
        {row: cells for row, cells in MEASURED.items() if cells["dev"][0] in names},
        published.TABLES["NER"],
        seeds=SEEDS,
    )


def _experiment(name: str, request: Request) -> Experiment | NotRun:
    train, dev, test = (
        find_file(request.data, *FILES[split]) for split in ("train", "dev", "test")
    )
    if train is None or dev is None:
        return NotRun(name, f"no {FILES['train' if train is None else 'dev'][0]} in {request.data}")
    source = Path(train)
    if request.limit is not None:
        source = request.out / "data" / f"train-{request.limit}.conll"
        make_folder(source.parent)
        lines = first_sentences((line for _, line in read_lines(Path(train))), request.limit)
        text = "".join(f"{line}\n" for line in lines)
        replace_text(source, text)
    task = dataclasses.replace(TaggingTask(), context="document")
    seeds = request.seeds or SEEDS
    if name == NAME:
        points = GRID if request.grid == "paper" else (DEFAULT_POINT,)
        grid = grid_settings(request, task, points, source, dev)
        return Experiment(NAME, grid, seeds, "mean", {} if test is None else {"test": test})
    # Overrides are not applied: they are settings of fine-tuning.
    choice = CHOICES[name]
    try:
        encoder = read_hf_config(resolve(resolve_run(request.model))).encoder
        chosen_layers(choice, encoder.depth)
    except ConfigError as error:
        return NotRun(name, error.what)
    settings = FeatureConfig(
        model=request.model, train=str(source), dev=dev, task=task, layers=choice, tagger=TAGGER
    )
    return Experiment(name, (settings,), seeds, "mean")


def first_sentences(lines: Iterable[str], count: int) -> Iterator[str]:
    """Yield the lines of the first `count` sentences.

    An empty line ends a sentence; a "-DOCSTART-" line is not one.
    """
    inside, seen = False, 0
    for line in lines:
        yield line
        ends = inside and not line.strip()
        inside = bool(line.strip()) and not line.startswith("-DOCSTART-")
        seen += ends
        if seen == count:
            return
