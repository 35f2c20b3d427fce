"""A task from outside the package: checked, trained, predicted, reported and written like any other."""

import dataclasses
import json
import random
from collections.abc import Sequence as Many

import httpx
import pytest

import bothways
from bothways.core.errors import ConfigError, FolderError
from bothways.data.loader import ExampleBudget
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import label
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import Head, LabelHead
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.model.positions import Learned
from bothways.prediction.analysis.analyses import ClassAnalysis
from bothways.prediction.analysis.report import analyse, analysis_of
from bothways.prediction.bulk.parts import part_content
from bothways.prediction.engine import evaluate_task
from bothways.prediction.predictor import Predictor
from bothways.serving import app
from bothways.serving.shapes import PREDICTIONS
from bothways.tasks.predictions import ClassPrediction, json_schema, prediction_type
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Epochs
from bothways.training.step_cost import forward_flops
from running_server import running
from toy_folder import make_folder
from toy_relation import RelationExample, RelationHead, RelationTask, TopicTask, serve_once
from toy_task import VOCABULARY, WORDS, fit_task, make_tokenizer
from toy_training import exit_code

CONFIG = EncoderConfig(len(VOCABULARY), 32, 1, 2, 64, position=Learned(16), initial_range=0.2)
LENGTH = 12


def make_relations(count: int, seed: int) -> list[RelationExample]:
    """The relation says which of the two words comes first in the alphabet; others distract."""
    draw, examples = random.Random(seed), []
    for number in range(count):
        words = tuple(draw.sample(WORDS, 6))
        first, second = draw.sample(range(6), 2)
        known = "before" if words[first] < words[second] else "after"
        examples.append(RelationExample(words, first, second, known, f"made:{number}"))
    return examples


def test_a_task_and_a_head_of_ones_own_are_trained_and_predict(tmp_path):
    tokenizer, task = make_tokenizer(tmp_path), RelationTask()
    train, dev = make_relations(200, 0), make_relations(60, 1)
    data = label(task, tokenizer, train, dev, LENGTH)
    training = dataclasses.replace(
        finetune_adam(), until=Epochs(5.0), optimizer=AdamW(lr=5e-3), precision="fp32"
    )
    method = FinetuneConfig(training, LENGTH, ExampleBudget(16), metric="accuracy")
    result = fit_task(CONFIG, data, method, device="cpu")
    assert result.metrics["accuracy"] > 0.9
    task_model = result.task_model
    assert evaluate_task(task_model, dev) == result.metrics
    predict = Predictor(task_model)
    words = ["cat", "ape", "dog"]
    rows = [{"words": words, "first": a, "second": b} for a, b in ((1, 2), (2, 1))]
    expected = predict(rows)
    assert expected[0].label == "before"

    analysed = analyse(task_model, dev)
    assert analysed.metrics == result.metrics
    assert analysed.baseline["accuracy"] == task.baseline(dev)["accuracy"]
    assert analysed.sections

    place = result.save(tmp_path / "saved")
    assert exit_code(serve_once, place, rows, tmp_path / "answers.json") == 0
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert answers == [prediction.to_json() for prediction in expected]
    loaded = load_model(place, heads=(RelationHead(2),))
    assert loaded.labels == ("after", "before")
    again = task.bind(loaded.model, loaded.tokenizer, loaded.labels, LENGTH)
    assert Predictor(again)(rows) == expected
    assert evaluate_task(again, dev) == result.metrics
    with pytest.raises(FolderError, match=r"bothways\.heads\.0.*: unknown kind 'relation'"):
        load_model(place)
    with pytest.raises(FolderError, match=r"bothways\.heads: holds .*'count': 2.* is given"):
        load_model(place, heads=(RelationHead(3),))


def test_reports_files_and_routes_derive_from_its_declaration(tmp_path):
    prediction = ClassPrediction("before", 1, {"after": 0.25, "before": 0.75})
    assert issubclass(prediction_type(RelationTask), ClassPrediction)
    assert json_schema(prediction_type(RelationTask)) == PREDICTIONS["classify"]
    assert part_content("parquet", [prediction], None, {}, ()).startswith(b"PAR1")
    tokenizer = make_tokenizer(tmp_path)
    model = Model(CONFIG, (RelationHead(2),))
    analysis = analysis_of(RelationTask().bind(model, tokenizer, ("after", "before"), LENGTH))
    assert isinstance(analysis, ClassAnalysis)


def test_a_task_without_columns_is_trained_on_rows(tmp_path):
    make_folder(tmp_path / "bert")
    examples = make_relations(16, 0)
    rows = [{name: value for name, value in vars(e).items() if name != "where"} for e in examples]
    for data in (rows, examples):
        result = bothways.finetune(
            tmp_path / "bert", data, data, RelationTask(), epochs=1, lr=1e-3, progress=False
        )
        assert len(result.predictor()(data)) == len(data)


def test_a_server_refuses_requests_for_a_task_without_an_entry(tmp_path):
    model = Model(CONFIG, (LabelHead(2),))
    task_model = TopicTask().bind(model, make_tokenizer(tmp_path), ("one", "two"), LENGTH)
    with running(app(Predictor(task_model))) as url:
        answer = httpx.post(url + "/", json={"inputs": "ape"})
        assert answer.json()["error"]["code"] == "wrong_task"
        assert "post" not in httpx.get(url + "/openapi.json").json()["paths"]["/"]


@dataclasses.dataclass(frozen=True)
class UnnamedOutput(RelationTask):
    """Has a head with an output that no label names."""

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (RelationHead(len(labels) + 1),)


def test_labels_that_do_not_fit_the_head_are_found_before_training(tmp_path):
    task, examples = UnnamedOutput(), make_relations(20, 0)
    data = label(task, make_tokenizer(tmp_path), examples, examples[:4], LENGTH)
    method = FinetuneConfig(finetune_adam(), LENGTH, ExampleBudget(16), metric="accuracy")
    wanted = r"relation has 2 labels, and its head 'relation' 3 outputs\n  A task names each output"
    with pytest.raises(ConfigError, match=wanted):
        fit_task(CONFIG, data, method, device="cpu")


def test_its_parameters_and_operations_are_counted():
    head = RelationHead(2)
    with_head, without = (parameter_table(CONFIG, heads) for heads in ((head,), ()))
    assert with_head.total - without.total == 2 * (2 * CONFIG.width + 1)
    few, many = (forward_flops(CONFIG, (RelationHead(count),), 8, 0.0) for count in (2, 4))
    assert many > few
