"""Fine-tuning for scores, several labels and choices from files: it opens again as it was, and flaws stop before training."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from bothways.core.errors import BothwaysError
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.run import FinetuneResult, finetune
from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction.opening import open_task, open_task_model
from bothways.tasks.catalogue import Trainable
from bothways.tasks.choice.task import ChoiceColumns, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelTask
from bothways.tasks.regression.task import RegressionTask
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Epochs
from toy_folder import BAD, FILLERS, GOOD, make_examples, make_folder, make_rows, make_tokenizer

FAST = dataclasses.replace(
    finetune_adam(), until=Epochs(1.0), optimizer=AdamW(lr=3e-3), precision="fp32"
)


def write(file: Path, rows: list[dict[str, object]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def scored(count: int, seed: int) -> list[dict[str, object]]:
    """A good film has five points, a bad one none."""
    return [
        {"text": e.text, "score": 5.0 if e.label == "pos" else 0.5}
        for e in make_examples(count, seed)
    ]


def several(count: int, seed: int) -> list[dict[str, object]]:
    draw, rows = random.Random(seed), []
    for _ in range(count):
        names = [name for name in ("bad", "good") if draw.random() < 0.5]
        words = draw.choices(FILLERS[:-1], k=4)
        words += [draw.choice({"bad": BAD, "good": GOOD}[name]) for name in names]
        draw.shuffle(words)
        rows.append({"text": " ".join(words), "labels": names})
    return rows


def questions(count: int, seed: int) -> list[dict[str, object]]:
    """The good ending is right."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        endings = [
            " ".join([draw.choice(BAD), *draw.choices(FILLERS[:-1], k=2)])
            for _ in range(draw.randint(2, 4))
        ]
        label = draw.randrange(len(endings))
        endings[label] = " ".join([*draw.choices(FILLERS[:-1], k=2), draw.choice(GOOD)])
        rows.append({"context": "the film was", "endings": endings, "label": label})
    return rows


def run(folder: Path, task: Trainable, make) -> tuple[FinetuneResult, str]:
    dev = write(folder / "dev.jsonl", make(40, 1))
    model = str(make_folder(folder / "bert", dropout=0.0))
    train = write(folder / "train.jsonl", make(64, 0))
    files = {"model": model, "train": train, "dev": dev}
    settings = FinetuneConfig(FAST, 16, task=task, **files)
    return finetune(settings, folder / "run", device="cpu"), dev


BALANCED = ClassificationTask(smoothing=0.1, weighting="balanced")


@pytest.mark.parametrize(
    ("task", "make", "metric", "kind"),
    [
        (RegressionTask(), scored, "spearman", "SequenceClassification"),
        (MultilabelTask(), several, "f1_micro", "SequenceClassification"),
        (ChoiceTask(), questions, "accuracy", "MultipleChoice"),
        (BALANCED, make_rows, "accuracy", "SequenceClassification"),
    ],
)
def test_a_finished_run_opens_again_as_it_was(tmp_path, task, make, metric, kind):
    done, dev = run(tmp_path, task, make)
    assert task.metric == metric
    assert metric in done.metrics
    opened = open_task(str(tmp_path / "run"))
    assert opened.task_model.task == done.task_model.task
    assert opened.task_model.task.name == task.name
    assert opened.task_model.labels == done.task_model.labels
    expected = pytest.approx(dict(done.metrics), rel=1e-4)
    assert opened.evaluate(opened.read(dev, labelled=True)) == expected
    results = opened.predict_examples(opened.read(dev, labelled=False))
    assert len([prediction.to_json() for _, prediction in results]) == 40
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["architectures"] == [f"BertFor{kind}"]


def test_flaws_are_in_one_message(tmp_path):
    bad = [
        {"context": "c", "endings": ["a", "b"], "label": 5},
        {"context": "c", "endings": ["a"], "label": 0},
    ]
    with pytest.raises(BothwaysError) as caught:
        run(tmp_path, ChoiceTask(), lambda count, seed: [*questions(20, seed), *bad])
    assert "2 labels are out of range: " in str(caught.value)
    assert "2 examples have fewer than two endings: " in str(caught.value)
    columns = ChoiceColumns("context", None, ("endings",), "label")
    assert ChoiceTask().read(str(tmp_path / "dev.jsonl")).task == ChoiceTask(columns)


@pytest.mark.parametrize(
    ("count", "problem", "expected"),
    [
        (1, "regression", RegressionTask()),
        (3, "multi_label_classification", MultilabelTask()),
        (3, None, ClassificationTask()),
    ],
)
def test_a_folder_of_others_is_for_what_its_head_is(tmp_path, count, problem, expected):
    encoder = EncoderConfig(26, 16, 1, 2, 32, position=Learned(32))
    model = Model(encoder, (PoolerHead(), LabelHead(count)))
    save_model(tmp_path / "model", model, make_tokenizer(tmp_path / "t"), problem=problem)
    assert open_task_model(str(tmp_path / "model")).task == expected
