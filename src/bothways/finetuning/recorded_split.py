"""The dev data that a finished run split from its training data, read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bothways.core.config import reader as configs
from bothways.core.errors import DataError, FolderError
from bothways.core.json_reader import read_object
from bothways.finetuning.prepare import FinetuneConfig, read_split
from bothways.finetuning.splits import Split
from bothways.hub.hf_config import RECORD
from bothways.hub.resolve import resolve, resolve_run
from bothways.prediction.predictor import open_learner
from bothways.tasks.base import examples_fingerprint


@dataclass(frozen=True)
class RecordedSplit:
    """The dev data of a run: its name, such as "20% of t.csv", and its examples."""

    name: str
    examples: list[Any]


def read_recorded_split(folder: str) -> RecordedSplit | None:
    """Return the dev data of a run; None if it was not split from the training data.

    Args:
        folder: a model folder, or the folder of a run.

    Raises:
        DataError: the training data cannot be read, or is not what the run was trained on.
        FolderError: the folder or its record cannot be read.
    """
    record = resolve(resolve_run(folder)) / RECORD
    values = read_object(record, FolderError) if record.exists() else {}
    if not isinstance(split := values.get("split"), dict):
        return None
    try:
        train, dev = str(split["train"]), str(split["dev"])
        expected = values["data"]["dev"]["sha256"]
        how = configs.read(Split, {name: split[name] for name in ("group", "seed")})
    except (KeyError, TypeError) as error:
        raise FolderError("is not the record of a split", where=record) from error
    task = open_learner(folder).task
    settings = FinetuneConfig(model=folder, train=train, dev=dev, split=how, task=task)  # type: ignore[arg-type]
    examples = read_split(settings).dev
    if examples_fingerprint(examples) != expected:
        what = "is not what the run was trained on: its dev data cannot be split from it again"
        raise DataError(what, where=train, fix="Give the earlier file, or a file to evaluate on.")
    return RecordedSplit(settings.sources["dev"], examples)
