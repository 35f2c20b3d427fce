"""Runs with so many labels that nothing may be of size labels², and work that is saved first."""

import tracemalloc
from dataclasses import replace

import pytest

from bothways.core.errors import DataError
from bothways.finetuning import run as fitting
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.run import finetune
from bothways.prediction.analysis.analyses import ClassAnalysis
from bothways.prediction.engine import window_size
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.text_task import TextExample
from bothways.training.schedules import Steps
from toy_folder import file_settings, make_folder

MANY = 5_000


def test_scores_of_many_labels_take_memory_of_the_pairs_that_occur():
    labels = tuple(str(number) for number in range(MANY))
    examples = [TextExample("a text", label=label) for label in labels[:500]]
    probabilities = {label: 1 / MANY for label in labels}
    results = [(one, ClassPrediction("7", 7, probabilities)) for one in examples]
    task, analysis = ClassificationTask(), ClassAnalysis(labels)
    tracemalloc.start()
    scores = task.score(results, labels)
    baseline = task.baseline(examples)
    for result in results:
        analysis.add(*result)
    assert analysis.sections()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scores["accuracy"] == baseline["accuracy"] == 1 / 500
    assert peak < 2000 * MANY
    assert window_size(task, labels * 5) * 5 * MANY < 10**7


def test_the_model_is_saved_before_it_is_scored(tmp_path, monkeypatch):
    training = replace(FinetuneConfig().training, until=Steps(1))
    settings = file_settings(make_folder(tmp_path / "bert"), tmp_path, 16, 16, training=training)

    def fail(*_: object, **__: object) -> None:
        raise DataError("no memory for metrics")

    monkeypatch.setattr(fitting, "_conclude", fail)
    with pytest.raises(DataError):
        finetune(settings, tmp_path / "run")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
