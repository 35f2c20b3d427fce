"""A fine-tuned model folder at work: scored on labelled data, or predicting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from bothways.core import config as configs
from bothways.core.errors import FolderError
from bothways.core.hardware import choose_device
from bothways.interop.folder import RECORD, Loaded, load_model
from bothways.recipes.finetune_setup import model_folder
from bothways.tasks.classify import Classify
from bothways.tasks.examples import NOT_NAMED, Columns, Example, Reading, read_examples
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.preflight import check_model, settle
from bothways.tasks.task import PACE, Metrics, Pace, Tally, evaluate, predict
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Classifier:
    """A model folder that classifies.

    Attributes:
        task: in evaluation mode, on its device.
        columns: what those were called that it was trained on; a folder that others made does not say.
    """

    task: Classify
    columns: Columns

    def read(self, source: str, columns: Columns = NOT_NAMED, *, labelled: bool) -> Reading:
        """The examples of a file, a Hub data set or ("-") the standard input; errors as `tasks.examples.read_examples`."""
        return read_examples(source, columns, usual=self.columns, labelled=labelled)

    def evaluate(self, reading: Reading, pace: Pace = PACE, tally: Tally | None = None) -> Metrics:
        """The metrics on labelled examples, in constant memory.

        Raises:
            DataError: an example without a label, or with one that is none of the model's.
        """
        return evaluate(self.task, reading.examples, pace, tally)

    def predict(
        self, reading: Reading, pace: Pace = PACE, tally: Tally | None = None
    ) -> Iterator[tuple[Example, ClassPrediction]]:
        """Examples with their predictions, in their order, in constant memory."""
        return predict(self.task, reading.examples, pace, tally)


@dataclass(frozen=True)
class _Record:
    """What `bothways.json` says that predictions need."""

    length: int | None = None
    columns: Columns = NOT_NAMED


def open_classifier(folder: str, *, length: int | None = None, device: str = "auto") -> Classifier:
    """A model folder, the folder of a fine-tuning run, or a Hub id, as a classifier.

    Args:
        length: the longest sequence; none means as in training, else all of the model's positions.

    Raises:
        FolderError: it cannot be read, or holds no trained classifier.
        TokenizerError: its tokenizer cannot be read.
        BothwaysError: the tokenizer has more ids than the model.
        ConfigError: the length is beyond the model's positions, or there is no such device.
    """
    loaded = load_model(model_folder(folder))
    _check(loaded)
    known = [field.name for field in dataclasses.fields(_Record)]
    record = configs.read(_Record, {name: loaded.extra[name] for name in known if name in loaded.extra}, where=RECORD)
    longest = length or record.length or loaded.model.config.position.most
    tokenizer = Tokenizer.load(loaded.folder)
    settle(check_model(loaded.model.config, tokenizer, longest))
    task = Classify(loaded.model, tokenizer, loaded.labels, longest).to(choose_device(device))
    return Classifier(task.eval(), record.columns)


def _check(loaded: Loaded) -> None:
    if not {"pooler", "labels"} <= set(loaded.model.heads):
        what = f"holds no classifier: its heads are {', '.join(loaded.model.heads) or 'none'}"
        raise FolderError(what, where=loaded.folder, fix="Fine-tune it first: bothways finetune MODEL TRAIN")
    if loaded.problem not in (None, "single_label_classification"):
        what = f"its label head is for {loaded.problem}, not for one of several classes"
        raise FolderError(what, where=loaded.folder, fix="Give a model that was trained for classification.")
