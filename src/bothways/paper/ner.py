"""CoNLL-2003 as Devlin et al. 2018 fine-tune on it (section 5.3, table 7).

As much of the document around each sentence as fits, no CRF, a tag from the first token of each word. The setting is chosen on
dev from the grid of appendix A.3 by one run each; its F1 is the mean of five restarts. Use a cased model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from bothways.core.atomic_files import replace_file
from bothways.core.errors import ConfigError
from bothways.data.text_io import read_lines
from bothways.finetuning.bilstm_tagger import BiLSTMTagger
from bothways.finetuning.feature_data import FeatureConfig
from bothways.hub.hf_config import read_hf_config
from bothways.hub.resolve import resolve, resolve_run
from bothways.model.layer_mix import LayerChoice, chosen_layers
from bothways.paper import published
from bothways.paper.experiment import (
    BenchmarkPlan,
    Experiment,
    Frozen,
    NotRun,
    Point,
    Request,
    find,
    grid_of,
)
from bothways.tasks.tagging.task import TaggingTask

NAME = "CoNLL-2003"
FILES = {
    "train": ("eng.train", "train.txt"),
    "dev": ("eng.testa", "valid.txt"),
    "test": ("eng.testb", "test.txt"),
}
"""What the splits are called, by the shared task and elsewhere."""
LENGTH = 512
GRID = tuple(
    Point(rate, batch, epochs, LENGTH)
    for batch in (16, 32)
    for rate in (5e-5, 3e-5, 2e-5)
    for epochs in (2.0, 3.0, 4.0)
)
ALONE = Point(5e-5, 32, 3.0, LENGTH)
"""The setting without a grid."""
SEEDS = 5
CHOICES: dict[str, LayerChoice] = {
    "embeddings": "embeddings",
    "second-to-last": "second_to_last",
    "last": "last",
    "sum-last-four": "weighted_last_four",
    "concat-last-four": "concat_last_four",
    "sum-all": "weighted_all",
}
"""The feature-based rows of table 7, as tasks."""
TAGGER = BiLSTMTagger()
"""Two layers of 768, as the paper has them."""
MEASURED = {
    "this run, fine-tuned": {"dev": (NAME, "f1"), "test": (NAME, "test/f1")},
    **{f"this run, {choice}": {"dev": (choice, "f1")} for choice in CHOICES},
}


def ner_plan(request: Request) -> BenchmarkPlan:
    """The one experiment, of columns with the word first and the tag last, documents begun by -DOCSTART-."""
    title = "Named entities, CoNLL-2003 (section 5.3, table 7)"
    experiments = tuple(_experiment(name, request) for name in request.chosen((NAME, *CHOICES)))
    measured = {
        row: cells
        for row, cells in MEASURED.items()
        if any(e.name == cells["dev"][0] for e in experiments)
    }
    return BenchmarkPlan(title, experiments, ("dev", "test"), measured, published.NER, seeds=SEEDS)


def _experiment(name: str, request: Request) -> Experiment | Frozen | NotRun:
    found = {split: find(request, *names) for split, names in FILES.items()}
    train, dev, test = found["train"], found["dev"], found["test"]
    if train is None or dev is None:
        return NotRun(name, f"no {FILES['train' if train is None else 'dev'][0]} in {request.data}")
    source: Path | str = train
    if request.limit is not None:
        source = request.out / "data" / f"train-{request.limit}.conll"
        source.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(
            f"{line}\n"
            for line in first_sentences(
                (line for _, line in read_lines(Path(train))), request.limit
            )
        )
        replace_file(source, lambda file: file.write_text(lines, encoding="utf8"))
    definition = dataclasses.replace(TaggingTask(), context="document")
    if name != NAME:
        return _frozen(
            name,
            request,
            FeatureConfig(model=request.model, train=str(source), dev=dev, task=definition),
        )
    points = GRID if request.grid == "paper" else (ALONE,)
    grid = grid_of(request, definition, points, source, dev)
    others = {} if test is None else {"test": test}
    return Experiment(NAME, grid, request.seeds or SEEDS, "mean", others)


def _frozen(name: str, request: Request, base: FeatureConfig) -> Frozen | NotRun:
    """Without the overrides, which are about fine-tuning."""
    choice = CHOICES[name]
    try:
        chosen_layers(choice, read_hf_config(resolve(resolve_run(request.model))).encoder.depth)
    except ConfigError as error:
        return NotRun(name, error.what)
    return Frozen(
        name, dataclasses.replace(base, layers=choice, tagger=TAGGER), request.seeds or SEEDS
    )


def first_sentences(lines: Iterable[str], count: int) -> Iterator[str]:
    """The lines of the first sentences; an empty line ends one, and "-DOCSTART-" is none."""
    inside, seen = False, 0
    for line in lines:
        yield line
        ends = inside and not line.strip()
        inside = bool(line.strip()) and not line.startswith("-DOCSTART-")
        seen += ends
        if seen == count:
            return
