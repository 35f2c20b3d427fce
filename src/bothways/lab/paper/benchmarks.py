"""The paper's fine-tuning benchmarks SQuAD, SWAG and CoNLL-2003; GLUE is in `paper.glue`.

SQuAD 1.1 and 2.0 (Devlin et al. 2018, sections 4.2 and 4.3, tables 2 and 3): three epochs with
batch 32, and two with batch 48; both with a learning rate of 5e-5. The no-answer threshold of 2.0
is the one with the highest F1 on dev.

SWAG (section 4.4, table 4): three epochs, a learning rate of 2e-5, batch 16.

CoNLL-2003 (section 5.3, table 7): each sentence is read with as much of the surrounding document as
fits, without a CRF; the first token of a word gives its tag. The setting is chosen on dev from the
grid of appendix A.3 by one run each; F1 is the mean of five restarts. Use a cased model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bothways.core.errors import ConfigError
from bothways.core.files import make_folder, replace_text
from bothways.data.text_io import read_lines
from bothways.hub.hf_config import read_hf_config
from bothways.hub.resolve import resolve, resolve_run
from bothways.lab.features.run import BiLSTMTagger, FeatureConfig
from bothways.lab.paper import experiment, published
from bothways.lab.paper.experiment import BenchmarkPlan, Experiment, GridPoint, NotRun, Request
from bothways.lab.sweeps.runs import write_rows
from bothways.model.layer_mix import LayerChoice, chosen_layers
from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.tagging.task import TaggingTask

SQUAD = {"v1.1": GridPoint(5e-5, 32, 3.0), "v2.0": GridPoint(5e-5, 48, 2.0)}
"""The setting of each version, by its name in file names."""
SQUAD_COLUMNS = {
    "1.1 EM": ("v1.1", "em"),
    "1.1 F1": ("v1.1", "f1"),
    "2.0 EM": ("v2.0", "em"),
    "2.0 F1": ("v2.0", "f1"),
}
SWAG, SWAG_POINT = "SWAG", GridPoint(2e-5, 16, 3.0)
NER = "CoNLL-2003"
NER_FILES = (("eng.train", "train.txt"), ("eng.testa", "valid.txt"), ("eng.testb", "test.txt"))
"""File names of the splits train, dev and test, the shared task's first."""
NER_GRID = tuple(
    GridPoint(rate, batch, epochs, length=512)
    for batch in (16, 32)
    for rate in (5e-5, 3e-5, 2e-5)
    for epochs in (2.0, 3.0, 4.0)
)
NER_POINT = GridPoint(5e-5, 32, 3.0, length=512)
"""The setting without the grid."""
NER_SEEDS = 5
LAYERS: dict[str, LayerChoice] = {
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


def squad_plan(request: Request) -> BenchmarkPlan:
    """Return the plan for train-v1.1.json, dev-v1.1.json and the same of v2.0."""
    experiments, task = list[Experiment | NotRun](), QuestionAnsweringTask()
    for version in request.chosen(tuple(SQUAD)):
        files = _splits(version, request, *((f"{x}-{version}.json",) for x in ("train", "dev")))
        if isinstance(files, NotRun):
            experiments.append(files)
            continue
        train, dev = files
        if request.limit is not None:
            rows = (
                {
                    "id": question.id,
                    "question": question.question,
                    "context": question.context,
                    "answers": {
                        "text": [text for text, _ in question.answers],
                        "answer_start": [start for _, start in question.answers],
                    },
                }
                for question in itertools.islice(task.read(train).examples, request.limit)
            )
            file = request.out / "data" / f"train-{version}-{request.limit}.jsonl"
            train = str(write_rows(file, rows))
        grid = experiment.grid_settings(request, task, [SQUAD[version]], train, dev)
        experiments.append(Experiment(version, grid, request.seeds or 1))
    return BenchmarkPlan(
        "SQuAD (sections 4.2 and 4.3, tables 2 and 3)",
        tuple(experiments),
        tuple(SQUAD_COLUMNS),
        {experiment.MEASURED: SQUAD_COLUMNS},
        published.TABLES["SQUAD"],
        notes=(
            "These runs are scored on dev, with one model and without TriviaQA: compare them to "
            "such rows.",
        ),
    )


def swag_plan(request: Request) -> BenchmarkPlan:
    """Return the plan for train.csv and val.csv, the file names of SWAG's authors."""
    request.chosen((SWAG,))
    files = _splits(SWAG, request, ("train.csv", "train.jsonl"), ("val.csv", "val.jsonl"))
    task = ChoiceTask()

    def rows(source: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the first examples as rows."""
        for row in itertools.islice(task.read(source).examples, limit):
            yield {"context": row.context, "endings": list(row.endings), "label": row.label}

    if isinstance(files, NotRun):
        entry: Experiment | NotRun = files
    else:
        train, dev = files
        if request.limit is not None:
            # Both are rewritten: the columns of dev are read like those of training.
            data, limit = request.out / "data", request.limit
            train = str(write_rows(data / f"train-{limit}.jsonl", rows(train, limit)))
            dev = str(write_rows(data / "val.jsonl", rows(dev)))
        grid = experiment.grid_settings(request, task, [SWAG_POINT], train, dev)
        entry = Experiment(SWAG, grid, request.seeds or 1)
    return BenchmarkPlan(
        "SWAG (section 4.4, table 4)",
        (entry,),
        ("dev",),
        {experiment.MEASURED: {"dev": (SWAG, "accuracy")}},
        published.TABLES["SWAG"],
        notes=("The labels of the test set are not public; these runs are scored on dev.",),
    )


def ner_plan(request: Request) -> BenchmarkPlan:
    """Return the plan for files with the word first, the tag last, and -DOCSTART- lines."""
    experiments = tuple(_entities(name, request) for name in request.chosen((NER, *LAYERS)))
    measured: dict[str, Mapping[str, tuple[str, str]]] = {
        entry.name: {"dev": (entry.name, "f1")} for entry in experiments
    }
    if NER in measured:
        measured[NER] = {"dev": (NER, "f1"), "test": (NER, "test/f1")}
    return BenchmarkPlan(
        "Named entities, CoNLL-2003 (section 5.3, table 7)",
        experiments,
        ("dev", "test"),
        {
            f"this run, {'fine-tuned' if name == NER else name}": cells
            for name, cells in measured.items()
        },
        published.TABLES["NER"],
        seeds=NER_SEEDS,
    )


def _entities(name: str, request: Request) -> Experiment | NotRun:
    files = _splits(name, request, *NER_FILES[:2])
    if isinstance(files, NotRun):
        return files
    (train, dev), test = files, experiment.find_file(request.data, *NER_FILES[2])
    if request.limit is not None:
        lines = first_sentences((line for _, line in read_lines(Path(train))), request.limit)
        file = request.out / "data" / f"train-{request.limit}.conll"
        make_folder(file.parent)
        replace_text(file, "".join(f"{line}\n" for line in lines))
        train = str(file)
    task = dataclasses.replace(TaggingTask(), context="document")
    seeds = request.seeds or NER_SEEDS
    if name == NER:
        points = NER_GRID if request.grid == "paper" else (NER_POINT,)
        grid = experiment.grid_settings(request, task, points, train, dev)
        return Experiment(NER, grid, seeds, "mean", {} if test is None else {"test": test})
    # Overrides are not applied: they are settings of fine-tuning.
    try:
        encoder = read_hf_config(resolve(resolve_run(request.model))).encoder
        chosen_layers(LAYERS[name], encoder.depth)
    except ConfigError as error:
        return NotRun(name, error.what)
    settings = FeatureConfig(
        model=request.model, train=train, dev=dev, task=task, layers=LAYERS[name], tagger=TAGGER
    )
    return Experiment(name, (settings,), seeds, "mean")


def first_sentences(lines: Iterable[str], count: int) -> Iterator[str]:
    """Yield the lines of the first `count` sentences.

    An empty line ends a sentence; a "-DOCSTART-" line is not one.
    """
    inside, sentence_count = False, 0
    for line in lines:
        yield line
        ends = inside and not line.strip()
        inside = bool(line.strip()) and not line.startswith("-DOCSTART-")
        sentence_count += ends
        if sentence_count == count:
            return


def _splits(name: str, request: Request, *splits: tuple[str, ...]) -> tuple[str, str] | NotRun:
    """Return the files of train and dev; each split has one or more names."""
    train, dev = (experiment.find_file(request.data, *names) for names in splits)
    if train is None or dev is None:
        missing = splits[0 if train is None else 1]
        return NotRun(name, f"no {missing[0]} in {request.data}")
    return train, dev
